"""Deltas: what a record must say, how it is padded, and what happens when it was not written."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from cxlfs._native import ffi

from cxlfs.errors import CorruptionError, InvariantError, MediaError
from cxlfs.native import FaultKind, Granularity, set_fault
from cxlfs.native.extents import Engine, EngineStatistics, FileMap
from tests.native.test_extent_writes import EventKind, events_of, refs_of
from tests.support.extents import (
    FIRST,
    HEADER_BYTES,
    Room,
    alive,
    copy_extent,
    import_maps,
    nothing_held,
    pattern,
    put,
    re_aim,
    room,
    seeds,
)

START = FIRST + HEADER_BYTES


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


def publish(content: FileMap, target: FileMap | None = None) -> None:
    content.take_delta().apply(content, target)


# --- what a delta says --------------------------------------------------------------------------


def test_a_new_file_says_all_of_itself(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    assert content.is_dirty
    content.write(0, b"a" * 100)
    content.write(8192, b"b" * 100)
    delta = content.take_delta()
    assert not content.is_dirty
    assert (delta.cut, delta.size) == (0, 8292)
    assert delta.refs.tolist() == [(0, 100, 1, 0), (8192, 100, 1, 100)]
    assert delta.extents.tolist() == [(1, START, 256, 0, 0, 1)]
    delta.apply(content, None)
    assert content.take_delta().refs.tolist() == []


def test_an_empty_new_file_has_an_empty_delta(place: Room) -> None:
    content = place.new_map()
    delta = content.take_delta()
    assert (delta.cut, delta.size, len(delta.refs), len(delta.extents)) == (0, 0, 0, 0)
    delta.apply(content, None)
    assert not content.is_dirty


def test_holes_are_said_where_older_content_may_be(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(20_000, 1))
    publish(content)
    content.punch(100, 50)
    content.truncate(10_000)
    content.truncate(30_000)
    content.punch(12_000, 10)
    delta = content.take_delta()
    assert (delta.cut, delta.size) == (10_000, 30_000)
    assert delta.refs.tolist() == [(100, 50, 0, 0)]
    assert len(delta.extents) == 0
    delta.apply(content, None)


def test_cutting_and_growing_back_is_a_change(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(100, 1))
    publish(content)
    content.truncate(50)
    content.truncate(100)
    assert content.is_dirty
    delta = content.take_delta()
    assert (delta.cut, delta.size, delta.refs.tolist()) == (50, 100, [])
    delta.cancel(content)
    assert content.is_dirty
    content.truncate(100)
    target = place.new_map()
    publish(content, target)
    assert not content.is_dirty
    content.truncate(100)
    assert not content.is_dirty


def test_replay_leaves_a_map_clean(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(100, 1))
    other = place.new_map()
    assert other.is_dirty
    other.replay(0, content.export(0, 100).tobytes(), 100)
    assert not other.is_dirty
    other.truncate(90)
    other.set_size(95)
    assert other.is_dirty
    delta = other.take_delta()
    assert (delta.cut, delta.size, delta.refs.tolist()) == (90, 95, [])


def test_references_from_elsewhere_are_said_by_a_new_map(place: Room) -> None:
    source = place.new_map(capacity=1 << 16)
    source.write(0, pattern(5000, 1))
    source.close_lease()
    copy = place.new_map(2)
    assert source.share(0, 5000, copy, 0) == 5000
    copy.truncate(6000)
    delta = copy.take_delta()
    assert (delta.cut, delta.size) == (0, 6000)
    assert delta.refs.tolist() == [(0, 5000, 1, 0)]
    assert delta.extents["length"].tolist() == [5000]


def test_thousands_of_changed_places_are_joined_not_lost(place: Room) -> None:
    count = 6000
    content = place.new_map(capacity=1 << 17)
    committed = place.new_map()
    content.truncate(count * 8192)
    publish(content, committed)
    rng = random.Random(7)
    places = list(range(count))
    rng.shuffle(places)
    for i in places:
        place.write(content, i * 8192 + i % 4000, b"%d" % i)
    content.punch(4096, 4096)
    delta = content.take_delta()
    rows = delta.refs
    assert np.all(rows["file_offset"][1:] >= rows["file_offset"][:-1] + rows["length"][:-1])
    assert np.count_nonzero(rows["extent_id"]) == count
    delta.apply(content, committed)
    assert refs_of(committed) == refs_of(content)
    assert committed.size == content.size


# --- padding ------------------------------------------------------------------------------------


def test_a_delta_pads_to_a_line_and_the_next_write_begins_there(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 100)
    publish(content)
    assert place.region.read(START, 128) == b"a" * 100 + bytes(28)
    content.write(100, b"b" * 4096)
    assert refs_of(content) == [(0, 100, 1, 0), (100, 4096, 1, 128)]
    content.write(4196, b"c" * 24)
    assert content.ref_count == 2
    publish(content)
    content.write(4220, b"d" * 40)
    assert refs_of(content) == [(0, 100, 1, 0), (100, 3996, 1, 128), (4096, 164, 1, 4288)]
    assert content.read(0, 9000) == b"a" * 100 + b"b" * 4096 + b"c" * 24 + b"d" * 40


def test_what_ends_on_a_line_is_continued_after_a_delta(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 128)
    publish(content)
    content.write(128, b"b" * 10)
    assert refs_of(content) == [(0, 138, 1, 0)]


def test_padding_stops_at_the_end_of_the_lease(place: Room) -> None:
    content = FileMap(place.engine, owner=1)
    place.engine.lease(5, START, 100)
    content.attach_lease(5)
    content.write(0, b"a" * 90)
    delta = content.take_delta()
    assert delta.extents["length"].tolist() == [100]
    delta.apply(content, None)
    assert content.write(90, b"b") == (0, 91)
    assert content.close_lease()[1] == 0


@pytest.mark.parametrize("seed", seeds(3), ids="CXLFS_SEED={}".format)
@pytest.mark.parametrize("granularity", list(Granularity))
def test_published_bytes_share_no_line_with_later_ones(seed: int, granularity: Granularity) -> None:
    rng = random.Random(seed)
    with room(granularity) as place:
        contents = [place.new_map(i, capacity=1 << 17) for i in range(3)]
        published: dict[int, int] = {}
        offsets = dict(place.engine.list()[["id", "media_offset"]].tolist())
        place.region.record(on=True)
        for _ in range(300):
            content = rng.choice(contents)
            if rng.random() < 0.3:
                delta = content.take_delta()
                published.update(delta.extents[["id", "length"]].tolist())
                delta.apply(content, None)
                continue
            if rng.random() < 0.1:
                other = rng.choice(contents)
                copy = FileMap(place.engine, owner=9)
                other.close_leases()
                assert other.share(0, other.size, copy, 0) == other.size
                other.attach_lease(place.open_extent(1 << 15))
                offsets = dict(place.engine.list()[["id", "media_offset"]].tolist())
                delta = copy.take_delta()
                for extent_id, length in delta.extents[["id", "length"]].tolist():
                    published[extent_id] = max(published.get(extent_id, 0), length)
                delta.apply(copy, None)
                copy.close()
                continue
            place.region.record(on=True)
            content.write(rng.choice([content.size, rng.randrange(9000)]), rng.randbytes(77))
            for kind, offset, _ in events_of(place):
                if kind is not EventKind.COPY:
                    continue
                extent_id = max(i for i, start in offsets.items() if start <= offset)
                end = offsets[extent_id] + published.get(extent_id, 0)
                padded = -(-end // 64) * 64
                assert offset >= padded or (offset == end and end < padded)


def test_a_pad_that_fails_leaves_the_marks(place: Room) -> None:
    content = place.new_map(capacity=4096)
    content.write(0, b"abc")
    for kind in (FaultKind.COPY, FaultKind.FENCE):
        set_fault(kind, 1)
        with pytest.raises(MediaError):
            content.take_delta()
        set_fault(kind, 0)
        assert content.is_dirty
        assert place.engine.list()["length"].tolist() == [3]
    assert content.take_delta().refs.tolist() == [(0, 3, 1, 0)]


# --- the end of a delta -------------------------------------------------------------------------


def test_a_cancelled_delta_is_said_again_with_what_came_later(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(8192, 1))
    publish(content)
    content.write(100, b"a")
    delta = content.take_delta()
    content.truncate(6000)
    content.write(5000, b"b")
    delta.cancel(content)
    with pytest.raises(InvariantError):
        delta.cancel(content)
    again = content.take_delta()
    assert (again.cut, again.size) == (6000, 6000)
    assert again.refs.tolist() == [(0, 6000, 1, 8192)]
    assert content.read(100, 1) == b"a"
    assert content.read(5000, 1) == b"b"


def test_a_forgotten_delta_is_cancelled(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"abc")
    content.take_delta()
    assert content.is_dirty
    delta = content.take_delta()
    content.close()
    del delta
    assert nothing_held(place.engine)


def test_a_delta_holds_what_it_names(place: Room) -> None:
    content, target = place.new_map(capacity=1 << 16), place.new_map()
    content.write(0, b"abc")
    delta = content.take_delta()
    content.close_lease()
    content.truncate(0)
    assert place.engine.list()["id"].tolist() == [1]
    delta.apply(content, target)
    assert target.read(0, 10) == b"abc"
    target.close()
    assert place.engine.dead_segments() == [0]


def test_applying_to_the_source_publishes_only(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"abc")
    delta = content.take_delta()
    content.write(0, b"def")
    delta.apply(content, content)
    assert content.read(0, 10) == b"def"
    assert content.is_dirty


# --- images between records ---------------------------------------------------------------------


def replay(engine: Engine, place: Room, maps: list[FileMap]) -> list[FileMap]:
    """A restart from an image of ``maps``."""
    counts, refs, infos, crcs = place.engine.export_maps(maps)
    engine.define(infos, crcs)
    first = np.concatenate(([0], np.cumsum(counts))).astype(np.uint64)
    sizes = np.array([m.size for m in maps], dtype=np.uint64)
    owners = np.array([m.owner for m in maps], dtype=np.uint64)
    return import_maps(engine, owners, sizes, first, refs)


def test_an_image_keeps_open_extents_that_nothing_committed_refers_to(place: Room) -> None:
    """A later record extends them, and gives only the checksums that changed."""
    content, committed = place.new_map(capacity=200_000), place.new_map()
    content.write(0, pattern(70_000, 1))
    publish(content, committed)
    content.truncate(0)
    publish(content, committed)
    engine = place.another_engine()
    [loaded] = replay(engine, place, [committed])
    content.write(0, pattern(70_000, 2))
    delta = content.take_delta()
    assert delta.extents["first_chunk"].tolist() == [1]
    engine.define(delta.extents, delta.crcs)
    loaded.replay(delta.cut, delta.refs.tobytes(), delta.size)
    engine.drop_unreferenced()
    assert loaded.read(0, 100_000) == pattern(70_000, 2)
    delta.apply(content, committed)
    loaded.close()
    assert nothing_held(engine)


@pytest.mark.parametrize("more", [1, 50, 64, 65536, 100_000])
def test_an_image_has_the_published_checksum_of_a_chunk_that_grew(place: Room, more: int) -> None:
    content, committed = place.new_map(capacity=200_000), place.new_map()
    content.write(0, pattern(1000, 1))
    publish(content, committed)
    content.write(1000, pattern(more, 2))
    engine = place.another_engine()
    [loaded] = replay(engine, place, [committed])
    assert engine.list()["length"].tolist() == [1024]
    assert loaded.read(0, 2000) == pattern(1000, 1)
    with pytest.raises(InvariantError):
        place.engine.export_maps([content])


def test_definitions_stay_until_they_are_dropped(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"abc")
    publish(content)
    engine = place.another_engine()
    [loaded] = replay(engine, place, [content])
    loaded.close()
    assert engine.list()["id"].tolist() == [1]
    engine.retain(True)
    assert engine.list()["id"].tolist() == [1]
    engine.retain(False)
    assert engine.dead_segments() == [0]
    assert nothing_held(engine)


def test_many_definitions_are_dropped_at_once(place: Room) -> None:
    engine = place.another_engine()
    infos = np.zeros(5000, dtype=place.engine.list().dtype)
    infos["id"] = np.arange(1, 5001)
    infos["media_offset"] = START + 64 * np.arange(5000) % 100_000
    infos["length"] = infos["crc_count"] = 1
    infos["crc_index"] = np.arange(5000)
    engine.define(infos, np.zeros(5000, dtype=np.uint32))
    assert engine.statistics().extents == 5000
    engine.drop_unreferenced()
    assert nothing_held(engine)


# --- cleaner ------------------------------------------------------------------------------------


def test_moved_ranges_read_the_same_and_free_their_segment(place: Room) -> None:
    data = pattern(150_000, 1)
    content, committed = place.new_map(capacity=200_000), place.new_map()
    content.write(0, data)
    assert alive(place.engine, 0).busy.tolist() == [True]
    publish(content, committed)
    assert alive(place.engine, 0).busy.tolist() == [True]
    content.close_lease()
    content.punch(70_000, 1000)
    found = alive(place.engine, 0)
    assert found.ranges.tolist() == [(1, 0, 150_000, 1, 0, 0, 1, 0)]
    assert (found.owners.tolist(), found.busy.tolist()) == ([1], [False])
    place.segment = -1
    target = place.open_extent(200_000)
    copy_extent(place.engine, 1, 0, 100_000, target)
    copy_extent(place.engine, 1, 100_000, 50_000, target)
    place.engine.publish(target)
    for part in (content, committed):
        re_aim(part, (1, 0, 150_000, target, 0))
    place.engine.close_lease(target)
    assert place.engine.dead_segments() == [0]
    assert committed.read(0, 1 << 20) == data
    assert content.read(0, 1 << 20) == data[:70_000] + bytes(1000) + data[71_000:]
    assert content.is_dirty
    assert refs_of(committed) == [(0, 150_000, target, 0)]
    assert place.engine.usage().tolist()[:2] == [0, 150_000]


def test_a_copy_without_room_or_source_changes_nothing(place: Room) -> None:
    content = place.new_map(capacity=20_000)
    content.write(0, pattern(10_000, 1))
    target = place.open_extent(4096)
    for source, offset, length, goal in (
        (1, 9000, 1001, target),
        (1, 1 << 63, 1 << 63, target),
        (77, 0, 1, target),
        (1, 0, 1, 77),
        (1, 0, 1, 1),
        (target, 0, 0, 1),
    ):
        with pytest.raises(InvariantError):
            copy_extent(place.engine, source, offset, length, goal)
    assert place.engine.list()["length"].tolist() == [10_000, 0]
    assert copy_extent(place.engine, 1, 0, 4097, target) == 4096
    assert copy_extent(place.engine, 1, 0, 1, target) == 0
    assert place.engine.close_lease(target)[1] == 0
    assert place.engine.statistics().extents == 1


def test_a_copy_behind_published_bytes_begins_on_a_line(place: Room) -> None:
    content = place.new_map(capacity=20_000)
    content.write(0, pattern(10_000, 1))
    target = place.open_extent(4096)
    copy_extent(place.engine, 1, 0, 10, target)
    place.engine.publish(target)
    copy_extent(place.engine, 1, 10, 10, target)
    infos, _ = place.engine.describe(target)
    assert infos["length"].tolist() == [74]
    place_of = int(infos["media_offset"][0])
    assert place.region.read(place_of + 64, 10) == pattern(10_000, 1)[10:20]


@pytest.mark.parametrize("granularity", list(Granularity))
def test_a_copy_is_fenced_where_a_write_is(granularity: Granularity) -> None:
    with room(granularity) as place:
        content = place.new_map(capacity=100_000)
        content.write(0, pattern(100_000, 1))
        target = place.open_extent(100_000)
        place.region.record(on=True)
        copy_extent(place.engine, 1, 50, 70_000, target)
        kinds = [event[0] for event in events_of(place)]
        fences = 0 if granularity is Granularity.PAGE else 1
        assert kinds.count(EventKind.FENCE) == fences
        assert kinds[-1] is (EventKind.FENCE if fences else EventKind.COPY)


# --- replay in one call -------------------------------------------------------------------------


def test_a_replayed_change_is_cut_references_and_size(place: Room) -> None:
    data = pattern(9000, 1)
    content = place.new_map(capacity=1 << 16)
    content.write(0, data)
    rows = content.export(0, 9000)
    for cut, size in ((0, 9000), (5000, 12_000), (20_000, 9000), (100, 50), (0, 0)):
        slow, fast = place.new_map(), place.new_map()
        for other in (slow, fast):
            put(other, content.export(0, 4000))
            other.set_size(7000)
        refs = rows.copy()
        refs["file_offset"] += np.uint64(3000)
        slow.set_size(min(cut, 7000))
        put(slow, refs)
        slow.set_size(size)
        fast.replay(cut, refs.tobytes(), size)
        assert refs_of(fast) == refs_of(slow)
        assert (fast.size, fast.is_dirty) == (slow.size, False)


def test_a_replayed_change_that_cannot_be_changes_nothing(place: Room) -> None:
    content = place.new_map(capacity=1 << 16)
    content.write(0, pattern(9000, 1))
    other = place.new_map()
    other.replay(0, content.export(0, 9000).tobytes(), 9000)
    bad = content.export(0, 9000)
    bad["extent_offset"] = 1
    for cut, refs, size in (
        (0, bad.tobytes(), 10),
        (0, b"", 1 << 63),
        (1 << 63, b"", 10),
        (0, bad.tobytes(), (1 << 64) - 1),
    ):
        with pytest.raises(CorruptionError):
            other.replay(cut, refs, size)
        assert refs_of(other) == [(0, 9000, 1, 0)]
        assert other.size == 9000


def test_counts_stand_in_the_order_in_which_they_are_read() -> None:
    fields = ffi.typeof("cxl_engine_stats").fields
    assert tuple(name for name, _ in fields) == EngineStatistics._fields
    assert {field.type.cname for _, field in fields} == {"uint64_t"}
