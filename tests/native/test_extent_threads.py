"""Many threads in one engine: each content stays right, and nothing of it is lost or kept."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import pytest

from cxlfs.native import Granularity
from cxlfs.native.extents import FileMap
from tests.support.extents import Room, alive, copy_extent, nothing_held, re_aim, room, seeds

PERIOD = 251
GROWN = 600_000


def byte_at(offset: int, length: int) -> bytes:
    """What stands in the growing file from ``offset`` on."""
    return ((np.arange(offset, offset + length) % PERIOD) + 1).astype(np.uint8).tobytes()


class Crowd:
    """Threads that all begin at once; the first error of any of them is raised by :meth:`run`."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.jobs: list[Callable[[], None]] = []
        self.done = threading.Event()

    def run(self) -> None:
        barrier = threading.Barrier(len(self.jobs))

        def work(job: Callable[[], None]) -> None:
            try:
                barrier.wait()
                job()
            except BaseException as error:  # noqa: BLE001 - raised again by the main thread
                self.errors.append(error)

        threads = [threading.Thread(target=work, args=(job,)) for job in self.jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


class Locked(Room):
    """Leases for many threads."""

    lock = threading.Lock()

    def lease_for(self, content: FileMap, capacity: int) -> None:
        content.close_lease()
        with self.lock:
            extent_id = self.open_extent(capacity)
        content.attach_lease(extent_id)


def grow(place: Locked, content: FileMap, crowd: Crowd, seed: int) -> None:
    rng = random.Random(seed)
    offset = 0
    while offset < GROWN:
        data = byte_at(offset, min(rng.choice([1, 100, 5000, 70_000]), GROWN - offset))
        done = 0
        while done < len(data):
            taken, _ = content.write(offset + done, data, done)
            done += taken
            if taken == 0:
                place.lease_for(content, 100_000)
        offset += len(data)
        if rng.random() < 0.2:
            content.take_delta().apply(content, None)
    crowd.done.set()


def follow(content: FileMap, crowd: Crowd, seed: int) -> None:
    """Whatever is read of a growing file is right, at every moment."""
    rng = random.Random(seed)
    while True:
        last = crowd.done.is_set()
        size = content.size
        if size:
            offset = rng.randrange(size)
            length = rng.choice([1, 300, 66_000, size])
            expected = byte_at(offset, max(0, min(length, size - offset)))
            found = bytes(content.read(offset, length))
            assert found[: len(expected)] == expected
            assert found[len(expected) :] == byte_at(size, len(found) - len(expected))
        if last:
            return


def scribble(place: Locked, owner: int, seed: int) -> None:
    """A file of one's own, compared with a plain copy."""
    rng = random.Random(seed)
    content, committed = FileMap(place.engine, owner=owner), FileMap(place.engine, owner=owner)
    copy = bytearray()
    for _ in range(300):
        offset, length = rng.randrange(30_000), rng.choice([1, 50, 3000, 9000])
        data = rng.randbytes(length)
        while content.write(offset, data) != (length, 0):
            place.lease_for(content, 30_000)
        if len(copy) < offset + length:
            copy.extend(bytes(offset + length - len(copy)))
        copy[offset : offset + length] = data
        if rng.random() < 0.1:
            content.take_delta().apply(content, committed)
        if rng.random() < 0.05:
            size = rng.randrange(30_000)
            content.truncate(size)
            copy[size:] = bytes(max(0, size - len(copy)))
        if rng.random() < 0.1:
            assert content.read(0, 1 << 20) == copy
            twin = content.clone()
            assert twin.read(0, 1 << 20) == copy
            twin.close()
    assert content.read(0, 1 << 20) == copy
    content.close()
    committed.close()


def ask(place: Locked, crowd: Crowd) -> None:
    """Questions about everything, all the time."""
    engine = place.engine
    while not crowd.done.is_set():
        for extent_id in engine.list()["id"].tolist()[::7]:
            found = engine.verify(extent_id)
            assert found is None or found.fault_count == 0
        assert int(engine.usage().max()) <= place.segment_bytes
        alive(engine, random.Random(1).randrange(place.segments))
        engine.statistics()
        engine.export_maps([])


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE])
def test_everything_at_once(seed: int, granularity: Granularity) -> None:
    with room(granularity, segments=400) as made:
        place = Locked(made.region, segments=400)
        crowd = Crowd()
        content = FileMap(place.engine, owner=1)
        crowd.jobs = [
            lambda: grow(place, content, crowd, seed),
            lambda: follow(content, crowd, seed + 1),
            lambda: follow(content, crowd, seed + 2),
            lambda: scribble(place, 2, seed + 3),
            lambda: scribble(place, 3, seed + 4),
            lambda: ask(place, crowd),
        ]
        crowd.run()
        assert content.read(0, GROWN) == byte_at(0, GROWN)
        content.close()
        assert nothing_held(place.engine)
        place.engine.close()


