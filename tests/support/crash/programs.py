"""Random programs of several verbs over few files, with several descriptors on one of them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from cxlfs.errors import NoSpaceError
from tests.support.crash import operations
from tests.support.crash.bench import Bench

VERBS = 7
NAMES = [b"old", b"other", b"new", b"third", b"dir/below"]
SIZES = [1, 8, 63, 64, 100, 4096, 9000, 25_000]
OFFSETS = [0, 0, 7, 4090, 30_000]


class Program:
    """Draws verbs that may be possible now; what is not is refused."""

    def __init__(self, bench: Bench, rng: random.Random) -> None:
        self.bench = bench
        self.rng = rng
        self.handles: list[int] = []

    def run(self, verbs: int = VERBS) -> None:
        while len(self.bench.tape.names) < verbs:
            choices = [self.create, self.open, self.open, self.names, self.names, self.attributes]
            if self.handles:
                choices += [self.write] * 4 + [self.close, self.close, self.fsync, self.truncate]
            self.rng.choice([*choices, self.background])()

    def _name(self) -> bytes:
        return self.rng.choice(NAMES)

    def _keep(self, handle: int | None) -> None:
        if handle is not None:
            self.handles.append(handle)

    def create(self) -> None:
        self._keep(self.bench.create(self._name()))

    def open(self) -> None:
        cut = os.O_TRUNC if self.rng.random() < 0.6 else 0
        self._keep(self.bench.open(self._name(), os.O_RDWR | cut))

    def write(self) -> None:
        handle = self.rng.choice(self.handles)
        self.bench.write(handle, self.rng.choice(OFFSETS), self.rng.choice(SIZES))

    def truncate(self) -> None:
        self.bench.ftruncate(self.rng.choice(self.handles), self.rng.choice([0, 5, 5000]))

    def fsync(self) -> None:
        handle = self.rng.choice(self.handles)
        if self._can_commit(handle):
            self.bench.fsync(handle)

    def close(self) -> None:
        handle = self.handles.pop(self.rng.randrange(len(self.handles)))
        killed = self.rng.random() < 0.3 or not self._can_commit(handle)
        self.bench.close(handle, killed=killed)

    def _can_commit(self, handle: int) -> bool:
        """False: a write failed, and close would say so."""
        store = self.bench.store
        error = store.versions.error_of(store.files.get(handle).inode)
        assert error is None or isinstance(error, NoSpaceError)
        return error is None

    def names(self) -> None:
        bench, old, new = self.bench, self._name(), self._name()
        verbs: list[Callable[[], None]] = [
            lambda: bench.rename(old, new),
            lambda: bench.rename(old, new),
            lambda: bench.rename(old, new, exchange=True),
            lambda: bench.link(old, new),
            lambda: bench.unlink(old),
            lambda: operations.rename_directory(bench),
            lambda: operations.make_directory(bench),
        ]
        self.rng.choice(verbs)()

    def attributes(self) -> None:
        name = self._name()
        if self.rng.random() < 0.5:
            self.bench.attributes(name, mode=self.rng.randrange(0o1000))
        else:
            self.bench.xattr(name, b"user.k", self.bench.fresh(self.rng.choice(SIZES[:5])))

    def background(self) -> None:
        self.rng.choice(
            [
                operations.rollover,
                operations.clean,
                operations.commit_periodically,
                operations.drop_aside,
                operations.sync_directory,
            ]
        )(self.bench)
