"""A unit that keeps a content in steps, and who asks for the next one."""

from __future__ import annotations

import os
from collections.abc import Callable

from cxlfs.store import Store, UnfinishedError
from tests.support.shop import close
from tests.support.unit_scenes import finish_work

SHARD = b"__0_0.distcp"
Between = Callable[[int], object]


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


def overwrite(store: Store, directory: int, name: bytes = SHARD) -> Callable[[], None]:
    """A change that a unit begins with."""

    def verb() -> None:
        ino = store.lookup(directory, name).ino
        if store.versions.prepare_change(ino, emptied=True):
            raise UnfinishedError
        close(store, store.open_file(ino, os.O_WRONLY | os.O_TRUNC))

    return verb
