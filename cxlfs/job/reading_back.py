"""What a file of a mounted store is on the medium: every byte looked at there, at the speed of a
checksum where this process may look at the pages themselves.

    in place       all pages of the medium are compared with the checksums that were stored with
                   them, in memory of the store; these, put together, are that of the file
    or by the      read and summed: another user's daemon, another file system, a small file
    kernel

Never: which file, or what its checksum has to be (``files``).

Invariants
- Nothing is believed of a page that was not compared, here and now; no page cache is between.
- A file that is replaced meanwhile is read by the kernel, and so is one that is damaged: its mount
  has to know.
"""

from __future__ import annotations

import os
from pathlib import Path

from cxlfs import client
from cxlfs.durable import opened_file, promised_crc32c, size_and_crc32c
from cxlfs.errors import JobFilesError

STORED_FROM_BYTES = 1 << 20
"""Smaller files are read: to find out where one lies takes a few requests."""
COMMIT_XATTR = "user.cxlfs.commit"


def read_back(path: Path, size_wanted: int | None = None) -> tuple[int, int]:
    """Size in bytes, and CRC32C. Raises JobFilesError (it is no regular file, or not of the size
    that is wanted), OSError: EIO for damage.
    """
    with opened_file(path, JobFilesError) as (descriptor, size_bytes):
        if size_wanted not in {None, size_bytes}:
            raise JobFilesError(f"{path}: not of {size_wanted} bytes")
        found = _in_place(path) if size_bytes >= STORED_FROM_BYTES else None
        return size_and_crc32c(descriptor) if found is None else found


def _in_place(path: Path) -> tuple[int, int] | None:
    """None: not all of it is to be had so, or not all is well."""
    promised = promised_crc32c(path)
    if promised is None:
        return None
    try:
        stored = client.StoredFile(path)
        stored.verify(0, len(stored))
    except OSError:
        return None
    return (len(stored), promised) if promised_crc32c(path) == promised else None


def commit_of(path: Path) -> int:
    """The number of the store's commit that made it what it is; 0 elsewhere, and where it is not
    known.
    """
    try:
        return int(os.getxattr(path, COMMIT_XATTR))
    except (OSError, ValueError):
        return 0
