"""A unit whose copy is made in steps, and who asks for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.store import Store, UnfinishedError
from tests.support.shop import close
from tests.support.stores import write_file
from tests.support.unit_scenes import finish_work, make, open_count

SHARD = b"__0_0.distcp"
AT_ONCE = 2
"""Files that one step copies in these tests."""
Between = Callable[[int], object]


def in_steps(store: Store) -> Store:
    store.names.in_steps = True
    return store


def finish(verb: Callable[[], object], between: Between = lambda _: None) -> int:
    """Ask for a verb until it is done, as requests of the kernel do; how many steps came first."""
    step = 0
    while True:
        try:
            verb()
        except UnfinishedError:
            step += 1
            between(step)
        else:
            return step


def end_all(store: Store) -> None:
    """What is open is done, or back, and what that leaves is gone."""
    store.settle_all()
    store.units.settle(closing=True)
    finish_work(store)


def whole(store: Store) -> int:
    """A directory of all sorts, which its shards show to be a unit; only those begin one."""
    directory = make(store, b"dcp")
    below = make(store, b"below", directory)
    for number in range(4):
        write_file(store, below, b"deep-%d" % number, b"d%d" % number * 700)
    for number in range(5):
        write_file(store, directory, b"file-%d" % number, b"f%d" % number * 900)
    store.link(store.lookup(below, b"deep-1").ino, directory, b"same")
    store.make_symlink(directory, b"best", b"below/deep-0", 1, 2)
    store.make_node(directory, b"pipe", 0o010600, 0, 1, 2)
    store.set_xattr(store.lookup(directory, b"file-2").ino, b"user.step", b"5")
    make(store, b"empty", directory)
    finish(lambda: write_file(store, directory, SHARD, b"old shard"))
    finish(lambda: write_file(store, directory, b".metadata", b"all of it"))
    assert open_count(store) == 0
    finish_work(store)
    return directory


def overwrite(store: Store, directory: int, name: bytes = SHARD) -> Callable[[], None]:
    """A change that a unit begins with."""

    def verb() -> None:
        ino = store.lookup(directory, name).ino
        if store.versions.prepare_change(ino, emptied=True):
            raise UnfinishedError
        close(store, store.open_file(ino, os.O_WRONLY | os.O_TRUNC))

    return verb
