"""What saving in a checkpoint unit calls beyond saving outside of one: little, for each file."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from tests.support.counting import count_calls
from tests.support.shop import Shop
from tests.support.stores import write_file
from tests.support.unit_scenes import MARKER, Writers, finish_work, make, open_count

FILES = 100
Save = Callable[[Store, int, bytes], object]


def plain(store: Store, directory: int, name: bytes) -> None:
    write_file(store, directory, name, b"x" * 5000)


def by_rename(store: Store, directory: int, name: bytes) -> None:
    plain(store, directory, name + b".tmp")
    store.rename(directory, name + b".tmp", directory, name)


def whole(store: Store, directory: int, save: Save) -> None:
    for number in range(FILES):
        save(store, directory, b"shard-%d" % number)
    save(store, directory, MARKER)


DEPTH = 6


def deep(shop: Shop, *, policy: bytes | None) -> tuple[Store, int]:
    """A store with a directory some levels down, and with a policy for those in ``policy``."""
    store = shop.new(32 << 20)
    Writers(store)
    made = 1
    for name in (b"runs", *(b"%d" % depth for depth in range(DEPTH - 1))):
        made = make(store, name, made)
    other = make(store, b"other")
    if policy is not None:
        top = store.lookup(1, b"runs").ino if policy == b"runs" else other
        rules = (policy_rule((b"checkpoint-*",), (MARKER,), None),)
        store.units.set_policy(store.namespace.get(top), rules)
    return store, make(store, b"checkpoint-1", made)


def count_save(shop: Shop, save: Save, *, policy: bytes | None, again: bool) -> int:
    store, directory = deep(shop, policy=policy)
    if again:
        whole(store, directory, save)
        finish_work(store)
    assert open_count(store) == (policy == b"runs" and not again)
    calls = count_calls(lambda: whole(store, directory, save))
    assert open_count(store) == 0
    return calls


@pytest.mark.parametrize(
    ("save", "again", "in_a_unit", "beside_units"),
    [
        (plain, False, 40, 20),
        (plain, True, 242, 25),
        (by_rename, False, 90, 40),
        (by_rename, True, 205, 36),
    ],
)
def test_saving_a_file_takes_few_calls_more(
    shop: Shop, save: Save, in_a_unit: int, beside_units: int, *, again: bool
) -> None:
    """Than without any policy, where it takes 350 to 650; over an old set what is kept of that
    is among them.
    """
    without = count_save(shop, save, policy=None, again=again)
    beside = count_save(shop, save, policy=b"other", again=again)
    inside = count_save(shop, save, policy=b"runs", again=again)
    assert beside - without <= beside_units * FILES
    assert inside - without <= in_a_unit * FILES


def test_what_was_kept_takes_few_calls_to_remove(shop: Shop) -> None:
    """To remove it, for each file."""
    store, directory = deep(shop, policy=b"runs")
    for _ in range(2):
        whole(store, directory, plain)
    assert count_calls(lambda: finish_work(store)) <= 115 * FILES


@pytest.mark.parametrize("policy", [b"runs", b"other"])
def test_where_a_directory_lies_is_looked_up_once(shop: Shop, policy: bytes) -> None:
    """And not for each change in it."""
    store, directory = deep(shop, policy=policy)
    whole(store, directory, by_rename)
    finish_work(store)
    before = store.units.places.searches
    whole(store, directory, by_rename)
    assert store.units.places.searches - before <= 8
