"""DRAM: what happens when there is none, how much is taken, and that all of it comes back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cxlfs.errors import OutOfMemoryError
from cxlfs.native import FaultKind, fault_count, set_fault
from cxlfs.native.discards import discard_in_steps, drop_discarded
from cxlfs.native.extents import EXTENT_INFO_DTYPE, REF_DTYPE, Delta, Engine, FileMap
from tests.native.test_extent_writes import refs_of
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

# --- no memory ----------------------------------------------------------------------------------


class Scene:
    """A file with several hundred references, its committed twin, and a delta that waits."""

    def __init__(self, place: Room) -> None:
        self.place = place
        self.engine = place.engine
        self.committed = place.new_map()
        self.live = place.new_map(capacity=1 << 17)
        for i in range(300):
            place.write(self.live, i * 4096 + i % 7, pattern(150, i), capacity=1 << 17)
        place.write(self.live, 2 << 20, pattern(70_000, 5), capacity=1 << 17)
        self.live.take_delta().apply(self.live, self.committed)
        self.moved = tuple(self.live.export((2 << 20) + 1000, 5000)[0].item())
        self.live.close_lease()
        place.segment = -1
        place.write(self.live, 3 << 20, pattern(100_000, 3), capacity=1 << 17)
        self.live.punch(5000, 100)
        for i in range(300):
            place.write(self.live, (4 << 20) + i * 4096, b"y", capacity=1 << 17)
        self.delta: Delta = self.live.take_delta()
        self.live.close_lease()
        self.small = place.new_map(2, capacity=8192)
        self.target = place.open_extent(100_000)
        self.live.attach_lease(place.open_extent(50_000))
        self.made: list[Any] = []

    def end(self) -> None:
        """Everything comes back, whatever failed."""
        self.made.clear()
        for content in (self.live, self.committed, self.small):
            content.close()
        del self.delta
        for extent_id in (self.target, 500):
            if extent_id in self.engine.list()["id"]:
                self.engine.close_lease(extent_id)
        self.engine.drop_unreferenced()

    def state(self) -> list[Any]:
        contents = (self.live, self.committed, self.small)
        counts = self.engine.statistics()
        return [
            [(c.size, c.allocated, c.is_dirty, refs_of(c)) for c in contents],
            self.engine.list().tolist(),
            self.engine.usage().tolist(),
            (counts.extents, counts.refs, counts.crcs, counts.maps),
            [c.read(0, c.size).tobytes() for c in contents],
        ]


def _import(scene: Scene) -> None:
    counts, refs, infos, crcs = scene.engine.export_maps([scene.committed])
    scene.made.append((infos, crcs))
    first = np.array([0, 0, counts[0]], dtype=np.uint64)
    sizes = np.array([0, scene.committed.size], dtype=np.uint64)
    scene.made += import_maps(scene.engine, np.array([8, 9], dtype=np.uint64), sizes, first, refs)


def _define(scene: Scene) -> None:
    infos = np.zeros(20, dtype=EXTENT_INFO_DTYPE)
    infos["id"] = [*range(1000, 1019), 1000]
    infos["media_offset"] = FIRST + 12 * scene.place.segment_bytes
    infos["length"] = 100
    infos["crc_count"] = 1
    infos["crc_index"] = range(20)
    infos["length"][19] = 5000
    infos["crc_count"][19] = 2
    scene.engine.define(infos, np.zeros(21, dtype=np.uint32))


def _set_many(scene: Scene) -> None:
    """Inside references, so that each makes two more, in a map of many leaves."""
    rows = np.zeros(400, dtype=REF_DTYPE)
    rows["file_offset"] = (2 << 20) + 170 * np.arange(400)
    rows["length"] = 10
    rows["extent_id"] = np.where(np.arange(400) % 3 == 0, 0, scene.moved[2])
    rows["extent_offset"] = np.where(rows["extent_id"] == 0, 0, 7)
    put(scene.live, rows)


def _set_few(scene: Scene) -> None:
    put(scene.small, scene.committed.export(0, 1000))


def _move(scene: Scene) -> None:
    _, length, source, offset = scene.moved
    copy_extent(scene.engine, source, offset, length, scene.target)
    end = int(scene.engine.describe(scene.target)[0]["length"][0])
    re_aim(scene.live, (source, offset, length, scene.target, end - length))


def _share(scene: Scene) -> None:
    """Several hundred references between others, in a map of many leaves."""
    end = 300 * 4096
    assert scene.committed.share(0, end, scene.live, (4 << 20) + 4097) == end


CALLS: dict[str, Callable[[Scene], object]] = {
    "new": lambda s: s.made.append(FileMap(s.engine, owner=5)),
    "begin a copy": lambda s: s.made.append(s.live.begin_copy()),
    "clone": lambda s: s.made.append(s.live.clone()),
    "twin": lambda s: s.made.append(s.committed.twin(9)),
    "references": lambda s: s.live.references(),
    "write at the end": lambda s: s.live.write(s.live.size, pattern(50_000, 9)),
    "write in the middle": lambda s: s.live.write(2_100_000, pattern(5000, 9)),
    "write a little": lambda s: s.live.write(2_100_000, b"x"),
    "first write": lambda s: s.small.write(5, b"x"),
    "punch": lambda s: s.live.punch(2_110_000, 10),
    "punch again": lambda s: (s.live.punch(2_110_000, 10), s.live.punch(15_000, 100_000)),
    "share many": _share,
    "share few": lambda s: s.committed.share(0, 5000, s.small, 7),
    "set many": _set_many,
    "set few": _set_few,
    "take a delta": lambda s: s.made.append(s.live.take_delta()),
    "apply a delta": lambda s: s.delta.apply(s.live, s.committed),
    "apply to a small map": lambda s: s.delta.apply(s.live, s.small),
    "replay": lambda s: s.committed.replay(50_000, s.delta.refs.tobytes(), 9 << 20),
    "lease": lambda s: s.engine.lease(500, FIRST + 12 * s.place.segment_bytes, 100_000),
    "define": _define,
    "import": _import,
    "move": _move,
    "live ranges": lambda s: alive(s.engine, 0, 1),
    "list": lambda s: s.engine.list(),
    "export": lambda s: s.live.export(0, 1 << 30),
    "describe": lambda s: s.engine.describe(int(s.delta.refs["extent_id"][-1])),
}
MANY_STEPS = {"punch again", "move"}
"""These are several calls, of which the first may have worked."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CALLS)
def test_each_allocation_may_fail(name: str) -> None:
    failures = 0
    for nth in range(1, 5000):
        with room(chunk=4096) as place:
            scene = Scene(place)
            before = scene.state()
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                CALLS[name](scene)
                failed = False
            except OutOfMemoryError:
                failed = True
            count = fault_count(FaultKind.ALLOCATE)
            set_fault(FaultKind.ALLOCATE, 0)
            if failed:
                failures += 1
                assert name in MANY_STEPS or scene.state() == before
            scene.end()
            assert nothing_held(place.engine)
        if count < nth:
            break
    else:
        pytest.fail("it never succeeded")
    assert failures


