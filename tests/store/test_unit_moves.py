"""What ends a checkpoint unit, and what was moved into one that goes back."""

from __future__ import annotations

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Writers,
    begin,
    find,
    finish_work,
    make,
    open_count,
    open_writing,
    saved,
    tree,
)
from tests.support.unit_users import (
    ALICE,
    BOB,
    Back,
    Users,
    become,
    create,
    dcp,
    directory_of,
    saved_by_alice,
)


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


# --- markers and moves ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["renamed", "linked", "renamed twice", "exchanged"])
def test_an_old_marker_says_nothing(store: Store, users: Users, how: str, back: Back) -> None:
    """Its content was not born in this unit."""
    directory = directory_of(store, ALICE, b"run")
    create(store, 1, b"old", ALICE, b"of another save")
    old = dcp(store, directory, b"a")
    write_file(store, directory, b"__0_0.distcp", b"half")
    if how == "renamed":
        store.rename(1, b"old", directory, b".metadata")
    elif how == "linked":
        store.unlink(directory, b".metadata")
        store.link(find(store, b"old").ino, directory, b".metadata")
    elif how == "renamed twice":
        store.rename(directory, b".metadata", directory, b"m")
        store.rename(directory, b"m", directory, b".metadata")
    else:
        store.rename(1, b"old", directory, b".metadata", exchange=True)
    assert open_count(store) == 1
    store = back(store)
    assert tree(store, b"run") == old
    name = b"old.moved-in" if how == "exchanged" else b"old"
    assert read_file(store, find(store, name).ino) == b"of another save"
    assert users


def test_an_old_tracker_says_nothing(store: Store, users: Users) -> None:
    """Beside the units, renamed in or of another user."""
    top = directory_of(store, ALICE, b"run")
    create(store, top, b"before", ALICE, b"global_step1")
    directory = directory_of(store, ALICE, b"global_step7", top)
    create(store, directory, b"shard", ALICE, b"1")
    store.rename(top, b"before", top, b"latest")
    assert open_count(store) == 1
    become(users, BOB)
    store.unlink(top, b"latest")
    create(store, top, b"latest", BOB, b"global_step7")
    assert open_count(store) == 1
    become(users, ALICE)
    store.unlink(top, b"latest")
    create(store, top, b"latest", ALICE, b"global_step7")
    assert open_count(store) == 0


def test_a_torn_marker_that_is_moved_away_says_nothing(store: Store) -> None:
    """The rename publishes it, but not under the name that it loses."""
    writers = Writers(store)
    write_file(store, 1, b"taken", b"before")
    directory = make(store, CHECKPOINT)
    write_file(store, directory, b"shard-0", b"of the save")
    handle = open_writing(store, directory, MARKER, b"half")
    writers.present = "mover"
    write_file(store, directory, b"note", b"of the save")
    writers.endings["trainer"] = Ending.KILLED
    store.flush(handle, writer_killed=True)
    store.release(handle)
    store.rename(directory, MARKER, 1, b"taken")
    writers.endings["mover"] = Ending.WELL
    finish_work(store)
    assert tree(store, CHECKPOINT) is None


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_was_moved_in_goes_where_it_was(
    store: Store, users: Users, back: Back, kind: str, over: bool
) -> None:
    if kind == "directory" and over:
        over = False
    archive = directory_of(store, ALICE, b"archive")
    directory, old = saved_by_alice(store)
    if kind == "file":
        create(store, archive, b"best", ALICE, b"the only copy")
    else:
        create(store, directory_of(store, ALICE, b"best", archive), b"x", ALICE, b"the only copy")
    before = tree(store, b"archive")
    begin(store, directory)
    store.rename(archive, b"best", directory, b"shard-0" if over else b"best")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    assert tree(store, b"archive") == before
    assert users


@pytest.mark.parametrize("why", ["the name is taken", "the directory is gone"])
def test_what_was_moved_in_and_has_no_place_goes_beside_it(
    store: Store, users: Users, back: Back, why: str
) -> None:
    archive = directory_of(store, ALICE, b"archive")
    create(store, archive, b"shard-0", ALICE, b"the only copy")
    directory, old = saved_by_alice(store)
    store.rename(archive, b"shard-0", directory, b"shard-0")
    if why == "the name is taken":
        create(store, archive, b"shard-0", ALICE, b"another")
    else:
        store.remove_directory(1, b"archive")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    path = b"archive/shard-0.moved-in" if why == "the name is taken" else b"shard-0"
    assert read_file(store, find(store, path).ino) == b"the only copy"
    assert users


