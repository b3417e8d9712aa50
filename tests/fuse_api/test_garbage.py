"""The garbage collector beside many open files: counted in objects that a collection looks at."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest

from cxlfs.daemon.garbage import GarbageCollector
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.stores import make_media

MIB = 1 << 20
FILES = 20_000
EACH_TURN = 500
LOOKED_AT_MAX = 40_000
"""Some 20 ms; the files come to three times as many objects."""


@pytest.fixture
def few_objects() -> Iterator[None]:
    """What pytest and other tests keep is none of this."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def open_unlinked(store: Store, count: int) -> None:
    for _ in range(count):
        _, handle = store.create(1, b"f", 0o600, 0, 0, os.O_WRONLY)
        store.write(handle, 0, b"x")
        store.unlink(1, b"f")


@pytest.mark.usefixtures("few_objects")
def test_no_collection_looks_at_many_open_files() -> None:
    media = make_media(128 * MIB)
    Store.format(media)
    store = Store.open(media)
    looked_at: list[int] = []

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start" and details["generation"] == 2:
            looked_at.append(sum(len(gc.get_objects(generation=g)) for g in range(3)))

    gc.callbacks.append(note)
    try:
        with GarbageCollector() as garbage:
            for _ in range(FILES // EACH_TURN):
                open_unlinked(store, EACH_TURN)
                garbage.maintain()
    finally:
        gc.callbacks.remove(note)
    print(f"objects looked at: {looked_at}")
    assert gc.get_freeze_count() > LOOKED_AT_MAX, "so many there are"
    assert looked_at
    assert max(looked_at) <= LOOKED_AT_MAX
    store.close()
    assert list(run_passes(media, structure_only=False)) == []
    media.close()


@pytest.mark.usefixtures("few_objects")
def test_circles_are_still_found() -> None:
    class Circle:
        own: object = None

    found: list[weakref.ref[Circle]] = []
    before = gc.get_threshold()
    with GarbageCollector() as garbage:
        circle = Circle()
        circle.own = circle
        found.append(weakref.ref(circle))
        gc.collect(1)
        gc.collect(1)  # old by now
        del circle
        kept: list[list[int]] = []
        while found[0]() is not None and len(kept) < 100_000:
            kept.append([])
            garbage.maintain()
    assert found[0]() is None
    assert gc.get_threshold() == before
