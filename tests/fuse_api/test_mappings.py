"""Whether a process maps a file: from files as in /proc, asked without keeping anybody waiting."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.fuse import kernel
from cxlfs.fuse.direct import Direct
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.mappings import ANSWER_SECONDS, Mappings
from cxlfs.fuse.processes import PF_EXITING, Process, ProcessTable
from cxlfs.store import UnfinishedError
from tests.fuse_api.test_data_plane import made_plane
from tests.fuse_api.test_first_writes import Caller
from tests.fuse_api.test_processes import write_process
from tests.support.fuse_api import RANDOM_PID, finish, kernel_without_a_kernel

MAPS = """\
7f0000000000-7f0000001000 rw-s 00000000 00:2f 77                         /mnt/a b
7f0000001000-7f0000002000 rw-p 00000000 00:2f 78                         /mnt/private
7f0000002000-7f0000003000 rw-s 00000000 00:30 79                         /other/c
7f0000003000-7f0000004000 rw-p 00000000 00:00 0
7f0000004000-7f0000005000 r--s 00001000 00:2f 80                         /mnt/d (deleted)
"""
MOUNTS = """\
21 1 0:48 / /other rw shared:1 - ext4 /dev/sda rw
22 1 0:47 / /mnt rw,nosuid shared:2 - fuse.cxlfs store rw
"""
PROCESS = Process(10, 1000)


def write_maps(root: Path, maps: str, *, text_pages: int = 33) -> ProcessTable:
    write_process(root, PROCESS.tgid, start=PROCESS.start_time)
    (root / "10/maps").write_text(maps)
    (root / "10/mountinfo").write_text(MOUNTS)
    (root / "10/statm").write_text(f"33 1 0 {text_pages} 0 33 0\n")
    return ProcessTable(root)


@pytest.mark.parametrize(
    ("ino", "maps"), [(77, True), (78, False), (79, False), (80, True), (7, False), (0, False)]
)
def test_which_files_a_process_maps(tmp_path: Path, ino: int, maps: bool) -> None:
    assert write_maps(tmp_path, MAPS).maps(PROCESS, ino) is maps


def test_who_is_gone_or_in_execve_maps_nothing(tmp_path: Path) -> None:
    table = write_maps(tmp_path, MAPS, text_pages=0)
    assert not table.maps(PROCESS, 77)
    assert not table.maps(Process(11, 1000), 77)
    assert not write_maps(tmp_path, "").maps(PROCESS, 77)


def test_this_process(tmp_path: Path) -> None:
    """A file system that is not ours."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert not ProcessTable().maps(Process(os.getpid(), 0), path.stat().st_ino)


class SlowTable:
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.may_answer = threading.Event()
        self.asked = 0

    def maps(self, process: Process, ino: int) -> bool:
        self.asked += 1
        assert self.may_answer.wait(20)
        return process == PROCESS and ino == 77


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def table() -> Iterator[SlowTable]:
    table = SlowTable()
    yield table
    table.may_answer.set()


def until_known(ask: Callable[[], bool]) -> bool:
    while True:
        try:
            return ask()
        except UnfinishedError:
            time.sleep(0.001)


def mappings_of(table: SlowTable) -> tuple[Mappings, Clock]:
    clock = Clock()
    return Mappings(cast("ProcessTable", table), clock=clock), clock


def test_nobody_is_kept_waiting_for_an_answer(table: SlowTable) -> None:
    mappings, _ = mappings_of(table)
    for _ in range(3):
        with pytest.raises(UnfinishedError):
            mappings.has(PROCESS, 77)
    assert not mappings.has(None, 77)
    table.may_answer.set()
    assert until_known(lambda: mappings.has(PROCESS, 77))
    assert table.asked == 1
    assert not until_known(lambda: mappings.has(PROCESS, 78))


def test_without_an_answer_in_time_nothing_is_mapped(table: SlowTable) -> None:
    mappings, clock = mappings_of(table)
    with pytest.raises(UnfinishedError):
        mappings.has(PROCESS, 77)
    clock.now = ANSWER_SECONDS
    assert not mappings.has(PROCESS, 77)


def test_questions_that_nobody_repeats_are_forgotten(table: SlowTable) -> None:
    mappings, clock = mappings_of(table)
    inos = range(100, 200)
    waiting = 0
    for ino in inos:
        try:
            assert not mappings.has(PROCESS, ino), "there is no thread left"
        except UnfinishedError:
            waiting += 1
    assert 0 < waiting < 100
    table.may_answer.set()
    for thread in threading.enumerate():
        if thread.name == "cxlfs-mappings":
            thread.join()
    clock.now = 3 * ANSWER_SECONDS
    assert until_known(lambda: mappings.has(PROCESS, 77))
    assert not until_known(lambda: mappings.has(PROCESS, inos[0])), "it was asked anew"


@pytest.mark.parametrize("opener", ["lives", "ended", "killed"])
def test_a_release_that_an_unmount_has_dropped(
    tmp_path: Path, opener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_process(tmp_path, RANDOM_PID)
    with kernel_without_a_kernel(tmp_path) as sender:
        operations = sender.operations
        monkeypatch.setattr(operations, "_mappings", AllMapped())
        ino = sender.write_file(b"a", b"old")
        handle = sender.open(ino, os.O_RDWR | os.O_TRUNC).fh
        finish(operations.write(handle, 8192, b"new"))
        finish(operations.flush(handle))
        if opener == "ended":
            shutil.rmtree(tmp_path / str(RANDOM_PID))
        elif opener == "killed":
            write_process(tmp_path, RANDOM_PID, flags=PF_EXITING, exit_code=9)
        operations.release_left()
        assert len(operations.files) == (opener == "lives")
        committed = sender.store.namespace.get(ino).committed_content
        assert committed is not None
        assert committed.size == (8195 if opener == "ended" else 3)


class AllMapped:
    """Every process maps every file."""

    def has(self, _process: Process | None, _ino: int) -> bool:
        return True


@pytest.mark.parametrize("flags", [0, kernel.WRITE_CACHE])
def test_only_what_the_kernel_writes_back_is_lost(
    flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that writes is told of its error by the write itself, and may repeat it."""
    with made_plane() as plane:
        plane.start(Direct(plane.operations, plane.workers.transport))
        caller = Caller(plane)
        inode, handle = caller.create(b"new")
        plane.store.namespace.get(inode).stop_writes()
        body = kernel.WRITE.pack(handle, 0, 5, flags, os.O_RDWR) + b"abcde"
        with monkeypatch.context() as patch:
            refused = NoSpaceError("for a test")
            patch.setattr(plane.store, "write", lambda *_, **__: _raise(refused))
            with pytest.raises(OSError, match="No space left"):
                caller.ask(Opcode.WRITE, inode, body)
        caller.ask(Opcode.WRITE, inode, body)
        if flags:
            for opcode in (Opcode.FLUSH, Opcode.FSYNC):
                with pytest.raises(OSError, match="No space left"):
                    caller.end(opcode, inode, handle)
        else:
            caller.end(Opcode.FLUSH, inode, handle)
        caller.end(Opcode.RELEASE, inode, handle)


def _raise(error: Exception) -> None:
    raise error