def read_any(contents: list[FileMap], data: bytes, crowd: Crowd, rng: random.Random) -> None:
    while not crowd.done.is_set():
        offset, length = rng.randrange(len(data)), rng.choice([10, 70_000])
        content = rng.choice(contents)
        assert content.read(offset, length) == data[offset : offset + length]
        assert content.seek(offset, hole=True) == len(data)


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
def test_contents_share_with_each_other(seed: int) -> None:
    """To and fro, with writers and readers of both: the same bytes stand everywhere."""
    with room(segments=400) as made:
        place = Locked(made.region, segments=400)
        crowd = Crowd()
        contents = [FileMap(place.engine, owner=owner) for owner in (1, 2)]
        data = byte_at(0, 100_000)
        for content in contents:
            place.write(content, 0, data, capacity=160_000)
            content.close_lease()

        def share(number: int) -> None:
            rng = random.Random(seed + number)
            for _ in range(2000):
                offset, length = rng.randrange(len(data)), rng.randint(1, 20_000)
                source, target = rng.sample(contents, 2)
                shared = source.share(offset, length, target, offset)
                assert shared in (None, min(length, len(data) - offset))
            crowd.done.set()

        def write(number: int) -> None:
            rng = random.Random(seed + number)
            content = contents[number % 2]
            while not crowd.done.is_set():
                offset = rng.randrange(len(data))
                if content.write(offset, data[offset : offset + 300])[0] == 0:
                    place.lease_for(content, 50_000)
                if rng.random() < 0.1:
                    content.take_delta().apply(content, None)

        def read() -> None:
            read_any(contents, data, crowd, random.Random(seed))

        crowd.jobs = [lambda: share(1), lambda: share(2), lambda: write(3), read]
        crowd.run()
        for content in contents:
            assert content.read(0, len(data)) == data
            content.close()
        assert nothing_held(place.engine)
        place.engine.close()


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
def test_readers_keep_what_they_read(seed: int) -> None:
    """Content is moved and its extents vanish while others read it."""
    with room(segments=400) as made:
        place = Locked(made.region, segments=400)
        crowd = Crowd()
        content = FileMap(place.engine, owner=1)
        data = byte_at(0, 150_000)
        place.write(content, 0, data, capacity=160_000)
        content.take_delta().apply(content, None)
        content.close_lease()

        def move() -> None:
            for _ in range(150):
                with place.lock:
                    target = place.open_extent(160_000)
                rows = content.export(0, len(data))
                for _, length, source, offset in rows.tolist():
                    copy_extent(place.engine, source, offset, length, target)
                place.engine.publish(target)
                position = 0
                for _, length, source, offset in rows.tolist():
                    re_aim(content, (source, offset, length, target, position))
                    position += length
                place.engine.close_lease(target)
            crowd.done.set()

        def read(number: int) -> None:
            rng = random.Random(seed + number)
            while not crowd.done.is_set():
                offset = rng.randrange(len(data))
                length = rng.choice([10, 70_000, len(data)])
                assert content.read(offset, length) == data[offset : offset + length]

        crowd.jobs = [move, lambda: read(1), lambda: read(2)]
        crowd.run()
        assert place.engine.statistics().extents == 1
        content.close()
        assert nothing_held(place.engine)
        place.engine.close()


def test_a_read_that_meets_a_truncation_is_short() -> None:
    """It delivers no zeros: bytes that were cut off never were zeros."""
    with room(segments=400) as made:
        place = Locked(made.region, segments=400)
        crowd = Crowd()
        content = FileMap(place.engine, owner=1)
        data = byte_at(0, 20_000)
        place.write(content, 0, data, capacity=200_000)

        def cut_and_grow() -> None:
            for number in range(3000):
                content.truncate(100 + number % 7)
                place.write(content, 50, data[50:], capacity=200_000)
                place.free += [s for s in place.engine.dead_segments() if s != place.segment]
            crowd.done.set()

        def read(first: int) -> None:
            while not crowd.done.is_set():
                found = content.read(first, len(data))
                assert found == data[first : first + len(found)]

        crowd.jobs = [cut_and_grow, lambda: read(0), lambda: read(60)]
        crowd.run()
        content.close()
        assert nothing_held(place.engine)
        place.engine.close()
