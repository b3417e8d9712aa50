"""The formulas of ``cxlfs.job.advice`` beside what a job does event by event, and their edges."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import UsageError
from cxlfs.job import advice
from cxlfs.job.advice import Costs
from cxlfs.job.trial import try_save
from tests.support import job_figures as figures
from tests.support.job_simulation import Job, simulate

HOUR = 3600.0


def total(shares: advice.Shares) -> float:
    return sum(dataclasses.astuple(shares))


def some_costs(rng: random.Random, count: int) -> Iterator[tuple[Costs, float]]:
    """And an interval that they allow; from hopeless jobs to those that hardly fail."""
    for _ in range(count):
        mtbf = 10 ** rng.uniform(2, 6)
        save = mtbf * 10 ** rng.uniform(-4, -0.3)
        stall = save * rng.choice([0.0, rng.random(), 1.0])
        costs = Costs(mtbf, save, stall, mtbf * rng.choice([0.0, 0.3 * rng.random()]), 0.05)
        yield costs, save * rng.uniform(1, 10)


def test_the_formula_is_what_happens(rng: random.Random) -> None:
    """Every share of it, for jobs of several nodes: within five standard deviations or so."""
    for costs, interval in some_costs(rng, 12):
        nodes = rng.choice([1, 7, 50])
        job = Job(
            nodes=nodes,
            node_mtbf_seconds=costs.mtbf_seconds * nodes,
            save_seconds=costs.save_seconds,
            stall_seconds=costs.stall_seconds,
            interval_seconds=interval,
            restart_seconds=costs.restart_seconds,
            overhead=costs.overhead,
        )
        run = simulate(job, failures=4000, seed=rng.randrange(1 << 30))
        assert run.seconds == pytest.approx(run.elapsed)
        assert run.elapsed / run.failures == pytest.approx(costs.mtbf_seconds, rel=0.08)
        wanted = advice.shares(costs, interval)
        for name, share in dataclasses.asdict(wanted).items():
            assert getattr(run, name) / run.seconds == pytest.approx(share, abs=0.02), name
        most = interval + costs.save_seconds - costs.stall_seconds
        assert run.lost_most <= most * (1 + 1e-9)
        assert advice.failure(costs, interval).redone_seconds_max == most


def test_a_wrong_formula_would_be_found(rng: random.Random) -> None:
    """A save that counted when it begins, and one failure too few: both are further off."""
    job = Job(1, 3600.0, 900.0, 0.0, 1800.0, 600.0)
    run = simulate(job, failures=4000, seed=rng.randrange(1 << 30))
    costs = Costs(3600.0, 900.0, 0.0, 600.0)
    assert run.efficiency == pytest.approx(advice.shares(costs, 1800.0).training, abs=0.02)
    for wrong in (
        dataclasses.replace(costs, save_seconds=0.0),
        dataclasses.replace(costs, restart_seconds=0.0),
        dataclasses.replace(costs, save_seconds=900.0, stall_seconds=900.0),
    ):
        assert abs(run.efficiency - advice.shares(wrong, 1800.0).training) > 0.04


def test_shares_are_all_of_the_time(rng: random.Random) -> None:
    for costs, interval in some_costs(rng, 500):
        shares = advice.shares(costs, interval)
        assert total(shares) == pytest.approx(1)
        assert all(share >= 0 for share in dataclasses.astuple(shares))


def test_no_interval_is_better_than_the_best(rng: random.Random) -> None:
    for costs, _ in some_costs(rng, 500):
        best = advice.best_interval(costs)
        found = advice.shares(costs, best).training
        for factor in (0.5, 0.9, 0.999, 1.001, 1.1, 2.0):
            if best * factor >= costs.save_seconds:
                assert advice.shares(costs, best * factor).training <= found * (1 + 1e-12)


def test_the_known_formulas_are_near_where_saves_are_cheap() -> None:
    costs = Costs(HOUR * 4, 1.0, 1.0, 0.0)
    best = advice.best_interval(costs)
    assert advice.young(costs) == pytest.approx(math.sqrt(2 * 4 * HOUR))
    for known in (advice.young, advice.daly, advice.saxena):
        assert known(costs) == pytest.approx(best, rel=0.01)
    dear = Costs(HOUR, 600.0, 600.0, 0.0)
    best = advice.best_interval(dear)
    off = [abs(known(dear) / best - 1) for known in (advice.daly, advice.young)]
    assert off[0] < 0.01 < off[1]


def test_what_costs_nothing_and_what_always_fails() -> None:
    free = Costs(HOUR, 0.0, 0.0, 0.0)
    assert advice.shares(free, advice.best_interval(free)).training == pytest.approx(1)
    beside = Costs(HOUR, 60.0, 0.0, 0.0)
    assert advice.best_interval(beside) == 60.0
    hopeless = Costs(1.0, 100.0, 100.0, 1000.0)
    assert advice.shares(hopeless, advice.best_interval(hopeless)).training == 0
    assert advice.first_order(hopeless, 100.0) < 0
    assert advice.daly(hopeless) == 101.0


@pytest.mark.parametrize(
    "change",
    [
        {"mtbf_seconds": 0.0},
        {"mtbf_seconds": math.nan},
        {"save_seconds": -1.0},
        {"save_seconds": math.inf},
        {"stall_seconds": 11.0},
        {"restart_seconds": -1.0},
        {"overhead": 1.0},
        {"overhead": -0.1},
    ],
)
def test_costs_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        dataclasses.replace(Costs(HOUR, 10.0, 10.0, 1.0), **change)


@pytest.mark.parametrize("interval", [0.0, 9.9, math.nan, math.inf])
def test_an_interval_that_cannot_be(interval: float) -> None:
    with pytest.raises(UsageError):
        advice.shares(Costs(HOUR, 10.0, 10.0, 1.0), interval)


# --- the published table ------------------------------------------------------------------------


def test_both_figures_of_the_table_fit() -> None:
    for estimate, hours, overhead in (
        (advice.first_order, 3.9, 0.037),
        (figures.exact, 3.4, 0.035),
    ):
        mtbf, share = figures.fit(estimate)
        assert (mtbf / HOUR, share) == (
            pytest.approx(hours, abs=0.05),
            pytest.approx(overhead, abs=1e-3),
        )
        for system, stated in figures.STATED.items():
            found = estimate(system.costs(mtbf, share), system.interval)
            assert found == pytest.approx(stated, abs=1e-6)


def test_what_does_not_follow_from_the_table() -> None:
    blocking = figures.BLOCKING
    never_fails = blocking.costs(1e12)
    assert advice.shares(never_fails, blocking.interval).training == pytest.approx(0.63, abs=0.002)
    rare = figures.NETWORK.costs(7 * 24 * HOUR / 3, 0.035)
    assert advice.shares(rare, figures.NETWORK.interval).training > 0.94
    lost = advice.failure(figures.NETWORK.costs(3.4 * HOUR), figures.NETWORK.interval)
    assert lost.redone_seconds_max < HOUR


# --- the simulation -----------------------------------------------------------------------------


def test_the_same_seed_is_the_same_run(seed: int) -> None:
    job = Job(100, 1e6, 10.0, 1.0, 300.0, 60.0, shape=0.7, store_lost=0.2, replicas=2)
    assert simulate(job, failures=300, seed=seed) == simulate(job, failures=300, seed=seed)
    assert simulate(job, failures=300, seed=seed) != simulate(job, failures=300, seed=seed + 1)


def test_copies_are_what_a_lost_store_is_survived_with(seed: int) -> None:
    runs = {}
    for replicas in (1, 2):
        job = Job(50, 50 * 3600.0, 1.0, 1.0, 300.0, 60.0, store_lost=0.5, replicas=replicas)
        job = dataclasses.replace(job, tier_seconds=3600.0)
        runs[replicas] = simulate(job, failures=1000, seed=seed)
    assert 400 < runs[1].fallbacks < 600
    assert runs[2].fallbacks < 10
    assert runs[1].lost_most > 3000
    assert runs[1].efficiency < runs[2].efficiency


def test_a_tier_is_all_that_is_left_without_copies(seed: int) -> None:
    """Each failure takes a store: without a tier nothing is ever kept."""
    job = Job(10, 10 * 3600.0, 1.0, 1.0, 300.0, 60.0, store_lost=1.0)
    assert simulate(job, failures=200, seed=seed).training == 0
    tiered = dataclasses.replace(job, tier_seconds=600.0)
    assert simulate(tiered, failures=200, seed=seed).efficiency > 0.5


def test_saves_do_not_overtake_each_other(seed: int) -> None:
    with pytest.raises(ValueError, match="overtake"):
        simulate(Job(1, 1e6, 100.0, 0.0, 50.0, 0.0), failures=1, seed=seed)


def test_every_section_has_a_table_and_a_picture(tmp_path: Path, seed: int) -> None:
    found = {name: section(60, seed) for name, section in figures.SECTIONS.items()}
    lines = list(figures.lines(found))
    assert sum(line.startswith("| --- |") for line in lines) == len(figures.SECTIONS)
    assert all(row.count("|") == lines[0].count("|") for row in lines[:8])
    figures.draw(found["scale"], tmp_path / "goodput.svg")
    text = (tmp_path / "goodput.svg").read_text()
    assert text.count("<circle") == 4 * (len(figures.NODES) + 1)
    figures.draw_table(found["table"], tmp_path / "efficiency.svg")
    text = (tmp_path / "efficiency.svg").read_text()
    assert text.count("<circle") == 6
    assert text.count("storage over the network") == 3


# --- a save that is tried -----------------------------------------------------------------------


def test_a_save_is_tried_and_nothing_stays(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    trial = try_save(tmp_path, (8 << 20) + 5, lambda *said: seen.append(said))
    assert trial.size_bytes == (8 << 20) + 5
    assert trial.save_seconds > 0
    assert trial.load_seconds > 0
    assert seen[-1] == ("loading", (8 << 20) + 5, (8 << 20) + 5)
    assert list(tmp_path.iterdir()) == []


def test_a_trial_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_said: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        try_save(tmp_path, 100, stop)
    assert list(tmp_path.iterdir()) == []
