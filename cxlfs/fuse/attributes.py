"""Attributes of the store in pyfuse3's form, and the meaning of set-ID bits.

Never here: reading or changing the store.
"""

from __future__ import annotations

import stat

import pyfuse3

from cxlfs.store.namespace import Attributes

CACHE_SECONDS = 86_400
"""How long the kernel may keep attributes and names (see ``page_cache``)."""

IO_SIZE_BYTES = 1 << 20
"""st_blksize: buffered writers (Python, stdio, cp) size their buffers by it."""

_SECTOR_BYTES = 512
_SET_ID = stat.S_ISUID | stat.S_ISGID


def entry_of(
    attributes: Attributes, cache_seconds: int = CACHE_SECONDS, name_seconds: int = CACHE_SECONDS
) -> pyfuse3.EntryAttributes:
    """``cache_seconds``: of the attributes; ``name_seconds``: of the name."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(attributes.ino)
    entry.generation = 0  # inode numbers are never used again
    entry.entry_timeout = name_seconds
    entry.attr_timeout = cache_seconds
    entry.st_mode = pyfuse3.ModeT(attributes.mode)
    entry.st_nlink = attributes.nlink
    entry.st_uid = attributes.uid
    entry.st_gid = attributes.gid
    entry.st_rdev = attributes.rdev
    entry.st_size = attributes.size
    entry.st_blksize = IO_SIZE_BYTES
    entry.st_blocks = sectors_of(attributes)
    entry.st_atime_ns = attributes.atime_ns
    entry.st_mtime_ns = attributes.mtime_ns
    entry.st_ctime_ns = attributes.ctime_ns
    entry.st_birthtime_ns = attributes.birth_ns
    return entry


def sectors_of(attributes: Attributes) -> int:
    """st_blocks: always in units of 512 bytes."""
    return -(-attributes.allocated_bytes // _SECTOR_BYTES)


def absent_entry() -> pyfuse3.EntryAttributes:
    """The answer to a lookup that the kernel may remember: there is no such name."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = pyfuse3.InodeT(0)
    entry.entry_timeout = CACHE_SECONDS
    return entry


def has_set_id(mode: int) -> bool:
    """A write by anyone but root must take bits away from a file of this mode."""
    return bool(mode & _SET_ID and stat.S_ISREG(mode))


def without_set_id(mode: int, *, keeps_group_mark: bool) -> int:
    """``mode`` after a write or a change of owner: set-user-ID is gone, and set-group-ID as well.
    Without group execution it is a mark, which those who may set it keep.
    """
    mode &= ~stat.S_ISUID
    keeps_group_mark = keeps_group_mark and not mode & stat.S_IXGRP
    return mode if keeps_group_mark else mode & ~stat.S_ISGID
