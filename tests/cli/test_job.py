"""``cxlfs job``: what a directory of a job's checkpoints holds, and an operator's decision."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cxlfs.job import ForkError, NotWholeError, Restored, lines
from tests.support.cli import Run
from tests.support.job_ranks import Job, content


def test_a_history_that_comes_back_is_decided_by_one_command(run: Run, tmp_path: Path) -> None:
    """Two ranks of one node each: their stores go away, the job goes on from copies of the step
    before, and one of the old stores comes back.
    """
    job = Job(tmp_path, world=2)
    job.replicas = 2
    job.start(lambda made: job.save(made, 1))
    for rank in range(2):
        shutil.copytree(job.store(rank), tmp_path / f"node{rank + 2}")
        (tmp_path / f"node{rank + 2}" / ".cxlfs-job-store").unlink()
    job.start(lambda made: job.save(made, 2, 3))
    job.seats = [2, 3]
    job.start(lambda made: job.save(made, 102))
    job.seats = [2, 0]
    rows = job.start(job.load)
    assert all(isinstance(error, ForkError) for error in rows), rows
    assert "step 102" in str(rows[0])
    assert "step 3" in str(rows[0])
    root = job.store(0)
    assert f"cxlfs job decide {root} --resume" in str(getattr(rows[0], "next_step", ""))
    status = run("job", "status", root, "--json").document
    choices = status["choices"]
    heads = {each["step"]: each["line"] for each in choices if each["is_head"]}
    assert set(heads) == {3, 102}
    assert "2 histories" in run("job", "status", root).stdout
    told = run("job", "decide", root, "--resume", heads[102][:6], "--json").document
    assert (told["step"], told["line"]) == (102, heads[102])
    assert "decided" in run("job", "status", root).stdout
    found = job.start(lambda made: job.save(made, 103, 104, 105))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in found)
    assert job.loaded == {rank: content(rank, 102) for rank in range(2)}
    kept = sorted(int(name[5:17]) for name in job.attempts(1))
    assert kept == [104, 105], "what was given up is given back"
    assert lines.decision_in(root) is None
    job.seats = [0, 1]
    again = job.start(job.load)
    assert all(isinstance(each, Restored) and each.step == 105 for each in again), again


def test_what_was_not_asked_is_not_answered(run: Run, tmp_path: Path) -> None:
    job = Job(tmp_path, world=1)
    missing = run("job", "status", job.store(0))
    assert missing.code != 0
    job.start(lambda made: job.save(made, 1, 2))
    root = job.store(0)
    assert run("job", "decide", root, "--resume", "a").code != 0
    shard = next(root.glob("step-*02.*/rank-00000/deep/shard.bin"))
    shard.write_bytes(b"damaged")
    (error,) = job.start(job.load)
    assert isinstance(error, NotWholeError)
    for wrong in (["--anew"], ["--resume", "0" * 20], ["--resume", "no line"], []):
        refused = run("job", "decide", root, *wrong)
        assert refused.code != 0
        assert "next" in refused.stderr
    ((line,), _) = lines.lines_in(root)
    run("job", "decide", root, "--resume", f"{line.id}/1")
    (found,) = job.start(job.load)
    assert isinstance(found, Restored)
    assert found.step == 1


@pytest.mark.parametrize("name", ["owner.json", "question.json", "decision.json"])
def test_damaged_records_are_named(run: Run, tmp_path: Path, name: str) -> None:
    job = Job(tmp_path, world=1)
    job.start(lambda made: job.save(made, 1))
    (job.store(0) / ".cxlfs-job" / name).write_bytes(b"[" * 100)
    refused = run("job", "status", job.store(0))
    assert refused.code != 0
    assert name in refused.stderr
