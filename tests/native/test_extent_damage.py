"""Damaged media under file data: found, named exactly, never delivered, nothing else lost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import CorruptionError, DataFault, MediaError
from cxlfs.native import Granularity, MappedRegion
from cxlfs.native.extents import FileMap
from tests.native.test_extent_writes import refs_of
from tests.support.extents import (
    FIRST,
    HEADER_BYTES,
    SEGMENT_BYTES,
    Room,
    copy_extent,
    pattern,
    put,
    room,
    seeds,
)

START = FIRST + HEADER_BYTES
CHUNK = 4096


@pytest.fixture
def place() -> Iterator[Room]:
    with room(chunk=CHUNK) as made:
        yield made


def fault_of(content: FileMap, offset: int, length: int) -> DataFault:
    with pytest.raises(CorruptionError) as caught:
        content.read(offset, length)
    error = caught.value
    assert error.fault is not None
    assert (error.media_offset, error.expected, error.actual) == (
        error.fault.media_offset,
        error.fault.expected,
        error.fault.actual,
    )
    return error.fault


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
def test_a_flipped_bit_in_any_chunk_is_found_and_named(place: Room, seed: int) -> None:
    """The file has its chunks in another order than the extent, and only parts of some."""
    rng = random.Random(seed)
    size = 40_000
    content = place.new_map(capacity=size)
    content.write(0, pattern(size, seed))
    mixed = FileMap(place.engine, owner=2)
    position = 0
    pieces = [(i, rng.randint(1, min(3000, size - i))) for i in range(0, size, 3000)]
    rng.shuffle(pieces)
    for start, length in pieces:
        row = content.export(start, length)
        row["file_offset"] = position
        put(mixed, row)
        position += length + rng.choice([0, 100])
    mixed.set_size(position)
    data = bytes(mixed.read(0, position))
    for chunk in range(-(-size // CHUNK)):
        end = min((chunk + 1) * CHUNK, size)
        flipped = rng.randrange(chunk * CHUNK, end)
        bit = rng.randrange(8)
        place.flip(START + flipped, bit)
        before = place.engine.statistics().checksum_errors
        hits = 0
        for start, length, extent_id, offset in refs_of(mixed):
            low, high = max(offset, chunk * CHUNK), min(offset + length, end)
            if low >= high:
                assert mixed.read(start, length) == data[start : start + length]
                continue
            hits += 1
            fault = fault_of(mixed, start, length)
            assert (fault.extent_id, fault.chunk) == (extent_id, chunk)
            assert fault.media_offset == START + chunk * CHUNK
            assert (fault.file_offset, fault.length) == (start + low - offset, high - low)
            assert fault.expected != fault.actual
            wanted = start + rng.randrange(low, high) - offset
            assert fault_of(mixed, wanted, 1) == fault
            with pytest.raises(CorruptionError):
                mixed.peek(wanted, 1)
            if low > offset:
                part = low - offset
                assert mixed.read(start, part) == data[start : start + part]
            if high < offset + length:
                after = start + high - offset
                stop = start + length
                assert mixed.read(after, stop - after) == data[after:stop]
        assert hits
        assert place.engine.statistics().checksum_errors == before + 3 * hits
        found = place.engine.verify(1)
        assert found is not None
        assert [(f.chunk, f.media_offset) for f in found.faults] == [(chunk, START + chunk * CHUNK)]
        unverified = bytes(mixed.read(0, position, verify=False))
        assert len(unverified) == position
        place.flip(START + flipped, bit)
        assert mixed.read(0, position) == data


def test_a_read_that_fails_leaves_nothing_of_the_bad_chunk(place: Room) -> None:
    content = place.new_map(capacity=3 * CHUNK)
    content.write(0, b"a" * 3 * CHUNK)
    place.flip(START + CHUNK + 5, 0)
    target = bytearray(b"x" * 3 * CHUNK)
    with pytest.raises(CorruptionError):
        content.read_into(0, target)
    assert target[CHUNK : 2 * CHUNK] == bytes(CHUNK)


def test_verify_counts_every_bad_chunk(place: Room) -> None:
    content = place.new_map(capacity=200_000)
    content.write(0, pattern(200_000, 1))
    for chunk in range(200_000 // CHUNK):
        if chunk % 3:
            place.flip(START + chunk * CHUNK + chunk, chunk % 8)
    found = place.engine.verify(1)
    assert found is not None
    bad = [c for c in range(200_000 // CHUNK) if c % 3]
    assert found.fault_count == len(bad)
    assert found.bytes_checked == 200_000
    assert [f.chunk for f in found.faults] == bad[: len(found.faults)]
    assert place.engine.verify(99) is None


def test_a_small_overwrite_of_damaged_data_fails_and_changes_nothing(place: Room) -> None:
    content = place.new_map(capacity=100_000)
    data = pattern(5 * CHUNK, 1)
    content.write(0, data)
    place.flip(START + CHUNK, 0)
    before = refs_of(content)
    for offset, length in ((CHUNK + 10, 20), (CHUNK - 10, 20), (2 * CHUNK - 1, 1)):
        with pytest.raises(CorruptionError) as caught:
            content.write(offset, b"y" * length)
        assert caught.value.fault is not None
        assert caught.value.fault.file_offset == CHUNK
    assert refs_of(content) == before
    assert place.engine.list()["length"].tolist() == [len(data)]
    assert content.write(CHUNK, b"z" * CHUNK) == (CHUNK, 0)
    assert content.read(0, len(data)) == data[:CHUNK] + b"z" * CHUNK + data[2 * CHUNK :]


def test_a_copy_of_damaged_data_fails_and_changes_nothing(place: Room) -> None:
    content = place.new_map(capacity=100_000)
    content.write(0, pattern(5 * CHUNK, 1))
    target = place.open_extent(100_000)
    place.flip(START + 3 * CHUNK + 9, 3)
    with pytest.raises(CorruptionError) as caught:
        copy_extent(place.engine, 1, 100, 5 * CHUNK - 100, target)
    assert caught.value.fault is not None
    assert (caught.value.fault.extent_id, caught.value.fault.chunk) == (1, 3)
    assert place.engine.list()["length"].tolist() == [5 * CHUNK, 0]
    copy_extent(place.engine, 1, 100, 3 * CHUNK - 100, target)
    assert place.engine.list()["length"].tolist() == [5 * CHUNK, 3 * CHUNK - 100]


def test_a_definition_with_a_wrong_checksum_is_found_on_reading(place: Room) -> None:
    content = place.new_map(capacity=100_000)
    content.write(0, pattern(5 * CHUNK, 1))
    infos, crcs = place.engine.describe(1)
    crcs[2] ^= 1
    engine = place.another_engine()
    engine.define(infos, crcs)
    other = FileMap(engine, owner=1)
    put(other, content.export(0, 5 * CHUNK))
    other.set_size(5 * CHUNK)
    assert fault_of(other, 0, 5 * CHUNK).file_offset == 2 * CHUNK


@pytest.fixture
def shrunk(tmp_path: Path) -> Iterator[tuple[FileMap, Room, int]]:
    """Two chunks and a half in a file of which the medium then loses the end."""
    path = tmp_path / "image"
    size = FIRST + 2 * SEGMENT_BYTES
    with path.open("w+b") as file:
        file.truncate(size)
        handle = MappedRegion.map_handle(file.fileno(), size, granularity=Granularity.PAGE)
        region = MappedRegion(handle)
        place = Room(region, segments=2)
        content = place.new_map(capacity=200_000)
        content.write(0, b"q" * 160_000)
        lost = START + 70_000 // 4096 * 4096 + 4096 - START % 4096
        file.truncate(lost)
    yield content, place, lost
    place.engine.close()
    region.close()


def test_media_that_cannot_be_read_is_an_error_of_the_range(
    shrunk: tuple[FileMap, Room, int],
) -> None:
    content, place, lost = shrunk
    for verify in (True, False):
        with pytest.raises(MediaError) as caught:
            content.read(0, 160_000, verify=verify)
        fault = caught.value.fault
        assert fault is not None
        assert (fault.file_offset, fault.length, fault.chunk) == (65536, 65536, 1)
        assert caught.value.offset == fault.media_offset
        assert lost <= fault.media_offset < lost + 65536
        assert content.read(0, 65536, verify=verify) == b"q" * 65536
    assert content.read(65536, lost - START - 65536, verify=False) == b"q" * (lost - START - 65536)
    with pytest.raises(MediaError):
        content.peek(66_000, 10)
    with pytest.raises(MediaError):
        content.write(150_000, b"x")
    with pytest.raises(MediaError):
        content.write(160_000, b"x" * 10_000)
    assert content.size == 160_000
    target = place.open_extent(4096)
    with pytest.raises(MediaError):
        copy_extent(place.engine, 1, 100_000, 10, target)
    found = place.engine.verify(1)
    assert found is not None
    assert [f.chunk for f in found.faults] == [1, 2]
    assert place.engine.statistics().checksum_errors == 0
