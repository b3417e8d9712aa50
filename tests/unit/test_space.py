"""Segment states: what may be taken, what comes back and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from cxlfs.errors import InvariantError, NoSpaceError
from cxlfs.format import layout, segments, superblock
from cxlfs.media import MemoryMedia
from cxlfs.store.loading import empty_engine
from cxlfs.store.space import LEASE_BYTES_LEAST, Space, State
from tests.support.shop import until_no_space
from tests.support.stores import format_small, make_media


@pytest.fixture
def media() -> Iterator[MemoryMedia]:
    made = make_media(2 << 20)
    format_small(made)
    yield made
    made.close()


@pytest.fixture
def space(media: MemoryMedia) -> Iterator[Space]:
    block = superblock.choose(media)[0]
    engine = empty_engine(media, block)
    yield Space(media, block, engine, next_epoch=7, nonce=99, writing=contextlib.nullcontext())
    engine.close()


def test_leases_follow_each_other(space: Space) -> None:
    end = None
    for size in (1, 64, 4096, 100):
        offset, length = space.lease(size, size)
        assert length >= min(size, LEASE_BYTES_LEAST)
        assert length % 64 == 0
        assert end in (None, offset)
        end = offset + length


def test_unused_room_is_used_again(space: Space) -> None:
    offset, length = space.lease(4096, 8192)
    space.give_back(offset + 1000, length - 1000)
    again, _ = space.lease(64, 64)
    assert again == offset + 1024


def test_room_before_something_else_is_used_again(space: Space) -> None:
    """The remnant in full, once, and joined with the room that comes back behind it."""
    offset, length = space.lease(4096, 16384)
    behind, size = space.lease(64, 8192)
    last, _ = space.lease(64, 64)
    available = space.available_bytes
    space.give_back(offset + 1000, length - 1000)
    assert space.available_bytes == available + length - 1024
    space.give_back(behind, size)
    assert space.available_bytes == available + length - 1024 + size
    joined = (offset + 1024, length - 1024 + size)
    assert space.lease(length, length) == joined, "what would be left is shorter than a lease"
    assert space.lease(64, 64)[0] > last


def test_remnants_end_with_their_segment(space: Space) -> None:
    offset, length = space.lease(8192, 8192)
    index = space.data_segments()[0]
    space.engine.lease(1, offset, length)
    while space.is_open(index):
        space.lease(8192, 8192)
    available = space.available_bytes
    space.engine.close_lease(1)
    space.give_back(offset, length)
    assert space.available_bytes == available + length
    assert space.collect_dead() == 1
    assert space.available_bytes == available


def test_what_is_left_of_any_segment_is_the_last_to_go(space: Space) -> None:
    """However old, when nothing else is left; never what is kept for others."""
    first = space.lease(30_000, 30_000)
    space.lease(8192, 8192)
    space.reserve = 3
    until_no_space(lambda _: space.lease(65_536, 65_536))
    space.give_back(*first)
    assert space.available_bytes >= first[1]
    with pytest.raises(NoSpaceError):
        space.lease(8192, 8192, kept_bytes=first[1])
    taken: list[int] = []
    until_no_space(lambda _: taken.append(space.lease(8192, 8192)[1]))
    assert sum(taken) >= first[1] - 8192
    assert space.free_count == 3


def test_what_is_left_behind_moved_data_goes_to_data(space: Space) -> None:
    """Where another segment is ready for the cleaner."""
    assert not space.give_cleaner_room()
    offset, length = space.cleaner_lease(8192, born=0)
    space.reserve = space.free_count + 1
    assert not space.give_cleaner_room(), "the cleaner would have none"
    space.reserve = space.free_count
    with pytest.raises(NoSpaceError):
        space.lease(8192, 8192)
    assert space.give_cleaner_room()
    assert space.cleaner_room_bytes == 0
    assert space.lease(8192, 8192)[0] == offset + length
    assert space.free_count == space.reserve


def test_header_is_durable_before_the_first_lease(space: Space, media: MemoryMedia) -> None:
    offset, _ = space.lease(64, 64)
    block = space.superblock
    index = (offset - block.first_segment_offset) // block.segment_size_bytes
    header = segments.read(media, block, index)
    assert isinstance(header, segments.SegmentHeader)
    assert (header.role, header.epoch, header.nonce) == (layout.ROLE_DATA, 7, 99)
    assert space.states[index] is State.DATA
    assert space.is_open(index)


def test_reserve_is_kept_from_data_but_not_from_metadata(space: Space) -> None:
    space.reserve = 5
    assert until_no_space(lambda _: space.lease(8192, 8192)) > 10
    assert space.free_count == 5
    space.cleaner_lease(8192, born=1)
    assert space.free_count == 4
    first, second = space.take_pair(State.JOURNAL)
    assert first < second
    taken = [space.take(State.IMAGE) for _ in range(2)]
    with pytest.raises(NoSpaceError):
        space.take(State.IMAGE)
    with pytest.raises(NoSpaceError):
        space.take_pair(State.JOURNAL)
    assert len({first, second, *taken}) == 4
    space.give_up(taken)
    assert space.free_count == 2
    with pytest.raises(InvariantError):
        space.give_up(taken)


def test_released_segments_wait_for_the_root(space: Space) -> None:
    pair = space.take_pair(State.JOURNAL)
    free = space.free_count
    space.root_is_durable([], space.dead_segments())
    assert space.free_count == free
    space.root_is_durable(list(pair), [])
    assert space.free_count == free + 2
    assert space.states[pair[0]] is State.FREE


def test_dead_data_waits_for_the_root(space: Space) -> None:
    extents = 0
    while len(space.data_segments()) < 2:
        extents += 1
        space.engine.lease(extents, *space.lease(8192, 8192))
    for number in range(1, extents + 1):
        space.engine.close_lease(number)
    free = space.free_count
    assert space.collect_dead() == 1, "the open segment stays"
    assert space.free_count == free
    space.root_is_durable([], space.dead_segments())
    assert space.free_count == free + 1
    assert len(space.data_segments()) == 1


def test_segment_that_died_while_open(space: Space) -> None:
    """Nothing is left in it when it is full: it is dead then, not lost."""
    extent = 0
    first = None
    while first is None or space.is_open(first):
        extent += 1
        offset, length = space.lease(8192, 8192)
        if first is None:
            first = space.data_segments()[0]
        if not space.is_open(first):
            break
        space.engine.lease(extent, offset, length)
        space.engine.close_lease(extent)
        assert space.collect_dead() == 0
    assert space.states[first] is State.DEAD
    free = space.free_count
    space.root_is_durable([], space.dead_segments())
    assert space.free_count == free + 1


def test_adopt(space: Space) -> None:
    space.adopt({3: State.DATA, 4: State.JOURNAL, 9: State.IMAGE})
    assert space.free_count == space.superblock.segment_count - 3
    assert space.data_segments() == [3]
    taken = {space.take(State.IMAGE) for _ in range(space.free_count)}
    assert not taken & {3, 4, 9}


def test_epochs_are_never_used_twice(space: Space) -> None:
    assert [space.new_epoch() for _ in range(3)] == [7, 8, 9]


def test_what_is_kept_for_others_stays_available(space: Space) -> None:
    kept = space.available_bytes // 2
    leases = until_no_space(lambda _: space.lease(8192, 30_000, kept_bytes=kept))
    assert leases > 10
    assert kept <= space.available_bytes < kept + 8192
    taken: list[int] = []
    until_no_space(lambda _: taken.append(space.lease(8192, 8192)[1]))
    assert sum(taken) >= kept


def test_shortfall_counts_what_is_left(space: Space) -> None:
    space.reserve = space.free_count - 2
    error = space.shortfall(1 << 20)
    assert error.needed_bytes == 1 << 20
    assert error.available_bytes == 2 * space.superblock.segment_payload_bytes
