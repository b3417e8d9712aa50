"""Checkpoint units whose directory is removed, to be made again or for good."""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, fill
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    Tree,
    Writers,
    find,
    finish_work,
    in_history,
    kept_count,
    make,
    open_count,
    remove_tree,
    save,
    saved,
    shards,
    tree,
)
from tests.support.unit_users import Back

UNMARKED = b"checkpoint_5"
"""Of a kind that has no marker."""


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """With well-known names."""
    return shop.new(granularity=granularity, units=UnitsMode.AUTO)  # type: ignore[arg-type]


# --- made again ---------------------------------------------------------------------------------


@pytest.mark.parametrize("again", ["no", "made", "in mid-save"])
def test_a_set_that_was_removed_to_be_made_again_is_back(
    shop: Shop, store: Store, again: str
) -> None:
    _, old = saved(store)
    remove_tree(store, 1, CHECKPOINT)
    if again != "no":
        directory = make(store, CHECKPOINT)
    if again == "in mid-save":
        save(store, directory, shards(2), marker=None)
    assert open_count(store) == 1
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) == old
    assert open_count(store) == 0


def test_contents_of_what_was_overwritten_removed_and_made_again(store: Store, back: Back) -> None:
    Writers(store)
    directory, old = saved(store)
    for name in (b"shard-0", b"shard-1"):
        write_file(store, directory, name, b"new")
    remove_tree(store, 1, CHECKPOINT)
    make(store, CHECKPOINT)
    assert tree(back(store), CHECKPOINT) == old


def test_a_log_in_the_directory_that_was_made_again_stays(shop: Shop, store: Store) -> None:
    _, old = saved(store)
    remove_tree(store, 1, CHECKPOINT)
    directory = make(store, CHECKPOINT)
    _, handle = store.create(directory, b"out", 0o644, 5, 6, os.O_RDWR | os.O_APPEND)
    store.write(handle, 0, b"line")
    store.fsync(handle)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) == {**old, b"out": b"line"}


def test_a_set_that_was_removed_and_made_again_is_the_new_one(shop: Shop, store: Store) -> None:
    saved(store)
    remove_tree(store, 1, CHECKPOINT)
    new = save(store, make(store, CHECKPOINT), shards(2))
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == new
    finish_work(store)
    assert kept_count(store) == 0


def test_what_is_renamed_to_a_removed_name_stays(shop: Shop, store: Store) -> None:
    saved(store)
    new = save(store, make(store, b"new"), shards(2), marker=None)
    remove_tree(store, 1, CHECKPOINT)
    store.rename(1, b"new", 1, CHECKPOINT)
    assert open_count(store) == 0
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == new


@pytest.mark.parametrize("again", [False, True])
def test_a_killed_saver_brings_back_what_it_removed(store: Store, again: bool) -> None:
    _, old = saved(store)
    writers = Writers(store)
    remove_tree(store, 1, CHECKPOINT)
    if again:
        save(store, make(store, CHECKPOINT), shards(2), marker=None)
    writers.endings["trainer"] = Ending.KILLED
    finish_work(store)
    assert tree(store, CHECKPOINT) == old
    for name, data in shards(2).items() if again else ():
        assert in_history(store, name)[0] == data


def test_removed_and_made_again_and_again(shop: Shop, store: Store) -> None:
    """What comes back is what was done last, however often a saver begins anew."""
    _, old = saved(store)
    Writers(store)
    for version in (2, 3, 4):
        remove_tree(store, 1, CHECKPOINT)
        save(store, make(store, CHECKPOINT), shards(version), marker=None)
    assert open_count(store) == 1
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


