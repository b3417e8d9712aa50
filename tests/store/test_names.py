"""Renames of every kind, links, removals, listings; what POSIX says, and what is refused."""

from __future__ import annotations

import os
import stat

import pytest

from cxlfs.errors import (
    BadHandleError,
    CxlfsError,
    ExistsError,
    InvalidArgumentError,
    IsDirectoryError,
    NameTooLongError,
    NotDirectoryError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
)
from cxlfs.store import Store
from cxlfs.store.namespace import FileKind
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import picture, read_file, write_file


def names(store: Store, ino: int = 1) -> set[bytes]:
    return set(store.namespace.get(ino).entries or {})


def make(store: Store, name: bytes, parent: int = 1) -> int:
    return store.make_directory(parent, name, 0o755, 0, 0).ino


def listing(store: Store, handle: int, cookie: int = 0) -> list[bytes]:
    return [entry.name for entry in store.read_directory(handle, cookie)]


# --- rename ---------------------------------------------------------------------------------


def test_rename_over_a_file(store: Store) -> None:
    ino = write_file(store, 1, b"new", b"new")
    old = write_file(store, 1, b"final", b"old")
    store.rename(1, b"new", 1, b"final")
    assert names(store) == {b"final"}
    assert store.lookup(1, b"final").ino == ino
    with pytest.raises(NotFoundError):
        store.get_attributes(old)


def test_rename_over_an_open_file(store: Store) -> None:
    write_file(store, 1, b"new", b"new")
    old = write_file(store, 1, b"final", b"old" * 9000)
    reader = store.open_file(old, os.O_RDONLY)
    store.rename(1, b"new", 1, b"final")
    assert bytes(store.read(reader, 0, 3)) == b"old"
    assert store.get_attributes(old).nlink == 0
    store.volume.rollover()
    assert bytes(store.read(reader, 26_997, 30)) == b"old"
    store.release(reader)
    with pytest.raises(NotFoundError):
        store.get_attributes(old)


@pytest.mark.parametrize("committed", [False, True])
def test_rename_over_a_file_being_written(store: Store, committed: bool) -> None:
    """The replaced one is being created, or overwritten: its writer goes on without a name."""
    if committed:
        write_file(store, 1, b"final", b"old")
        handle = open_for_overwrite(store, b"final", b"half")
    else:
        _, handle = create(store, b"final", b"half")
    write_file(store, 1, b"new", b"new")
    store.rename(1, b"new", 1, b"final")
    store.write(handle, 4, b"more")
    store.commits.commit_old(older_than=1e18)
    assert read_file(store, store.lookup(1, b"final").ino) == b"new"
    again = picture(store)
    close(store, handle)
    assert picture(store) == again
    assert not store.versions.open_versions


def test_rename_an_uncommitted_file_over_an_uncommitted_one(shop: Shop, store: Store) -> None:
    _, first = create(store, b"a", b"a")
    _, second = create(store, b"b", b"b")
    store.rename(1, b"a", 1, b"b")
    assert names(store) == {b"b"}
    store = shop.reopen(store)
    assert names(store) == {b"b"}
    assert read_file(store, store.lookup(1, b"b").ino) == b"a"
    del first, second


def test_rename_into_another_directory(shop: Shop, store: Store) -> None:
    one, two = make(store, b"one"), make(store, b"two")
    moved = make(store, b"moved", one)
    write_file(store, moved, b"f", b"f")
    _, handle = create(store, b"fresh", b"fresh", parent=moved)
    store.rename(one, b"moved", two, b"renamed")
    assert (store.get_attributes(one).nlink, store.get_attributes(two).nlink) == (2, 3)
    assert store.path_of(store.lookup(moved, b"f").ino) == b"/two/renamed/f"
    store.flush(handle, writer_killed=False)
    store = shop.reopen(store)
    assert store.path_of(store.lookup(moved, b"fresh").ino) == b"/two/renamed/fresh"
    assert store.lookup(moved, b"..").ino == two


