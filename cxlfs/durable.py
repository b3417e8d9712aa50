"""Files of a mounted directory that are whole and durable under their names; and their checksums.

Never: what a file means; opens anything but regular files for reading.

Invariants
- What has its final name is complete and durable: it was written beside it, synced and renamed, and
  the directory was synced behind the rename (where rename is a commit point itself, as in a cxlfs
  mount, that is spared: it costs as much as all the rest).
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import CxlfsError
from cxlfs.native import crc32c

CRC32C_XATTR = "user.cxlfs.crc32c"
READ_BYTES = 4 << 20
_CACHED_BYTES = 1 << 20
"""A buffer that stays in the processor's cache."""


def sync_directory(path: Path) -> None:
    """What it names now is durable. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, data: bytes) -> None:
    """Under its name all at once; what was there before is replaced. Raises OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_native_id()}.tmp")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    is_in_store = promised_crc32c(beside) is not None
    beside.replace(path)
    if not is_in_store:
        sync_directory(path.parent)


@contextlib.contextmanager
def opened_file(path: Path, refused: type[CxlfsError]) -> Iterator[tuple[int, int]]:
    """A descriptor for reading, and the size in bytes. A symbolic link is not followed.

    Raises ``refused`` (it is no regular file), OSError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise refused(f"{path}: not a regular file")
        yield descriptor, status.st_size
    finally:
        os.close(descriptor)


def size_and_crc32c(
    descriptor: int, begin: int = 0, end: int = sys.maxsize, seed: int = 0
) -> tuple[int, int]:
    """Of every byte as it is read, from ``begin`` to ``end`` or that of the file; ``seed``: the
    checksum of what is before. Raises OSError.
    """
    buffer, at, found = memoryview(bytearray(_CACHED_BYTES)), begin, seed
    while count := os.preadv(descriptor, [buffer[: end - at]], at):
        found = crc32c(buffer[:count], found)
        at += count
    return at - begin, found


def promised_crc32c(path: Path) -> int | None:
    """What a cxlfs mount says that the content has to be; None elsewhere, and of what is being
    written.
    """
    with contextlib.suppress(OSError, ValueError):
        return int(os.getxattr(path, CRC32C_XATTR), 16)
    return None
