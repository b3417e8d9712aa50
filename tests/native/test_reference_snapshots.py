"""Snapshots of the references of one content, taken down in steps while it changes, or ends."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cxlfs.errors import InvariantError, OutOfMemoryError
from cxlfs.native import FaultKind, set_fault
from cxlfs.native.discards import discard_in_steps, drop_discarded
from cxlfs.native.extents import FileMap
from cxlfs.native.snapshot import LEFT_OUT, ReferenceSnapshot, references_of
from tests.native.test_extent_writes import refs_of
from tests.support.extents import (
    Room,
    copy_extent,
    nothing_held,
    pattern,
    put,
    re_aim,
    room,
    seeds,
)

SOURCE_BYTES = 200_000
LEAF_REFS = 127
STRIDE_BYTES = 128
LENGTH_BYTES = 64
"""Of each reference, from one to the next one twice that: holes between them."""


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


def publish(content: FileMap) -> None:
    content.take_delta().apply(content, None)


def source_of(place: Room) -> FileMap:
    source = place.new_map(99, capacity=SOURCE_BYTES + 64)
    place.write(source, 0, pattern(SOURCE_BYTES, 1), capacity=SOURCE_BYTES + 64)
    source.close_lease()
    publish(source)
    return source


def fragmented(source: FileMap, count: int, rng: random.Random) -> FileMap:
    """A published content of so many references to anywhere in the source."""
    content = FileMap(source.engine, owner=1)
    for number in range(count):
        place = rng.randrange(SOURCE_BYTES - LENGTH_BYTES)
        source.share(place, LENGTH_BYTES, content, number * STRIDE_BYTES)
    publish(content)
    assert content.ref_count == count
    return content


def visits(place: Room) -> int:
    return place.engine.statistics().refs_visited


class Changes:
    """Whatever may happen to a content while a snapshot of it is taken down."""

    def __init__(self, place: Room, source: FileMap, content: FileMap, rng: random.Random) -> None:
        self.place, self.source, self.content, self.rng = place, source, content, rng
        self.others: list[FileMap] = []

    def somewhere(self) -> int:
        return self.rng.randrange(self.content.size + 1)

    def punch(self) -> None:
        self.content.punch(self.somewhere(), self.rng.choice([1, 200, 30_000, 1 << 20]))

    def share(self) -> None:
        length = self.rng.choice([1, 64, 5000])
        self.source.share(self.rng.randrange(50_000), length, self.content, self.somewhere())

    def put_many(self) -> None:
        rows = self.source.export(0, LENGTH_BYTES).repeat(300)
        rows["file_offset"] = self.somewhere() + 70 * np.arange(300)
        put(self.content, rows)

    def write(self) -> None:
        self.place.write(self.content, self.somewhere(), self.rng.randbytes(30), capacity=1 << 16)

    def cut(self) -> None:
        self.content.truncate(self.somewhere())

    def move(self) -> None:
        target = self.place.open_extent(20_000)
        extent_id = refs_of(self.source)[0][2]
        copy_extent(self.place.engine, extent_id, 1000, 9000, target)
        for content in (self.source, self.content, *self.others):
            re_aim(content, (extent_id, 1000, 9000, target, 0))
        self.place.engine.close_lease(target)

    def clone(self) -> None:
        self.others.append(self.content.clone())

    def publish(self) -> None:
        publish(self.content)

    def drop(self) -> None:
        drop_discarded(self.place.engine, self.rng.choice([1, 100, 1000]))

    def any(self) -> None:
        self.rng.choice(
            [
                *(self.punch, self.share, self.put_many, self.write, self.cut, self.move),
                *(self.clone, self.publish, self.drop, self.drop),
            ]
        )()

    def end(self) -> None:
        for content in (self.content, self.source, *self.others):
            content.close_lease()
            content.close()
        while drop_discarded(self.place.engine, 1000):
            pass
        self.place.engine.drop_unreferenced()


@pytest.mark.parametrize("seed", seeds(30), ids="CXLFS_SEED={}".format)
def test_it_is_of_the_moment_at_which_it_began(seed: int) -> None:
    """Whatever changes meanwhile, in whatever order with the steps; also where the content ends."""
    rng = random.Random(seed)
    with room(segments=200) as place:
        source = source_of(place)
        content = fragmented(source, rng.choice([1, 127, 128, 3000]), rng)
        if rng.random() < 0.7:
            discard_in_steps(place.engine, rng.choice([5, 500]))
        changes = Changes(place, source, content, rng)
        size, expected = content.size, refs_of(content)
        snapshot = ReferenceSnapshot(content)
        for _ in range(rng.choice([0, 1, 25])):
            changes.any()
            if rng.random() < 0.3 and not snapshot.step(rng.choice([1, 200, 1000])):
                break
        else:
            if rng.random() < 0.5:
                changes.end()
            while snapshot.step(rng.choice([1, 500])):
                pass
        assert snapshot.size == size
        assert [tuple(row) for row in snapshot.rows.tolist()] == expected
        snapshot.cancel()
        if not content.closed:
            changes.end()
        assert nothing_held(place.engine)


def test_taking_it_costs_a_change_no_more_than_the_leaves_that_change(place: Room) -> None:
    source = source_of(place)
    content = fragmented(source, 20_000, random.Random(1))
    before = visits(place)
    snapshot = ReferenceSnapshot(content)
    assert visits(place) == before
    source.share(0, 20, content, 10_000 * STRIDE_BYTES + 20)
    content.punch(5000 * STRIDE_BYTES, 10)
    assert 0 < visits(place) - before <= 4 * LEAF_REFS
    costs = []
    for count in (1000, 5000):
        before = visits(place)
        assert snapshot.step(count)
        costs.append(visits(place) - before)
    assert 1000 <= costs[0] < 1000 + LEAF_REFS
    assert 5000 - 4 * LEAF_REFS <= costs[1] < 5000 + LEAF_REFS
    snapshot.cancel()
    before = visits(place)
    content.punch(6000 * STRIDE_BYTES, 10)
    assert visits(place) == before, "nobody wants it any more"


def test_while_another_thread_changes_the_content(place: Room) -> None:
    source = source_of(place)
    content = fragmented(source, 12_000, random.Random(1))
    expected = refs_of(content)
    snapshot = ReferenceSnapshot(content)

    def change() -> None:
        rng = random.Random(2)
        for _ in range(3000):
            source.share(0, 20, content, rng.randrange(content.size))
        content.truncate(0)

    thread = threading.Thread(target=change)
    thread.start()
    while snapshot.step(1):
        pass
    thread.join()
    assert [tuple(row) for row in snapshot.rows.tolist()] == expected


def test_one_at_a_time_for_each_content(place: Room) -> None:
    source = source_of(place)
    content = fragmented(source, 500, random.Random(1))
    first, other = ReferenceSnapshot(content), ReferenceSnapshot(source)
    with pytest.raises(InvariantError):
        ReferenceSnapshot(content)
    content.punch(300 * STRIDE_BYTES, 1)
    with pytest.raises(InvariantError):
        ReferenceSnapshot(content)
    first.cancel()
    with pytest.raises(InvariantError, match="has ended"):
        first.step(1)
    del other
    ReferenceSnapshot(content).cancel()
    ReferenceSnapshot(source).cancel()


def test_what_is_not_published_is_refused(place: Room) -> None:
    content = place.new_map(1, capacity=1 << 16)
    place.write(content, 0, b"data")
    snapshot = ReferenceSnapshot(content)
    with pytest.raises(InvariantError):
        snapshot.step(1)
    content.close_lease()


def test_without_memory_nothing_is_begun(place: Room) -> None:
    content = fragmented(source_of(place), 500, random.Random(1))
    memory = place.engine.statistics().memory
    for nth in (1, 2):
        set_fault(FaultKind.ALLOCATE, nth)
        with pytest.raises(OutOfMemoryError):
            ReferenceSnapshot(content)
        set_fault(FaultKind.ALLOCATE, 0)
        assert place.engine.statistics().memory == memory
    ReferenceSnapshot(content).cancel()
    assert place.engine.statistics().memory == memory


def test_an_engine_that_ends_ends_its_snapshots(place: Room) -> None:
    content = fragmented(source_of(place), 500, random.Random(1))
    snapshot = ReferenceSnapshot(content)
    assert snapshot.step(1)
    rows = snapshot.rows
    place.engine.close()
    with pytest.raises(InvariantError, match="has ended"):
        snapshot.step(1)
    snapshot.cancel()
    del snapshot
    assert rows["length"][0] == LENGTH_BYTES


def test_contents_of_many_references_are_left_out_of_a_list(place: Room) -> None:
    source = source_of(place)
    maps = [fragmented(source, count, random.Random(1)) for count in (3, 5, 0, 6)]
    sizes, counts, refs = references_of(maps, 5)
    assert counts.tolist() == [3, 5, 0, LEFT_OUT]
    assert sizes.tolist() == [content.size for content in maps]
    assert [tuple(row) for row in refs.tolist()] == refs_of(maps[0]) + refs_of(maps[1])
