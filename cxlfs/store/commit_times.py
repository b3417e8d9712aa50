"""When the records of this opening were committed.

Other modules know times of earlier records from what they published (``past_state``).

Invariants
- Memory is bounded. Of a long life, the older half is known in coarser steps: an answer is then an
  earlier commit, never a later one.
"""

from __future__ import annotations

import array
import bisect

_KEPT = 1 << 18


class CommitTimes:
    """Numbers and times of commits, in order."""

    def __init__(self) -> None:
        self._lsns, self._times = array.array("Q"), array.array("q")

    def add(self, lsn: int, time_ns: int) -> None:
        """Note the commit that was made last."""
        self._lsns.append(lsn)
        # A clock that was set back must not break the order that the search needs.
        self._times.append(max(time_ns, self._times[-1]) if self._times else time_ns)
        if len(self._lsns) > _KEPT:
            for column in (self._lsns, self._times):
                column[: _KEPT // 2] = column[: _KEPT // 2 : 2]

    def last_until(self, time_ns: int) -> int | None:
        """Return the last commit that was made at a time or before; None: this opening has none."""
        place = bisect.bisect_right(self._times, time_ns)
        return self._lsns[place - 1] if place else None
