"""Histories of a job of 2 to 5 ranks of which Hypothesis decides what goes wrong, and when: which
message is lost, late or doubled, before or behind which action a rank dies, which action fails,
when a deadline passes early, which store is lost. A history that breaks something is made smaller
until every fault that is left is needed.

The order in which the rest happens is that of a seed. What must hold is judged by ``History``.
"""

from __future__ import annotations

import collections
import dataclasses

import hypothesis.strategies as st

from tests.support.job_histories import History
from tests.support.job_stores import QUIET, Store

MESSAGE, ACTION = ("lost", "late"), ("dies before", "fails", "dies behind")
KINDS = (*MESSAGE, *ACTION, "doubled", "early_deadline", "store_lost", "failed", "died")
_AT_MAX = 120
"""Messages of one start of five ranks: some 100."""


@dataclasses.dataclass(frozen=True, slots=True)
class Strike:
    """The ``at``-th time that it could happen in a start of the job, it does."""

    kind: str
    at: int


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """Of all processes: what is lost before it, where ranks come back, what it saves."""

    strikes: frozenset[Strike]
    lost_stores: frozenset[int]
    damaged_stores: frozenset[int]
    permuted: bool
    saves: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    seed: int
    world: int
    replicas: int
    stores: int
    group_size: int
    keep: int
    starts: tuple[Start, ...]


class PlannedHistory(History):
    """``run`` raises ViolationError."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan.seed)
        self.plan = plan
        self.world = plan.world
        self.group_size = plan.group_size
        self.keep = plan.keep
        self.made = min(max(plan.stores, plan.replicas), plan.world)
        self.replicas = min(plan.replicas, self.made)
        self.stores = [Store(f"store{i}", is_volatile=False) for i in range(self.made)]
        self.seats = [rank % self.made for rank in range(self.world)]
        self._strikes_now: frozenset[Strike] = frozenset()
        self._times: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        for start in self.plan.starts:
            self._before(start)
            self._strikes_now, self._times = start.strikes, collections.Counter()
            self._incarnate(QUIET, start.saves)
        self._strikes_now = frozenset()
        self._end_quietly()

    def _before(self, start: Start) -> None:
        for index in sorted(start.lost_stores):
            if index < len(self.stores):
                self._lose(index)
        for index in sorted(start.damaged_stores):
            copies = self.stores[index].copies if index < len(self.stores) else {}
            for copy in list(copies.values())[-1:]:
                copy.is_damaged = True
                self._count("damaged copies")
                self._note_loss(index)
        if start.permuted:
            self.random.shuffle(self.seats)

    def _strikes(self, kind: str, share: float = 1.0) -> bool:
        del share
        return self._is_struck(kind)

    def _fate_of_message(self) -> str:
        return next((kind for kind in MESSAGE if self._is_struck(kind)), "")

    def _fate_of_action(self) -> str:
        return next((kind for kind in ACTION if self._is_struck(kind)), "")

    def _is_struck(self, kind: str) -> bool:
        at = self._times[kind]
        self._times[kind] += 1
        return Strike(kind, at) in self._strikes_now


_AT = st.integers(0, 12) | st.integers(0, 40) | st.integers(0, _AT_MAX)
STRIKES = st.builds(Strike, st.sampled_from(KINDS), _AT)
STARTS = st.builds(
    Start,
    strikes=st.frozensets(STRIKES, max_size=8),
    lost_stores=st.frozensets(st.integers(0, 4), max_size=1),
    damaged_stores=st.frozensets(st.integers(0, 4), max_size=1),
    permuted=st.booleans(),
    saves=st.integers(0, 3),
)
PLANS = st.builds(
    Plan,
    seed=st.integers(0, 2**32 - 1),
    world=st.integers(2, 5),
    replicas=st.integers(1, 3),
    stores=st.integers(1, 5),
    group_size=st.sampled_from([0, 0, 1, 2]),
    keep=st.integers(1, 2),
    starts=st.lists(STARTS, min_size=1, max_size=4).map(tuple),
)
