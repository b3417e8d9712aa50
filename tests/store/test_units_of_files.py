"""Checkpoint units in which each file is a checkpoint of its own (``--done '*'``): what is closed
is done, what is being written goes back.
"""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import EACH_FILE, QUIET_UNMARKED_SECONDS, Ending
from tests.support.shop import Shop, close, fill
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    Tree,
    Writers,
    find,
    finish_work,
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


def test_no_crash_takes_back_what_was_closed(shop: Shop, store: Store) -> None:
    Writers(store)
    close(store, begin_in_place(store, b"new"))
    store = shop.reopen(store)
    finish_work(store)
    assert tree(store, b"runs") == in_place(b"new")
    assert set_aside(store) == {}


@pytest.mark.parametrize(
    ("ending", "there"),
    [
        (Ending.KILLED, True),
        (Ending.WELL, True),
        (Ending.UNKNOWN, True),
        (Ending.BADLY, False),
        (Ending.INTERRUPTED, False),
    ],
)
def test_how_who_has_closed_it_ends(store: Store, ending: Ending, there: bool) -> None:
    """An exception in mid-save closes the file, and ends the program; a kill does not close it."""
    writers = Writers(store)
    close(store, begin_in_place(store, b"new"))
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"new")
    writers.endings["trainer"] = ending
    store.units.maintain()
    assert open_count(store) == 0
    assert tree(store, b"runs") == (in_place(b"new") if there else OLD)


def test_it_is_done_when_its_writer_lives_on(store: Store) -> None:
    writers = Writers(store)
    close(store, begin_in_place(store, b"new"))
    writers.now += QUIET_UNMARKED_SECONDS - 0.1
    store.units.maintain()
    assert open_count(store) == 1
    writers.now += 0.2
    store.units.maintain()
    assert open_count(store) == 0
    writers.endings["trainer"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"new")


def test_an_error_in_the_next_save_takes_back_that_alone(store: Store) -> None:
    writers = Writers(store)
    close(store, begin_in_place(store, b"first"))
    close(store, begin_in_place(store, b"other"))
    writers.endings["trainer"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"runs") == in_place(b"first")


def test_what_could_come_back_gives_its_room(shop: Shop) -> None:
    """To the next write that finds no other."""
    store = shop.new()
    directory = make(store, b"runs")
    write_file(store, directory, b"model", b"o" * 1_000_000)
    rules = (policy_rule((b".",), (EACH_FILE,), None),)
    store.units.set_policy(store.namespace.get(directory), rules)
    Writers(store)
    write_file(store, directory, b"model", b"n" * 1_000_000)
    assert open_count(store) == 1
    fill(store)
    assert open_count(store) == 0
    assert tree(store, b"runs") == {b"model": b"n" * 1_000_000}


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


def test_one_waits_while_another_is_being_written(shop: Shop, store: Store) -> None:
    Writers(store)
    begin_in_place(store, b"half")
    write_file(store, runs(store), b"other", b"whole")
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_all_are_there_when_all_are_closed(shop: Shop, store: Store) -> None:
    Writers(store)
    handle = begin_in_place(store, b"half")
    write_file(store, runs(store), b"other", b"whole")
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == in_place(b"half") | {b"other": b"whole"}


def test_what_is_renamed_into_place_is_done(shop: Shop, store: Store) -> None:
    """Before it is closed, as safetensors does it."""
    Writers(store)
    handle = open_writing(store, runs(store), b"temporary", b"new")
    store.rename(runs(store), b"temporary", runs(store), b"model.h5")
    close(store, handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"new"}


def test_whoever_reads_ends_nothing(shop: Shop, store: Store) -> None:
    Writers(store)
    writing = begin_in_place(store, b"half")
    store.fsync(writing)
    reading = store.open_file(find(store, b"runs/model.h5").ino, os.O_RDONLY)
    store.flush(reading, writer_killed=False)
    store.release(reading)
    store = shop.reopen(store)
    assert tree(store, b"runs") == OLD


def test_removing_an_old_one_comes_back_with_the_rest(store: Store) -> None:
    """Rotation behind a save: the next save makes it final, a kill before that undoes it."""
    writers = Writers(store)
    write_file(store, runs(store), b"model_2", b"two")
    store.unlink(runs(store), b"model.h5")
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, b"runs") == OLD | {b"model_2": b"two"}


def test_no_marker_is_missing(store: Store) -> None:
    directory = store.namespace.get(runs(store))
    assert store.units.problem_of(directory) is None