@pytest.mark.parametrize("first", [2, 200])
def test_a_part_of_a_copy_may_fail(first: int) -> None:
    """It is as before, and the next one goes on there; also behind a copy of one small leaf."""
    for nth in range(1, 100):
        with room(chunk=4096) as place:
            scene = Scene(place)
            copy = scene.live.begin_copy()
            scene.live.copy_part(copy, first)
            if first == 2:
                [(_, length, source, offset), *_] = refs_of(copy)
                copy_extent(place.engine, source, offset, length, scene.target)
                for content in (scene.live, scene.committed, copy):
                    re_aim(content, (source, offset, length, scene.target, 0))
            before, state = refs_of(copy), scene.state()
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                scene.live.copy_part(copy, 300)
                failed = False
            except OutOfMemoryError:
                failed = True
            count = fault_count(FaultKind.ALLOCATE)
            set_fault(FaultKind.ALLOCATE, 0)
            if failed:
                assert (refs_of(copy), scene.state()) == (before, state)
            while scene.live.copy_part(copy, 100):
                pass
            assert refs_of(copy) == refs_of(scene.live)
            assert (copy.size, copy.is_dirty) == (scene.live.size, False)
            copy.close()
            scene.end()
            assert nothing_held(place.engine)
        if count < nth:
            return
    pytest.fail("it never succeeded")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [0, 1000, 150 * 4096 + 5])
