"""What one rank does about the room of older checkpoints in its store.

Of the ranks that share a store the first gives back what all of them have; with a tier below, where
each drains at its own pace, each gives back its own. What goes gets another name, by which it
counts no more, at once; its files are removed behind that, in a thread, and whoever saves next into
this store waits for them: it may need their room.

Never: what goes (``protocol.collectable``), or when.

Invariants
- What lies there is looked at once, at a start. From then on each rank knows what it has begun.
- Nothing is removed by its files before its new name is durable.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from cxlfs.job import aside, files
from cxlfs.job.copies import Copies
from cxlfs.job.pending import InOrder, PendingCheckpoint
from cxlfs.job.protocol import Attempt, Commit, Held, Inventory, Lineage, collectable

log = logging.getLogger(__name__)

_POLL_SECONDS_MIN = 0.001
_POLL_SECONDS_MAX = 0.1


class Room:
    """Of the store at ``root``, in which the newest ``keep`` committed checkpoints stay."""

    def __init__(self, root: Path, keep: int, copies: Copies) -> None:
        self._root = root
        self._keep = keep
        self._copies = copies
        self._present: set[Attempt] = set()
        self._recorded: set[Attempt] = set()
        self._lineage = Lineage()
        self._abandoned: set[Attempt] = set()
        """What starts before this one began, and nobody voted for here."""
        self._leaving: list[Attempt] = []
        self._is_looked_through = False
        self._background = InOrder()

    def settle(
        self,
        inventories: Iterable[Inventory],
        store: str,
        lineage: Lineage,
        line: str,
        loaded: Attempt | None = None,
    ) -> None:
        """Behind a restore, when ``line`` has begun. What a start before has not given back goes.
        Another rank that shares the store may have begun to save already.
        """
        self._lineage = lineage
        self._present = set(files.attempts_in(self._root))
        own = [inventory for inventory in inventories if inventory.store == store]
        self._recorded = {commit.attempt for each in own for commit in each.commits}
        counted = {held.attempt for each in own for held in each.held} | self._recorded
        counted |= {attempt for each in own for attempt, _ in each.damaged}
        counted |= set() if loaded is None else {loaded}
        before = {each for each in self._present if each.id != line}
        self._abandoned = before - counted
        self._recorded |= set() if loaded is None else {loaded}
        self._is_looked_through = False
        if self._copies.is_first and aside.is_anything_aside(self._root):
            self._begin(lambda: aside.remove_aside(self._root))

    def begun(self, attempt: Attempt) -> None:
        self._present.add(attempt)

    def finish(self, seconds: float) -> None:
        """Until this rank has nothing left to remove, or so long."""
        self._background.settle(0, seconds)

    def wait(self, seconds: float) -> None:
        """Until there is the room that a checkpoint was promised, or so long."""
        end, pause = time.monotonic() + seconds, _POLL_SECONDS_MIN
        self.finish(seconds)
        while self._is_anything_there():
            if time.monotonic() >= end:
                log.warning("%s: older checkpoints are still being removed", self._root)
                return
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS_MAX)

    def _is_anything_there(self) -> bool:
        """That another rank removes."""
        self._leaving = [each for each in self._leaving if aside.is_there(self._root, each)]
        return bool(self._leaving) or aside.is_anything_aside(self._root)

    def collect(self, committed: Attempt, holds: Callable[[Attempt], bool] | None) -> None:
        """``committed`` is recorded in every store. What ``holds`` stays. Raises OSError."""
        self._recorded.add(committed)
        gone = [each for each in self._older(committed) if holds is None or not holds(each)]
        self._present -= set(gone)
        self._recorded -= set(gone)
        if self._copies.has_all:
            for attempt in gone:
                aside.set_aside(self._root, attempt)
        elif not self._copies.each_its_own:
            self._leaving = gone
            return
        kept = [] if self._is_looked_through else sorted(self._present - {committed})
        self._is_looked_through = True
        if gone or kept:
            self._begin(lambda: self._remove(gone, kept))

    def _older(self, committed: Attempt) -> Collection[Attempt]:
        held = tuple(Held(attempt, 0, 0, "") for attempt in self._present)
        commits = tuple(Commit(attempt, "") for attempt in self._recorded)
        older = collectable(Inventory("", held, commits), committed, self._keep, self._lineage)
        return sorted(self._present.intersection(older) | self._abandoned & self._present)

    def _remove(self, gone: Collection[Attempt], kept: Collection[Attempt]) -> None:
        if self._copies.has_all:
            aside.remove_aside(self._root)
        else:
            for attempt in gone:
                files.remove_ranks(self._root, attempt, self._copies.is_mine)
        for attempt in kept:
            files.remove_unfinished(self._root, attempt, self._copies.is_mine)

    def _begin(self, task: Callable[[], None]) -> None:
        def run() -> None:
            try:
                task()
            except OSError:
                log.warning("%s: an older checkpoint was not removed", self._root, exc_info=True)

        self._background.begin(PendingCheckpoint(0, 0.0, is_seen=True), run)
