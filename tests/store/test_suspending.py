"""A store that is suspended leaves the media as a closed one does, and goes on where it was."""

from __future__ import annotations

import pytest

from cxlfs.errors import NoSpaceError, ReadOnlyError
from cxlfs.store import Store, StoreOptions
from cxlfs.store.suspending import SUSPENDED, resume_writing, suspend_writing
from cxlfs.verify import run_passes
from tests.support.shop import Shop, create
from tests.support.stores import read_file, write_file


def assert_clean(store: Store) -> None:
    """Another opening of the same media finds nothing to recover; it changes nothing."""
    assert not list(run_passes(store.media, structure_only=False))
    again = Store.open(store.media, StoreOptions(read_only=True))
    assert again.statistics().recovery.clean
    again.abandon()


def test_a_suspended_store_is_clean_and_can_be_read(store: Store) -> None:
    ino = write_file(store, 1, b"file", b"content")
    suspend_writing(store)
    assert_clean(store)
    statistics = store.statistics()
    assert (statistics.state, statistics.reason) == ("READ-ONLY", SUSPENDED)
    generation = statistics.generation
    with pytest.raises(ReadOnlyError, match="remounted"):
        store.make_directory(1, b"directory", 0o755, 0, 0)
    assert not store.maintain(1e9)
    store.sync()
    assert read_file(store, ino) == b"content"
    suspend_writing(store)
    store.close()
    again = Store.open(store.media, StoreOptions(read_only=True))
    assert again.statistics().generation == generation, "closing wrote nothing"
    again.close()


def test_a_resumed_store_goes_on(shop: Shop, store: Store) -> None:
    first = write_file(store, 1, b"first", b"before")
    for number in range(3):
        suspend_writing(store)
        assert_clean(store)
        resume_writing(store)
        assert store.statistics().state == "ONLINE"
        write_file(store, 1, b"%d" % number, b"after")
        store.unlink(1, b"%d" % number)
    resume_writing(store)
    last = write_file(store, 1, b"last", b"end")
    store = shop.reopen(store)
    assert read_file(store, first) == b"before"
    assert read_file(store, last) == b"end"


def test_what_is_open_is_settled(store: Store) -> None:
    ino, handle = create(store, b"open", b"half")
    suspend_writing(store)
    assert_clean(store)
    store.release(handle)
    resume_writing(store)
    assert read_file(store, ino) == b"half"
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"incomplete"


def test_a_store_that_stopped_writing_stays_so(store: Store) -> None:
    store.stop_writing("for a test")
    suspend_writing(store)
    with pytest.raises(ReadOnlyError, match="for a test"):
        resume_writing(store)


def test_without_room_for_a_journal_it_stays_suspended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspend_writing(store)

    def refuse() -> None:
        raise NoSpaceError("none")

    with monkeypatch.context() as full:
        full.setattr(store.volume, "begin_journal", refuse)
        with pytest.raises(NoSpaceError):
            resume_writing(store)
    assert store.read_only_reason == SUSPENDED
    resume_writing(store)
    write_file(store, 1, b"file", b"content")
