"""``cxlfs restore``: what is kept aside of a file, and the content, change places."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.cli import Run
from tests.support.mount import Workplace

REVERTED = r"reverted: (the previous version is back|what was kept aside is the content)"
OVERWRITE = """
import sys
open(sys.argv[1], "wb").write(b"\\x80\\x04torn")
raise SystemExit(1)
"""


def torn(path: Path) -> bytes:
    """A good file, in place of which a program has left a torn one."""
    good = pickle.dumps({"good": 1})
    path.write_bytes(good)
    subprocess.run([sys.executable, "-c", OVERWRITE, path], check=False)
    assert path.read_bytes() == good
    return good


def test_what_went_back_comes_and_goes(run: Run, place: Workplace) -> None:
    place.announced.append(REVERTED)
    place.mount()
    path = place.mountpoint / "state.pkl"
    good = torn(path)
    said = run("restore", path)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout == f"restored {path}: 6 B, incomplete\n"
    assert path.read_bytes() == b"\x80\x04torn"
    document = run("restore", path, "--json").document
    assert (document["state"], document["size_bytes"]) == ("complete", len(good))
    assert path.read_bytes() == good


def test_why_not(run: Run, place: Workplace, tmp_path: Path) -> None:
    place.mount()
    path = place.mountpoint / "file"
    path.write_bytes(b"data")
    said = run("restore", path)
    assert said.code == 1
    assert "history has no version" in said.stderr
    assert "cxlfs history PATH" in said.stderr
    assert "history has no" in run("restore", place.mountpoint / "nothing").stderr
    elsewhere = tmp_path / "file"
    elsewhere.write_bytes(b"data")
    said = run("restore", elsewhere)
    assert said.code == 2
    assert "not a file of a mounted store" in said.stderr
    with path.open("r+b") as file:
        file.write(b"more")
        assert run("restore", path).code == 1


def test_a_directory_that_was_removed_takes_its_place_again(run: Run, place: Workplace) -> None:
    """A saver removes the old checkpoint first, and is killed in the middle of the new one."""
    place.mount()
    directory = place.mountpoint / "checkpoint"
    (directory / "ranks").mkdir(parents=True)
    (directory / "model.bin").write_bytes(b"1" * 100_000)
    (directory / "ranks/0").write_bytes(b"1")
    commit = run("status", place.mountpoint, "--json").document["journal"]["last_commit"]
    shutil.rmtree(directory)
    directory.mkdir()
    (directory / "model.bin").write_bytes(b"2")
    said = run("undelete", directory)
    assert said.code == 1
    assert "cxlfs restore" in said.stderr
    said = run("restore", directory)
    assert (said.code, said.stdout) == (0, f"restored {directory}: 3 below it\n")
    assert (directory / "model.bin").read_bytes() == b"1" * 100_000
    assert (directory / "ranks/0").read_bytes() == b"1"
    assert [each.name for each in place.mountpoint.iterdir()] == ["checkpoint"]
    assert run("undelete", place.mountpoint / "checkpoint.replaced").code == 0
    assert (place.mountpoint / "checkpoint.replaced/model.bin").read_bytes() == b"2"
    other = place.mountpoint / "other"
    document = run("restore", directory, "--at", str(commit), "--to", other, "--json").document
    assert (document["count"], document["size_bytes"]) == (4, None)
    assert (other / "ranks/0").read_bytes() == b"1"
    with (directory / "open").open("wb"):
        said = run("restore", directory, "--at", str(commit))
        assert said.code == 11
        assert "writing in the directory" in said.stderr
