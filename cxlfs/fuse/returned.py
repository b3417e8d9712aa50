"""Names that the kernel remembers of what a checkpoint unit has taken back: whoever follows one is
told.

Background work takes units back, too. The kernel is told to forget the names a moment later; until
then a path leads to what was not finished. Who asks by it is answered ESTALE: the kernel walks the
path once more, and asks for each name (fs/namei.c, LOOKUP_REVAL).

Never here: when a unit goes back (the store), making the kernel forget names (``page_cache``).

Invariants
- A thread is told once of each file or directory: who has come by no name (openat, its own
  directory) goes on at the second time, which the kernel asks for by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cxlfs.errors import StaleError

TOLD_SECONDS = 5.0
"""The kernel has forgotten the name by then: that takes milliseconds."""


class Returned:
    """One for each mount. The lock of the store is held by whoever calls."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: dict[int, tuple[float, set[int]]] = {}
        """By inode number: until when, and which threads were told."""

    def gone(self, inos: set[int]) -> None:
        """These have just lost their names."""
        until = self._clock() + TOLD_SECONDS
        self._told |= {ino: (until, set()) for ino in inos}

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
        entry = self._told.get(ino)
        if entry is not None and tid not in entry[1]:
            entry[1].add(tid)
            raise StaleError("what was written there was not finished, and has gone back")
