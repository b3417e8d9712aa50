"""What belongs to a checkpoint unit, and what stays as it is when the unit goes back."""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import UNITS_MAX, policy_rule
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    find,
    finish_work,
    in_history,
    open_count,
    open_writing,
    save,
    shards,
    tree,
)
from tests.support.unit_users import (
    ALICE,
    BOB,
    Back,
    Users,
    append,
    become,
    create,
    dcp,
    directory_of,
    saved_by_alice,
)


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


# --- logs -----------------------------------------------------------------------------------------

LOGS = [b"train.log", b"events.out.tfevents.1", b"metrics.csv", b"x.jsonl", b"opt.db", b"a.db-wal"]


@pytest.mark.parametrize("name", LOGS)
def test_a_log_by_its_name_keeps_no_unit_open(store: Store, users: Users, name: bytes) -> None:
    """Held open and written all the time, in the directory that is saved to."""
    directory = directory_of(store, ALICE, b"run")
    log = open_writing(store, directory, name, b"first line")
    files = dcp(store, directory, b"1")
    store.write(log, 10, b"second line")
    files = dcp(store, directory, b"2")
    assert open_count(store) == 0
    store.write(log, 21, b"third line")
    assert open_count(store) == 0
    users.endings["trainer"] = Ending.KILLED
    store.units.settle()
    close(store, log)
    assert tree(store, b"run") == {**files, name: b"first linesecond linethird line"}


@pytest.mark.parametrize("how", ["appended to", "open before"])
def test_a_log_of_any_name_keeps_no_unit_open(store: Store, users: Users, how: str) -> None:
    directory = directory_of(store, ALICE, b"run")
    if how == "appended to":
        log = append(store, directory, b"progress", b"1")
    else:
        log = open_writing(store, directory, b"progress", b"1")
    for letter in (b"1", b"2"):
        files = dcp(store, directory, letter)
        store.write(log, 1, b"2")
        assert open_count(store) == 0
    users.endings["trainer"] = Ending.KILLED
    store.units.settle()
    close(store, log)
    assert tree(store, b"run") == {**files, b"progress": b"12"}


def test_a_file_that_lay_open_before_a_policys_unit(store: Store, users: Users) -> None:
    """It belongs to it, unless it is still open when the marker comes."""
    directory = directory_of(store, ALICE, b"run")
    rules = (policy_rule((b".",), (MARKER,), None),)
    write_file(store, directory, b"map", b"old")
    store.units.set_policy(store.namespace.get(directory), rules)
    handle = store.open_file(find(store, b"run/map").ino, os.O_RDWR)
    create(store, directory, b"shard", ALICE, b"1")
    store.write(handle, 0, b"new")
    assert open_count(store) == 1
    create(store, directory, MARKER, ALICE, b"{}")
    assert open_count(store) == 0
    store.write(handle, 3, b"er")
    assert open_count(store) == 0
    close(store, handle)
    assert users


@pytest.mark.parametrize("name", [*LOGS[:2], b"progress"])
def test_the_lines_of_a_log_stay(store: Store, users: Users, back: Back, name: bytes) -> None:
    directory = directory_of(store, ALICE, b"run")
    log = append(store, directory, name, b"1")
    old = dcp(store, directory, b"a")
    write_file(store, directory, b"__0_0.distcp", b"half of the next")
    assert open_count(store) == 1
    close(store, log)
    log = append(store, directory, name, b"2")
    store.write(log, 2, b"3")
    store.fsync(log)
    close(store, log)
    store = back(store)
    assert tree(store, b"run") == {**old, name: b"123"}
    assert open_count(store) == 0
    assert users


def test_a_log_that_is_not_committed_stays(shop: Shop, store: Store, users: Users) -> None:
    """Its writer lives; the saver was killed."""
    shop.directory_times = False
    directory = directory_of(store, ALICE, b"run")
    old = dcp(store, directory, b"a")
    write_file(store, directory, b"__0_0.distcp", b"half of the next")
    log = open_writing(store, directory, b"train.log", b"line")
    users.endings["trainer"] = Ending.KILLED
    store.units.settle()
    assert tree(store, b"run") == {**old, b"train.log": b"line"}
    close(store, log)
    finish_work(store)
    assert tree(store, b"run") == {**old, b"train.log": b"line"}


