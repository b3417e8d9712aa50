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
