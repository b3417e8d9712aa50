"""close, fsync, rename and link are commit points; names are complete or say that they are not."""

from __future__ import annotations

import os
import time

import pytest

from cxlfs.errors import NotFoundError
from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.store.commits import COMMITS_PER_STEP
from tests.support.shop import Shop, close, create, open_for_overwrite
from tests.support.stores import picture, read_file, write_file

STATE = b"user.cxlfs.state"


def content(store: Store, name: bytes, parent: int = 1) -> bytes:
    return read_file(store, store.lookup(parent, name).ino)


def names(store: Store, ino: int = 1) -> set[bytes]:
    return set(store.namespace.get(ino).entries or {})


def test_close_commits(shop: Shop, store: Store) -> None:
    _, handle = create(store, b"a", b"data")
    store.flush(handle, writer_killed=False)
    store = shop.reopen(store)
    assert content(store, b"a") == b"data"
    assert store.get_xattr(store.lookup(1, b"a").ino, STATE) == b"complete"


def test_close_without_a_write_commits(shop: Shop, store: Store) -> None:
    _, handle = create(store, b"touched")
    store.flush(handle, writer_killed=False)
    store = shop.reopen(store)
    assert content(store, b"touched") == b""


def test_not_committed_before_close(shop: Shop, store: Store) -> None:
    create(store, b"a", b"data")
    assert names(store) == {b"a"}
    store = shop.reopen(store)
    assert names(store) == set()


def test_release_without_flush_commits(shop: Shop, store: Store) -> None:
    _, handle = create(store, b"a", b"data")
    store.release(handle)
    store = shop.reopen(store)
    assert content(store, b"a") == b"data"


@pytest.mark.parametrize("data_only", [False, True])
def test_fsync_commits(shop: Shop, store: Store, data_only: bool) -> None:
    _, handle = create(store, b"a", b"one")
    store.fsync(handle, data_only=data_only)
    store.write(handle, 3, b"two")
    store = shop.reopen(store)
    assert content(store, b"a") == b"one"


def test_every_fsync_commits_what_is_new(shop: Shop, store: Store) -> None:
    _, handle = create(store, b"a")
    expected = b""
    for step in range(40):
        piece = bytes([step]) * (17 * step + 1)
        store.write(handle, len(expected), piece)
        expected += piece
        store.fsync(handle)
    store = shop.reopen(store)
    assert content(store, b"a") == expected


def test_rename_commits_content_of_an_open_file(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"a.tmp", b"weights")
    store.rename(1, b"a.tmp", 1, b"a")
    store.write(handle, 7, b" and more")
    store = shop.reopen(store)
    assert names(store) == {b"a"}
    assert content(store, b"a") == b"weights"
    assert store.lookup(1, b"a").ino == ino


def test_rename_of_an_open_overwrite_publishes_it(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"old")
    open_for_overwrite(store, b"a", b"new")
    store.rename(1, b"a", 1, b"b")
    store = shop.reopen(store)
    assert content(store, b"b") == b"new"


def test_rename_directory_leaves_overwrites_below_unpublished(shop: Shop, store: Store) -> None:
    directory = store.make_directory(1, b"step-1.tmp", 0o755, 0, 0).ino
    write_file(store, directory, b"shard-0", b"complete")
    write_file(store, directory, b"shard-1", b"old")
    handle = store.open_file(store.lookup(directory, b"shard-1").ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"half")
    store.rename(1, b"step-1.tmp", 1, b"step-1")
    store = shop.reopen(store)
    moved = store.lookup(1, b"step-1").ino
    assert moved == directory
    assert content(store, b"shard-0", moved) == b"complete"
    assert content(store, b"shard-1", moved) == b"old"


def test_link_commits_content(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"a", b"data")
    store.link(ino, 1, b"b")
    store.write(handle, 4, b"tail")
    store = shop.reopen(store)
    assert content(store, b"a") == content(store, b"b") == b"data"
    assert store.get_attributes(ino).nlink == 2


def test_names_are_committed_in_order(shop: Shop) -> None:
    store = shop.new(granularity=Granularity.LINE)
    first = store.make_directory(1, b"first", 0o755, 0, 0)
    store.make_symlink(1, b"second", b"first", 0, 0)
    store.unlink(1, b"second")
    store.make_node(1, b"third", 0o010644, 0, 0, 0)
    store = shop.reopen(store)
    assert names(store) == {b"first", b"third"}
    assert store.lookup(1, b"first").ino == first.ino


