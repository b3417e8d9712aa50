"""``cxlfs good`` and ``cxlfs tidy`` as scripts call them, in any directory and on a store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from cxlfs.checkpoint import Level, TidyBelow
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
    for step in (1, 2, 3):
        os.utime(tmp_path / f"step-{step}.npz", (1000 + step, 1000 + step))
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


@pytest.mark.parametrize(
    ("text", "said", "target"),
    [
        ("step-3.npz", "it names step-3.npz, which is not good", "step-3.npz"),
        ("step-9.npz", "it names step-9.npz, which is not there", "step-9.npz"),
        ("step-1.npz", None, None),
    ],
)
def test_good_says_which_trackers_lead_astray(
    run: Run, saved: Path, text: str, said: str | None, target: str | None
) -> None:
    """What tidy would rewrite, and nothing else."""
    (saved / "latest").write_text(text)
    stderr = run("good", saved).stderr
    line = f"warning: {saved}/latest: {said} (cxlfs tidy puts it right)"
    assert (line in stderr.splitlines()) is (said is not None)
    assert stderr.count("latest") == (said is not None)
    found = run("good", saved, "--json").document["astray"]
    assert found == ([{"name": "latest", "target": target}] if target else [])
    run("tidy", saved)
    assert (saved / "latest").read_text() == "step-1.npz"
    assert run("good", saved).stderr == ""


def test_good_says_what_it_could_not_look_into(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "model.h5"
    with h5py.File(path, "w", libver="latest") as file:
        file["w"] = np.arange(10.0)
    said = run("good", tmp_path, "--structure-only")
    assert (said.code, said.stdout) == (0, f"{path}\n")
    words = "its groups of HDF5 were not looked into: that takes its content"
    assert said.stderr == f"warning: {path}: {words}\n"
    said = run("good", tmp_path)
    assert (said.code, said.stdout, said.stderr) == (0, f"{path}\n", "")


def test_good_by_structure_alone(run: Run, saved: Path) -> None:
    found = run("good", saved, "--structure-only", "--json").document
    assert found["path"] == f"{saved}/step-2.npz"
    assert found["content_verified"] is False


def test_exit_codes_for_scripts(run: Run, saved: Path) -> None:
    assert_two_lines(run("good", saved / "absent"), 32, "cxlfs good", "is not there")
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
    assert_two_lines(run("tidy", saved), 36, "cxlfs tidy", "no store is mounted there")
    assert_two_lines(run("tidy", saved, "--plain"), 22, "cxlfs tidy")


def test_nothing_to_undo(run: Run, saved: Path) -> None:
    assert_two_lines(run("tidy", saved, "--undo"), 1, "cxlfs tidy", "nothing is set aside of")
    said = run("tidy", saved, "--undo", "--structure-only")
    assert_two_lines(said, 2, "cxlfs tidy", "--undo")


# --- every directory below ------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs whose newest was cut, at different depths, and things that are in no way."""
    for run in ("one", "a/b/two"):
        directory = tmp_path / run
        directory.mkdir(parents=True)
        for step in (1, 2):
            np.savez(directory / f"step-{step}.npz", w=np.arange(1000.0))
        os.truncate(directory / "step-2.npz", 3000)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "a" / "again").symlink_to(tmp_path / "one")
    return tmp_path


def test_tidy_all(run: Run, runs: Path) -> None:
    said = run("tidy", runs, "--all", "--dry-run")
    assert said.code == 0
    assert said.stdout.splitlines()[-1].startswith("2 would be set aside and 0 trackers would be")
    assert (runs / "one" / "step-2.npz").exists()
    said = run("tidy", runs, "--all", "--structure-only", "--json")
    *each, last = said.documents
    assert {document["schema"] for document in each} == {"cxlfs.tidy/1"}
    assert {document["directory"] for document in each} == {f"{runs}/one", f"{runs}/a/b/two"}
    assert last["schema"] == "cxlfs.tidy_all/1"
    assert (last["directories"], last["with_checkpoints"], last["checkpoints"]) == (5, 2, 2)
    assert (last["failed"], last["left_out"]) == ([], None)
    for directory in (runs / "one", runs / "a" / "b" / "two"):
        assert sorted(p.name for p in directory.iterdir()) == [".cxlfs-aside", "step-1.npz"]
    assert run("tidy", runs, "--all").stdout.startswith("0 set aside")
    assert run("tidy", runs / "one", "--undo").code == 0
    assert (runs / "one" / "step-2.npz").exists()


def test_tidy_all_goes_on_behind_what_it_cannot_do(run: Run, runs: Path, saved: Path) -> None:
    bad = saved / "bad"  # the same directory as runs: both made by one test
    bad.mkdir()
    data = bytearray((runs / "one" / "step-1.npz").read_bytes())
    data[:4] = b"PK\3\5"
    (bad / "step-1.npz").write_bytes(data)
    (runs / "one" / ".cxlfs-aside").symlink_to(bad)
    said = run("tidy", runs, "--all")
    assert said.code == 1
    assert f"not tidied: {runs}/one: {runs}/one/.cxlfs-aside is a symbolic link" in said.stdout
    assert "could not be tidied" in said.stderr
    assert sorted(p.name for p in bad.iterdir()) == ["step-1.npz"]
    assert not (runs / "a" / "b" / "two" / "step-2.npz").exists()
    assert (runs / "one" / "step-2.npz").exists()


def test_tidy_all_ends_in_time(run: Run, runs: Path) -> None:
    said = run("tidy", runs, "--all", "--seconds-max", "0", "--json")
    assert said.code == 1
    assert said.documents[0]["left_out"] == "time ended after 0 s"
    assert said.documents[0]["directories"] == 0


def test_tidy_all_looks_where_something_changed_last_first(runs: Path) -> None:
    for name, moment in (("one", 1000), ("a/b/two", 2000), ("a/b", 3000), ("a", 4000)):
        os.utime(runs / name, (moment, moment))
    found = [each.directory for each in TidyBelow(runs, Level.STRUCTURE, dry_run=True)]
    assert found == [runs / "a" / "b" / "two", runs / "one"]


def test_tidy_all_enters_no_checkpoint(runs: Path) -> None:
    directory = runs / "one" / "checkpoint-7"
    directory.mkdir()
    np.savez(directory / "model.npz", w=np.arange(10.0))
    (directory / "trainer_state.json").write_text('{"global_step": 7}')
    (directory / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (directory / "below").mkdir()
    walk = TidyBelow(runs, Level.STRUCTURE, dry_run=True)
    assert {each.directory for each in walk} == {runs / "one", runs / "a" / "b" / "two"}
    assert walk.directories == 5


def test_arguments_that_do_not_go_together(run: Run, saved: Path) -> None:
    assert_two_lines(run("tidy", saved, "--undo", "--all"), 2, "cxlfs tidy", "--undo")
    assert_two_lines(run("tidy", saved, "--seconds-max", "3"), 2, "cxlfs tidy", "--seconds-max")
    assert_two_lines(run("tidy", saved / "absent", "--all"), 32, "cxlfs tidy", "is not there")


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