def test_a_log_below_other_directories_stays(store: Store, users: Users, back: Back) -> None:
    directory = directory_of(store, ALICE, CHECKPOINT)
    old = save(store, directory, shards(1))
    below = directory_of(store, ALICE, b"new", directory)
    wandb = directory_of(store, ALICE, b"wandb", directory)
    create(store, below, b"a.log", ALICE, b"log")
    create(store, below, b"shard", ALICE, b"shard")
    create(store, wandb, b"run.bin", ALICE, b"run")
    assert open_count(store) == 1
    store = back(store)
    assert tree(store, CHECKPOINT) == {**old, b"new/a.log": b"log", b"wandb/run.bin": b"run"}
    assert users


def test_a_log_that_was_removed_or_renamed(store: Store, users: Users, back: Back) -> None:
    directory = directory_of(store, ALICE, CHECKPOINT)
    create(store, directory, b"a.log", ALICE, b"a")
    create(store, directory, b"b.log", ALICE, b"b")
    old = save(store, directory, shards(1))
    assert open_count(store) == 0
    write_file(store, directory, b"shard-0", b"half")
    store.unlink(directory, b"a.log")
    store.rename(directory, b"b.log", directory, b"b.log.1")
    create(store, directory, b"b.log", ALICE, b"next")
    store = back(store)
    assert tree(store, CHECKPOINT) == {**old, b"b.log": b"next", b"b.log.1": b"b"}
    assert users


def test_a_policy_that_names_a_log_means_it(store: Store, users: Users, back: Back) -> None:
    directory = directory_of(store, ALICE, b"run")
    write_file(store, directory, b"best.csv", b"old")
    rules = (policy_rule((b".",), (b"best.csv",), None),)
    store.units.set_policy(store.namespace.get(directory), rules)
    write_file(store, directory, b"best.csv", b"new")
    assert open_count(store) == 1
    store = back(store)
    assert tree(store, b"run") == {b"best.csv": b"old"}
    assert users


def test_a_new_directory_goes_with_its_logs(store: Store, users: Users, back: Back) -> None:
    """One of logs alone would be taken for the newest checkpoint."""
    directory = directory_of(store, ALICE, CHECKPOINT)
    create(store, directory, b"shard", ALICE, b"shard")
    create(store, directory, b"a.log", ALICE, b"log")
    store = back(store)
    assert tree(store, CHECKPOINT) is None
    for name in (b"shard", b"a.log"):
        assert in_history(store, name) == [b"shard" if name == b"shard" else b"log"]
    assert users


# --- users ----------------------------------------------------------------------------------------


def test_a_rule_acts_for_the_owner_alone(store: Store, users: Users) -> None:
    """A name in the shared directory of others makes it no unit; a policy does."""
    shared = directory_of(store, 0, b"shared")
    become(users, BOB)
    create(store, shared, b"__0_0.distcp", BOB, b"half")
    assert open_count(store) == 0
    store.make_directory(1, b"checkpoint-3", 0o777, BOB, BOB)
    assert open_count(store) == 1
    users.endings[BOB] = Ending.KILLED
    store.units.settle()
    users.endings.clear()
    rules = (policy_rule((b"shared",), (), None),)
    store.units.set_policy(store.namespace.get(1), rules)
    create(store, shared, b"more", BOB, b"half")
    assert open_count(store) == 1
    users.endings[BOB] = Ending.WELL
    store.units.settle()


