"""What a unit keeps of what was there: nothing when it begins, each thing once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.store import Store, UnfinishedError, unit_keeping, unit_large
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Tree,
    begin,
    find,
    finish_work,
    kept_count,
    make,
    open_count,
    remove_tree,
    save,
    saved,
    shards,
    tree,
)
from tests.support.unit_steps import end_all


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


def test_a_unit_begins_with_one_small_record(shop: Shop) -> None:
    """However many files are there."""
    store = shop.new(64 << 20, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    save(store, directory, {b"%d" % number: b"x" * 100 for number in range(3000)})
    before = store.volume.counters
    commits, written = before.commits, before.journal_bytes_written
    inodes = len(store.namespace.inodes)
    handle = store.open_file(store.lookup(directory, b"7").ino, os.O_WRONLY | os.O_TRUNC)
    assert open_count(store) == 1
    assert before.commits - commits == 1
    assert before.journal_bytes_written - written < 512
    assert len(store.namespace.inodes) == inodes
    close(store, handle)
    end_all(store)


def test_a_new_directory_keeps_nothing(store: Store) -> None:
    directory = make(store, CHECKPOINT)
    for version in range(3):
        save(store, directory, shards(version), marker=None)
    assert open_count(store) == 1
    assert kept_count(store) == 0
    end_all(store)


def test_a_content_is_kept_once(shop: Shop, store: Store) -> None:
    directory, old = saved(store)
    write_file(store, directory, b"shard-1", b"first")
    inodes = len(store.namespace.inodes)
    for version in range(5):
        write_file(store, directory, b"shard-1", b"%d" % version * 400)
    assert len(store.namespace.inodes) == inodes
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_what_comes_back_is_no_newer_than_it_was(shop: Shop, store: Store) -> None:
    """Its commit number and times: else it would count as the newest checkpoint."""
    directory, _ = saved(store)
    saved(store, b"checkpoint-9", version=2)
    names = (b"shard-0", b"shard-1", MARKER)
    before = {name: store.namespace.find(directory, name) for name in names}
    wanted = {
        name: (inode.ino, inode.commit_lsn, inode.commit_ns, inode.mtime_ns)
        for name, inode in before.items()
        if inode is not None
    }
    write_file(store, directory, b"shard-0", b"new")
    store.unlink(directory, b"shard-1")
    for clean in (False, True, False):
        store = shop.reopen(store, clean=clean)
        for name, expected in wanted.items():
            inode = find(store, CHECKPOINT + b"/" + name)
            found = inode.ino, inode.commit_lsn, inode.commit_ns, inode.mtime_ns
            assert found == expected, (name, clean)
    write_file(store, find(store, CHECKPOINT).ino, b"shard-0", b"newer")
    lsn = find(store, CHECKPOINT + b"/shard-0").commit_lsn
    assert lsn > wanted[b"shard-0"][1]
    store.units.settle(closing=True)
    store = shop.reopen(store)
    assert find(store, CHECKPOINT + b"/shard-0").commit_lsn in {lsn, wanted[b"shard-0"][1]}


def test_half_a_way_back_is_gone_on_with(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash behind each record of it."""
    directory, old = saved(store)
    below = make(store, b"below", directory)
    write_file(store, below, b"deep", b"deep")
    old = {**save(store, directory, shards(1)), b"below/deep": b"deep"}
    write_file(store, 1, b"outside", b"outside")
    for budget in range(12):
        directory = find(store, CHECKPOINT).ino
        write_file(store, directory, b"shard-0", b"new")
        store.unlink(directory, b"shard-1")
        remove_tree(store, directory, b"below")
        store.rename(1, b"outside", directory, b"inside")
        write_file(store, make(store, b"made", directory), b"more", b"more")
        store.media.fence()
        opened: list[int] = []

        def failing(
            self: object,
            ops: object,
            *,
            commit: Callable[..., object] = store.volume.commit.__func__,
            left: list[int] = opened,
            most: int = budget,
            **options: object,
        ) -> object:
            if len(left) >= most:
                raise KeyboardInterrupt
            left.append(1)
            return commit(self, ops, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(store.volume), "commit", failing)
            store.abandon()
            shop.stores.remove(store)
            try:
                store = Store.open(store.media)
            except KeyboardInterrupt:
                patch.undo()
                store = Store.open(store.media)
        store.abandon()
        store = shop._watch(Store.open(store.media, _options()))
        assert tree(store, CHECKPOINT) == old, budget
        assert read_file(store, find(store, b"outside").ino) == b"outside"
        finish_work(store)
        assert kept_count(store) == 0


