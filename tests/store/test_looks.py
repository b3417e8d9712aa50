"""How many references a step of the background looks at, when files refer to their bytes crosswise
or many times. Counted, never timed.
"""

from __future__ import annotations

import itertools
import os
import random

import numpy as np
import pytest

from cxlfs.native.extent_calls import SPAN_DTYPE
from cxlfs.native.maps import FileMap
from cxlfs.store import Store, UnfinishedError, unit_large
from cxlfs.store.clones import REFS_AT_ONCE
from cxlfs.store.unit_aside import CONTENTS
from cxlfs.store.unit_rules import UnitsMode
from tests.store.test_scaling import SPARE, STRIDE_BYTES, Longest, large_file
from tests.support.shop import Shop, close, create
from tests.support.stores import read_file, write_file
from tests.support.unit_steps import end_all, finish, overwrite

BLOCK = 4096
MIB = 1 << 20
EXTENT_BLOCKS = 2048
"""Of the source: leases of 8 MiB."""
WINDOW_BLOCKS = 1024


def shuffled_file(store: Store, rng: random.Random, times: int, part: float = 1) -> FileMap:
    """A file that refers ``times`` to each block, or a part of them, of another one that is gone,
    in any order; its committed content.
    """
    source = write_file(store, 1, b"source", os.urandom(EXTENT_BLOCKS * BLOCK))
    shared = store.namespace.get(source).content
    ino = write_file(store, 1, b"shuffled", b"x")
    handle = store.open_file(ino, os.O_RDWR)
    content = store.files.content_of(handle)
    order = rng.sample(range(EXTENT_BLOCKS), int(part * EXTENT_BLOCKS)) * times
    rng.shuffle(order)
    for number, block in enumerate(order):
        shared.share(block * BLOCK, BLOCK, content, number * BLOCK)
    close(store, handle)
    store.unlink(1, b"source")
    store.volume.rollover()
    return store.namespace.get(ino).content


def visits(store: Store) -> int:
    return store.volume.engine.statistics().refs_visited


def test_a_look_at_a_part_of_a_file_finds_that_part(shop: Shop, rng: random.Random) -> None:
    """Its blocks lie anywhere in extents, between those of other parts."""
    store = shop.new_ordinary(256 * MIB)
    content = shuffled_file(store, rng, 1)
    before = visits(store)
    found = store.volume.engine.live_ranges_of(content, 0, WINDOW_BLOCKS * BLOCK)
    assert found.ranges["length"].sum() == WINDOW_BLOCKS * BLOCK
    assert visits(store) - before <= WINDOW_BLOCKS + 64


def test_moving_a_part_of_a_file_looks_at_that_part(shop: Shop, rng: random.Random) -> None:
    store = shop.new_ordinary(256 * MIB)
    content = shuffled_file(store, rng, 1)
    engine = store.volume.engine
    found = engine.live_ranges_of(content, 0, WINDOW_BLOCKS * BLOCK)
    before = visits(store)
    moved = store.cleaner.mover.move(
        store.cleaner.mover.choose(found.ranges),
        found.owners,
        lambda size: store.volume.space.cleaner_lease(size, born=0),
    )
    assert moved > 256 * BLOCK
    assert visits(store) - before <= WINDOW_BLOCKS + 64


def test_a_file_with_many_references_to_each_byte_is_not_gathered(
    shop: Shop, rng: random.Random
) -> None:
    """One look says so."""
    store = shop.new_ordinary(256 * MIB)
    shuffled_file(store, rng, 40)
    before, moved = visits(store), store.volume.counters.moved_bytes
    for tick in range(200):
        store.maintain(float(tick))
    assert store.volume.counters.moved_bytes == moved
    assert 0 < visits(store) - before <= 40 * WINDOW_BLOCKS + 64


