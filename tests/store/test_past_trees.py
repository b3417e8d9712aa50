"""A directory becomes what it was: as it was removed, or as of a commit."""

from __future__ import annotations

import random

import pytest

from cxlfs.errors import BusyError, ExistsError, NotFoundError, StaleError
from cxlfs.store import Store
from cxlfs.store.past_trees import BESIDE
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import Ending
from tests.support.shop import Shop, create
from tests.support.stores import read_file, write_file


def tree(store: Store, top: int) -> dict[bytes, bytes]:
    """Files and links below a directory, and what is in them; directories end with a slash."""
    found: dict[bytes, bytes] = {}
    for name, ino in (store.namespace.get(top).entries or {}).items():
        inode = store.namespace.get(ino)
        if inode.entries is not None:
            found[name + b"/"] = b""
            found |= {name + b"/" + below: data for below, data in tree(store, ino).items()}
        else:
            found[name] = inode.target or read_file(store, ino)
    return found


def make(store: Store, step: bytes, parent: int = 1) -> dict[bytes, bytes]:
    """A checkpoint of several files, in two directories."""
    top = store.make_directory(parent, b"step", 0o750, 3, 4).ino
    store.set_xattr(top, b"user.step", step)
    below = store.make_directory(top, b"ranks", 0o755, 0, 0).ino
    for directory, name in ((top, b"model"), (below, b"0"), (below, b"1")):
        write_file(store, directory, name, step + name * 9000)
    store.make_symlink(top, b"last", b"model", 0, 0)
    return tree(store, top)


def remove(store: Store, name: bytes = b"step") -> None:
    directory = store.namespace.get(1)
    while name in (directory.entries or {}):
        store.names.remove_leaf(directory, name)


def names(store: Store) -> set[bytes]:
    return {name for name in store.namespace.get(1).entries or {} if not name.startswith(b".")}


def bring_back(store: Store) -> list[int]:
    top = [row for row in store.past if row.name == b"step" and row.parent == 1][-1]
    return list(store.trees.bring_back(top, 1, b"step"))


def restore(store: Store, commit: int, name: bytes = b"step") -> list[int]:
    return list(store.trees.restore(b"/step", store.state_at(commit), 1, name))


@pytest.mark.parametrize("torn", [False, True], ids=["absent", "torn"])
def test_what_was_removed_takes_the_place_of_what_came_after(
    shop: Shop, store: Store, *, torn: bool
) -> None:
    """As with a saver that deletes first, and is killed in the middle of the next save."""
    good = make(store, b"1")
    remove(store)
    if torn:
        top = store.make_directory(1, b"step", 0o755, 0, 0).ino
        write_file(store, top, b"model", b"2, a part")
    assert max(bring_back(store)) == len(good) + 1
    replaced = [row for row in store.past if row.name == b"step." + BESIDE]
    assert len(replaced) == torn
    for _ in range(2):
        top = store.lookup(1, b"step")
        assert tree(store, top.ino) == good
        assert (top.mode & 0o7777, top.uid, top.gid) == (0o750, 3, 4)
        assert store.get_xattr(top.ino, b"user.step") == b"1"
        assert names(store) == {b"step"}
        store = shop.reopen(store) if not torn else store
    for row in replaced:
        list(store.trees.undelete(row))
        found = store.lookup(1, b"step." + BESIDE).ino
        assert tree(store, found) == {b"model": b"2, a part"}


def test_a_directory_becomes_what_it_was_at_a_commit(shop: Shop, store: Store) -> None:
    good = make(store, b"1")
    commit = store.volume.last_lsn
    top = store.lookup(1, b"step").ino
    write_file(store, top, b"model", b"NaN")
    write_file(store, top, b"new", b"new")
    store.names.remove_leaf(store.namespace.get(top), b"ranks")
    store.rename(top, b"last", top, b"former")
    after = tree(store, top)
    later = store.volume.last_lsn
    restore(store, commit)
    assert tree(store, store.lookup(1, b"step").ino) == good
    restore(store, later, b"other")
    restore(store, later)
    store = shop.reopen(store)
    for name in (b"step", b"other"):
        assert tree(store, store.lookup(1, name).ino) == after
    assert names(store) == {b"step", b"other"}


