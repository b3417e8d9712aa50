"""One rank's part in loading what the whole job resumes from.

    stock of all -> the same choice on every rank -> load -> did all load it? -> record
                          ^---- without the holders that failed ----'

Never: chooses by what this rank alone knows; begins anew where a checkpoint was committed and can
not be loaded.

Invariants
- A choice is loaded by all ranks or by none: whose load failed is told to all, and all go on to the
  same next choice without that holder. Each round excludes one at least, so that they end.
"""

from __future__ import annotations

from cxlfs.job.protocol.machine import (
    Action,
    Done,
    Failed,
    Load,
    Machine,
    Place,
    RecordCommit,
    TakeStock,
)
from cxlfs.job.protocol.messages import Body, Loaded, Stock
from cxlfs.job.protocol.model import Inventory, Nothing, NotRestored, Restored, Undecided
from cxlfs.job.protocol.planning import Choice, Excluded, choose

_Missing = tuple[int, ...]


class Restoring(Machine):
    """``can_fetch``: shards can be brought from the stores of other ranks. ``inventories``, once
    they were gathered: of the store of each rank.
    """

    def __init__(self, place: Place, *, can_fetch: bool) -> None:
        super().__init__(place)
        self.can_fetch = can_fetch
        self.inventories: tuple[Inventory, ...] = ()
        self._excluded: set[Excluded] = set()
        self._failures: list[str] = []
        self._choice: Choice | None = None
        self._round = 0

    def _begin(self) -> Action:
        return TakeStock()

    def _proceed(self, event: Done | Failed) -> Action | None:
        action = event.action
        if isinstance(action, TakeStock):
            return self._gather("stock", _stock_of(event), self._stocked)
        if isinstance(action, Load):
            reason = event.reason or "no reason" if isinstance(event, Failed) else ""
            body = Loaded(action.attempt, action.shard, action.holder, reason)
            return self._gather("loaded", body, self._loaded, number=self._round)
        self._restored()  # RecordCommit, done or not: it is for the next restart
        return None

    def _stocked(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        stocks = [body for _, body in sorted(heard.items()) if isinstance(body, Stock)]
        unread = [stock.reason for stock in stocks if stock.inventory is None]
        if unread:
            self._finish(NotRestored(tuple(unread)))
            return None
        if missing or len(stocks) < self.place.world:
            self._finish(Undecided("stock", missing))
            return None
        self.inventories = tuple(s.inventory for s in stocks if s.inventory is not None)
        return self._load_next()

    def _load_next(self) -> Action | None:
        self._choice, reasons = choose(self.inventories, self._excluded, can_fetch=self.can_fetch)
        choice, rank = self._choice, self.place.rank
        if choice is not None:
            return Load(choice.attempt, rank, choice.holders[rank], choice.manifests[rank])
        committed = any(inventory.commits for inventory in self.inventories)
        if committed or self._excluded:
            self._finish(NotRestored((*reasons, *self._failures)))
        else:
            self._finish(Nothing())
        return None

    def _loaded(self, heard: dict[int, Body], missing: _Missing) -> Action | None:
        choice = self._choice
        if missing or choice is None:
            self._finish(Undecided("loaded", missing))
            return None
        failed = {
            rank: body.reason if isinstance(body, Loaded) else "another message"
            for rank, body in heard.items()
            if not isinstance(body, Loaded) or body.reason or body.attempt != choice.attempt
        }
        if not failed:
            return RecordCommit(choice.attempt, choice.digest)
        for rank, reason in sorted(failed.items()):
            self._excluded.add(Excluded(choice.attempt, rank, choice.holders[rank]))
            self._failures.append(f"{choice.attempt}, rank {rank}: {reason}")
        self._round += 1
        return self._load_next()

    def _restored(self) -> None:
        choice, rank = self._choice, self.place.rank
        if choice is not None:
            holder = choice.holders[rank]
            self._finish(Restored(choice.attempt, choice.digest, rank, holder))


def _stock_of(event: Done | Failed) -> Stock:
    if isinstance(event, Done) and isinstance(event.value, Inventory):
        return Stock(event.value)
    return Stock(None, event.reason if isinstance(event, Failed) else "no inventory")
