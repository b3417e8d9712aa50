"""A full store loses nothing: what ENOSPC means, what comes back, and a statfs that is true."""

from __future__ import annotations

import itertools
import os
import random

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.store import Store
from cxlfs.store.space import LEASE_BYTES_LEAST
from tests.support.shop import Shop, close, create, fill, until_no_space
from tests.support.stores import read_file, write_file


def test_fill_and_delete_leaks_nothing(shop: Shop, rng: random.Random) -> None:
    store = shop.new(size_bytes=2 << 20)
    store = shop.reopen(store, clean=True)
    before = store.statfs()
    for cycle in range(60):

        def save(number: int) -> None:
            _, handle = create(store, b"f%d" % number)  # noqa: B023 - called at once
            try:
                store.write(handle, 0, bytes([cycle]) * rng.randrange(1, 200_000))  # noqa: B023
            finally:
                store.release(handle)  # noqa: B023

        assert until_no_space(save) > 5
        for name in list(store.namespace.get(1).entries or {}):
            store.unlink(1, name)
        assert store.statfs() == before, f"cycle {cycle}"
        if cycle % 10 == 9:
            store = shop.reopen(store, clean=cycle % 20 == 9)
            assert store.statfs() == before, f"reopened after cycle {cycle}"


def test_statfs_follows_what_is_written(store: Store) -> None:
    before = store.statfs().free_bytes
    ino = write_file(store, 1, b"a", bytes(1000))
    assert before - store.statfs().free_bytes == 1000
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 1 << 40, b"far")
    close(store, handle)
    assert before - store.statfs().free_bytes <= 1024 + 64
    assert store.get_attributes(ino).allocated_bytes <= 2048
    store.unlink(1, b"a")
    assert store.statfs().free_bytes == before


def test_what_statfs_promises_can_be_written(shop: Shop, granularity: Granularity) -> None:
    store = shop.new(granularity=granularity)
    free = store.statfs().free_bytes
    ends = store.superblock.segment_count * LEASE_BYTES_LEAST  # what is left of each segment
    size = fill(store, piece=8192)
    assert free - ends <= size <= free
    assert store.statfs().free_bytes <= ends


def test_unlink_works_on_a_full_store(shop: Shop, store: Store) -> None:
    for number in range(8):
        write_file(store, 1, b"f%d" % number, bytes(100_000))
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    write_file(store, directory, b"below", bytes(1000))
    fill(store)
    store = shop.reopen(store)
    for number in range(8):
        store.unlink(1, b"f%d" % number)
    store.unlink(directory, b"below")
    store.remove_directory(1, b"d")
    store.rename(1, b"filler", 1, b"f")
    write_file(store, 1, b"again", bytes(400_000))


def test_full_store_takes_many_metadata_operations(shop: Shop, store: Store) -> None:
    """The journal rolls over again and again on a full store: never stuck."""
    ino = write_file(store, 1, b"a", b"a")
    fill(store)
    rollovers = store.volume.counters.rollovers
    for number in range(3000):
        store.set_attributes(ino, mtime_ns=number)
        store.rename(1, b"a", 1, b"b")
        store.rename(1, b"b", 1, b"a")
    assert store.volume.counters.rollovers > rollovers + 3
    store = shop.reopen(store)
    assert store.get_attributes(ino).mtime_ns == 2999


def test_full_store_can_be_reopened_again_and_again(shop: Shop, store: Store) -> None:
    size = fill(store)
    for round_number in range(12):
        store = shop.reopen(store, clean=round_number % 3 == 0)
        assert store.read_only_reason is None
        store.set_attributes(1, mode=0o700 + round_number % 8)
    assert store.get_attributes(store.lookup(1, b"filler").ino).size == size
    store.unlink(1, b"filler")
    fill(store, b"other")


def test_metadata_grows_until_no_space(shop: Shop, granularity: Granularity) -> None:
    """Names alone fill a store; then every one of them can be deleted again."""
    store = shop.new(size_bytes=1536 << 10, granularity=granularity)
    before = store.statfs()
    made = until_no_space(
        lambda n: store.make_symlink(1, b"%08d" % n + b"x" * 200, b"target" * 300, 0, 0)
    )
    assert made > 50
    store = shop.reopen(store)
    assert len(store.namespace.get(1).entries or {}) == made
    for number in range(made):
        store.unlink(1, b"%08d" % number + b"x" * 200)
    store.volume.rollover()
    assert store.statfs().free_bytes == before.free_bytes
    fill(store)


