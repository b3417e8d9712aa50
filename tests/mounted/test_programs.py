"""Ordinary programs on a mount: sqlite, numpy, cp, tar, git-like trees."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.mount import Workplace, kill, wait_for_line

INSERT = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=30)
for number in range(int(sys.argv[2]), int(sys.argv[2]) + 50):
    with database:
        database.execute("insert into t values (?)", (number,))
database.close()
"""


@pytest.mark.parametrize("journal_mode", ["wal", "delete", "truncate"])
def test_sqlite_with_several_writers(place: Workplace, journal_mode: str) -> None:
    path = place.mountpoint / "database"
    database = sqlite3.connect(path)
    assert database.execute(f"pragma journal_mode={journal_mode}").fetchone() == (journal_mode,)
    with database:
        database.execute("create table t (number integer)")
    writers = [place.python(INSERT, path, start) for start in (0, 100)]
    assert [writer.wait() for writer in writers] == [0, 0]
    numbers = {number for (number,) in database.execute("select number from t")}
    assert numbers == {*range(50), *range(100, 150)}
    database.close()
    place.remount()
    database = sqlite3.connect(path)
    assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert database.execute("select count(*) from t").fetchone() == (100,)
    database.close()


def test_a_sqlite_database_whose_daemon_is_killed(place: Workplace) -> None:
    path = place.mountpoint / "database"
    database = sqlite3.connect(path)
    database.execute("pragma journal_mode=wal")
    with database:
        database.execute("create table t (number integer)")
        database.execute("insert into t values (1)")
    place.kill_daemon()
    database.close()
    place.mount()
    database = sqlite3.connect(path)
    assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert database.execute("select * from t").fetchall() == [(1,)]
    database.close()
    place.unmount()
    place.ends_clean = True


def test_numpy_files_and_memory_maps(place: Workplace) -> None:
    mnt = place.mountpoint
    values = np.arange(500_000, dtype=np.float64)
    np.save(mnt / "a.npy", values)
    np.savez(mnt / "b.npz", x=values, y=values[::2])
    mapped = np.lib.format.open_memmap(
        mnt / "c.npy", mode="w+", dtype=np.float32, shape=(1000, 300)
    )
    mapped[:] = 7
    mapped[500] = np.arange(300)
    mapped.flush()
    del mapped
    again = np.load(mnt / "a.npy", mmap_mode="r+")
    again[1000] = -1
    del again
    place.remount()
    expected = values.copy()
    expected[1000] = -1
    assert np.array_equal(np.load(mnt / "a.npy", mmap_mode="r"), expected)
    with np.load(mnt / "b.npz") as archive:
        assert np.array_equal(archive["y"], values[::2])
    back = np.load(mnt / "c.npy")
    assert np.array_equal(back[500], np.arange(300))
    assert (back[499] == 7).all()


def make_tree(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_bytes(os.urandom(100_000))
    (root / "a" / "b" / "script").write_text("#!/bin/sh\n")
    (root / "a" / "b" / "script").chmod(0o751)
    (root / "a" / "link").symlink_to("b/script")
    os.link(root / "a" / "file", root / "a" / "hard")
    os.utime(root / "a" / "b" / "script", ns=(5_000_000_001, 6_000_000_002))


def description(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(root))] = (
            *(status.st_mode, status.st_mtime_ns, status.st_uid, content),
            status.st_nlink if path.is_file() else 0,
        )
    return found


