"""A checkpoint that kills its job: counted by the mount, said by ``cxlfs good`` and ``list``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import Run, assert_two_lines, make_run
from tests.support.mount import Workplace, kill, wait_for_line, wait_until

LOAD = """
import os, sys
data = open(sys.argv[1], "rb").read()
assert len(data) > 65536
print("ready", flush=True)
if sys.argv[2] == "wait":
    sys.stdin.readline()
os._exit(int(sys.argv[3]))
"""


def save(directory: Path, step: int) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"step-{step}.npz"
    np.savez(path, w=np.arange(20_000.0) + step)
    return path


def failed_resumes(path: Path) -> int:
    return int(os.getxattr(path, "user.cxlfs.failed_resumes"))


def resume(place: Workplace, path: Path, *, ranks: int = 1, code: int = 1) -> None:
    """A job that opens a checkpoint, and whose ranks all end with this code; 0: are killed."""
    jobs = [place.python(LOAD, path, "wait", code) for _ in range(ranks)]
    for job in jobs:
        wait_for_line(job)
    for job in jobs:
        if code == 0:
            kill(job, signal.SIGKILL)
        else:
            job.communicate(b"go\n", timeout=20)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    return make_run(capfd)


def test_a_checkpoint_that_kills_its_job(run: Run, place: Workplace) -> None:
    directory = place.mountpoint / "run"
    for step in (100, 200):
        save(directory, step)
    path = directory / "step-200.npz"
    for attempt, (ranks, code) in enumerate([(1, 1), (4, 0), (1, 137)], start=1):
        said = run("good", directory)
        assert (said.code, said.stdout, said.stderr) == (0, f"{path}\n", "")
        resume(place, path, ranks=ranks, code=code)
        wait_until(lambda n=attempt: failed_resumes(path) == n, f"{attempt} are counted")  # type: ignore[misc]
    words = "suspect: opened and followed by a crash 3 times; the one before it: step-100.npz"
    said = run("good", directory)
    assert (said.code, said.stdout) == (0, f"{path}\n")
    assert said.stderr == f"warning: {path} is {words}\n"
    found = run("good", directory, "--json").document
    assert (found["failed_resumes"], found["suspect"]) == (3, True)
    assert found["before"] == f"{directory}/step-100.npz"
    said = run("good", directory, "--suspect", "skip")
    assert (said.code, said.stdout) == (0, f"{directory}/step-100.npz\n")
    assert words in said.stderr
    found = run("good", directory, "--suspect", "skip", "--json").document
    assert (found["suspect"], found["passed_over"][0]["state"]) == (False, "suspect")
    assert_two_lines(run("good", directory, "--suspect", "refuse"), 24, "cxlfs good", words)
    assert run("good", directory, "--suspect", "refuse", "--suspect-after", "4").code == 0
    assert run("good", directory, "--suspect", "refuse", "--suspect-after", "0").code == 0
    assert words in run("list", place.mountpoint, "run").stdout
    assert "suspect: step-200.npz opened" in run("list", place.mountpoint).stdout
    shown = run("list", place.mountpoint, "run", "--json").document["checkpoints"]
    assert [(each["failed_resumes"], each["suspect"]) for each in shown] == [(0, None), (3, words)]

    place.remount()
    assert failed_resumes(path) == 3
    save(directory, 300)  # the job has got further
    said = run("good", directory, "--suspect", "refuse")
    assert (said.code, said.stderr) == (0, "")


def test_reading_well_and_being_told_to_end_count_nothing(run: Run, place: Workplace) -> None:
    path = save(place.mountpoint / "run", 1)
    done = place.python(LOAD, path, "", 0)
    done.communicate(timeout=20)
    for number in (signal.SIGTERM, signal.SIGINT):
        job = place.python(
            "import signal, sys; signal.signal(2, signal.SIG_DFL)\n" + LOAD, path, "wait", 0
        )
        wait_for_line(job)
        kill(job, number)
    assert run("good", path.parent).code == 0
    (path.parent / "step-1.npz").with_name("torn.pt").write_bytes(b"PK\3\4" + bytes(100_000))
    assert run("send", path.parent / "torn.pt").code == 25  # fails, and has read
    resume(place, path)  # what counts comes last, so that the others were looked at before
    wait_until(lambda: failed_resumes(path) == 1, "the last is counted")
    assert failed_resumes(path.parent / "torn.pt") == 0


def test_the_only_checkpoint_is_suspect(run: Run, place: Workplace) -> None:
    path = save(place.mountpoint / "run", 1)
    for attempt in (1, 2, 3):
        resume(place, path)
        wait_until(lambda n=attempt: failed_resumes(path) == n, f"{attempt} are counted")  # type: ignore[misc]
    said = run("good", path.parent, "--suspect", "skip")
    assert_two_lines(said, 24, "cxlfs good", "there is none before it")
    assert "there is none before it" in run("good", path.parent).stderr
