"""The view of the past through the kernel: tools read it, nothing changes it, users see theirs."""

from __future__ import annotations

import errno
import filecmp
import json
import mmap
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mount import Workplace

ALICE, BOB = 1000, 1001
PIN = "user.cxlfs.pin"


@pytest.fixture(params=["native", "pyfuse3"])
def mnt(unmounted: Workplace, request: pytest.FixtureRequest) -> Path:
    unmounted.mount(f"transport={request.param}")
    return unmounted.mountpoint


def commit(mnt: Path) -> str:
    """The number of the last commit."""
    return os.getxattr(mnt / ".cxlfs/at", "user.cxlfs.commit").decode()


def at(mnt: Path, when: str = "now") -> Path:
    return mnt / ".cxlfs/at" / when


def as_user(uid: int, program: str, *arguments: object) -> str:
    """What a program of a user prints."""
    begin = (
        "import os, sys\n"
        f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
    )
    command = [sys.executable, "-c", begin + program, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
    return done.stdout


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def error_of(action: Callable[[], object]) -> int | None:
    try:
        action()
    except OSError as error:
        return error.errno
    return None


def fill(path: Path) -> None:
    with path.open("wb") as file:
        while True:
            file.write(os.urandom(1 << 20))


def make_run(mnt: Path, text: str) -> None:
    run = mnt / "run"
    (run / "step").mkdir(parents=True, exist_ok=True)
    (run / "step" / "weights").write_text(text * 40_000)
    (run / "notes").write_text(text)
    if not (run / "link").is_symlink():
        (run / "link").symlink_to("step/weights")


def test_tools_read_what_was_there(mnt: Path, tmp_path: Path) -> None:
    make_run(mnt, "one")
    subprocess.run(["cp", "-a", mnt / "run", tmp_path / "run"], check=True)
    before = commit(mnt)
    make_run(mnt, "two")
    (mnt / "run" / "notes").unlink()
    (mnt / "run" / "step").rename(mnt / "run" / "moved")
    (mnt / "run" / "moved" / "weights").unlink()
    past = at(mnt, before) / "run"
    same = filecmp.dircmp(past, tmp_path / "run")
    assert (same.left_only, same.right_only, same.diff_files) == ([], [], [])
    subprocess.run(["diff", "-r", past, tmp_path / "run"], check=True)
    subprocess.run(["cp", "-r", past, tmp_path / "copy"], check=True)
    subprocess.run(["diff", "-r", tmp_path / "copy", tmp_path / "run"], check=True)
    subprocess.run(["cp", "-r", past, mnt / "back"], check=True)  # into the same mount
    subprocess.run(["diff", "-r", mnt / "back", tmp_path / "run"], check=True)
    with tarfile.open(tmp_path / "tar", "w") as archive:
        archive.add(past, "run")
    subprocess.run(["tar", "-tf", tmp_path / "tar"], check=True, capture_output=True)
    assert str((past / "link").readlink()) == "step/weights"
    assert (past / "link").read_text() == "one" * 40_000
    with (past / "step" / "weights").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == b"one" * 40_000
        assert os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 120_000
    assert os.getxattr(past / "notes", "user.cxlfs.state") == b"complete"
    for path in ("notes", "step/weights"):
        sums = [os.getxattr(top / path, "user.cxlfs.crc32c") for top in (past, mnt / "back")]
        assert sums[0] == sums[1]
    assert os.statvfs(past).f_namemax == 255
    assert not (at(mnt, before) / "back").exists()


def test_nobody_walks_into_it(mnt: Path) -> None:
    make_run(mnt, "one")
    assert names(mnt) == ["run"]
    assert names(mnt / ".cxlfs") == ["at"]
    assert names(mnt / ".cxlfs/at") == []
    assert names(at(mnt)) == ["run"]
    found = subprocess.run(["find", mnt], check=True, capture_output=True, text=True).stdout
    assert ".cxlfs" not in found
    subprocess.run(["sh", "-c", 'rm -rf "$0"/*', str(mnt)], check=True)
    assert names(mnt) == []


def test_every_change_is_refused(mnt: Path) -> None:
    make_run(mnt, "one")
    past = at(mnt) / "run"
    notes = past / "notes"
    for action in (
        lambda: notes.write_text("x"),
        lambda: (past / "new").write_text("x"),
        notes.unlink,
        (past / "step").rmdir,
        (past / "new").mkdir,
        lambda: (past / "new").symlink_to("x"),
        lambda: os.mkfifo(past / "new"),
        lambda: notes.chmod(0o644),
        lambda: os.chown(notes, 1, 1),
        lambda: os.utime(notes),
        lambda: os.truncate(notes, 0),
        lambda: os.setxattr(notes, "user.x", b"1"),
        lambda: notes.rename(past / "other"),
        lambda: notes.rename(mnt / "out"),
        lambda: (mnt / "run" / "notes").rename(past / "in"),
        lambda: os.link(notes, mnt / "out"),
        lambda: os.link(mnt / "run" / "notes", past / "in"),
        (mnt / ".cxlfs" / "new").mkdir,
        (mnt / ".cxlfs/at" / "new").mkdir,
        lambda: (mnt / ".cxlfs").chmod(0o777),
        lambda: os.chown(mnt / ".cxlfs", 1, 1),
    ):
        assert error_of(action) == errno.EROFS
    for action in (
        (mnt / ".cxlfs").rmdir,
        lambda: (mnt / ".cxlfs").rename(mnt / "other"),
        lambda: (mnt / "run").rename(mnt / ".cxlfs"),
    ):
        assert error_of(action) in {errno.EROFS, errno.EPERM, errno.ENOTEMPTY}
    assert names(mnt / "run") == ["link", "notes", "step"]


def test_what_is_no_moment_is_absent(mnt: Path) -> None:
    make_run(mnt, "one")
    moments = ["0", "-1", "99999999", "9" * 80, "yesterday", "..x", "2999-01-01", "a@b", "x" * 255]
    for moment in moments:
        assert error_of(lambda name=moment: names(at(mnt, name))) == errno.ENOENT
    assert error_of(lambda: names(mnt / ".cxlfs" / "other")) == errno.ENOENT


def test_an_open_file_keeps_its_bytes(mnt: Path, unmounted: Workplace) -> None:
    """Overwritten, removed, appended to, with a full store behind it."""
    unmounted.announced.append("no-space")
    path = mnt / "file"
    path.write_bytes(b"a" * 300_000)
    with (at(mnt) / "file").open("rb", buffering=0) as reader:
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        with path.open("ab") as file:
            file.write(b"b" * 300_000)
        path.write_bytes(b"c" * 10)
        path.unlink()
        assert error_of(lambda: fill(mnt / "fill")) == errno.ENOSPC
        assert reader.read() == b"a" * 300_000
    (mnt / "fill").unlink()


def test_what_lost_its_room_is_absent(mnt: Path, unmounted: Workplace) -> None:
    unmounted.announced.append("no-space")
    path = mnt / "file"
    path.write_bytes(b"a" * 300_000)
    before = commit(mnt)
    path.write_bytes(b"b")
    assert (at(mnt, before) / "file").read_bytes() == b"a" * 300_000
    assert error_of(lambda: fill(mnt / "fill")) == errno.ENOSPC
    assert error_of((at(mnt, before) / "file").read_bytes) == errno.ENOENT
    assert names(at(mnt, before)) == []
    (mnt / "fill").unlink()


@pytest.fixture
def shared(unmounted: Workplace) -> Path:
    unmounted.mount("allow_other")
    unmounted.mountpoint.chmod(0o777)
    return unmounted.mountpoint


SAVE = """
os.umask(0o022)
os.makedirs(sys.argv[1], exist_ok=True)
with open(sys.argv[1] + "/file", "w") as file: file.write(sys.argv[2])
"""
LOOK = """
import json
def said(action):
    try:
        return action()
    except OSError as error:
        return error.errno
path = sys.argv[1]
print(json.dumps([said(lambda: sorted(os.listdir(path))), said(lambda: open(path + "/file").read()),
                  said(lambda: sorted(os.listdir(os.path.dirname(path))))]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")
def test_users_see_what_was_theirs(shared: Path) -> None:
    for name, user in (("alice", ALICE), ("bob", BOB)):
        as_user(user, SAVE, shared / name, "one")
    as_user(ALICE, SAVE + "os.chmod(sys.argv[1], 0o700)", shared / "private", "one")
    before = commit(shared)
    for name, user in (("alice", ALICE), ("bob", BOB)):
        as_user(user, SAVE, shared / name, "two")
    past = at(shared, before)

    def look(user: int, name: str) -> list[object]:
        found = json.loads(as_user(user, LOOK, past / name))
        assert isinstance(found, list)
        return found

    everybody = ["alice", "bob"]
    assert look(ALICE, "alice") == [["file"], "one", ["alice", "bob", "private"]]
    assert look(BOB, "alice") == [[], errno.ENOENT, everybody]
    assert look(BOB, "private") == [errno.ENOENT, errno.ENOENT, everybody]
    assert look(ALICE, "private") == [["file"], "one", ["alice", "bob", "private"]]
    assert look(BOB, "alice") == [[], errno.ENOENT, everybody], "nothing was remembered"
    assert (past / "private" / "file").read_text() == "one"


PIN_IT = """
try:
    os.setxattr(sys.argv[1], "user.cxlfs.pin", sys.argv[2].encode())
except OSError as error:
    print(error.errno)
"""
UNPIN = """
try:
    os.removexattr(sys.argv[1], "user.cxlfs.pin")
except OSError as error:
    print(error.errno)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs other users")
def test_users_pin_what_is_theirs(shared: Path, unmounted: Workplace) -> None:
    for name, user in (("alice", ALICE), ("bob", BOB)):
        as_user(user, SAVE, shared / name, name)
    now = at(shared)
    assert as_user(ALICE, PIN_IT, now / "alice", "best") == ""
    assert as_user(BOB, PIN_IT, now / "bob", "best") == ""
    assert as_user(BOB, PIN_IT, now / "alice", "other") == f"{errno.EACCES}\n"
    assert as_user(BOB, PIN_IT, now, "other") == f"{errno.EACCES}\n"
    assert as_user(BOB, PIN_IT, now / "bob", "best") == f"{errno.EEXIST}\n"
    assert as_user(BOB, PIN_IT, now / "bob", "7") == f"{errno.EINVAL}\n"
    for user in (ALICE, BOB):
        assert as_user(user, "print(os.listdir(sys.argv[1]))", now.parent) == "['best']\n"
    assert names(now.parent) == [f"best@{ALICE}", f"best@{BOB}"]
    for name in ("alice", "bob"):
        subprocess.run(["rm", "-rf", shared / name], check=True)
    unmounted.kill_daemon()
    unmounted.unmount()
    unmounted.mount("allow_other")
    read = "print(open(sys.argv[1]).read())"
    assert as_user(ALICE, read, at(shared, "best") / "alice/file") == "alice\n"
    assert as_user(BOB, read, at(shared, "best") / "bob/file") == "bob\n"
    assert error_of(lambda: names(at(shared, "best"))) == errno.ENOENT
    said = json.loads(os.getxattr(at(shared, f"best@{BOB}"), PIN))
    assert (said["path"], said["count"], said["uid"]) == ("/bob", 2, BOB)
    bobs = f"best@{BOB}"
    assert as_user(ALICE, UNPIN, at(shared, bobs)) == f"{errno.ENOENT}\n"
    assert as_user(BOB, UNPIN, at(shared, "best")) == ""
    assert as_user(BOB, UNPIN, at(shared, "best")) == f"{errno.ENOENT}\n"
    os.removexattr(at(shared, f"best@{ALICE}"), PIN)
    assert names(now.parent) == []


def test_a_pin_with_many_names(mnt: Path) -> None:
    """Made in steps, while others have their turn."""
    top = mnt / "run"
    top.mkdir()
    for number in range(100):
        (top / f"{number}").write_text(f"{number}")
    os.setxattr(at(mnt) / "run", PIN, b"best")
    subprocess.run(["rm", "-rf", top], check=True)
    pinned = at(mnt, "best") / "run"
    assert {p.name: p.read_text() for p in pinned.iterdir()} == {f"{n}": f"{n}" for n in range(100)}
    assert error_of(lambda: os.setxattr(pinned, PIN, b"again")) == errno.EROFS
    assert error_of((pinned / "7").unlink) == errno.EROFS
    os.removexattr(at(mnt, "best"), PIN)
    assert not at(mnt, "best").exists()