def test_periodic_commit_marks_new_files_incomplete(shop: Shop, granularity: Granularity) -> None:
    store = shop.new(granularity=granularity, commit_interval_s=30.0)
    ino, handle = create(store, b"events.log", b"line 1\n")
    began = store.namespace.get(ino).version
    assert began is not None
    now = began.began_monotonic  # type: ignore[attr-defined]
    store.maintain(now + 29)
    assert store.get_xattr(ino, b"user.cxlfs.commit") == b"0"
    store.maintain(now + 31)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    store.write(handle, 7, b"line 2\n")
    again = shop.reopen(store)
    assert content(again, b"events.log") == b"line 1\n"
    assert again.get_xattr(ino, STATE) == b"incomplete"
    assert [e.state for e in again.list_checkpoints()] == ["incomplete"]


def test_close_completes_what_was_committed_periodically(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"log", b"one")
    store.commits.commit_old(older_than=1e18)
    store.write(handle, 3, b"two")
    store.commits.commit_old(older_than=1e18)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    close(store, handle)
    store = shop.reopen(store)
    assert content(store, b"log") == b"onetwo"
    assert store.get_xattr(ino, STATE) == b"complete"


def test_close_without_new_bytes_completes(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"log", b"one")
    store.commits.commit_old(older_than=1e18)
    close(store, handle)
    store = shop.reopen(store)
    assert store.get_xattr(ino, STATE) == b"complete"


def test_incomplete_stays_until_a_writer_closes(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"log", b"one")
    close(store, handle, killed=True)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    store = shop.reopen(store)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    reader = store.open_file(ino, os.O_RDONLY)
    close(store, reader)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    store.set_attributes(ino, mode=0o600)
    store = shop.reopen(store)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    writer = store.open_file(ino, os.O_WRONLY)
    store.write(writer, 3, b"two")
    close(store, writer)
    assert store.get_xattr(ino, STATE) == b"complete"


def test_periodic_commit_in_place_of_an_old_file(shop: Shop, store: Store) -> None:
    """A writer that did not truncate goes on with a complete file: it stays complete."""
    ino = write_file(store, 1, b"log", b"one")
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 3, b"two")
    store.commits.commit_old(older_than=1e18)
    store = shop.reopen(store)
    assert content(store, b"log") == b"onetwo"
    assert store.get_xattr(ino, STATE) == b"complete"


def test_fsync_of_a_directory(shop: Shop, store: Store) -> None:
    store.make_directory(1, b"d", 0o755, 0, 0)
    store.fsync_directory(1)
    before = picture(store)
    store = shop.reopen(store)
    assert picture(store) == before


def test_unlink_is_not_undone(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"data")
    store.unlink(1, b"a")
    store = shop.reopen(store)
    with pytest.raises(NotFoundError):
        store.lookup(1, b"a")


def test_clean_close_commits_what_is_open(shop: Shop, store: Store) -> None:
    ino, _ = create(store, b"new", b"data")
    write_file(store, 1, b"old", b"old")
    open_for_overwrite(store, b"old", b"half")
    store = shop.reopen(store, clean=True)
    assert content(store, b"new") == b"data"
    assert store.get_xattr(ino, STATE) == b"incomplete"
    assert content(store, b"old") == b"old"
    aside = [e for e in store.list_checkpoints(b"/old") if e.kept_aside]
    assert [(e.size_bytes, e.state) for e in aside] == [(4, "incomplete")]


def test_commit_sequence_grows(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"1")
    first = int(store.get_xattr(ino, b"user.cxlfs.commit"))
    write_file(store, 1, b"a", b"2")
    second = int(store.get_xattr(ino, b"user.cxlfs.commit"))
    assert 0 < first < second == store.statistics().last_lsn


def test_sync_and_the_periodic_commit_of_many_files_go_in_steps(shop: Shop, store: Store) -> None:
    """What is begun after a sync was asked for is not part of it."""
    count = 3 * COMMITS_PER_STEP
    inos = [create(store, b"%d" % number, b"x")[0] for number in range(count)]
    began = time.monotonic()
    counters, steps, before = store.volume.counters, list[int](), store.volume.counters.commits
    while store.commits.sync_step(began):
        steps.append(counters.commits - before)
        create(store, b"later%d" % len(steps), b"y")
        before = counters.commits
    assert max(steps) <= COMMITS_PER_STEP
    assert len(steps) >= 3
    assert all(store.namespace.get(ino).version is None for ino in inos)
    late = [create(store, b"late%d" % number, b"x")[0] for number in range(count)]
    waiting = len(store.versions.open_versions)
    assert store.maintain(time.monotonic() + 1000)
    assert len(store.versions.open_versions) == waiting - COMMITS_PER_STEP
    while store.maintain(time.monotonic() + 1000):
        pass
    assert all(not store.namespace.get(ino).uncommitted for ino in late)
    store = shop.reopen(store)
    assert content(store, b"%d" % (count - 1)) == b"x"