def test_extended_attributes_grow_until_no_space(shop: Shop) -> None:
    store = shop.new(size_bytes=1536 << 10)
    inos = [write_file(store, 1, b"f%d" % n, b"x") for n in range(100)]
    values: dict[int, list[bytes]] = {ino: [] for ino in inos}

    def add(step: int) -> None:
        name = b"user.%d" % (step // 100)
        store.set_xattr(inos[step % 100], name, name * 500)
        values[inos[step % 100]].append(name)

    assert until_no_space(add) > 50
    store = shop.reopen(store)
    for ino in inos:
        assert store.list_xattrs(ino) == values[ino]
    for number in range(100):
        store.unlink(1, b"f%d" % number)
    fill(store)


@pytest.mark.parametrize("piece", [8, 200, 4096])
def test_fragments_until_no_space(shop: Shop, rng: random.Random, piece: int) -> None:
    """Small pieces all over a sparse file: references fill the metadata, not the data."""
    store = shop.new(size_bytes=1536 << 10)
    ino, handle = create(store, b"sparse")
    written: dict[int, bytes] = {}

    def scatter(step: int) -> None:
        offset = rng.randrange(1 << 24) * 4096
        data = step.to_bytes(8, "little") * (piece // 8)
        store.write(handle, offset, data)
        written[offset] = data
        if step % 100 == 99:
            store.fsync(handle)

    assert until_no_space(scatter) > 100
    most_bytes = 3 * len(store.volume.space.data_segments()) * (64 << 10)
    assert store.volume.counters.moved_bytes <= most_bytes, "a refusal costs one look at all data"
    size = max(written) + piece
    store.set_attributes(ino, size=size, handle=handle)
    try:
        close(store, handle)
    except NoSpaceError:
        store.release(handle)
    store = shop.reopen(store)
    reader = store.open_file(ino, os.O_RDONLY)
    lost = [o for o, data in written.items() if bytes(store.read(reader, o, piece)) != data]
    assert len(lost) <= 100
    store.release(reader)
    store.unlink(1, b"sparse")
    fill(store)


def test_failed_create_leaves_nothing(shop: Shop) -> None:
    store = shop.new(size_bytes=1536 << 10)
    made = until_no_space(lambda n: store.make_directory(1, b"%d" % n + b"d" * 240, 0o755, 0, 0))
    assert made > 50
    inodes = len(store.namespace.inodes)
    for _ in range(3):
        with pytest.raises(NoSpaceError):
            create(store, b"file" * 60)
        with pytest.raises(NoSpaceError):
            store.make_node(1, b"node" * 60, 0o100644, 0, 0, 0)
    assert len(store.namespace.inodes) == inodes


def test_error_names_the_shortfall(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"big")
    with pytest.raises(NoSpaceError) as caught:
        store.write(handle, 0, bytes(store.media.size_bytes))
    assert caught.value.needed_bytes > caught.value.available_bytes == 0
    event = next(e for e in shop.events if e.kind == "no-space")
    assert (event.ino, event.path) == (ino, "/big")
    assert store.statistics().no_space_errors == 1
    store.set_attributes(ino, size=0, handle=handle)
    store.write(handle, 0, b"small")
    close(store, handle)
    assert read_file(store, ino) == b"small"


# --- room that is told ahead --------------------------------------------------------------------


def test_room_is_told_once_and_where_data_goes(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    store = shop.new_ordinary(64 << 20)
    assert store.volume.space.room_ahead() is None  # nothing is gained on this media
    assert not store.volume.space.has_room_ahead
    monkeypatch.setattr(MemoryMedia, "populates", True)
    told: list[tuple[int, int]] = []
    while store.volume.space.has_room_ahead:
        room = store.volume.space.room_ahead()
        assert room is not None
        told.append(room)
        assert room[1] <= 8 << 20
    places = sorted(told)
    assert all(a + b <= c for (a, b), (c, _) in itertools.pairwise(places))
    segment_bytes = store.superblock.segment_size_bytes
    assert sum(length for _, length in told) == store.volume.space.free_count * segment_bytes
    assert len(told) < store.volume.space.free_count, "segments side by side are one piece"
    write_file(store, 1, b"f", bytes(6 << 20))
    content = store.namespace.inodes[store.lookup(1, b"f").ino].content
    extents = store.volume.engine.list()
    for extent_id in set(content.export(0, content.size)["extent_id"].tolist()):
        [row] = extents[extents["id"] == extent_id].tolist()
        assert any(start <= row[1] and row[1] + row[2] <= start + size for start, size in told)
    assert store.volume.space.room_ahead() is None
    assert not store.volume.space.has_room_ahead
    store.volume.stop_writing("test")
    shop.stores.remove(store)
