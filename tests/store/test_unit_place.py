"""Where the store keeps what units may want back: no user comes there."""

from __future__ import annotations

import os
import stat

import pytest

from cxlfs.errors import NotFoundError, NotPermittedError
from cxlfs.format.operations import LinkOperation, UnlinkOperation
from cxlfs.store import Store
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    find,
    finish_work,
    kept_count,
    make,
    save,
    saved,
    shards,
    tree,
)
from tests.support.unit_steps import end_all


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


def test_the_name_is_the_stores(store: Store) -> None:
    """Nobody makes something of that name, whether the store has or not."""
    directory, old = saved(store)
    for number in range(2):
        mine = write_file(store, 1, b"mine", b"mine")
        for attempt in (
            lambda: store.rename(1, b"mine", 1, ASIDE_NAME),
            lambda: store.make_directory(1, ASIDE_NAME, 0o755, 7, 7),
            lambda: store.create(1, ASIDE_NAME, 0o755, 7, 7, os.O_RDWR),
            lambda ino=mine: store.link(ino, 1, ASIDE_NAME),
            lambda: store.make_symlink(1, ASIDE_NAME, b"mine", 7, 7),
            lambda: store.rename(1, b"mine", 1, ASIDE_NAME, no_replace=True),
        ):
            with pytest.raises(NotPermittedError if number == 0 else Exception):
                attempt()  # type: ignore[no-untyped-call]
        write_file(store, directory, b"shard-0", b"new")
    assert not store.read_only
    assert tree(store, CHECKPOINT) == {**old, b"shard-0": b"new"}
    end_all(store)


def test_it_is_private_and_not_listed(store: Store) -> None:
    directory, _ = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    handle = store.open_directory(1)
    assert [entry.name for entry in store.read_directory(handle, 0)] == [CHECKPOINT]
    store.release_directory(handle)
    place = find(store, ASIDE_NAME)
    assert stat.S_IMODE(place.mode) == 0o700
    assert kept_count(store) == 1
    write_file(store, directory, MARKER, b"{}")
    finish_work(store)
    assert kept_count(store) == 0


@pytest.mark.parametrize("what", ["directory", "file"])
def test_what_somebody_else_made_gets_another_name(shop: Shop, store: Store, what: str) -> None:
    """As a program that does not know the name allows it."""
    if what == "directory":
        mine = store.make_directory(1, b"mine", 0o755, 1000, 1000).ino
        write_file(store, mine, b"own", b"own")
    else:
        mine = write_file(store, 1, b"mine", b"own")
    ops = [UnlinkOperation(1, b"mine"), LinkOperation(1, mine, ASIDE_NAME)]
    store.volume.commit(ops)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    directory, old = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old
    found = find(store, ASIDE_NAME + b".user" + (b"/own" if what == "directory" else b""))
    assert read_file(store, found.ino) == b"own"


# --- what is open of it ---------------------------------------------------------------------------


def test_who_has_a_removed_file_open_goes_on(shop: Shop, store: Store) -> None:
    """And what comes back is what was there before."""
    directory, old = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    handle = store.open_file(store.lookup(directory, b"shard-1").ino, os.O_RDWR)
    store.pin(store.files.get(handle).inode.ino)
    store.unlink(directory, b"shard-1")
    store.write(handle, 0, b"more")
    store.fsync(handle)
    ino = store.files.get(handle).inode.ino
    store.set_attributes(ino, mode=0o640)
    with pytest.raises(NotFoundError):
        store.link(ino, 1, b"again")
    close(store, handle)
    store.unpin(ino)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_a_removed_directory_takes_no_names(shop: Shop, store: Store) -> None:
    directory, _ = saved(store)
    below = make(store, b"below", directory)
    save(store, directory, shards(2))
    old = tree(store, CHECKPOINT)
    write_file(store, directory, b"shard-0", b"new")
    store.pin(below)
    store.remove_directory(directory, b"below")
    with pytest.raises(NotFoundError):
        store.create(below, b"late", 0o644, 1, 1, os.O_RDWR)
    with pytest.raises(NotFoundError):
        store.rename(directory, b"shard-1", below, b"late")
    store.unpin(below)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old
    assert find(store, CHECKPOINT + b"/below").ino == below


def test_a_file_with_a_name_outside_can_be_written(shop: Shop, store: Store) -> None:
    """A unit that goes back takes one of its names away."""
    ino = write_file(store, 1, b"best", b"best")
    directory = make(store, CHECKPOINT)
    save(store, directory, shards(1), marker=None)
    store.link(ino, directory, b"best")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
    write_file(store, 1, b"best", b"better")
    store.set_attributes(ino, mode=0o600)
    assert read_file(store, find(store, b"best").ino) == b"better"


def test_closing_behind_the_way_back(store: Store) -> None:
    """A file that is open when its unit goes back can be written on, and closed."""
    directory, old = saved(store)
    handle = store.open_file(store.lookup(directory, b"shard-2").ino, os.O_RDWR)
    store.write(handle, 0, b"late")
    store.units.settle(closing=True)
    assert tree(store, CHECKPOINT) == old
    store.write(handle, 0, b"L")
    close(store, handle)
    assert not store.read_only
    end_all(store)
