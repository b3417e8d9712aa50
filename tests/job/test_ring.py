"""Copies in one ring of all stores, in the place of groups: where they lie, that a lost store is
filled from both of its neighbours, and that ranks which mean another placement save nothing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cxlfs.errors import JobConfigurationError
from cxlfs.job import Checkpointer, Committed, NotRestoredError, Restored
from tests.support.job_ranks import Job

WORLD = 4


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path, WORLD)
    made.replicas = 2
    made.placement = "ring"
    return made


def held(job: Job) -> list[list[int]]:
    """Whose shards each store has."""
    return [
        sorted(int(path.name[5:]) for path in job.store(rank).glob("step-*/rank-*"))
        for rank in range(WORLD)
    ]


def resumed(job: Job, made: Checkpointer) -> object:
    """And copies are whole again."""
    found = job.load(made)
    made.close()
    return found


RING = [[0, 3], [0, 1], [1, 2], [2, 3]]
PAIRS = [[0, 1], [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(("placement", "wanted"), [("ring", RING), ("groups", PAIRS)])
def test_where_copies_lie(job: Job, placement: str, wanted: list[list[int]]) -> None:
    job.placement = placement
    rows = job.start(lambda made: job.save(made, 10))
    assert all(isinstance(row, list) and isinstance(row[0], Committed) for row in rows), rows
    assert held(job) == wanted


def test_a_lost_store_is_filled_by_both_neighbours(job: Job) -> None:
    job.start(lambda made: job.save(made, 10))
    shutil.rmtree(job.store(1))

    rows = job.start(lambda made: resumed(job, made))
    assert all(isinstance(found, Restored) and found.step == 10 for found in rows), rows
    assert [found.is_fetched for found in rows if isinstance(found, Restored)] == [
        rank == 1 for rank in range(WORLD)
    ]
    assert held(job) == RING


def test_two_that_are_no_neighbours(job: Job) -> None:
    """Nothing is lost; of neighbours it is, and that is an error."""
    job.start(lambda made: job.save(made, 10))
    for rank in (0, 2):
        shutil.rmtree(job.store(rank))
    assert all(isinstance(found, Restored) for found in job.start(lambda made: resumed(job, made)))
    for rank in (0, 1):
        shutil.rmtree(job.store(rank))
    assert not any(isinstance(found, Restored) for found in job.start(job.load))


def test_ranks_that_mean_another_placement_do_not_start(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        if made.world.rank == 1:
            made.copies.placement = "groups"
        return job.save(made, 10)

    for error in job.start(work):
        assert isinstance(error, NotRestoredError), error
        assert "replicas or placement are others" in error.message


def test_there_is_no_other(job: Job) -> None:
    job.placement = "star"
    for error in job.start(job.load):
        assert isinstance(error, JobConfigurationError)
        assert "groups and ring" in error.message