def test_what_ends_in_steps_ends_without_memory(size: int) -> None:
    """At once, or in the order of the file: what is left is the same."""
    found = set()
    for nth in range(200):
        with room(chunk=4096) as place:
            scene = Scene(place)
            discard_in_steps(place.engine, 20)
            set_fault(FaultKind.ALLOCATE, nth)
            scene.committed.truncate(size)
            waiting = place.engine.statistics().discarded_refs
            while drop_discarded(place.engine, 7):
                pass
            count = fault_count(FaultKind.ALLOCATE)
            set_fault(FaultKind.ALLOCATE, 0)
            found.add(waiting > 0)
            state = repr(scene.state())
            if nth == 0:
                right = state
            assert state == right or place.engine.statistics().uncounted_extents
            scene.end()
            while drop_discarded(place.engine, 1000):
                pass
            assert nothing_held(place.engine)
        if nth and count < nth:
            assert found == {False, True}
            return
    pytest.fail("it never succeeded")


def test_an_engine_that_ends_drops_nothing() -> None:
    with room(chunk=4096) as place:
        scene = Scene(place)
        discard_in_steps(place.engine, 50)
        scene.committed.truncate(0)
        drop_discarded(place.engine, 20)
        scene.live.close()
        assert place.engine.statistics().discarded_refs > 500


def test_cancelling_without_memory_forgets_nothing() -> None:
    with room() as place:
        content, committed = place.new_map(capacity=200_000), place.new_map()
        content.write(0, pattern(100_000, 1))
        content.take_delta().apply(content, committed)
        for i in range(10):
            content.write(i * 8192, b"a")
        delta = content.take_delta()
        for i in range(3, 8):
            content.write(i * 8192 + 4096, b"b")
        set_fault(FaultKind.ALLOCATE, 1)
        delta.cancel(content)
        assert fault_count(FaultKind.ALLOCATE) >= 1
        set_fault(FaultKind.ALLOCATE, 0)
        content.take_delta().apply(content, committed)
        assert refs_of(committed) == refs_of(content)


def test_an_engine_without_memory() -> None:
    with room() as place:
        for nth in range(1, 10):
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                engine = place.another_engine()
            except OutOfMemoryError:
                continue
            set_fault(FaultKind.ALLOCATE, 0)
            engine.close()
            assert nth == 5
            return


# --- how much -----------------------------------------------------------------------------------