def test_rename_directory_over_an_empty_one(store: Store) -> None:
    full, empty = make(store, b"full"), make(store, b"empty")
    write_file(store, full, b"f", b"f")
    store.rename(1, b"full", 1, b"empty")
    assert names(store) == {b"empty"}
    assert store.lookup(1, b"empty").ino == full
    assert store.get_attributes(1).nlink == 3
    with pytest.raises(NotFoundError):
        store.get_attributes(empty)


def test_rename_onto_itself_and_hard_links(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"a")
    store.link(ino, 1, b"b")
    before = picture(store)
    store.rename(1, b"a", 1, b"a")
    store.rename(1, b"a", 1, b"b")
    assert picture(store) == before


def test_rename_refuses(store: Store) -> None:
    outer = make(store, b"outer")
    inner = make(store, b"inner", outer)
    write_file(store, 1, b"file", b"f")
    before = picture(store)
    refused: list[tuple[type[CxlfsError], int, bytes, int, bytes]] = [
        (InvalidArgumentError, 1, b"outer", inner, b"x"),
        (InvalidArgumentError, 1, b"outer", outer, b"x"),
        (NotEmptyError, outer, b"inner", 1, b"outer"),
        (IsDirectoryError, 1, b"file", 1, b"outer"),
        (NotDirectoryError, 1, b"outer", 1, b"file"),
        (NotFoundError, 1, b"none", 1, b"x"),
        (NotFoundError, 99, b"file", 1, b"x"),
        (NotDirectoryError, store.lookup(1, b"file").ino, b"a", 1, b"x"),
        (NameTooLongError, 1, b"file", 1, b"x" * 256),
        (InvalidArgumentError, 1, b".", 1, b"x"),
        (InvalidArgumentError, 1, b"file", 1, b".."),
    ]
    for error, parent, name, new_parent, new_name in refused:
        with pytest.raises(error):
            store.rename(parent, name, new_parent, new_name)
    with pytest.raises(InvalidArgumentError):
        store.rename(1, b"outer", outer, b"inner", exchange=True)
    with pytest.raises(InvalidArgumentError):
        store.rename(outer, b"inner", 1, b"outer", exchange=True)
    with pytest.raises(ExistsError):
        store.rename(1, b"file", 1, b"outer", no_replace=True)
    with pytest.raises(NotFoundError):
        store.rename(1, b"file", 1, b"none", exchange=True)
    assert picture(store) == before


def test_no_replace(store: Store) -> None:
    write_file(store, 1, b"a", b"a")
    store.rename(1, b"a", 1, b"b", no_replace=True)
    assert names(store) == {b"b"}


@pytest.mark.parametrize("open_files", [False, True])
def test_exchange(shop: Shop, store: Store, open_files: bool) -> None:
    one = make(store, b"one")
    inside = make(store, b"d", one)
    write_file(store, inside, b"below", b"below")
    if open_files:
        ino, handle = create(store, b"f", b"content")
    else:
        ino = write_file(store, 1, b"f", b"content")
    store.rename(one, b"d", 1, b"f", exchange=True)
    for _ in range(2):
        assert store.lookup(1, b"f").ino == inside
        assert store.lookup(one, b"d").ino == ino
        assert read_file(store, ino) == b"content"
        assert store.get_attributes(one).nlink == 2
        assert store.get_attributes(1).nlink == 4
        assert store.path_of(store.lookup(inside, b"below").ino) == b"/f/below"
        if open_files and handle:
            close(store, handle)
            handle = 0
        store = shop.reopen(store)


def test_exchange_of_directories_between_parents(shop: Shop, store: Store) -> None:
    one, two = make(store, b"one"), make(store, b"two")
    a, b = make(store, b"a", one), make(store, b"b", two)
    make(store, b"deep", a)
    store.rename(one, b"a", two, b"b", exchange=True)
    store = shop.reopen(store)
    assert (store.lookup(one, b"a").ino, store.lookup(two, b"b").ino) == (b, a)
    assert (store.lookup(a, b"..").ino, store.lookup(b, b"..").ino) == (two, one)
    store.rename(1, b"one", a, b"one")
    assert store.path_of(b) == b"/two/b/one/a"


