"""What is alive in a part of the media, its copy, and references that follow: many at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from cxlfs.errors import CorruptionError, OutOfMemoryError
from cxlfs.native import FaultKind, set_fault
from cxlfs.native.extents import REF_DTYPE, FileMap
from tests.native.test_extent_writes import refs_of
from tests.support.extents import (
    Room,
    alive,
    copy_extent,
    nothing_held,
    pattern,
    put,
    re_aim,
    room,
)

CHUNK = 4096
BLOCK = 1024


@pytest.fixture
def place() -> Iterator[Room]:
    with room(segments=32, segment_bytes=1 << 17, chunk=CHUNK) as made:
        yield made
        set_fault(FaultKind.DECAY, 0)


def publish(content: FileMap) -> None:
    content.take_delta().apply(content, None)
    content.close_leases()


def scattered(place: Room, blocks: int, rng: random.Random, *, owner: int = 1) -> FileMap:
    """A published file whose blocks lie on the media in another order than in the file."""
    whole = place.new_map(owner)
    place.write(whole, 0, pattern(blocks * BLOCK, 5))
    publish(whole)
    content = place.new_map(owner)
    order = list(range(blocks))
    rng.shuffle(order)
    for target, source in enumerate(order):
        rows = whole.export(source * BLOCK, BLOCK)
        rows["file_offset"] = target * BLOCK + np.cumsum(rows["length"]) - rows["length"]
        put(content, rows)
    content.set_size(blocks * BLOCK)
    whole.close()
    return content


def test_all_moves_take_one_walk(place: Room, rng: random.Random) -> None:
    """And the file is in one piece again, where it was moved in its own order."""
    content = scattered(place, 64, rng)
    data = content.read(0, 64 * BLOCK)
    assert content.ref_count > 50
    found = alive(place.engine, *range(place.segments))
    assert [r[4] for r in found.ranges.tolist()] == sorted(r[4] for r in found.ranges.tolist())
    place.segment = -1
    target = place.open_extent(64 * BLOCK)
    moves = place.engine.copy_ranges(found.ranges, target)
    place.engine.publish(target)
    before, refs = place.engine.statistics().refs_visited, content.ref_count
    place.engine.move([content], moves)
    assert place.engine.statistics().refs_visited - before == refs
    assert content.read(0, 64 * BLOCK) == data
    assert refs_of(content) == [(0, 64 * BLOCK, target, 0)]
    place.engine.close_lease(target)
    content.close()
    assert nothing_held(place.engine)


@pytest.mark.parametrize("number", range(5))
def test_moves_are_what_single_ones_are(place: Room, rng: random.Random, number: int) -> None:
    """Ranges that cover references in part, several of them, or none."""
    rng = random.Random(rng.random() + number)
    content = scattered(place, 40, rng)
    data = content.read(0, 40 * BLOCK)
    source = int(content.export(0, 1)["extent_id"][0])
    cuts = sorted(rng.sample(range(40 * BLOCK), 30))
    rows = list(zip(cuts[::2], cuts[1::2], strict=True))
    place.segment = -1
    target = place.open_extent(64 * BLOCK)
    moves = []
    for start, end in rng.sample(rows, len(rows)):
        position = int(place.engine.describe(target)[0]["length"][0])
        copy_extent(place.engine, source, start, end - start, target)
        moves.append((source, start, end - start, target, position))
    place.engine.publish(target)
    one_by_one = content.clone()
    for move in moves:
        re_aim(one_by_one, move)
    re_aim(content, *moves)
    assert refs_of(content) == refs_of(one_by_one)
    assert content.read(0, 40 * BLOCK) == data


def test_moves_that_cannot_be_change_nothing(place: Room, rng: random.Random) -> None:
    content = scattered(place, 8, rng)
    source = int(content.export(0, 1)["extent_id"][0])
    target = place.open_extent(8 * BLOCK)
    copy_extent(place.engine, source, 0, 8 * BLOCK, target)
    before = refs_of(content)
    for bad in (
        [(source, 0, 100, target, 0), (source, 99, 100, target, 500)],
        [(source, 0, 100, target, 0), (source, 100, 100, target, 8 * BLOCK - 99)],
        [(source, 0, 100, target, 0), (source, 100, 100, 99, 0)],
    ):
        with pytest.raises(CorruptionError):
            re_aim(content, *bad)
        assert refs_of(content) == before
    re_aim(content)
    re_aim(content, (98, 0, 10, 99, 0))
    assert refs_of(content) == before


def test_what_several_files_share_is_one_range(place: Room) -> None:
    first, second = place.new_map(7), place.new_map(3)
    place.write(first, 0, pattern(10 * BLOCK, 1))
    publish(first)
    assert first.share(2 * BLOCK, 3 * BLOCK, second, 500) == 3 * BLOCK
    segment = place.segment
    found = alive(place.engine, segment)
    [row] = found.ranges.tolist()
    assert row[1:5] == (0, 10 * BLOCK, 3, 500)
    assert sorted(found.owners.tolist()) == [3, 7]
    [row] = alive(place.engine, segment, preferred=7).ranges.tolist()
    assert row[1:5] == (0, 10 * BLOCK, 7, 0)
    found = place.engine.live_ranges_of(first, BLOCK, 2 * BLOCK)
    [row] = found.ranges.tolist()
    assert row[1:5] == (BLOCK, 2 * BLOCK, 7, BLOCK)
    assert found.owners.tolist() in ([3, 7], [7, 3])


def test_what_is_open_is_busy_and_alone_so(place: Room) -> None:
    ready = place.new_map(1)
    place.write(ready, 0, pattern(5 * BLOCK, 1))
    publish(ready)
    segment = place.segment
    assert not alive(place.engine, segment).busy.any()
    other = place.new_map(2, capacity=BLOCK)
    other.write(0, b"x" * 100)
    found = alive(place.engine, segment, segment + 1)
    assert (found.busy.tolist(), len(found.ranges)) == ([True, False], 0)
    other.close_lease()
    assert alive(place.engine, segment).busy.all()
    publish(other)
    assert not alive(place.engine, segment).busy.any()


# --- bytes that change behind their check ---------------------------------------------------------


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_copy_is_of_what_was_checked(place: Room, nth: int) -> None:
    """In part of a chunk, whole ones, and part of another."""
    data = pattern(4 * CHUNK, 2)
    content = place.new_map()
    place.write(content, 0, data)
    publish(content)
    [(_, _, source, _)] = refs_of(content)
    place.segment = -1
    target = place.open_extent(4 * CHUNK)
    set_fault(FaultKind.DECAY, nth)
    try:
        copy_extent(place.engine, source, 100, 3 * CHUNK, target)
    except CorruptionError:
        return
    finally:
        set_fault(FaultKind.DECAY, 0)
    place.engine.publish(target)
    re_aim(content, (source, 100, 3 * CHUNK, target, 0))
    assert content.read(100, 3 * CHUNK) == data[100 : 100 + 3 * CHUNK]


@pytest.mark.parametrize("nth", range(1, 9))
@pytest.mark.parametrize("at", [0, 1000, CHUNK - 3])
def test_what_a_small_write_carries_is_what_was_checked(place: Room, nth: int, at: int) -> None:
    """What lies before it in its block, behind it, or both."""
    data = pattern(4 * CHUNK, 3)
    content = place.new_map()
    place.write(content, 0, data)
    publish(content)
    place.segment = -1
    content.attach_lease(place.open_extent(1 << 14))
    set_fault(FaultKind.DECAY, nth)
    try:
        assert content.write(CHUNK + at, b"new") == (3, 0)
    except CorruptionError:
        return
    finally:
        set_fault(FaultKind.DECAY, 0)
    expected = data[CHUNK : CHUNK + at] + b"new" + data[CHUNK + at + 3 : 2 * CHUNK]
    assert content.read(CHUNK, CHUNK) == expected


@pytest.mark.parametrize("nth", range(1, 9))
def test_a_read_is_of_what_was_checked(place: Room, nth: int) -> None:
    data = pattern(4 * CHUNK, 4)
    content = place.new_map()
    place.write(content, 0, data)
    set_fault(FaultKind.DECAY, nth)
    assert content.read(100, 3 * CHUNK) == data[100 : 100 + 3 * CHUNK]


# --- pieces of one chunk --------------------------------------------------------------------------


def test_a_chunk_is_verified_once_in_a_read(place: Room) -> None:
    """Though its pieces lie in any order among those of another one."""
    whole = place.new_map()
    place.write(whole, 0, pattern(2 * CHUNK, 6))
    publish(whole)
    data = bytes(whole.read(0, 2 * CHUNK))
    [(_, _, source, _)] = refs_of(whole)
    content, expected = place.new_map(), b""
    places = [3072, 7168, 1024, 4096, 0, 5120, 2048, 6144]
    for number, at in enumerate(places):
        put(content, np.array([(number * 1000, 1000, source, at)], dtype=REF_DTYPE))
        expected += data[at : at + 1000]
    content.set_size(8000)
    before = place.engine.statistics().chunks_verified
    assert content.read(0, 8000) == expected
    assert place.engine.statistics().chunks_verified - before == 2
    assert content.read(500, 7000) == expected[500:7500]


def test_bytes_that_a_file_has_twice_are_read_twice(place: Room) -> None:
    whole = place.new_map()
    place.write(whole, 0, pattern(CHUNK, 6))
    publish(whole)
    data = bytes(whole.read(0, CHUNK))
    [(_, _, source, _)] = refs_of(whole)
    content = place.new_map()
    put(content, np.array([(0, 900, source, 100), (900, 900, source, 500)], dtype=REF_DTYPE))
    content.set_size(1800)
    assert content.read(0, 1800) == data[100:1000] + data[500:1400]


def test_damage_of_a_shared_chunk_is_that_of_its_first_piece(place: Room) -> None:
    whole = place.new_map()
    place.write(whole, 0, pattern(2 * CHUNK, 6))
    publish(whole)
    [(_, _, source, _)] = refs_of(whole)
    content = place.new_map()
    rows = [(0, 500, source, CHUNK), (500, 500, source, 700), (1000, 500, source, 100)]
    put(content, np.array(rows, dtype=REF_DTYPE))
    content.set_size(1500)
    place.flip(int(place.engine.describe(source)[0]["media_offset"][0]) + 3000, 1)
    with pytest.raises(CorruptionError) as caught:
        content.read(0, 1500)
    assert caught.value.fault is not None
    assert (caught.value.fault.file_offset, caught.value.fault.length) == (500, 500)


# --- where references are looked for ------------------------------------------------------------


def visits(place: Room, *segments: int) -> int:
    """References that are looked at to find what is alive there, and to re-aim it."""
    engine = place.engine
    before = engine.statistics().refs_visited
    assert len(alive(engine, *segments).ranges)
    return engine.statistics().refs_visited - before


@pytest.mark.parametrize("others", [0, 20])
def test_only_references_into_the_place_are_looked_at(
    place: Room, rng: random.Random, others: int
) -> None:
    """However many there are elsewhere, of the same file too."""
    content = place.new_map(1)
    place.write(content, 0, pattern(64 * BLOCK, 1))
    publish(content)
    segment = place.segment
    maps = [scattered(place, 96, rng, owner=2 + number) for number in range(others)]
    for number, other in enumerate(maps):
        put(content, shifted(other, (1 + number) * 96 * BLOCK))
    if others:
        assert place.engine.statistics().refs > others * 150
    assert visits(place, segment) <= 2
    found = alive(place.engine, segment)
    target = place.open_extent(64 * BLOCK)
    moves = place.engine.copy_ranges(found.ranges, target)
    place.engine.publish(target)
    before = place.engine.statistics().refs_visited
    place.engine.move([content, *maps], moves)
    assert place.engine.statistics().refs_visited - before <= 2
    assert content.read(0, 64 * BLOCK) == pattern(64 * BLOCK, 1)
    assert not len(alive(place.engine, segment).ranges)
    place.engine.close_lease(target)


def shifted(content: FileMap, offset: int) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    rows = content.export(0, content.size)
    rows["file_offset"] += offset
    return rows


def test_who_came_and_went_often_is_found_all_the_same(place: Room) -> None:
    """Of bytes that many places had for a while it is not known who has them: all are asked."""
    source = place.new_map(1)
    place.write(source, 0, pattern(2 * BLOCK, 1))
    publish(source)
    segment = place.segment
    for number in range(500):
        fleeting = FileMap(place.engine, owner=100 + number)
        source.share(0, BLOCK, fleeting, 8 * BLOCK * number)
        fleeting.close()
    kept = [place.new_map(10 + number) for number in range(3)]
    for number, content in enumerate(kept):
        source.share(BLOCK, BLOCK, content, 4 * BLOCK * number)
    assert visits(place, segment) >= place.engine.statistics().refs
    assert sorted(alive(place.engine, segment).owners.tolist()) == [1, 10, 11, 12]


@pytest.mark.parametrize("nth", range(1, 12))
def test_without_memory_for_notes_all_is_found(place: Room, nth: int) -> None:
    source = place.new_map(1)
    place.write(source, 0, pattern(8 * BLOCK, 1))
    publish(source)
    others = [place.new_map(2 + number) for number in range(8)]
    set_fault(FaultKind.ALLOCATE, nth)
    shared = []
    for number, content in enumerate(others):
        try:
            source.share(number * BLOCK, BLOCK, content, 16 * BLOCK)
        except OutOfMemoryError:
            continue
        shared.append(content.owner)
    set_fault(FaultKind.ALLOCATE, 0)
    found = alive(place.engine, place.segment)
    assert sorted(set(found.owners.tolist())) == [1, *shared]
