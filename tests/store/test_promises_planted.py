"""Bugs planted in history, in torn overwrites and in sets: what a user sees must show each.

None of them is in how a set remembers what was there before.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cxlfs.errors import CorruptionError
from cxlfs.native.extents import Counting
from cxlfs.native.maps import FileMap
from cxlfs.store import Store, names, past_loading, unit_markers, unit_members, unit_rules
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import Overwrites, TornMode
from cxlfs.store.past import Past
from cxlfs.store.past_archive import Archive
from cxlfs.store.past_rows import Row
from cxlfs.store.unit_rules import Ending, UnitsMode
from cxlfs.store.versions import Versions
from tests.store import (
    test_overwrites,
    test_past,
    test_past_archive,
    test_unit_members,
    test_unit_moves,
    test_units,
)
from tests.support.shop import Shop
from tests.support.unit_scenes import finish_work
from tests.support.unit_users import Users

CAUGHT = (AssertionError, ValueError, CorruptionError, pytest.fail.Exception)
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
Check = Callable[[Shop], None]


# --- what a check needs ---------------------------------------------------------------------------


def of_store(test: Callable[[Store], None]) -> Check:
    return lambda shop: test(shop.new())


def of_trial(test: Callable[[test_overwrites.Trial], None]) -> Check:
    return lambda shop: test(test_overwrites.Trial(shop, shop.new(torn=TornMode.BACK)))


def of_users(test: Callable[..., None], **more: object) -> Check:
    """A test over two users; what is open goes back by a crash."""

    def check(shop: Shop) -> None:
        def back(store: Store) -> Store:
            store = shop.reopen(store, units=UnitsMode.AUTO)
            finish_work(store)
            return store

        store = shop.new(units=UnitsMode.AUTO)
        wanted = {"store": store, "users": Users(store), "back": back, "shop": shop, **more}
        named = test.__code__.co_varnames[: test.__code__.co_argcount]
        test(**{name: wanted[name] for name in named})

    return check


def a_cut_leaves_what_was_there(shop: Shop) -> None:
    store = shop.new()
    ino = test_past.write_file(store, 1, b"a", b"x" * 9000)
    store.set_attributes(ino, size=100)
    assert [test_past.data_of(row) for row in store.past] == [b"x" * 9000]


# --- history --------------------------------------------------------------------------------------


def changed(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """``change`` is called with the original and its arguments."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **more: change(original, *args, **more))


def row_of_the_next_record(patch: Patch) -> None:
    """A row says that its content died in the record behind."""

    def later(replaced: Any, past: Past, inode: Any, key: Any, *rest: Any, **more: Any) -> None:
        replaced(past, inode, (key[0] + 1, key[1]), *rest, **more)

    changed(patch, Past, "replaced", later)


def one_row_too_many(patch: Patch) -> None:
    """With the row that is given back the next one goes."""

    def two(forget: Any, past: Past, row: Row) -> None:
        forget(past, row)
        following = past.order.next()
        if following is not None:
            forget(past, following)

    changed(patch, Past, "forget", two)


def pinned_given_up(patch: Patch) -> None:
    """A write that finds no room takes what is pinned."""

    def any_held(past: Past) -> Row | None:
        return min((row for rows in past._held.values() for row in rows), default=None)

    patch.setattr(Past, "oldest_held", any_held)


def past_counted_as_used(patch: Patch) -> None:
    changed(
        patch,
        FileMap,
        "count_as",
        lambda count, content, kind: count(
            content, Counting.HELD if kind is Counting.PAST else kind
        ),
    )


def cuts_missed(patch: Patch) -> None:
    """A change of the size alone leaves no row."""
    changed(
        patch,
        Past,
        "wants",
        lambda wants, past, inode, delta: delta.references and wants(past, inode, delta),
    )


def append_taken_for_a_change(patch: Patch) -> None:
    patch.setattr(Past, "wants", lambda _past, inode, _delta: bool(inode.commit_lsn))


def rows_without_their_epoch(patch: Patch) -> None:
    """An opening believes rows whose segments were used again."""
    patch.setattr(
        past_loading.Loader,
        "_whole_rows",
        lambda _loader, batch, _firsts: np.ones(len(batch.rows), np.bool_),
    )


def erased_in_memory_alone(patch: Patch) -> None:
    """What is forgotten is on the media still."""
    patch.setattr(Archive, "erase", lambda *_: None)


def held_version_gone_with_its_name(patch: Patch) -> None:
    patch.setattr(names, "last_of", lambda *_: [])


def two_rows_with_one_key(patch: Patch) -> None:
    changed(
        patch,
        Versions,
        "end_aside",
        lambda end, versions, inode, key, time_ns: end(
            versions, inode, (key[0], key[1] - 1), time_ns
        ),
    )


def held_version_there_too_long(patch: Patch) -> None:
    """``restore --at`` takes the end of a row for the end of its content."""
    patch.setattr(Row, "was_there", lambda row, commit: row.born_lsn <= commit < row.died_lsn)