def test_long_names(store: Store) -> None:
    long = b"n" * 255
    parent = make(store, long)
    ino, handle = create(store, long, b"x", parent=parent)
    store.rename(parent, long, 1, b"m" * 255)
    close(store, handle)
    for verb in (
        lambda: store.make_directory(1, b"n" * 256, 0, 0, 0),
        lambda: store.lookup(1, b"n" * 256),
        lambda: store.link(ino, 1, b"n" * 256),
        lambda: create(store, b"n" * 256),
    ):
        with pytest.raises(NameTooLongError):
            verb()


def test_impossible_names(store: Store) -> None:
    for name in (b"", b"a/b", b"a\0b"):
        with pytest.raises(InvalidArgumentError):
            create(store, name)
        with pytest.raises(InvalidArgumentError):
            make(store, name)
    for name in (b".", b".."):
        with pytest.raises(ExistsError):
            create(store, name)
        with pytest.raises(ExistsError):
            make(store, name)


# --- links and removal ----------------------------------------------------------------------


def test_hard_links(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"a", b"data")
    directory = make(store, b"d")
    assert store.link(ino, directory, b"b").nlink == 2
    store.unlink(1, b"a")
    assert store.get_attributes(ino).nlink == 1
    store = shop.reopen(store)
    assert read_file(store, store.lookup(directory, b"b").ino) == b"data"
    store.link(ino, 1, b"c")
    store.rename(1, b"c", directory, b"c")
    write_file(store, 1, b"x", b"x")
    store.rename(1, b"x", directory, b"b")
    assert store.get_attributes(ino).nlink == 1


def test_link_refuses(shop: Shop, store: Store) -> None:
    shop.directory_times = False
    directory = make(store, b"d")
    ino, handle = create(store, b"a", b"x")
    with pytest.raises(NotPermittedError):
        store.link(directory, 1, b"e")
    with pytest.raises(ExistsError):
        store.link(ino, 1, b"d")
    store.unlink(1, b"a")
    with pytest.raises(NotFoundError):
        store.link(ino, 1, b"b")
    store.release(handle)


def test_symlinks_can_be_linked(shop: Shop, store: Store) -> None:
    ino = store.make_symlink(1, b"s", b"target", 1, 2).ino
    store.link(ino, 1, b"t")
    store = shop.reopen(store)
    assert store.read_symlink(store.lookup(1, b"t").ino) == b"target"
    assert stat.S_ISLNK(store.get_attributes(ino).mode)
    with pytest.raises(InvalidArgumentError):
        store.read_symlink(1)
    with pytest.raises(NameTooLongError):
        store.make_symlink(1, b"long", b"x" * 4096, 0, 0)
    assert store.make_symlink(1, b"longest", b"x" * 4095, 0, 0).size == 4095


def test_remove_directory(store: Store) -> None:
    outer = make(store, b"outer")
    make(store, b"inner", outer)
    write_file(store, 1, b"file", b"")
    with pytest.raises(NotEmptyError):
        store.remove_directory(1, b"outer")
    with pytest.raises(NotDirectoryError):
        store.remove_directory(1, b"file")
    with pytest.raises(IsDirectoryError):
        store.unlink(1, b"outer")
    with pytest.raises(InvalidArgumentError):
        store.remove_directory(outer, b".")
    with pytest.raises(NotEmptyError):
        store.remove_directory(outer, b"..")
    store.pin(outer)
    store.remove_directory(outer, b"inner")
    store.remove_directory(1, b"outer")
    assert store.get_attributes(outer).nlink == 0
    with pytest.raises(NotFoundError):
        create(store, b"orphan", parent=outer)
    with pytest.raises(NotFoundError):
        make(store, b"orphan", outer)
    store.unpin(outer)
    with pytest.raises(NotFoundError):
        store.get_attributes(outer)
    assert store.get_attributes(1).nlink == 2


