"""Names that the kernel remembers of a directory that has gone aside: whoever follows one is told.

A checkpoint unit that goes back is renamed by the store, by background work, too. The kernel is
told to forget the name a moment later; until then a path leads to what was not finished. Who asks
by it is answered ESTALE: the kernel walks the path once more, and asks for each name (fs/namei.c,
LOOKUP_REVAL).

Never here: when a unit goes back (the store), making the kernel forget names (``page_cache``).

Invariants
- A thread is told once of each directory: who has come by no name (openat, its own directory), or
  by the new one, goes on at the second time, which the kernel asks for by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import StaleError

if TYPE_CHECKING:
    from cxlfs.store import Store

TOLD_SECONDS = 5.0
"""The kernel has forgotten the name by then: that takes milliseconds."""


class Returned:
    """One for each mount. The lock of the store is held by whoever calls."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._told: dict[int, tuple[float, set[int]]] = {}
        """By directory: until when, and which threads were told."""

    def gone(self, ino: int) -> None:
        """A unit has just gone back, of which this is the directory."""
        if self._store.units.copies.aside.holds(ino):  # else it is what has come back
            self._told[ino] = (self._clock() + TOLD_SECONDS, set())

    @property
    def tells(self) -> bool:
        """Somebody may have to be told."""
        return bool(self._told)

    def check(self, ino: int, tid: int) -> None:
        """Somebody follows a name to an inode. Raises StaleError."""
        if not self._told:
            return
        now = self._clock()
        self._told = {top: entry for top, entry in self._told.items() if now < entry[0]}
        is_news = False
        for top, (_, told) in self._told.items():
            if tid not in told and self._store.namespace.is_below(ino, top):
                told.add(tid)
                is_news = True
        if is_news:
            raise StaleError("what was written there was not finished, and has gone back")
