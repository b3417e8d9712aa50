"""Shared mappings, private mappings, and locks between processes."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.support.mount import MIB, Workplace, tell, wait_for_line, wait_until


def test_a_shared_mapping_reads_the_file(mnt: Path) -> None:
    data = os.urandom(3 * MIB + 100)
    (mnt / "file").write_bytes(data)
    with (mnt / "file").open("rb") as file:
        with mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ) as mapping:
            assert mapping[:] == data
        with mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping:
            assert mapping[:] == data


def test_a_shared_mapping_writes_the_file(place: Workplace) -> None:
    path = place.mountpoint / "file"
    path.write_bytes(bytes(MIB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[1000:1005] = b"hello"
        mapping[MIB - 5 :] = b"world"
        mapping.flush()  # msync: on the way to the daemon, so read through another descriptor
        with path.open("rb") as other:
            assert other.read(1005)[1000:] == b"hello"
        mapping[2000:2005] = b"later"
    place.remount()
    content = path.read_bytes()
    assert content[1000:1005] == b"hello"
    assert content[2000:2005] == b"later"
    assert content[-5:] == b"world"


def test_a_mapping_sees_direct_writes(mnt: Path) -> None:
    """A write-only descriptor bypasses the page cache that the mapping lives in."""
    path = mnt / "file"
    path.write_bytes(b"a" * 20_000)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
        assert mapping[10_000] == ord("a")
        writer = os.open(path, os.O_WRONLY)
        os.pwrite(writer, b"b", 10_000)
        wait_until(lambda: mapping[10_000] == ord("b"), "the mapping shows the write")
        os.close(writer)
        mapping.close()


def test_a_mapped_file_that_is_replaced_stays_readable(mnt: Path) -> None:
    path = mnt / "model.safetensors"
    path.write_bytes(b"old" * 100_000)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    (mnt / "new").write_bytes(b"new")
    (mnt / "new").rename(path)
    assert mapping[:] == b"old" * 100_000
    mapping.close()


LOCK_HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
if sys.argv[2] == "flock":
    fcntl.flock(file, fcntl.LOCK_EX)
else:
    fcntl.lockf(file, fcntl.LOCK_EX, 10, 5)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.mark.parametrize("kind", ["flock", "fcntl"])
def test_locks_hold_between_processes(place: Workplace, kind: str) -> None:
    path = place.mountpoint / "locked"
    path.write_bytes(bytes(100))
    holder = place.python(LOCK_HOLDER, path, kind)
    wait_for_line(holder)
    with path.open("r+b") as file:
        with pytest.raises(BlockingIOError):
            lock(file, kind)
        if kind == "fcntl":
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 5, 50)  # another range is free
        tell(holder)
        holder.wait()
        lock(file, kind)


def lock(file: BinaryIO, kind: str) -> None:
    """What conflicts with LOCK_HOLDER; fails at once when it is held."""
    if kind == "flock":
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    else:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 8)