@pytest.mark.parametrize("stays", ["before", "behind", "before a crash"])
def test_what_was_moved_from_a_set_that_stays_is_there_again(
    shop: Shop, store: Store, stays: str
) -> None:
    """The set keeps a copy until its end: nobody has that then."""
    writers = Writers(store)
    directory, old = saved(store, b"checkpoint-1")
    other = make(store, b"checkpoint-2")
    writers.present = "mover"
    store.rename(directory, b"shard-0", other, b"shard-0")
    writers.present = "next"
    write_file(store, directory, b"shard-1", b"of the next save")
    if stays != "behind":
        write_file(store, directory, MARKER, b"the next state")
    if stays == "before a crash":
        store = shop.reopen(store, clean=False)
    writers.endings |= dict.fromkeys(("trainer", "mover"), Ending.KILLED)
    store.units.settle()
    assert tree(store, b"checkpoint-2") is None
    if stays == "behind":
        assert open_count(store) == 1
        write_file(store, directory, MARKER, b"the next state")
    finish_work(store)
    assert open_count(store) == 0
    now = tree(store, b"checkpoint-1") or {}
    assert (now[b"shard-0"], now[b"shard-1"]) == (old[b"shard-0"], b"of the next save")


@pytest.mark.parametrize("how", ["killed", "crash"])
def test_what_others_moved_from_a_set_that_went_back_is_there_again(
    shop: Shop, store: Store, users: Users, how: str
) -> None:
    become(users, ALICE)
    directory, old = saved_by_alice(store)
    write_file(store, directory, b"shard-0", b"half")
    become(users, BOB)
    create(store, directory, b"note", BOB, b"of bob")
    other = directory_of(store, BOB, b"checkpoint-6")
    store.rename(directory, b"note", other, b"note")
    if how == "crash":
        store = shop.reopen(store, clean=False)
    for uid in (ALICE, BOB):
        users.endings[uid] = Ending.KILLED
        store.units.settle()
    assert open_count(store) == 0
    assert tree(store, CHECKPOINT) == {**old, b"note": b"of bob"}


@pytest.mark.parametrize("how", ["killed", "crash", "crash in between"])
def test_what_was_made_in_a_set_and_moved_to_another_goes_with_both(
    shop: Shop, store: Store, how: str
) -> None:
    writers = Writers(store)
    directory, old = saved(store, b"checkpoint-1")
    begin(store, directory)
    write_file(store, directory, b"more", b"half")
    writers.present = "next"
    other = make(store, b"checkpoint-2")
    writers.present = "mover"
    store.rename(directory, b"more", other, b"more")
    if how != "crash":
        writers.endings |= dict.fromkeys(("trainer", "mover"), Ending.KILLED)
        store.units.settle()
        assert open_count(store) == 1
    if how == "killed":
        writers.endings["next"] = Ending.KILLED
        store.units.settle()
    else:
        store = shop.reopen(store, clean=False)
    finish_work(store)
    assert open_count(store) == 0
    assert tree(store, b"") == {b"checkpoint-1/" + name: data for name, data in old.items()}


def test_what_stays_takes_no_name_from_what_was_there(store: Store, users: Users) -> None:
    become(users, ALICE)
    directory, old = saved_by_alice(store)
    store.unlink(directory, b"shard-0")
    become(users, BOB)
    create(store, directory, b"shard-0", BOB, b"of bob")
    users.endings[ALICE] = Ending.KILLED
    store.units.settle()
    now = {**old, b"shard-0": b"of bob", b"shard-0.moved-in": old[b"shard-0"]}
    assert tree(store, CHECKPOINT) == now


def test_what_is_older_than_a_set_that_begins_in_an_empty_directory(store: Store) -> None:
    """It is no part of that, whoever made it."""
    writers = Writers(store)
    directory = make(store, CHECKPOINT)
    writers.now += 31
    store.units.settle()
    make(store, b"checkpoint-6")
    writers.present = "mover"
    write_file(store, 1, b"best", b"the only copy")
    write_file(store, directory, b"shard-0", b"half")
    store.rename(1, b"best", directory, b"best")
    writers.endings |= dict.fromkeys(("trainer", "mover"), Ending.KILLED)
    store.units.settle()
    assert read_file(store, find(store, b"best").ino) == b"the only copy"


