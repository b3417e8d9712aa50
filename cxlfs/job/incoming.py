"""The files of another rank as they come in: stored, made durable, and read back from the medium.

    directly       stored and summed in one pass ─► closed, synced ─► all pages of the medium are
                   compared with these sums, and all the sums with the manifest's
    or else        summed, written ─► each stretch is synced, read back and summed while more comes:
    by the kernel  both are the manifest's

Never: which pieces there are (``pieces``); what becomes of the directory (``copying``).

Invariants
- ``judge`` returns when every byte of every file was read from the medium, behind its sync, and
  what was read has the checksum of the manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from cxlfs import client
from cxlfs.durable import opened_file, promised_crc32c, size_and_crc32c
from cxlfs.errors import JobFilesError
from cxlfs.job.files import Shard
from cxlfs.job.pieces import Part
from cxlfs.native import crc32c
from cxlfs.native.client import DirectFile

STRETCH_BYTES = 32 << 20
"""So much of a file is read back at once."""
READERS = 2
"""Threads that do, while more comes."""
DIRECT_FROM_BYTES = 1 << 20
"""Smaller files go through the kernel: room of their own, and a mapping, take a few requests."""

_Later = Callable[[Callable[[], None]], None]
"""Has something done in another thread: what it raises, ``judge`` does."""


class Incoming:
    """Files that are there, of their sizes. Pieces come in their order."""

    def __init__(self, directory: Path, shards: tuple[Shard, ...]) -> None:
        self._directory = directory
        self._shards = shards
        self._file: _File | None = None
        self._files: list[_File] = []
        self._compared: list[concurrent.futures.Future[None]] = []
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "cxlfs-read-back")
        for shard in shards:
            if not shard.size_bytes:
                self._begun(shard).end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._readers.shutdown(cancel_futures=True)
        for file in self._files:
            with contextlib.suppress(OSError):  # only of one that nobody wants
                file.close()

    def take(self, parts: list[Part], piece: memoryview) -> None:
        """Store what has come in. Raises OSError."""
        for part in parts:
            shard = self._shards[part.shard]
            if self._file is None:
                self._file = self._begun(shard)
            self._file.take(piece[part.begin : part.begin + part.size_bytes], part.offset)
            if part.offset + part.size_bytes == shard.size_bytes:
                file, self._file = self._file, None
                file.end()

    def judge(self) -> None:
        """Raises JobFilesError: what came in, or what is there now, is not what the manifest says;
        OSError.
        """
        for compared in self._compared:  # some add others behind themselves
            compared.result()

    def _begun(self, shard: Shard) -> _File:
        path = self._directory / shard.name
        descriptor = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        file: _File = _Written(path, shard, descriptor, self._later)
        if shard.size_bytes >= DIRECT_FROM_BYTES:
            with contextlib.suppress(OSError):  # not on a mounted store that offers it
                file = _Stored(path, shard, descriptor, DirectFile(descriptor), self._later)
        self._files = [*(file for file in self._files if not file.is_closed), file]
        return file

    def _later(self, task: Callable[[], None]) -> None:
        self._compared.append(self._readers.submit(task))


class _File(Protocol):
    is_closed: bool

    def take(self, data: memoryview, offset: int) -> None: ...

    def end(self) -> None:
        """All of it has come."""
        ...

    def close(self) -> None:
        """Idempotent. Raises OSError, closed all the same."""
        ...


class _Stored:
    """Directly: bytes are summed in the pass that stores them."""

    def __init__(
        self, path: Path, shard: Shard, descriptor: int, direct: DirectFile, later: _Later
    ) -> None:
        self._path = path
        self._shard = shard
        self._descriptor = descriptor
        self._direct = direct
        self._later = later
        self.is_closed = False

    def take(self, data: memoryview, offset: int) -> None:
        while data:
            taken = self._direct.write(data, offset) or os.pwrite(self._descriptor, data, offset)
            data, offset = data[taken:], offset + taken

    def end(self) -> None:
        self._later(self._read_back)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        try:
            self._direct.close()
        finally:
            os.close(self._descriptor)

    def _read_back(self) -> None:
        self.close()
        path, shard = self._path, self._shard
        _sync(path)
        try:
            stored = client.StoredFile(path)
        except OSError:
            _compare_by_reading(path, shard, 0, shard.size_bytes, 0, shard.crc32c)
            return
        if len(stored) != shard.size_bytes or not _is_summed_as(path, shard):
            raise JobFilesError(f"{path}: on arrival not what its manifest says")
        # It is held until the last of these is done.
        for begin in range(0, len(stored), STRETCH_BYTES):
            self._later(_comparison(stored, begin))


class _Written:
    """By the kernel."""

    def __init__(self, path: Path, shard: Shard, descriptor: int, later: _Later) -> None:
        self._path = path
        self._shard = shard
        self._descriptor = descriptor
        self._later = later
        self.is_closed = False
        self._sum = 0
        self._begin, self._sum_before = 0, 0
        """Of the stretch that is being written, and the checksum of what is before it."""

    def take(self, data: memoryview, offset: int) -> None:
        self._sum = crc32c(data, self._sum)
        end = offset + len(data)
        while offset < end:
            offset += os.pwrite(self._descriptor, data[offset - end :], offset)
        if end < self._shard.size_bytes and end - self._begin >= STRETCH_BYTES:
            self._end_stretch(end)

    def end(self) -> None:
        self.close()
        if self._sum != self._shard.crc32c:
            found, wanted = self._sum, self._shard.crc32c
            self._later(lambda: _refuse(self._path, f"CRC32C {found:08x}, not {wanted:08x}"))
        self._end_stretch(self._shard.size_bytes)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            os.close(self._descriptor)

    def _end_stretch(self, end: int) -> None:
        path, shard, wanted = self._path, self._shard, self._sum
        begin, before = self._begin, self._sum_before
        self._begin, self._sum_before = end, wanted

        def compare() -> None:
            _sync(path)
            _compare_by_reading(path, shard, begin, end, before, wanted)

        self._later(compare)


def _refuse(path: Path, reason: str) -> None:
    raise JobFilesError(f"{path}: on arrival {reason}")


def _sync(path: Path) -> None:
    with opened_file(path, JobFilesError) as (descriptor, _):
        os.fsync(descriptor)


def _is_summed_as(path: Path, shard: Shard) -> bool:
    """All checksums that were stored, put together, are that of the manifest."""
    return promised_crc32c(path) == shard.crc32c


def _comparison(stored: client.StoredFile, begin: int) -> Callable[[], None]:
    """Of the pages of the medium with the checksums that were stored with them."""
    return lambda: stored.verify(begin, min(STRETCH_BYTES, len(stored) - begin))


def _compare_by_reading(
    path: Path, shard: Shard, begin: int, end: int, sum_before: int, wanted: int
) -> None:
    with opened_file(path, JobFilesError) as (descriptor, size_bytes):
        found = size_and_crc32c(descriptor, begin, end, sum_before)
    is_right = found == (end - begin, wanted) and size_bytes == shard.size_bytes
    if is_right and end == shard.size_bytes:
        is_right = promised_crc32c(path) in {None, shard.crc32c}
    if not is_right:
        raise JobFilesError(f"{path}: read back, it is not what its manifest says")
