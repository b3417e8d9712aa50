"""Giving history back: segments that only history refers to become free.

Other modules say in which order (``past_order``), and move what is alive (``cleaner``).

Invariants
- A segment is free only after all records are durable (``Volume.free_dead``): a death has none of
  its own.
- Rows are dropped only while that can free a segment: where history lies beside live data, the
  cleaner empties the segment and then forgets what is past in it.
- A held row is given up only when everything else was, and the archive on the media after the rows
  that can be given back.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from cxlfs.native.discards import drop_discarded

if TYPE_CHECKING:
    from cxlfs.store.past import Past
    from cxlfs.store.volume import Volume

POOL_MIN = 8
_POOL_PART = 64
"""So many segments, or that part of all, are kept really free beyond the reserve."""
_STEP_S = 0.002
_ROWS_AT_ONCE = 64
"""Of one look whether a segment became free."""
_REFS_AT_ONCE = 25_000


class PastSpace:
    """One for each volume."""

    def __init__(self, volume: Volume, past: Past) -> None:
        self.volume = volume
        self.past = past
        volume.space.history = self

    @property
    def segments(self) -> int:
        """Segments that giving back all history would free, without a move of data."""
        found = self.volume.engine.past_segments if len(self.past) else 0
        return found + self.past.archive.segment_count

    def step(self) -> bool:
        """Fill the pool of free segments in the background, 2 ms at most; True when there is more.

        Raises MediaError.
        """
        pool = max(POOL_MIN, len(self.volume.space.states) // _POOL_PART)
        wanted = self.volume.refresh_reserve() + pool
        return self._give_back(wanted, until=time.monotonic() + _STEP_S)

    def make_free(self, wanted: int) -> bool:
        """Give back rows until so many segments are free; True when one became free.

        Raises MediaError.
        """
        return self._give_back(wanted, until=None)

    def _give_back(self, wanted: int, until: float | None) -> bool:
        """Oldest first."""
        space, engine = self.volume.space, self.volume.engine
        free_before = space.free_count
        if free_before >= wanted or not self.segments:
            return False
        worked = False
        while space.free_count + space.collect_dead() < wanted and engine.past_segments:
            for _ in range(_ROWS_AT_ONCE):
                row = self.past.order.next()
                if row is None:
                    break
                self.past.forget(row)
                worked = True
                if space.free_count + space.collect_dead() >= wanted:
                    break
            discarding = drop_discarded(engine, _REFS_AT_ONCE)
            while discarding and until is None:
                discarding = drop_discarded(engine, _REFS_AT_ONCE)
            worked |= discarding
            if (row is None and not discarding) or (until is not None and time.monotonic() > until):
                break
        if space.dead_count and (worked or until is None):
            self.volume.free_dead()
        while until is None and space.free_count < wanted and self.past.archive.give_up_oldest():
            pass
        return worked if until is not None else space.free_count > free_before

    def give_up_held(self) -> bool:
        """Give up the oldest held row before a write fails; False when there is none.

        Raises MediaError.
        """
        row = self.past.oldest_held()
        if row is None:
            return False
        self.past.forget(row)
        while drop_discarded(self.volume.engine, _REFS_AT_ONCE):
            pass
        name = os.fsdecode(row.name)
        self.volume.event("history-given-up", f"a held version of {name} was dropped: no room")
        self.volume.release_dead()
        return True
