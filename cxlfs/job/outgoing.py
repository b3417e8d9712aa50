"""The files of a directory as they are sent: the store's own pages where these can be had, or what
was read of the files.

Never: which pieces there are (``pieces``), how they travel (``copying``).

Invariants
- A page that is sent as it lies was not compared with its checksum: who receives it compares all
  with the manifest, and ``blame`` finds out whose fault it is when that says no.
- What is sent as it lies is held there as long as a piece of it is on its way, whatever becomes of
  the file.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from pathlib import Path
from typing import Self

from cxlfs import client
from cxlfs.errors import JobFilesError
from cxlfs.job.files import Shard
from cxlfs.job.pieces import Part, size_of
from cxlfs.job.reading_back import STORED_FROM_BYTES


class _Source:
    """A file, and the pages of the store that it lies in, where they can be had. Raises OSError."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.stored: client.StoredFile | None = None
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if size_bytes >= STORED_FROM_BYTES:
            with contextlib.suppress(OSError):  # not here: it is read
                self.stored = client.StoredFile(path)

    def close(self) -> None:
        self.stored = None
        os.close(self.descriptor)


class Outgoing:
    """One file at a time, in their order. To find out where a large one lies takes a millisecond or
    two of waiting for requests: that is done while the one before is sent.
    """

    def __init__(self, directory: Path, shards: tuple[Shard, ...]) -> None:
        self._directory = directory
        self._shards = shards
        self._which = -1
        self._source: _Source | None = None
        self._opener = concurrent.futures.ThreadPoolExecutor(1, "cxlfs-open")
        self._opened: dict[int, concurrent.futures.Future[_Source]] = {}
        self._open_ahead(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opener.shutdown(cancel_futures=True)
        if self._source is not None:
            self._source.close()
        for opened in self._opened.values():
            if not opened.cancelled() and opened.exception() is None:
                opened.result().close()

    def in_place(self, parts: list[Part]) -> list[memoryview] | None:
        """A piece as it lies in the store, in one or more pieces of memory; None: it does not.
        Raises OSError.
        """
        if any(self._shards[part.shard].size_bytes < STORED_FROM_BYTES for part in parts):
            return None
        found: list[memoryview] = []
        for part in parts:
            stored = self._turn_to(part.shard).stored
            views = None if stored is None else stored.pieces(part.offset, part.size_bytes)
            if views is None:
                return None
            found += views
        return found

    def read(self, parts: list[Part], buffer: memoryview) -> memoryview:
        """A piece, read into ``buffer``. Raises JobFilesError, OSError: EIO for damage."""
        for part in parts:
            source, done = self._turn_to(part.shard), 0
            while done < part.size_bytes:
                view = buffer[part.begin + done : part.begin + part.size_bytes]
                found = os.preadv(source.descriptor, [view], part.offset + done)
                if not found:
                    raise JobFilesError(f"{source.path}: shorter than its manifest says")
                done += found
        return buffer[: size_of(parts)]

    def blame(self) -> None:
        """Behind a refusal: compare what was sent as it lay. Raises OSError: EIO, which says of
        which file.
        """
        for shard in self._shards:
            if shard.size_bytes >= STORED_FROM_BYTES:
                with contextlib.closing(self._open(shard)) as source:
                    if source.stored is not None:
                        source.stored.verify(0, len(source.stored))

    def _turn_to(self, which: int) -> _Source:
        if self._source is None or self._which != which:
            before, self._source = self._source, None
            if before is not None:
                before.close()
            opened = self._opened.pop(which, None)
            self._source = self._open(self._shards[which]) if opened is None else opened.result()
            self._which = which
            self._open_ahead(which + 1)
        return self._source

    def _open(self, shard: Shard) -> _Source:
        return _Source(self._directory / shard.name, shard.size_bytes)

    def _open_ahead(self, which: int) -> None:
        if which < len(self._shards) and self._shards[which].size_bytes >= STORED_FROM_BYTES:
            self._opened[which] = self._opener.submit(self._open, self._shards[which])