@pytest.mark.parametrize("beside", [b"logs", b"checkpoint_6"])
def test_what_is_made_beside_ends_a_unit_only_if_it_is_one(store: Store, beside: bytes) -> None:
    """Whoever makes any directory in mid-save is not finished."""
    writers = Writers(store)
    old = save(store, make(store, UNMARKED), shards(1), marker=None)
    writers.now += 1000.0
    finish_work(store)
    remove_tree(store, 1, UNMARKED)
    finish_work(store)
    assert open_count(store) == 1
    make(store, beside)
    finish_work(store)
    writers.endings["trainer"] = Ending.KILLED
    finish_work(store)
    assert tree(store, UNMARKED) == (old if beside == b"logs" else None)
    assert open_count(store) == 0


def test_the_next_saver_makes_what_another_has_removed_for_good(store: Store) -> None:
    """Who removed it has ended well: a kill of the next one brings nothing back."""
    saved(store)
    writers = Writers(store)
    remove_tree(store, 1, CHECKPOINT)
    writers.endings["trainer"] = Ending.WELL
    writers.present = "next"
    new = save(store, make(store, CHECKPOINT), shards(2), marker=None)
    writers.endings["next"] = Ending.KILLED
    finish_work(store)
    assert tree(store, CHECKPOINT) is None
    for name, data in new.items():
        assert in_history(store, name)[0] == data


def test_what_another_has_emptied_is_empty(store: Store) -> None:
    """One process removes the files and ends well, another one the directory, and is killed."""
    writers = Writers(store)
    directory = make(store, UNMARKED)
    save(store, directory, shards(1), marker=None)
    writers.now += 1000.0
    finish_work(store)
    for name in shards(1):
        store.unlink(directory, name)
    writers.endings["trainer"] = Ending.WELL
    writers.present = "next"
    store.remove_directory(1, UNMARKED)
    writers.endings["next"] = Ending.KILLED
    finish_work(store)
    assert tree(store, UNMARKED) is None
    assert kept_count(store) == 0


@pytest.mark.parametrize("how", ["quiet", "closed"])
def test_the_removal_is_final_in_the_end(shop: Shop, store: Store, how: str) -> None:
    saved(store)
    writers = Writers(store)
    remove_tree(store, 1, CHECKPOINT)
    finish_work(store)
    assert open_count(store) == 1
    if how == "quiet":
        writers.now += 30.0
        finish_work(store)
    else:
        store = shop.reopen(store, clean=True)
    assert open_count(store) == 0
    assert tree(store, CHECKPOINT) is None
    assert kept_count(store) == 0


def test_what_has_the_name_of_a_removed_one_stays(shop: Shop, store: Store) -> None:
    """A file of that name is nobody's checkpoint: nothing takes its place."""
    saved(store)
    remove_tree(store, 1, CHECKPOINT)
    write_file(store, 1, CHECKPOINT, b"a file")
    store = shop.reopen(store)
    assert read_file(store, find(store, CHECKPOINT).ino) == b"a file"
    finish_work(store)
    assert kept_count(store) == 0


def test_the_directory_above_is_removed_too(shop: Shop, store: Store) -> None:
    """Then there is no place that it could come back to."""
    runs = make(store, b"runs")
    save(store, make(store, CHECKPOINT, runs), shards(1))
    remove_tree(store, runs, CHECKPOINT)
    store.remove_directory(1, b"runs")
    store = shop.reopen(store)
    assert tree(store, b"runs") is None
    finish_work(store)
    assert kept_count(store) == 0


# --- policies -----------------------------------------------------------------------------------


def _with_policy(shop: Shop) -> tuple[Store, Tree]:
    store = shop.new(units=UnitsMode.POLICY)
    runs = make(store, b"runs")
    old = save(store, runs, shards(1), marker=None)
    store.units.set_policy(store.namespace.get(runs), (policy_rule((b".",), (), None),))
    Writers(store)
    return store, old


def _policy_paths(store: Store) -> list[bytes | None]:
    return [store.path_of(ino) for ino in store.units.policies.all()]


