"""Snapshots of what the journal knows of extents, taken in slices while it goes on."""

from __future__ import annotations

import random

import pytest

from cxlfs.errors import InvariantError, NoSpaceError, OutOfMemoryError
from cxlfs.native import FaultKind, set_fault
from cxlfs.native.snapshot import ExtentSnapshot, references_of
from cxlfs.store.rollover import Rollovers
from tests.support.shop import Shop
from tests.support.stores import write_file

Known = dict[int, tuple[int, int, tuple[int, ...]]]


def known(infos: object, crcs: object) -> Known:
    sums = crcs.tolist()  # type: ignore[attr-defined]
    return {
        number: (offset, length, tuple(sums[first : first + count]))
        for number, offset, length, first, _, count in infos.tolist()  # type: ignore[attr-defined]
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_it_is_of_the_moment_at_which_it_began(
    shop: Shop, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While extents grow, vanish and come, so many that the table changes its size."""

    def no_rollover(*_args: object, **_options: object) -> None:
        raise NoSpaceError("the test makes the only snapshot")

    rng = random.Random(seed)
    store = shop.new(8 << 20)
    monkeypatch.setattr(Rollovers, "_begin", no_rollover)
    engine = store.volume.engine
    handles = {}
    for number in range(60):
        ino = write_file(store, 1, b"f%d" % number, rng.randbytes(rng.randrange(1, 9000)))
        handles[number] = store.open_file(ino, 2)
        store.write(handles[number], 0, b"x" * 100)
        store.fsync(handles[number])
    _, _, infos, crcs = engine.export_maps([])
    expected = known(infos, crcs)
    snapshot = ExtentSnapshot(engine)
    with pytest.raises(InvariantError):
        ExtentSnapshot(engine)
    more = True
    while more:
        number = rng.choice(list(handles))
        if rng.random() < 0.4:
            store.unlink(1, b"f%d" % number)
            store.release(handles.pop(number))
        else:
            store.write(handles[number], rng.randrange(9000), rng.randbytes(rng.randrange(5000)))
            store.fsync(handles[number])
        for step in range(rng.choice([0, 0, 40])):
            write_file(store, 1, b"new%d" % step, b"n")
        more = snapshot.step(rng.randrange(1, 9)) and len(handles) > 3
    while snapshot.step(1000):
        pass
    assert known(*snapshot.take()) == expected
    monkeypatch.undo()
    for handle in handles.values():
        store.release(handle)


def test_without_memory_nothing_is_given(shop: Shop) -> None:
    store = shop.new()
    for number in range(20):
        write_file(store, 1, b"f%d" % number, b"x" * 5000)
    snapshot = ExtentSnapshot(store.volume.engine)
    set_fault(FaultKind.ALLOCATE, 1)
    try:
        with pytest.raises(OutOfMemoryError):
            snapshot.step(10_000)
    finally:
        set_fault(FaultKind.ALLOCATE, 0)
    with pytest.raises(OutOfMemoryError):
        snapshot.take()
    again = ExtentSnapshot(store.volume.engine)
    again.cancel()


def test_references_of_many(shop: Shop) -> None:
    store = shop.new()
    inos = [write_file(store, 1, b"f%d" % n, b"x" * n * 100) for n in range(5)]
    maps = [store.namespace.get(ino).content for ino in inos]
    sizes, counts, refs = references_of(maps)
    assert sizes.tolist() == [0, 100, 200, 300, 400]
    assert counts.tolist() == [0, 1, 1, 1, 1]
    assert refs["length"].tolist() == [100, 200, 300, 400]
    assert len(references_of([])[2]) == 0
