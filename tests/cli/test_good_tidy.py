"""``cxlfs good`` and ``cxlfs tidy`` as scripts call them, in any directory and on a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.cli import Run, assert_two_lines
from tests.support.mount import Workplace, wait_until

CUT = "the archive has no end: it was cut off, or is still written"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Three steps; the newest was cut, the one before has a wrong byte."""
    for step in (1, 2, 3):
        np.savez(tmp_path / f"step-{step}.npz", w=np.arange(step * 1000.0))
    os.truncate(tmp_path / "step-3.npz", 5000)
    data = bytearray((tmp_path / "step-2.npz").read_bytes())
    data[9000] ^= 4
    (tmp_path / "step-2.npz").write_bytes(data)
    return tmp_path


def test_good(run: Run, saved: Path) -> None:
    said = run("good", saved)
    assert (said.code, said.stdout) == (0, f"{saved}/step-1.npz\n")
    assert said.stderr.splitlines() == [
        f"warning: {saved}/step-3.npz is incomplete: {CUT}",
        f"warning: {saved}/step-2.npz is damaged: tensor w",
    ]


def test_good_json(run: Run, saved: Path) -> None:
    said = run("good", saved, "--json")
    found = said.document
    assert said.stderr == ""
    assert found["schema"] == "cxlfs.good/1"
    assert (found["path"], found["format"], found["step"]) == (
        f"{saved}/step-1.npz",
        "numpy-archive",
        1,
    )
    assert (found["content_verified"], found["files"], found["tensors"]) == (True, 1, 1)
    assert [each["state"] for each in found["passed_over"]] == ["incomplete", "damaged"]


def test_good_by_structure_alone(run: Run, saved: Path) -> None:
    found = run("good", saved, "--structure-only", "--json").document
    assert found["path"] == f"{saved}/step-2.npz"
    assert found["content_verified"] is False


def test_exit_codes_for_scripts(run: Run, saved: Path) -> None:
    assert_two_lines(run("good", saved / "absent"), 22, "cxlfs good", "no checkpoint")
    (saved / "step-1.npz").unlink()
    assert_two_lines(run("good", saved), 23, "cxlfs good", "none of the 2")
    document = run("good", saved, "--json").document
    assert (document["id"], document["exit_code"]) == ("no-good-checkpoint", 23)


def test_tidy(run: Run, saved: Path) -> None:
    before = sorted(path.name for path in saved.iterdir())
    said = run("tidy", saved, "--dry-run")
    assert said.code == 0
    assert said.stdout.startswith(f"would be set aside: {saved}/step-3.npz, incomplete: ")
    assert sorted(path.name for path in saved.iterdir()) == before
    said = run("tidy", saved)
    assert said.stdout.splitlines()[1] == f"set aside: {saved}/step-2.npz, damaged: tensor w"
    assert said.stdout.splitlines()[-1] == f"newest good: {saved}/step-1.npz"
    assert sorted(path.name for path in saved.iterdir()) == [".cxlfs-aside", "step-1.npz"]
    assert run("good", saved).stderr == ""
    assert run("tidy", saved).stdout.splitlines()[0] == "nothing is in the way"
    said = run("tidy", saved, "--undo", "--json")
    assert [each["state"] for each in said.document["checkpoints"]] == ["incomplete", "damaged"]
    assert sorted(path.name for path in saved.iterdir()) == before


def test_tidy_json(run: Run, saved: Path) -> None:
    found = run("tidy", saved, "--json").document
    assert found["schema"] == "cxlfs.tidy/1"
    assert found["action"] == "tidy"
    assert found["good"] == f"{saved}/step-1.npz"
    assert found["checkpoints"][0]["names"] == ["step-3.npz"]
    assert Path(found["aside"], "step-3.npz").exists()


def test_tidy_where_nothing_is_good(run: Run, saved: Path) -> None:
    for step in (1, 2):
        (saved / f"step-{step}.npz").unlink()
    said = run("tidy", saved)
    assert said.code == 0
    assert "starts from the beginning" in said.stderr
    assert_two_lines(run("tidy", saved), 22, "cxlfs tidy")


def test_nothing_to_undo(run: Run, saved: Path) -> None:
    assert_two_lines(run("tidy", saved, "--undo"), 1, "cxlfs tidy", "nothing is set aside of")
    said = run("tidy", saved, "--undo", "--structure-only")
    assert_two_lines(said, 2, "cxlfs tidy", "--undo")


@pytest.mark.mounted
def test_list_knows_the_formats_of_frameworks(run: Run, place: Workplace) -> None:
    place.mount()
    directory = place.mountpoint / "run1"
    directory.mkdir()

    def whole() -> dict[str, Any]:
        (entry,) = run("list", place.mountpoint, "--json").document["checkpoints"]
        return dict(entry)

    def wait_for_release() -> None:  # close() does not wait for it
        wait_until(lambda: not whole()["being_written"], "files released")

    for step in (1, 2):
        np.savez(directory / f"step-{step}.npz", w=np.arange(1000.0))
    wait_for_release()
    assert (whole()["state"], whole()["set_known"], whole()["checkpoints"]) == ("complete", True, 2)
    assert "complete, 2 checkpoints" in run("list", place.mountpoint).stdout
    data = (directory / "step-2.npz").read_bytes()
    (directory / "step-2.npz").write_bytes(data[:3000])  # closed well: the store calls it complete
    wait_for_release()
    header, first, second = run("list", place.mountpoint, "run1").stdout.splitlines()
    assert header.split() == ["STATE", "STEP", "COMMIT", "COMMITTED", "SIZE", "PATH"]
    assert first.split()[:2] == ["complete", "1"]
    assert second.startswith("incomplete: the archive has no end")
    assert (whole()["state"], whole()["checkpoints"]) == ("incomplete", 2)
    assert whole()["reason"].startswith("step-2.npz: the archive has no end")
    assert run("good", directory).stdout == f"{directory}/step-1.npz\n"
    assert run("tidy", directory).code == 0
    assert run("good", directory).stderr == ""
