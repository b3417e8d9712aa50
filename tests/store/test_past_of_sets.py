"""History of names and contents that a checkpoint set took, and gave back.

What a path had at a commit is what history and the state of that commit say of it, or they say
nothing.
"""

from __future__ import annotations

import os

import pytest

from cxlfs.daemon.history_request import HANDLERS
from cxlfs.errors import NotFoundError
from cxlfs.store import Store
from cxlfs.store.past_rows import Death
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    Writers,
    find,
    finish_work,
    in_history,
    make,
    open_writing,
    remove_tree,
    save,
)

OLD, NEW = b"old " * 100, b"new " * 200


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


def now(store: Store) -> int:
    """The last commit."""
    return store.volume.last_lsn


def restored(store: Store, path: str, at: int) -> bytes | None:
    """What ``cxlfs restore PATH --at`` brings; None: history has nothing of that time."""
    try:
        list(HANDLERS["restore"](store, {"path": path, "at": at, "to": "restored"}))
    except NotFoundError:
        return None
    found = read_file(store, find(store, b"restored").ino)
    store.unlink(1, b"restored")
    return found


def shown(store: Store, path: str, at: int) -> bytes | None:
    """What the view of a commit shows; None: nothing."""
    state = store.state_at(at)
    ino = state.follow(path.encode().split(b"/"))
    fact = None if ino is None else state.fact(ino)
    if fact is None or fact.content is None:
        return None
    return bytes(fact.content.read(0, fact.content.size))


def saved(store: Store, name: bytes = CHECKPOINT) -> int:
    directory = make(store, name)
    save(store, directory, {b"a": OLD, b"b": OLD[:40]})
    finish_work(store)
    return directory


def done(store: Store, directory: int) -> None:
    """The set is finished: another file, and its marker."""
    save(store, directory, {b"b": NEW})


def goes_back(store: Store) -> Store:
    """Its writer is killed."""
    writers = Writers(store)
    for unit in store.units.opened.values():
        unit.writers = {"trainer": None}
    writers.endings["trainer"] = Ending.KILLED
    store.units.settle()
    finish_work(store)
    return store


# --- a content that comes back --------------------------------------------------------------------


def test_a_content_of_a_set_that_went_back_was_there_in_between(store: Store) -> None:
    directory = saved(store)
    first = now(store)
    write_file(store, directory, b"a", NEW)
    between = now(store)
    goes_back(store)
    for each in (restored, shown):
        assert each(store, "checkpoint-5/a", between) == NEW
    assert shown(store, "checkpoint-5/a", first) == OLD
    assert shown(store, "checkpoint-5/a", now(store)) == OLD


def test_a_content_that_came_back_was_not_there_in_between(shop: Shop, store: Store) -> None:
    directory = saved(store)
    write_file(store, directory, b"a", NEW)
    between = now(store)
    goes_back(store)
    write_file(store, directory, b"a", b"third")
    store.units.finish()
    store.history.forget(
        row for row in list(store.past) if row.data is not None and row.data.size == len(NEW)
    )
    for clean in (False, True):
        assert restored(store, "checkpoint-5/a", between) is None
        assert shown(store, "checkpoint-5/a", between) is None
        store = shop.reopen(store, clean=clean, units=UnitsMode.AUTO)


def test_a_name_that_came_back_meant_nothing_in_between(store: Store) -> None:
    directory = saved(store)
    first = now(store)
    store.unlink(directory, b"a")
    write_file(store, directory, b"a", NEW)
    between = now(store)
    goes_back(store)
    assert shown(store, "checkpoint-5/a", first) == OLD
    assert shown(store, "checkpoint-5/a", between) == NEW
    write_file(store, directory, b"a", b"third")
    done(store, directory)
    assert restored(store, "checkpoint-5/a", first) == OLD
    assert restored(store, "checkpoint-5/a", between) == NEW


def test_a_linked_file_is_not_what_replaced_its_name_meant(shop: Shop, store: Store) -> None:
    """The file that lost the name is overwritten under its other one, the new one moves away, and
    a new mount has forgotten which one had the name in between.
    """
    directory = saved(store)
    first = now(store)
    store.link(store.lookup(directory, b"a").ino, 1, b"linked")
    store.unlink(directory, b"a")
    write_file(store, directory, b"a", NEW)
    between = now(store)
    write_file(store, 1, b"linked", b"third")
    store.rename(directory, b"a", 1, b"moved")
    done(store, directory)
    store = shop.reopen(store, clean=True, units=UnitsMode.AUTO)
    for each in (restored, shown):
        assert each(store, "checkpoint-5/a", between) in {None, NEW}
    assert restored(store, "checkpoint-5/a", first) in {None, OLD}


def test_recovery_does_not_say_that_a_name_was_there_all_along(shop: Shop, store: Store) -> None:
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"a": OLD, b"a.tmp": NEW})
    store.unlink(directory, b"a")
    store.rename(directory, b"a.tmp", directory, b"a")
    between = now(store)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    write_file(store, directory, b"a", b"third")
    done(store, directory)
    assert restored(store, "checkpoint-5/a", between) in {None, NEW}
    assert shown(store, "checkpoint-5/a", between) in {None, NEW}


