"""Python's garbage collector, kept from stopping everybody.

A full collection looks at every object there is, with Python's lock held: 0.13 s where 50 000
files are open, in which nobody is answered. What the daemon keeps for long is freed by its count of
references; the collector is there for what refers to itself in a circle, mostly errors with their
tracebacks, and that is young.

Never here: what the objects are.

Invariants
- A full collection happens here only, often enough to have little to look at. What it leaves is
  alive, and set aside: no later one looks at it again.
"""

from __future__ import annotations

import gc
from typing import Self

_NEVER = 1 << 30
_MIDDLE_COLLECTIONS = 2
"""So many of the middle generation (each some 7000 new objects) make a full one due: 20 ms."""


class GarbageCollector:
    """From here on until ``close`` no full collection begins by itself. One in a process."""

    def __init__(self) -> None:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*self._thresholds[:2], _NEVER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self.close()

    def maintain(self) -> None:
        """What is due; to be called some times a second."""
        if gc.isenabled() and gc.get_count()[2] >= _MIDDLE_COLLECTIONS:
            gc.collect()
            gc.freeze()

    def close(self) -> None:
        """As it was before; what was set aside stays so."""
        gc.set_threshold(*self._thresholds)
