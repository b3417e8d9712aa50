"""fallocate, SEEK_DATA and SEEK_HOLE, copy_file_range and syncfs: content, commit, revert, room."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import (
    BadHandleError,
    BeyondDataError,
    CorruptionError,
    FileTooLargeError,
    InvalidArgumentError,
    ReadOnlyError,
    UnsupportedOperationError,
)
from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.shop import Shop, close, create, open_for_overwrite, until_no_space
from tests.support.stores import CHUNK_BYTES, clean_round, read_file, write_file


def data_of(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def open_writer(store: Store, ino: int, flags: int = os.O_RDWR) -> int:
    return store.open_file(ino, flags)


def copy_to_new(store: Store, source: int, name: bytes, length: int = 1 << 40) -> int:
    """As cp does it; returns the inode of the copy."""
    reader = store.open_file(source, os.O_RDONLY)
    ino, handle = create(store, name)
    store.ranges.copy(reader, 0, handle, 0, length)
    close(store, handle)
    store.release(reader)
    return ino


# --- fallocate: content -------------------------------------------------------------------------


def test_allocate_sets_the_size(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"a", b"abc")
    store.allocate(handle, 2, 10_000)
    assert store.get_attributes(ino).size == 10_002
    store.allocate(handle, 0, 100)
    store.allocate(handle, 50_000, 100, keep_size=True)
    assert store.get_attributes(ino).size == 10_002
    close(store, handle)
    store = shop.reopen(store)
    assert read_file(store, ino) == b"abc" + bytes(9999)


@pytest.mark.parametrize("zero", [False, True], ids=["punch", "zero"])
def test_a_hole_is_exact_to_the_byte(
    shop: Shop, store: Store, rng: random.Random, zero: bool
) -> None:
    size = 70_000
    expected = bytearray(data_of(size))
    ino = write_file(store, 1, b"a", bytes(expected))
    handle = open_writer(store, ino)
    for _ in range(60):
        start, length = rng.randrange(size), rng.choice([1, 7, 4096, 9000])
        store.allocate(handle, start, length, keep_size=True, punch=not zero, zero=zero)
        end = min(start + length, size)
        expected[start:end] = bytes(end - start)
        assert bytes(store.read(handle, 0, size)) == expected
        if rng.random() < 0.3:
            store.write(handle, start, b"new")
            expected[start : start + 3] = b"new"
            size = len(expected)
        if rng.random() < 0.2:
            store.fsync(handle)
    close(store, handle)
    store = shop.reopen(store)
    assert read_file(store, ino) == expected


def test_zero_range_may_grow_the_file(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"x" * 100)
    handle = open_writer(store, ino)
    store.allocate(handle, 50, 100, keep_size=True, zero=True)
    assert store.get_attributes(ino).size == 100
    store.allocate(handle, 50, 100, zero=True)
    assert store.get_attributes(ino).size == 150
    close(store, handle)
    assert read_file(store, ino) == b"x" * 50 + bytes(100)


def test_a_punched_range_gives_its_space_back(store: Store) -> None:
    before = store.statfs().free_bytes
    ino = write_file(store, 1, b"a", data_of(600_000))
    handle = open_writer(store, ino)
    store.allocate(handle, 0, 600_000, keep_size=True, punch=True)
    close(store, handle)
    assert store.get_attributes(ino).allocated_bytes == 0
    assert store.get_attributes(ino).size == 600_000
    assert store.statfs().free_bytes == before


def test_what_fallocate_refuses(store: Store) -> None:
    ino, handle = create(store, b"a", b"abc")
    for flags in ({"punch": True}, {"punch": True, "zero": True, "keep_size": True}):
        with pytest.raises(UnsupportedOperationError):
            store.allocate(handle, 0, 1, **flags)
    for offset, length in ((-1, 5), (0, 0), (0, -1)):
        with pytest.raises(InvalidArgumentError):
            store.allocate(handle, offset, length)
    with pytest.raises(FileTooLargeError):
        store.allocate(handle, 1 << 62, 1 << 62)
    close(store, handle)
    reader = store.open_file(ino, os.O_RDONLY)
    with pytest.raises(BadHandleError):
        store.allocate(reader, 0, 1)
    store.release(reader)
    assert read_file(store, ino) == b"abc"


@pytest.mark.parametrize(
    "change",
    [
        lambda store, handle: store.allocate(handle, 10, 4000, keep_size=True, punch=True),
        lambda store, handle: store.allocate(handle, 10, 4000, zero=True),
        lambda store, handle: store.allocate(handle, 10, 90_000),
        lambda store, handle: store.ranges.copy(handle, 0, handle, 30_000, 20_000),
        lambda store, handle: store.ranges.copy(handle, 0, handle, 30_000, 20),
    ],
    ids=["punch", "zero", "allocate", "share", "copy"],
)
def test_a_change_is_committed_like_a_write(
    shop: Shop, store: Store, change: Callable[[Store, int], object]
) -> None:
    data = data_of(30_000)
    ino = write_file(store, 1, b"a", data)
    handle = open_writer(store, ino)
    change(store, handle)
    assert store.files.get(handle).wrote
    changed = read_file(store, ino)
    assert changed != data
    store = shop.reopen(store)  # not committed yet: gone
    assert read_file(store, ino) == data
    handle = open_writer(store, ino)
    change(store, handle)
    store.fsync(handle)
    store = shop.reopen(store)
    assert read_file(store, ino) == changed


def test_a_killed_writers_ranges_are_taken_back(shop: Shop, store: Store) -> None:
    other = write_file(store, 1, b"other", data_of(50_000, 2))
    ino = write_file(store, 1, b"a", b"the old content")
    handle = open_for_overwrite(store, b"a", data_of(20_000))
    reader = store.open_file(other, os.O_RDONLY)
    assert store.ranges.copy(reader, 0, handle, 20_000, 50_000) == 50_000
    store.allocate(handle, 100, 1000, keep_size=True, punch=True)
    store.allocate(handle, 0, 300_000)
    close(store, handle, killed=True)
    store.release(reader)
    assert read_file(store, ino) == b"the old content"
    assert store.versions.promises.bytes_open() == 0
    store = shop.reopen(store)
    assert read_file(store, ino) == b"the old content"


# --- seek ---------------------------------------------------------------------------------------


def test_seek(store: Store) -> None:
    _, handle = create(store, b"a")
    store.write(handle, 10_000, b"x" * 10_000)
    store.allocate(handle, 12_000, 1000, keep_size=True, punch=True)
    store.allocate(handle, 0, 50_000)
    assert store.seek(handle, 0, os.SEEK_DATA) == 10_000
    assert store.seek(handle, 10_000, os.SEEK_HOLE) == 12_000
    assert store.seek(handle, 12_000, os.SEEK_DATA) == 13_000
    assert store.seek(handle, 13_000, os.SEEK_HOLE) == 20_000
    assert store.seek(handle, 49_999, os.SEEK_HOLE) == 49_999
    for offset, whence in (
        (20_000, os.SEEK_DATA),
        (50_000, os.SEEK_HOLE),
        (50_000, os.SEEK_DATA),
        (-1, os.SEEK_DATA),
        (1 << 63, os.SEEK_HOLE),
    ):
        with pytest.raises(BeyondDataError):
            store.seek(handle, offset, whence)
    with pytest.raises(InvalidArgumentError):
        store.seek(handle, 0, os.SEEK_SET)
    close(store, handle)


# --- copy_file_range ----------------------------------------------------------------------------


def test_a_copy_takes_no_space(shop: Shop, store: Store) -> None:
    data = data_of(500_000)
    source = write_file(store, 1, b"a", data)
    before, written = store.statfs().free_bytes, store.statistics().bytes_written
    copy = copy_to_new(store, source, b"b")
    assert store.statistics().bytes_written == written
    assert store.statfs().free_bytes == before
    assert store.get_attributes(copy).allocated_bytes == 500_000
    store = shop.reopen(store)
    assert read_file(store, copy) == read_file(store, source) == data
    store.unlink(1, b"a")
    assert store.statfs().free_bytes == before
    assert read_file(store, copy) == data
    store.unlink(1, b"b")
    assert store.statfs().free_bytes - before == 500_000


@pytest.mark.parametrize("source_first", [True, False])
def test_copying_what_is_not_committed(shop: Shop, store: Store, source_first: bool) -> None:
    """The copy, or the source, is published first; the other is lost with the power or is not."""
    data = data_of(100_001)
    source, writer = create(store, b"a", data)
    store.fsync(writer)
    store.write(writer, 100_001, data)
    copy, handle = create(store, b"b")
    assert store.ranges.copy(writer, 0, handle, 77, 1 << 40) == 200_002
    store.write(writer, 200_002, b"appended")  # to another extent
    store.fsync(writer if source_first else handle)
    store = shop.reopen(store)
    if source_first:
        assert read_file(store, source) == data * 2 + b"appended"
        assert b"b" not in (store.namespace.get(1).entries or {})
    else:
        assert read_file(store, source) == data
        assert read_file(store, copy) == bytes(77) + data * 2


@pytest.mark.parametrize("fate", ["unlinked", "killed", "overwritten", "truncated", "closed"])
def test_the_copy_survives_the_source(shop: Shop, store: Store, fate: str) -> None:
    data = data_of(150_000)
    source = write_file(store, 1, b"a", b"old")
    writer = open_for_overwrite(store, b"a", data)
    store.files._handles[writer].readable = True
    copy, handle = create(store, b"b")
    store.ranges.copy(writer, 0, handle, 0, 150_000)
    if fate == "unlinked":
        store.unlink(1, b"a")
    elif fate == "overwritten":
        store.write(writer, 0, b"new" * 50_000)
    elif fate == "truncated":
        store.set_attributes(source, size=0, handle=writer)
        store.write(writer, 0, b"less")
    close(store, writer, killed=fate == "killed")
    close(store, handle)
    expected = {"killed": b"old", "overwritten": b"new" * 50_000, "truncated": b"less"}
    store.volume.rollover()
    store = shop.reopen(store)
    assert read_file(store, copy) == data
    if fate != "unlinked":
        assert read_file(store, source) == expected.get(fate, data)


def test_both_are_published_by_one_exchange(shop: Shop, store: Store) -> None:
    """One record that defines the shared extent, maybe twice."""
    data = data_of(100_001)
    source, writer = create(store, b"a", data)
    copy, handle = create(store, b"b")
    assert store.ranges.copy(writer, 1, handle, 0, 100_000) == 100_000
    store.rename(1, b"a", 1, b"b", exchange=True)
    store = shop.reopen(store)
    assert read_file(store, source) == data
    assert read_file(store, copy) == data[1:]
    assert store.lookup(1, b"a").ino == copy


def test_a_reverted_copy_leaves_the_source(shop: Shop, store: Store) -> None:
    data = data_of(150_000)
    source, writer = create(store, b"a", data)
    copy = write_file(store, 1, b"b", b"old")
    handle = open_for_overwrite(store, b"b", b"x")
    store.ranges.copy(writer, 0, handle, 0, 150_000)
    close(store, handle, killed=True)
    assert store.statistics().incomplete_bytes == 0  # they are the source's, too
    close(store, writer)
    assert store.versions.drop_oldest_aside()
    store = shop.reopen(store)
    assert read_file(store, source) == data
    assert read_file(store, copy) == b"old"


def test_ranges_and_ends_of_a_copy(store: Store, rng: random.Random) -> None:
    """Against a model: any ranges of two files, with holes, to and fro and within one."""
    contents = [bytearray(data_of(60_000, 1)), bytearray(data_of(9000, 2))]
    handles = [create(store, b"ab"[i : i + 1], bytes(contents[i]))[1] for i in (0, 1)]
    for step in range(400):
        source, target = rng.randrange(2), rng.randrange(2)
        offset, place = (rng.randrange(60_000) // rng.choice([1, 4096]) for _ in range(2))
        length = rng.choice([1, 100, 4096, 5000, 40_000])
        taken = bytes(contents[source][offset : offset + length])
        if source == target and taken and abs(offset - place) < len(taken):
            with pytest.raises(InvalidArgumentError):
                store.ranges.copy(handles[source], offset, handles[target], place, length)
            continue
        done = store.ranges.copy(handles[source], offset, handles[target], place, length)
        assert done == len(taken)
        if taken:
            grown = contents[target]
            grown.extend(bytes(max(0, place + len(taken) - len(grown))))
            grown[place : place + len(taken)] = taken
        if step % 7 == 0:
            store.allocate(handles[target], offset, length, keep_size=True, punch=True)
            end = min(offset + length, len(contents[target]))
            contents[target][offset:end] = bytes(max(0, end - offset))
        if step % 5 == 0:
            store.fsync(handles[rng.randrange(2)])
        if step % 50 == 0:
            clean_round(store, 0.97)
        for handle, content in zip(handles, contents, strict=True):
            assert bytes(store.read(handle, 0, 1 << 20)) == content
    for handle in handles:
        close(store, handle)


def test_what_a_copy_refuses(store: Store) -> None:
    source = write_file(store, 1, b"a", data_of(10_000))
    reader = store.open_file(source, os.O_RDONLY)
    _, handle = create(store, b"b")
    writer = store.open_file(source, os.O_WRONLY)
    with pytest.raises(BadHandleError):
        store.ranges.copy(handle, 0, reader, 0, 1)
    with pytest.raises(BadHandleError):
        store.ranges.copy(writer, 0, handle, 0, 1)
    for place in ((-1, 0, 1), (0, -1, 1), (0, 0, -1)):
        with pytest.raises(InvalidArgumentError):
            store.ranges.copy(reader, place[0], handle, place[1], place[2])
    with pytest.raises(FileTooLargeError):
        store.ranges.copy(reader, 0, handle, (1 << 62) - 5 + (1 << 62), 10_000)
    assert store.ranges.copy(reader, 10_000, handle, 0, 5) == 0
    assert store.ranges.copy(reader, 0, handle, 0, 0) == 0
    assert not store.files.get(handle).wrote
    close(store, handle)
    close(store, writer)
    store.release(reader)


@pytest.mark.parametrize("published", [True, False])
def test_the_cleaner_moves_what_is_shared(
    shop: Shop, granularity: Granularity, published: bool
) -> None:
    """Also for a copy that the journal has not heard of, and a source that is gone."""
    store = shop.new(granularity=granularity)
    kept: dict[int, bytes] = {}
    handles: list[int] = []
    for number in range(12):
        data = data_of(30_000, number)
        source = write_file(store, 1, b"f%d" % number, data)
        reader = store.open_file(source, os.O_RDONLY)
        copy, handle = create(store, b"c%d" % number)
        store.ranges.copy(reader, 7000, handle, 5, 20_000)
        kept[copy] = bytes(5) + data[7000:27_000]
        store.release(reader)
        if published:
            close(store, handle)
        else:
            handles.append(handle)
        if number % 2:
            store.unlink(1, b"f%d" % number)
        else:
            kept[source] = data
    before = store.volume.counters.moved_bytes
    while store.cleaner.compact(0.99):
        pass  # without a rollover: the journal says what was moved
    moved = store.volume.counters.moved_bytes - before
    assert moved > 0
    assert {ino: read_file(store, ino) for ino in kept} == kept
    shared = shop.reopen(store) if published else store
    for handle in handles:
        close(shared, handle)
    if not published:
        shared = shop.reopen(shared)
    assert {ino: read_file(shared, ino) for ino in kept} == kept


def test_a_copy_too_large_for_one_record(shop: Shop, granularity: Granularity) -> None:
    """Thousands of references: staged aside, then promoted."""
    store = shop.new(size_bytes=16 << 20, granularity=granularity)
    source, writer = create(store, b"a")
    expected = bytearray(2000 * 3000)
    for number in range(2000):
        store.write(writer, 3000 * number, bytes([number & 0xFF]) * 500)
        expected[3000 * number : 3000 * number + 500] = bytes([number & 0xFF]) * 500
    del expected[3000 * 1999 + 500 :]
    copy, handle = create(store, b"b")
    assert store.ranges.copy(writer, 0, handle, 0, 1 << 40) == len(expected)
    close(store, handle)
    assert store.get_attributes(copy).size == len(expected)
    store = shop.reopen(store)
    assert read_file(store, copy) == expected
    assert source not in store.namespace.inodes


def test_copies_until_no_space(shop: Shop) -> None:
    """References fill the metadata: then the copy fails, and nothing else does."""
    store = shop.new(size_bytes=1536 << 10)
    source, writer = create(store, b"a")
    for number in range(200):
        store.write(writer, 9000 * number, b"x" * 100)
    close(store, writer)
    data = read_file(store, source)
    made = until_no_space(lambda n: copy_to_new(store, source, b"c%d" % n))
    assert made > 5
    for name in list(store.namespace.get(1).entries or {}):
        for handle in [h for h in store.files._handles.values() if h.writable]:
            store.release(handle.id)
        if name.startswith(b"c") and int(name[1:]) < made:
            assert read_file(store, store.lookup(1, name).ino) == data
    for number in range(made):
        store.unlink(1, b"c%d" % number)
    copy_to_new(store, source, b"again")


def test_damage_is_not_hidden_by_a_copy(shop: Shop) -> None:
    shop.damaged = True
    store = shop.new()
    data = data_of(3 * CHUNK_BYTES)
    source = write_file(store, 1, b"a", data)
    extents = store.volume.engine.list()
    place = int(extents["media_offset"][0]) + CHUNK_BYTES + 5
    store.media.unguarded_memory()[place] ^= 1
    copy = copy_to_new(store, source, b"b")
    for ino in (source, copy):
        with pytest.raises(CorruptionError):
            read_file(store, ino)
    reader, (_, handle) = store.open_file(source, os.O_RDONLY), create(store, b"small")
    with pytest.raises(CorruptionError):
        store.ranges.copy(reader, CHUNK_BYTES, handle, 0, 100)
    store.release(handle)
    store.release(reader)
    store.abandon()
    (finding,) = [f for f in run_passes(store.media, structure_only=False) if f.uses]
    assert {use.path for use in finding.uses} == {b"/a", b"/b"}


# --- sync ---------------------------------------------------------------------------------------


def test_sync_makes_everything_durable(shop: Shop, store: Store) -> None:
    """As the periodic commit: what stays open is incomplete, an overwrite is kept aside."""
    write_file(store, 1, b"over", b"old")
    made, _ = create(store, b"new", b"new" * 9000)
    open_for_overwrite(store, b"over", b"half" * 9000)
    store.make_directory(1, b"d", 0o755, 0, 0)
    store.sync()
    store = shop.reopen(store)
    assert read_file(store, made) == b"new" * 9000
    assert store.get_xattr(made, b"user.cxlfs.state") == b"incomplete"
    assert read_file(store, store.lookup(1, b"over").ino) == b"old"
    assert [e.size_bytes for e in store.list_checkpoints() if e.kept_aside] == [36_000]
    assert store.lookup(1, b"d").nlink == 2
    store.sync()


def test_sync_tries_all_and_tells_the_first_error(store: Store) -> None:
    handles = [create(store, b"f%d" % n, data_of(9000, n))[1] for n in range(3)]
    store.stop_writing("a test")
    with pytest.raises(ReadOnlyError):
        store.sync()
    for handle in handles:
        store.release(handle)


def test_sync_of_a_store_that_only_reads(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"a", b"abc")
    store = shop.reopen(store, clean=True, read_only=True)
    store.sync()
    assert read_file(store, ino) == b"abc"
