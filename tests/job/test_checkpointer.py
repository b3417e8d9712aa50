"""Ranks of one job that save and resume, each in a directory of its own: threads over an engine in
memory. Real processes are in ``tests/frameworks/test_job.py``.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cxlfs.errors import JobEngineError
from cxlfs.job import (
    Aborted,
    Checkpointer,
    Committed,
    JobConfigurationError,
    Nothing,
    NotWholeError,
    Restored,
    UndecidedError,
    checkpointer,
    files,
    lines,
)
from cxlfs.job.engines import engine_named
from cxlfs.job.protocol import Decision
from tests.support.job_ranks import SECONDS, WORLD, Job, ThreadEngine, content, write


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_all_save_and_all_resume(job: Job) -> None:
    rows = job.start(lambda made: job.save(made, 10, 20, 30))
    for row in rows:
        assert isinstance(row, list)
        assert [type(outcome) for outcome in row] == [Committed] * 3
        assert [outcome.step for outcome in row] == [10, 20, 30]
        assert all(outcome.is_cleaned for outcome in row)
    assert rows[0] == rows[1] == rows[2]
    found = job.start(job.load)
    assert all(isinstance(outcome, Restored) and outcome.step == 30 for outcome in found)
    assert job.loaded == {rank: content(rank, 30) for rank in range(WORLD)}
    for rank in range(WORLD):
        assert [name[5:17] for name in job.attempts(rank)] == ["000000000020", "000000000030"]


def test_nothing_is_a_first_start(job: Job) -> None:
    assert job.start(job.load) == [Nothing()] * WORLD


def test_a_rank_that_cannot_save_is_named_to_all(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        job.save(made, 10)

        def save(directory: Path) -> None:
            write(directory, made.world.rank, 20)
            if made.world.rank == 1:
                raise ValueError("no loss")

        return made.distributed_checkpoint(20, save), made.distributed_checkpoint(
            30, lambda path: write(path, made.world.rank, 30)
        )

    aborted = Aborted(20, ((1, "ValueError: no loss"),))
    for row in job.start(work):
        assert isinstance(row, tuple)
        assert row[0] == aborted
        assert isinstance(row[1], Committed)
    assert all("step-000000000020" not in " ".join(job.attempts(rank)) for rank in range(WORLD))


class FrameworkError(BaseException):
    """As PyTorch's CheckpointException is: no Exception."""


