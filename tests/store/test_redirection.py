"""What a shell redirects: ``program > file``, seen from the store."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.store import Store
from tests.support.shop import Shop, close, fill, until_no_space
from tests.support.stores import new_store, read_file, write_file


def content(store: Store, name: bytes) -> bytes:
    return read_file(store, store.lookup(1, name).ino)


@pytest.fixture
def old(store: Store) -> int:
    return write_file(store, 1, b"a", b"old" * 3000)


def redirect(store: Store, ino: int) -> int:
    """As a shell does for ``program > file``: it closes one of two descriptors before any write."""
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.flush(handle, writer_killed=False, still_held=lambda: True)
    return handle


@pytest.mark.parametrize("killed", [True, False])
def test_redirection_is_an_overwrite_like_another(
    shop: Shop, store: Store, old: int, killed: bool
) -> None:
    handle = redirect(store, old)
    assert store.volume.counters.reverts == 0
    store.write(handle, 0, b"new")
    close(store, handle, killed=killed)
    assert content(store, b"a") == (b"old" * 3000 if killed else b"new")
    store = shop.reopen(store)
    assert content(store, b"a") == (b"old" * 3000 if killed else b"new")


def test_a_crash_under_a_redirection_brings_the_old_content_back(store: Store, old: int) -> None:
    store.write(redirect(store, old), 0, b"new")
    store.abandon()
    store = Store.open(store.media)
    assert read_file(store, old) == b"old" * 3000


def test_a_redirection_that_writes_nothing_empties_the_file(store: Store, old: int) -> None:
    handle = redirect(store, old)
    store.flush(handle, writer_killed=False, still_held=lambda: False)
    assert content(store, b"a") == b""
    store.release(handle)
    assert content(store, b"a") == b""


@pytest.mark.parametrize(("size", "kept"), [(100, True), (2 << 20, False)])
def test_a_redirected_log_keeps_its_last_lines(size: int, kept: bool) -> None:
    """What is small at the first periodic commit; a checkpoint is larger by then."""
    store = new_store(16 << 20)
    ino = write_file(store, 1, b"a", b"old")
    handle = redirect(store, ino)
    store.write(handle, 0, b"x" * size)
    store.maintain(1e9)
    store.write(handle, size, b"last line")
    close(store, handle, killed=True)
    assert content(store, b"a") == (b"x" * size + b"last line" if kept else b"old")


@pytest.mark.parametrize("cause", ["sync", "room"])
def test_what_is_committed_sooner_is_no_log_for_that(shop: Shop, store: Store, cause: str) -> None:
    """A sync of anybody's, a store that is nearly full: nothing is known of who writes."""
    ino = write_file(store, 1, b"a", b"old" * 3000)
    handle = redirect(store, ino)
    store.write(handle, 0, b"new")
    if cause == "sync":
        store.sync()
        close(store, handle, killed=True)
    else:
        fill(store)
        until_no_space(lambda number: store.write(handle, 3 + 4096 * number, bytes(4096)))
        with pytest.raises(NoSpaceError):
            store.flush(handle, writer_killed=False)
        store.release(handle)
    assert content(store, b"a") == b"old" * 3000
    assert content(shop.reopen(store), b"a") == b"old" * 3000


def test_a_log_that_others_have_synced_is_one_at_the_periodic_commit(
    shop: Shop, store: Store
) -> None:
    """Also where nothing was written since: what is staged aside becomes the content."""
    ino = write_file(store, 1, b"a", b"old")
    handle = redirect(store, ino)
    store.write(handle, 0, b"first line")
    store.sync()
    assert store.namespace.get(ino).aside is not None
    store.maintain(1e9)
    close(store, handle, killed=True)
    assert content(store, b"a") == b"first line"
    assert content(shop.reopen(store), b"a") == b"first line"


def test_of_several_redirected_programs_the_last_keeps_what_it_wrote(
    store: Store, old: int
) -> None:
    """``{ one; two; } > log``: the content before is gone with the end of the first."""
    handle = redirect(store, old)
    store.write(handle, 0, b"one ")
    store.flush(handle, writer_killed=False, still_held=lambda: True)
    assert content(store, b"a") == b"one "
    store.write(handle, 4, b"two")
    close(store, handle, killed=True)
    assert content(store, b"a") == b"one two"


def test_a_new_file_of_a_killed_redirected_program_is_incomplete(store: Store) -> None:
    attributes, handle = store.create(1, b"n", 0o644, 0, 0, os.O_WRONLY)
    store.flush(handle, writer_killed=False, still_held=lambda: True)
    store.write(handle, 0, b"part")
    close(store, handle, killed=True)
    assert content(store, b"n") == b"part"
    assert store.get_xattr(attributes.ino, b"user.cxlfs.state") == b"incomplete"
