"""One start of one job at a time in a directory: who has it is said, and whoever is superseded does
not vote.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cxlfs.job import (
    Aborted,
    Checkpointer,
    Committed,
    JobBusyError,
    NotRestoredError,
    Restored,
    lines,
    ownership,
)
from tests.support.job_ranks import Job, write

FORKED = multiprocessing.get_context("fork")


def held_by(root: Path, incarnation: str, told: Any) -> None:
    """Until it is killed."""
    ownership.take(root, incarnation)
    told.set()
    signal.pause()


@pytest.fixture
def other(tmp_path: Path) -> Any:
    """A process that has the directory."""
    told = FORKED.Event()
    process = FORKED.Process(target=held_by, args=(tmp_path / "root", "first", told))
    process.start()
    assert told.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_start_is_refused_and_told_who_has_it(tmp_path: Path, other: Any) -> None:
    root = tmp_path / "root"
    with pytest.raises(JobBusyError) as caught:
        ownership.take(root, "second", 0.0)
    assert f"process {other.pid} on {os.uname().nodename}" in str(caught.value)


def test_ranks_of_one_start_share_it(tmp_path: Path, other: Any) -> None:
    del other
    key = ownership.take(tmp_path / "root", "first", 0.0)
    assert key is not None
    ownership.release(key)


def test_what_a_killed_start_had_is_free(tmp_path: Path, other: Any) -> None:
    os.kill(other.pid, signal.SIGKILL)
    key = ownership.take(tmp_path / "root", "second", 60.0)
    ownership.release(key)


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    """As the workers of a data loader are, which outlive a trainer that was killed."""
    root = tmp_path / "root"
    key = ownership.take(root, "first", 0.0)
    child = FORKED.Process(target=signal.pause)
    child.start()
    ownership.release(key)
    try:
        ownership.release(ownership.take(root, "second", 60.0))
    finally:
        child.kill()
        child.join()


def test_a_job_in_a_directory_that_is_in_use_is_refused(
    tmp_path: Path, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del other
    monkeypatch.setattr(ownership.take, "__defaults__", (0.0,))
    made = Checkpointer(tmp_path / "root", engine="local", allow_volatile=True)
    with pytest.raises(NotRestoredError, match="in use by another start"):
        made.restore_from_checkpoint(lambda _path: None)


def test_a_start_that_was_superseded_does_not_vote(tmp_path: Path) -> None:
    """A process of before that goes on: its checkpoint is aborted, and nothing of it stays."""

    def start() -> Checkpointer:
        made = Checkpointer(tmp_path / "root", engine="local", allow_volatile=True)
        made.restore_from_checkpoint(lambda _path: None)
        return made

    old = start()
    assert isinstance(old.distributed_checkpoint(1, lambda path: write(path, 0, 1)), Committed)
    new = start()
    refused = old.distributed_checkpoint(2, lambda path: write(path, 0, 2))
    assert isinstance(refused, Aborted)
    assert "is no longer of line" in refused.reasons[0][1]
    assert isinstance(new.distributed_checkpoint(3, lambda path: write(path, 0, 3)), Committed)
    old.close()
    new.close()
    again = start()
    assert again.restore_from_checkpoint(lambda _path: None).resumes_at == 4


def test_the_record_of_the_line_is_there_before_the_first_vote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)
    seen = []

    def seal(root: Path, manifest: Any) -> str:
        seen.append(manifest.attempt.id in {line.id for line in lines.lines_in(root)[0]})
        return real(root, manifest)

    real = sys.modules["cxlfs.job.files"].seal
    monkeypatch.setattr(sys.modules["cxlfs.job.files"], "seal", seal)
    job.start(lambda made: job.save(made, 1))
    assert seen == [True] * job.world


def test_a_store_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    one, two = Job(tmp_path / "one"), Job(tmp_path / "two")
    for job in (one, two):
        job.start(lambda made, job=job: job.save(made, 1))  # type: ignore[misc]
    one.store(1).rename(tmp_path / "aside")
    two.store(1).rename(one.store(1))
    for error in one.start(one.load):
        assert isinstance(error, NotRestoredError)
        assert "several jobs" in error.message
        assert "rank 1" in error.message
    one.store(1).rename(two.store(1))
    (tmp_path / "aside").rename(one.store(1))
    assert all(isinstance(each, Restored) for each in one.start(one.load))