def test_unlinked_open_file_lives(store: Store) -> None:
    free = store.statfs().free_bytes
    ino, handle = create(store, b"a", b"one")
    store.flush(handle, writer_killed=False)
    store.unlink(1, b"a")
    store.write(handle, 3, b"two")
    store.set_attributes(ino, mode=0o600)
    store.set_xattr(ino, b"user.k", b"v")
    store.set_attributes(ino, size=5, handle=handle)
    store.fsync(handle)
    store.commits.commit_old(older_than=1e18)
    store.volume.rollover()
    assert bytes(store.read(handle, 0, 9)) == b"onetw"
    assert store.get_xattr(ino, b"user.k") == b"v"
    close(store, handle)
    with pytest.raises(NotFoundError):
        store.get_attributes(ino)
    assert store.statfs().free_bytes == free
    assert not store.versions.open_versions


def test_pinned_inode_lives_without_a_name(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"data")
    store.pin(ino)
    store.unlink(1, b"a")
    assert read_file(store, ino) == b"data"
    store.unpin(ino)
    with pytest.raises(NotFoundError):
        store.get_attributes(ino)
    with pytest.raises(InvalidArgumentError):
        store.unpin(1)


def test_nothing_is_left_of_uncommitted_files(shop: Shop, store: Store) -> None:
    shop.directory_times = False
    for number in range(200):
        _, handle = create(store, b"t", b"x" * number)
        store.unlink(1, b"t")
        close(store, handle)
    assert len(store.namespace.inodes) == 1
    assert not store.versions.open_versions
    assert store.volume.engine.statistics().extents == 0


# --- listings -------------------------------------------------------------------------------


def test_listing(store: Store) -> None:
    make(store, b"d")
    write_file(store, 1, b"f", b"")
    store.make_symlink(1, b"s", b"t", 0, 0)
    handle = store.open_directory(1)
    entries = list(store.read_directory(handle, 0))
    assert {(e.name, e.kind) for e in entries} == {
        (b"d", FileKind.DIRECTORY),
        (b"f", FileKind.FILE),
        (b"s", FileKind.SYMLINK),
    }
    for index, entry in enumerate(entries):
        assert listing(store, handle, entry.cookie_next) == [e.name for e in entries[index + 1 :]]
    store.release_directory(handle)
    for verb in (store.release_directory, lambda h: listing(store, h)):
        with pytest.raises(BadHandleError):
            verb(handle)


def test_listing_survives_changes(store: Store) -> None:
    """What stays is told exactly once, what was deleted is not told."""
    for number in range(100):
        write_file(store, 1, b"%03d" % number, b"")
    handle = store.open_directory(1)
    told: list[bytes] = []
    cookie = 0
    step = 0
    while True:
        entry = next(store.read_directory(handle, cookie), None)
        if entry is None:
            break
        told.append(entry.name)
        cookie = entry.cookie_next
        if step < 40:
            store.unlink(1, b"%03d" % (99 - step))
            write_file(store, 1, b"new%d" % step, b"")
            if step % 3 == 0:
                store.rename(1, b"%03d" % step, 1, b"moved%d" % step)
        step += 1
    stayed = {b"%03d" % n for n in range(60) if n not in range(0, 40, 3)}
    assert len(told) == len(set(told))
    assert stayed <= set(told)
    assert not {b"%03d" % n for n in range(70, 100)} & set(told[60:])
    assert set(listing(store, handle)) == names(store)
    store.release_directory(handle)


def test_listing_of_a_removed_directory(store: Store) -> None:
    directory = make(store, b"d")
    handle = store.open_directory(directory)
    store.remove_directory(1, b"d")
    assert listing(store, handle) == []
    store.release_directory(handle)
    with pytest.raises(NotFoundError):
        store.get_attributes(directory)
