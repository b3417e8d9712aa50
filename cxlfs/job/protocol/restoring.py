"""One rank's part in loading what the whole job resumes from.

    stock of all -> the same choice on every rank -> load -> did all load it? -> record
                          ^---- without the holders that failed ----'

Never: chooses by what this rank alone knows; begins anew where a checkpoint was committed and can
not be loaded.

Invariants
- What the tier below may have newer than the choice is not passed over because it could not be
  read: a job goes back, or begins anew, only when it is known that there is nothing newer.
- A choice is loaded by all ranks or by none: whose load failed is told to all, and all go on to the
  same next choice without that holder. Each round excludes one at least, so that they end.
"""

from __future__ import annotations

import dataclasses

from cxlfs.job.protocol.machine import (
    Action,
    Done,
    Failed,
    Gather,
    Load,
    Machine,
    Poll,
    RecordCommit,
    TakeStock,
    TakeStockBelow,
)
from cxlfs.job.protocol.messages import Body, Loaded, Stock, Tally, tally_of
from cxlfs.job.protocol.model import Inventory, Nothing, NotRestored, Restored, Undecided
from cxlfs.job.protocol.place import Place
from cxlfs.job.protocol.planning import (
    Choice,
    Excluded,
    choose,
    of_other_worlds,
    recorders_of,
)

_Missing = tuple[int, ...]


class Restoring(Machine):
    """``can_fetch``: shards can be brought from the stores of other ranks; ``has_tier``: and from a
    tier below, which rank 0 looks into for all. ``inventories`` and ``below``, once they were
    gathered: of the store of each rank, and of the tier.
    """

    def __init__(self, place: Place, *, can_fetch: bool, has_tier: bool = False) -> None:
        super().__init__(place)
        self.can_fetch = can_fetch
        self.has_tier = has_tier
        self.inventories: tuple[Inventory, ...] = ()
        self.below: Inventory | None = None
        self._below_reason = ""
        self._own = Stock(None)
        self._excluded: set[Excluded] = set()
        self._failures: list[str] = []
        self._choice: Choice | None = None
        self.round = 0

    @property
    def everywhere(self) -> tuple[Inventory, ...]:
        """Of the stores of all ranks, and of the tier below."""
        return (*self.inventories, *([] if self.below is None else [self.below]))

    @property
    def choice(self) -> Choice | None:
        """What is being loaded, or was."""
        return self._choice

    @property
    def excluded(self) -> frozenset[Excluded]:
        """What could not be loaded on the way there."""
        return frozenset(self._excluded)

    def _begin(self) -> Action:
        return TakeStock()

    def _proceed(self, event: Done | Failed) -> Action | None:
        action = event.action
        if isinstance(action, TakeStock):
            self._own = _stock_of(event)
            if self.has_tier and self.place.rank == 0:
                return TakeStockBelow()
            return self._tell_stock(self._own)
        if isinstance(action, TakeStockBelow):
            below = _stock_of(event)
            return self._tell_stock(
                dataclasses.replace(self._own, below=below.inventory, below_reason=below.reason)
            )
        if isinstance(action, Load):
            reason = event.reason or "no reason" if isinstance(event, Failed) else ""
            body = Loaded(action.attempt, action.shard, action.holder, reason)
            return self._begin_poll(
                Poll(
                    self._key("loaded", self.round),
                    action.attempt,
                    self._loaded,
                    self._loaded_by_all,
                    self._decide_restored,
                ),
                body,
            )
        self._restored()  # RecordCommit, done or not: it is for the next restart
        return None

    def _tell_stock(self, own: Stock) -> Action | None:
        everybody = range(self.place.world)
        return self._gather(Gather(self._key("stock"), own, everybody), self._stocked)

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
        self.below, self._below_reason = stocks[0].below, stocks[0].below_reason
        return self._load_next()

    def _load_next(self) -> Action | None:
        self._choice, reasons = choose(
            self.inventories, self._excluded, can_fetch=self.can_fetch, below=self.below
        )
        choice, rank = self._choice, self.place.rank
        committed = {commit.attempt for each in self.everywhere for commit in each.commits}
        committed |= of_other_worlds(self.everywhere, self.place.world)
        is_newest = choice is not None and all(a <= choice.attempt for a in committed)
        if self._below_reason and not is_newest:
            self._choice = None
            unread = f"the tier below could not be read: {self._below_reason}"
            self._finish(NotRestored((*reasons, *self._failures, unread)))
        elif choice is not None:
            return Load(choice.attempt, rank, choice.holders[rank], choice.manifests[rank])
        elif committed or self._excluded:
            self._finish(NotRestored((*reasons, *self._failures)))
        else:
            self._finish(Nothing())
        return None

    def _loaded(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        choice = self._choice
        if missing or choice is None:
            return None
        failed = {
            rank: body.reason if isinstance(body, Loaded) else "another message"
            for rank, body in heard.items()
            if not isinstance(body, Loaded) or body.reason or body.attempt != choice.attempt
        }
        return tally_of(choice.attempt, choice.digest, failed)

    def _loaded_by_all(
        self, failed: dict[int, str], missing: _Missing, _digests: list[str]
    ) -> Tally | None:
        choice = self._choice
        if missing or choice is None:
            return None
        return tally_of(choice.attempt, choice.digest, failed)

    def _decide_restored(self, tally: Tally) -> Action | None:
        choice = self._choice
        if choice is None or (tally.attempt, tally.digest) != (choice.attempt, choice.digest):
            self._finish(Undecided("loaded", (0,)))
            return None
        if not tally.against:
            if self.place.rank in recorders_of(self.inventories):
                return RecordCommit(choice.attempt, choice.digest)
            self._restored()
            return None
        for rank, reason in tally.against:
            self._excluded.add(Excluded(choice.attempt, rank, choice.holders[rank]))
            self._failures.append(f"{choice.attempt}, rank {rank}: {reason}")
        self.round += 1
        return self._load_next()

    def _restored(self) -> None:
        choice, rank = self._choice, self.place.rank
        if choice is not None:
            holder = choice.holders[rank]
            is_fetched = holder != self.inventories[rank].store
            self._finish(Restored(choice.attempt, choice.digest, rank, holder, is_fetched))


def _stock_of(event: Done | Failed) -> Stock:
    if isinstance(event, Done) and isinstance(event.value, Inventory):
        return Stock(event.value)
    return Stock(None, event.reason if isinstance(event, Failed) else "no inventory")
