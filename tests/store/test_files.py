"""Content of open files: sparse, several handles, sizes; attributes and extended attributes."""

from __future__ import annotations

import os
import random
import stat

import pytest

from cxlfs.errors import (
    AttributeTooLargeError,
    BadHandleError,
    ExistsError,
    FileTooLargeError,
    InvalidArgumentError,
    IsDirectoryError,
    NameTooLongError,
    NoAttributeError,
    ReadOnlyError,
    UnsupportedOperationError,
)
from cxlfs.store import Store
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import read_file, write_file


def test_sparse_file(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"a")
    store.write(handle, 1_000_000, b"far")
    store.write(handle, 4096, b"near")
    assert bytes(store.read(handle, 0, 4096)) == bytes(4096)
    close(store, handle)
    store = shop.reopen(store)
    expected = bytearray(1_000_003)
    expected[4096:4100] = b"near"
    expected[1_000_000:] = b"far"
    assert read_file(store, ino) == expected
    assert store.get_attributes(ino).allocated_bytes < 1024


def test_reading_at_and_beyond_the_end(store: Store) -> None:
    _, handle = create(store, b"a", b"data")
    assert bytes(store.read(handle, 4, 10)) == b""
    assert bytes(store.read(handle, 1 << 60, 10)) == b""
    assert bytes(store.read(handle, 2, 1 << 40)) == b"ta"
    assert bytes(store.read(handle, 0, 0)) == b""
    close(store, handle)


def test_largest_file(store: Store) -> None:
    ino, handle = create(store, b"a")
    store.write(handle, (1 << 56) - 1, b"x")
    with pytest.raises(FileTooLargeError):
        store.write(handle, 1 << 56, b"x")
    with pytest.raises(FileTooLargeError):
        store.set_attributes(ino, size=(1 << 56) + 1, handle=handle)
    store.set_attributes(ino, size=1, handle=handle)
    close(store, handle)


def test_random_writes_and_cuts_against_a_model(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    ino, handle = create(store, b"a")
    model = bytearray()
    for step in range(400):
        choice = rng.random()
        if choice < 0.75:
            offset = rng.randrange(60_000)
            data = rng.randbytes(rng.choice((1, 7, 64, 100, 4096, 9000)))
            store.write(handle, offset, data)
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset : offset + len(data)] = data
        elif choice < 0.85:
            size = rng.randrange(1, 70_000)
            store.set_attributes(ino, size=size, handle=handle)
            model.extend(bytes(max(0, size - len(model))))
            del model[size:]
        elif choice < 0.95:
            store.fsync(handle)
        else:
            close(store, handle)
            store = shop.reopen(store, clean=step % 2 == 0)
            handle = store.open_file(ino, os.O_RDWR)
        offset = rng.randrange(70_000)
        assert bytes(store.read(handle, offset, 5000)) == model[offset : offset + 5000]
    close(store, handle)
    assert read_file(store, ino) == model


def test_truncate_with_a_handle_waits_for_close(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"a", b"0123456789")
    handle = store.open_file(ino, os.O_RDWR)
    store.set_attributes(ino, size=4, handle=handle)
    assert read_file(store, ino) == b"0123"
    again = shop.reopen(store)
    assert read_file(again, ino) == b"0123456789"
    handle = again.open_file(ino, os.O_RDWR)
    again.set_attributes(ino, size=4, handle=handle)
    again.set_attributes(ino, size=6, handle=handle)
    close(again, handle)
    again = shop.reopen(again)
    assert read_file(again, ino) == b"0123\0\0"


@pytest.mark.parametrize("size", [0, 4, 20])
def test_truncate_without_a_handle_commits(shop: Shop, store: Store, size: int) -> None:
    ino = write_file(store, 1, b"a", b"0123456789")
    attributes = store.set_attributes(ino, size=size)
    assert attributes.size == size
    store = shop.reopen(store)
    assert read_file(store, ino) == b"0123456789".ljust(20, b"\0")[:size]
    assert not store.versions.open_versions


def test_truncate_without_a_handle_during_an_overwrite(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"old content")
    handle = open_for_overwrite(store, b"a", b"0123456789")
    store.set_attributes(ino, size=4)
    assert read_file(store, ino) == b"0123"
    close(store, handle, killed=True)
    assert read_file(store, ino) == b"old content"


