"""Descriptors may say anything: refused one by one, without harm."""

from __future__ import annotations

import random
import struct
import threading
from pathlib import Path

import pytest

from cxlfs.errors import MediaError
from cxlfs.native import Granularity, MappedRegion
from cxlfs.native.direct import (
    SLIP_DESCRIPTORS,
    SLIP_DESCRIPTORS_AT,
    SLIP_STATE_AT,
    Absorbed,
    DirectRoom,
)
from tests.native.test_extent_writes import refs_of
from tests.support.direct import (
    FILE_MAX,
    Direct,
    direct,
    free_segments,
    state_of,
)
from tests.support.direct_format import DESCRIPTOR, descriptor
from tests.support.extents import FIRST, SEGMENT_BYTES, Room, pattern, seeds

MOST = (1 << 64) - 1


def test_every_wrong_field_is_refused() -> None:
    with direct() as d:
        lease, other = d.lease(), d.lease()
        mapped = d.place.open_extent(1000)
        closed = d.place.open_extent(1000)
        d.live.attach_lease(mapped)
        assert d.program.write(lease, 0, pattern(6000, 1))
        assert d.absorb().error is None
        d.engine.close_lease(closed)
        good = (1, lease.id, 6000, 6000, 100, 77)
        cap = lease.capacity_bytes
        places = [
            *((0, 100), (5999, 100), (6000, 0), (cap - 99, 100), (cap, 1), (cap + 1, 0)),
            *((6000, MOST), (MOST, 1), (MOST, 2), (MOST - 50, 100), (6000, cap), (1 << 32, 1)),
        ]
        wrong = {
            "sequence": [(n, *good[1:]) for n in (0, 2, 1 + SLIP_DESCRIPTORS, MOST)],
            "lease that": [(1, n, *good[2:]) for n in (0, d.slip_id, mapped, closed, 999, MOST)],
            "its bytes": [(1, lease.id, 6000, *place, 0) for place in places],
            "largest file": [
                (1, lease.id, n, *good[3:])
                for n in (FILE_MAX - 99, FILE_MAX, MOST, MOST - 99, 1 << 63)
            ],
            "last chunk": [(1, lease.id, 6000, 6000, 2 * 4096 - 6000, 1)],
            "flags": [(*good, 1), (*good, 1 << 31)],
            "reserved": [(*good, 0, 1, 0), (*good, 0, 0, 1 << 63)],
        }
        rows = [(descriptor(*row), reason) for reason, list_ in wrong.items() for row in list_]
        before = state_of(d)
        place = d.slip_offset + SLIP_DESCRIPTORS_AT + 64
        for row, reason in rows:
            d.place.region.store(place, row)
            found = d.absorb(2)
            assert (found.count, found.bytes, found.refused) == (0, 0, True), row
            assert found.error is not None
            assert reason in found.error
            assert str(place) in found.error
            assert state_of(d) == before
        assert d.program.write(lease, 6000, pattern(100, 5))
        assert d.program.write(other, 6100, pattern(5000, 6))
        assert d.absorb() == Absorbed(2, 5100, None)
        assert d.live.read(6000, 5100) == pattern(100, 5) + pattern(5000, 6)
        d.live.close_leases()
        d.end()


def test_the_first_ones_count() -> None:
    """Up to the first that is wrong; what comes behind it is not looked at."""
    with direct() as d:
        lease = d.lease()
        for number in range(10):
            assert d.program.write(lease, number * 100, pattern(100, number))
        place = d.slip_offset + SLIP_DESCRIPTORS_AT + 6 * 64
        row = d.place.region.read(place, 64)
        d.place.region.store(place, descriptor(6, 12345, 0, 0, 1))
        found = d.absorb()
        assert (found.count, found.bytes, found.refused) == (6, 600, True)
        assert d.live.size == 600
        d.place.region.store(place, row)
        assert d.absorb() == Absorbed(4, 400, None)
        d.end()


def test_no_slip_and_too_many() -> None:
    with direct() as d:
        size = d.place.region.size_bytes
        before = state_of(d)
        for slip, first, last in [
            *((d.slip_offset, 5, 4), (d.slip_offset, 0, SLIP_DESCRIPTORS + 1)),
            *(
                (d.slip_offset, 0, MOST),
                (size, 0, 1),
                (size - SLIP_DESCRIPTORS_AT, 0, 1),
                (MOST, 0, 1),
            ),
        ]:
            found = d.live.absorb(slip, first, last, d.rooms(), file_bytes_max=FILE_MAX)
            assert (found.count, found.refused) == (0, True)
        assert state_of(d) == before
        d.end()


def test_checksums_outside_the_media() -> None:
    """Only a daemon that errs could say so: nothing outside is looked at."""
    with direct() as d:
        lease = d.lease()
        assert d.program.write(lease, 0, pattern(9000, 1))
        before = state_of(d)
        for place in (d.place.region.size_bytes - 4, MOST - 3, MOST):
            rooms = [DirectRoom(lease.id, place, lease.capacity_bytes)]
            with pytest.raises(MediaError):
                d.live.absorb(d.slip_offset, 0, 1, rooms, file_bytes_max=FILE_MAX)
            assert state_of(d) == before
        d.end()


def test_a_room_larger_than_its_extent() -> None:
    with direct() as d:
        lease = d.lease()
        d.leases[0].capacity_bytes = MOST
        before = state_of(d)
        d.place.region.store(
            d.slip_offset + SLIP_DESCRIPTORS_AT, descriptor(0, lease.id, 0, 0, 65537, 1)
        )
        assert d.absorb(1).refused
        assert state_of(d) == before
        d.end()


