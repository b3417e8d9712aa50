"""A launch script asks ``cxlfs good`` or ``cxlfs tidy``: only one answer means a first start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.cli import Run, assert_two_lines
from tests.support.mount import Workplace
from tests.support.repository import ROOT

FIRST_START, NONE_GOOD, ABSENT, UNREACHABLE, NO_DIRECTORY, UNKNOWN, NOT_MOUNTED = (
    *(22, 23, 32, 33, 34),
    *(35, 36),
)
VERBS = ("good", "tidy")


@pytest.mark.parametrize("verb", VERBS)
def test_without_a_mount(run: Run, verb: str, tmp_path: Path) -> None:
    """What a job meets that boots without its store: nothing of it says that it may start anew."""
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_two_lines(run(verb, empty), NOT_MOUNTED, f"cxlfs {verb}", "no store is mounted there")
    (empty / "train.log").write_text("step 1")
    assert run(verb, empty).code == NOT_MOUNTED
    assert_two_lines(run(verb, empty, "--plain"), FIRST_START, f"cxlfs {verb}", "no checkpoint")
    assert_two_lines(run(verb, empty / "run1"), ABSENT, f"cxlfs {verb}", "is not there")
    assert run(verb, empty / "run1", "--plain").code == ABSENT
    assert_two_lines(run(verb, empty / "train.log"), NO_DIRECTORY, f"cxlfs {verb}", "a directory")
    assert run(verb, empty / "train.log" / "run1").code == NO_DIRECTORY
    (tmp_path / "link").symlink_to("gone")
    assert_two_lines(run(verb, tmp_path / "link"), ABSENT, f"cxlfs {verb}", "is a link to gone")


@pytest.mark.parametrize("verb", VERBS)
def test_links_to_somewhere_else(run: Run, verb: str, tmp_path: Path) -> None:
    store, job = tmp_path / "store", tmp_path / "job"
    store.mkdir()
    job.mkdir()
    np.savez(store / "step-5.npz", w=np.arange(9.0))
    (job / "step-5.npz").symlink_to("../store/step-5.npz")
    said = run(verb, job)
    assert said.code == 0
    assert f"{job}/step-5.npz" in said.stdout
    (store / "step-5.npz").unlink()
    said = run(verb, job, "--plain")
    assert_two_lines(said, UNKNOWN, f"cxlfs {verb}", "it is a link to ../store/step-5.npz")
    assert os.listdir(job) == ["step-5.npz"]  # noqa: PTH208
    (job / "step-5.npz").unlink()
    (job / "latest").write_text("global_step10")
    assert_two_lines(run(verb, job, "--plain"), NONE_GOOD, f"cxlfs {verb}", "global_step10 is not")
    (job / "latest").unlink()
    (job / "last.npz").symlink_to("step-5.npz")
    assert run(verb, job, "--plain").code == NONE_GOOD


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_too_high(run: Run, verb: str, tmp_path: Path) -> None:
    for name in ("run1", "data"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "data" / "train.npy", np.arange(9.0))
    assert run(verb, tmp_path, "--plain").code == FIRST_START, "data are no checkpoints"
    (tmp_path / "run1" / "model.pt").write_bytes(b"PK\3\4")
    said = run(verb, tmp_path, "--plain")
    assert_two_lines(said, NONE_GOOD, f"cxlfs {verb}", "there are some below it, in run1")


def test_tidy_leaves_all_where_not_all_are_incomplete(run: Run, tmp_path: Path) -> None:
    (tmp_path / "step-2.npz").write_bytes(b"PK\3\4")
    (tmp_path / "step-1.pt").write_bytes(b"nobody knows")
    assert run("tidy", tmp_path).code == UNKNOWN
    assert sorted(os.listdir(tmp_path)) == ["step-1.pt", "step-2.npz"]  # noqa: PTH208
    (tmp_path / "step-1.pt").unlink()
    assert run("tidy", tmp_path).code == 0
    assert not (tmp_path / "step-2.npz").exists()


@pytest.mark.mounted
def test_on_a_mount(run: Run, place: Workplace) -> None:
    place.mount()
    job = place.mountpoint / "run1"
    for verb in VERBS:
        assert run(verb, job).code == ABSENT
    job.mkdir()
    for verb in VERBS:
        assert run(verb, job).code == FIRST_START
        assert run(verb, place.mountpoint).code == FIRST_START
    np.savez(job / "step-1.npz", w=np.arange(9.0))
    for verb in VERBS:
        assert run(verb, job).code == 0
        assert run(verb, place.mountpoint).code == NONE_GOOD
    place.kill_daemon()
    for verb in VERBS:
        for directory in (job, place.mountpoint):
            assert_two_lines(run(verb, directory), UNREACHABLE, f"cxlfs {verb}", "a dead mount")


def test_messages_hold_names_and_steer_no_terminal(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "a\x1b[2Jb\nc"
    directory.mkdir()
    for verb, code in (("good", NOT_MOUNTED), ("tidy", NOT_MOUNTED), ("keep", 2)):
        said = run(verb, directory)
        assert said.code == code
        assert "\x1b" not in said.stdout + said.stderr
    (directory / "step-1\x1b[1m.npz").write_bytes(b"PK\3\4")
    said = run("good", directory)
    assert said.code == NONE_GOOD
    assert "\x1b" not in said.stderr
    assert len(said.stderr.splitlines()) == 2
    np.savez(directory / "step-0\x1b[1m.npz", w=np.arange(9.0))
    os.utime(directory / "step-0\x1b[1m.npz", (1000, 1000))
    said = run("good", directory)
    assert said.stdout == f"{directory}/step-0\x1b[1m.npz\n", "a program needs the name as it is"
    assert "\x1b" not in said.stderr


def test_good_needs_nothing_of_a_mount(tmp_path: Path) -> None:
    """On a laptop neither libfuse nor what speaks with it is there."""
    np.savez(tmp_path / "step-1.npz", w=np.arange(9.0))
    program = (
        "import sys\n"
        "for name in ('pyfuse3', 'trio', 'cxlfs.fuse', 'cxlfs.daemon', 'cxlfs.store'):\n"
        "    sys.modules[name] = None\n"
        "from cxlfs.cli import main\n"
        "sys.argv = ['cxlfs', *sys.argv[1:]]\n"
        "sys.exit(main())\n"
    )
    for verb in VERBS:
        done = subprocess.run(
            [sys.executable, "-c", program, verb, str(tmp_path), "--plain"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"{tmp_path}/step-1.npz" in done.stdout
