"""A program that gives up what it writes: an overwrite brings the old content back."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import NoAttributeError, NotPermittedError
from cxlfs.store import Store
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import read_file, write_file

STATE = b"user.cxlfs.state"
REVERT = b"user.cxlfs.revert"


def content(store: Store, name: bytes) -> bytes:
    return read_file(store, store.lookup(1, name).ino)


@pytest.fixture
def old(store: Store) -> int:
    return write_file(store, 1, b"a", b"old" * 3000)


@pytest.mark.parametrize("staged", [False, True])
def test_an_overwrite_that_is_given_up(shop: Shop, store: Store, old: int, staged: bool) -> None:
    before = store.get_attributes(old)
    handle = open_for_overwrite(store, b"a", b"new" * 5000)
    if staged:
        store.commits.commit_old(older_than=1e18)
    store.set_xattr(old, REVERT, b"")
    store.write(handle, 0, b"more" * 9000)
    for _ in range(2):
        with pytest.raises(NotPermittedError):
            store.fsync(handle)
    with pytest.raises(NotPermittedError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    assert store.get_attributes(old).mtime_ns == before.mtime_ns
    assert content(store, b"a") == b"old" * 3000
    assert [e.kind for e in shop.events].count("reverted") == 1
    with pytest.raises(NoAttributeError):
        store.get_xattr(old, REVERT)
    store = shop.reopen(store)
    assert content(store, b"a") == b"old" * 3000
    assert store.get_xattr(old, STATE) == b"complete"


def test_given_up_and_begun_again(store: Store, old: int) -> None:
    handle = open_for_overwrite(store, b"a", b"new")
    store.set_xattr(old, REVERT, b"")
    store.set_attributes(old, size=0, handle=handle)
    store.write(handle, 0, b"again")
    close(store, handle)
    assert content(store, b"a") == b"again"


def test_what_is_not_an_overwrite_is_not_given_up(store: Store, old: int) -> None:
    store.set_xattr(old, REVERT, b"")  # nobody writes
    handle = store.open_file(old, os.O_WRONLY)
    store.write(handle, 0, b"in place")
    store.set_xattr(old, REVERT, b"")
    close(store, handle)
    assert content(store, b"a") == b"in place" + (b"old" * 3000)[8:]
    store.set_xattr(1, REVERT, b"")  # a directory


def test_a_new_file_that_is_given_up_is_incomplete(store: Store) -> None:
    ino, handle = create(store, b"x", b"begin")
    store.set_xattr(ino, REVERT, b"")
    with pytest.raises(NotPermittedError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    assert store.get_xattr(ino, STATE) == b"incomplete"