@pytest.mark.timeout(300)
def test_the_cleaner_looks_at_less_where_bytes_have_many_references(
    shop: Shop, rng: random.Random
) -> None:
    """After one step that looked at too much."""
    store = shop.new_ordinary(256 * MIB)
    store.past.is_on = False  # the source is gone, and nothing but its blocks that are shared stays
    shuffled_file(store, rng, 40, part=0.9)
    steps = []
    for _ in range(100):
        before = visits(store)
        if not store.cleaner.compact(0.95):
            break
        steps.append(visits(store) - before)
    print(f"references looked at in each step: {steps}")
    assert steps[0] > 50_000
    assert max(steps[1:]) < steps[0]
    assert max(steps[2:]) < 50_000


def test_the_cleaner_looks_at_what_is_in_its_window_after_scattered_writes(
    shop: Shop, rng: random.Random
) -> None:
    """What programs see of a file and what is committed are two maps. With many changes a commit
    goes over what lies between them, too, and what refers to an extent is still known once.
    """
    store = shop.new_ordinary(256 * MIB)
    _, handle = store.create(1, b"file", 0o644, 0, 0, os.O_RDWR)
    places = [2 * number for number in range(42_000)]
    rng.shuffle(places)
    for number, place in enumerate(places, 1):
        store.write(handle, place * BLOCK, b"x" * BLOCK)
        if number % 5000 == 0:
            store.fsync(handle)
    close(store, handle)
    segment = store.volume.superblock.segment_size_bytes
    spans = np.zeros(1, dtype=SPAN_DTYPE)
    looks = []
    for index in np.flatnonzero(store.volume.engine.usage()).tolist():
        spans[0] = (store.volume.superblock.segment_offset(index), segment)
        found = store.volume.engine.live_ranges(spans)
        looks.append(found.visited)
        assert len(found.ranges)
    references = store.volume.engine.statistics().refs
    print(f"of {references} references those of each segment were found by a look at {looks}")
    assert max(looks) < references / 4


@pytest.mark.timeout(300)
def test_an_image_takes_many_references_in_parts(shop: Shop) -> None:
    """And whoever changes them meanwhile, or the attributes of their file, takes down what he
    changes alone.
    """
    found = []
    for count in (150_000, 300_000):
        store = shop.new_ordinary(256 * MIB)
        ino = large_file(store, b"large", count)
        handle = store.open_file(ino, os.O_RDWR)
        store.write(handle, 100, b"new")
        steps, changes = Longest(store), Longest(store)
        rollovers = store.volume.rollovers
        rollovers.begin()
        changes.step(lambda: store.set_attributes(ino, mode=0o600))  # noqa: B023
        changes.step(lambda: close(store, handle))  # noqa: B023
        handle = store.open_file(ino, os.O_RDWR)
        number = 0
        while steps.step(rollovers.step):
            number += 1
            store.write(handle, number * count, b"new")
            changes.step(lambda: store.fsync(handle))  # noqa: B023
        close(store, handle)
        found.append((steps.references, changes.references))
        refs = store.namespace.get(ino).content.export(0, 1 << 40).tolist()
        store = shop.reopen(store, clean=False)
        assert store.namespace.get(ino).content.export(0, 1 << 40).tolist() == refs
    print(f"references in the longest step and the longest change: {found}")
    assert 65_536 <= found[0][0] < 70_000
    assert found[1][0] <= found[0][0] + SPARE
    assert max(changed for _, changed in found) <= 10 * 127


def test_a_large_hole_is_made_in_parts(shop: Shop) -> None:
    """Of a file that is being written, and however far beyond its end the range reaches."""
    store = shop.new_ordinary(256 * MIB)
    handle = store.open_file(large_file(store, b"large", 120_000), os.O_RDWR)
    content = store.files.content_of(handle)
    kept = bytes(store.read(handle, 0, 10 * STRIDE_BYTES))
    store.write(handle, 100 * STRIDE_BYTES, b"new")
    gone = []
    while content.ref_count > 10:
        before = content.ref_count
        try:
            store.ranges.allocate(
                handle, len(kept), 1 << 40, keep_size=True, punch=True, in_steps=True
            )
        except UnfinishedError:
            assert content.ref_count > 10
        gone.append(before - content.ref_count)
    assert gone[:2] == [REFS_AT_ONCE] * 2
    assert len(gone) == 3
    size = content.size
    close(store, handle)
    store = shop.reopen(store, clean=False)
    handle = store.open_file(store.lookup(1, b"large").ino, os.O_RDONLY)
    assert store.files.content_of(handle).ref_count == 10
    assert bytes(store.read(handle, 0, size)) == kept + bytes(size - len(kept))
    close(store, handle)


