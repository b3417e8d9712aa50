"""Who opened a file to read it, and failed: what counts, how often, and what does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cxlfs.fuse import readers as readers_module
from cxlfs.fuse.processes import Process, ProcessTable
from cxlfs.fuse.readers import FILE_BYTES_MIN, Readers
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from cxlfs.store.unit_rules import Ending

MIB = 1 << 20


@dataclass
class Scene:
    """Processes by their numbers, with the codes that they end with, and a clock by hand."""

    store: Store
    codes: dict[int, int] = field(default_factory=dict)
    now: float = 100.0

    def identify(self, tid: int) -> Process | None:
        return Process(tid, 1) if tid else None

    def watch(self, process: Process) -> None:
        assert process.tgid

    def of(self, process: Process) -> Ending:
        if process.tgid not in self.codes:
            return Ending.ALIVE
        code = self.codes[process.tgid]
        return Ending.KILLED if code & 0x7F else Ending.BADLY if code else Ending.WELL

    def code_of(self, process: Process) -> int | None:
        return self.codes.get(process.tgid)

    def keep_only(self, wanted: object) -> None:
        assert wanted is not None

    def close(self) -> None:
        """As Endings."""

    def made(self, name: bytes = b"model.pt", size: int = FILE_BYTES_MIN) -> int:
        attributes, handle = self.store.create(1, name, 0o644, 0, 0, os.O_WRONLY)
        self.store.write(handle, 0, bytes(size))
        self.store.flush(handle, writer_killed=False)
        self.store.release(handle)
        return attributes.ino

    def count(self, ino: int) -> int:
        return int(self.store.get_xattr(ino, b"user.cxlfs.failed_resumes"))


@pytest.fixture
def scene() -> Iterator[Scene]:
    media = MemoryMedia(40 * MIB)
    Store.format(media)
    store = Store.open(media)
    yield Scene(store)
    store.close()


@pytest.fixture
def readers(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> Readers:
    monkeypatch.setattr(readers_module, "Endings", lambda _: scene)
    table: ProcessTable = scene  # type: ignore[assignment]
    return Readers(scene.store, table, clock=lambda: scene.now)


def resume(scene: Scene, readers: Readers, ino: int, pids: range, code: int) -> None:
    """Each of these opens the file, then all end with this code, as wait(2) tells it."""
    for pid in pids:
        scene.now += 1
        readers.opened(pid, ino, FILE_BYTES_MIN, os.O_RDONLY)
    readers.maintain()
    scene.now += 1
    scene.codes.update(dict.fromkeys(pids, code))
    readers.maintain()


@pytest.mark.parametrize(
    ("code", "counts"),
    [
        (1 << 8, True),
        (134 << 8, True),
        (signal.SIGKILL, True),
        (signal.SIGSEGV | 0x80, True),
        (0, False),
        (signal.SIGINT, False),
        (signal.SIGTERM, False),
        ((128 + signal.SIGTERM) << 8, False),
        ((128 + signal.SIGINT) << 8, False),
    ],
)
def test_what_counts(scene: Scene, readers: Readers, code: int, counts: bool) -> None:
    ino = scene.made()
    resume(scene, readers, ino, range(10, 11), code)
    assert scene.count(ino) == int(counts)


def test_the_ranks_of_a_job_count_once(scene: Scene, readers: Readers) -> None:
    ino = scene.made()
    resume(scene, readers, ino, range(10, 18), 1 << 8)
    assert scene.count(ino) == 1
    resume(scene, readers, ino, range(20, 28), 1 << 8)
    assert scene.count(ino) == 2


def test_ranks_that_end_one_after_the_other_count_once(scene: Scene, readers: Readers) -> None:
    ino = scene.made()
    for pid in (10, 11, 12):
        readers.opened(pid, ino, MIB, os.O_RDONLY)
    for pid in (10, 11):
        scene.now += 10
        scene.codes[pid] = 9
        readers.maintain()
    readers.opened(13, ino, MIB, os.O_RDONLY)  # begun again before the last had gone
    scene.now += 1
    scene.codes[12] = 9
    readers.maintain()
    assert scene.count(ino) == 1
    scene.codes[13] = 9
    readers.maintain()
    assert scene.count(ino) == 2


def test_who_is_not_watched(scene: Scene, readers: Readers) -> None:
    ino = scene.made()
    readers.opened(10, ino, FILE_BYTES_MIN - 1, os.O_RDONLY)
    readers.opened(11, ino, FILE_BYTES_MIN, os.O_RDONLY | os.O_NONBLOCK)
    readers.opened(0, ino, FILE_BYTES_MIN, os.O_RDONLY)
    scene.codes = {10: 9, 11: 9, 0: 9}
    readers.maintain()
    assert scene.count(ino) == 0


def test_how_many_are_watched_is_bounded(
    scene: Scene, readers: Readers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers_module, "_PROCESSES_MAX", 2)
    monkeypatch.setattr(readers_module, "_FILES_MAX", 1)
    first, second = scene.made(b"a"), scene.made(b"b")
    for pid in (10, 11, 12):
        readers.opened(pid, second if pid == 12 else first, MIB, os.O_RDONLY)
    readers.opened(10, second, MIB, os.O_RDONLY)
    scene.codes = {10: 9, 11: 9, 12: 9}
    readers.maintain()
    assert (scene.count(first), scene.count(second)) == (1, 0)


def test_the_count_ends_with_the_content(scene: Scene, readers: Readers) -> None:
    ino = scene.made()
    resume(scene, readers, ino, range(10, 11), 9)
    assert scene.count(ino) == 1
    handle = scene.store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    scene.store.write(handle, 0, b"new")
    scene.store.flush(handle, writer_killed=False)
    scene.store.release(handle)
    assert scene.count(ino) == 0
    resume(scene, readers, ino, range(20, 21), 9)
    assert scene.count(ino) == 1


def test_a_file_that_is_gone_counts_nothing(scene: Scene, readers: Readers) -> None:
    ino = scene.made()
    readers.opened(10, ino, MIB, os.O_RDONLY)
    scene.store.unlink(1, b"model.pt")
    scene.codes[10] = 9
    readers.maintain()
    with pytest.raises(Exception, match="no"):
        scene.count(ino)