# --- a name that the store kept -------------------------------------------------------------------


def test_a_name_that_was_kept_at_a_crash_did_not_live_until_the_next_opening(
    shop: Shop, store: Store
) -> None:
    directory = saved(store)
    store.unlink(directory, b"a")
    done(store, directory)
    removed = now(store)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    finish_work(store)
    assert in_history(store, b"a") == [OLD]
    assert restored(store, "checkpoint-5/a", removed) is None
    for commit in range(removed, now(store) + 1):
        assert shown(store, "checkpoint-5/a", commit) is None


@pytest.mark.parametrize("reopens", [False, True])
def test_what_is_written_after_the_removal_is_not_what_was_removed(
    shop: Shop, store: Store, *, reopens: bool
) -> None:
    directory = saved(store)
    handle = store.open_file(find(store, CHECKPOINT + b"/a").ino, os.O_WRONLY)
    store.unlink(directory, b"a")
    store.write(handle, 0, b"NEW!")
    store.flush(handle, writer_killed=False)
    store.release(handle)
    done(store, directory)
    finish_work(store)
    if reopens:
        store = shop.reopen(store, clean=True)
    assert in_history(store, b"a") == [OLD]


def test_a_torn_overwrite_of_what_was_removed_holds_nothing(store: Store) -> None:
    directory = saved(store)
    handle = open_writing(store, directory, b"a", b"NEW!")
    store.unlink(directory, b"a")
    store.flush(handle, writer_killed=False)
    store.release(handle)
    done(store, directory)
    finish_work(store)
    assert in_history(store, b"a") == [OLD]


def test_what_is_open_without_a_name_at_the_unmount_is_in_history(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"plain", OLD)
    store.open_file(ino, os.O_RDWR)
    store.unlink(1, b"plain")
    store = shop.reopen(store, clean=True)
    assert in_history(store, b"plain") == [OLD]


# --- several names --------------------------------------------------------------------------------


def test_several_names_that_one_record_takes_leave_one_version(shop: Shop, store: Store) -> None:
    directory = make(store, CHECKPOINT)
    ino = write_file(store, directory, b"a", NEW)
    store.link(ino, directory, b"b")
    between = now(store)
    goes_back(store)
    for name in ("a", "b"):
        assert shown(store, f"checkpoint-5/{name}", between) == NEW
    removed = [row for row in store.past if row.ino == ino and row.death is Death.REMOVED]
    assert len(removed) == 1
    store = shop.reopen(store, clean=True)
    assert {data for name in (b"a", b"b") for data in in_history(store, name)} == {NEW}


# --- numbers --------------------------------------------------------------------------------------


def test_a_directory_that_was_made_again_is_looked_into_as_it_was(store: Store) -> None:
    saved(store, b"plain")
    first = now(store)
    remove_tree(store, 1, b"plain")
    write_file(store, make(store, b"plain"), b"a", NEW)
    assert restored(store, "plain/a", first) == OLD


def test_the_number_of_a_version_names_it_whatever_the_path_had_then(store: Store) -> None:
    write_file(store, 1, b"f", OLD)
    ino = write_file(store, 1, b"f.tmp", NEW)
    number = store.namespace.get(ino).commit_lsn
    store.rename(1, b"f.tmp", 1, b"f")
    write_file(store, 1, b"f", b"third")
    assert restored(store, "f", number) == NEW
    assert shown(store, "f", number) == OLD


def test_what_another_directory_had_is_not_taken_for_what_the_path_had(
    shop: Shop, store: Store
) -> None:
    """Also after a crash."""
    write_file(store, make(store, b"plain"), b"a", OLD)
    other = make(store, b"other")
    write_file(store, other, b"a", NEW)
    write_file(store, 1, b"something", b"else")
    between = now(store)
    write_file(store, 1, b"more", b"else")
    store = shop.reopen(store, clean=False)
    remove_tree(store, 1, b"plain")
    store.rename(1, b"other", 1, b"plain")
    write_file(store, other, b"a", b"third")
    assert restored(store, "plain/a", between) == OLD
    assert restored(store, "other/a", between) == NEW


def test_what_got_a_name_later_is_not_taken_for_what_the_path_had(shop: Shop, store: Store) -> None:
    """That it had another file then is forgotten: that one was renamed, and the store crashed."""
    write_file(store, 1, b"f", OLD)
    write_file(store, 1, b"g", NEW)
    write_file(store, 1, b"something", b"else")
    between = now(store)
    store.rename(1, b"f", 1, b"away")
    store = shop.reopen(store, clean=False)
    store.rename(1, b"g", 1, b"f")
    write_file(store, 1, b"f", b"third")
    assert restored(store, "f", between) is None
    (commit,) = [row.born_lsn for row in store.past if row.data is not None and row.name == b"f"]
    assert restored(store, "f", commit) == NEW
