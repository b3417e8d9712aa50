"""What others do in a checkpoint directory while a save is on its way: each kind that the random
histories of users found.
"""

from __future__ import annotations

import os

import pytest

from cxlfs.store import Store
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import TornMode
from cxlfs.store.unit_rules import QUIET_UNMARKED_SECONDS, Ending, UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
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
    DCP,
    Back,
    Users,
    become,
    create,
    dcp,
    directory_of,
    saved_by_alice,
)

METADATA = b".metadata"


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO, torn=TornMode.BACK)


def opened(store: Store, directory: int, name: bytes, data: bytes) -> int:
    """A handle of alice on a new file."""
    handle = store.create(directory, name, 0o644, ALICE, ALICE, os.O_RDWR)[1]
    store.write(handle, 0, data)
    return handle


def killed(store: Store) -> None:
    """All writers are."""
    store.units.ending_of = lambda _writer: Ending.KILLED
    store.units.settle()
    finish_work(store)


def shards_of(store: Store, directory: int) -> None:
    """A save without its marker."""
    for name, data in DCP.items():
        create(store, directory, name, ALICE, data)


# --- what has no name -----------------------------------------------------------------------------


def test_a_marker_that_was_removed_before_it_was_closed_is_none(store: Store, users: Users) -> None:
    directory = directory_of(store, ALICE, b"step-1")
    store.units.savers.is_one = lambda *_: True  # type: ignore[method-assign]
    shards_of(store, directory)
    handle = opened(store, directory, METADATA, b"of this save")
    store.fsync(handle)
    become(users, BOB)
    store.unlink(directory, METADATA)
    become(users, ALICE)
    store.fsync(handle)
    close(store, handle)
    store.units.settle()
    assert open_count(store) == 1
    killed(store)
    assert not tree(store, b"step-1")


@pytest.mark.parametrize("names", [1, 2])
def test_a_version_that_is_held_goes_to_history_with_its_file(
    store: Store, users: Users, back: Back, names: int
) -> None:
    """Of a file that was made in the set, overwritten there, and goes with it."""
    directory = directory_of(store, ALICE, CHECKPOINT)
    ino = create(store, directory, b"model", ALICE, b"first")
    write_file(store, directory, b"model", b"second")
    if names > 1:
        store.link(ino, directory, b"other")
    assert store.namespace.get(ino).held is not None
    store = back(store)
    assert not tree(store, CHECKPOINT)
    found = in_history(store, b"model") + in_history(store, b"other")
    assert sorted(found) == [b"first", b"second"]
    assert users


# --- others ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["as it is", "renamed", "linked"])
def test_a_file_of_others_that_the_owner_of_the_directory_removes_is_removed(
    store: Store, users: Users, how: str
) -> None:
    """It belongs to no save: with whatever names it got meanwhile, it is in history."""
    directory, old = saved_by_alice(store)
    become(users, BOB)
    ino = create(store, directory, b"of-bob", BOB, b"of bob")
    become(users, ALICE)
    write_file(store, directory, b"shard-0", b"half")
    become(users, BOB)
    if how == "renamed":
        store.rename(directory, b"of-bob", directory, b"other")
    elif how == "linked":
        store.link(ino, directory, b"other")
    become(users, ALICE)
    for name in {b"of-bob", b"other"} & store.namespace.directory(directory).entries.keys():
        store.unlink(directory, name)
    last = b"of-bob" if how == "as it is" else b"other"
    killed(store)
    assert tree(store, CHECKPOINT) == old
    assert b"of bob" in in_history(store, b"of-bob") + in_history(store, last)