def test_the_files_of_other_users_stay(store: Store, users: Users, back: Back) -> None:
    """New ones, changed ones, whole directories, and what they removed; nothing of them is lost."""
    directory = directory_of(store, BOB, b"run")
    become(users, BOB)
    old = dcp(store, directory, b"b", BOB)
    alices = directory_of(store, ALICE, b"alice", directory)
    for name in (b"model.pt", b"gone.pt", b"same.pt"):
        create(store, directory, b"a-" + name, ALICE, b"1")
        create(store, alices, name, ALICE, b"1")
    finish_work(store)
    write_file(store, directory, b"__0_0.distcp", b"half")
    made = directory_of(store, BOB, b"made", directory)
    assert open_count(store) == 1
    become(users, ALICE)
    write_file(store, directory, b"a-model.pt", b"2")
    write_file(store, alices, b"model.pt", b"2")
    create(store, alices, b"new.pt", ALICE, b"new")
    create(store, made, b"deep.pt", ALICE, b"deep")
    store.unlink(directory, b"a-gone.pt")
    store.unlink(alices, b"gone.pt")
    become(users, BOB)
    store = back(store)
    assert tree(store, b"run") == {
        **old,
        b"a-model.pt": b"2",
        b"a-same.pt": b"1",
        b"alice/model.pt": b"2",
        b"alice/same.pt": b"1",
        b"alice/new.pt": b"new",
        b"made/deep.pt": b"deep",
    }
    assert b"half" in in_history(store, b"__0_0.distcp")
    assert find(store, b"run/alice").ino == alices


def test_what_another_user_wrote_into_a_file_stays(store: Store, users: Users, back: Back) -> None:
    directory, old = saved_by_alice(store)
    write_file(store, directory, b"shard-0", b"half")
    become(users, BOB)
    write_file(store, directory, b"shard-1", b"by bob")
    become(users, ALICE)
    store = back(store)
    assert tree(store, CHECKPOINT) == {**old, b"shard-1": b"by bob"}


def test_a_new_directory_stays_for_what_others_have_in_it(
    store: Store, users: Users, back: Back
) -> None:
    become(users, BOB)
    directory = directory_of(store, BOB, CHECKPOINT)
    create(store, directory, b"shard", BOB, b"half")
    below = directory_of(store, BOB, b"below", directory)
    become(users, ALICE)
    create(store, below, b"new.pt", ALICE, b"alice's")
    become(users, BOB)
    store = back(store)
    assert tree(store, CHECKPOINT) == {b"below/new.pt": b"alice's"}
    assert in_history(store, b"shard") == [b"half"]


def test_many_files_of_others_stay(store: Store, users: Users, back: Back) -> None:
    """More than one record holds."""
    directory = directory_of(store, BOB, b"run")
    become(users, BOB)
    old = dcp(store, directory, b"b", BOB)
    write_file(store, directory, b"__0_0.distcp", b"half")
    become(users, ALICE)
    names = [b"%d-" % number + b"n" * 200 for number in range(150)]
    for name in names:
        create(store, directory, name, ALICE, b"1")
    become(users, BOB)
    store = back(store)
    assert tree(store, b"run") == {**old, **dict.fromkeys(names, b"1")}


def test_another_users_process_keeps_no_unit_open(shop: Shop, store: Store, users: Users) -> None:
    shop.directory_times = False
    directory, old = saved_by_alice(store)
    write_file(store, directory, b"shard-0", b"half")
    become(users, BOB)
    handle = store.create(directory, b"notes", 0o644, BOB, BOB, os.O_RDWR)[1]
    store.write(handle, 0, b"notes")
    users.endings["trainer"] = Ending.KILLED
    store.units.settle()
    assert open_count(store) == 0
    close(store, handle)
    assert tree(store, CHECKPOINT) == {**old, b"notes": b"notes"}


def test_the_limit_is_each_users(shop: Shop, store: Store, users: Users) -> None:
    """Beyond it that user's oldest stays as it is written; others are protected all the same."""
    become(users, BOB)
    for number in range(UNITS_MAX + 1):
        directory = directory_of(store, BOB, b"checkpoint-%d" % number)
        open_writing(store, directory, b"a", b"half")
    assert open_count(store) == UNITS_MAX
    assert [event.kind for event in shop.events] == ["unprotected"]
    assert store.units.unit_of(find(store, b"checkpoint-0")) is None
    become(users, ALICE)
    made = directory_of(store, ALICE, b"alice")
    directory = directory_of(store, ALICE, CHECKPOINT + b"0", made)
    create(store, directory, b"shard", ALICE, b"half")
    assert open_count(store) == UNITS_MAX + 1
    store = shop.reopen(store)
    assert tree(store, b"alice") == {}
    assert tree(store, b"checkpoint-1") is None