def _options() -> object:
    from cxlfs.store.options import StoreOptions

    return StoreOptions(units=UnitsMode.AUTO)


# --- many references ------------------------------------------------------------------------------


@pytest.fixture
def large(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> tuple[Store, int, Tree]:
    """A set with a file that takes ten steps to keep."""
    monkeypatch.setattr(unit_large, "REFS_AT_ONCE", 4)
    monkeypatch.setattr(unit_keeping, "_RECORD_PART", 1 << 10)
    store = shop.new(16 << 20, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    ino = write_file(store, directory, b"sparse", b"")
    handle = store.open_file(ino, os.O_RDWR)
    for number in range(40):
        store.write(handle, number * 9000, b"%03d" % number * 10)
    close(store, handle)
    old = save(store, directory, shards(1))
    return store, directory, {**old, b"sparse": read_file(store, ino)}


@pytest.mark.parametrize(
    "how", ["over", "in place", "removed", "moved out", "moved out and changed"]
)
def test_a_file_of_many_references(shop: Shop, large: tuple[Store, int, Tree], how: str) -> None:
    store, directory, old = large
    ino = store.lookup(directory, b"sparse").ino
    if how == "over":
        write_file(store, directory, b"sparse", b"new")
    elif how == "in place":
        handle = store.open_file(ino, os.O_RDWR)
        store.write(handle, 9000, b"new")
        close(store, handle)
    elif how == "removed":
        store.unlink(directory, b"sparse")
    else:
        if how == "moved out and changed":
            write_file(store, directory, b"sparse", b"new")
        write_file(store, directory, b"shard-0", b"new")
        store.rename(directory, b"sparse", 1, b"outside")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


def test_it_is_kept_in_steps_before_it_changes(shop: Shop, large: tuple[Store, int, Tree]) -> None:
    store, directory, old = large
    ino = store.lookup(directory, b"sparse").ino
    steps = 0
    while store.versions.prepare_change(ino, emptied=True):
        steps += 1
    assert steps >= 9
    write_file(store, directory, b"sparse", b"new")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old


@pytest.mark.parametrize("steps", [1, 5, 9])
def test_a_crash_between_two_steps(shop: Shop, large: tuple[Store, int, Tree], steps: int) -> None:
    store, directory, old = large
    ino = store.lookup(directory, b"sparse").ino
    for _ in range(steps):
        assert store.versions.prepare_change(ino, emptied=True)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == old
    finish_work(store)
    assert kept_count(store) == 0


# --- any changes --------------------------------------------------------------------------------


Change = Callable[[Store, int, random.Random], object]


def _some(store: Store, directory: int, rng: random.Random, *, directories: bool = False) -> bytes:
    inode = store.namespace.get(directory)
    names = [
        name
        for name, ino in (inode.entries or {}).items()
        if (store.namespace.get(ino).entries is not None) == directories and name != MARKER
    ]
    return rng.choice(names) if names else b""


def _in_place(store: Store, directory: int, rng: random.Random) -> None:
    name = _some(store, directory, rng)
    if name:
        handle = store.open_file(store.lookup(directory, name).ino, os.O_RDWR)
        store.write(handle, rng.randrange(3000), b"in place")
        close(store, handle)


def _remove(store: Store, directory: int, rng: random.Random) -> None:
    name = _some(store, directory, rng)
    if name:
        store.unlink(directory, name)


def _remove_tree(store: Store, directory: int, rng: random.Random) -> None:
    name = _some(store, directory, rng, directories=True)
    inode = store.namespace.find(directory, name) if name else None
    if inode is None:
        return
    for child, ino in list((inode.entries or {}).items()):
        if store.namespace.get(ino).entries is None:
            store.unlink(inode.ino, child)
    while inode.entries:
        _remove_tree(store, inode.ino, rng)
    store.remove_directory(directory, name)


def _move(store: Store, directory: int, rng: random.Random) -> None:
    name = _some(store, directory, rng, directories=rng.random() < 0.3)
    if name:
        store.rename(directory, name, directory, b"moved-%d" % rng.randrange(4), no_replace=False)


CHANGES: dict[str, Change] = {
    "over": lambda s, d, r: write_file(s, d, b"shard-%d" % r.randrange(4), b"%d" % r.random() * 99),
    "new": lambda s, d, r: write_file(s, d, b"new-%d" % r.randrange(9), b"new" * r.randrange(900)),
    "in place": _in_place,
    "remove": _remove,
    "remove tree": _remove_tree,
    "rename over": lambda s, d, r: (
        write_file(s, d, b"tmp", b"renamed %d" % r.randrange(99)),
        s.rename(d, b"tmp", d, b"shard-%d" % r.randrange(4)),
    ),
    "move": _move,
    "link": lambda s, d, r: (
        s.link(s.lookup(d, _some(s, d, r)).ino, d, b"link-%d" % r.randrange(1 << 20))
        if _some(s, d, random.Random(1))
        else None
    ),
    "make": lambda s, d, r: write_file(
        s, make(s, b"sub-%d" % r.randrange(1 << 20), d), b"deep", b"d%d" % r.randrange(99)
    ),
    "exchange": lambda s, d, r: (
        s.rename(d, _some(s, d, r), d, _some(s, d, r), exchange=True)
        if _some(s, d, random.Random(1))
        else None
    ),
    "rollover": lambda s, _d, _r: s.volume.rollover(),
}


@pytest.mark.parametrize("seed", [*range(60), 243, 639, 1938])
def test_any_changes_go_back(shop: Shop, seed: int) -> None:
    """Of a set with a directory below, by one user; the tree is as it was, number by number."""
    from cxlfs.errors import CxlfsError

    rng = random.Random(seed)
    store = shop.new(16 << 20, units=UnitsMode.AUTO)
    directory = make(store, CHECKPOINT)
    below = make(store, b"below", directory)
    write_file(store, below, b"deep", b"deep")
    make(store, b"empty", directory)
    store.link(store.lookup(below, b"deep").ino, directory, b"same")
    save(store, directory, shards(1, count=4))
    before = _numbers(store)
    begin(store, directory)
    for _ in range(rng.randrange(1, 25)):
        where = rng.choice([directory, directory, below])
        if store.namespace.inodes.get(where) is None or not store.namespace.get(where).links:
            where = directory
        change = rng.choice(list(CHANGES))
        try:
            CHANGES[change](store, where, rng)
        except CxlfsError:
            continue
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert _numbers(store) == before, seed
    finish_work(store)
    assert kept_count(store) == 0


def _numbers(store: Store) -> dict[bytes, tuple[int, bytes]]:
    """Of each path its inode number, and what a file holds."""
    found: dict[bytes, tuple[int, bytes]] = {}
    pending = [(CHECKPOINT, find(store, CHECKPOINT))]
    while pending:
        path, inode = pending.pop()
        found[path] = inode.ino, b"" if inode.live is None else read_file(store, inode.ino)
        for name, ino in (inode.entries or {}).items():
            pending.append((path + b"/" + name, store.namespace.get(ino)))
    return found


def test_steps_are_asked_for_only_with_many_references(store: Store) -> None:
    directory, _ = saved(store)
    try:
        assert not store.versions.prepare_change(store.lookup(directory, b"shard-0").ino)
    except UnfinishedError:
        pytest.fail("a small content is kept at once")
    end_all(store)