@pytest.mark.parametrize("has_other", [False, True])
def test_what_was_in_a_removed_directory_of_others_has_one_name(
    store: Store, users: Users, back: Back, has_other: bool
) -> None:
    """That directory stays removed. What alice had in it alone is above; what had a name in the
    checkpoint too has that one again, and none besides.
    """
    top = directory_of(store, ALICE, b"run")
    directory = directory_of(store, ALICE, CHECKPOINT, top)
    old = save(store, directory, shards(1))
    below = directory_of(store, BOB, b"of-bob", directory)
    if has_other:
        store.link(find(store, b"run/checkpoint-5/shard-0").ino, below, b"mine")
    else:
        create(store, below, b"mine", ALICE, b"mine")
    users.now += 60
    store.units.settle()
    finish_work(store)
    store.unlink(below, b"mine")
    store.remove_directory(directory, b"of-bob")
    store.unlink(directory, b"shard-0")
    assert open_count(store) == 1
    store = back(store)
    want = {b"checkpoint-5/" + name: data for name, data in old.items()}
    assert tree(store, b"run") == (want if has_other else {**want, b"mine": b"mine"})
    assert users


# --- when a save is over --------------------------------------------------------------------------


def test_a_directory_does_not_lie_beside_itself(store: Store, users: Users) -> None:
    """Its marker is an old one, so nothing is decided: not that its own is missing either."""
    create(store, 1, b"old", ALICE, b"of another save")
    directory = directory_of(store, ALICE, b"step-1")
    shards_of(store, directory)
    write_file(store, directory, b"__0_0.distcp", b"a" * 900)
    store.link(find(store, b"old").ino, directory, METADATA)
    users.endings[ALICE] = users.endings["trainer"] = Ending.WELL
    store.units.settle()
    assert open_count(store) == 1
    users.now += 60
    store.units.settle()
    assert open_count(store) == 0
    assert (tree(store, b"step-1") or {}).items() >= DCP.items()


def test_what_a_killed_writer_leaves_is_a_change(store: Store, users: Users) -> None:
    """Nothing is decided on its account while another writer may go on."""
    directory = directory_of(store, ALICE, b"checkpoint_2")
    users.present = "killed"
    handle = opened(store, directory, b"model", b"half")
    users.present = "lives"
    create(store, directory, b"other", ALICE, b"other")
    users.now += QUIET_UNMARKED_SECONDS + 1
    users.present = "killed"
    close(store, handle, killed=True)
    users.endings["killed"] = Ending.KILLED
    store.units.settle()
    assert open_count(store) == 1
    users.now += QUIET_UNMARKED_SECONDS + 1
    store.units.settle()
    finish_work(store)
    assert not tree(store, b"checkpoint_2")


def test_an_overwrite_that_has_begun_begins_no_unit_later(
    shop: Shop, store: Store, users: Users
) -> None:
    """It was open before: what is fsynced after the save is over stays after a crash."""
    directory = directory_of(store, ALICE, b"run")
    dcp(store, directory, b"a")
    users.present = "another program"
    write_file(store, directory, b"__1_0.distcp", b"next")
    become(users, BOB)
    write_file(store, directory, b"__0_0.distcp", b"by bob")
    become(users, ALICE)
    handle = open_writing(store, directory, b"__0_0.distcp", b"by ")
    users.now += 60
    store.units.settle()
    assert open_count(store) == 0
    store.write(handle, 3, b"alice")
    store.fsync(handle)
    assert open_count(store) == 0
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert (tree(store, b"run") or {})[b"__0_0.distcp"] == b"by alice"


def test_a_size_that_was_cut_is_torn_for_the_judge(store: Store, users: Users) -> None:
    """A writer that is killed behind an fsync leaves what it fsynced: its bytes are judged."""
    create(store, 1, b"model.pt", ALICE, b"whole")
    store.overwrites.writer = lambda: "saver"
    store.overwrites.ending_of = lambda _writer: Ending.KILLED
    store.overwrites.clock = lambda: users.now
    handle = open_writing(store, 1, b"model.pt", b"40")
    store.fsync(handle)
    store.write(handle, 2, b"|the rest")
    close(store, handle, killed=True)
    users.now += 1
    question = store.overwrites.next_question()
    assert question is not None
    assert question.read("new", 0, question.new_bytes) == b"40"
    store.overwrites.judged(question, Evidence.STRONG, "it is cut")
    store.overwrites.settle()
    inode = find(store, b"model.pt")
    assert bytes(inode.content.read(0, inode.content.size)) == b"whole"
