"""Ranks and stores of a simulated job, and what goes wrong in it (see ``job_histories``)."""

from __future__ import annotations

import dataclasses
import random

from cxlfs.job.protocol import (
    Attempt,
    Commit,
    Gather,
    Heard,
    Held,
    Inventory,
    Machine,
    Outcome,
)


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

    def inventory(self) -> Inventory:
        return Inventory(
            self.name,
            tuple(copy.held for copy in self.copies.values()),
            tuple(Commit(attempt, digest) for attempt, digest in self.commits.items()),
        )

    def remove(self, attempt: Attempt) -> None:
        self.copies = {key: copy for key, copy in self.copies.items() if key[0] != attempt}
        self.commits.pop(attempt, None)


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


@dataclasses.dataclass
class Rank:
    """One process. ``machine`` is None when it has ended, or died."""

    number: int
    machine: Machine | None = None
    call: int = 0
    saves: int = 0
    step: int = 0
    first_number: int = 1
    mailbox: list[Heard] = dataclasses.field(default_factory=list)
    told: Gather | None = None
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)
    loaded: str = ""
