"""Room in data segments that was leased and not used: given back, joined, and handed out again.

Never here: which segments are free, who may take what (``space``).

Invariants
- Nothing in it was ever published: no record and no image names a byte of it.
- Remnants do not overlap and do not touch each other; each lies in one segment and is at least as
  long as the shortest lease.
- The room of a segment goes with it: :meth:`drop` before the segment means anything else.

Cost: a binary search and a move of the sorted list for each call.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(slots=True)
class Head:
    """Where data is written now: a segment and the first byte not handed out."""

    index: int
    position: int
    end: int
    empty: bool = False
    """The engine has said since the last lease here that nothing is left in the segment."""


class Remnants:
    """All remnants of a store. ``segment_of``: the segment in which an offset lies."""

    def __init__(self, *, least_bytes: int, segment_of: Callable[[int], int]) -> None:
        self._least_bytes = least_bytes
        self.segment_of = segment_of
        self._by_length: list[tuple[int, int]] = []
        """(length, offset), sorted."""
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        """Where the remnant begins that ends at an offset."""
        self._in_segment: dict[int, set[int]] = {}
        self.total_bytes = 0

    def __len__(self) -> int:
        return len(self._by_length)

    def add(self, offset: int, length: int) -> None:
        """Joined with what touches it; forgotten when that is shorter than a lease can be."""
        before = self._start_before.get(offset)
        if before is not None:
            length += self._remove(before)
            offset = before
        if offset + length in self._length_at:
            length += self._remove(offset + length)
        if length < self._least_bytes:
            return
        bisect.insort(self._by_length, (length, offset))
        self._length_at[offset] = length
        self._start_before[offset + length] = offset
        self._in_segment.setdefault(self.segment_of(offset), set()).add(offset)
        self.total_bytes += length

    def take_before(self, end: int) -> int | None:
        """Take the remnant that ends at ``end``: where it begins; None: there is none."""
        start = self._start_before.get(end)
        if start is not None:
            self._remove(start)
        return start

    @property
    def longest_bytes(self) -> int:
        return self._by_length[-1][0] if self._by_length else 0

    def take(self, wanted_bytes: int) -> tuple[int, int]:
        """(offset, length) from the shortest remnant that is long enough, else from the longest.

        There is one.
        """
        at = bisect.bisect_left(self._by_length, (wanted_bytes, 0))
        return self._cut(*self._by_length[min(at, len(self._by_length) - 1)], wanted_bytes)

    def longest_in(self, segment: int) -> int:
        """Bytes of the longest remnant in one segment; 0: there is none."""
        return max((self._length_at[o] for o in self._in_segment.get(segment, ())), default=0)

    def bytes_in(self, segment: int) -> int:
        """Of all remnants in one segment."""
        return sum(self._length_at[o] for o in self._in_segment.get(segment, ()))

    def take_in(self, segment: int, wanted_bytes: int) -> tuple[int, int] | None:
        """The same in one segment, where something is long enough."""
        offsets = self._in_segment.get(segment, ())
        fitting = [(self._length_at[o], o) for o in offsets if self._length_at[o] >= wanted_bytes]
        return self._cut(*min(fitting), wanted_bytes) if fitting else None

    def drop(self, segment: int) -> None:
        """The segment is not one for data any more."""
        for offset in list(self._in_segment.get(segment, ())):
            self._remove(offset)

    def _cut(self, length: int, offset: int, wanted_bytes: int) -> tuple[int, int]:
        self._remove(offset)
        if length - wanted_bytes < self._least_bytes:
            return offset, length
        self.add(offset + wanted_bytes, length - wanted_bytes)
        return offset, wanted_bytes

    def _remove(self, offset: int) -> int:
        length = self._length_at.pop(offset)
        del self._by_length[bisect.bisect_left(self._by_length, (length, offset))]
        del self._start_before[offset + length]
        segment = self.segment_of(offset)
        offsets = self._in_segment[segment]
        offsets.remove(offset)
        if not offsets:
            del self._in_segment[segment]
        self.total_bytes -= length
        return length
