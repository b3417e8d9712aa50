"""Writes, reads and leases of the extent map, case by case."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from cxlfs._native import ffi

from cxlfs.errors import CorruptionError, FileTooLargeError, InvariantError, MediaError
from cxlfs.native import EventKind, FaultKind, Granularity, crc32c, set_fault
from cxlfs.native.extents import (
    EXTENT_INFO_DTYPE,
    LIVE_RANGE_DTYPE,
    MOVE_DTYPE,
    REF_DTYPE,
    SPAN_DTYPE,
    FileMap,
)
from tests.support.extents import CHUNK_BYTES, FIRST, HEADER_BYTES, Room, pattern, room, seeds

Event = tuple[EventKind, int, int]


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


def refs_of(content: FileMap) -> list[tuple[int, int, int, int]]:
    rows: list[tuple[int, int, int, int]] = content.export(0, 1 << 62).tolist()
    return rows


def events_of(place: Room) -> list[Event]:
    """What was recorded: kind, offset, length."""
    log, position = place.region.recorded(), 0
    found: list[Event] = []
    while position < len(log):
        kind, _, offset, length = struct.unpack_from("<IIQQ", log, position)
        position += 24
        if kind in (EventKind.STORE, EventKind.COPY):
            position += -(-length // 8) * 8
        found.append((EventKind(kind), offset, length))
    return found


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (REF_DTYPE, "cxl_ref"),
        (EXTENT_INFO_DTYPE, "cxl_extent_info"),
        (LIVE_RANGE_DTYPE, "cxl_live_range"),
        (MOVE_DTYPE, "cxl_move"),
        (SPAN_DTYPE, "cxl_span"),
    ],
)
def test_arrays_have_the_layout_of_c(dtype: np.dtype[np.void], name: str) -> None:
    fields = ffi.typeof(name).fields
    assert dtype.itemsize == ffi.sizeof(name)
    assert list(dtype.names or ()) == [field for field, _ in fields]
    for field, kind in fields:
        assert dtype.fields is not None
        assert dtype.fields[field][1] == kind.offset
        assert dtype.fields[field][0].itemsize == ffi.sizeof(kind.type)


# --- checksums ----------------------------------------------------------------------------------


def expected_crcs(extent_id: int, data: bytes, chunk: int) -> list[int]:
    return [
        crc32c(struct.pack("<QQ", extent_id, i // chunk) + data[i : i + chunk])
        for i in range(0, len(data), chunk)
    ]


@pytest.mark.parametrize("size", [1, 63, 64, 65, 4095, 65535, 65536, 65537, 131072, 200_001])
@pytest.mark.parametrize("step", [1000, 65536, 70_001, 1 << 20])
def test_a_checksum_covers_id_index_and_bytes_of_its_chunk(
    place: Room, size: int, step: int
) -> None:
    data = pattern(size, size)
    content = place.new_map(capacity=1 << 17 if size <= 1 << 17 else 250_000)
    for start in range(0, size, step):
        piece = data[start : start + step]
        assert content.write(start, piece) == (len(piece), 0)
    infos, crcs = place.engine.describe(1)
    assert infos.tolist() == [(1, FIRST + HEADER_BYTES, size, 0, 0, len(crcs))]
    assert crcs.tolist() == expected_crcs(1, data, CHUNK_BYTES)
    assert refs_of(content) == [(0, size, 1, 0)]
    assert content.read(0, size) == data
    assert place.region.read(FIRST + HEADER_BYTES, size) == data
    found = place.engine.verify(1)
    assert found is not None
    assert (found.fault_count, found.bytes_checked) == (0, size)


@pytest.mark.parametrize("seed", seeds(3), ids="CXLFS_SEED={}".format)
def test_reads_of_every_alignment(place: Room, seed: int) -> None:
    rng = random.Random(seed)
    data = pattern(3 * CHUNK_BYTES + 777, seed)
    content = place.new_map(capacity=240_000)
    content.write(0, data)
    borders = [i * CHUNK_BYTES + d for i in range(4) for d in (-65, -64, -1, 0, 1, 63, 64)]
    for _ in range(300):
        start = max(0, rng.choice([*borders, rng.randrange(len(data))]))
        end = rng.choice([*borders, rng.randrange(len(data))])
        length = max(0, end - start)
        assert content.read(start, length) == data[start : start + length]
        view = content.peek(start, length)
        assert (b"" if view is None else view.tobytes()) == data[start : start + length]


# --- small overwrites ---------------------------------------------------------------------------


def test_a_small_overwrite_carries_its_block(place: Room) -> None:
    data = bytearray(pattern(3 * 4096, 1))
    content = place.new_map(capacity=1 << 16)
    content.write(0, bytes(data))
    assert content.write(5000, b"x" * 100) == (100, 0)
    data[5000:5100] = b"x" * 100
    assert refs_of(content) == [(0, 4096, 1, 0), (4096, 4096, 1, 12288), (8192, 4096, 1, 8192)]
    assert content.read(0, 20_000) == data


def test_a_small_overwrite_across_two_blocks_carries_both(place: Room) -> None:
    data = bytearray(pattern(3 * 4096, 1))
    content = place.new_map(capacity=1 << 16)
    content.write(0, bytes(data))
    assert content.write(4000, b"y" * 200) == (200, 0)
    data[4000:4200] = b"y" * 200
    assert refs_of(content) == [(0, 8192, 1, 12288), (8192, 4096, 1, 8192)]
    assert content.read(0, 20_000) == data


def test_carrying_never_grows_the_file(place: Room) -> None:
    data = bytearray(pattern(5000, 1))
    content = place.new_map(capacity=1 << 16)
    content.write(0, bytes(data))
    content.write(4500, b"z" * 10)
    data[4500:4510] = b"z" * 10
    assert content.size == 5000
    assert refs_of(content) == [(0, 4096, 1, 0), (4096, 904, 1, 5000)]
    assert content.read(0, 9000) == data


def test_holes_inside_what_is_carried_are_filled_others_stay(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(8192 + 3000, b"b" * 100)
    content.write(8192 + 200, b"a" * 100)
    assert refs_of(content) == [(8392, 2900, 1, 100)]
    content.truncate(20_000)
    content.write(8192 + 1000, b"c" * 10)
    assert refs_of(content) == [(8392, 2900, 1, 3000)]
    expected = bytearray(20_000)
    expected[8392:8492] = b"a" * 100
    expected[9192:9202] = b"c" * 10
    expected[11192:11292] = b"b" * 100
    assert content.read(0, 30_000) == expected
    assert content.allocated == 2900


def test_a_small_write_into_a_hole_carries_nothing(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 100)
    content.write(4096 * 3 + 50, b"b" * 100)
    assert refs_of(content) == [(0, 100, 1, 0), (4096 * 3 + 50, 100, 1, 100)]


def test_a_large_or_a_continuing_write_carries_nothing(place: Room) -> None:
    data = pattern(5 * 4096, 1)
    content = place.new_map(capacity=1 << 16)
    content.write(0, data)
    content.write(100, b"a" * 4096)
    content.write(4196, b"b" * 10)
    assert refs_of(content) == [
        (0, 100, 1, 0),
        (100, 4106, 1, 20480),
        (4206, 20480 - 4206, 1, 4206),
    ]
    assert content.read(0, 1 << 20) == data[:100] + b"a" * 4096 + b"b" * 10 + data[4206:]


# --- leases -------------------------------------------------------------------------------------


def test_without_a_lease_a_write_says_what_it_needs(place: Room) -> None:
    content = place.new_map()
    assert content.write(7, b"12345") == (0, 5)
    assert (content.size, content.ref_count) == (0, 0)


def test_a_write_takes_what_fits(place: Room) -> None:
    data = pattern(20_000, 3)
    content = place.new_map(capacity=8256)
    assert content.write(0, data) == (8256, 0)
    assert content.write(8256, data, 8256) == (0, 20_000 - 8256)
    assert content.close_lease() == (FIRST + HEADER_BYTES + 8256, 0)
    content.attach_lease(place.open_extent(16_384))
    assert content.write(8256, data, 8256) == (20_000 - 8256, 0)
    assert content.read(0, 30_000) == data


def test_the_end_of_a_lease_makes_no_shreds(place: Room) -> None:
    content = place.new_map(capacity=8192)
    content.write(0, pattern(8000, 1))
    assert content.write(100_000, pattern(9000, 2)) == (0, 9000)
    assert content.write(100_000, pattern(500, 2)) == (0, 500)
    assert content.write(100_000, pattern(192, 2)) == (192, 0)


def test_room_given_back_begins_on_a_line(place: Room) -> None:
    content = place.new_map(capacity=8192)
    content.write(0, b"x" * 65)
    assert content.close_lease() == (FIRST + HEADER_BYTES + 128, 8192 - 128)
    assert content.close_lease() == (0, 0)


def test_leases_are_refused_where_they_cannot_be(place: Room) -> None:
    content = place.new_map(capacity=4096)
    end = FIRST + place.segments * place.segment_bytes
    for extent_id, offset, capacity in (
        (1, FIRST, 4096),
        (0, FIRST, 4096),
        (9, FIRST + 8, 4096),
        (9, FIRST - 64, 4096),
        (9, FIRST + place.segment_bytes - 64, 128),
        (9, FIRST, 0),
        (9, FIRST, place.segment_bytes + 64),
        (9, end, 64),
        (9, (1 << 64) - 64, 128),
    ):
        with pytest.raises(InvariantError):
            place.engine.lease(extent_id, offset, capacity)
    content.attach_lease(place.open_extent(4096))  # the next one, for when this is used up
    for extent_id in (1, 77, place.open_extent(4096)):
        with pytest.raises(InvariantError):
            content.attach_lease(extent_id)
    with pytest.raises(InvariantError):
        place.engine.close_lease(1)
    assert place.engine.statistics().extents == 3


def test_the_next_lease_takes_over_in_mid_write(place: Room) -> None:
    content = place.new_map(capacity=4096)
    assert not content.wants_lease
    assert content.write(0, b"a" * 3000) == (3000, 0)
    assert content.wants_lease
    content.attach_lease(place.open_extent(8192))
    assert not content.wants_lease
    data = bytes(range(250)) * 20
    taken, _ = content.write(3000, data)
    assert taken == 1096
    assert content.write(3000 + taken, data, taken) == (len(data) - taken, 0)
    assert bytes(content.read(0, 1 << 20)) == b"a" * 3000 + data
    rooms = content.close_leases()
    assert [length for _, length in rooms] == [8192 - 3904 - (-3904 % 64)]
    assert content.close_leases() == []


# --- durability and failures --------------------------------------------------------------------


@pytest.mark.parametrize("granularity", list(Granularity))
def test_one_fence_for_each_write_none_for_pages(granularity: Granularity) -> None:
    with room(granularity) as place:
        content = place.new_map(capacity=200_000)
        content.write(0, pattern(50_000, 1))
        for offset, length in ((50_000, 10), (50_010, 100_000), (123, 45), (70_000, 4096)):
            before = int(place.engine.list()["length"][0])
            place.region.record(on=True)
            content.write(offset, pattern(length, 2))
            events = events_of(place)
            place.region.record(on=False)
            fences = [i for i, event in enumerate(events) if event[0] is EventKind.FENCE]
            assert fences == ([] if granularity is Granularity.PAGE else [len(events) - 1])
            copies = [event for event in events if event[0] is EventKind.COPY]
            assert copies
            start = FIRST + HEADER_BYTES + before
            for _, place_of_copy, size in copies:
                assert place_of_copy == start
                start += size
            assert start - FIRST - HEADER_BYTES == int(place.engine.list()["length"][0])


@pytest.mark.parametrize(
    ("kind", "nth"), [(FaultKind.COPY, 1), (FaultKind.COPY, 2), (FaultKind.FENCE, 1)]
)
def test_a_write_that_failed_did_nothing(place: Room, kind: FaultKind, nth: int) -> None:
    data = pattern(100_000, 5)
    content = place.new_map(capacity=250_000)
    content.write(0, data)
    before = (refs_of(content), content.size, place.engine.describe(1)[1].tolist())
    set_fault(kind, nth)
    with pytest.raises(MediaError) as caught:
        content.write(100_000, data)
    set_fault(kind, 0)
    assert caught.value.fault is not None
    assert caught.value.fault.file_offset == 100_000
    assert (refs_of(content), content.size, place.engine.describe(1)[1].tolist()) == before
    assert content.write(100_000, data) == (100_000, 0)
    assert content.read(0, 300_000) == data + data


def test_sources_of_every_kind(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    text = pattern(300, 9)
    for source in (text, bytearray(text), memoryview(text), np.frombuffer(text, dtype=np.uint16)):
        content.truncate(0)
        assert content.write(0, source) == (300, 0)
        assert content.read(0, 400) == text
        assert content.write(300, source, 100) == (200, 0)
        assert content.read(300, 400) == text[100:]
    assert content.write(0, b"") == (0, 0)
    target = bytearray(500)
    assert content.read_into(0, target) == 500
    assert target == text + text[100:]


def test_an_error_holds_no_buffer_of_the_caller(place: Room) -> None:
    """A traceback with such a buffer in a cycle would crash the garbage collector."""
    content = place.new_map(capacity=100_000)
    content.write(0, pattern(70_000, 1))
    place.flip(FIRST + HEADER_BYTES, 0)
    views = [memoryview(bytearray(100)) for _ in range(3)]
    errors = []
    for number, call in enumerate(
        (
            lambda: content.write(5, views[0], 3),
            lambda: content.read_into(0, views[1]),
            lambda: content.replay(0, views[2][:96], 3),
        )
    ):
        with pytest.raises(CorruptionError) as caught:
            call()
        errors.append(caught)
        views[number].release()


def test_bytes_are_counted_as_the_file_sees_them(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(10_000, 1))
    content.write(5000, b"abc")
    content.read(0, 100_000)
    content.read(9999, 5, verify=False)
    content.peek(4096, 100)
    content.punch(0, 5000)
    content.read(0, 10)
    counts = place.engine.statistics()
    assert (counts.bytes_written, counts.bytes_read) == (10_003, 10_111)


def test_limits_of_offsets(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"abc")
    largest = (1 << 63) - 1
    for offset in (largest, 1 << 63, (1 << 64) - 1):
        with pytest.raises(FileTooLargeError):
            content.write(offset, b"xy")
        with pytest.raises(FileTooLargeError):
            content.truncate(offset + 1 if offset < 1 << 63 else offset)
        assert content.read(offset, 10) == b""
        assert content.peek(offset, 10) is None
        content.punch(offset, (1 << 64) - 1)
    assert content.write(largest - 1, b"x") == (1, 0)
    assert content.size == largest
    content.punch(1, (1 << 64) - 1)
    assert content.allocated == 1
    content.truncate(0)


def test_what_is_closed_is_not_used(place: Room) -> None:
    content = place.new_map(capacity=4096)
    content.write(0, b"abc")
    other = content.clone()
    delta = content.take_delta()
    other.close()
    other.close()
    place.engine.close()
    calls = (
        lambda: content.size,
        lambda: content.write(0, b"x"),
        lambda: content.read(0, 1),
        lambda: content.peek(0, 1),
        lambda: content.punch(0, 1),
        lambda: content.mapped(0, 1),
        lambda: content.seek(0, hole=True),
        lambda: content.share(0, 1, other, 0),
        content.clone,
        lambda: content.export(0, 1),
        lambda: other.size,
        lambda: delta.apply(content, None),
        lambda: delta.cancel(content),
        place.engine.statistics,
        lambda: FileMap(place.engine, owner=1),
    )
    for call in calls:
        with pytest.raises(InvariantError):
            call()
