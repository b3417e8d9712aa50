"""Ranks in groups over the engine of torch, with stores in memory: who asks which store how often,
and what a group does whose leader is not reached, or gone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from cxlfs.job import driver
from cxlfs.job.engines import group_size_of
from cxlfs.job.engines.torch import StoreEngine
from cxlfs.job.protocol import (
    Aborted,
    Action,
    Attempt,
    Committed,
    Outcome,
    Place,
    Save,
    Saving,
    Undecided,
    WriteManifest,
)
from tests.support.bench.job import RANKS_PER_NODE, Simulation
from tests.support.job_key_value import MemoryGroups, MemoryStore, Shelf

RANKS = 10
GROUP = 4
SECONDS = 20.0
ATTEMPT = Attempt(1, 10, "0123456789abcdef")


class Ranks:
    """Threads that save once; ``shelves`` are the stores, "all" and those of leaders."""

    def __init__(self, *, cut: int = -1) -> None:
        self.shelves = {"all": Shelf()}
        self.cut = cut
        self.asked: dict[str, int] = {}
        self.seconds = [SECONDS] * RANKS
        self.met = threading.Barrier(RANKS, action=self._begin_counting)
        self.heard = threading.Barrier(RANKS)

    def _begin_counting(self) -> None:
        for shelf in self.shelves.values():
            shelf.requests = 0

    def save(self, act: Callable[[int, Action], str | None]) -> list[Outcome | str]:
        found: list[Outcome | str] = [""] * RANKS

        def run(rank: int) -> None:
            groups: Any = MemoryGroups(rank, GROUP, self.shelves, cut=self.cut)
            engine = StoreEngine(MemoryStore(self.shelves["all"]), rank, RANKS, "0", groups)
            world = engine.world()
            place = Place(rank, RANKS, world.incarnation, 1, world.group_size)
            recorders = frozenset(range(0, RANKS, RANKS_PER_NODE))
            machine = Saving(place, ATTEMPT, recorders=recorders)
            self.met.wait(SECONDS)
            said: list[str] = []
            try:
                found[rank] = driver.drive(
                    machine,
                    engine,
                    lambda action: act(rank, action),
                    deadline_seconds=self.seconds[rank],
                    said=said,
                )
            except SystemExit as error:
                found[rank] = str(error)
            self.heard.wait(SECONDS)
            for key in said:
                engine.forget(key)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.asked = {name: shelf.requests for name, shelf in self.shelves.items()}
        return found


def vote(rank: int, action: Action) -> str | None:
    return f"{rank:064x}" if isinstance(action, WriteManifest) else None


def test_a_large_job_has_groups() -> None:
    assert [group_size_of(size) for size in (1, 64, 128, 129, 10_000)] == [0, 0, 0, 12, 100]


def test_nobody_is_asked_more_often_than_the_model_says() -> None:
    ranks = Ranks()
    outcomes = ranks.save(vote)
    assert isinstance(outcomes[0], Committed)
    assert outcomes == [outcomes[0]] * RANKS
    model = Simulation(RANKS, GROUP)
    model.run()
    wanted = [server.requests for server in model.servers]
    assert [ranks.asked["all"], *(ranks.asked[f"of rank {n}"] for n in (0, 4, 8))] == wanted
    left = {key for shelf in ranks.shelves.values() for key in shelf.kept}
    assert {key.split("/")[1] if "/" in key else key for key in left} == {"call", "group"}


def test_a_group_that_does_not_reach_its_leader_talks_in_the_store_of_all() -> None:
    ranks = Ranks(cut=6)
    outcomes = ranks.save(vote)
    assert isinstance(outcomes[0], Committed)
    assert outcomes == [outcomes[0]] * RANKS
    assert ranks.asked["of rank 4"] == 0
    assert ranks.asked["of rank 8"] > 0


def test_who_cannot_save_is_named_to_all() -> None:
    def act(rank: int, action: Action) -> str | None:
        if rank == 5 and isinstance(action, Save):
            raise ValueError("it cannot")
        return vote(rank, action)

    outcomes = Ranks().save(act)
    assert outcomes == [Aborted(10, ((5, "ValueError: it cannot"),))] * RANKS


@pytest.mark.parametrize("dying", [4, 5])
def test_a_rank_that_dies_before_it_votes_leaves_all_undecided(dying: int) -> None:
    """A leader as any other."""

    def act(rank: int, action: Action) -> str | None:
        if rank == dying and isinstance(action, Save):
            raise SystemExit("died")
        return vote(rank, action)

    ranks = Ranks()
    ranks.seconds = [0.3] * RANKS
    outcomes = ranks.save(act)
    assert outcomes.pop(dying) == "died"
    assert all(isinstance(outcome, Undecided) for outcome in outcomes), outcomes


def test_a_leader_that_dies_behind_its_part_costs_its_group_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They hear of rank 0 what it would have passed on."""
    tell = driver._tell

    def dying(machine: Any, engine: Any, action: Any, said: list[str]) -> None:
        is_verdict = type(action.body).__name__ == "Tally" and action.key.phase == "vote"
        if machine.place.rank == 4 and is_verdict:
            raise SystemExit("died")
        tell(machine, engine, action, said)

    monkeypatch.setattr(driver, "_tell", dying)
    ranks = Ranks()
    ranks.seconds = [0.6] * 4 + [SECONDS] + [0.2] * 3 + [0.6] * 2
    outcomes = ranks.save(vote)
    assert outcomes.pop(4) == "died"
    assert all(isinstance(outcome, Committed) for outcome in outcomes), outcomes
    assert len({outcome.digest for outcome in outcomes if isinstance(outcome, Committed)}) == 1
