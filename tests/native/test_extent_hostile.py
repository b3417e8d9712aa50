"""What comes from a media image may say anything: refused as a whole, without harm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from cxlfs.errors import CorruptionError, InvariantError
from cxlfs.native.extents import (
    CHANGE_DTYPE,
    EXTENT_INFO_DTYPE,
    REF_DTYPE,
    Engine,
    FileMap,
)
from tests.native.test_extent_writes import refs_of
from tests.support.extents import (
    CHUNK_BYTES,
    FIRST,
    HEADER_BYTES,
    SEGMENT_BYTES,
    Room,
    import_maps,
    nothing_held,
    put,
    re_aim,
    room,
    seeds,
)

START = FIRST + HEADER_BYTES
MOST = (1 << 64) - 1
MOST32 = (1 << 32) - 1

Info = tuple[int, int, int, int, int, int]
GOOD: list[Info] = [
    (7, START, 100_000, 0, 0, 2),
    (8, START + 200_000, 50, 2, 0, 1),
    (9, FIRST + SEGMENT_BYTES, SEGMENT_BYTES, 3, 0, 4),
]
GOOD_CRCS = [1, 2, 3, 4, 5, 6, 7]


def infos_of(rows: list[Info]) -> npt.NDArray[np.void]:
    return np.array(rows, dtype=EXTENT_INFO_DTYPE)


def crcs_of(values: list[int]) -> npt.NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def refs_from(rows: list[tuple[int, int, int, int]]) -> npt.NDArray[np.void]:
    return np.array(rows, dtype=REF_DTYPE)


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        made.engine.define(infos_of(GOOD), crcs_of(GOOD_CRCS))
        yield made


def state_of(engine: Engine) -> list[Any]:
    """All that can be asked about extents."""
    rows = engine.list().tolist()
    known = [(row, *(part.tolist() for part in engine.describe(row[0]))) for row in rows]
    counts = engine.statistics()
    return [known, counts.refs, counts.crcs, counts.maps]


BAD_INFOS: dict[str, tuple[Info, list[int]]] = {
    "id 0": ((0, START, 50, 0, 0, 1), [1]),
    "empty": ((20, START, 0, 0, 0, 0), []),
    "before the first segment": ((20, FIRST - 1, 50, 0, 0, 1), [1]),
    "at the start of the media": ((20, 0, 50, 0, 0, 1), [1]),
    "over a segment border": ((20, FIRST + SEGMENT_BYTES - 10, 11, 0, 0, 1), [1]),
    "behind the last segment": ((20, FIRST + 16 * SEGMENT_BYTES, 50, 0, 0, 1), [1]),
    "at the end of numbers": ((20, MOST, 50, 0, 0, 1), [1]),
    "wraps around": ((20, MOST - 9, 10 + START + 100, 0, 0, 1), [1]),
    "longer than a segment": ((20, FIRST, SEGMENT_BYTES + 1, 0, 0, 5), [1] * 5),
    "endless": ((20, FIRST, MOST, 0, 0, MOST32), [1]),
    "too few checksums": ((20, START, CHUNK_BYTES + 1, 0, 0, 1), [1, 1]),
    "too many checksums": ((20, START, CHUNK_BYTES, 0, 0, 2), [1, 1]),
    "no checksum": ((20, START, CHUNK_BYTES, 0, 0, 0), []),
    "checksums beyond the array": ((20, START, 50, 1, 0, 1), [1]),
    "checksum index at the end of numbers": ((20, START, 50, MOST, 0, 1), [1]),
    "count and first chunk wrap": ((20, START, 50, 0, MOST32, 2), [1, 1]),
    "an unknown extent continued": ((20, START, 2 * CHUNK_BYTES, 0, 1, 1), [1]),
    "a known extent elsewhere": ((7, START + 64, 100_000, 0, 0, 2), [1, 2]),
    "a known extent shrinks": ((7, START, 99_999, 0, 0, 2), [1, 2]),
    "a known extent shrinks to nothing": ((7, START, 0, 0, 0, 0), []),
    "a known checksum contradicted": ((7, START, 100_000, 0, 0, 2), [1, 99]),
    "an earlier checksum contradicted": ((7, START, 140_000, 0, 0, 3), [99, 2, 3]),
    "a gap in the checksums": ((7, START, 140_000, 0, 2, 1), [3]),
    "grown over another segment": ((8, START + 200_000, 60_000, 0, 0, 1), [3]),
}


@pytest.mark.parametrize("name", BAD_INFOS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_bad_definitions_are_refused_with_all_others(place: Room, name: str, before: int) -> None:
    """Good ones before and after a bad one have no effect either."""
    info, crcs = BAD_INFOS[name]
    state = state_of(place.engine)
    good: list[Info] = [
        (30, START + 150_000, 10, 0, 0, 1),
        (8, START + 200_000, 51, 1, 0, 1),
    ]
    rows = [*good[:before], (*info[:3], min(info[3] + 2, MOST), *info[4:]), *good[before:]]
    for _ in range(2):
        with pytest.raises(CorruptionError, match=f"extent {before} "):
            place.engine.define(infos_of(rows), crcs_of([11, 12, *crcs]))
        assert state_of(place.engine) == state


def test_checksums_shared_by_definitions_are_refused(place: Room) -> None:
    """They would make a small image ask for much memory."""
    rows = [(100 + i, FIRST, SEGMENT_BYTES, 0, 0, 4) for i in range(50)]
    with pytest.raises(CorruptionError):
        place.engine.define(infos_of(rows), crcs_of([1, 2, 3, 4]))


def test_an_open_extent_is_not_redefined(place: Room) -> None:
    place.segment, place.position = 3, HEADER_BYTES
    place.next_id = 50
    content = place.new_map(capacity=4096)
    content.write(0, b"abc")
    info, crcs = place.engine.describe(50)
    with pytest.raises(CorruptionError):
        place.engine.define(info, crcs)


def test_definitions_may_grow_repeat_and_come_twice_in_a_batch(place: Room) -> None:
    rows: list[Info] = [
        (7, START, 100_000, 0, 1, 1),
        (7, START, 2 * CHUNK_BYTES, 1, 1, 1),
        (7, START, 150_000, 2, 2, 1),
        (60, START + 210_000, 5, 3, 0, 1),
        (60, START + 210_000, 9, 4, 0, 1),
        (60, START + 210_000, 9, 5, 1, 0),
    ]
    place.engine.define(infos_of(rows), crcs_of([2, 22, 33, 44, 55]))
    assert place.engine.describe(7)[1].tolist() == [1, 22, 33]
    assert place.engine.describe(60)[1].tolist() == [55]
    assert place.engine.describe(60)[0]["length"].tolist() == [9]


BAD_REFS: dict[str, tuple[int, int, int, int]] = {
    "unknown extent": (0, 10, 99, 0),
    "empty": (0, 0, 7, 0),
    "empty hole": (0, 0, 0, 0),
    "beyond the extent": (0, 11, 7, 99_990),
    "behind the extent": (0, 1, 7, 100_000),
    "extent offset wraps": (0, 2, 7, MOST),
    "length wraps": (0, MOST, 7, 1),
    "file offset too large": (1 << 63, 1, 7, 0),
    "file range too large": ((1 << 63) - 1, 1, 7, 0),
    "file range wraps": (MOST, 2, 7, 0),
    "hole wraps": (MOST, 2, 0, 0),
    "endless hole": (0, MOST, 0, 0),
}


@pytest.mark.parametrize("name", BAD_REFS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_bad_references_are_refused_with_all_others(place: Room, name: str, before: int) -> None:
    content = place.new_map()
    put(content, refs_from([(100, 1000, 7, 0)]))
    content.set_size(5000)
    good = [(0, 10, 7, 5), (200, 10, 0, 0)]
    rows = [*good[:before], BAD_REFS[name], *good[before:]]
    state = state_of(place.engine)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=f"reference {before} "):
            content.replay(5000, refs_from(rows).tobytes(), 5000)
        assert refs_of(content) == [(100, 1000, 7, 0)]
        assert state_of(place.engine) == state
    put(content, refs_from(good))
    assert refs_of(content) == [(0, 10, 7, 5), (100, 100, 7, 0), (210, 890, 7, 110)]


def test_references_in_any_order_and_over_each_other(place: Room) -> None:
    content = place.new_map()
    put(content, refs_from([(1000, 100, 7, 0)]))
    rows = [(500, 50, 7, 10), (0, 50, 8, 0), (520, 10, 9, 0), (10, 5, 0, 0)]
    put(content, refs_from(rows))
    assert refs_of(content) == [
        (0, 10, 8, 0),
        (15, 35, 8, 15),
        (500, 20, 7, 10),
        (520, 10, 9, 0),
        (530, 20, 7, 40),
        (1000, 100, 7, 0),
    ]


@pytest.mark.parametrize("size", [1 << 63, MOST])
def test_sizes_that_cannot_be(place: Room, size: int) -> None:
    content = place.new_map()
    with pytest.raises(CorruptionError):
        content.set_size(size)
    assert content.size == 0


@pytest.mark.parametrize(
    ("new_id", "new_offset"), [(99, 0), (8, 1), (8, MOST), (9, SEGMENT_BYTES - 9)]
)
def test_moves_to_where_nothing_is(place: Room, new_id: int, new_offset: int) -> None:
    content = place.new_map()
    put(content, refs_from([(0, 1000, 7, 0)]))
    with pytest.raises(CorruptionError):
        re_aim(content, (7, 0, 50 if new_id == 8 else 10, new_id, new_offset))
    with pytest.raises(CorruptionError):
        re_aim(content, (7, MOST, 2, 9, 0))
    re_aim(content, (99, 0, 10, new_id, new_offset))
    assert refs_of(content) == [(0, 1000, 7, 0)]


BAD_IMPORTS: dict[str, tuple[list[int], list[int], list[tuple[int, int, int, int]]]] = {
    "overlap": ([100], [0, 2], [(0, 10, 7, 0), (9, 10, 7, 50)]),
    "not sorted": ([100], [0, 2], [(50, 10, 7, 0), (0, 10, 7, 50)]),
    "a hole": ([100], [0, 1], [(0, 10, 0, 0)]),
    "unknown extent": ([100], [0, 1], [(0, 10, 77, 0)]),
    "beyond the size": ([100], [0, 1], [(91, 10, 7, 0)]),
    "behind the size": ([100], [0, 1], [(200, 10, 7, 0)]),
    "beyond the extent": ([100], [0, 1], [(0, 51, 8, 0)]),
    "empty": ([100], [0, 1], [(0, 0, 7, 0)]),
    "length wraps": ([100], [0, 1], [(50, MOST - 20, 7, 0)]),
    "a size too large": ([1 << 63], [0, 1], [(0, 10, 7, 0)]),
    "counts do not begin at 0": ([100], [1, 1], [(0, 10, 7, 0)]),
    "counts go back": ([100, 100], [0, 2, 1], [(0, 10, 7, 0)]),
    "counts beyond the array": ([100, 100], [0, MOST, 1], [(0, 10, 7, 0)]),
    "counts short of the array": ([100], [0, 1], [(0, 10, 7, 0), (10, 10, 7, 0)]),
    "the last of many": ([9, 9, 9], [0, 1, 1, 2], [(0, 9, 7, 0), (0, 10, 7, 0)]),
}


@pytest.mark.parametrize("name", BAD_IMPORTS)
def test_bad_imports_are_refused_whole(place: Room, name: str) -> None:
    sizes, first, rows = BAD_IMPORTS[name]
    state = state_of(place.engine)
    memory = place.engine.statistics().memory
    numbers = [np.array(n, dtype=np.uint64) for n in (range(len(sizes)), sizes, first)]
    with pytest.raises(CorruptionError):
        import_maps(place.engine, *numbers, refs_from(rows))
    assert state_of(place.engine) == state
    assert place.engine.statistics().memory == memory


def test_nothing_to_import_or_define(place: Room) -> None:
    none = np.zeros(0, dtype=np.uint64)
    assert import_maps(place.engine, none, none, np.zeros(1, dtype=np.uint64), refs_from([])) == []
    place.engine.define(infos_of([]), crcs_of([]))
    place.new_map().replay(0, b"", 0)
    empty = np.zeros(2, dtype=np.uint64)
    maps = import_maps(place.engine, empty, empty, np.zeros(3, dtype=np.uint64), refs_from([]))
    assert [m.size for m in maps] == [0, 0]


def test_geometries_that_cannot_be(place: Room) -> None:
    size = place.region.size_bytes
    for first, segment_size, count, chunk in (
        (0, 8192, size // 8192 + 1, 65536),
        (size + 1, 8192, 0, 65536),
        (MOST, 8192, 1, 65536),
        (0, 4096, 1, 65536),
        (0, 0, 1, 65536),
        (0, MOST, 2, 65536),
        (0, 1 << 63, 2, 65536),
        (0, 8192, 1, 0),
        (0, 8192, 1, 32),
        (0, 8192, 1, 96),
        (0, 8192, 1, 1 << 31),
    ):
        with pytest.raises(InvariantError):
            Engine(
                place.region.handle,
                first=first,
                segment_size=segment_size,
                segment_count=count,
                chunk=chunk,
            )


def mutate(rng: random.Random, rows: npt.NDArray[np.void]) -> None:
    """Change a few bits or numbers."""
    if not len(rows):
        return
    for _ in range(rng.randint(1, 4)):
        raw = rows.view(np.uint8).reshape(len(rows), rows.dtype.itemsize)
        line, column = rng.randrange(len(rows)), rng.randrange(rows.dtype.itemsize)
        if rng.random() < 0.5:
            raw[line, column] ^= 1 << rng.randrange(8)
        else:
            name = rng.choice(rows.dtype.names or ())
            special = [0, 1, MOST, 1 << 63, CHUNK_BYTES, SEGMENT_BYTES, rng.randrange(1 << 20)]
            limit = MOST32 if rows.dtype[name].itemsize == 4 else MOST
            rows[name][line] = rng.choice(special) & limit


@pytest.mark.parametrize("seed", seeds(3), ids="CXLFS_SEED={}".format)
def test_mutated_images_are_loaded_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    with room() as place:
        content = place.new_map(capacity=100_000)
        for i in range(40):
            content.write(i * 6000 % 90_000, rng.randbytes(rng.randint(1, 5000)))
            if content.write(0, b"x")[0] == 0:
                content.close_lease()
                content.attach_lease(place.open_extent(100_000))
        content.take_delta().apply(content, None)
        counts, refs, infos, crcs = place.engine.export_maps([content])
        size = refs.nbytes + infos.nbytes + crcs.nbytes
        loaded = 0
        for _ in range(1500):
            engine = place.another_engine()
            rows, extents = refs.copy(), infos.copy()
            mutate(rng, rng.choice([rows, extents]))
            first = np.array([0, len(rows)], dtype=np.uint64)
            length = np.array([content.size], dtype=np.uint64)
            try:
                engine.define(extents, crcs)
                [copy] = import_maps(engine, counts, length, first, rows)
            except CorruptionError:
                assert engine.statistics().maps == 0
            else:
                loaded += 1
                try_reading(copy)
            assert engine.statistics().memory < 8 * size + 4096
            engine.drop_unreferenced()
            copy = None
            assert nothing_held(engine)
            engine.close()
        assert 0 < loaded < 1500


def try_reading(content: FileMap) -> None:
    for offset in range(0, content.size, 20_000):
        with contextlib.suppress(CorruptionError):
            content.read(offset, 20_000)


# --- a row of records -----------------------------------------------------------------------------

NEW: list[Info] = [(20 + i, START + 300_000 + 64 * i, 50, i, 0, 1) for i in range(6)]
SUMS = crcs_of([10, 11, 12, 13, 14, 15]).tobytes()


def changes_of(rows: list[tuple[int, int, int, int, int]]) -> npt.NDArray[np.void]:
    return np.array(rows, dtype=CHANGE_DTYPE)


def test_replay_keeps_the_order(place: Room) -> None:
    """Every change sees the definitions before it, and none behind it."""
    content, other = (FileMap(place.engine, owner=i) for i in (1, 2))
    refs = refs_from([(0, 50, 20, 0), (50, 10, 22, 0), (0, 5, 21, 0)])
    data = SUMS + refs.tobytes()
    changes = changes_of([(0, 50, 24, 1, 1), (50, 60, 56, 1, 3), (0, 5, 88, 1, 3)])
    maps = [content, content, other]
    assert place.engine.replay(infos_of(NEW), changes, maps, data) is None
    assert content.export(0, 99).tolist() == [(0, 50, 20, 0), (50, 10, 22, 0)]
    assert other.export(0, 99).tolist() == [(0, 5, 21, 0)]
    assert (content.size, other.size) == (60, 5)
    assert {info[0] for info in NEW} < set(place.engine.list()["id"].tolist())
    assert not content.is_dirty


@pytest.mark.parametrize("stop", range(3))
def test_replay_stops_where_a_definition_comes_too_late(place: Room, stop: int) -> None:
    content = FileMap(place.engine, owner=1)
    refs = refs_from([(0, 50, 20, 0), (0, 40, 21, 0), (0, 30, 22, 0)])
    before = [1, 2, 3]
    before[stop] = stop
    rows = [(0, 50 - 10 * i, 24 + 32 * i, 1, before[i]) for i in range(3)]
    found = place.engine.replay(
        infos_of(NEW), changes_of(rows), [content] * 3, SUMS + refs.tobytes()
    )
    assert found is not None
    assert (found.definition, found.change) == (None, stop)
    assert content.size == (0, 50, 40)[stop]


def test_replay_stops_at_an_impossible_definition(place: Room) -> None:
    content = FileMap(place.engine, owner=1)
    for wrong in ((23, 5, 50, 3, 0, 1), (23, START + 400_000, 50, 6, 0, 1), (7, START, 9, 0, 0, 1)):
        infos = infos_of([*NEW[:3], wrong, *NEW[4:]])
        changes = changes_of([(0, 9, 0, 0, 1), (0, 99, 0, 0, 5)])
        found = place.engine.replay(infos, changes, [content] * 2, SUMS)
        assert found is not None
        assert (found.definition, found.change) == (3, None)
        assert content.size == 9


@pytest.mark.parametrize(
    "change",
    [
        (0, 50, 1, 1, 1),  # not aligned
        (0, 50, 32, 1, 1),  # leaves the data
        (0, 50, 24, 2, 1),
        (0, 50, MOST & ~7, 1, 1),
        (0, 50, 24, MOST, 1),
        (0, 50, 24, 1 << 59, 1),
        (1 << 63, 50, 24, 1, 1),
        (0, 1 << 63, 24, 1, 1),
    ],
)
def test_replay_refuses_impossible_numbers(
    place: Room, change: tuple[int, int, int, int, int]
) -> None:
    content = FileMap(place.engine, owner=1)
    data = SUMS + refs_from([(0, 50, 20, 0)]).tobytes()
    found = place.engine.replay(infos_of(NEW), changes_of([change]), [content], data)
    assert found is not None
    assert (found.definition, found.change) == (None, 0)
    assert content.size == content.ref_count == 0


def test_replay_refuses_what_is_closed(place: Room) -> None:
    content = FileMap(place.engine, owner=1)
    content.close()
    with pytest.raises(InvariantError):
        place.engine.replay(infos_of([]), changes_of([(0, 0, 0, 0, 0)]), [content], b"")
    with pytest.raises(InvariantError):
        place.engine.replay(infos_of([]), changes_of([(0, 0, 0, 0, 0)]), [], b"")


def test_closed_with_definitions_that_nothing_refers_to(place: Room) -> None:
    """As after a replay that broke off: far more than the table is shrunk for on the way."""
    rows: list[Info] = [(i, START + 64 * i, 64, i - 10, 0, 1) for i in range(10, 8000)]
    engine = place.another_engine()
    engine.define(infos_of(rows), crcs_of(list(range(8000))))
    engine.close()
