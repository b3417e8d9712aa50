"""The extent map once more, byte by byte and slow: what every operation must have done.

Each byte of a file knows where it came from (extent, offset); references, holes, sizes, marks and
what is used on the media follow from that without any of the structures under test.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt

BLOCK = 4096
ALIGN = 64

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Ref = tuple[int, int, int, int]


@dataclasses.dataclass
class ModelExtent:
    """``length``: bytes defined; ``published``: of those, what the journal knows."""

    id: int
    media_offset: int
    capacity: int
    length: int = 0
    published: int = 0
    open: bool = True

    def padding(self) -> int:
        """Zeros that must come before more data."""
        if self.published != self.length:
            return 0
        return min(-(self.media_offset + self.length) % ALIGN, self.capacity - self.length)


class ModelMap:
    """One content. Beyond ``size`` every byte is a hole."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self.data: Bytes = np.zeros(limit, dtype=np.uint8)
        self.extent: Numbers = np.zeros(limit, dtype=np.int64)
        self.offset: Numbers = np.zeros(limit, dtype=np.int64)
        self.dirty: Flags = np.zeros(limit, dtype=np.bool_)
        self.cut = 0
        self.taken_size = 0
        self.fresh = True
        self.lease: ModelExtent | None = None

    def clone(self) -> ModelMap:
        copy = ModelMap(len(self.data))
        copy.size = copy.cut = copy.taken_size = self.size
        copy.fresh = False
        copy.data = self.data.copy()
        copy.extent = self.extent.copy()
        copy.offset = self.offset.copy()
        return copy

    # --- questions --------------------------------------------------------------------------

    @property
    def allocated(self) -> int:
        return int(np.count_nonzero(self.extent))

    @property
    def is_dirty(self) -> bool:
        moved = self.size != self.taken_size or self.cut < self.taken_size
        return self.fresh or moved or bool(self.dirty.any())

    def refs(self, start: int, end: int, *, holes_below: int = 0) -> list[Ref]:
        """Longest runs in [start, end); holes too where they lie below ``holes_below``."""
        found: list[Ref] = []
        extent, offset = self.extent[start:end], self.offset[start:end]
        breaks = np.flatnonzero(
            (np.diff(extent) != 0) | ((np.diff(offset) != 1) & (extent[1:] != 0))
        )
        edges = [0, *(breaks + 1).tolist(), end - start]
        for begin, stop in itertools.pairwise(edges):
            if begin == stop:
                continue
            first = start + begin
            if extent[begin]:
                found.append((first, stop - begin, int(extent[begin]), int(offset[begin])))
            elif first < holes_below:
                found.append((first, min(start + stop, holes_below) - first, 0, 0))
        return found

    def delta_refs(self) -> list[Ref]:
        """What a delta must say now."""
        dirty = self.dirty[: self.size].copy()
        if self.fresh:
            dirty[:] = True
        edges = np.flatnonzero(np.diff(np.concatenate(([False], dirty, [False])).astype(np.int8)))
        found: list[Ref] = []
        for start, end in zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True):
            found.extend(self.refs(start, end, holes_below=self.cut))
        return found

    # --- changes ----------------------------------------------------------------------------

    def _widen(self, start: int, end: int) -> tuple[int, int]:
        """From the first to the last mapped byte of the blocks that [start, end) touches."""
        low = start // BLOCK * BLOCK
        high = min(-(-end // BLOCK) * BLOCK, max(self.size, end))
        mapped = np.flatnonzero(self.extent[low:high])
        if len(mapped) == 0:
            return start, end
        return min(start, low + int(mapped[0])), max(end, low + int(mapped[-1]) + 1)

    def write(self, offset: int, data: bytes) -> tuple[int, int]:
        """The bytes taken, and 0 or what a lease must hold."""
        lease = self.lease
        padding = lease.padding() if lease is not None else 0
        continuing = (
            lease is not None
            and padding == 0
            and offset > 0
            and self.extent[offset - 1] == lease.id
            and self.offset[offset - 1] == lease.length - 1
        )
        start, end = offset, offset + len(data)
        if not continuing and len(data) < BLOCK:
            start, end = self._widen(start, end)
        carried = end - start != len(data)
        room = lease.capacity - lease.length - padding if lease is not None else 0
        least = end - start if carried else 1 if continuing else min(len(data), BLOCK)
        if lease is None or room < least:
            return 0, end - start
        taken = len(data) if carried else min(len(data), room)
        if not carried:
            end = start + taken
        lease.length += padding
        self.data[offset : offset + taken] = np.frombuffer(data[:taken], dtype=np.uint8)
        self.extent[start:end] = lease.id
        self.offset[start:end] = np.arange(lease.length, lease.length + end - start)
        lease.length += end - start
        self.dirty[start:end] = True
        self.size = max(self.size, end)
        return taken, 0

    def clear(self, start: int, end: int) -> None:
        self.data[start:end] = 0
        self.extent[start:end] = 0
        self.offset[start:end] = 0

    def punch(self, offset: int, length: int) -> None:
        end = min(offset + length, self.size)
        if offset < end:
            self.clear(offset, end)
            self.dirty[offset:end] = True

    def truncate(self, size: int) -> None:
        self.clear(size, len(self.data))
        self.dirty[size:] = False
        self.cut = min(self.cut, size)
        self.size = size

    def seek(self, offset: int, *, hole: bool) -> int | None:
        """Where data, or a hole, begins; the end of file is one."""
        wanted = (self.extent[offset : self.size] == 0) == hole
        if len(wanted) and wanted.any():
            return offset + int(np.argmax(wanted))
        return self.size if hole and offset < self.size else None

    def share(self, offset: int, length: int, target: ModelMap, target_offset: int) -> int:
        length = max(0, min(length, self.size - offset))
        end, target_end = offset + length, target_offset + length
        for name in ("data", "extent", "offset"):
            getattr(target, name)[target_offset:target_end] = getattr(self, name)[offset:end].copy()
        if length:
            target.dirty[target_offset:target_end] = True
            target.size = max(target.size, target_end)
        return length

    def move(self, old: int, offset: int, length: int, new: int, new_offset: int) -> None:
        hit = (self.extent == old) & (self.offset >= offset) & (self.offset < offset + length)
        self.extent[hit] = new
        self.offset[hit] += new_offset - offset

    def apply(self, cut: int, refs: list[Ref], source: ModelMap) -> None:
        """A delta: bytes in ``refs`` come from ``source``, all others stay."""
        self.clear(cut, len(self.data))
        for start, length, _, _ in refs:
            end = start + length
            self.data[start:end] = source.data[start:end]
            self.extent[start:end] = source.extent[start:end]
            self.offset[start:end] = source.offset[start:end]
        self.size = source.size

    def pad(self) -> None:
        """A delta is being taken."""
        lease = self.lease
        if lease is not None and lease.length:
            padding = -(lease.media_offset + lease.length) % ALIGN
            lease.length += min(padding, lease.capacity - lease.length)
