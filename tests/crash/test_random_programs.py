"""Random programs of several verbs and several open files, the power cut at every fence.

``CXLFS_CRASH_PROGRAMS=N`` runs N programs; a failing one prints its number and verbs.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable

import pytest

from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.store import Store
from tests.support.power_cut import MEDIA_BYTES, PowerCutError, Tape, cut_everywhere, format_tiny
from tests.support.stores import write_file
from tests.support.workloads import prepare

PROGRAMS = int(os.environ.get("CXLFS_CRASH_PROGRAMS", "5"))
VERBS = 7
NAMES = [b"old", b"other", b"new", b"third"]
SIZES = [1, 8, 63, 64, 100, 4096, 9000, 25_000]


class Program:
    """Draws verbs that are possible now and records them."""

    def __init__(self, store: Store, tape: Tape, rng: random.Random) -> None:
        self.store = store
        self.tape = tape
        self.rng = rng
        self.handles: list[int] = []
        self.made = 0

    def step(self) -> None:
        """One verb."""
        choices: list[Callable[[], None]] = [self.create, self.open, self.names, self.attributes]
        if self.handles:
            choices += [self.write, self.write, self.close, self.close, self.fsync, self.truncate]
            choices += [self.copy, self.copy, self.allocate]
        choices.append(self.background)
        self.rng.choice(choices)()

    def some_file(self) -> int | None:
        entries = self.store.namespace.get(1).entries or {}
        files = [i for i in entries.values() if self.store.namespace.get(i).live is not None]
        return self.rng.choice(files) if files else None

    def data(self) -> bytes:
        return self.rng.randbytes(self.rng.choice(SIZES))

    def create(self) -> None:
        self.made += 1
        name = b"made%d" % self.made
        self.tape.verb("create", lambda: self._create(name), late=True)

    def _create(self, name: bytes) -> None:
        self.handles.append(self.store.create(1, name, 0o644, 1, 1, os.O_RDWR)[1])

    def open(self) -> None:
        ino = self.some_file()
        if ino is not None:
            cut = os.O_TRUNC if self.rng.random() < 0.6 else 0
            open_file = self.store.open_file
            self.tape.verb(
                f"open {cut}",
                lambda: self.handles.append(open_file(ino, os.O_RDWR | cut)),
                late=True,
            )

    def write(self) -> None:
        handle, data = self.rng.choice(self.handles), self.data()
        offset = self.rng.choice([0, 0, 7, 4090, 30_000])
        self.tape.verb("write", lambda: self.store.write(handle, offset, data), late=True)

    def truncate(self) -> None:
        handle, size = self.rng.choice(self.handles), self.rng.choice([0, 5, 5000])
        ino = self.store.files.get(handle).inode.ino
        self.tape.verb(
            "ftruncate",
            lambda: self.store.set_attributes(ino, size=size, handle=handle),
            late=True,
        )

    def copy(self) -> None:
        """Of any file that is open or is opened for it, to a place behind what is there."""
        store, ino = self.store, self.some_file()
        target = self.rng.choice(self.handles)
        if ino is None:
            return
        place = store.files.get(target).inode.content.size + self.rng.choice([0, 1, 4096])
        start, length = self.rng.choice([0, 1, 4096]), self.rng.choice([100, 4096, 1 << 40])

        def copy() -> None:
            source = store.open_file(ino, os.O_RDONLY)
            store.copy_range(source, start, target, place, length)
            store.release(source)

        self.tape.verb("copy", copy, late=True)

    def allocate(self) -> None:
        store, handle = self.store, self.rng.choice(self.handles)
        start, length = self.rng.choice([0, 1, 4096]), self.rng.choice([100, 4096, 20_000])
        kind = self.rng.choice([{}, {"zero": True}, {"keep_size": True, "punch": True}])
        self.tape.verb(
            f"allocate {kind}", lambda: store.allocate(handle, start, length, **kind), late=True
        )

    def fsync(self) -> None:
        handle = self.rng.choice(self.handles)
        linked = self.store.files.get(handle).inode.links > 0
        self.tape.verb("fsync", lambda: self.store.fsync(handle), commits=linked, late=not linked)

    def close(self) -> None:
        handle = self.handles.pop(self.rng.randrange(len(self.handles)))
        killed = self.rng.random() < 0.3
        commits = not killed and self.store.files.get(handle).inode.links > 0
        self.tape.verb(
            f"flush {killed}",
            lambda: self.store.flush(handle, writer_killed=killed),
            commits=commits,
            late=not commits,
        )
        self.tape.verb("release", lambda: self.store.release(handle), late=True)

    def names(self) -> None:
        entries = self.store.namespace.get(1).entries or {}
        name, new = self.rng.choice(list(entries)), self.rng.choice(NAMES)
        inode = self.store.namespace.get(entries[name])
        target = self.store.namespace.find(1, new)
        verb = self.rng.choice(["rename", "rename", "exchange", "link", "unlink", "mkdir"])
        store = self.store
        if verb == "unlink" and inode.entries is None:
            late = inode.uncommitted
            self.tape.verb("unlink", lambda: store.unlink(1, name), late=late)
        elif verb == "mkdir":
            self.made += 1
            made = b"d%d" % self.made
            self.tape.verb("mkdir", lambda: store.make_directory(1, made, 0o755, 0, 0))
        elif verb == "link" and inode.entries is None and target is None:
            self.tape.verb("link", lambda: store.link(inode.ino, 1, new), commits=True)
        elif verb == "exchange" and target is not None and target is not inode:
            self.tape.verb(
                "exchange", lambda: store.rename(1, name, 1, new, exchange=True), commits=True
            )
        elif verb == "rename" and (target is None or target.live is not None is inode.entries):
            commits = target is not inode
            self.tape.verb(
                "rename", lambda: store.rename(1, name, 1, new), commits=commits, late=not commits
            )

    def attributes(self) -> None:
        ino = self.some_file()
        if ino is None:
            return
        late = self.store.namespace.get(ino).uncommitted
        mode, value = self.rng.randrange(0o1000), self.data()[:500]
        if self.rng.random() < 0.5:
            self.tape.verb("chmod", lambda: self.store.set_attributes(ino, mode=mode), late=late)
        else:
            self.tape.verb(
                "setxattr", lambda: self.store.set_xattr(ino, b"user.k", value), late=late
            )

    def background(self) -> None:
        verbs: dict[str, Callable[[], object]] = {
            "rollover": self.store.volume.rollover,
            "clean": lambda: self.store.cleaner._clean_round(0.97),
            "drop": self.store.versions.drop_oldest_aside,
        }
        name = self.rng.choice(["commit", *verbs])
        if name != "commit":
            self.tape.verb(name, verbs[name], late=True)
            return
        for inode in list(self.store.versions.open_versions.values()):
            # One by one: each file has a record of its own, between which the power may fail.
            commit = functools.partial(self.store.files.commit_open, inode)
            self.tape.verb("commit", commit, late=True)


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
@pytest.mark.parametrize("number", range(PROGRAMS))
def test_random_program(granularity: Granularity, number: int, rng: random.Random) -> None:
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    format_tiny(media)
    store = Store.open(media)
    prepare(store)
    for piece in range(8):
        write_file(store, 1, b"p%d" % piece, bytes([piece]) * 9000)
    for piece in range(0, 8, 2):
        store.unlink(1, b"p%d" % piece)
    store.fsync_directory(1)
    tape = Tape(media)
    tape.start()
    program = Program(store, tape, rng)
    while len(tape.names) < VERBS:
        program.step()
    store.abandon()
    try:
        counts = cut_everywhere(tape, rng, f"program {number}", work_every=10)
    except PowerCutError:
        print(tape.names)
        raise
    media.close()
    print(f"{counts.points} points, {counts.images} images: {tape.names}")
    assert counts.images >= counts.points
