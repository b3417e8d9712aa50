"""Contents that readers hold: where bytes lie is told as of one moment, and they stay there."""

from __future__ import annotations

import random
import struct

import pytest

from cxlfs.errors import InvariantError, OutOfMemoryError
from cxlfs.native import FaultKind, Granularity, fault_count, set_fault
from cxlfs.native.direct import CRC_BYTES, MAP_PAYLOAD_BYTES, ROW_BYTES, HeldContent
from cxlfs.native.extents import FileMap
from tests.native.test_extent_writes import refs_of
from tests.support.direct_format import chunk_seed, rows_of
from tests.support.extents import Room, alive, nothing_held, pattern, room, seeds


def read_part(place: Room, held: HeldContent, offset: int, size: int) -> tuple[bytes, int]:
    """As a reader does it: from file ``offset`` to where the part ends, each chunk verified."""
    payload, rows, crcs, following = held.part(offset, size)
    assert len(payload) == rows * ROW_BYTES + crcs * CRC_BYTES <= size
    sums = list(struct.unpack_from(f"<{crcs}I", payload, rows * ROW_BYTES))
    found = bytearray()
    for fields in rows_of(payload, rows):
        start, length, extent_id, within, media_offset, extent_length, first, count = fields
        assert (first, count) == (within // place.chunk, _chunks(place, within, length))
        for index in range(first, first + count):
            begin = index * place.chunk
            size = min(place.chunk, extent_length - begin)
            known = chunk_seed(extent_id, index)
            assert place.region.crc32c(media_offset + begin, size, known) == sums.pop(0)
        assert start >= offset + len(found)
        found.extend(bytes(start - offset - len(found)))
        found.extend(place.region.read(media_offset + within, length))
    assert sums == []
    found.extend(bytes(following - offset - len(found)))
    return bytes(found), following


def _chunks(place: Room, within: int, length: int) -> int:
    return -(-(within + length) // place.chunk) - within // place.chunk


def read_all(place: Room, held: HeldContent, size: int = MAP_PAYLOAD_BYTES) -> bytes:
    found, offset = b"", 0
    while offset < held.size_bytes:
        part, following = read_part(place, held, offset, size)
        assert following > offset
        found, offset = found + part, following
    return found


def content_of(place: Room, rng: random.Random) -> tuple[FileMap, bytes]:
    """Data and holes, in extents of which some are open."""
    content, expected = place.new_map(capacity=30_000), bytearray(150_000)
    for _ in range(30):
        length = rng.choice([1, 100, 5000, 30_000])
        offset, data = rng.randrange(150_000 - length), pattern(length, rng.getrandbits(32))
        place.write(content, offset, data, capacity=30_000)
        expected[offset : offset + length] = data
    for _ in range(3):
        offset, length = rng.randrange(140_000), rng.randrange(10_000)
        content.punch(offset, length)
        expected[offset : offset + length] = bytes(length)
    content.truncate(150_000)
    return content, bytes(expected)


@pytest.mark.parametrize("seed", seeds(4), ids="CXLFS_SEED={}".format)
@pytest.mark.parametrize("chunk", [256, 4096])
def test_rows_say_all_of_a_content(seed: int, chunk: int) -> None:
    """In parts of any size, from any offset."""
    rng = random.Random(f"{seed} {chunk}")
    with room(chunk=chunk) as place:
        content, expected = content_of(place, rng)
        held = content.hold()
        assert held.size_bytes == 150_000
        for size in (ROW_BYTES + CRC_BYTES + 4, 200, 1000, MAP_PAYLOAD_BYTES, 1 << 20):
            assert read_all(place, held, size) == expected
        for _ in range(50):
            offset = rng.randrange(150_000)
            part, following = read_part(place, held, offset, rng.randrange(64, 2000))
            assert part == expected[offset:following]
        rows = rows_of(held.part(0, 1 << 20)[0], 1)
        assert rows[0][2] == refs_of(content)[0][2]
        held.close()
        content.close()
        assert nothing_held(place.engine)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_bytes_stay_however_the_content_changes(granularity: Granularity) -> None:
    """Moved (by a cleaner that looked before), overwritten, cut, closed: not free before."""
    with room(granularity, chunk=4096) as place:
        content, expected = content_of(place, random.Random(5))
        content.close_leases()
        content.take_delta().apply(content, None)
        alive_there = [(i, alive(place.engine, i).ranges) for i in range(place.segments)]
        moved = [(i, ranges) for i, ranges in alive_there if len(ranges)]
        held = content.hold()
        segments = {i for i, _ in moved}
        assert segments == {
            (start - place.engine.first) // place.segment_bytes for start, _ in held.ranges()
        }
        for segment, ranges in moved:
            assert alive(place.engine, segment).busy.tolist() == [True]
            place.segment = -1
            target = place.open_extent(place.segment_bytes - 4096)
            moves = place.engine.copy_ranges(ranges, target)
            place.engine.publish(target)
            place.engine.move([content], moves)
            place.engine.close_lease(target)
        place.segment = -1
        assert content.read(0, 1 << 20) == expected
        assert not segments & set(place.engine.dead_segments())
        place.write(content, 0, pattern(20_000, 9), capacity=20_000)
        content.truncate(100)
        content.take_delta().apply(content, None)
        content.close()
        assert not segments & set(place.engine.dead_segments())
        assert read_all(place, held) == expected
        assert alive(place.engine, *sorted(segments)).busy.all()
        held.close()
        held.close()
        assert segments <= set(place.engine.dead_segments())
        assert nothing_held(place.engine)


def test_an_extent_that_grows_is_told_as_it_was() -> None:
    """Its length and the checksum of its last chunk change together; both are those of then."""
    with room(chunk=4096) as place:
        content = place.new_map(capacity=60_000)
        content.write(0, pattern(5000, 1))
        first = content.hold()
        content.write(5000, pattern(100, 2))
        second = content.hold()
        content.write(5100, pattern(10_000, 3))
        third = content.hold()
        for held, size in ((first, 5000), (second, 5100), (third, 15_100)):
            whole = pattern(5000, 1) + pattern(100, 2) + pattern(10_000, 3)
            assert read_all(place, held) == whole[:size]
            assert rows_of(held.part(0)[0], 1)[0].extent_length == size
            held.close()
        content.close()
        assert nothing_held(place.engine)


def test_where_the_bytes_lie() -> None:
    """Those that touch on the media are one range, in the order of the media."""
    with room(chunk=4096) as place:
        content = place.new_map(capacity=60_000)
        content.write(20_000, pattern(10_000, 1))
        content.write(0, pattern(10_000, 2))
        start = int(place.engine.list()["media_offset"][0])
        held = content.hold()
        assert held.ranges() == [(start, 20_000)]
        held.close()
        content.punch(24_096, 100)
        held = content.hold()
        assert held.ranges() == [(start, 4096), (start + 4196, 20_000 - 4196)]
        held.close()
        content.close()


def test_nothing_to_say() -> None:
    with room() as place:
        content = place.new_map()
        held = content.hold()
        assert (held.part(0), held.ranges()) == ((b"", 0, 0, 0), [])
        held.close()
        content.truncate(5000)
        held = content.hold()
        assert (held.size_bytes, held.part(0), held.ranges()) == (5000, (b"", 0, 0, 5000), [])
        assert held.part(9000) == (b"", 0, 0, 5000)
        with pytest.raises(InvariantError):
            held.part(0, ROW_BYTES)
        held.close()
        for call in (lambda: held.part(0), held.ranges):
            with pytest.raises(InvariantError):
                call()
        content.close()
        with pytest.raises(InvariantError):
            content.hold()
        assert nothing_held(place.engine)


def test_an_engine_that_ends_takes_what_is_held_along() -> None:
    with room() as place:
        content, _ = content_of(place, random.Random(6))
        held = content.hold(), content.hold()
        held[1].close()
        place.engine.close()
        with pytest.raises(InvariantError):
            held[0].ranges()
        held[0].close()


def test_no_memory() -> None:
    with room() as place:
        content, expected = content_of(place, random.Random(7))
        before = place.engine.statistics()
        set_fault(FaultKind.ALLOCATE, 1)
        with pytest.raises(OutOfMemoryError):
            content.hold()
        assert place.engine.statistics() == before
        held = content.hold()
        references = content.ref_count
        assert 0 < place.engine.statistics().memory - before.memory <= 100 * (references + 1)
        set_fault(FaultKind.ALLOCATE, 1)
        with pytest.raises(OutOfMemoryError):
            held.ranges()
        set_fault(FaultKind.ALLOCATE, 1)
        assert read_all(place, held) == expected
        assert fault_count(FaultKind.ALLOCATE) == 0
        set_fault(FaultKind.ALLOCATE, 0)
        held.close()
        content.close()
        assert nothing_held(place.engine)
