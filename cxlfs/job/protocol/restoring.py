"""One rank's part in loading what the whole job resumes from, and in beginning its line.

    stock of all -> the same verdict on every rank -> load -> did all load it? -> line durable in
                          ^---- again, or from others -------'              all stores? -> resume

Never: chooses by what this rank alone knows; resumes at anything older than the head; begins anew
where a checkpoint was committed and can not be loaded.

Invariants
- What the tier below may have is not passed over because it could not be read.
- A choice is loaded by all ranks or by none: whose load failed is told to all. It is tried once
  more, since a link that failed says nothing about the bytes; then all go on without that holder.
  Each two rounds exclude one at least, so that they end.
- No rank can vote before the record of the line is durable in every store.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses

from cxlfs.errors import JobConfigurationError
from cxlfs.job.protocol.lineage import Lineage
from cxlfs.job.protocol.machine import (
    Action,
    BeginLine,
    Done,
    Failed,
    Gather,
    Load,
    Machine,
    Poll,
    TakeStock,
    TakeStockBelow,
)
from cxlfs.job.protocol.messages import Begun, Body, Loaded, Stock, Tally, tally_of
from cxlfs.job.protocol.model import (
    Asked,
    Inventory,
    Line,
    Nothing,
    NotRestored,
    Restored,
    Undecided,
)
from cxlfs.job.protocol.place import Place
from cxlfs.job.protocol.placement import stores_of_copies
from cxlfs.job.protocol.planning import (
    Choice,
    Excluded,
    Kind,
    Verdict,
    judge,
    line_after,
    recorders_of,
)

_Missing = tuple[int, ...]
TRIES = 2
"""Of each holder, before it is left out."""


class Restoring(Machine):
    """``can_fetch``: shards can be brought from the stores of other ranks; ``has_tier``: and from a
    tier below, which rank 0 looks into for all. ``nonce``: this rank's part in the id of the line,
    never used before; ``began``: by its clock. ``replicas``, ``placement``: where copies will lie.
    ``stops``: too few stores are a question to the operator, not a branch. ``inventories`` and
    ``below``, once they were gathered: of the store of each rank, and of the tier; ``line``: what
    has begun.
    """

    def __init__(
        self,
        place: Place,
        *,
        can_fetch: bool,
        has_tier: bool = False,
        nonce: str = "",
        began: int = 0,
        replicas: int = 1,
        placement: str = "groups",
        stops: bool = False,
    ) -> None:
        super().__init__(place)
        self.can_fetch = can_fetch
        self.has_tier = has_tier
        self.replicas = replicas
        self.placement = placement
        self.stops = stops
        self.inventories: tuple[Inventory, ...] = ()
        self.below: Inventory | None = None
        self.verdict: Verdict | None = None
        self.line: Line | None = None
        self._nonces: tuple[str, ...] = ()
        self._began = 0
        self._below_reason = ""
        self._own = Stock(None, nonce=nonce, began=began)
        self._excluded: set[Excluded] = set()
        self._tries: collections.Counter[Excluded] = collections.Counter()
        self._failures: list[str] = []
        self._choice: Choice | None = None
        self.round = 0

    @property
    def everywhere(self) -> tuple[Inventory, ...]:
        """Of the stores of all ranks, and of the tier below."""
        return (*self.inventories, *([] if self.below is None else [self.below]))

    @property
    def lineage(self) -> Lineage:
        """Of all lines that were heard of, and the one that has begun."""
        known = Lineage() if self.verdict is None else self.verdict.seen.lineage
        return known if self.line is None else known.joined(self.line)

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
            inventory, reason = _stock_of(event)
            self._own = dataclasses.replace(self._own, inventory=inventory, reason=reason)
            if self.has_tier and self.place.rank == 0:
                return TakeStockBelow()
            return self._tell_stock(self._own)
        if isinstance(action, TakeStockBelow):
            below, reason = _stock_of(event)
            return self._tell_stock(
                dataclasses.replace(self._own, below=below, below_reason=reason)
            )
        if isinstance(action, Load):
            body = Loaded(action.attempt, action.shard, action.holder, _reason_of(event))
            return self._begin_poll(
                Poll(
                    self._key("loaded", self.round),
                    action.attempt,
                    self._loaded,
                    self._loaded_by_all,
                    self._decide_loaded,
                ),
                body,
            )
        if isinstance(action, BeginLine):
            return self._tell_begun(Begun(action.line.id, _reason_of(event)))
        return None

    # --- the verdict ------------------------------------------------------------------------

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
        self._nonces = tuple(stock.nonce for stock in stocks)
        self._began = stocks[0].began
        return self._load_next()

    def _load_next(self) -> Action | None:
        verdict = judge(
            self.inventories, self._excluded, can_fetch=self.can_fetch, below=self.below
        )
        self.verdict, self._choice = verdict, verdict.choice
        choice, rank = self._choice, self.place.rank
        reasons = (*verdict.reasons, *self._failures)
        is_sure = verdict.kind is Kind.RESUME and not verdict.unheard
        if self._below_reason and not is_sure:
            unread = f"the tier below could not be read: {self._below_reason}"
            self._finish(NotRestored((*reasons, unread)))
        elif verdict.kind in {Kind.REFUSE, Kind.OTHER_WORLD}:
            self._finish(NotRestored(reasons))
        elif verdict.kind is Kind.ASK:
            self._finish(Asked(verdict.heads, reasons, verdict.loadable))
        elif self.stops and verdict.unheard and verdict.decision is None:
            absent = f"too few stores were heard: {', '.join(verdict.unheard)} may have more"
            self._finish(Asked(verdict.heads, (*reasons, absent), verdict.heads))
        elif choice is None:
            return self._begin_line()
        else:
            return Load(choice.attempt, rank, choice.holders[rank], choice.manifests[rank])
        self._choice = None
        return None

    # --- loading ----------------------------------------------------------------------------

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

    def _decide_loaded(self, tally: Tally) -> Action | None:
        choice = self._choice
        if choice is None or (tally.attempt, tally.digest) != (choice.attempt, choice.digest):
            self._finish(Undecided("loaded", (0,)))
            return None
        if not tally.against:
            return self._begin_line()
        for rank, reason in tally.against:
            failed = Excluded(choice.attempt, rank, choice.holders[rank])
            self._tries[failed] += 1
            if self._tries[failed] >= TRIES:
                self._excluded.add(failed)
            self._failures.append(f"{choice.attempt}, rank {rank}: {reason}")
        self.round += 1
        return self._load_next()

    # --- the line ---------------------------------------------------------------------------

    def _begin_line(self) -> Action | None:
        if self.verdict is None:
            return None
        targets: tuple[tuple[str, ...], ...] = ((),) * self.place.world
        with contextlib.suppress(JobConfigurationError):  # no checkpoint will be made then
            targets = stores_of_copies(self.inventories, self.replicas, self.placement)
        self.line = line_after(self.verdict, self.inventories, targets, self._nonces, self._began)
        if self.place.rank in recorders_of(self.inventories):
            return BeginLine(self.line, self._choice)
        return self._tell_begun(None)

    def _tell_begun(self, body: Begun | None) -> Action | None:
        return self._begin_poll(
            Poll(
                self._key("line"),
                None,
                self._begun_in,
                self._begun_in_all,
                self._decide_restored,
                recorders_of(self.inventories),
            ),
            body,
        )

    def _begun_in(self, heard: dict[int, Body], missing: _Missing) -> Tally | None:
        against = {rank: self._why_not(body) for rank, body in heard.items()}
        return self._begun_in_all({r: why for r, why in against.items() if why}, missing, [])

    def _why_not(self, body: Body) -> str:
        if not isinstance(body, Begun):
            return "another message instead of its line"
        if self.line is None or (body.line != self.line.id and not body.reason):
            return "its replicas or placement are others than rank 0's"
        return body.reason

    def _begun_in_all(
        self, against: dict[int, str], missing: _Missing, _digests: list[str]
    ) -> Tally | None:
        return None if missing and not against else tally_of(None, "", against)

    def _decide_restored(self, tally: Tally) -> Action | None:
        if tally.against:
            told = (f"rank {rank}: {why}" for rank, why in tally.against)
            self._finish(NotRestored(tuple(told)))
            return None
        choice, rank = self._choice, self.place.rank
        if choice is None:
            self._finish(Nothing())
        else:
            holder = choice.holders[rank]
            is_fetched = holder != self.inventories[rank].store
            self._finish(Restored(choice.attempt, choice.digest, rank, holder, is_fetched))
        return None


def _reason_of(event: Done | Failed) -> str:
    return event.reason or "no reason" if isinstance(event, Failed) else ""


def _stock_of(event: Done | Failed) -> tuple[Inventory | None, str]:
    if isinstance(event, Done) and isinstance(event.value, Inventory):
        return event.value, ""
    return None, event.reason if isinstance(event, Failed) else "no inventory"
