"""The copy of what a unit held before is made in steps: how much at once, and who goes on."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest

from cxlfs.errors import NamespaceError, NoSpaceError
from cxlfs.media import Granularity
from cxlfs.store import Store, UnfinishedError, unit_copying
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Writers,
    find,
    finish_work,
    make,
    open_count,
    save,
    set_aside,
    tree,
)
from tests.support.unit_steps import (
    AT_ONCE,
    SHARD,
    end_all,
    finish,
    in_steps,
    overwrite,
    whole,
)


@pytest.fixture
def store(shop: Shop, granularity: Granularity, short_steps: None) -> Store:
    """With well-known names, and short steps."""
    del short_steps
    return in_steps(shop.new(granularity=granularity, units=UnitsMode.AUTO))


# --- how much at once ---------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("how", "count"),
    [
        *((how, 1_000) for how in ("create", "overwrite", "unlink", "rename", "link", "mkdir")),
        *((how, 4_000) for how in ("overwrite", "unlink")),
    ],
)
def test_no_step_copies_more_the_more_files_there_are(shop: Shop, count: int, how: str) -> None:
    store = in_steps(shop.new(64 << 20, units=UnitsMode.AUTO))
    directory = make(store, CHECKPOINT)
    for number in range(count):
        write_file(store, directory, b"%05d" % number, b"x")
    write_file(store, directory, MARKER, b"{}")
    write_file(store, 1, b"outside", b"o")
    first = store.lookup(directory, b"00000").ino
    verbs: dict[str, Callable[[], object]] = {
        "create": lambda: close(store, store.create(directory, b"new", 0o644, 1, 1, os.O_RDWR)[1]),
        "overwrite": overwrite(store, directory, b"00000"),
        "unlink": lambda: store.unlink(directory, b"00000"),
        "rename": lambda: store.rename(1, b"outside", directory, b"00001"),
        "link": lambda: store.link(first, directory, b"second"),
        "mkdir": lambda: store.make_directory(directory, b"more", 0o755, 1, 1),
    }
    made = [len(store.namespace.inodes)]
    steps = finish(verbs[how], lambda _: made.append(len(store.namespace.inodes)))
    made.append(len(store.namespace.inodes))
    assert open_count(store) == 1
    end_all(store)
    assert made[-1] - made[0] >= count
    most = unit_copying.FILES_AT_ONCE + 3  # the copy, the place for it, what the verb makes
    assert max(b - a for a, b in itertools.pairwise(made)) <= most
    assert steps <= count // unit_copying.FILES_AT_ONCE + count // unit_copying.NAMES_AT_ONCE + 2


def test_a_small_unit_begins_at_once(shop: Shop) -> None:
    store = in_steps(shop.new(units=UnitsMode.AUTO))
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"%d" % number: b"x" for number in range(200)})
    assert finish(overwrite(store, directory, b"7")) == 0
    end_all(store)


def test_a_new_name_needs_no_copy(store: Store) -> None:
    directory = make(store, CHECKPOINT)
    for number in range(9):
        write_file(store, directory, b"%d" % number, b"x")  # raises no UnfinishedError
    assert store.units.copyings.steps == 0
    end_all(store)


def test_who_does_not_go_in_steps_gets_all_at_once(store: Store) -> None:
    directory = whole(store)
    store.names.in_steps = False
    files = tree(store, b"dcp")
    store.unlink(directory, SHARD)
    assert open_count(store) == 1
    assert files in set_aside(store).values()
    end_all(store)


@pytest.mark.parametrize("how", ["rmdir", "mkdir", "create", "unlink a directory", "no such name"])
def test_a_verb_that_is_refused_copies_nothing(store: Store, how: str) -> None:
    directory = make(store, CHECKPOINT)
    below = make(store, b"below", directory)
    save(store, below, {b"%d" % number: b"x" for number in range(6)}, marker=None)
    write_file(store, directory, MARKER, b"{}")
    verbs: dict[str, Callable[[], object]] = {
        "rmdir": lambda: store.remove_directory(directory, b"below"),
        "mkdir": lambda: store.make_directory(directory, b"below", 0o755, 1, 1),
        "create": lambda: store.create(directory, MARKER, 0o644, 1, 1, os.O_RDWR),
        "unlink a directory": lambda: store.unlink(directory, b"below"),
        "no such name": lambda: store.rename(directory, b"none", directory, b"other"),
    }
    with pytest.raises(NamespaceError):
        verbs[how]()
    assert store.units.copyings.steps == 0


# --- who goes on, and who does not --------------------------------------------------------------


def test_nothing_that_begins_a_unit_is_done_before_its_record(shop: Shop, store: Store) -> None:
    """A crash behind any step finds what was there, and nothing of the copy."""
    directory = whole(store)
    old = tree(store, b"dcp")
    number = 0
    for number in itertools.count(1):
        verb, made = overwrite(store, directory), 0
        while made < number:
            try:
                verb()
            except UnfinishedError:
                made += 1
            else:
                break
        store = in_steps(shop.reopen(store, units=UnitsMode.AUTO))
        finish_work(store)
        assert tree(store, b"dcp") == old
        if made < number:
            break
        assert set_aside(store) == {}
        directory = find(store, b"dcp").ino
    assert number >= 6


def test_several_writers_make_one_copy(store: Store) -> None:
    directory = whole(store)
    writers = Writers(store)
    copies: list[dict[bytes, dict[bytes, bytes]]] = []

    def other(_step: int) -> None:
        writers.present = "other"
        with pytest.raises(UnfinishedError):
            store.unlink(directory, b"__0_0.distcp")
        copies.append(set_aside(store))
        writers.present = "trainer"

    alone = (9 + 2) // AT_ONCE
    assert finish(overwrite(store, directory), other) <= alone
    assert {len(each) for each in copies} == {1}
    writers.present = "other"
    store.unlink(directory, SHARD)
    (unit,) = store.units.open_units()
    assert list(unit.writers) == ["trainer", "other"]
    end_all(store)


def test_what_nobody_goes_on_with_is_given_up(store: Store) -> None:
    directory = whole(store)
    old = tree(store, b"dcp")
    writers = Writers(store)
    for _ in range(3):
        with pytest.raises(UnfinishedError):
            overwrite(store, directory)()
    assert len(set_aside(store)) == 1
    writers.now += unit_copying.IDLE_SECONDS / 2
    finish_work(store)
    assert len(set_aside(store)) == 1
    writers.now += unit_copying.IDLE_SECONDS
    finish_work(store)
    assert set_aside(store) == {}
    assert store.volume.on_record is None
    assert tree(store, b"dcp") == old
    finish(overwrite(store, directory))
    assert open_count(store) == 1
    end_all(store)


def test_the_store_is_closed_between_two_steps(shop: Shop, store: Store) -> None:
    directory = whole(store)
    old = tree(store, b"dcp")
    with pytest.raises(UnfinishedError):
        overwrite(store, directory)()
    store = shop.reopen(store, clean=True)
    assert set_aside(store) == {}
    assert tree(store, b"dcp") == old


def test_making_room_leaves_a_copy_in_the_making_alone(store: Store) -> None:
    directory = whole(store)

    def between(_step: int) -> None:
        while store.units.copies.remove_some():
            pass
        assert len(set_aside(store)) == 1

    assert finish(overwrite(store, directory), between) >= 5
    end_all(store)


def test_the_unit_gets_another_name_between_two_steps(shop: Shop, store: Store) -> None:
    """One that is a unit too, in a directory that is none; the copy goes on."""
    directory = make(store, CHECKPOINT)
    old = save(store, directory, {b"%d" % number: b"x" * 900 for number in range(20)})
    runs = make(store, b"runs")
    steps = finish(
        overwrite(store, directory, b"7"),
        lambda step: store.rename(1, CHECKPOINT, runs, b"checkpoint-9") if step == 4 else None,
    )
    assert steps >= 10
    assert store.units.copyings.steps <= steps + 1
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, b"runs/checkpoint-9") == old


def test_the_unit_is_none_any_more_under_its_new_name(store: Store) -> None:
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"%d" % number: b"x" * 900 for number in range(20)})
    writers = Writers(store)
    finish(
        overwrite(store, directory, b"7"),
        lambda step: store.rename(1, CHECKPOINT, 1, b"best") if step == 4 else None,
    )
    assert open_count(store) == 0
    writers.now += 2 * unit_copying.IDLE_SECONDS
    finish_work(store)
    assert set_aside(store) == {}


def test_it_lies_in_another_unit_between_two_steps(shop: Shop, store: Store) -> None:
    """Of directories in each other the outermost is the unit; the copy of the inner one is not
    wanted any more.
    """
    outer = make(store, b"checkpoint-1")
    other = save(store, outer, {b"a": b"a" * 50})
    directory = make(store, CHECKPOINT)
    files = save(store, directory, {b"%d" % number: b"x" * 900 for number in range(20)})
    finish(lambda: write_file(store, outer, b"b", b"of the outer one"))
    assert open_count(store) == 1
    finish(
        overwrite(store, directory, b"7"),
        lambda step: store.rename(1, CHECKPOINT, outer, b"inner") if step == 4 else None,
    )
    (unit,) = store.units.open_units()
    assert unit.inode.ino == outer
    assert tree(store, b"checkpoint-1/inner") == {**files, b"7": b""}
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, b"checkpoint-1") == other
    finish_work(store)
    assert all(b"before" not in name for name in set_aside(store))


@pytest.mark.parametrize("removing", [False, True])
@pytest.mark.parametrize("records", range(6))
def test_no_room_between_two_steps(
    store: Store, monkeypatch: pytest.MonkeyPatch, records: int, removing: bool
) -> None:
    """The change is refused, or (a removal) made without; what was copied goes away."""
    directory = whole(store)
    old = tree(store, b"dcp") or {}
    inodes = len(store.namespace.inodes)
    commit, budget = store.volume.commit, [records]

    def failing(*args: object, **options: object) -> tuple[int, int]:
        budget[0] -= 1
        if budget[0] == -1:
            raise NoSpaceError("no room for a record")
        return commit(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(store.volume, "commit", failing)
    if removing:
        finish(lambda: store.unlink(directory, SHARD))
        assert store.units.unprotected == 1
        old.pop(SHARD)
    else:
        with pytest.raises(NoSpaceError):
            finish(overwrite(store, directory))
    assert budget[0] < 0
    assert open_count(store) == 0
    finish_work(store)
    assert set_aside(store) == {}
    assert tree(store, b"dcp") == old
    assert len(store.namespace.inodes) == inodes - removing
