"""The room of older checkpoints: one record for a store, one rank that gives back, behind the
verdict, and nobody who saves before it is there.
"""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from cxlfs.cli.list import Checkpoint, _with_places
from cxlfs.job import Checkpointer, Committed, aside, files
from cxlfs.job.protocol import Attempt
from tests.support.job_ranks import SECONDS, WORLD, Job, write
from tests.support.mount import wait_until

SHARED = [0] * WORLD


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def is_cleaned(rows: list[object]) -> bool:
    return all(isinstance(row, list) and row[-1].is_cleaned for row in rows)


def test_ranks_that_share_a_store_record_once(job: Job) -> None:
    job.seats = SHARED
    assert is_cleaned(job.start(lambda made: job.save(made, 10, 20, 30)))
    names = sorted(path.name for path in job.store(0).glob("step-*/*"))
    assert names == sorted(["commit-00000.json", *(f"rank-0000{n}" for n in range(WORLD))] * 2)


@pytest.mark.parametrize("has_tier", [False, True])
def test_what_a_start_has_not_removed_the_next_does(
    job: Job, tmp_path: Path, *, has_tier: bool
) -> None:
    """Also the directory of an attempt that was never finished, as soon as a newer one counts; and
    where from now on each rank removes its own.
    """
    job.start(lambda made: job.save(made, 10, 20))
    if has_tier:
        pytest.importorskip("obstore", reason="pip install 'cxlfs[tier]' has it")
        (tmp_path / "tier").mkdir()
        job.tier = f"file://{tmp_path}/tier"
    attempt = min(files.attempts_in(job.store(1)))
    aside.set_aside(job.store(1), attempt)
    begun = files.begin(job.store(1), Attempt(1, 5, "e" * 16), 1)

    def work(made: Checkpointer) -> object:
        job.load(made)
        made.wait()
        return aside.is_anything_aside(made.root), begun.exists()

    assert job.start(work) == [(False, True)] * WORLD
    assert is_cleaned(job.start(lambda made: job.save(made, 30)))
    assert not begun.parent.exists()


def test_the_verdict_comes_first_and_the_next_save_has_the_room(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 shares the store, removes nothing, and does not save either before it is gone."""
    job.seats = [0, 0, 1]
    gate, rmtree, seen = threading.Event(), shutil.rmtree, list[bool]()

    def held_up(path: Path, **how: bool) -> None:
        assert path.name != aside.GOING_NAME or gate.wait(SECONDS)
        rmtree(path, **how)

    def work(made: Checkpointer) -> object:
        job.save(made, 10, 20)
        rank = made.world.rank
        if rank == 0:
            monkeypatch.setattr(aside.shutil, "rmtree", held_up)
        outcome = made.distributed_checkpoint(30, lambda path: write(path, rank, 30))
        if rank == 1:
            wait_until(lambda: aside.is_anything_aside(made.root), "older ones are set aside")
            threading.Timer(0.1, gate.set).start()
        steps = {attempt.step for attempt in files.attempts_in(made.root)} - {40}

        def save(path: Path) -> None:
            seen.append(aside.is_anything_aside(made.root))
            write(path, rank, 40)

        return outcome, steps, made.distributed_checkpoint(40, save)

    for row in job.start(work):
        assert isinstance(row, tuple), row
        assert isinstance(row[0], Committed)
        assert row[0].is_cleaned
        assert row[1] <= {20, 30}
        assert isinstance(row[2], Committed)
    assert seen == [False] * WORLD


def test_where_a_checkpoint_lies(job: Job) -> None:
    def places(root: Path) -> set[tuple[str, ...]]:
        plain = {"kind": "directory", "state": "complete", "files": 1}
        entries = [
            Checkpoint.from_message({**plain, "path": f"/{path.name}"})
            for path in root.glob("step-*")
        ]
        return {_with_places(entry, str(root)).places for entry in entries}

    job.start(lambda made: job.save(made, 10, 20))
    assert places(job.store(0)) == {("cxl",)}
    job.replicas = 2
    assert is_cleaned(job.start(lambda made: job.save(made, 30, 40)))
    assert [places(job.store(rank)) for rank in range(WORLD)] == [{("cxl", "peer")}] * WORLD
    shutil.rmtree(job.store(2))
    job.start(lambda made: (job.load(made), made.wait()))
    assert places(job.store(2)) == {("cxl", "peer")}
    directory = next(job.store(0).glob("step-*"))
    for rank in range(WORLD):
        (directory / f"drained-0000{rank}.json").touch()
    assert ("cxl", "peer", "tier") in places(job.store(0))