def test_a_copy_is_short_where_very_many_references_would_come_or_go(shop: Shop) -> None:
    store = shop.new_ordinary(256 * MIB)
    source = store.open_file(large_file(store, b"large", 120_000), os.O_RDONLY)
    _, target = create(store, b"copy")
    _, whole = create(store, b"whole")
    size = store.files.content_of(source).size
    store.write(whole, 0, bytes(size))

    def copy(handle_in: int, handle_out: int) -> list[int]:
        """Bytes of each call; nobody waits for more references than that."""
        content, counts, done = store.files.content_of(handle_out), list[int](), 0
        while done < size:
            before = content.ref_count
            counts.append(store.ranges.copy(handle_in, done, handle_out, done, size - done))
            done += counts[-1]
            assert abs(content.ref_count - before) <= REFS_AT_ONCE + 2
        assert sum(counts) == size
        return counts

    data = bytes(store.read(source, 0, size))
    assert copy(source, target)[:2] == [REFS_AT_ONCE * STRIDE_BYTES] * 2
    assert bytes(store.read(target, 0, size)) == data
    assert copy(whole, target)[:2] == [REFS_AT_ONCE * STRIDE_BYTES] * 2
    assert bytes(store.read(target, 0, size)) == bytes(size)
    for handle in (source, target, whole):
        close(store, handle)


def test_a_copy_makes_room_for_its_references_in_steps(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind each of them others have their turn."""
    data = random.Random(1).randbytes(200_000)
    reader = store.open_file(write_file(store, 1, b"a", data), os.O_RDONLY)
    ino, handle = create(store, b"b")
    space, steps = store.volume.space, 3
    free = [space.free_count]
    monkeypatch.setattr(
        store.volume, "refresh_reserve", lambda growth_bytes=0: free[0] + steps * bool(growth_bytes)
    )

    def reclaim(needed_bytes: int) -> bool:
        assert needed_bytes == 0
        free[0] -= 1
        return True

    monkeypatch.setattr(store.ranges, "_reclaim", reclaim)
    for _ in range(steps - 1):
        with pytest.raises(UnfinishedError):
            store.ranges.copy(reader, 0, handle, 0, len(data), in_steps=True)
        write_file(store, 1, b"beside", data[:5000])
        store.unlink(1, b"beside")
    assert store.ranges.copy(reader, 0, handle, 0, len(data), in_steps=True) == len(data)
    assert free[0] == space.free_count - steps
    monkeypatch.undo()
    close(store, reader)
    close(store, handle)
    store = shop.reopen(store)
    assert read_file(store, ino) == data


def test_a_unit_keeps_many_references_in_parts(shop: Shop) -> None:
    """Each part refers to them twice: in the content that is made, and in what is durable of it."""
    store = shop.reopen(shop.new_ordinary(256 * MIB), clean=True, units=UnitsMode.AUTO)
    directory = store.make_directory(1, b"checkpoint-5", 0o755, 0, 0).ino
    large_file(store, b"large", 50_000)
    store.rename(1, b"large", directory, b"large")
    write_file(store, directory, b"trainer_state.json", b"{}")
    verb = overwrite(store, directory, b"large")
    engine, counts = store.volume.engine, [store.volume.engine.statistics().refs]
    finish(verb, lambda _step: counts.append(engine.statistics().refs))
    assert max(after - before for before, after in itertools.pairwise(counts)) <= (
        2 * unit_large.REFS_AT_ONCE + SPARE
    )
    assert len(counts) == 5
    (unit,) = store.units.open_units()
    assert unit.kept_in is not None
    contents = store.namespace.find(unit.kept_in.ino, CONTENTS)
    assert contents is not None
    copy = store.namespace.find(contents.ino, b"%d" % store.lookup(directory, b"large").ino)
    assert copy is not None
    assert copy.content.ref_count == 50_000
    end_all(store)
