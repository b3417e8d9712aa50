"""The byte layout of the kernel's requests and replies that are served without libfuse.

Never here: what a request means, reading or writing /dev/fuse. Source: include/uapi/linux/fuse.h.

Invariants
- All numbers have the machine's own byte order and alignment is explicit: "=" formats.
"""

from __future__ import annotations

import enum
import struct

from cxlfs.fuse.attributes import CACHE_SECONDS, IO_SIZE_BYTES, sectors_of
from cxlfs.store.namespace import Attributes


class Opcode(enum.IntEnum):
    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    UNLINK = 10
    RENAME = 12
    OPEN = 14
    READ = 15
    WRITE = 16
    RELEASE = 18
    FSYNC = 20
    GETXATTR = 22
    FLUSH = 25
    CREATE = 35
    IOCTL = 39
    BATCH_FORGET = 42
    FALLOCATE = 43
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SYNCFS = 50


NUMBER = struct.Struct("=Q")
"""FORGET: lookups. RENAME: the new directory. The handle that FLUSH, RELEASE, ... begin with."""
NUMBER_AND_FLAGS = struct.Struct("=QII")
"""FSYNC: handle, flags. RENAME2: new directory, flags. GETATTR has its flags first."""
OPEN = struct.Struct("=II")
CREATE = struct.Struct("=IIII")
"""Flags, mode, umask, more flags; the name follows."""
READ = struct.Struct("=QQI20x")
WRITE = struct.Struct("=QQII8xI4x")
"""Handle, offset, size, flags, flags of the open file as they are now."""
WRITE_CACHE = 1 << 0
"""Of its flags: the kernel writes pages back, for nobody who waits for an error."""
GETXATTR = struct.Struct("=I4x")
"""Room for the value, 0: only its length is asked; the name follows. The length as an answer."""
BATCH_FORGET = struct.Struct("=I4x")
FORGET_ONE = struct.Struct("=QQ")
FALLOCATE = struct.Struct("=QQQI4x")
LSEEK = struct.Struct("=QQI4x")
COPY = struct.Struct("=QQQQQQQ")
"""Handle and offset in; inode, handle and offset out; length; flags."""

IOCTL = struct.Struct("=QIIQII")
"""Handle, flags, command, argument, bytes that follow, bytes of the answer."""
IOCTL_ANSWER = struct.Struct("=iIII")
"""What ioctl(2) returns, and three numbers that are for character devices in user space."""

WRITTEN = struct.Struct("=I4x")

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
FALLOC_KEEP_SIZE = 1
FALLOC_PUNCH_HOLE = 2
FALLOC_ZERO_RANGE = 16

OPEN_DIRECT_IO = 1 << 0
OPEN_KEEP_CACHE = 1 << 1
OPEN_NO_FLUSH = 1 << 5
"""Linux 5.16: close of a descriptor asks nothing."""
OPEN_PARALLEL_DIRECT_WRITES = 1 << 6

_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_ATTRIBUTES_REPLY = struct.Struct("=QI4x")
_ENTRY = struct.Struct("=QQQQII")
_OPENED = struct.Struct("=QIi")
_REPLY = struct.Struct("=IiQ")
_NAME_INVALID = struct.Struct("=QII")
_NOTIFY_INVALIDATE_NAME = 3
_NS = 1_000_000_000


def _attributes(attributes: Attributes) -> bytes:
    atime, atime_ns = divmod(attributes.atime_ns, _NS)
    mtime, mtime_ns = divmod(attributes.mtime_ns, _NS)
    ctime, ctime_ns = divmod(attributes.ctime_ns, _NS)
    return _ATTRIBUTES.pack(
        attributes.ino,
        attributes.size,
        sectors_of(attributes),
        # Times before 1970 are negative numbers in unsigned fields.
        atime & 0xFFFF_FFFF_FFFF_FFFF,
        mtime & 0xFFFF_FFFF_FFFF_FFFF,
        ctime & 0xFFFF_FFFF_FFFF_FFFF,
        atime_ns,
        mtime_ns,
        ctime_ns,
        attributes.mode,
        attributes.nlink,
        attributes.uid,
        attributes.gid,
        attributes.rdev,
        IO_SIZE_BYTES,
        0,
    )


def attributes_reply(attributes: Attributes, cache_seconds: int = CACHE_SECONDS) -> bytes:
    return _ATTRIBUTES_REPLY.pack(cache_seconds, 0) + _attributes(attributes)


def entry_reply(
    attributes: Attributes | None,
    cache_seconds: int = CACHE_SECONDS,
    *,
    name_seconds: int = CACHE_SECONDS,
) -> bytes:
    """None: there is no such name, which the kernel may remember. ``cache_seconds``: of the
    attributes; ``name_seconds``: of the name.
    """
    if attributes is None:
        return _ENTRY.pack(0, 0, CACHE_SECONDS, 0, 0, 0) + bytes(_ATTRIBUTES.size)
    entry = _ENTRY.pack(attributes.ino, 0, name_seconds, cache_seconds, 0, 0)
    return entry + _attributes(attributes)


def opened_reply(handle: int, *, direct: bool, keep_cache: bool, writable: bool) -> bytes:
    flags = OPEN_KEEP_CACHE if keep_cache else 0
    if not writable:
        flags |= OPEN_NO_FLUSH  # which would say nothing
    if direct:
        flags |= OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES
    return _OPENED.pack(handle, flags, 0)


def name_notification(parent: int, name: bytes) -> bytes:
    """FUSE_NOTIFY_INVAL_ENTRY: what the kernel knows of a name is not so any more. A notification
    looks like a reply to request 0, with its code in the place of the error.
    """
    length = _REPLY.size + _NAME_INVALID.size + len(name) + 1
    header = _REPLY.pack(length, _NOTIFY_INVALIDATE_NAME, 0)
    return header + _NAME_INVALID.pack(parent, len(name), 0) + name + b"\0"


def names(arguments: bytes | memoryview, start: int) -> list[bytes]:
    """The names, each ended by a zero, from ``start`` on."""
    return bytes(arguments[start:]).split(b"\0")[:-1]
