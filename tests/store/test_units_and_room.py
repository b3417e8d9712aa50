"""Checkpoint units on a full store, and records of units that make no sense."""

from __future__ import annotations

import itertools
import os

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.format.operations import XattrSetOperation
from cxlfs.store import Store
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_record import OpenRecord, encode_unit, unit_xattr
from cxlfs.store.unit_returns import Returns
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close, create, fill
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    find,
    finish_work,
    kept_count,
    make,
    open_count,
    save,
    saved,
    shards,
    tree,
)

MIB = 1 << 20


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """With well-known names."""
    return shop.new(granularity=granularity, units=UnitsMode.AUTO)  # type: ignore[arg-type]


# --- room ---------------------------------------------------------------------------------------


def test_removing_goes_on_without_room_to_keep(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, _ = saved(store)

    def no_room() -> None:
        raise NoSpaceError("the metadata of this store has no room to grow")

    handle = store.open_file(store.lookup(directory, b"shard-0").ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"new")
    monkeypatch.setattr(store.units.kept, "_require_room", no_room)
    with pytest.raises(NoSpaceError):
        store.fsync(handle)
    store.unlink(directory, b"shard-1")
    assert store.units.unprotected == 1
    assert "unprotected" in [event.kind for event in shop.events]
    close(store, handle)


@pytest.mark.parametrize("records", range(5))
def test_a_change_that_cannot_be_stored_leaves_nothing(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch, records: int
) -> None:
    """The unit opens, its directories are made, the change is stored: each may fail."""
    directory, old = saved(store)
    commit, budget = store.volume.commit, [records]

    def failing(*args: object, **options: object) -> tuple[int, int]:
        budget[0] -= 1
        if budget[0] < 0:
            raise NoSpaceError("no room for a record")
        return commit(*args, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(store.volume, "commit", failing)
        if records < 4:
            with pytest.raises(NoSpaceError):
                write_file(store, directory, b"shard-0", b"new")
        else:
            write_file(store, directory, b"shard-0", b"new")
    for handle in list(store.files._handles):
        store.release(handle)
    store.units.settle(closing=True)
    finish_work(store)
    assert kept_count(store) == 0
    assert open_count(store) == 0
    assert tree(store, CHECKPOINT) == old
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_what_went_back_makes_room(shop: Shop) -> None:
    store = shop.new(units=UnitsMode.AUTO)
    save(store, make(store, CHECKPOINT), {b"big": b"b" * 1_000_000}, marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) is None
    assert fill(store) > 1_500_000


@pytest.mark.parametrize("count", [1_000, 5_000])
def test_no_step_removes_more_the_more_files_there_were(shop: Shop, count: int) -> None:
    store = shop.new(64 * MIB, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"%d" % n: b"x" for n in range(count)})
    for number in range(count):
        store.unlink(directory, b"%d" % number)
    garbage, left = store.units.garbage, [len(store.namespace.inodes)]
    save(store, directory, {b"new": b"n"})
    assert open_count(store) == 0
    while garbage.remove_some():
        left.append(len(store.namespace.inodes))
    assert left[0] - left[-1] >= count
    assert max(a - b for a, b in itertools.pairwise(left)) <= 257


def test_allocating_waits_for_what_is_being_removed(shop: Shop) -> None:
    """A step of taking it apart frees no segment; the room is found behind many of them."""
    store = shop.new(units=UnitsMode.AUTO, history=False)
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"%d" % number: b"l" * 300 for number in range(1500)})
    for number in range(1500):
        store.unlink(directory, b"%d" % number)
    save(store, directory, {b"new": b"n"})
    assert store.units.garbage.is_removing
    _, handle = create(store, b"large")
    store.allocate(handle, 0, store.statfs().available_bytes + 200_000)
    close(store, handle)
    finish_work(store)
    assert kept_count(store) == 0


# --- hostile media ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which", ["nothing", "root", "file", "place", "kept elsewhere", "kept is a file", "twice"]
)
def test_records_that_make_no_sense(shop: Shop, store: Store, which: str) -> None:
    """What no store of ours has written: nothing is moved that was there."""
    runs = make(store, b"runs")
    inner = make(store, b"inner", runs)
    file = write_file(store, inner, b"file", b"content")
    directory, _ = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    place = find(store, ASIDE_NAME).ino
    first = store.namespace.next_ino
    records = {
        "nothing": [OpenRecord(1 << 40, 0, 1, first_ino=first)],
        "root": [OpenRecord(1, 0, 1, first_ino=2), OpenRecord(1, place, 1, first_ino=2)],
        "file": [OpenRecord(file, 0, 1, first_ino=first)],
        "place": [OpenRecord(place, 0, 1, first_ino=2)],
        "kept elsewhere": [OpenRecord(inner, runs, 1, first_ino=first)],
        "kept is a file": [OpenRecord(inner, file, 1, first_ino=first)],
        "twice": [
            OpenRecord(inner, place, 1, first_ino=first),
            OpenRecord(runs, place, 1, first_ino=first),
        ],
    }[which]
    for record in records:
        op = XattrSetOperation(1, unit_xattr(record.ino), encode_unit(record))
        store.volume.commit([op])
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"inner/file": b"content"}
    assert store.units.recover() == []
    finish_work(store)
    assert kept_count(store) == 0


@pytest.mark.parametrize(
    "value",
    [b"", b"[", b"[1,2]", b"[0,0,0,0,0,0,0]", b"[0,1,-2,5,[],[],[]]", b'["a",1,0,5,[],[],[]]',
     b"[0,1,0,1,[],[],[]]", b"[0,1,0,5,[],[],[],[]]", b"9" * 9000],
)  # fmt: skip
def test_values_that_make_no_sense(shop: Shop, store: Store, value: bytes) -> None:
    directory, old = saved(store)
    store.volume.commit([XattrSetOperation(1, unit_xattr(directory), value)])
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_no_room_to_go_back_stops_writing(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever went on would work on what is to be taken back."""
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)

    def no_room(*_: object) -> None:
        raise NoSpaceError("no room for a record")

    with monkeypatch.context() as patch:
        patch.setattr(Returns, "back", no_room)
        store = shop.reopen(store)
    assert store.read_only
    assert "unfinished checkpoint" in (store.read_only_reason or "")
    assert tree(store, CHECKPOINT) == files
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
