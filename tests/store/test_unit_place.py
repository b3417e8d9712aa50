"""Where the store keeps what units need and what went back: users change nothing there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from cxlfs.errors import NotPermittedError
from cxlfs.store import Store
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_record import PLACE_XATTR
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    find,
    finish_work,
    make,
    remove_tree,
    save,
    saved,
    set_aside,
    shards,
    tree,
)
from tests.support.unit_steps import end_all


@pytest.fixture
def store(shop: Shop) -> Iterator[Store]:
    """With a set that went back, and a copy for a unit that is open."""
    store = shop.new(units=UnitsMode.AUTO)
    save(store, make(store, b"checkpoint-1"), shards(1), marker=None)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    directory, _ = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    yield store
    for each in shop.stores:
        if not each.volume.engine.closed:
            end_all(each)


def as_before(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program from before this rule serves the store: anybody changes anything there."""
    for name in ("check_made", "check_removed", "check_moved", "check_changed"):
        monkeypatch.setattr(store.aside, name, lambda *_, **__: None)


def place(store: Store) -> int:
    return find(store, ASIDE_NAME).ino


def kept(store: Store) -> tuple[int, bytes]:
    """Inode number and name of the set that went back."""
    name = next(name for name in set_aside(store) if b"incomplete" in name)
    return find(store, ASIDE_NAME + b"/" + name).ino, name


def copy(store: Store) -> tuple[int, bytes]:
    """Inode number and name of the copy."""
    name = next(name for name in set_aside(store) if b"before" in name)
    return find(store, ASIDE_NAME + b"/" + name).ino, name


TOPS: dict[str, Callable[[Store], tuple[int, bytes]]] = {
    "place": lambda store: (place(store), b""),
    "copy": copy,
    "kept": kept,
}
FILE = b"shard-1"
CHANGES: dict[str, Callable[[Store, int], object]] = {
    "create": lambda s, d: s.create(d, b"new", 0o644, 1, 1, os.O_RDWR),
    "mkdir": lambda s, d: s.make_directory(d, b"new", 0o755, 1, 1),
    "mknod": lambda s, d: s.make_node(d, b"new", 0o010600, 0, 1, 1),
    "symlink": lambda s, d: s.make_symlink(d, b"new", b"x", 1, 1),
    "move in": lambda s, d: s.rename(1, b"outside", d, b"new"),
    "move over": lambda s, d: s.rename(1, b"outside", d, FILE),
    "exchange": lambda s, d: s.rename(1, b"outside", d, FILE, exchange=True),
    "link in": lambda s, d: s.link(find(s, b"outside").ino, d, b"new"),
    "chmod": lambda s, d: s.set_attributes(d, mode=0o777),
    "setxattr": lambda s, d: s.set_xattr(d, b"user.x", b"y"),
}
INSIDE: dict[str, Callable[[Store, int, int], object]] = {
    "open": lambda s, _, ino: s.open_file(ino, os.O_RDWR),
    "open emptying": lambda s, _, ino: s.open_file(ino, os.O_WRONLY | os.O_TRUNC),
    "open reading, emptying": lambda s, _, ino: s.open_file(ino, os.O_RDONLY | os.O_TRUNC),
    "truncate": lambda s, _, ino: s.set_attributes(ino, size=0),
    "chown": lambda s, _, ino: s.set_attributes(ino, uid=0),
    "setxattr": lambda s, _, ino: s.set_xattr(ino, b"user.x", b"y"),
    "link out": lambda s, _, ino: s.link(ino, 1, b"taken"),
    "move out": lambda s, d, _: s.rename(d, FILE, 1, b"taken"),
    "move within": lambda s, d, _: s.rename(d, FILE, d, b"other"),
    "exchange": lambda s, d, _: s.rename(d, FILE, 1, b"outside", exchange=True),
}


@pytest.mark.parametrize("top", TOPS)
@pytest.mark.parametrize("how", CHANGES)
def test_nothing_is_put_there(shop: Shop, store: Store, how: str, top: str) -> None:
    write_file(store, 1, b"outside", b"outside")
    before = set_aside(store)
    directory = TOPS[top](store)[0]
    if top == "place" and how in {"move over", "exchange"}:
        directory = kept(store)[0]  # no such name is in the place itself
    with pytest.raises(NotPermittedError):
        CHANGES[how](store, directory)
    assert set_aside(store) == before
    assert not store.read_only
    assert "aside-refused" in [event.kind for event in shop.events]


@pytest.mark.parametrize("top", ["copy", "kept"])
@pytest.mark.parametrize("how", INSIDE)
def test_what_lies_there_stays_as_it_is(store: Store, how: str, top: str) -> None:
    write_file(store, 1, b"outside", b"outside")
    before = set_aside(store)
    directory = TOPS[top](store)[0]
    with pytest.raises(NotPermittedError):
        INSIDE[how](store, directory, store.lookup(directory, FILE).ino)
    assert set_aside(store) == before
    assert not store.read_only


def test_a_copy_stays_where_it_is(shop: Shop, store: Store) -> None:
    """Whoever moved or thinned it made the store one that could not be opened."""
    directory, name = copy(store)
    set_directory, set_name = kept(store)
    for verb in (
        lambda: store.rename(place(store), name, 1, b"mine"),
        lambda: store.rename(place(store), name, set_directory, b"mine"),
        lambda: store.rename(place(store), set_name, directory, b"mine"),
        lambda: store.unlink(directory, FILE),
    ):
        with pytest.raises(NotPermittedError):
            verb()
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is not None
    assert (tree(store, CHECKPOINT) or {})[b"shard-0"] != b"new"


