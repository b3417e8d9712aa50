"""Stores of earlier programs, in which checkpoint units are open: copies lie in /.cxlfs-units."""

from __future__ import annotations

import json

import pytest

from cxlfs.format.operations import Operation, XattrSetOperation
from cxlfs.store import Store
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.old_units import BEFORE_XATTR, PLACE_NAME, UNITS_XATTR
from cxlfs.store.unit_record import PLACE_XATTR, POLICIES_XATTR, encode_policies, policy_rule
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import find, finish_work, make, shards, tree

SET = b"checkpoint-5"
ASIDE_XATTR = HIDDEN_PREFIX + b"aside"


@pytest.fixture
def store(shop: Shop, granularity: object) -> Store:
    """Without units: what such a program has written is made by hand."""
    return shop.new(granularity=granularity, units=UnitsMode.OFF)  # type: ignore[arg-type]


def say(store: Store, ino: int, name: bytes, value: bytes) -> None:
    ops: list[Operation] = [XattrSetOperation(ino, name, value)]
    store.volume.commit(ops)
    store.namespace.set_xattr(store.namespace.get(ino), name, value)


def open_unit(
    store: Store, *, copy: bool = True, together: bool = False, removed: bool = False
) -> tuple[dict[bytes, bytes], dict[bytes, bytes]]:
    """A directory that is half written over; what was there, and what is."""
    old, new = shards(1), {**shards(1), b"shard-0": b"half"}
    place = store.make_directory(1, PLACE_NAME, 0o700, 0, 0).ino
    say(store, place, PLACE_XATTR, b"1")
    before = 0
    if copy:
        before = make(store, SET + b".before-9", place)
        for name, data in old.items():
            write_file(store, before, name, data)
    directory = make(store, SET)
    for name, data in new.items():
        write_file(store, directory, name, data)
    if copy:
        value = json.dumps([1, SET.decode()]).encode() if removed else b"%d" % directory
        say(store, before, BEFORE_XATTR, value)
    if together:
        say(store, 1, UNITS_XATTR, json.dumps([[directory, before, 5]]).encode())
    else:
        value = json.dumps([before, 5, -1, [], []]).encode()
        say(store, 1, HIDDEN_PREFIX + b"unit-%d" % directory, value)
    if removed:
        for name in new:
            store.unlink(directory, name)
        store.remove_directory(1, SET)
    return old, new


@pytest.mark.parametrize("together", [False, True])
def test_what_was_there_is_back(shop: Shop, store: Store, together: bool) -> None:
    old, new = open_unit(store, together=together)
    for clean in (False, False, True):
        store = shop.reopen(store, clean=clean)
        assert tree(store, SET) == old
        assert tree(store, PLACE_NAME + b"/" + SET + b".incomplete") == new
        assert store.units.returns.left_open() == []
    assert store.recovery.open_units == 0
    handle = store.open_directory(1)
    assert PLACE_NAME in [entry.name for entry in store.read_directory(handle, 0)]
    store.release_directory(handle)


def test_a_new_directory_is_moved_away(shop: Shop, store: Store) -> None:
    _, new = open_unit(store, copy=False)
    store = shop.reopen(store)
    assert tree(store, SET) is None
    assert tree(store, PLACE_NAME + b"/" + SET + b".incomplete") == new


def test_what_was_removed_has_its_name_again(shop: Shop, store: Store) -> None:
    old, _ = open_unit(store, removed=True)
    store = shop.reopen(store)
    assert tree(store, SET) == old


def test_a_policy_stays_with_the_name(shop: Shop, store: Store) -> None:
    old, _ = open_unit(store)
    rules = {find(store, SET).ino: (policy_rule((b".",), (), None),)}
    say(store, 1, POLICIES_XATTR, encode_policies(rules))
    store = shop.reopen(store)
    assert tree(store, SET) == old
    assert [store.path_of(ino) for ino in store.units.policies.all()] == [b"/" + SET]


def test_copies_that_nobody_wants_go_away(shop: Shop, store: Store) -> None:
    """What went back there before stays: it is a user's."""
    place = store.make_directory(1, PLACE_NAME, 0o700, 0, 0).ino
    say(store, place, PLACE_XATTR, b"1")
    copy = make(store, b"run.before-3", place)
    write_file(store, copy, b"0", b"copied")
    say(store, copy, BEFORE_XATTR, b"3")
    back = make(store, b"run.incomplete-7", place)
    write_file(store, back, b"shard", b"half")
    say(store, back, ASIDE_XATTR, b'["/run", 7, "a writer was killed"]')
    store = shop.reopen(store)
    finish_work(store)
    assert tree(store, PLACE_NAME) == {b"run.incomplete-7/shard": b"half"}
    assert PLACE_XATTR not in (find(store, PLACE_NAME).xattrs or {})


def test_a_read_only_opening_changes_nothing(shop: Shop, store: Store) -> None:
    old, new = open_unit(store)
    store = shop.reopen(store, read_only=True)
    assert tree(store, SET) == new
    store = shop.reopen(store)
    assert tree(store, SET) == old


@pytest.mark.parametrize(
    "value",
    [b"[0,1,2,[],[],[]]", b"[1099511627776,1,-1,[],[]]", b'["x",1,-1,[],[]]', b"[1,1,-1,[],[]]",
     b"[" * 4000, b"null"],
)  # fmt: skip
def test_values_that_make_no_sense(shop: Shop, store: Store, value: bytes) -> None:
    directory = make(store, SET)
    ino = write_file(store, directory, b"shard", b"all of it")
    for each in (directory, ino, 1, 1 << 40):
        say(store, 1, HIDDEN_PREFIX + b"unit-%d" % each, value)
    store = shop.reopen(store)
    assert not store.read_only
    assert read_file(store, ino) == b"all of it"
