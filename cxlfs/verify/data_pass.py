"""Pass 11: every chunk of every extent against its checksum.

Never here: repairing; nothing can be done about file data.

Invariants
- One slice checks about SLICE_BYTES: a mounted store serves others in between.
- An extent that vanishes meanwhile is passed over, one that comes is left to the next run.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from cxlfs.errors import DataFault, MediaError
from cxlfs.native import crc32c
from cxlfs.native.extents import SPAN_DTYPE, FileMap, Verification
from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import Finding, Use, make

SLICE_BYTES = 8 << 20
_SEED = struct.Struct("<QQ")
KEPT_ASIDE = "kept aside"
"""``Use.version`` of what no reader sees."""


class _Piece(NamedTuple):
    """A reference: which bytes of an extent a file has where."""

    ino: int
    version: str
    file_offset: int
    extent_offset: int
    length: int


def check_data(context: Context) -> Steps:
    """In the order of the media. Damage names every file that has it."""
    store = context.store()
    if store is None:
        return
    infos = store.volume.engine.list()[["id", "media_offset", "length"]].tolist()
    total = sum(length for _, _, length in infos)
    done = in_slice = 0
    for extent_id, media_offset, length in infos:
        found = store.volume.engine.verify(extent_id)
        if found is not None and found.fault_count:
            users = _Users(context, store, media_offset)
            for fault in _all_faults(store, extent_id, found):
                yield _finding(store, users, fault)
        done += length
        in_slice += length
        if in_slice >= SLICE_BYTES:
            in_slice = 0
            yield Amount(done, total, "bytes")
            context.require_open()
    yield Amount(total, total, "bytes")


def _all_faults(store: Store, extent_id: int, found: Verification) -> Iterator[DataFault]:
    """The engine names the first few; the others are found chunk by chunk."""
    yield from found.faults
    if found.fault_count == len(found.faults):
        return
    last = found.faults[-1].chunk
    infos, crcs = store.volume.engine.describe(extent_id)
    start, length = int(infos[0]["media_offset"]), int(infos[0]["length"])
    chunk_bytes = store.superblock.chunk_bytes
    for chunk in range(last + 1, len(crcs)):
        offset = chunk * chunk_bytes
        size = min(chunk_bytes, length - offset)
        place = start + offset
        expected, actual = int(crcs[chunk]), 0
        try:
            actual = store.media.crc32c(place, size, crc32c(_SEED.pack(extent_id, chunk)))
        except MediaError as error:
            place, expected = place if error.offset is None else error.offset, 0
        if expected == 0 or actual != expected:
            yield DataFault(offset, size, extent_id, chunk, place, expected, actual)


class _Users:
    """Which files have bytes of the segment around a damaged extent."""

    def __init__(self, context: Context, store: Store, media_offset: int) -> None:
        self._store = store
        self._context = context
        self._pieces: dict[int, list[_Piece]] = {}
        block = store.superblock
        segment = (media_offset - block.first_segment_offset) // block.segment_size_bytes
        for inode in self._owners(segment):
            for version, content in _contents(inode):
                rows = content.export(0, content.size)[
                    ["extent_id", "file_offset", "extent_offset", "length"]
                ]
                for extent_id, *place in rows.tolist():
                    piece = _Piece(inode.ino, version, *place)
                    self._pieces.setdefault(extent_id, []).append(piece)

    def _owners(self, segment: int) -> list[Inode]:
        inodes = self._store.namespace.inodes
        block = self._store.superblock
        span = np.array([(block.segment_offset(segment), block.segment_size_bytes)], SPAN_DTYPE)
        alive = self._store.volume.engine.live_ranges(span)
        if alive.busy[0]:  # something is being written there
            return [inode for inode in inodes.values() if inode.live is not None]
        found = set(alive.owners.tolist())
        return [inodes[ino] for ino in sorted(found) if ino in inodes]

    def of(self, extent_id: int, start: int, end: int) -> tuple[Use, ...]:
        """Of the extent's bytes [start, end)."""
        uses: list[Use] = []
        seen: set[tuple[int, int, int]] = set()
        for piece in self._pieces.get(extent_id, ()):
            low = max(start, piece.extent_offset)
            high = min(end, piece.extent_offset + piece.length)
            place = (piece.ino, piece.file_offset + low - piece.extent_offset, high - low)
            if low >= high or place in seen:
                continue
            seen.add(place)
            if self._context.live and piece.version != KEPT_ASIDE:
                self._store.health.seen(self._store.namespace.inodes[piece.ino])
            uses.append(
                Use(
                    ino=piece.ino,
                    path=self._store.path_of(piece.ino),
                    file_offset=place[1],
                    length=place[2],
                    version=piece.version,
                )
            )
        return tuple(uses)


def _contents(inode: Inode) -> Iterator[tuple[str, FileMap]]:
    if inode.committed is not None:
        yield "committed", inode.committed
    if inode.live is not None:
        same = inode.committed is None and not inode.uncommitted
        yield "committed" if same else "live", inode.live
    if inode.aside is not None:
        yield KEPT_ASIDE, inode.aside


def _finding(store: Store, users: _Users, fault: DataFault) -> Finding:
    chunk_bytes = store.superblock.chunk_bytes
    start = fault.chunk * chunk_bytes
    uses = users.of(fault.extent_id, start, start + chunk_bytes)
    is_checksum = fault.expected != fault.actual
    where = f"chunk {fault.chunk} of extent {fault.extent_id}"
    if uses:
        first = uses[0]
        where = f"{first.length} bytes at file offset {first.file_offset} ({where})"
    kind = "data-checksum" if is_checksum else "data-unreadable"
    return make(
        kind if uses else "data-unused-damaged",
        f"{where}: {'checksum mismatch' if is_checksum else 'the media cannot deliver them'}",
        media_offset=fault.media_offset,
        expected=fault.expected if is_checksum else None,
        actual=fault.actual if is_checksum else None,
        uses=uses,
    )
