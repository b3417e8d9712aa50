"""The files of a directory as they are sent: the store's own pages where these can be had, or what
was read of the files.

Never: which pieces there are (``pieces``), how they travel (``copying``).

Invariants
- A page that is sent as it lies was not compared with its checksum: who receives it compares all
  with the manifest, and ``blame`` finds out whose fault it is when that says no.
- What is mapped stays as long as a piece of it is on its way, whatever becomes of the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from cxlfs import client
from cxlfs.errors import JobFilesError
from cxlfs.job.files import Shard
from cxlfs.job.pieces import Part, size_of

MAPPED_FROM_BYTES = 1 << 20
"""Smaller files are read: to map one takes a few requests."""


class Outgoing:
    """One file at a time, in their order."""

    def __init__(self, directory: Path, shards: tuple[Shard, ...]) -> None:
        self._directory = directory
        self._shards = shards
        self._which = -1
        self._descriptor = -1
        self._mapped: client.MappedFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def in_place(self, parts: list[Part]) -> memoryview | None:
        """A piece as it lies in the store; None: not in one piece of memory. Raises JobFilesError,
        OSError.
        """
        if len(parts) != 1:
            return None
        (part,) = parts
        self._turn_to(part.shard)
        if self._mapped is None:
            return None
        return self._mapped[part.offset : part.offset + part.size_bytes]

    def read(self, parts: list[Part], buffer: memoryview) -> memoryview:
        """A piece, read into ``buffer``. Raises JobFilesError, OSError: EIO for damage."""
        for part in parts:
            self._turn_to(part.shard)
            done = 0
            while done < part.size_bytes:
                view = buffer[part.begin + done : part.begin + part.size_bytes]
                found = os.preadv(self._descriptor, [view], part.offset + done)
                if not found:
                    raise self._shorter(part.shard)
                done += found
        return buffer[: size_of(parts)]

    def blame(self) -> None:
        """Behind a refusal: compare what was sent as it lay. Raises OSError: EIO, which says of
        which file.
        """
        for shard in self._shards:
            if shard.size_bytes >= MAPPED_FROM_BYTES:
                with client.map(self._directory / shard.name, client.Verify.NO) as mapped:
                    mapped.verify()

    def _turn_to(self, which: int) -> None:
        if self._which == which:
            return
        self._close()
        shard = self._shards[which]
        path = self._directory / shard.name
        self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if shard.size_bytes >= MAPPED_FROM_BYTES:
            mapped = client.map(path, client.Verify.NO)
            if mapped.direct:
                self._mapped = mapped
                if len(mapped) < shard.size_bytes:
                    raise self._shorter(which)
        self._which = which

    def _shorter(self, which: int) -> JobFilesError:
        path = self._directory / self._shards[which].name
        return JobFilesError(f"{path}: shorter than its manifest says")

    def _close(self) -> None:
        self._which = -1
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