def test_an_error_that_is_no_exception_is_a_vote_against(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        job.load(made)

        def save(_directory: Path) -> None:
            if made.world.rank == 2:
                raise FrameworkError("not all ranks")

        return made.distributed_checkpoint(10, save)

    wanted = Aborted(10, ((2, "FrameworkError: not all ranks"),))
    assert job.start(work) == [wanted] * WORLD


def test_ranks_that_mean_other_steps_save_nothing(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        job.load(made)
        rank = made.world.rank
        return made.distributed_checkpoint(10 + (rank == 2), lambda path: write(path, rank, 10))

    rows = job.start(work)
    assert all(isinstance(row, Aborted) for row in rows)
    assert isinstance(rows[0], Aborted)
    assert rows[0].reasons == (
        (2, "rank 0 saves step 10 with number 1, this rank step 11 with number 1"),
    )


def test_a_rank_that_died_leaves_the_step_before(job: Job) -> None:
    """The others cannot know whether it has voted."""
    job.start(lambda made: job.save(made, 10))

    def work(made: Checkpointer) -> object:
        job.load(made)
        if made.world.rank == 1:
            return None
        made.deadline_seconds = 0.2
        return made.distributed_checkpoint(20, lambda path: write(path, made.world.rank, 20))

    rows = job.start(work)
    assert [type(row) for row in rows] == [UndecidedError, type(None), UndecidedError]
    assert "rank 1" in str(rows[0])
    assert all(isinstance(row, Restored) and row.step == 10 for row in job.start(job.load))
    rows = job.start(lambda made: job.save(made, 20))
    assert all(isinstance(row, list) and row[0].is_cleaned for row in rows)
    found = job.start(job.load)
    assert job.loaded == {rank: content(rank, 20) for rank in range(WORLD)}
    assert len({outcome.attempt.id for outcome in found if isinstance(outcome, Restored)}) == 1


def test_a_rank_that_dies_behind_its_vote_has_voted(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processor is gone before anybody hears of it: the restart resumes from the new step."""
    drive = checkpointer.drive
    job.seconds = 0.5

    class Dead(BaseException):
        pass

    def dying(machine: object, engine: ThreadEngine, *rest: object, **how: object) -> object:
        def say(key: str, body: bytes, **how: Any) -> None:
            if "vote" in key and engine.rank == 1:
                raise RuntimeError("dead")
            ThreadEngine.say(engine, key, body, **how)

        monkeypatch.setattr(engine, "say", say, raising=False)
        return drive(machine, engine, *rest, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpointer, "drive", dying)
    rows = job.start(lambda made: job.save(made, 10))
    assert [type(row) for row in rows] == [UndecidedError, RuntimeError, UndecidedError]
    monkeypatch.setattr(checkpointer, "drive", drive)
    job.seconds = SECONDS
    assert all(isinstance(row, Restored) and row.step == 10 for row in job.start(job.load))


@pytest.mark.parametrize("damage", ["bytes", "size", "manifest", "gone"])
def test_damage_on_one_node_is_a_question_and_no_older_step(job: Job, damage: str) -> None:
    job.start(lambda made: job.save(made, 10, 20))
    path = next(job.store(2).glob("step-000000000020*/rank-00002/deep/shard.bin"))
    if damage == "bytes":
        data = bytearray(path.read_bytes())
        data[777] ^= 1
        path.write_bytes(data)
    elif damage == "size":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "manifest":
        (path.parents[1] / "manifest.json").write_bytes(b"[" * 1000)
    else:
        path.unlink()
    for error in job.start(job.load):
        assert isinstance(error, NotWholeError)
        assert "rank 2 can load its shards from none" in error.message or damage == "manifest"
        assert "step 10" in error.message
    question = lines.question_in(job.store(1))
    assert question is not None
    assert [each.step for each in question.heads] == [20]
    lines.decide(job.store(1), Decision(question.loadable[0], question.heads))
    found = job.start(lambda made: job.save(made, 30))
    assert job.loaded == {rank: content(rank, 10) for rank in range(WORLD)}
    assert all(isinstance(row, list) and row[0].is_cleaned for row in found)
    assert all(isinstance(outcome, Restored) and outcome.step == 30 for outcome in restored(job))
    assert not list(job.root.glob("*/step-*20.*")), "what was decided against was not given back"


def restored(job: Job) -> list[object]:
    return job.start(job.load)


def test_a_lost_store_is_an_error_and_no_first_start(job: Job) -> None:
    job.start(lambda made: job.save(made, 10))
    shutil.rmtree(job.store(1))
    rows = job.start(job.load)
    assert all(isinstance(row, NotWholeError) for row in rows)
    assert "no store has the shards of rank 1" in str(rows[0])


def test_ranks_that_changed_nodes_fetch_their_shards(job: Job) -> None:
    """And what lies where it no longer belongs goes with the step that it is of."""
    job.start(lambda made: job.save(made, 10))
    job.seats = [1, 0, 2]
    found = job.start(job.load)
    assert all(isinstance(outcome, Restored) and outcome.step == 10 for outcome in found)
    assert [outcome.is_fetched for outcome in found if isinstance(outcome, Restored)] == [
        True,
        True,
        False,
    ]
    assert job.loaded == {rank: content(rank, 10) for rank in range(WORLD)}
    assert len(list(job.store(0).glob("step-*/rank-*"))) == 2
    rows = job.start(lambda made: job.save(made, 20, 30))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in rows)
    for rank in range(WORLD):
        held = [path.name for path in sorted(job.store(rank).glob("step-*/rank-*"))]
        assert held == [f"rank-0000{rank}"] * 2


def test_ranks_of_one_node_share_a_store(job: Job) -> None:
    job.seats = [0, 0, 0]
    rows = job.start(lambda made: job.save(made, 10, 20, 30))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in rows)
    assert len(job.attempts(0)) == 2
    found = job.start(job.load)
    assert all(isinstance(outcome, Restored) and outcome.step == 30 for outcome in found)
    assert job.loaded == {rank: content(rank, 30) for rank in range(WORLD)}


@pytest.mark.parametrize("failures", [1, 2])
def test_a_load_that_fails_is_tried_once_more(job: Job, failures: int) -> None:
    """And never takes the job to an older step."""
    job.start(lambda made: job.save(made, 10, 20))
    seen: dict[int, list[str]] = {}

    def work(made: Checkpointer) -> object:
        rank = made.world.rank

        def load(directory: Path) -> None:
            seen.setdefault(rank, []).append(directory.parent.name[5:17])
            if rank == 2 and len(seen[rank]) <= failures:
                raise MemoryError

        return made.restore_from_checkpoint(load)

    found = job.start(work)
    if failures == 1:
        assert all(isinstance(outcome, Restored) and outcome.step == 20 for outcome in found)
    else:
        assert all(isinstance(error, NotWholeError) for error in found)
        assert "rank 2: MemoryError" in str(found[0])
    assert seen == {rank: ["000000000020"] * 2 for rank in range(WORLD)}


def test_a_medium_in_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checkpointer.medium, "medium_of", lambda _root: (files.Medium(kind="tmpfs"), True)
    )
    for allowed, outcome in ((False, Aborted), (True, Committed)):
        made = Checkpointer(tmp_path, allow_volatile=allowed)
        made.restore_from_checkpoint(lambda _path: None)
        found = made.distributed_checkpoint(1, lambda path: write(path, 0, 1))
        assert isinstance(found, outcome)
        if isinstance(found, Aborted):
            assert "gone with the power" in found.reasons[0][1]


def test_what_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JobConfigurationError, match="replicas=2 in a job of 1 processes"):
        Checkpointer(tmp_path, replicas=2, engine="local")
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path, keep=0)
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path).distributed_checkpoint(1, lambda _path: None)


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_named("local").world().size == 1
    with pytest.raises(JobEngineError):
        engine_named("carrier pigeon")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(JobEngineError):
        engine_named("auto")


def test_the_domain_is_stated_or_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXLFS_DOMAIN", raising=False)
    assert Checkpointer(tmp_path).domain == os.uname().nodename
    monkeypatch.setenv("CXLFS_DOMAIN", "rack7")
    assert Checkpointer(tmp_path).domain == "rack7"
    assert Checkpointer(tmp_path, domain="row2").domain == "row2"
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path, domain="")
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path, domain="x" * 256)
