"""Histories of a job with a tier below (see ``job_histories``): what was committed is drained there
by each rank for itself, in part, late, or not at all; restores find it, or cannot read it.

What must hold beside: what is in the tier is not gone back behind, however many stores are lost,
and no job begins anew, or goes back, because the tier could not be read.
"""

from __future__ import annotations

from collections.abc import Iterator

from cxlfs.job.protocol import (
    TIER,
    Attempt,
    BeginLine,
    Commit,
    Committed,
    Done,
    Failed,
    Held,
    Inventory,
    Line,
    Load,
    Machine,
    Nothing,
    Restored,
    Restoring,
    TakeStockBelow,
    digest_of,
)
from tests.support.job_histories import History
from tests.support.job_stores import Copy, Rank, ViolationError, committed_now, run_each


class TierHistory(History):
    """``drained``: the shards there; an attempt counts when all of it is."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drained: dict[tuple[Attempt, int], Copy] = {}
        self.lines_below: dict[str, Line] = {}
        self.job_below = ""
        self.willing = self.random.choice([0.5, 0.9, 1.0])
        """How likely a rank drains what was committed."""
        self.unread = False
        """The tier could not be read in this incarnation,"""
        self.is_excluded = False
        """or something of it could not be loaded."""

    def below(self) -> Inventory:
        attempts = {attempt for attempt, _ in self.drained}
        whole = [
            [self.drained[attempt, rank].held for rank in range(self.world)]
            for attempt in sorted(attempts)
            if all((attempt, rank) in self.drained for rank in range(self.world))
        ]
        held: tuple[Held, ...] = tuple(each for row in whole for each in row)
        digests = ((row[0].attempt, digest_of([each.manifest for each in row])) for row in whole)
        commits = tuple(Commit(*each) for each in digests)
        lines = tuple(self.lines_below.values())
        return Inventory(TIER, held, commits, job=self.job_below, lines=lines)

    def _between(self) -> None:
        """Several stores are lost at once, or all: that is what a tier is for."""
        super()._between()
        if self.random.random() < 0.2:
            share = self.random.choice([0.5, 1.0])
            for index in range(len(self.stores)):
                if self.random.random() < share:
                    self._lose(index)

    def _begin_restore(self, rank: Rank) -> None:
        if rank.number == 0:
            self.unread = self.is_excluded = False
        how = self._how(rank)
        self._start(rank, Restoring(self._place(rank), can_fetch=True, has_tier=True, **how))

    def _ended(self, rank: Rank, machine: Machine) -> None:
        outcome = machine.outcome
        if isinstance(outcome, Committed) and self.random.random() < self.willing:
            key = outcome.attempt, rank.number
            own = self.stores[self.seats[rank.number]].copies.get(key)
            if own is not None and not own.is_damaged:
                self.drained[key] = Copy(own.held, own.content)
                self.lines_below |= {x.id: x for x in rank.lineage.led_by(outcome.attempt)}
                self._count("shards drained")
        super()._ended(rank, machine)

    def _restored(self, rank: Rank, machine: Restoring, outcome: object) -> None:
        if isinstance(outcome, Nothing) and self.below().commits:
            raise ViolationError("it begins anew, though the tier has something")
        self.is_excluded |= any(each.holder == TIER for each in machine.excluded)
        super()._restored(rank, machine, outcome)  # type: ignore[arg-type]

    def _effect(self, rank: Rank, action: object) -> Done | Failed:
        if isinstance(action, TakeStockBelow):
            if rank.number:
                raise ViolationError(f"rank {rank.number} looks into the tier")
            return Done(action, self.below())
        if isinstance(action, Load) and action.holder == TIER:
            return self._bring(rank, action)
        if isinstance(action, BeginLine) and not rank.number and not self.job_below:
            self.job_below = action.line.job
        return super()._effect(rank, action)

    def _act(self, rank: Rank) -> None:
        machine = rank.machine
        asks = machine is not None and isinstance(machine.action, TakeStockBelow)
        if not asks or not self.faults.failed or self.random.random() > 0.2:
            super()._act(rank)
        elif machine is not None and machine.action is not None:
            self._count("tiers not read")
            self.unread = True
            machine.on(Failed(machine.action, "not reached"))
            self._after(rank)

    def _bring(self, rank: Rank, action: Load) -> Done | Failed:
        copy = self.drained.get((action.attempt, action.shard))
        if copy is None or copy.held.manifest != action.manifest:
            return Failed(action, "not there")
        self._count("shards from the tier")
        rank.loaded = copy.content
        own = self.stores[self.seats[rank.number]]
        own.copies[action.attempt, action.shard] = Copy(copy.held, copy.content)
        return Done(action)

    def _judge_not_back(self, outcome: Restored | Nothing) -> None:
        super()._judge_not_back(outcome)
        number = outcome.attempt.number if isinstance(outcome, Restored) else 0
        for commit in self.below().commits:
            is_new = committed_now(self.ranks, commit.attempt)
            if is_new or commit.attempt in self.given_up or self.is_excluded or self.unread:
                continue
            if commit.attempt.number > number:
                raise ViolationError(f"{commit.attempt} is in the tier, {outcome} resumed")
        if self.unread and isinstance(outcome, Nothing):
            raise ViolationError("it begins anew, and the tier was not read")


def tier_histories(first: int, count: int) -> Iterator[tuple[int, TierHistory]]:
    """As ``job_histories.histories``."""
    return run_each(TierHistory, first, count)
