"""Changes in place of files whose format has no half of one: all of it is made, or nothing."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.store.overwrites import TornMode
from cxlfs.store.past_rows import Death
from tests.support.shop import Shop, close, fill, open_for_overwrite, until_no_space
from tests.support.stores import read_file, write_file

OLD = b"DIR" + b"old " * 5000
NEW = b"DIR" + b"new " * 3000
MIXED = NEW + OLD[len(NEW) :]


def watched(store: Store) -> Store:
    store.overwrites.changes_as_one = lambda head: head.startswith(b"DIR")
    return store


@pytest.fixture
def store(shop: Shop, granularity: Granularity) -> Store:
    return watched(shop.new(granularity=granularity, torn=TornMode.BACK))


@pytest.fixture
def old(store: Store) -> int:
    return write_file(store, 1, b"a.h5", OLD)


def begin(store: Store, ino: int, data: bytes = NEW) -> int:
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 0, data)
    return handle


def test_a_killed_writer_leaves_what_was_there(shop: Shop, store: Store, old: int) -> None:
    handle = begin(store, old)
    assert read_file(store, old) == MIXED
    close(store, handle, killed=True)
    assert read_file(store, old) == OLD
    assert [event.kind for event in shop.events] == ["reverted"]
    assert store.get_xattr(old, b"user.cxlfs.state") == b"complete"
    store = watched(shop.reopen(store, torn=TornMode.BACK))
    assert read_file(store, old) == OLD
    states = [(entry.state, entry.kept_aside) for entry in store.list_checkpoints()]
    assert states == [("complete", False), ("incomplete", True)]
    store.overwrites.restore(store.namespace.get(old))
    assert read_file(store, old) == MIXED
    store.overwrites.restore(store.namespace.get(old))
    assert read_file(store, old) == OLD


def test_a_close_makes_it(shop: Shop, store: Store, old: int) -> None:
    handle = begin(store, old)
    store.flush(handle, writer_killed=False)
    store.write(handle, 3, b"more")
    close(store, handle, killed=True)  # another change has begun
    assert read_file(store, old) == MIXED
    store = shop.reopen(store)
    assert read_file(store, old) == MIXED


@pytest.mark.parametrize("how", ["fsync", "sync", "interval"])
def test_commit_points_end_one_change(store: Store, old: int, how: str) -> None:
    handle = begin(store, old)
    if how == "fsync":
        store.fsync(handle)
    elif how == "sync":
        store.sync()
    else:
        version = store.namespace.get(old).version
        assert version is not None
        store.commits.commit_old(older_than=version.began_monotonic)
    store.write(handle, 0, b"DIR is changed once more")
    close(store, handle, killed=True)
    assert read_file(store, old) == MIXED


@pytest.mark.parametrize("clean", [False, True])
def test_the_daemon_ends_in_the_middle(shop: Shop, store: Store, old: int, *, clean: bool) -> None:
    begin(store, old)
    store = watched(shop.reopen(store, clean=clean, torn=TornMode.BACK))
    assert read_file(store, old) == OLD


def test_history_tells_how_the_version_before_ended(store: Store, old: int) -> None:
    close(store, begin(store, old))
    (row,) = [row for row in store.past if row.ino == old]
    assert row.death is Death.CHANGED


def test_truncation_to_a_length_is_such_a_change(store: Store, old: int) -> None:
    handle = store.open_file(old, os.O_RDWR)
    store.set_attributes(old, size=100, handle=handle)
    close(store, handle, killed=True)
    assert read_file(store, old) == OLD


@pytest.mark.parametrize("torn", [TornMode.OFF, TornMode.REPORT])
def test_switched_off(shop: Shop, torn: TornMode) -> None:
    store = watched(shop.new(torn=torn))
    old = write_file(store, 1, b"a.h5", OLD)
    close(store, begin(store, old), killed=True)
    assert read_file(store, old) == MIXED


def test_other_files_and_programs_that_continue_them(store: Store, old: int) -> None:
    other = write_file(store, 1, b"log", b"l" * 5000)
    close(store, begin(store, other, b"line"), killed=True)
    assert read_file(store, other) == b"line" + b"l" * 4996
    store.overwrites.writer = lambda: "rsync"
    store.overwrites.is_exempt = lambda writer: writer == "rsync"
    close(store, begin(store, old), killed=True)
    assert read_file(store, old) == MIXED


def test_pages_of_a_mapping_stay(store: Store, old: int) -> None:
    """A program is over with them before it is killed, and no close says so."""
    handle = store.open_file(old, os.O_RDWR)
    store.files.pages_come(handle)
    store.write(handle, 0, NEW)
    close(store, handle, killed=True)
    assert read_file(store, old) == MIXED


def test_a_second_writer_goes_on(store: Store, old: int) -> None:
    first = begin(store, old)
    second = begin(store, old)
    close(store, first, killed=True)
    close(store, second)
    assert read_file(store, old) == MIXED


def test_a_writer_over_an_overwrite_belongs_to_that(store: Store, old: int) -> None:
    overwriting = open_for_overwrite(store, b"a.h5", NEW)
    close(store, begin(store, old, b"DIR again"), killed=True)
    close(store, overwriting, killed=True)
    assert read_file(store, old) == OLD


def test_on_a_full_store_nothing_is_half_made(store: Store, old: int) -> None:
    length = store.get_attributes(old).size
    handle = store.open_file(old, os.O_RDWR)
    fill(store)
    until_no_space(lambda number: store.write(handle, number * len(NEW), NEW))
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    assert store.get_attributes(old).size == length
    assert read_file(store, old) == OLD
