"""Bugs planted in history: the test that is meant for each must fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cxlfs.media import Granularity
from cxlfs.native.extents import Counting
from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.past import Past
from cxlfs.store.past_order import Order
from cxlfs.store.past_rows import Death
from tests.store import test_past
from tests.support.shop import Shop

Plant = Callable[[pytest.MonkeyPatch], None]


def deaths_missed(death: Death) -> Plant:
    """Deaths of one kind leave no row."""
    add = Past._add

    def plant(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Past, "_add", lambda p, row: None if row.death is death else add(p, row))

    return plant


def counted_as_aside(patch: pytest.MonkeyPatch) -> None:
    """History counts as what is kept aside: the image has its extents."""
    count = FileMap.count_as
    patch.setattr(FileMap, "count_as", lambda m, kind: count(m, min(kind, Counting.ASIDE)))


def newest_first(patch: pytest.MonkeyPatch) -> None:
    """The last row of a name goes as soon as the others."""
    patch.setattr(Order, "next", lambda order: next(reversed(order._last.values()), None))


def holds_ignored(patch: pytest.MonkeyPatch) -> None:
    """A held row is given back like any other."""
    patch.setattr(Past, "hold", lambda *_, **__: None)


def with_rng(test: Callable[[Store, random.Random], None]) -> Callable[[Store], None]:
    return lambda store: test(store, random.Random(5))


PLANTED: list[tuple[Plant, Callable[[Store], None]]] = [
    (deaths_missed(Death.OVERWRITTEN), test_past.test_an_overwrite_leaves_what_was_there),
    (
        deaths_missed(Death.OVERWRITTEN),
        test_past.test_an_exchange_publishes_and_leaves_what_that_replaced,
    ),
    (deaths_missed(Death.CHANGED), test_past.test_a_change_in_place_leaves_the_bytes_before),
    (deaths_missed(Death.REMOVED), test_past.test_the_last_name_leaves_everything),
    (deaths_missed(Death.RENAMED_OVER), test_past.test_a_rename_over_leaves_what_was_there),
    (counted_as_aside, with_rng(test_past.test_an_image_leaves_history_out)),
    (newest_first, test_past.test_the_oldest_goes_first_and_the_last_of_each_name_last),
    (
        holds_ignored,
        with_rng(test_past.test_the_cleaner_moves_what_is_held_and_forgets_what_is_past),
    ),
]


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_caught(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, test = PLANTED[number]
    test(Shop().new(granularity=Granularity.LINE))
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, AttributeError)):
        test(Shop().new(granularity=Granularity.LINE))
