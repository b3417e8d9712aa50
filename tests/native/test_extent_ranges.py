"""Ranges of a content: where data is, and what sharing a range does to references and deltas."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cxlfs.errors import (
    BeyondDataError,
    CorruptionError,
    FileTooLargeError,
    InvalidArgumentError,
    InvariantError,
)
from cxlfs.native.extents import Counting, FileMap
from tests.native.test_extent_writes import refs_of
from tests.support.extents import CHUNK_BYTES, FIRST, HEADER_BYTES, Room, pattern, room

LARGEST = (1 << 63) - 1
MOST = (1 << 64) - 1


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


def published(place: Room, size: int, seed: int = 1) -> tuple[FileMap, bytes]:
    """A content that the journal knows."""
    data = pattern(size, seed)
    content = place.new_map(capacity=size + 64)
    content.write(0, data)
    content.take_delta().apply(content, None)
    content.close_lease()
    return content, data


# --- looking ------------------------------------------------------------------------------------


def test_seek_finds_data_and_holes(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(10_000, b"a" * 5000)
    content.write(20_000, b"b" * 5000)
    content.truncate(40_000)
    for offset, data, hole in [
        (0, 10_000, 0),
        (9999, 10_000, 9999),
        (10_000, 10_000, 15_000),
        (14_999, 14_999, 15_000),
        (15_000, 20_000, 15_000),
        (24_999, 24_999, 25_000),
    ]:
        assert content.seek(offset, hole=False) == data
        assert content.seek(offset, hole=True) == hole
    assert content.seek(39_999, hole=True) == 39_999
    for offset in (25_000, 39_999, 40_000, LARGEST, MOST):
        with pytest.raises(BeyondDataError):
            content.seek(offset, hole=False)
    for offset in (40_000, LARGEST, MOST):
        with pytest.raises(BeyondDataError):
            content.seek(offset, hole=True)


def test_the_end_of_file_is_a_hole(place: Room) -> None:
    content, data = published(place, 10_000)
    assert content.seek(0, hole=True) == len(data)
    assert content.seek(len(data) - 1, hole=True) == len(data)


def test_seek_crosses_references_that_touch(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(4096, b"b" * 4096)
    content.write(0, b"a" * 4096)
    content.write(8192, b"c" * 4096)
    assert content.ref_count > 1
    assert content.seek(0, hole=True) == 12_288


def test_mapped_counts_bytes_and_references(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(10_000, b"a" * 5000)
    content.write(20_000, b"b" * 5000)
    assert content.mapped(0, MOST) == (10_000, 2)
    assert content.mapped(12_000, 10_000) == (5000, 2)
    assert content.mapped(15_000, 5000) == (0, 0)
    assert content.mapped(MOST, MOST) == (0, 0)


# --- sharing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4095, 65_537, 150_000])
@pytest.mark.parametrize("offset", [0, 1, 63, 4096])
@pytest.mark.parametrize("target_offset", [0, 5, 8192])
def test_a_range_of_any_alignment(place: Room, size: int, offset: int, target_offset: int) -> None:
    content, data = published(place, 200_000)
    target = place.new_map(2)
    written = place.engine.statistics().bytes_written
    assert content.share(offset, size, target, target_offset) == size
    assert target.size == target_offset + size
    assert target.read(0, 1 << 20) == bytes(target_offset) + data[offset : offset + size]
    assert refs_of(target) == [(target_offset, size, 1, offset)]
    assert place.engine.statistics().bytes_written == written
    assert int(place.engine.usage().sum()) == 200_000  # shared bytes count once


def test_a_copy_ends_at_the_end_of_file(place: Room) -> None:
    content, data = published(place, 10_000)
    target = place.new_map(2)
    assert content.share(9000, MOST, target, 0) == 1000
    assert content.share(10_000, 1, target, 0) == 0
    assert content.share(MOST, MOST, target, 0) == 0
    assert target.read(0, 1 << 20) == data[9000:]
    with pytest.raises(FileTooLargeError):
        content.share(0, MOST, target, LARGEST - 9999)
    with pytest.raises(FileTooLargeError):
        content.share(0, 1, target, MOST)
    assert target.size == 1000


def test_holes_replace_what_was_there(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 100)
    content.write(9000, b"b" * 100)
    content.close_lease()
    target = place.new_map(2, capacity=1 << 16)
    target.write(0, b"c" * 20_000)
    target.take_delta().apply(target, None)
    assert content.share(0, 9100, target, 500) == 9100
    expected = b"c" * 500 + b"a" * 100 + bytes(8900) + b"b" * 100 + b"c" * 10_400
    assert target.read(0, 1 << 20) == expected
    assert target.seek(0, hole=True) == 600
    assert target.take_delta().refs["extent_id"].tolist() == [1, 0, 1]


def test_within_one_content(place: Room) -> None:
    content, data = published(place, 10_000)
    assert content.share(0, 5000, content, 5000) == 5000
    assert content.share(1000, 500, content, 100_000) == 500
    expected = data[:5000] + data[:5000]
    assert content.read(0, 1 << 20) == expected + bytes(90_000) + data[1000:1500]
    for offset, target_offset in ((0, 4999), (4999, 0), (7, 7)):
        with pytest.raises(InvalidArgumentError):
            content.share(offset, 5000, content, target_offset)
    assert content.share(99_000, 5000, content, 100_500) == 1500  # cut first, then they are apart


def test_an_open_extent_is_not_shared(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 5000)
    target = place.new_map(2)
    assert content.share(0, 5000, target, 0) is None
    assert (target.size, target.is_dirty, refs_of(target)) == (0, True, [])
    content.close_lease()
    assert content.share(0, 5000, target, 0) == 5000


def test_not_between_engines(place: Room) -> None:
    content, _ = published(place, 100)
    other = place.another_engine()
    target = FileMap(other, owner=2)
    with pytest.raises(InvariantError):
        content.share(0, 100, target, 0)
    other.close()


# --- publishing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("copy_first", [False, True])
def test_whoever_publishes_first_defines_the_extent(place: Room, copy_first: bool) -> None:
    """Half of the extent is known, half is not; both contents name both halves."""
    data = pattern(CHUNK_BYTES + 777, 3)
    content = place.new_map(capacity=1 << 17)
    content.write(0, data[:999])
    content.take_delta().apply(content, None)
    content.write(999, data[999:])
    content.close_lease()
    target = place.new_map(2)
    content.share(0, len(data), target, 64)
    order = [target, content] if copy_first else [content, target]
    first = order[0].take_delta()
    assert first.extents[["id", "first_chunk", "crc_count"]].tolist() == [(1, 0, 2)]
    again = order[1].take_delta()
    assert again.extents.tolist() == first.extents.tolist()  # not durable yet: both say it
    again.cancel(order[1])
    first.apply(order[0], None)
    second = order[1].take_delta()
    assert len(second.extents) == 0
    second.apply(order[1], None)
    assert target.read(64, 1 << 20) == content.read(0, 1 << 20) == data


def test_the_copy_outlives_the_source(place: Room) -> None:
    data = pattern(10_000, 3)
    content = place.new_map(capacity=1 << 16)
    content.write(0, data)
    content.close_lease()
    target = place.new_map(2)
    content.share(0, 10_000, target, 0)
    content.close()
    delta = target.take_delta()
    assert delta.extents["length"].tolist() == [10_000]
    replayed_engine = place.another_engine()
    replayed_engine.define(delta.extents, delta.crcs)
    replayed = FileMap(replayed_engine, owner=2)
    replayed.replay(delta.cut, delta.refs.tobytes(), delta.size)
    assert replayed.read(0, 1 << 20) == data
    delta.apply(target, None)
    assert place.engine.dead_segments() == []
    target.close()
    assert place.engine.dead_segments() == [0]
    replayed_engine.close()


def test_later_writes_stay_apart(place: Room) -> None:
    content, data = published(place, 10_000)
    target = place.new_map(2, capacity=1 << 16)
    content.share(0, 10_000, target, 0)
    target.write(5000, b"x" * 10)
    content.attach_lease(place.open_extent(1 << 16))
    content.write(0, b"y" * 10)
    assert target.read(0, 1 << 20) == data[:5000] + b"x" * 10 + data[5010:]
    assert content.read(0, 1 << 20) == b"y" * 10 + data[10:]


def test_damage_shows_in_both(place: Room) -> None:
    content, _ = published(place, 3 * CHUNK_BYTES)
    place.flip(FIRST + HEADER_BYTES + CHUNK_BYTES + 5, 3)
    target = place.new_map(2)
    content.share(CHUNK_BYTES - 100, CHUNK_BYTES, target, 7)
    for reader, offset, length in ((content, CHUNK_BYTES, 10), (target, 107, 10)):
        with pytest.raises(CorruptionError) as caught:
            reader.read(offset, length)
        assert caught.value.fault is not None
        assert caught.value.fault.file_offset == (CHUNK_BYTES if reader is content else 107)
    assert len(target.read(7, 100)) == 100


def test_bytes_count_once_by_the_first_that_fits(place: Room) -> None:
    """Kept before replaced before aside, whatever the order in which maps come and change."""
    content, _ = published(place, 10_000)
    target = place.new_map(2)
    content.share(0, 4000, target, 0)
    other, _ = published(place, 500, seed=2)

    def counts() -> tuple[int, int, int]:
        found = place.engine.statistics()
        assert found.leased_bytes == 0
        total = found.kept_bytes + found.replaced_bytes + found.aside_bytes
        assert int(np.sum(place.engine.usage())) == total
        return found.kept_bytes, found.replaced_bytes, found.aside_bytes

    assert counts() == (10_500, 0, 0)
    content.count_as(Counting.ASIDE)
    assert counts() == (4500, 0, 6000)
    target.count_as(Counting.REPLACED)
    assert counts() == (500, 4000, 6000)
    clone = content.clone()
    assert counts() == (10_500, 0, 0), "a clone counts as kept"
    clone.truncate(3000)
    assert counts() == (3500, 1000, 6000)
    clone.count_as(Counting.REPLACED)
    other.count_as(Counting.ASIDE)
    assert counts() == (0, 4000, 6500)
    clone.close()
    content.close()
    assert counts() == (0, 4000, 500)
    target.punch(1000, 1000)
    assert counts() == (0, 3000, 500)
    target.count_as(Counting.KEPT)
    assert counts() == (3000, 0, 500)
    for rest in (target, other):
        rest.close()
    assert counts() == (0, 0, 0)
