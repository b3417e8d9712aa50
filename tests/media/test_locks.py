"""What the kernel says of programs that may store into a source: as long as a mapping lives."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import BusyError
from cxlfs.media import locks, open_media
from cxlfs.store import Store

SIZE_BYTES = 1 << 20
_ARGUMENT = struct.Struct("=hh4xqqi4x")


def _lock(descriptor: int, start: int, length: int, kind: int = fcntl.F_RDLCK) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _ARGUMENT.pack(kind, 0, start, length, 0))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(bytes(SIZE_BYTES))
    return path


@pytest.fixture
def ours(source: Path) -> Iterator[int]:
    descriptor = os.open(source, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def theirs(source: Path) -> Iterator[int]:
    descriptor = os.open(source, os.O_RDWR)
    yield descriptor
    with contextlib.suppress(OSError):
        os.close(descriptor)


def test_every_lock_is_found_clipped_and_joined(ours: int, theirs: int) -> None:
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == []
    other = os.open(f"/proc/self/fd/{theirs}", os.O_RDWR)
    _lock(theirs, 4096, 4096)
    _lock(other, 6000, 6192)
    _lock(theirs, 500_000, 100)
    _lock(other, 900_000, 0)  # to the end of everything
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == [
        (4096, 12_192),
        (500_000, 500_100),
        (900_000, SIZE_BYTES),
    ]
    assert locks.locked_ranges(ours, 5000, 7000) == [(5000, 7000)]
    assert locks.locked_ranges(ours, 12_192, 500_000) == []
    os.close(other)
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == [(4096, 8192), (500_000, 500_100)]


def test_our_own_descriptor_is_not_asked_of(ours: int) -> None:
    _lock(ours, 0, 4096)
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == []


def test_a_mapping_keeps_the_lock_when_the_descriptor_is_closed(source: Path, ours: int) -> None:
    mapped = _mapping_of_a_closed_file(source)
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == [(8192, 12_288)]
    mapped.close()
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == []


def _mapping_of_a_closed_file(source: Path) -> mmap.mmap:
    """Python's own mmap keeps a descriptor of the same open file, which is what is wanted here."""
    descriptor = os.open(source, os.O_RDWR)
    _lock(descriptor, 8192, 4096)
    mapped = mmap.mmap(descriptor, 65_536)
    os.close(descriptor)
    return mapped


def test_a_killed_process_leaves_no_lock(source: Path, ours: int) -> None:
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            mapped = _mapping_of_a_closed_file(source)
            os.write(tell, b"1")
            signal.pause()
            mapped.close()
        os._exit(1)
    assert os.read(told, 1) == b"1"
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == [(8192, 12_288)]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == []
    os.close(told)
    os.close(tell)


def test_a_watch_is_seen_by_others_until_it_ends(ours: int, theirs: int) -> None:
    def is_seen(watch: int) -> bool:
        at = locks.WATCHES_FROM + watch
        return locks.locked_ranges(theirs, at, at + 1) == [(at, at + 1)]

    for watch in (0, 1, 7, locks.WATCHES - 1):
        locks.lock_watch(ours, watch)
    assert [is_seen(watch) for watch in (0, 1, 2, 7, locks.WATCHES - 1)] == [1, 1, 0, 1, 1]
    locks.unlock_watch(ours, 1)
    assert not is_seen(1)
    assert is_seen(0)
    assert locks.marked_processes(theirs) == set(), "they are no marks"
    assert locks.locked_ranges(theirs, 0, SIZE_BYTES) == []


def test_the_watches_of_a_killed_daemon_go_before_its_claim_on_the_source(source: Path) -> None:
    """So that no other daemon is there while a reader believes that the first one is."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            descriptor = os.open(source, os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locks.lock_watch(descriptor, 5)
            os.write(tell, b"1")
            signal.pause()
        os._exit(1)
    assert os.read(told, 1) == b"1"
    at = locks.WATCHES_FROM + 5
    with source.open("r+b") as other:
        assert locks.locked_ranges(other.fileno(), at, at + 1) == [(at, at + 1)]
        os.kill(child, signal.SIGKILL)
        fcntl.flock(other.fileno(), fcntl.LOCK_EX)
        assert locks.locked_ranges(other.fileno(), at, at + 1) == []
    os.waitpid(child, 0)
    os.close(told)
    os.close(tell)


def test_processes_say_who_they_are(ours: int, theirs: int) -> None:
    assert locks.marked_processes(ours) == set()
    _lock(theirs, locks.MARKS_FROM + os.getpid(), 1)
    other = os.open(f"/proc/self/fd/{theirs}", os.O_RDWR)
    _lock(other, locks.MARKS_FROM + os.getpid() + 1, 1)
    assert locks.marked_processes(ours) == {os.getpid(), os.getpid() + 1}
    os.close(other)
    assert locks.locked_ranges(ours, 0, SIZE_BYTES) == []


def test_a_lock_on_all_of_it_names_nobody(ours: int, theirs: int) -> None:
    _lock(theirs, 0, 0)
    assert locks.marked_processes(ours) == set()


def test_a_locked_source_is_not_formatted(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with contextlib.closing(open_media(str(path), create_size_bytes=64 << 20)) as media:
        Store.format(media)
        descriptor = os.open(path, os.O_RDWR)
        _lock(descriptor, 30 << 20, 4096)
        assert media.locked_ranges() == [(30 << 20, (30 << 20) + 4096)]
        with pytest.raises(BusyError, match=r"4\.0 KiB of .* mapped"):
            Store.format(media)
        os.close(descriptor)
        Store.format(media)
