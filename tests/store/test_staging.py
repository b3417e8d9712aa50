"""Contents too large for one record are staged in several: the old content or the new one."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.store import Store
from tests.support.shop import Shop, close, create
from tests.support.stores import read_file

PIECE = 4096


def scatter(
    store: Store, handle: int, rng: random.Random, content: dict[int, bytes], pieces: int
) -> None:
    """4 KiB here and there: each needs a reference of its own."""
    for _ in range(pieces):
        offset = rng.randrange(1 << 11) * PIECE * 2
        content[offset] = rng.randbytes(64)
        store.write(handle, offset, content[offset])


def check(store: Store, ino: int, content: dict[int, bytes]) -> None:
    handle = store.open_file(ino, os.O_RDONLY)
    for offset, data in content.items():
        assert bytes(store.read(handle, offset, 64)) == data
        assert not any(store.read(handle, offset + PIECE, 64))
    store.release(handle)


@pytest.mark.parametrize("verb", ["flush", "fsync", "rename", "link", "maintain"])
def test_new_file(shop: Shop, store: Store, rng: random.Random, verb: str) -> None:
    ino, handle = create(store, b"a")
    content: dict[int, bytes] = {}
    scatter(store, handle, rng, content, 1200)
    commits = store.volume.counters.commits
    if verb == "flush":
        store.flush(handle, writer_killed=False)
    elif verb == "fsync":
        store.fsync(handle)
    elif verb == "rename":
        store.rename(1, b"a", 1, b"b")
    elif verb == "link":
        store.link(ino, 1, b"b")
    else:
        store.commits.commit_old(older_than=1e18)
    assert store.volume.counters.commits > commits + 3
    expected = {"rename": {b"b"}, "link": {b"a", b"b"}}.get(verb, {b"a"})
    state = b"incomplete" if verb == "maintain" else b"complete"
    store = shop.reopen(store)
    assert set(store.namespace.get(1).entries or {}) == expected
    assert store.get_xattr(ino, b"user.cxlfs.state") == state
    check(store, ino, content)
    assert not store.versions.asides


@pytest.mark.parametrize("truncate", [False, True])
def test_old_file(shop: Shop, store: Store, rng: random.Random, truncate: bool) -> None:
    ino, handle = create(store, b"a")
    old: dict[int, bytes] = {}
    scatter(store, handle, rng, old, 700)
    close(store, handle)
    handle = store.open_file(ino, os.O_RDWR | (os.O_TRUNC if truncate else 0))
    new = {} if truncate else dict(old)
    scatter(store, handle, rng, new, 700)
    check(store, ino, new)
    store = shop.reopen(store)
    check(store, ino, old)
    handle = store.open_file(ino, os.O_RDWR | (os.O_TRUNC if truncate else 0))
    new = {} if truncate else dict(old)
    scatter(store, handle, rng, new, 700)
    store.fsync(handle)
    committed = dict(new)
    scatter(store, handle, rng, new, 700)
    check(store, ino, new)
    store = shop.reopen(store)
    check(store, ino, committed)


def test_again_and_again(shop: Shop, store: Store, rng: random.Random) -> None:
    """Staged once, then small changes in place, then staged again."""
    ino, handle = create(store, b"a")
    content: dict[int, bytes] = {}
    for pieces in (600, 3, 500, 1, 600):
        scatter(store, handle, rng, content, pieces)
        store.fsync(handle)
        check(store, ino, content)
    close(store, handle)
    store = shop.reopen(store)
    check(store, ino, content)


def test_killed_after_staging(shop: Shop, store: Store, rng: random.Random) -> None:
    ino, handle = create(store, b"a", b"old")
    close(store, handle)
    handle = store.open_file(ino, os.O_RDWR | os.O_TRUNC)
    content: dict[int, bytes] = {}
    scatter(store, handle, rng, content, 900)
    close(store, handle, killed=True)
    assert read_file(store, ino) == b"old"
    store = shop.reopen(store)
    assert read_file(store, ino) == b"old"
    aside = store.namespace.get(ino).aside
    assert aside is not None
    for offset, data in content.items():
        assert bytes(aside.read(offset, 64)) == data


def test_shared_extents_do_not_count_twice(shop: Shop, store: Store) -> None:
    """A crash while an ordinary change was staged: what is kept aside shares the old extents."""
    ino, handle = create(store, b"a")
    for block in range(600):
        store.write(handle, 2 * block * PIECE, b"x" * 64)
    close(store, handle)
    handle = store.open_file(ino, os.O_RDWR)
    for block in range(600):
        store.write(handle, (2 * block + 1) * PIECE, b"y" * 64)
    store.versions.stage(store.namespace.get(ino))
    store = shop.reopen(store)
    assert store.statistics().incomplete_bytes == 600 * 64
    before = store.statfs().free_bytes
    assert store.versions.drop_oldest_aside()
    assert store.statfs().free_bytes >= before
    store.unlink(1, b"a")
