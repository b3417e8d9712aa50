"""Checkpoint units in which each file is a checkpoint of its own (``--done '*'``): what is closed
is done, what is being written goes back.
"""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import EACH_FILE, Ending
from tests.support.shop import Shop, close
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    Tree,
    Writers,
    find,
    make,
    open_count,
    open_writing,
    set_aside,
    tree,
)

OLD = {b"model.h5": b"old" * 5000}


@pytest.fixture
def store(shop: Shop) -> Store:
    """With one file in ``runs``, where each is a checkpoint."""
    store = shop.new()
    directory = make(store, b"runs")
    for name, data in OLD.items():
        write_file(store, directory, name, data)
    rules = (policy_rule((b".",), (EACH_FILE,), None),)
    store.units.set_policy(store.namespace.get(directory), rules)
    return store


def runs(store: Store) -> int:
    return find(store, b"runs").ino


def begin_in_place(store: Store, data: bytes) -> int:
    """As HDF5 with "a"."""
    handle = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDWR)
    store.write(handle, 0, data)
    return handle


def in_place(data: bytes) -> Tree:
    return {b"model.h5": data + OLD[b"model.h5"][len(data) :]}


def test_what_is_closed_is_done(shop: Shop, store: Store) -> None:
    """At once: neither a crash nor a kill takes it back."""
    writers = Writers(store)
    close(store, begin_in_place(store, b"new"))
    assert open_count(store) == 0
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"new")
    assert set_aside(store) == {}


@pytest.mark.parametrize("with_fsync", [False, True])
def test_what_a_killed_writer_changed_in_place_goes_back(store: Store, with_fsync: bool) -> None:
    """Its last FLUSH publishes what it wrote: that is not done."""
    writers = Writers(store)
    handle = begin_in_place(store, b"half of an update")
    if with_fsync:
        store.fsync(handle)
    store.units.killed("trainer")
    close(store, handle, killed=True)
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD


def test_what_was_changed_in_place_goes_back_after_a_crash(shop: Shop, store: Store) -> None:
    handle = begin_in_place(store, b"half of an update")
    store.fsync(handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_a_new_file_that_is_being_written_is_gone(store: Store) -> None:
    """By number, and the newest wins: as XGBoost's."""
    writers = Writers(store)
    handle = open_writing(store, runs(store), b"model_7.ubj", b"half")
    close(store, handle, killed=True)
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD


def test_one_is_done_when_no_other_is_being_written(shop: Shop, store: Store) -> None:
    Writers(store)
    handle = begin_in_place(store, b"half")
    write_file(store, runs(store), b"other", b"whole")
    assert open_count(store) == 1
    close(store, handle)
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"half") | {b"other": b"whole"}


def test_what_is_renamed_into_place_is_done(shop: Shop, store: Store) -> None:
    """Before it is closed, as safetensors does it."""
    Writers(store)
    handle = open_writing(store, runs(store), b"temporary", b"new")
    store.rename(runs(store), b"temporary", runs(store), b"model.h5")
    assert open_count(store) == 0
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"new"}


def test_whoever_reads_ends_nothing(store: Store) -> None:
    Writers(store)
    writing = begin_in_place(store, b"half")
    store.fsync(writing)
    reading = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDONLY)
    store.flush(reading, writer_killed=False)
    store.release(reading)
    assert open_count(store) == 1
    close(store, writing)
    assert open_count(store) == 0


def test_removing_an_old_one_comes_back_with_the_rest(store: Store) -> None:
    """Rotation behind a save: the next save makes it final, a kill before that undoes it."""
    writers = Writers(store)
    write_file(store, runs(store), b"model_2", b"two")
    store.unlink(runs(store), b"model.h5")
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD | {b"model_2": b"two"}


def test_no_marker_is_missing(store: Store) -> None:
    directory = store.namespace.get(runs(store))
    assert store.units.problem_of(directory) is None
