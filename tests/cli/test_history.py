"""``cxlfs history``, ``undelete``, ``forget``, ``restore --at``: what was there before."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest

from tests.support.cli import Run
from tests.support.mount import Workplace


@pytest.fixture
def mnt(place: Workplace) -> Path:
    place.mount()
    return place.mountpoint


def wait_until_next_millisecond() -> None:
    """Times are shown without what follows."""
    shown = time.time_ns() // 10**6
    while time.time_ns() // 10**6 == shown:
        pass


def versions(run: Run, path: Path) -> list[dict[str, object]]:
    found = run("history", path, "--json").document["versions"]
    assert isinstance(found, list)
    return found


def test_a_wrong_overwrite(run: Run, mnt: Path) -> None:
    """As weights that have become NaN: whole by their format, and worth nothing."""
    path = mnt / "model.bin"
    for content in (b"one", b"two", b"three"):
        path.write_bytes(content)
        wait_until_next_millisecond()
    found = versions(run, path)
    assert [v["size_bytes"] for v in found] == [3, 3]
    assert {v["how"] for v in found} == {"overwritten"}
    shown = run("history", path).stdout.splitlines()
    assert shown[0].split() == ["COMMIT", "COMMITTED", "ENDED", "SIZE", "STATE", "PATH"]
    assert len(shown) == 3
    said = run("restore", path)
    assert (said.code, said.stderr) == (0, "")
    assert path.read_bytes() == b"two"
    first = found[0]["commit"]
    assert run("restore", path, "--at", first, "--to", mnt / "old.bin").code == 0
    assert (mnt / "old.bin").read_bytes() == b"one"
    assert path.read_bytes() == b"two"
    assert run("restore", path, "--at", found[0]["commit_time"]).code == 0
    assert path.read_bytes() == b"one"
    assert len(versions(run, path)) == 4, "what was replaced by restoring is there, too"


def test_a_wrong_removal(run: Run, mnt: Path) -> None:
    top = mnt / "run1"
    (top / "checkpoint-1" / "deep").mkdir(parents=True)
    contents = {}
    for number in range(30):
        path = top / "checkpoint-1" / ("deep" if number % 2 else "") / f"{number}.bin"
        contents[path] = b"%d" % number * 1000
        path.write_bytes(contents[path])
    (top / "latest").symlink_to("checkpoint-1")
    shutil.rmtree(top)
    assert [v["path"] for v in versions(run, mnt)] == ["/run1"]
    said = run("undelete", top)
    assert (said.code, said.stderr) == (0, "")
    assert said.stdout == f"brought back {top} and 33 below it\n"
    assert {path: path.read_bytes() for path in contents} == contents
    assert (top / "latest").readlink() == Path("checkpoint-1")
    assert "is there" in run("undelete", top).stderr


def test_deleted_before_the_next_one_is_saved(run: Run, mnt: Path) -> None:
    """As accelerate does with ``total_limit``; and one file of a directory that is gone."""
    old = mnt / "checkpoint_0"
    old.mkdir()
    (old / "state.pkl").write_bytes(b"state")
    (old / "other.pkl").write_bytes(b"other")
    shutil.rmtree(old)
    assert run("undelete", old / "state.pkl").code == 0
    assert [path.name for path in old.iterdir()] == ["state.pkl"]
    assert (old / "state.pkl").read_bytes() == b"state"


def test_secrets_are_forgotten(run: Run, mnt: Path) -> None:
    directory = mnt / "d"
    directory.mkdir()
    path = directory / "token.json"
    path.write_bytes(b"secret")
    path.write_bytes(b"{}")
    said = run("forget", path)
    assert said.stdout == f"dropped 1 version of {path}\n"
    assert path.read_bytes() == b"{}"
    assert versions(run, path) == []
    path.unlink()
    assert json.loads(run("forget", directory, "--json").stdout)["count"] == 1
    assert "history has nothing" in run("undelete", path).stderr
    assert run("history", path).stdout == "history has nothing of it\n"


def test_what_cannot_be(run: Run, mnt: Path, tmp_path: Path) -> None:
    (mnt / "file").write_bytes(b"data")
    for arguments, code, text in (
        (("restore", mnt / "file", "--at", "yesterday"), 2, "neither a commit nor a time"),
        (("restore", mnt / "file", "--at", "99999"), 1, "no version of that time"),
        (("restore", mnt / "file", "--to", tmp_path / "x"), 2, "mounted store"),
        (("undelete", mnt / "file"), 1, "is there"),
        (("undelete", mnt / "none"), 1, "history has nothing"),
        (("history", mnt / "none" / "below"), 1, "history has none"),
        (("history", tmp_path), 2, "mounted store"),
        (("forget", tmp_path), 2, "mounted store"),
    ):
        said = run(*arguments)
        assert said.code == code, arguments
        assert text in said.stderr, arguments
        assert "next: " in said.stderr


@pytest.mark.parametrize("killed", [False, True], ids=["unmounted", "killed"])
def test_history_outlives_the_daemon(
    run: Run, place: Workplace, mnt: Path, *, killed: bool
) -> None:
    """What was overwritten, and a tree that was removed, come back behind the next mount."""
    path, top = mnt / "model.bin", mnt / "run"
    path.write_bytes(b"good" * 1000)
    path.write_bytes(b"NaN")
    top.mkdir()
    (top / "weights.bin").write_bytes(b"w" * 50_000)
    shutil.rmtree(top)
    if killed:
        deadline = time.monotonic() + 60
        while not all(v["stored"] for v in [*versions(run, path), *versions(run, mnt)]):
            assert time.monotonic() < deadline, "history is not stored"
        place.kill_daemon()
    place.remount()
    assert [v["size_bytes"] for v in versions(run, path)] == [4000]
    assert run("restore", path).code == 0
    assert path.read_bytes() == b"good" * 1000
    assert run("undelete", top).code == 0
    assert (top / "weights.bin").read_bytes() == b"w" * 50_000


def test_forgetting_what_history_does_not_have(run: Run, mnt: Path) -> None:
    """A secret may be known by another name now: that must not look like success."""
    (mnt / "old").mkdir()
    (mnt / "old" / "token").write_bytes(b"secret")
    (mnt / "old" / "token").write_bytes(b"clean")
    (mnt / "old").rename(mnt / "new")
    said = run("forget", mnt / "old")
    assert said.code != 0
    assert "name it as it is called now" in said.stderr
    assert run("forget", mnt / "new").stdout == f"dropped 1 version of {mnt}/new\n"
    assert versions(run, mnt / "new" / "token") == []


def test_pins(run: Run, mnt: Path) -> None:
    """Made of what is there and of what was; listed, read, taken away."""
    top = mnt / "run"
    top.mkdir()
    (top / "model.bin").write_bytes(b"one")
    assert run("pins", mnt).stdout == "no pins\n"
    said = run("pin", "first", top)
    assert said.stdout.splitlines() == [
        "pinned /run: 2 names, 3 B",
        f"read it in {mnt}/.cxlfs/at/first",
    ]
    commit = run("pins", mnt, "--json").document["pins"][0]["commit"]  # type: ignore[index]
    (top / "model.bin").write_bytes(b"two")
    made = run("pin", "before", top / "model.bin", "--at", commit, "--json").document
    assert made["schema"] == "cxlfs.pin/1"
    pin = made["pin"]
    assert isinstance(pin, dict)
    assert {key: pin[key] for key in ("name", "path", "commit", "count", "size_bytes")} == {
        "name": "before",
        "path": "/run/model.bin",
        "commit": commit,
        "count": 1,
        "size_bytes": 3,
    }
    shutil.rmtree(top)
    for name in ("first", "before"):
        assert (mnt / ".cxlfs/at" / name / "run/model.bin").read_bytes() == b"one"
    shown = run("pins", mnt).stdout.splitlines()
    assert shown[0].split() == ["NAME", "COMMIT", "MADE", "NAMES", "SIZE", "PATH"]
    assert [line.split()[0] for line in shown[1:]] == ["before", "first"]
    assert run("unpin", "first", mnt, "--json").document["name"] == "first"
    assert run("unpin", "before", mnt).stdout == "unpinned before\n"
    assert run("pins", mnt).stdout == "no pins\n"


def test_what_cannot_be_pinned(run: Run, mnt: Path) -> None:
    (mnt / "file").write_bytes(b"one")
    assert run("pin", "best", mnt / "file").code == 0
    for arguments, code, message in (
        (("pin", "best", mnt / "file"), 1, "a pin best exists"),
        (("pin", "7", mnt / "file"), 2, "not a name of a pin"),
        (("pin", "a/b", mnt / "file"), 2, "not a name of a pin"),
        (("pin", "other", mnt / "none"), 1, "there is none"),
        (("pin", "other", mnt / "file", "--at", "99999"), 1, "there is none at 99999"),
        (("pin", "other", mnt / "file", "--at", "yesterday"), 2, "neither a commit nor a time"),
        (("pin", "other", mnt.parent), 2, "does not lie in a mounted store"),
        (("pin", "other", mnt / ".cxlfs/at/best/file"), 1, "there is none"),
        (("unpin", "other", mnt), 1, "no pin other"),
        (("unpin", "now", mnt), 18, "it is no pin"),
        (("unpin", "../..", mnt), 2, "not a name of a pin"),
        (("history", mnt / ".cxlfs/at/best/file"), 1, "no part of the store"),
        (("list", mnt, "/.cxlfs"), 1, "no part of the store"),
        (("restore", mnt / "file", "--at", "1", "--to", mnt / ".cxlfs/x"), 1, ""),
    ):
        said = run(*arguments)
        assert said.code == code, arguments
        assert message in said.stderr


def test_a_pin_that_holds_a_secret_is_named(run: Run, mnt: Path) -> None:
    """By the path, and by what the file was called when it was pinned."""
    (mnt / "token").write_bytes(b"secret")
    assert run("pin", "safe", mnt / "token").code == 0
    (mnt / "other").write_bytes(b"x")
    assert run("pin", "innocent", mnt / "other").code == 0
    before = int(run("pins", mnt, "--json").document["pins"][0]["commit"])  # type: ignore[index]
    past = mnt / f".cxlfs/at/{before}"
    (mnt / "token").write_bytes(b"revoked")
    (mnt / "token").rename(mnt / "renamed")
    assert (past / "token").read_bytes() == b"secret"
    for path in (mnt / "token", mnt / "renamed"):
        said = run("forget", path, "--json")
        assert said.code == 1
        assert "safe" in said.stdout
        assert "still-pinned" in said.stdout
        assert "innocent" not in said.stdout
    said = run("forget", mnt / "renamed")
    assert f"next: cxlfs unpin safe {mnt}" in said.stderr
    assert not (past / "token").exists()
    assert (mnt / ".cxlfs/at/safe/token").read_bytes() == b"secret"
    assert run("unpin", "safe", mnt).code == 0
    assert run("forget", mnt / "renamed").code == 0
    assert run("history", mnt / "renamed", "--json").document["versions"] == []


def test_a_name_with_a_dot_in_front(run: Run, mnt: Path) -> None:
    for name in ("hidden", ".hidden"):
        for content in (name, "new"):
            (mnt / name).write_text(content)
    assert [v["path"] for v in versions(run, mnt / ".hidden")] == ["/.hidden"]
    assert run("restore", mnt / ".hidden").code == 0
    assert [(mnt / name).read_text() for name in ("hidden", ".hidden")] == ["new", ".hidden"]
