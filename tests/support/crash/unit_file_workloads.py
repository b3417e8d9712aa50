"""Workloads over checkpoint units in which each file is a checkpoint (``--done '*'``)."""

from __future__ import annotations

import os

from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import EACH_FILE, Ending
from tests.support.crash.bench import Bench
from tests.support.crash.tape import State
from tests.support.crash.unit_scene import Scene

RUNS = b"runs"


class FileScene:
    """A directory of such files, and the programs that write them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.scene = Scene(bench)
        self.present = "trainer"
        self.endings: dict[object, Ending] = {}
        self.scene.units.writer = lambda: self.present
        self.scene.units.ending_of = lambda who: self.endings.get(who, Ending.ALIVE)
        self.scene.make(RUNS)
        self.scene.save(RUNS + b"/a", 9000)

    def start(self) -> None:
        """From here on each file is a checkpoint."""
        rules = (policy_rule((b".",), (EACH_FILE,), None),)
        self.scene.units.set_policy(self.bench.inode(RUNS), rules)
        self.scene.start()

    def begin(self, name: bytes, length: int) -> int:
        """The first file of a unit: written anew, not closed yet."""
        self.scene.begin(RUNS)
        return self.go_on(name, length)

    def go_on(self, name: bytes, length: int) -> int:
        handle = self.scene.open(RUNS + b"/" + name)
        self.bench.write(handle, 0, length)
        return handle

    def close(self, handle: int) -> None:
        """The last one of those that are being written: what is there stays."""
        store = self.bench.store
        self.scene.keeping(RUNS, lambda: store.flush(handle, writer_killed=False))
        self.bench.do("release", lambda: store.release(handle), late=True, keeps=True)

    def save(self, name: bytes, length: int) -> None:
        self.close(self.begin(name, length))

    def rename(self, old: bytes, new: bytes, **how: bool) -> None:
        """To a place in the directory: in one step for whoever looks anywhere."""
        store, places = self.bench.store, (self.bench.place(old), self.bench.place(new))
        self.scene.keeping(RUNS, lambda: store.rename(*places[0], *places[1], **how))

    def kill(self) -> None:
        """Between two files: what is there stays."""
        self.endings[self.present] = Ending.KILLED
        self.bench.do("killed", self.scene.units.settle, late=True, keeps=True)

    def kill_in(self, handle: int) -> None:
        """Within one: all that was begun with it goes back."""
        store = self.bench.store
        self.scene.units.killed(self.present)
        self.endings[self.present] = Ending.KILLED
        flush = lambda: store.flush(handle, writer_killed=True)  # noqa: E731
        self.bench.do("killed", flush, late=True, keeps=True)
        self.bench.do("release", lambda: store.release(handle), late=True, keeps=True)


def unit_of_files(bench: Bench) -> None:
    """Each file is a checkpoint: what is closed stays, until an error takes it back as one."""
    files = FileScene(bench)
    files.start()
    scene = files.scene
    before: State = {}
    for length in (500, 6000):
        scene.begin(RUNS)
        before = scene.before(RUNS)
        handle = scene.open(RUNS + b"/a", os.O_RDWR)
        scene.write_in_place(handle, length)
        bench.fsync(handle)
        scene.write_in_place(handle, length + 900)
        files.close(handle)
    files.endings["trainer"] = Ending.BADLY
    scene.back_to(RUNS, before)


def unit_of_files_killed_between_any_two(bench: Bench) -> None:
    """Each saver saves some files in its own way and is killed behind one of them; the last one
    within one.
    """
    files = FileScene(bench)
    files.start()
    for count in (1, 2):
        files.present = f"saver of {count}"
        for name in (b"a", b"b")[:count]:
            files.save(name, 300 * count)
        files.kill()
    files.present = "by rename"
    files.scene.begin(RUNS)
    files.scene.open(RUNS + b"/temporary")
    files.rename(RUNS + b"/temporary", RUNS + b"/a")
    files.kill()
    files.present = "the last one"
    files.kill_in(files.begin(b"b", 7000))
    files.scene.back(RUNS)
    bench.do("maintain", files.scene.units.maintain, late=True, keeps=True)
    files.scene.save(b"unrelated", 3000)


def unit_of_files_renamed_over_and_in(bench: Bench) -> None:
    """Closed and renamed, renamed before it is closed, from elsewhere to a new name and over an old
    one, exchanged, linked: it is where it was or where it goes.
    """
    files = FileScene(bench)
    for name in (b"to a new name", b"over", b"to exchange"):
        files.scene.save(name, 4000)
    files.start()
    files.save(b"temporary", 500)
    files.scene.begin(RUNS)
    files.rename(RUNS + b"/temporary", RUNS + b"/a")
    handle = files.begin(b"temporary", 6000)
    files.rename(RUNS + b"/temporary", RUNS + b"/a")
    bench.close(handle)
    for old, new, how in (
        (b"to a new name", b"/b", {}),
        (b"over", b"/a", {}),
        (b"to exchange", b"/b", {"exchange": True}),
    ):
        files.scene.begin(RUNS)
        files.rename(old, RUNS + new, **how)
    files.scene.begin(RUNS)
    store = bench.store
    files.scene.keeping(
        RUNS, lambda: store.link(bench.inode(b"other").ino, bench.inode(RUNS).ino, b"linked")
    )


def unit_of_files_of_several_writers(bench: Bench) -> None:
    """What one has closed stays when no other one is writing, or who was is killed; nothing of it
    is lost with who is killed later.
    """
    files = FileScene(bench)
    files.start()
    units = files.scene.units
    first = files.begin(b"a", 2000)
    bench.fsync(first)
    files.present = "rank 1"
    bench.close(files.go_on(b"b", 700))
    files.close(first)
    first = files.begin(b"a", 7000)
    bench.close(files.go_on(b"b", 5000))
    files.present = "trainer"
    files.kill_in(first)
    files.scene.keeping(RUNS, units.settle)
    files.present = "rank 2"
    files.save(b"c", 5000)
    files.kill_in(files.begin(b"a", 7000))
    files.scene.back(RUNS)
    bench.do("maintain", units.maintain, late=True, keeps=True)
    files.scene.save(b"unrelated", 3000)


FILE_WORKLOADS = [
    unit_of_files_killed_between_any_two, unit_of_files_renamed_over_and_in,
    unit_of_files_of_several_writers,
]  # fmt: skip
