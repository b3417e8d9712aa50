"""Directories and files that a saver swaps, exchanges and moves through units that go back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop
from tests.support.stores import write_file
from tests.support.unit_scenes import MARKER, Writers, begin, find, make, remove_tree, tree

ONE, TWO = b"checkpoint-1", b"checkpoint-2"
Steps = Callable[[Store, int, int], object]
"""Of a store, the finished unit and the directory ``sub`` in it."""


def _new(store: Store, parent: int, name: bytes) -> int:
    directory = make(store, name, parent)
    write_file(store, directory, b"s1", b"NEW")
    return directory


def swapped(store: Store, one: int, _: int, *, removes: bool = False) -> None:
    _new(store, one, b"sub.new")
    store.rename(one, b"sub", one, b"sub.old")
    store.rename(one, b"sub.new", one, b"sub")
    if removes:
        remove_tree(store, one, b"sub.old")


def swapped_and_removed(store: Store, one: int, sub: int) -> None:
    swapped(store, one, sub, removes=True)


def exchanged_inside(store: Store, one: int, _: int) -> None:
    _new(store, one, b"sub2")
    store.rename(one, b"sub", one, b"sub2", exchange=True)
    remove_tree(store, one, b"sub2")


def out_and_back(store: Store, one: int, _: int) -> None:
    write_file(store, one, b"a", b"new")
    store.rename(one, b"sub", 1, b"t")
    store.rename(1, b"t", one, b"sub")


def out_and_removed(store: Store, one: int, _: int) -> None:
    write_file(store, one, b"a", b"new")
    store.rename(one, b"sub", 1, b"t")
    remove_tree(store, 1, b"t")


def exchanged_outside(store: Store, one: int, _: int) -> None:
    write_file(store, one, b"a", b"new")
    _new(store, 1, b"s")
    store.rename(1, b"s", one, b"sub", exchange=True)


def file_exchanged_twice(store: Store, one: int, _: int) -> None:
    write_file(store, one, b"a", b"NEW")
    for _time in range(2):
        store.rename(1, b"mine", one, b"a", exchange=True)


def renamed_over_in_what_came(store: Store, _one: int, _sub: int) -> None:
    two = make(store, TWO)
    write_file(store, two, b"a", b"new")
    store.rename(1, b"data", two, b"data")
    data = store.lookup(two, b"data").ino
    write_file(store, data, b"f.tmp", b"new")
    store.rename(data, b"f.tmp", data, b"f")


def between_two_units(store: Store, one: int, _: int) -> None:
    write_file(store, one, b"b", b"new")
    two = make(store, TWO)
    write_file(store, two, b"b", b"new")
    store.rename(one, b"a", two, b"a")


def through_two_units(store: Store, one: int, _: int) -> None:
    two = make(store, TWO)
    store.rename(1, b"mine", one, b"m")
    store.rename(one, b"m", two, b"m")


def one_temporary_name(store: Store, _one: int, _sub: int) -> None:
    two = make(store, TWO)
    for name in (b"a", b"b", b"c"):
        write_file(store, 1, b".tmp", name * 9)
        store.rename(1, b".tmp", two, name)
    write_file(store, 1, b".tmp", b"half")


@pytest.mark.parametrize(
    "steps",
    [
        swapped,
        swapped_and_removed,
        exchanged_inside,
        out_and_back,
        out_and_removed,
        exchanged_outside,
        file_exchanged_twice,
        renamed_over_in_what_came,
        between_two_units,
        through_two_units,
        one_temporary_name,
    ],
)
def test_all_is_as_it_was(shop: Shop, steps: Steps) -> None:
    """A crash before the marker."""
    store = shop.new(units=UnitsMode.AUTO)
    Writers(store)
    one = make(store, ONE)
    sub = make(store, b"sub", one)
    for directory, name in ((sub, b"s1"), (one, b"a"), (one, b"b"), (one, MARKER), (1, b"mine")):
        write_file(store, directory, name, b"old " + name)
    write_file(store, make(store, b"data"), b"f", b"only copy")
    before = tree(store, b"")
    begin(store, one)
    steps(store, one, sub)
    store = shop.reopen(store)
    after = tree(store, b"") or {}
    made = {path for path in after if not path.startswith((b".tmp", b"s/", b".cxlfs-sets/"))}
    assert {path: after[path] for path in made} == before
    assert find(store, ONE + b"/sub").ino == sub
    assert store.namespace.find(1, TWO) is None