@pytest.mark.parametrize("taken", [1, 2, 3, 4, 20, 46])
def test_the_name_means_the_one_or_the_other_after_each_step(
    shop: Shop, store: Store, taken: int
) -> None:
    good = make(store, b"1")
    commit = store.volume.last_lsn
    top = store.lookup(1, b"step").ino
    for number in range(40):
        write_file(store, top, b"%02d" % number, b"2" * 5000)
    now = tree(store, top)
    steps = store.trees.restore(b"/step", store.state_at(commit), 1, b"step")
    for _ in range(taken):
        next(steps)
    steps.close()
    store = shop.reopen(store)
    assert tree(store, store.lookup(1, b"step").ino) == (now if taken < 3 else good)
    assert names(store) <= {b"step", b"step." + BESIDE}


def test_a_directory_that_is_written_in_stays(store: Store) -> None:
    make(store, b"1")
    commit = store.volume.last_lsn
    top = store.lookup(1, b"step").ino
    _, handle = create(store, b"open", parent=top)
    before = names(store)
    with pytest.raises(BusyError):
        restore(store, commit)
    assert names(store) == before
    restore(store, commit, b"other")
    store.release(handle)
    restore(store, commit)


def test_a_unit_whose_writer_has_ended_is_replaced(shop: Shop, store: Store) -> None:
    """Left by a handler of signals that exits with 0: the store would wait for its next file."""
    make(store, b"1")
    commit = store.volume.last_lsn
    top = store.lookup(1, b"step").ino
    store.units.set_policy(store.namespace.get(1), (policy_rule((b"step",), (b"done",), None),))
    store.units.writer = lambda: b"saver"
    store.units.ending_of = lambda _writer: Ending.ALIVE
    write_file(store, top, b"model", b"2")
    assert store.units.has_open
    with pytest.raises(BusyError):
        restore(store, commit)
    store.units.ending_of = lambda _writer: Ending.WELL
    restore(store, commit)
    assert not store.units.has_open
    store = shop.reopen(store)
    assert read_file(store, store.lookup(store.lookup(1, b"step").ino, b"model").ino)[:1] == b"1"


def test_what_is_not_known_whole_changes_nothing(store: Store, rng: random.Random) -> None:
    make(store, b"1")
    commit = store.volume.last_lsn
    top = store.lookup(1, b"step").ino
    write_file(store, top, b"model", rng.randbytes(9000))
    after = tree(store, top)
    store.history.forget([row for row in store.past if row.name == b"model"])
    with pytest.raises((StaleError, NotFoundError)):
        restore(store, commit)
    assert tree(store, store.lookup(1, b"step").ino) == after
    assert names(store) == {b"step"}
    with pytest.raises(NotFoundError):
        restore(store, commit - 30)


def test_a_file_of_that_name_is_not_replaced(store: Store) -> None:
    make(store, b"1")
    commit = store.volume.last_lsn
    write_file(store, 1, b"file", b"x")
    with pytest.raises(ExistsError):
        restore(store, commit, b"file")


def test_a_unit_around_the_directory_is_asked_too(store: Store) -> None:
    top = store.make_directory(1, b"runs", 0o755, 0, 0).ino
    make(store, b"1", top)
    commit = store.volume.last_lsn
    state = store.state_at(commit)
    store.units.set_policy(store.namespace.get(1), (policy_rule((b"runs",), (b"done",), None),))
    store.units.writer = lambda: b"saver"
    store.units.ending_of = lambda _writer: Ending.ALIVE
    write_file(store, top, b"other", b"2")
    assert store.units.has_open
    with pytest.raises(BusyError):
        list(store.trees.restore(b"/runs/step", state, top, b"step"))
    store.units.ending_of = lambda _writer: Ending.WELL
    list(store.trees.restore(b"/runs/step", state, top, b"step"))


def test_a_whole_mount_comes_back_beside(store: Store) -> None:
    good = make(store, b"1")
    list(store.trees.restore(b"/", store.state_at(store.volume.last_lsn), 1, b"before"))
    made = store.lookup(store.lookup(1, b"before").ino, b"step").ino
    assert tree(store, made) == good
