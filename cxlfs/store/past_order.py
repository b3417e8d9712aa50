"""Order in which history is given back, and how much of it is kept.

Other modules say what a row is (``past``) and when space is needed (``past_space``).

Invariants
- The oldest death goes first. The last row of each name goes after all others.
- A held row is not in the order until it is released.
- The limits depend on the rows alone: the same deaths leave the same rows.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from typing import TYPE_CHECKING

from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    from cxlfs.store.past_rows import Row

ROWS_MAX = 200_000
MEMORY_BYTES_MAX = 64 * MIB
_DATA_BYTES_PER_BYTES = (64 * KIB, 8)
"""For so many bytes of data the memory limit grows by so many."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Most rows of a store, and most bytes of memory that they take."""

    rows: int = ROWS_MAX
    memory_bytes: int = MEMORY_BYTES_MAX

    @classmethod
    def of(cls, data_bytes: int) -> Limits:
        """Limits of a store for so many bytes of data."""
        step, more = _DATA_BYTES_PER_BYTES
        return cls(memory_bytes=MEMORY_BYTES_MAX + data_bytes // step * more)


class Order:
    """Rows that may be given back."""

    def __init__(self) -> None:
        self._last: collections.OrderedDict[tuple[int, bytes], Row] = collections.OrderedDict()
        """The last row of each name, by death."""
        self._older: list[tuple[tuple[int, int], Row]] = []
        """Heap of the others. A row that is gone or held is dropped when it comes up."""

    def add(self, row: Row) -> None:
        """Add the row that died last."""
        name = (row.parent, row.name)
        before = self._last.pop(name, None)
        self._last[name] = row
        if before is not None:
            heapq.heappush(self._older, (before.key, before))

    def remove(self, row: Row) -> None:
        """Take a row out: it is gone, or held."""
        name = (row.parent, row.name)
        if self._last.get(name) is row:
            del self._last[name]

    def put_back(self, row: Row) -> None:
        """Add a row that was held."""
        name = (row.parent, row.name)
        if name in self._last:
            heapq.heappush(self._older, (row.key, row))
        else:
            self._last[name] = row
            self._last.move_to_end(name, last=False)

    def next(self) -> Row | None:
        """The row to give back next; it stays in the order until it is removed."""
        while self._older:
            row = self._older[0][1]
            if row.is_gone or row.is_held:
                heapq.heappop(self._older)
            else:
                return row
        return next(iter(self._last.values()), None)