def test_a_set_that_went_back_is_read_removed_and_moved_out(store: Store) -> None:
    directory, name = kept(store)
    handle = store.open_file(store.lookup(directory, FILE).ino, os.O_RDONLY)
    assert store.read(handle, 0, 4) == b"1-1 "
    store.release(handle)
    store.unlink(directory, FILE)
    store.rename(place(store), name, 1, b"restored")
    write_file(store, find(store, b"restored").ino, FILE, b"mine again")
    save(store, make(store, b"checkpoint-9"), shards(1), marker=None)


def test_all_that_went_back_is_removed(store: Store) -> None:
    remove_tree(store, place(store), kept(store)[1])
    assert list(set_aside(store)) == [copy(store)[1]]


def test_the_name_is_the_stores(shop: Shop, store: Store) -> None:
    """Nobody takes the place away, or makes one."""
    other = shop.new()
    write_file(other, 1, b"mine", b"mine")
    make(store, b"mine")
    for one in (store, other):
        with pytest.raises(NotPermittedError):
            one.rename(1, b"mine", 1, ASIDE_NAME)
    with pytest.raises(NotPermittedError):
        other.make_directory(1, ASIDE_NAME, 0o755, 7, 7)
    with pytest.raises(NotPermittedError):
        other.create(1, ASIDE_NAME, 0o755, 7, 7, os.O_RDWR)
    with pytest.raises(NotPermittedError):
        store.rename(1, ASIDE_NAME, 1, b"bobs")


def test_a_file_with_a_name_outside_can_be_written(shop: Shop) -> None:
    """A unit that goes back takes one of its names along."""
    store = shop.new(units=UnitsMode.AUTO)
    ino = write_file(store, 1, b"best", b"best")
    directory = make(store, CHECKPOINT)
    save(store, directory, shards(1), marker=None)
    store.link(ino, directory, b"best")
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) is None
    write_file(store, 1, b"best", b"better")
    store.set_attributes(ino, mode=0o600)
    assert read_file(store, find(store, b"best").ino) == b"better"


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_directory_that_a_user_made_is_not_trusted(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """It gets another name, is listed under it, and nothing of others is put into it. What an
    earlier program has put there goes where nobody else can look.
    """
    store = shop.new(units=UnitsMode.AUTO)
    as_before(store, monkeypatch)
    mine = store.make_directory(1, b"other", mode, 1000, 1000).ino
    write_file(store, mine, b"own", b"own")
    directory, old = saved(store)
    write_file(store, directory, b"shard-0", b"new")
    name = copy(store)[1]
    store.rename(place(store), name, mine, name)
    store.remove_directory(1, ASIDE_NAME)
    store.rename(1, b"other", 1, ASIDE_NAME)
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert tree(store, CHECKPOINT) == old
    assert tree(store, ASIDE_NAME + b".user") == {b"own": b"own"}
    assert [files[b"shard-0"] for files in set_aside(store).values()] == [b"new"]
    found = find(store, ASIDE_NAME)
    assert (found.uid, found.mode & 0o777) == (store.namespace.get(1).uid, 0o700)


def test_a_place_from_before_the_mark_is_taken_over(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set_aside(store)
    ino = place(store)
    store.namespace.remove_xattr(store.namespace.get(ino), PLACE_XATTR)
    store.volume.rollover()
    finish_work(store)
    store.abandon()
    shop.stores.remove(store)
    monkeypatch.undo()
    store = Store.open(store.media)
    shop.stores.append(store)
    assert place(store) == ino
    assert len(set_aside(store)) == len(before)
    assert PLACE_XATTR in (store.namespace.get(ino).xattrs or {})


def test_a_file_of_that_name_makes_way(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.new(units=UnitsMode.AUTO)
    with monkeypatch.context():
        as_before(store, monkeypatch)
        write_file(store, 1, ASIDE_NAME, b"mine")
    store = shop.reopen(store, units=UnitsMode.AUTO)
    files = save(store, make(store, CHECKPOINT), shards(1), marker=None)
    store = shop.reopen(store)
    assert list(set_aside(store).values()) == [files]
    assert read_file(store, find(store, ASIDE_NAME + b".user").ino) == b"mine"


def test_a_copy_that_an_earlier_program_let_go(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved out, or deeper: then nothing can go back, what is there stays, and that is told."""
    as_before(store, monkeypatch)
    name = copy(store)[1]
    deeper = make(store, b"deeper", place(store))
    store.rename(place(store), name, deeper, b"mine")
    there = tree(store, CHECKPOINT)
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == there
    assert not store.read_only
    store = shop.reopen(store)
    assert tree(store, CHECKPOINT) == there


def test_closing_beside_a_refused_change(store: Store) -> None:
    """A file that is open when its unit goes back can be written on, and closed."""
    directory = find(store, CHECKPOINT).ino
    handle = store.open_file(store.lookup(directory, b"shard-2").ino, os.O_RDWR)
    store.write(handle, 0, b"late")
    store.units.settle(closing=True)
    store.write(handle, 4, b"r")
    close(store, handle)
    assert not store.read_only
