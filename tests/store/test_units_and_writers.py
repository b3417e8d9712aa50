"""Checkpoint units whose writers end, die or are many; and what users say about units."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import LimitError, NoSpaceError
from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, close, fill, until_no_space
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Writers,
    find,
    in_history,
    make,
    open_count,
    open_writing,
    save,
    saved,
    shards,
    tree,
)


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """With well-known names."""
    return shop.new(granularity=granularity, units=UnitsMode.AUTO)  # type: ignore[arg-type]


# --- writers ----------------------------------------------------------------------------------


def test_a_killed_writer_between_two_files(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    writers = Writers(store)
    write_file(store, directory, b"shard-0", b"new")
    store.units.maintain()
    assert tree(store, CHECKPOINT) == {**old, b"shard-0": b"new"}
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, CHECKPOINT) == old
    assert "unit-back" in [event.kind for event in shop.events]
    assert in_history(store, b"shard-0")[0] == b"new"


def test_a_writer_killed_in_mid_file(store: Store) -> None:
    writers = Writers(store)
    directory, old = saved(store)
    handle = open_writing(store, directory, b"shard-0", b"half")
    store.flush(handle, writer_killed=True)
    store.release(handle)
    writers.endings["trainer"] = Ending.KILLED
    store.units.maintain()
    assert tree(store, CHECKPOINT) == old


def test_a_release_behind_the_return(shop: Shop, store: Store) -> None:
    """RELEASE comes when the directory has changed places already."""
    writers = Writers(store)
    directory, old = saved(store)
    overwritten = open_writing(store, directory, b"shard-0", b"half")
    new = open_writing(store, directory, b"added", b"half of a new file")
    writers.endings["trainer"] = Ending.KILLED
    for handle in (new, overwritten):
        store.flush(handle, writer_killed=True)
    store.units.maintain()
    assert tree(store, CHECKPOINT) == old  # who begins again at once does not wait for RELEASE
    for handle in (new, overwritten):
        store.release(handle)
    store.units.maintain()
    assert tree(store, CHECKPOINT) == old
    shop.directory_times = False


def test_one_of_several_writers_dies(store: Store) -> None:
    """The others go on; it is decided when all are gone, or by the marker."""
    writers = Writers(store)
    directory = make(store, CHECKPOINT)
    for rank in range(3):
        writers.present = rank
        write_file(store, directory, b"rank-%d" % rank, b"r")
    writers.endings[1] = Ending.KILLED
    store.units.maintain()
    assert tree(store, CHECKPOINT) is not None
    writers.endings |= {"trainer": Ending.WELL, 0: Ending.KILLED, 2: Ending.BADLY}
    store.units.maintain()
    assert tree(store, CHECKPOINT) is None


def test_the_marker_counts_although_one_that_had_finished_was_killed(store: Store) -> None:
    writers = Writers(store)
    directory = make(store, CHECKPOINT)
    writers.present = "rank 1"
    write_file(store, directory, b"rank-1", b"r")
    writers.endings["rank 1"] = Ending.KILLED
    writers.present = "trainer"
    write_file(store, directory, MARKER, b"{}")
    assert open_count(store) == 0
    assert tree(store, CHECKPOINT) == {b"rank-1": b"r", MARKER: b"{}"}


def test_no_marker_counts_while_a_killed_writers_file_is_unfinished(store: Store) -> None:
    writers = Writers(store)
    directory = make(store, CHECKPOINT)
    write_file(store, directory, b"rank-0", b"r")
    writers.present = "rank 1"
    handle = open_writing(store, directory, b"rank-1", b"half")
    close(store, handle, killed=True)
    writers.present = "trainer"
    write_file(store, directory, MARKER, b"{}")
    assert open_count(store) == 1
    write_file(store, directory, b"rank-1", b"whole")  # somebody makes it good
    assert open_count(store) == 0


def test_no_marker_counts_while_a_file_is_half_changed_in_place(store: Store) -> None:
    """What a killed writer left of it is published: that does not make it good."""
    writers = Writers(store)
    directory, _old = saved(store)
    writers.present = "rank 1"
    handle = store.open_file(find(store, CHECKPOINT + b"/shard-1").ino, os.O_RDWR)
    store.write(handle, 0, b"half")
    close(store, handle, killed=True)
    writers.present = "trainer"
    write_file(store, directory, b"shard-0", b"new")
    write_file(store, directory, MARKER, b"{}")
    assert open_count(store) == 1
    write_file(store, directory, b"shard-1", b"whole")
    assert open_count(store) == 0


def test_no_marker_counts_behind_a_write_that_failed(shop: Shop) -> None:
    store = shop.new(units=UnitsMode.AUTO)
    writers = Writers(store)
    directory = make(store, CHECKPOINT)
    write_file(store, directory, b"shard-0", b"s")
    fill(store)
    handle = open_writing(store, directory, b"shard-1", b"")
    until_no_space(lambda piece: store.write(handle, piece * 4096, b"x" * 4096))
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    store.unlink(1, b"filler")
    write_file(store, directory, MARKER, b"{}")
    assert open_count(store) == 1
    writers.now += 1000
    store.units.maintain()
    assert tree(store, CHECKPOINT) is None


@pytest.mark.parametrize(
    ("name", "ending", "there"),
    [
        (b"checkpoint_5", Ending.WELL, True),
        (b"checkpoint_5", Ending.UNKNOWN, True),
        (b"checkpoint_5", Ending.BADLY, False),
        (b"checkpoint_5", Ending.KILLED, False),
        (b"checkpoint-5", Ending.UNKNOWN, False),
        (b"checkpoint-5", Ending.BADLY, False),
    ],
)
def test_how_the_writer_ended(store: Store, name: bytes, ending: Ending, there: bool) -> None:
    writers = Writers(store)
    files = save(store, make(store, name), shards(1), marker=None)
    writers.endings["trainer"] = ending
    store.units.maintain()
    assert open_count(store) == 0
    assert tree(store, name) == (files if there else None)


def test_what_is_closed_by_a_process_that_is_being_killed(store: Store) -> None:
    """Where nobody can say how a process ended, its last FLUSH may have."""
    writers = Writers(store)
    save(store, make(store, b"checkpoint_5"), shards(1), marker=None)
    store.units.killed("trainer")
    writers.endings["trainer"] = Ending.UNKNOWN
    store.units.maintain()
    assert tree(store, b"checkpoint_5") is None


def test_the_next_writer_begins_where_the_last_one_has_ended(store: Store) -> None:
    """Before anybody has looked how the last one ended."""
    writers = Writers(store)
    directory = make(store, b"checkpoint_5")
    old = save(store, directory, shards(1), marker=None)
    writers.endings["trainer"] = Ending.WELL
    writers.present = "another"
    write_file(store, directory, b"shard-0", b"new")
    writers.endings["another"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"checkpoint_5") == old


@pytest.mark.parametrize(("name", "seconds"), [(b"checkpoint_5", 10.0), (CHECKPOINT, 30.0)])
def test_a_marker_that_never_comes(shop: Shop, store: Store, name: bytes, seconds: float) -> None:
    writers = Writers(store)
    files = save(store, make(store, name), shards(1), marker=None)
    writers.now += seconds - 0.1
    store.units.maintain()
    assert open_count(store) == 1
    writers.now += 0.2
    store.units.maintain()
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, name) == files


def test_the_next_one_ends_that_without_a_marker(store: Store) -> None:
    Writers(store)
    save(store, make(store, b"checkpoint_1"), shards(1), marker=None)
    save(store, make(store, b"checkpoint_2"), shards(2), marker=None)
    store.units.maintain()
    assert [unit.inode.name for unit in store.units.open_units()] == [b"checkpoint_2"]
    store.units.clock = lambda: 1e9
    store.units.maintain()


# --- the end of a mount -------------------------------------------------------------------------


def test_closing_the_store(shop: Shop, store: Store) -> None:
    writers = Writers(store)
    done = save(store, make(store, b"checkpoint_1"), shards(1), marker=None)
    save(store, make(store, CHECKPOINT), shards(1), marker=None)
    writers.endings["other"] = Ending.WELL
    writers.present = "other"
    also_done = save(store, make(store, b"checkpoint-6"), shards(2), marker=None)
    store = shop.reopen(store, clean=True)
    assert tree(store, b"checkpoint_1") == done
    assert tree(store, CHECKPOINT) is None
    assert tree(store, b"checkpoint-6") == also_done


def test_closing_while_a_file_is_open(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    open_writing(store, directory, b"shard-0", b"half")
    store = shop.reopen(store, clean=True)
    assert tree(store, CHECKPOINT) == old


# --- policies -----------------------------------------------------------------------------------


def test_a_policy_makes_units(shop: Shop) -> None:
    store = shop.new()
    runs = make(store, b"runs")
    assert not store.units.active
    rules = (policy_rule((b"epoch-*",), (b"DONE",), None),)
    store.units.set_policy(store.namespace.get(runs), rules)
    store = shop.reopen(store)
    assert store.units.policies.all() == {runs: rules}
    save(store, make(store, b"epoch-1", runs), shards(1), marker=b"DONE")
    save(store, make(store, b"epoch-2", runs), shards(1), marker=None)
    elsewhere = save(store, make(store, b"epoch-3"), shards(1), marker=None)
    store = shop.reopen(store)
    assert tree(store, b"runs/epoch-1") is not None
    assert tree(store, b"runs/epoch-2") is None
    assert tree(store, b"epoch-3") == elsewhere
    store.units.set_policy(store.namespace.get(runs), ())
    assert not store.units.active


def test_a_policy_for_the_directory_itself(shop: Shop) -> None:
    """A single file that is changed in place, as HDF5 does with "a"."""
    store = shop.new()
    runs = make(store, b"runs")
    write_file(store, runs, b"model.h5", b"old" * 5000)
    rules = (policy_rule((b".",), (), 5.0),)
    store.units.set_policy(store.namespace.get(runs), rules)
    handle = store.open_file(store.lookup(runs, b"model.h5").ino, os.O_RDWR)
    store.write(handle, 0, b"half of an update")
    store.fsync(handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"old" * 5000}
    # The policy is of the directory that was set aside: what came back has it, too.
    handle = store.open_file(store.lookup(find(store, b"runs").ino, b"model.h5").ino, os.O_RDWR)
    store.write(handle, 0, b"another half")
    store.fsync(handle)
    store = shop.reopen(store)
    assert tree(store, b"runs") == {b"model.h5": b"old" * 5000}


def test_policies_are_bounded(shop: Shop) -> None:
    store = shop.new()
    rules = tuple(policy_rule((b"p" * 250 + b"%d" % n,), (b"d" * 250,), None) for n in range(10))

    def set_another(number: int) -> None:
        directory = store.namespace.get(make(store, b"d%d" % number))
        store.units.set_policy(directory, rules)

    set_another(0)  # takes 5 of 8 KiB
    with pytest.raises(LimitError):
        set_another(1)
    assert len(store.units.policies.all()) == 1


# --- markers that Ctrl-C leaves empty -----------------------------------------------------------


def test_an_empty_marker_is_no_end(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    writers = Writers(store)
    save(store, directory, shards(2), marker=None)
    close(store, open_writing(store, directory, MARKER, b""))
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.INTERRUPTED
    store.units.maintain()
    assert tree(store, CHECKPOINT) == old
    assert tree(shop.reopen(store), CHECKPOINT) == old


def test_an_empty_marker_of_a_policy_is_an_end(store: Store) -> None:
    rules = (policy_rule((b"step-*",), (b"DONE",), None),)
    store.units.set_policy(store.namespace.get(1), rules)
    directory = make(store, b"step-1")
    save(store, directory, shards(1), marker=None)
    assert open_count(store) == 1
    close(store, open_writing(store, directory, b"DONE", b""))
    assert open_count(store) == 0


@pytest.mark.parametrize("ending", [Ending.INTERRUPTED, Ending.BADLY])
def test_a_marker_beside_that_is_only_emptied_stays(
    shop: Shop, store: Store, ending: Ending
) -> None:
    writers = Writers(store)
    old = save(store, make(store, b"global_step1"), shards(1), marker=None)
    write_file(store, 1, b"latest", b"global_step1")
    save(store, make(store, b"global_step2"), shards(2), marker=None)
    close(store, open_writing(store, 1, b"latest", b""))
    assert read_file(store, find(store, b"latest").ino) == b"global_step1"
    assert open_count(store) == 1
    writers.endings["trainer"] = ending
    store.units.maintain()
    assert tree(store, b"global_step2") is None
    store = shop.reopen(store)
    assert read_file(store, find(store, b"latest").ino) == b"global_step1"
    assert tree(store, b"global_step1") == old


def test_a_marker_beside_can_be_emptied_where_nothing_is_being_saved(store: Store) -> None:
    save(store, make(store, b"global_step1"), shards(1), marker=None)
    write_file(store, 1, b"latest", b"global_step1")
    assert open_count(store) == 0
    close(store, open_writing(store, 1, b"latest", b""))
    assert read_file(store, find(store, b"latest").ino) == b""


def test_a_marker_beside_that_is_written_after_all_is_an_end(store: Store) -> None:
    save(store, make(store, b"global_step1"), shards(1), marker=None)
    write_file(store, 1, b"latest", b"global_step1")
    save(store, make(store, b"global_step2"), shards(2), marker=None)
    handle = open_writing(store, 1, b"latest", b"")
    store.fsync(handle)
    assert open_count(store) == 1
    store.write(handle, 0, b"global_step2")
    close(store, handle)
    assert open_count(store) == 0
    assert read_file(store, find(store, b"latest").ino) == b"global_step2"