def test_handles_are_checked(store: Store) -> None:
    ino, handle = create(store, b"a", b"x")
    reader = store.open_file(ino, os.O_RDONLY)
    writer = store.open_file(ino, os.O_WRONLY)
    with pytest.raises(BadHandleError):
        store.write(reader, 0, b"x")
    with pytest.raises(BadHandleError):
        store.read(writer, 0, 1)
    with pytest.raises(InvalidArgumentError):
        store.set_attributes(ino, size=1, handle=reader)
    with pytest.raises(InvalidArgumentError):
        store.set_attributes(1, size=0)
    with pytest.raises(IsDirectoryError):
        store.open_file(1, os.O_RDONLY)
    fifo = store.make_node(1, b"fifo", stat.S_IFIFO | 0o600, 0, 0, 0).ino
    with pytest.raises(InvalidArgumentError):
        store.open_file(fifo, os.O_RDONLY)
    for each in (handle, reader, writer):
        store.release(each)
    for verb in (store.release, store.fsync, lambda h: store.read(h, 0, 1)):
        with pytest.raises(BadHandleError):
            verb(handle)


def test_two_writers_see_each_other(shop: Shop, store: Store) -> None:
    ino, first = create(store, b"a", b"aaaa")
    second = store.open_file(ino, os.O_RDWR)
    store.write(second, 2, b"bb")
    assert bytes(store.read(first, 0, 9)) == b"aabb"
    store.flush(second, writer_killed=False)
    store.write(first, 0, b"c")
    store = shop.reopen(store)
    assert read_file(store, ino) == b"aabb"


# --- attributes -----------------------------------------------------------------------------


@pytest.mark.parametrize("committed", [False, True])
def test_attributes(shop: Shop, store: Store, committed: bool) -> None:
    ino, handle = create(store, b"a", b"data")
    if committed:
        store.flush(handle, writer_killed=False)
    store.set_attributes(ino, mode=0o4751, uid=1, gid=2, atime_ns=-5, mtime_ns=7, ctime_ns=9)
    store.set_xattr(ino, b"user.k", b"v" * 1000)
    store.set_xattr(ino, b"user.gone", b"")
    store.remove_xattr(ino, b"user.gone")
    if not committed:
        store.flush(handle, writer_killed=False)
    found = store.get_attributes(ino)
    assert (found.mode, found.uid, found.gid) == (stat.S_IFREG | 0o4751, 1, 2)
    assert (found.atime_ns, found.mtime_ns) == (-5, 7)
    store = shop.reopen(store)
    assert store.get_attributes(ino) == found
    assert store.get_xattr(ino, b"user.k") == b"v" * 1000
    assert store.list_xattrs(ino) == [b"user.k"]


def test_times_follow_what_happens(store: Store) -> None:
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    before = store.get_attributes(directory)
    ino = write_file(store, directory, b"f", b"x")
    after = store.get_attributes(directory)
    assert after.mtime_ns > before.mtime_ns
    first = store.get_attributes(ino)
    assert first.birth_ns <= first.mtime_ns == first.ctime_ns
    store.set_attributes(ino, mode=0o600)
    second = store.get_attributes(ino)
    assert (second.mtime_ns, second.birth_ns) == (first.mtime_ns, first.birth_ns)
    assert second.ctime_ns > first.ctime_ns
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 0, b"y")
    assert store.get_attributes(ino).mtime_ns > first.mtime_ns
    close(store, handle)
    store.link(ino, directory, b"g")
    assert store.get_attributes(ino).ctime_ns > second.ctime_ns


@pytest.mark.parametrize("kind", [stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK])
def test_special_files(shop: Shop, store: Store, kind: int) -> None:
    made = store.make_node(1, b"node", kind | 0o640, os.makedev(8, 17), 3, 4)
    store.set_xattr(made.ino, b"user.k", b"v")
    store = shop.reopen(store)
    found = store.lookup(1, b"node")
    assert (found.mode, found.rdev, found.uid, found.gid) == (kind | 0o640, made.rdev, 3, 4)
    assert found.rdev == os.makedev(8, 17)
    with pytest.raises(InvalidArgumentError):
        store.make_node(1, b"dir", stat.S_IFDIR | 0o755, 0, 0, 0)


