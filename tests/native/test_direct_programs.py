"""Random programs: a client, FUSE and the store change a file in turn; it is what it must be."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cxlfs.native import Granularity
from cxlfs.native.direct import (
    SLIP_DESCRIPTORS,
)
from cxlfs.native.extents import Delta
from tests.support.direct import (
    Direct,
    direct,
    free_segments,
)
from tests.support.extents import alive, import_maps, nothing_held, pattern, seeds


class Machine:
    """A file that a program, FUSE and the store change in turn, and what it must contain."""

    def __init__(self, d: Direct, rng: random.Random) -> None:
        self.d = d
        self.rng = rng
        self.expected = bytearray()
        self.committed = b""
        self.sent: list[tuple[int, bytes]] = []

    def put(self, offset: int, data: bytes) -> None:
        self.expected.extend(bytes(max(0, offset - len(self.expected))))
        self.expected[offset : offset + len(data)] = data

    def send(self) -> None:
        """The program writes, mostly where it was before."""
        d, rng = self.d, self.rng
        if d.program.count - d.absorbed >= SLIP_DESCRIPTORS:
            self.absorb_all()
        if not d.leases or (len(d.leases) < 3 and rng.random() < 0.2):
            d.lease(rng.choice([4096, 20_000, 65536]))
        lease = rng.choice(d.leases)
        length = min(rng.choice([1, 63, 500, 4096, 20_000]), lease.left_bytes)
        last = self.sent[-1][0] + len(self.sent[-1][1]) if self.sent else len(self.expected)
        offset = last if rng.random() < 0.6 else rng.randrange(100_000)
        gap = min(rng.choice([0] * 8 + [1, 5000]), lease.left_bytes - length)
        if length == 0:
            self.absorb_all()
            d.end_lease(lease)
            return
        data = pattern(length, rng.getrandbits(32))
        assert d.program.write(lease, offset, data, gap)
        self.sent.append((offset, data))

    def absorb(self) -> None:
        d = self.d
        last = self.rng.choice([d.program.count, self.rng.randint(d.absorbed, d.program.count)])
        count = last - d.absorbed
        found = d.absorb(last)
        assert (found.count, found.error) == (count, None)
        for offset, data in self.sent[:count]:
            self.put(offset, data)
        del self.sent[:count]

    def absorb_all(self) -> None:
        while self.sent:
            self.absorb()

    def write(self) -> None:
        """Through FUSE, behind what was sent."""
        self.absorb_all()
        data = pattern(self.rng.choice([1, 700, 10_000]), self.rng.getrandbits(32))
        offset = self.rng.randrange(100_000)
        self.d.place.write(self.d.live, offset, data, capacity=20_000)
        self.put(offset, data)

    def truncate(self) -> None:
        self.absorb_all()
        size = self.rng.randrange(100_000)
        self.d.live.truncate(size)
        self.put(size, b"")
        del self.expected[size:]

    def punch(self) -> None:
        self.absorb_all()
        start, length = self.rng.randrange(100_000), self.rng.randrange(20_000)
        self.d.live.punch(start, length)
        end = min(start + length, len(self.expected))
        if start < end:
            self.expected[start:end] = bytes(end - start)

    def close(self) -> None:
        self.absorb_all()
        self.d.close_slip()
        assert not self.d.program.append(bytes(64))
        self.d.new_slip()

    def publish(self) -> None:
        """Closed before, or with leases that end on a unit kept open."""
        self.absorb_all()
        d = self.d
        for lease in list(d.leases):
            if lease.end % 64 or self.rng.random() < 0.5:
                d.end_lease(lease)
        delta: Delta = d.live.take_delta()
        if self.rng.random() < 0.2:
            delta.cancel(d.live)
            return
        delta.apply(d.live, d.committed)
        self.committed = bytes(self.expected)

    def clean(self) -> None:
        """Move what is alive in a segment; live and committed content are the same files."""
        self.publish()
        if self.d.live.is_dirty:
            return
        d = self.d
        self.recycle()
        found = alive(d.engine, self.rng.randrange(d.place.segments))
        if found.busy.any() or len(found.ranges) == 0:
            return
        target = d.place.open_extent(d.place.segment_bytes - 4096)
        moves = d.engine.copy_ranges(found.ranges, target)
        d.engine.publish(target)
        d.engine.move([d.live, d.committed], moves)
        d.engine.close_lease(target)

    def recycle(self) -> None:
        while self.d.engine.dead_segments():
            pass
        self.d.place.free, self.d.place.segment = free_segments(self.d), -1

    def check(self) -> None:
        d = self.d
        assert d.live.read(0, 1 << 30) == bytes(self.expected)
        assert d.committed.read(0, 1 << 30) == self.committed
        used = int(d.engine.usage().sum())
        counts = d.engine.statistics()
        assert used >= counts.kept_bytes + counts.replaced_bytes
        assert counts.uncounted_extents == 0

    def check_restart(self) -> None:
        """What is published is all that another engine needs."""
        d = self.d
        counts, refs, infos, crcs = d.engine.export_maps([d.committed])
        other = d.place.another_engine()
        other.define(infos, crcs)
        first = np.array([0, counts[0]], dtype=np.uint64)
        sizes = np.array([len(self.committed)], dtype=np.uint64)
        [again] = import_maps(other, np.array([1], dtype=np.uint64), sizes, first, refs)
        other.drop_unreferenced()
        assert again.read(0, 1 << 30) == self.committed
        again.close()
        assert nothing_held(other)
        other.close()


STEPS = {
    Machine.send: 60,
    Machine.absorb: 15,
    Machine.write: 6,
    Machine.truncate: 2,
    Machine.punch: 3,
    Machine.close: 3,
    Machine.publish: 6,
    Machine.clean: 5,
    Machine.recycle: 3,
    Machine.check_restart: 2,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", seeds(2), ids="CXLFS_SEED={}".format)
@pytest.mark.parametrize("chunk", [256, 4096])
@pytest.mark.parametrize("granularity", list(Granularity))
def test_random_programs(seed: int, chunk: int, granularity: Granularity) -> None:
    rng = random.Random(f"{seed} {chunk} {granularity}")
    names, weights = zip(*STEPS.items(), strict=True)
    with direct(granularity, chunk=chunk, segments=60) as d:
        machine = Machine(d, rng)
        for _ in range(400):
            rng.choices(names, weights)[0](machine)
            if len(d.place.free) < 6:
                machine.close()
                machine.publish()
                machine.recycle()
            machine.check()
        machine.absorb_all()
        machine.publish()
        machine.check_restart()
        machine.d.live.close_leases()
        d.end()