# --- torn overwrites ------------------------------------------------------------------------------


def whole_taken_back(patch: Patch) -> None:
    """Every file that replaced another one counts as torn."""
    changed(
        patch,
        Overwrites,
        "judged",
        lambda judged, overwrites, question, _evidence, reason: judged(
            overwrites, question, Evidence.STRONG, reason
        ),
    )


def torn_kept_at_recovery(patch: Patch) -> None:
    patch.setattr(Overwrites, "_find_left", lambda _overwrites: None)


def judged_while_it_is_written(patch: Patch) -> None:
    patch.setattr(Overwrites, "_is_at_rest", lambda *_: True)


def decided_while_a_second_writer_lives(patch: Patch) -> None:
    changed(
        patch,
        Overwrites,
        "_endings",
        lambda endings, *args: endings(*args) - {Ending.ALIVE} or {Ending.ALIVE},
    )


def good_one_forgotten_at_the_next_save(patch: Patch) -> None:
    patch.setattr("cxlfs.store.overwrites._TORN", frozenset())


# --- sets -----------------------------------------------------------------------------------------


def marker_says_nothing(patch: Patch) -> None:
    """A set whose marker has come counts as unfinished: it goes back."""
    patch.setattr(unit_markers, "says_something", lambda *_: False)


def marker_of_an_earlier_set(patch: Patch) -> None:
    patch.setattr(unit_markers, "_is_born_in", lambda *_: True)


def logs_belong_to_sets(patch: Patch) -> None:
    patch.setattr(unit_members, "_LOGS", re.compile(rb"(?!)"))
    unit_members.never_belongs.cache_clear()


def kill_ignored(patch: Patch) -> None:
    """A set whose writer was killed stays as it is."""
    patch.setattr(unit_rules, "_WRONG", frozenset())


PLANTED: list[tuple[Plant, Check]] = [
    (row_of_the_next_record, of_store(test_past.test_an_overwrite_leaves_what_was_there)),
    (
        one_row_too_many,
        of_store(test_past.test_the_oldest_goes_first_and_the_last_of_each_name_last),
    ),
    (
        pinned_given_up,
        lambda shop: test_past.test_held_rows_stay_until_a_write_would_fail(shop, random.Random(5)),
    ),
    (
        past_counted_as_used,
        lambda shop: test_past.test_history_counts_as_free(shop.new(), random.Random(5)),
    ),
    (cuts_missed, a_cut_leaves_what_was_there),
    (
        append_taken_for_a_change,
        of_store(test_past.test_an_append_and_a_name_of_several_leave_nothing),
    ),
    (
        rows_without_their_epoch,
        lambda shop: test_past_archive.test_rows_whose_segments_were_used_again_do_not_come_back(
            shop, shop.new()
        ),
    ),
    (
        erased_in_memory_alone,
        lambda shop: test_past_archive.test_forgotten_rows_are_nowhere(shop, shop.new()),
    ),
    (
        held_version_gone_with_its_name,
        of_trial(
            lambda t: test_overwrites.test_what_is_held_of_a_file_that_goes_is_in_history(
                t, "unlinked"
            )
        ),
    ),
    (
        two_rows_with_one_key,
        of_trial(test_overwrites.test_a_change_in_place_leaves_both_contents_in_history),
    ),
    (
        held_version_there_too_long,
        of_trial(test_overwrites.test_a_version_is_found_by_the_commits_at_which_it_was_there),
    ),
    (whole_taken_back, of_trial(test_overwrites.test_a_whole_file_stays_after_a_power_cut)),
    (
        torn_kept_at_recovery,
        of_trial(test_overwrites.test_fewer_names_and_a_good_end_are_only_reported),
    ),
    (judged_while_it_is_written, of_trial(test_overwrites.test_fsync_within_the_save)),
    (
        decided_while_a_second_writer_lives,
        of_trial(test_overwrites.test_several_writers_decide_together),
    ),
    (
        good_one_forgotten_at_the_next_save,
        of_trial(test_overwrites.test_saving_again_over_a_torn_file_keeps_the_good_one),
    ),
    (marker_says_nothing, of_users(test_units.test_all_is_there_after_the_marker)),
    (
        marker_of_an_earlier_set,
        of_users(test_unit_moves.test_an_old_marker_says_nothing, how="renamed"),
    ),
    (
        logs_belong_to_sets,
        of_users(test_unit_members.test_a_log_that_was_removed_or_renamed),
    ),
    (kill_ignored, of_users(test_unit_members.test_a_log_that_is_not_committed_stays)),
]


@pytest.mark.parametrize("number", range(len(PLANTED)))
def test_caught(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, check = PLANTED[number]
    shop = Shop()
    check(shop)
    unit_members.never_belongs.cache_clear()
    plant(monkeypatch)
    with pytest.raises(CAUGHT):
        check(Shop())
    monkeypatch.undo()
    unit_members.never_belongs.cache_clear()
