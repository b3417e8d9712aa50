"""Checkpoint units on a full store, and where what goes back is kept."""

from __future__ import annotations

import itertools
import os

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.format.operations import XattrSetOperation
from cxlfs.store import Store
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_record import (
    BEFORE_XATTR,
    UNITS_XATTR,
    OpenRecord,
    encode_units,
)
from cxlfs.store.unit_returns import Returns
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close, create, fill
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    find,
    finish_work,
    make,
    open_count,
    save,
    saved,
    set_aside,
    shards,
    tree,
)

MIB = 1 << 20


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """With well-known names."""
    return shop.new(granularity=granularity, units=UnitsMode.AUTO)  # type: ignore[arg-type]


# --- room ---------------------------------------------------------------------------------------


def test_removing_goes_on_without_room_for_a_copy(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved(store)

    def no_room() -> None:
        raise NoSpaceError("the metadata of this store has no room to grow")

    monkeypatch.setattr(store.units.copyings, "_require_room", no_room)
    with pytest.raises(NoSpaceError):
        store.open_file(store.lookup(directory, b"shard-0").ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoSpaceError):
        store.create(directory, b"more", 0o644, 1, 1, os.O_RDWR)
    store.unlink(directory, b"shard-1")
    assert store.units.unprotected == 1
    assert "unprotected" in [event.kind for event in shop.events]


@pytest.mark.parametrize("records", range(4))
def test_a_copy_that_cannot_be_finished_leaves_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    directory = make(store, CHECKPOINT)
    small = {b"%040d" % number: b"%d" % number for number in range(60)}
    save(store, make(store, b"below", directory), small, marker=None)
    make(store, b"empty", directory)
    old = save(store, directory, small)
    old |= {b"below/" + name: data for name, data in small.items()}
    inodes = len(store.namespace.inodes)
    commit, budget = store.volume.commit, [records]

    def failing(*args: object, **options: object) -> tuple[int, int]:
        budget[0] -= 1
        if budget[0] < 0:
            raise NoSpaceError("no room for a record")
        return commit(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store.volume, "commit", failing)
        with pytest.raises(NoSpaceError):
            store.create(directory, b"more", 0o644, 1, 1, os.O_RDWR)
    assert open_count(store) == 0
    finish_work(store)
    assert set_aside(store) == {}
    assert tree(store, CHECKPOINT) == old
    assert len(store.namespace.inodes) == inodes + (store.namespace.find(1, ASIDE_NAME) is not None)


def test_a_crash_while_the_copy_is_made(shop: Shop, store: Store) -> None:
    """What is there of it goes away; the unit was never open."""
    directory, old = saved(store)
    store.units.copyings.make(store.namespace.get(directory))
    assert len(set_aside(store)) == 1
    store = shop.reopen(store)
    finish_work(store)
    assert set_aside(store) == {}
    assert tree(store, CHECKPOINT) == old


def test_sets_aside_make_room(shop: Shop) -> None:
    store = shop.new(units=UnitsMode.AUTO)
    save(store, make(store, CHECKPOINT), {b"big": b"b" * 1_000_000}, marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert len(set_aside(store)) == 1
    with_it = fill(store)
    assert set_aside(store) == {}
    assert with_it > 1_500_000


@pytest.mark.parametrize("count", [1_000, 10_000])
def test_no_step_removes_more_of_a_set_the_more_files_it_has(shop: Shop, count: int) -> None:
    """Giving up what was set aside, for a write that finds no room otherwise."""
    store = shop.new(64 * MIB, units=UnitsMode.AUTO)
    save(store, make(store, CHECKPOINT), {b"%d" % n: b"x" for n in range(count)}, marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    copies, left = store.units.copies, [len(store.namespace.inodes)]
    assert copies.drop_oldest_set()
    left.append(len(store.namespace.inodes))
    while copies.remove_some():
        left.append(len(store.namespace.inodes))
    assert left[0] - left[-1] > count
    assert max(a - b for a, b in itertools.pairwise(left)) <= 257
    assert not copies.drop_oldest_set()


def test_allocating_takes_as_much_of_a_set_as_it_needs(shop: Shop) -> None:
    """A step of giving it up frees no segment; the room is found behind many of them."""
    store = shop.new(units=UnitsMode.AUTO)
    little = {b"%d" % number: b"l" * 300 for number in range(1500)}
    save(store, make(store, CHECKPOINT), little, marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert len(set_aside(store)) == 1
    _, handle = create(store, b"large")
    store.allocate(handle, 0, store.statfs().available_bytes + 200_000)
    (left,) = set_aside(store).values()
    assert len(left) < 1500 - 2 * 256, "one step was enough: this shows nothing"
    close(store, handle)
    finish_work(store)
    assert set_aside(store) == {}


def test_allocating_waits_for_a_dropped_copy_of_many_files(shop: Shop) -> None:
    """A step of taking it apart frees no segment; the room is found behind many of them."""
    store = shop.new_ordinary(128 * MIB)
    directory = make(store, b"many")
    for number in range(1500):
        write_file(store, directory, b"%d" % number, b"little")
    copy = store.units.copyings.make(store.namespace.get(directory))
    for number in range(80):
        write_file(store, 1, b"%d" % number, bytes(MIB))
    for number in range(0, 80, 2):
        store.unlink(1, b"%d" % number)
    _, handle = create(store, b"large")
    size = store.statfs().available_bytes * 9 // 10
    assert store.volume.space.available_bytes < size
    store.units.copies.drop(copy)
    store.allocate(handle, 0, size)
    assert not store.units.copies.is_removing
    close(store, handle)


@pytest.mark.parametrize(
    "which",
    ["nothing", "root", "file", "place", "in the place", "itself", "above", "file before", "twice"],
)
def test_records_that_make_no_sense(shop: Shop, store: Store, which: str) -> None:
    """What no store of ours has written: nothing is moved, or only what may be."""
    runs = make(store, b"runs")
    inner = make(store, b"inner", runs)
    file = write_file(store, inner, b"file", b"content")
    copy = store.units.copyings.make(store.namespace.get(inner)).ino
    place = find(store, ASIDE_NAME).ino
    records = {
        "nothing": [OpenRecord(1 << 40, 0, 1)],
        "root": [OpenRecord(1, 0, 1), OpenRecord(1, copy, 1)],
        "file": [OpenRecord(file, 0, 1)],
        "place": [OpenRecord(place, 0, 1), OpenRecord(place, copy, 1)],
        "in the place": [OpenRecord(copy, copy, 1)],
        "itself": [OpenRecord(inner, inner, 1)],
        "above": [OpenRecord(inner, runs, 1)],
        "file before": [OpenRecord(inner, file, 1)],
        "twice": [OpenRecord(inner, copy, 1), OpenRecord(runs, copy, 1)],
    }[which]
    value = encode_units(records)
    store.volume.commit([XattrSetOperation(1, UNITS_XATTR, value)])
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"inner/file": b"content"}
    assert store.units.recover() == []
    finish_work(store)
    assert all(b"before" not in name for name in set_aside(store))


def test_no_room_to_go_back_stops_writing(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever went on would work on what is to be taken back."""
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)

    def no_room(*_: object) -> None:
        raise NoSpaceError("no room for a record")

    with monkeypatch.context() as patch:
        patch.setattr(Returns, "take_back", no_room)
        store = shop.reopen(store)
    assert store.read_only
    assert "unfinished checkpoint" in (store.read_only_reason or "")
    assert tree(store, CHECKPOINT) == files
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None


def test_the_place_is_entered_and_not_listed(store: Store) -> None:
    directory, _ = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    handle = store.open_directory(1)
    assert [entry.name for entry in store.read_directory(handle, 0)] == [CHECKPOINT]
    store.release_directory(handle)
    place = store.lookup(1, b".cxlfs-units")
    assert place.mode & 0o777 == 0o700
    handle = store.open_directory(place.ino)
    names = [entry.name for entry in store.read_directory(handle, 0)]
    store.release_directory(handle)
    assert names == [b"checkpoint-5.before-%d" % directory]
    assert BEFORE_XATTR in (find(store, b".cxlfs-units/" + names[0]).xattrs or {})
    write_file(store, directory, MARKER, b"{}")


def test_restoring_is_a_rename(shop: Shop, store: Store) -> None:
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    place = store.lookup(1, b".cxlfs-units").ino
    (name,) = set_aside(store)
    store.rename(place, name, 1, CHECKPOINT)
    assert tree(store, CHECKPOINT) == files
    assert open_count(store) == 0