@pytest.mark.parametrize("where", ["in", "out", "within"])
def test_archive_copies_are_exact(place: Workplace, where: str) -> None:
    outside = place.root / "outside"
    outside.mkdir()
    source, target = {
        "in": (outside, place.mountpoint),
        "out": (place.mountpoint, outside),
        "within": (place.mountpoint / "x", place.mountpoint / "y"),
    }[where]
    for directory in (source, target):
        directory.mkdir(exist_ok=True)
    make_tree(source)
    done = subprocess.run(
        ["cp", "-a", str(source / "a"), str(target)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert description(target / "a") == description(source / "a")


def test_tar_and_removal_of_trees(place: Workplace) -> None:
    mnt = place.mountpoint
    make_tree(mnt)
    archive = place.root / "archive.tar"
    subprocess.run(["tar", "-C", mnt, "-cf", archive, "a"], check=True)
    (mnt / "out").mkdir()
    subprocess.run(["tar", "-C", mnt / "out", "-xpf", archive], check=True)
    before, after = description(mnt / "a"), description(mnt / "out" / "a")
    assert {k: (v[0], v[3]) for k, v in before.items()} == {
        k: (v[0], v[3]) for k, v in after.items()
    }
    for name in ("a", "out"):
        shutil.rmtree(mnt / name)
    assert list(mnt.iterdir()) == []


ATTRIBUTE, STATE = "user.note", "user.cxlfs.state"


def copied(program: str, source: Path, target: Path) -> None:
    """``source`` as ``target``, with its extended attributes; the program must find no fault."""
    archive = target.parent / "archive.tar"
    kept = ("--xattrs", "--xattrs-include=*", "--no-same-owner")
    commands = {
        "cp": [["cp", "--preserve=all", source, target]],
        "cp -a": [["cp", "-a", source, target]],
        "mv": [["cp", "-a", source, f"{source}.original"], ["mv", source, target]],
        "tar": [
            ["tar", *kept, "-C", source.parent, "-cf", archive, source.name],
            [
                "tar",
                *kept,
                "-C",
                target.parent,
                "--transform",
                f"s/.*/{target.name}/",
                "-xf",
                archive,
            ],
        ],
        "rsync": [["rsync", "-aX", source, target]],
    }
    for command in commands[program]:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), command


@pytest.mark.parametrize("where", ["in", "out", "within"])
@pytest.mark.parametrize("program", ["cp", "cp -a", "mv", "tar", "rsync"])
def test_archivers_copy_attributes_but_not_what_the_store_says(
    place: Workplace, program: str, where: str
) -> None:
    """From elsewhere such a name may come along: it is no error, and is not believed."""
    if shutil.which(program.split(maxsplit=1)[0]) is None:
        pytest.skip(f"{program} is not installed")
    outside = place.root / "outside"
    outside.mkdir()
    source, target = {
        "in": (outside / "file", place.mountpoint / "copy"),
        "out": (place.mountpoint / "file", outside / "copy"),
        "within": (place.mountpoint / "file", place.mountpoint / "copy"),
    }[where]
    source.write_bytes(b"content")
    try:
        os.setxattr(source, ATTRIBUTE, b"kept")
        if where == "in":
            os.setxattr(source, STATE, b"damaged")
    except OSError as error:
        pytest.skip(f"{source.parent}: {error}")
    copied(program, source, target)
    assert target.read_bytes() == b"content"
    assert os.listxattr(target) == [ATTRIBUTE]
    assert os.getxattr(target, ATTRIBUTE) == b"kept"
    if where != "out":
        assert os.getxattr(target, STATE) == b"complete"


def test_moving_into_the_mount_from_another_file_system(place: Workplace) -> None:
    """As fsspec's transactions do: rename fails, then copy, utime, chmod, unlink."""
    outside = place.root / "temporary"
    outside.write_bytes(os.urandom(200_000))
    content = outside.read_bytes()
    (place.mountpoint / "checkpoint").write_bytes(b"old")
    shutil.move(outside, place.mountpoint / "checkpoint")
    assert (place.mountpoint / "checkpoint").read_bytes() == content
    assert not outside.exists()


def test_python_can_run_from_the_mount(place: Workplace) -> None:
    """Imports and executes, and writes its caches by renaming."""
    package = place.mountpoint / "package"
    package.mkdir()
    (package / "__init__.py").write_text("value = 5\n")
    command = [sys.executable, "-c", "import package; print(package.value)"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    for _ in range(2):
        done = subprocess.run(
            command, cwd=place.mountpoint, env=environment, capture_output=True, check=True
        )
        assert done.stdout == b"5\n"
    assert list((package / "__pycache__").iterdir())


def test_a_log_can_be_followed(place: Workplace) -> None:
    """One process appends and stays open, others read as it grows."""
    path = place.mountpoint / "events"
    code = (
        "import sys; f = open(sys.argv[1], 'ab', buffering=0)\n"
        "for line in sys.stdin.buffer: f.write(line); print('ready', flush=True)"
    )
    writer = place.python(code, path)
    assert writer.stdin is not None
    with path.open("a+b", buffering=0) as reader:
        for number in range(50):
            line = b"event %d\n" % number
            writer.stdin.write(line)
            writer.stdin.flush()
            wait_for_line(writer)
            assert reader.read() == line
    kill(writer)
    assert path.read_bytes().count(b"\n") == 50
