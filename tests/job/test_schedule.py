"""When a checkpoint is due: alike on all ranks, whatever their clocks say, for few messages."""

from __future__ import annotations

import pytest

from cxlfs.job import JobConfigurationError, UndecidedError, every
from tests.support.job_ranks import SECONDS, Board, ThreadEngine, on_all_ranks

WORLD = 3


class Time:
    """Of one rank, in its own seconds; ``pace`` of them go by in a step."""

    def __init__(self, now: float, pace: float) -> None:
        self.now = now
        self.pace = pace

    def __call__(self) -> float:
        return self.now


def train(
    steps: range, *, seconds: float, every_steps: int | None = None, slow_from: int = 1 << 30
) -> tuple[list[list[int]], int]:
    """The steps behind which each rank found a checkpoint due, and how many messages there were.
    A step takes one second, twice that from ``slow_from``; the clocks of other ranks than 0 mean
    something else.
    """
    boards: list[Board] = []

    def one(engine: ThreadEngine) -> list[int]:
        boards.append(engine.board)
        time = Time(1000.0 * engine.rank, 1.0 + 7 * engine.rank)
        schedule = every(every_steps, seconds, engine=engine, clock=time, deadline_seconds=SECONDS)
        found = []
        for step in steps:
            time.now += time.pace * (2 if step >= slow_from else 1)
            if schedule.due(step):
                found.append(step)
        return found

    rows = on_all_ranks(WORLD, "1", one)
    lists = [rows[rank] for rank in range(WORLD)]
    assert all(isinstance(row, list) for row in lists), lists
    return [row for row in lists if isinstance(row, list)], len(boards[0].said)


def test_so_many_steps_need_nobody() -> None:
    schedule = every(steps=10)
    assert [step for step in range(35) if schedule.due(step)] == [9, 19, 29]
    assert [step for step in range(15, 35) if every(steps=10).due(step)] == [19, 29]
    assert [step for step in range(18, 21) if schedule.due(step)] == [19]  # back to a step before
    schedule = every(steps=10)
    assert [step for step in range(0, 40, 4) if schedule.due(step)] == [12, 20, 32]
    schedule = every(steps=1)
    assert all(schedule.due(step) for step in range(5))


def test_the_clock_of_rank_0_decides_for_all() -> None:
    rows, messages = train(range(1000), seconds=100)
    assert rows[0] == rows[1] == rows[2]
    assert rows[0] == list(range(99, 1000, 100))
    assert messages <= 10 * 2 * 7 + 7  # 2 log2(100) for each; one at each step were 1000


def test_steps_that_turn_twice_as_slow_make_it_late_by_one() -> None:
    for slow_from in range(1, 200, 7):
        rows, _ = train(range(200), seconds=100, slow_from=slow_from)
        assert rows[0] == rows[1] == rows[2]
        times = [step + 1 + max(0, step - slow_from + 1) for step in rows[0]]
        waits = [b - a for a, b in zip([0, *times], times, strict=False)]
        assert waits
        assert all(100 <= wait <= 102 for wait in waits), (slow_from, rows[0])


def test_what_comes_first_of_steps_and_seconds() -> None:
    rows, _ = train(range(300), seconds=100, every_steps=130)
    assert rows[0] == rows[1] == rows[2]
    assert rows[0] == [99, 129, 229, 259]


def test_a_job_that_goes_back_to_an_earlier_step() -> None:
    def one(engine: ThreadEngine) -> list[int]:
        time = Time(0.0, 1.0)
        schedule = every(seconds=100, engine=engine, clock=time, deadline_seconds=SECONDS)
        found = []
        for step in [*range(150), *range(100, 300)]:
            time.now += time.pace
            if schedule.due(step):
                found.append(step)
        return found

    rows = on_all_ranks(WORLD, "1", one)
    assert rows[0] == rows[1] == rows[2] == [99, 149, 249]


def test_ranks_that_do_not_ask_alike_are_told() -> None:
    def one(engine: ThreadEngine) -> bool:
        schedule = every(seconds=100, engine=engine, deadline_seconds=SECONDS)
        return schedule.due(5 + (engine.rank == 2))

    rows = on_all_ranks(WORLD, "1", one)
    assert [rows[0], rows[1]] == [False, False]
    assert isinstance(rows[2], JobConfigurationError)


def test_a_rank_0_that_is_gone() -> None:
    def one(engine: ThreadEngine) -> bool:
        return every(seconds=100, engine=engine, deadline_seconds=0.05).due(0)

    rows = on_all_ranks(WORLD, "1", one, absent=(0,))
    assert [type(rows[1]), type(rows[2])] == [UndecidedError, UndecidedError]


@pytest.mark.parametrize(
    ("steps", "seconds"), [(None, None), (0, None), (None, 0.0), (5, -1.0), (None, float("nan"))]
)
def test_what_is_no_interval(steps: int | None, seconds: float | None) -> None:
    with pytest.raises(JobConfigurationError):
        every(steps, seconds)
