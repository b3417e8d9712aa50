"""Bugs planted in history: the test that is meant for each must fail."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from cxlfs.media import Granularity
from cxlfs.native.extents import Counting
from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store.namespace import Namespace
from cxlfs.store.past import Past
from cxlfs.store.past_order import Order
from cxlfs.store.past_rows import Death
from cxlfs.store.past_state import Fact, PastState
from tests.store import test_past, test_past_state, test_pins
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


def names_from_the_beginning(patch: pytest.MonkeyPatch) -> None:
    """An inode had its name all the time."""
    patch.setattr(Namespace, "named_since", lambda *_: 0)


def renames_missed(patch: pytest.MonkeyPatch) -> None:
    """The old name of what was renamed is not known."""
    patch.setattr(Past, "name_ended", lambda *_: None)


def ends_missed(patch: pytest.MonkeyPatch) -> None:
    """A version that was replaced is the content until now."""
    patch.setattr(PastState, "_died", lambda _s, ino, rows: Fact(ino, rows[0], rows[0].data))


def newest_content(patch: pytest.MonkeyPatch) -> None:
    """A state has contents that were published later."""

    def living(state: PastState, ino: int) -> Fact | None:
        inode = state._namespace.inodes.get(ino)
        has_it = inode is not None and inode.links and not inode.uncommitted
        return Fact(ino, inode, inode.committed_content) if inode and has_it else None

    patch.setattr(PastState, "_living", living)


def everybody_pins(patch: pytest.MonkeyPatch) -> None:
    """What others own is pinned, too."""
    patch.setattr(Fact, "uid", property(lambda _fact: test_pins.USER))


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
    (names_from_the_beginning, with_rng(test_past_state.test_a_plain_life_is_shown_whole)),
    (renames_missed, with_rng(test_past_state.test_a_plain_life_is_shown_whole)),
    (ends_missed, with_rng(test_past_state.test_a_plain_life_is_shown_whole)),
    (newest_content, with_rng(test_past_state.test_a_plain_life_is_shown_whole)),
    (everybody_pins, test_pins.test_what_is_anothers_is_left_out),
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