def test_what_was_linked_in_and_lost_its_old_name_gets_it_again(
    store: Store, users: Users, back: Back
) -> None:
    ino = create(store, 1, b"best", ALICE, b"the only copy")
    directory, old = saved_by_alice(store)
    begin(store, directory)
    store.link(ino, directory, b"best")
    store.unlink(1, b"best")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    assert read_file(store, find(store, b"best").ino) == b"the only copy"
    assert users


def test_one_of_two_names_was_moved_in(store: Store, users: Users, back: Back) -> None:
    """It is where it was, though the file is there under the other one."""
    ino = create(store, 1, b"best", ALICE, b"it")
    store.link(ino, 1, b"same")
    directory, old = saved_by_alice(store)
    store.rename(1, b"best", directory, b"shard-0")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    assert find(store, b"best").ino == find(store, b"same").ino == ino
    assert users


def test_what_was_linked_in_keeps_its_old_name(store: Store, users: Users, back: Back) -> None:
    ino = create(store, 1, b"best", ALICE, b"it")
    directory, old = saved_by_alice(store)
    begin(store, directory)
    store.link(ino, directory, b"best")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    assert find(store, b"best").ino == ino
    assert users


def test_what_was_moved_into_a_new_directory(store: Store, users: Users, back: Back) -> None:
    """Its old place is gone: it goes to the directory above."""
    archive = directory_of(store, ALICE, b"archive")
    create(store, archive, b"best", ALICE, b"the only copy")
    directory = directory_of(store, ALICE, CHECKPOINT)
    create(store, directory, b"shard", ALICE, b"half")
    store.rename(archive, b"best", directory, b"best")
    store.remove_directory(1, b"archive")
    store = back(store)
    assert tree(store, CHECKPOINT) is None
    assert read_file(store, find(store, b"best").ino) == b"the only copy"
    assert users


@pytest.mark.parametrize("linked", [False, True])
def test_what_is_overwritten_and_moved_out(
    store: Store, users: Users, back: Back, linked: bool
) -> None:
    """It stays where it went, as it was written; the old content is in the set again."""
    directory, old = saved_by_alice(store)
    write_file(store, directory, b"shard-0", b"new")
    if linked:
        store.link(store.lookup(directory, b"shard-0").ino, 1, b"second")
    store.rename(directory, b"shard-0", 1, b"taken")
    store = back(store)
    assert tree(store, CHECKPOINT) == old
    if not linked:  # else its content belongs to the set through the other name
        assert read_file(store, find(store, b"taken").ino) == b"new"
    assert users


def test_a_log_by_its_name_keeps_its_last_lines(shop: Shop, store: Store, users: Users) -> None:
    """At an unmount in mid-save, while it is open and not published."""
    directory, old = saved_by_alice(store)
    write_file(store, directory, b"shard-0", b"half")
    log = open_writing(store, directory, b"train.log", b"begin;")
    store.fsync(log)
    store.write(log, 6, b"line;")
    store = shop.reopen(store, clean=True)
    assert tree(store, CHECKPOINT) == {**old, b"train.log": b"begin;line;"}
    assert users


def test_however_much_is_moved_in(shop: Shop, store: Store, users: Users) -> None:
    archive = directory_of(store, ALICE, b"archive")
    directory, old = saved_by_alice(store)
    names = [b"%d-" % number + b"n" * 200 for number in range(60)]
    for name in names:
        create(store, archive, name, ALICE, b"1")
    begin(store, directory)
    for name in names:
        store.rename(archive, name, directory, name)
    store = shop.reopen(store)
    assert set(tree(store, b"archive") or {}) == set(names)
    assert tree(store, CHECKPOINT) == old
    assert users


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", [Ending.ALIVE, Ending.WELL])
def test_a_half_written_unit_without_a_marker_at_the_end_of_the_mount(
    shop: Shop, store: Store, users: Users, ending: Ending
) -> None:
    directory = directory_of(store, ALICE, b"checkpoint_1")
    create(store, directory, b"model", ALICE, b"1")
    users.now += 11
    store.units.settle()
    assert open_count(store) == 0
    write_file(store, directory, b"model", b"2")
    users.endings["trainer"] = ending
    store = shop.reopen(store, clean=True)
    assert tree(store, b"checkpoint_1") == {b"model": b"1" if ending is Ending.ALIVE else b"2"}