def one_extent(engine: Engine, length: int, *, extent_id: int = 1, segment: int = 0) -> None:
    infos = np.zeros(1, dtype=EXTENT_INFO_DTYPE)
    chunks = -(-length // engine.chunk)
    start = FIRST + segment * engine.segment_size
    infos[0] = (extent_id, start, length, 0, 0, chunks)
    engine.define(infos, np.zeros(chunks, dtype=np.uint32))


def test_a_file_of_one_extent_takes_little() -> None:
    with room() as place:
        engine = place.engine
        files = []
        before = engine.statistics().memory
        for i in range(1000):
            content = FileMap(engine, owner=i)
            one_extent(engine, 4096, extent_id=1 + i)
            put(content, np.array([(0, 4096, 1 + i, 0)], dtype=REF_DTYPE))
            content.set_size(4096)
            files.append(content)
        assert (engine.statistics().memory - before) / 1000 < 700
        files.clear()
        del content
        engine.drop_unreferenced()
        assert nothing_held(engine)


@pytest.mark.parametrize("order", ["upwards", "downwards", "random"])
def test_references_take_little_in_any_order(order: str) -> None:
    count = 60_000
    with room() as place:
        one_extent(place.engine, place.segment_bytes)
        base = place.engine.statistics().memory
        content = FileMap(place.engine, owner=1)
        numbers = np.arange(count, dtype=np.uint64)
        if order == "downwards":
            numbers = numbers[::-1]
        if order == "random":
            np.random.default_rng(1).shuffle(numbers)
        rows = np.zeros(count, dtype=REF_DTYPE)
        rows["file_offset"] = numbers * 10
        rows["length"] = 9
        rows["extent_id"] = 1
        for start in range(0, count, 100):
            put(content, rows[start : start + 100])
        assert content.ref_count == count
        assert (place.engine.statistics().memory - base) / count < 96
        assert refs_of(content)[:: count // 7] == sorted(rows.tolist())[:: count // 7]
        for start in range(0, count, 100):
            gaps = rows[start : start + 100].copy()
            gaps["extent_id"] = 0
            gaps["length"] = np.where(numbers[start : start + 100] % 50 == 0, 8, 9)
            put(content, gaps)
        left = content.ref_count
        assert left == count // 50
        assert (place.engine.statistics().memory - base) / left < 160


def test_a_million_references() -> None:
    count = 1_000_000
    rng = random.Random(3)
    with room() as place:
        engine = place.engine
        one_extent(engine, place.segment_bytes)
        rows = np.zeros(count, dtype=REF_DTYPE)
        rows["file_offset"] = np.arange(count, dtype=np.uint64) * 4096
        rows["length"] = 4096
        rows["extent_id"] = 1
        rows["extent_offset"] = np.arange(count, dtype=np.uint64) % 7 * 8192
        first = np.array([0, count], dtype=np.uint64)
        size = count * 4096
        sizes, owners = np.array([size], dtype=np.uint64), np.array([7], dtype=np.uint64)
        [content] = import_maps(engine, owners, sizes, first, rows)
        assert engine.statistics().memory / count < 60
        place.segment, place.position, place.next_id = 3, HEADER_BYTES, 9
        content.attach_lease(place.open_extent(200_000))
        before = content.clone()
        for _ in range(3000):
            block = rng.randrange(count)
            content.punch(block * 4096, 4096)
            place.write(content, block * 4096 + 100, b"x" * 50)
        delta = content.take_delta()
        assert len(delta.refs) < 10_000
        delta.apply(content, before)
        assert np.array_equal(before.export(0, size), content.export(0, size))
        assert engine.statistics().memory / (2 * count) < 56
        assert int(engine.usage().sum()) > 0
        engine.drop_unreferenced()
        content.truncate(size // 2)
        assert content.ref_count <= count // 2 + 1
        content.close()
        before.close()
        assert nothing_held(engine)


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
def test_nothing_is_kept_of_files_that_come_and_go(seed: int) -> None:
    rng = random.Random(seed)
    with room() as place:
        for _ in range(30):
            maps = [place.new_map(i, capacity=20_000) for i in range(5)]
            for _ in range(60):
                content = rng.choice(maps)
                content.write(rng.randrange(50_000), rng.randbytes(rng.randint(1, 300)))
                if rng.random() < 0.1:
                    delta = content.take_delta()
                    delta.apply(content, rng.choice(maps)) if rng.random() < 0.5 else None
                if rng.random() < 0.1:
                    maps.append(content.clone())
            for content in maps:
                content.close()
            del delta
            assert nothing_held(place.engine)
            assert place.engine.dead_segments()
            place.free, place.segment = list(range(place.segments)), -1