def test_regular_file_by_mknod(shop: Shop, store: Store) -> None:
    ino = store.make_node(1, b"f", 0o644, 0, 0, 0).ino
    store = shop.reopen(store)
    assert stat.S_ISREG(store.get_attributes(ino).mode)
    assert read_file(store, ino) == b""
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 0, b"x")
    close(store, handle)
    assert read_file(store, ino) == b"x"


def test_setgid_directories_hand_their_group_on(store: Store) -> None:
    shared = store.make_directory(1, b"d", 0o2775, 5, 50).ino
    file_ino = write_file(store, shared, b"f", b"")
    inner = store.make_directory(shared, b"i", 0o755, 7, 70)
    assert store.get_attributes(file_ino).gid == 50
    assert (inner.gid, inner.mode & stat.S_ISGID) == (50, stat.S_ISGID)
    link = store.make_symlink(shared, b"l", b"t", 7, 70)
    assert (link.gid, link.mode) == (50, stat.S_IFLNK | 0o777)


def test_extended_attributes(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"a", b"")
    store.set_xattr(ino, b"user.k", b"1", create=True)
    with pytest.raises(ExistsError):
        store.set_xattr(ino, b"user.k", b"2", create=True)
    store.set_xattr(ino, b"user.k", b"2", replace=True)
    with pytest.raises(NoAttributeError):
        store.set_xattr(ino, b"user.none", b"2", replace=True)
    with pytest.raises(NoAttributeError):
        store.remove_xattr(ino, b"user.none")
    with pytest.raises(NoAttributeError):
        store.get_xattr(ino, b"user.none")
    with pytest.raises(UnsupportedOperationError):
        store.set_xattr(ino, b"system.posix_acl_access", b"x")
    for name in (b"", b"user." + b"x" * 251):
        with pytest.raises(NameTooLongError):
            store.set_xattr(ino, name, b"x")
    with pytest.raises(AttributeTooLargeError):
        store.set_xattr(ino, b"user.big", bytes(65_537))
    store.set_xattr(ino, b"user." + b"x" * 250, b"\0\xff")
    store = shop.reopen(store)
    assert store.get_xattr(ino, b"user." + b"x" * 250) == b"\0\xff"
    assert store.get_xattr(ino, b"user.k") == b"2"


def test_what_the_store_says_of_a_file_cannot_be_changed_or_listed(store: Store) -> None:
    """Archivers bring such names from elsewhere: for them it is no error."""
    ino = write_file(store, 1, b"a", b"")
    before = store.get_attributes(ino)
    for name in (b"user.cxlfs.state", b"user.cxlfs.commit", b"user.cxlfs.anything"):
        store.set_xattr(ino, name, b"damaged")
    for name in (b"user.cxlfs.state", b"user.cxlfs.commit"):
        store.remove_xattr(ino, name)
    for verb in (store.get_xattr, store.remove_xattr):
        with pytest.raises(NoAttributeError):
            verb(ino, b"user.cxlfs.anything")
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"complete"
    assert store.list_xattrs(ino) == []
    assert store.get_attributes(ino) == before
    store.volume.stop_writing("for a test")
    with pytest.raises(ReadOnlyError):
        store.set_xattr(ino, b"user.cxlfs.state", b"x")


def test_attributes_of_one_inode_fit_a_listing(store: Store) -> None:
    """listxattr(2) and getxattr(2) can return at most 64 KiB."""
    ino = write_file(store, 1, b"a", b"")
    for number in range(1000):
        try:
            store.set_xattr(ino, b"user.%d" % number + b"n" * 200, b"v" * 100)
        except AttributeTooLargeError:
            break
    else:
        pytest.fail("there is no limit")
    assert sum(len(name) + 1 for name in store.list_xattrs(ino)) <= 65_536


def test_many_attributes_on_a_file_not_committed_yet(shop: Shop, store: Store) -> None:
    """They travel in the record that makes the file: together they may be larger than one."""
    ino, handle = create(store, b"a", b"data")
    names = [b"user.%d" % number for number in range(12)]
    for name in names:
        store.set_xattr(ino, name, name * 400)
    close(store, handle)
    store = shop.reopen(store)
    assert read_file(store, ino) == b"data"
    for name in names:
        assert store.get_xattr(ino, name) == name * 400
