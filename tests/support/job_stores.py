"""Ranks and stores of a simulated job, and what goes wrong in it (see ``job_histories``)."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from cxlfs.job.protocol import (
    Aborted,
    Attempt,
    Commit,
    Committed,
    Decision,
    Gather,
    Heard,
    Held,
    Inventory,
    Key,
    Line,
    Lineage,
    Machine,
    Outcome,
    Placement,
    Restoring,
    missing_copies,
    place_copies,
)


class _Runs(Protocol):
    def run(self) -> None: ...


_History = TypeVar("_History", bound=_Runs)


def run_each(
    make: Callable[[int], _History], first: int, count: int
) -> Iterator[tuple[int, _History]]:
    """One history after the other; a ViolationError names its seed."""
    for seed in range(first, first + count):
        history = make(seed)
        try:
            history.run()
        except ViolationError as violation:
            raise ViolationError(f"history {seed}: {violation}") from None
        yield seed, history


class ViolationError(AssertionError):
    """What must hold does not."""


@dataclasses.dataclass
class Copy:
    """Shards of one rank in a store: what they say, and what they are."""

    held: Held
    content: str
    is_damaged: bool = False


class Store:
    def __init__(self, name: str, *, is_volatile: bool) -> None:
        self.name = name
        self.is_volatile = is_volatile
        self.staged: dict[tuple[Attempt, int], str] = {}
        self.copies: dict[tuple[Attempt, int], Copy] = {}
        self.commits: dict[Attempt, str] = {}
        self.lines: dict[str, Line] = {}
        self.owner = ""
        """The line that may vote here."""
        self.decision: Decision | None = None

    def inventory(self) -> Inventory:
        return Inventory(
            self.name,
            tuple(copy.held for copy in self.copies.values()),
            tuple(Commit(attempt, digest) for attempt, digest in self.commits.items()),
            self.name,
            next((line.job for line in self.lines.values()), ""),
            tuple(self.lines.values()),
            decision=self.decision,
        )

    def remove(self, attempt: Attempt) -> None:
        self.copies = {key: copy for key, copy in self.copies.items() if key[0] != attempt}
        self.commits.pop(attempt, None)


def placed(seated: Sequence[Store], replicas: int) -> Placement:
    """``seated[i]``: the store that rank i has, a failure domain of its own."""
    inventories = [Inventory(store.name, domain=store.name) for store in seated]
    return place_copies(inventories, replicas)


def fill(
    seated: Sequence[Store], replicas: int, machine: Restoring, numbers: random.Random
) -> Iterator[None]:
    """Copies that are missing of what a rank has loaded are made again, or some of them are."""
    choice, rank = machine.choice, machine.place.rank
    if choice is None:
        return
    key = choice.attempt, rank
    placement, stocks = placed(seated, replicas), machine.inventories
    for transfer in missing_copies(placement, choice, stocks, machine.excluded):
        own = seated[rank].copies.get(key)
        if transfer.source == rank and own is not None and numbers.random() < 0.7:
            seated[transfer.target].copies[key] = dataclasses.replace(own)
            yield


@dataclasses.dataclass(frozen=True)
class Faults:
    """How likely: of each message, of each action, of each turn."""

    lost: float = 0.0
    late: float = 0.0
    doubled: float = 0.0
    failed: float = 0.0
    died: float = 0.0
    early_deadline: float = 0.0
    store_lost: float = 0.0


QUIET = Faults()
FAULTS_AND_OUTCOMES = (
    "Aborted",
    "Asked",
    "Committed",
    "Restored",
    "Undecided",
    "damaged copies",
    "deaths",
    "doubled messages",
    "failed actions",
    "late messages",
    "lost messages",
    "lost stores",
    "messages of a former incarnation",
)
"""What histories count that any many of them meet, however they are chosen."""


def some_faults(numbers: random.Random) -> Faults:
    """Each kind of fault in half of them."""

    def some(most: float) -> float:
        return numbers.choice([0.0, numbers.random() * most])

    return Faults(
        lost=some(0.1),
        late=some(0.2),
        doubled=some(0.4),
        failed=some(0.08),
        died=some(0.08),
        early_deadline=some(0.02),
        store_lost=some(0.3),
    )


class Fates:
    """What goes wrong in a history, by chance."""

    random: random.Random
    faults: Faults

    def _strikes(self, kind: str, share: float = 1.0) -> bool:
        """Of ``Faults``; ``share``: of its likelihood."""
        likely: float = getattr(self.faults, kind)
        return self.random.random() < likely * share

    def _fate_of_message(self) -> str:
        fate = self.random.random()
        if fate < self.faults.lost:
            return "lost"
        return "late" if fate < self.faults.lost + self.faults.late else ""

    def _fate_of_action(self) -> str:
        fate = self.random.random()
        if fate < self.faults.died / 2:
            return "dies before"
        if self.random.random() < self.faults.failed:
            return "fails"
        return "dies behind" if fate < self.faults.died else ""


@dataclasses.dataclass
class Rank:
    """One process. ``machine`` is None when it has ended, or died."""

    number: int
    machine: Machine | None = None
    call: int = 0
    saves: int = 0
    step: int = 0
    first_number: int = 1
    line: str = ""
    lineage: Lineage = dataclasses.field(default_factory=Lineage)
    mailbox: dict[Key, list[Heard]] = dataclasses.field(default_factory=dict)
    told: Gather | None = None
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    loaded: str = ""


def judge_kept(stores: Sequence[Store], keep: int) -> None:
    """Raises ViolationError."""
    for store in stores:
        kept = {attempt for attempt, _ in store.copies}
        if len(kept) > keep:
            raise ViolationError(f"{store.name} keeps {sorted(kept)}")


def judge_verdicts(outcomes: list[list[Outcome]]) -> None:
    """Of each rank, of all its calls; the first restores. Raises ViolationError."""
    for call in range(1, max((len(row) for row in outcomes), default=0)):
        kinds = {type(row[call]) for row in outcomes if len(row) > call}
        if {Committed, Aborted} <= kinds:
            raise ViolationError(f"verdicts differ in call {call}: {[r[1:] for r in outcomes]}")
        said = {
            (o.attempt, o.digest)
            for o in (row[call] for row in outcomes if len(row) > call)
            if isinstance(o, Committed)
        }
        if len(said) > 1:
            raise ViolationError(f"other attempts were committed: {said}")


def committed_now(ranks: Sequence[Rank], attempt: Attempt) -> bool:
    """In this incarnation: it came behind the restore that is judged."""
    return any(
        isinstance(outcome, Committed) and outcome.attempt == attempt
        for rank in ranks
        for outcome in rank.outcomes
    )