@pytest.mark.parametrize("seed", seeds(3), ids="CXLFS_SEED={}".format)
def test_random_descriptors(seed: int) -> None:
    """Whatever they say: each is taken as a whole or refused, and nothing outside a lease is
    referred to.
    """
    rng = random.Random(seed)
    numbers = [0, 1, 2, 63, 64, 4095, 4096, 5000, 65536, 1 << 31, 1 << 32, 1 << 62, 1 << 63, MOST]

    def some(usual: int) -> int:
        return rng.choice([usual] * 12 + [rng.choice(numbers), rng.getrandbits(64)])

    with direct() as d:
        for _ in range(3000):
            if len(d.leases) < 3:
                d.lease(8192)
            lease = rng.choice(d.leases)
            length = rng.choice([1, 64, 100, 1000, 5000])
            row = descriptor(
                some(d.absorbed),
                some(lease.id),
                some(rng.randrange(100_000)),
                some(lease.end + rng.choice([0, 0, 0, 10, 4096])),
                some(length),
                some(0) & 0xFFFFFFFF if rng.random() < 0.5 else rng.getrandbits(32),
                some(0) & 0xFFFFFFFF,
                some(0),
                some(0),
            )
            place = d.slip_offset + SLIP_DESCRIPTORS_AT + d.absorbed % SLIP_DESCRIPTORS * 64
            d.place.region.store(place, row)
            before = refs_of(d.live), d.engine.list().tolist()
            found = d.absorb(d.absorbed + 1)
            if found.count == 0:
                assert found.refused
                assert (refs_of(d.live), d.engine.list().tolist()) == before
            else:
                fields = DESCRIPTOR.unpack(row)
                assert fields[1] == lease.id
                lease.end = fields[3] + fields[4]
                assert lease.end <= lease.capacity_bytes
            if rng.random() < 0.05:
                d.publish()
                for each in [each for each in d.leases if rng.random() < 0.7 or each.end % 64]:
                    d.end_lease(each)
                if rng.random() < 0.5:
                    d.live.truncate(rng.randrange(10_000))
                    d.publish()
                while d.place.engine.dead_segments():
                    pass
                d.place.free, d.place.segment = free_segments(d), -1
        d.program.region.store_u64(d.slip_offset + SLIP_STATE_AT, d.absorbed)
        for lease in d.leases:
            lease.capacity_bytes = 8192
        d.end()


@pytest.mark.parametrize("what", ["slip", "checksums"])
def test_media_that_cannot_be_read(tmp_path: Path, what: str) -> None:
    """A fault of the media is an error of the call. What was absorbed before it stays."""
    path, size = tmp_path / "image", FIRST + 2 * SEGMENT_BYTES
    path.write_bytes(bytes(size))
    with path.open("r+b") as file:
        handle = MappedRegion.map_handle(file.fileno(), size, granularity=Granularity.LINE)
        region = MappedRegion(handle)
        d = Direct(Room(region, segments=2, chunk=4096))
        lease = d.lease(1 << 17)
        assert d.program.write(lease, 0, pattern(4000, 1))
        assert d.program.write(lease, 4000, pattern(1000, 1))
        assert d.absorb(1).count == 1
        before = d.engine.list().tolist(), refs_of(d.live), d.engine.usage().tolist()
        place = d.slip_offset + SLIP_DESCRIPTORS_AT if what == "slip" else lease.crc_offset
        whole = path.read_bytes()
        file.truncate(place // 4096 * 4096)
        with pytest.raises(MediaError) as caught:
            d.absorb()
        assert caught.value.offset == d.slip_offset + SLIP_DESCRIPTORS_AT + 64
        assert (d.engine.list().tolist(), refs_of(d.live), d.engine.usage().tolist()) == before
        file.seek(0)
        file.write(whole)
        file.flush()
        assert d.absorb().count == 1
        assert d.live.read(0, 5000) == pattern(4000, 1) + pattern(1000, 1)
        d.end()
        d.engine.close()
        region.close()


@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
def test_a_slip_that_changes_all_the_time(seed: int) -> None:
    """A thread scribbles on descriptors and checksums while they are absorbed: what is checked is
    what is used, so that nothing outside a lease is ever referred to.
    """
    rng = random.Random(seed)
    with direct() as d:
        memory, done = d.place.region.unguarded_memory(), threading.Event()
        lease = d.lease(1 << 17)
        place = d.slip_offset + SLIP_DESCRIPTORS_AT
        changes = [struct.pack("<Q", number) for number in (0, 1, 64, 5000, 1 << 17, 1 << 63, MOST)]

        def scribble() -> None:
            other = random.Random(seed + 1)
            while not done.is_set():
                at = place + 8 * other.randrange(8)
                memory[at : at + 8] = other.choice(changes)
                at = lease.crc_offset + 4 * other.randrange(20)
                memory[at : at + 4] = other.randbytes(4)

        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            taken = 0
            for _ in range(20_000):
                end = lease.end
                length = rng.choice([1, 100])
                row = descriptor(0, lease.id, rng.randrange(10_000), end, length, 5)
                memory[place : place + 64] = row
                found = d.live.absorb(d.slip_offset, 0, 1, d.rooms(), file_bytes_max=FILE_MAX)
                assert found.refused or found.error is None
                taken += found.count
                lease.end = int(d.engine.describe(lease.id)[0]["length"][0])
                assert end + found.bytes <= lease.end <= lease.capacity_bytes
                if lease.left_bytes < 200:
                    break
            assert taken > 0
        finally:
            done.set()
            thread.join()
        for _, length, extent_id, offset in refs_of(d.live):
            assert extent_id == lease.id
            assert offset + length <= lease.capacity_bytes
        d.program.region.store_u64(d.slip_offset + SLIP_STATE_AT, 0)
        d.end()
