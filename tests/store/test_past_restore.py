"""Bringing history back: contents, attributes, trees; and that recovery finds what was restored."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from cxlfs.errors import BusyError, ExistsError, NotFoundError
from cxlfs.store import Store
from cxlfs.store.past_rows import Row
from tests.support.shop import Shop, close, create
from tests.support.stores import read_file, write_file


def last(store: Store) -> Row:
    return list(store.past)[-1]


def content(store: Store, name: bytes, parent: int = 1) -> bytes:
    return read_file(store, store.lookup(parent, name).ino)


@pytest.mark.parametrize("rolled", [False, True], ids=["", "rolled over"])
@pytest.mark.parametrize("over", [False, True], ids=["new", "over"])
def test_a_restored_content_is_there_after_a_crash(
    shop: Shop, store: Store, rng: random.Random, *, rolled: bool, over: bool
) -> None:
    """Whether the image knows its extents or not."""
    old, new = rng.randbytes(50_000), rng.randbytes(30_000)
    write_file(store, 1, b"a", old)
    write_file(store, 1, b"a", new)
    if rolled:
        store.volume.rollover()
    row = last(store)
    lsn = store.volume.last_lsn
    store.history.restore(row, 1, b"a" if over else b"b")
    assert store.volume.last_lsn == lsn + 1
    assert content(store, b"a" if over else b"b") == old
    store = shop.reopen(store)
    assert content(store, b"a" if over else b"b") == old
    assert content(store, b"a") == (old if over else new)


def test_what_it_replaces_is_history_in_its_turn(store: Store) -> None:
    write_file(store, 1, b"a", b"one")
    write_file(store, 1, b"a", b"two")
    store.history.restore(last(store), 1, b"a")
    assert content(store, b"a") == b"one"
    store.history.restore(last(store), 1, b"a")
    assert content(store, b"a") == b"two"


def test_attributes_are_as_they_were_and_the_mode_the_stricter(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"one")
    store.set_attributes(ino, mode=0o664, uid=5, gid=6, mtime_ns=1000, atime_ns=2000)
    store.set_xattr(ino, b"user.x", b"1")
    before = store.get_attributes(ino)
    write_file(store, 1, b"a", b"two")
    store.set_attributes(ino, mode=0o600, uid=7)
    store.set_xattr(ino, b"user.y", b"2")
    row = last(store)
    copy = store.history.restore(row, 1, b"copy").attributes()
    for field in ("mode", "uid", "gid", "mtime_ns", "atime_ns", "size", "birth_ns"):
        assert getattr(copy, field) == getattr(before, field)
    store.history.restore(row, 1, b"a")
    here = store.get_attributes(ino)
    assert (here.mode & 0o7777, here.uid, here.mtime_ns) == (0o600, 7, 1000)
    for each in (ino, copy.ino):
        assert store.list_xattrs(each) == [b"user.x"]


def test_undelete_makes_what_it_was(shop: Shop, store: Store) -> None:
    directory = store.make_directory(1, b"d", 0o750, 3, 4).ino
    store.set_xattr(directory, b"user.x", b"1")
    store.make_symlink(directory, b"link", b"target", 1, 2)
    store.make_node(directory, b"fifo", 0o010640, 0, 1, 2)
    write_file(store, directory, b"file", b"content")
    for name in (b"link", b"fifo", b"file"):
        store.unlink(directory, name)
    store.remove_directory(1, b"d")
    rows = {row.name: row for row in store.past}
    store.volume.rollover()
    store.history.undelete(rows[b"file"])
    made = store.lookup(1, b"d")
    assert (made.mode & 0o7777, made.uid, made.gid) == (0o750, 3, 4)
    for name in (b"link", b"fifo"):
        store.history.undelete(rows[name])
    with pytest.raises(ExistsError):
        store.history.undelete(rows[b"d"])
    store = shop.reopen(store)
    made = store.lookup(1, b"d")
    assert store.get_xattr(made.ino, b"user.x") == b"1"
    assert content(store, b"file", made.ino) == b"content"
    assert store.read_symlink(store.lookup(made.ino, b"link").ino) == b"target"
    assert store.lookup(made.ino, b"fifo").mode == 0o010640


def test_a_tree_comes_back_as_it_was_removed(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without what had been removed from it long before."""
    now = store.volume.now()
    monkeypatch.setattr("time.time_ns", lambda: now)
    top = store.make_directory(1, b"top", 0o755, 0, 0).ino
    below = store.make_directory(top, b"below", 0o755, 0, 0).ino
    for directory, name in ((top, b"a"), (below, b"b"), (below, b"c"), (below, b"long ago")):
        write_file(store, directory, name, b"in " + name)
    store.unlink(below, b"long ago")
    now += 60_000_000_000
    for name in (b"b", b"c"):
        store.unlink(below, name)
    store.remove_directory(top, b"below")
    store.unlink(top, b"a")
    store.remove_directory(1, b"top")
    row = last(store)
    assert len(store.trees.died_below(1)) == 6
    lsns = [store.volume.last_lsn for _ in store.trees.undelete(row)]
    assert all(after - before <= 1 for before, after in itertools.pairwise(lsns))
    store = shop.reopen(store)
    top = store.lookup(1, b"top").ino
    below = store.lookup(top, b"below").ino
    found = store.namespace.get(below).entries or {}
    assert sorted(found) == [b"b", b"c"]
    assert content(store, b"c", below) == b"in c"
    assert content(store, b"a", top) == b"in a"


def test_a_content_of_several_records(shop: Shop, rng: random.Random) -> None:
    store = shop.new(16 << 20)
    data = rng.randbytes(3_000_000)
    write_file(store, 1, b"a", data)
    write_file(store, 1, b"a", b"new")
    store.volume.rollover()
    row = last(store)
    store.history.restore(row, 1, b"a")
    store.history.restore(row, 1, b"b")
    store = shop.reopen(store)
    assert content(store, b"a") == content(store, b"b") == data


def test_what_is_being_written_is_left_alone(store: Store) -> None:
    write_file(store, 1, b"a", b"one")
    write_file(store, 1, b"a", b"two")
    handle = store.open_file(store.lookup(1, b"a").ino, os.O_RDWR)
    store.write(handle, 0, b"x")
    with pytest.raises(BusyError):
        store.history.restore(last(store), 1, b"a")
    close(store, handle)
    assert content(store, b"a") == b"xwo"


def test_a_file_that_is_open_and_has_no_name(store: Store) -> None:
    _, handle = create(store, b"a", b"data")
    store.fsync(handle)
    store.write(handle, 4, b"more")
    store.unlink(1, b"a")
    store.history.undelete(last(store))
    store.release(handle)
    assert content(store, b"a") == b"data"


def test_what_is_forgotten_is_gone(store: Store, rng: random.Random) -> None:
    write_file(store, 1, b"a", rng.randbytes(5000))
    store.unlink(1, b"a")
    row = last(store)
    store.past.hold(row)
    store.history.forget([row])
    assert len(store.past) == 0
    assert store.volume.engine.statistics().extents == 0
    with pytest.raises(NotFoundError):
        store.history.undelete(row)