@pytest.mark.parametrize("again", [False, True])
def test_a_directorys_own_policy_comes_back_with_it(shop: Shop, again: bool) -> None:
    store, old = _with_policy(shop)
    remove_tree(store, 1, b"runs")
    other = make(store, b"other")
    store.units.set_policy(store.namespace.get(other), (policy_rule((b"x-*",), (), None),))
    if again:
        save(store, make(store, b"runs"), shards(2), marker=None)
    for _ in range(2):
        store = shop.reopen(store)
        finish_work(store)
        assert tree(store, b"runs") == old
        assert sorted(_policy_paths(store)) == [b"/other", b"/runs"]  # type: ignore[type-var]
        assert store.units.active
        write_file(store, find(store, b"runs").ino, b"shard-0", b"half of the next")
    shop.reopen(store)


@pytest.mark.parametrize("removal", ["pending", "over", "of an empty one"])
def test_a_policy_is_that_of_the_next_one_of_the_name(shop: Shop, removal: str) -> None:
    store, _ = _with_policy(shop)
    store.units.ending_of = lambda _writer: Ending.WELL if over else Ending.ALIVE
    over = False
    if removal == "of an empty one":
        remove_tree(store, 1, b"runs")
        make(store, b"runs")
    remove_tree(store, 1, b"runs")
    if removal == "over":
        assert store.units.drop_removed()
        assert open_count(store) == 0
    new = make(store, b"runs")
    assert _policy_paths(store) == [b"/runs"]
    done = save(store, new, shards(2), marker=None)
    over = True
    store = shop.reopen(store, clean=True, units=UnitsMode.POLICY)
    assert _policy_paths(store) == [b"/runs"]
    write_file(store, new, b"shard-0", b"half of the next")
    store = shop.reopen(store)
    assert tree(store, b"runs") == done


def test_a_removed_directorys_policy_makes_way_for_others(shop: Shop) -> None:
    store = shop.new()
    rules = tuple(policy_rule((b"p" * 250 + b"%d" % n,), (b"d" * 250,), None) for n in range(10))
    for name in (b"first", b"second"):  # each takes 5 of 8 KiB
        store.units.set_policy(store.namespace.get(make(store, name)), rules)
        store.remove_directory(1, name)
    store.units.set_policy(store.namespace.get(make(store, b"third")), rules)
    assert _policy_paths(store) == [b"/third"]
    make(store, b"first")
    assert _policy_paths(store) == [b"/third"]


# --- room ---------------------------------------------------------------------------------------

BIG = {b"big": b"b" * 2_000_000}
"""More than half of what a small store holds."""


@pytest.mark.parametrize("place", ["the same name", "another name"])
def test_a_removed_set_gives_its_room_to_the_next(shop: Shop, place: str) -> None:
    store = shop.new(units=UnitsMode.AUTO)
    save(store, make(store, CHECKPOINT), BIG)
    Writers(store)
    remove_tree(store, 1, CHECKPOINT)
    name = CHECKPOINT if place == "the same name" else b"elsewhere"
    new = save(store, make(store, name), {b"big": b"n" * 2_000_000}, marker=None)
    assert store.volume.counters.no_space_errors == 0
    assert store.units.unprotected == (place == "the same name")
    assert open_count(store) == (place == "the same name")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
    finish_work(store)
    assert place == "the same name" or tree(store, b"elsewhere") == new


def test_what_is_overwritten_gives_nothing(shop: Shop) -> None:
    """Nobody has removed it: the store is full before it is given up."""
    store = shop.new(units=UnitsMode.AUTO)
    directory, old = saved(store)
    Writers(store)
    write_file(store, directory, b"shard-0", b"new")
    fill(store)
    store.unlink(1, b"filler")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_a_directorys_policy_stays_where_nothing_can_come_back(shop: Shop) -> None:
    store, _ = _with_policy(shop)
    remove_tree(store, 1, b"runs")
    new = make(store, b"runs")
    assert store.units.drop_removed()
    save(store, new, shards(2), marker=None)
    store = shop.reopen(store)
    finish_work(store)
    assert tree(store, b"runs") == {}
    assert _policy_paths(store) == [b"/runs"]
    for name, data in shards(2).items():
        assert data in in_history(store, name)
