"""A program that stores file data by itself, as the client library does, on a region of a test.

It needs no daemon: leases and a slip are places on the region that the test gives it. One thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cxlfs.native import Granularity, MappedRegion
from cxlfs.native.direct import (
    CRC_BYTES,
    SLIP_BYTES,
    SLIP_CLOSED,
    SLIP_DESCRIPTOR_BYTES,
    SLIP_DESCRIPTORS,
    SLIP_DESCRIPTORS_AT,
    SLIP_STATE_AT,
    Absorbed,
    DirectRoom,
)
from tests.support.direct_format import by_chunks, chunk_seed, descriptor
from tests.support.extents import Room, nothing_held, room

FILE_MAX = 1 << 40


@dataclass
class Lease:
    """An open extent that the program fills: where it is, and how far it has come."""

    id: int
    media_offset: int
    capacity_bytes: int
    crc_offset: int
    chunk_bytes: int
    end: int = 0
    crc: int = 0

    @property
    def room(self) -> DirectRoom:
        return DirectRoom(self.id, self.crc_offset, self.capacity_bytes)

    @property
    def left_bytes(self) -> int:
        return self.capacity_bytes - self.end


def lease_at(extent_id: int, media_offset: int, length: int, chunk_bytes: int) -> Lease:
    """Data in front, and behind it, in whole pages, the checksums of its chunks."""
    capacity = length
    while capacity + -(-capacity // chunk_bytes) * CRC_BYTES > length:
        capacity -= 64
    crc_offset = media_offset + capacity
    return Lease(extent_id, media_offset, capacity, crc_offset, chunk_bytes)


class Program:
    """What fills leases and appends to one slip, whose daemon is the test itself."""

    def __init__(self, region: MappedRegion, slip_offset: int) -> None:
        self.region = region
        self.slip_offset = slip_offset
        region.store(slip_offset, bytes(SLIP_BYTES))

    @property
    def count(self) -> int:
        """Descriptors appended."""
        state = self.region.load_u64(self.slip_offset + SLIP_STATE_AT)
        return state & ~SLIP_CLOSED

    def store(self, lease: Lease, data: bytes) -> int:
        """Bytes behind those that are there, with their checksums: the one of the last chunk, as
        far as it goes, 0 where that is whole.
        """
        chunk = lease.chunk_bytes
        assert len(data) <= lease.left_bytes
        for index, before, piece in by_chunks(lease.end, data, chunk):
            if before == 0:
                lease.crc = chunk_seed(lease.id, index)
            place = lease.media_offset + lease.end
            lease.crc = self.region.copy_crc32c(place, piece, lease.crc)
            lease.end += len(piece)
            if lease.end % chunk == 0:
                place = lease.crc_offset + index * CRC_BYTES
                self.region.copy(place, lease.crc.to_bytes(CRC_BYTES, "little"))
        self.region.fence()
        return lease.crc if lease.end % chunk else 0

    def append(self, row: bytes) -> bool:
        """One descriptor; False: the slip is closed."""
        state = self.region.load_u64(self.slip_offset + SLIP_STATE_AT)
        if state & SLIP_CLOSED:
            return False
        index = state % SLIP_DESCRIPTORS
        place = self.slip_offset + SLIP_DESCRIPTORS_AT + index * SLIP_DESCRIPTOR_BYTES
        self.region.store(place, row)
        self.region.persist(place, len(row))
        self.region.store_u64(self.slip_offset + SLIP_STATE_AT, state + 1)
        return True

    def write(self, lease: Lease, file_offset: int, data: bytes, gap: int = 0) -> bool:
        """As the library does it: store, then say so. ``gap``: zeros before it in the extent."""
        if gap:
            self.store(lease, bytes(gap))
        offset = lease.end
        tail = self.store(lease, data)
        return self.append(descriptor(self.count, lease.id, file_offset, offset, len(data), tail))


class Direct:
    """A content, a slip, and the program that has it, in a room."""

    def __init__(self, place: Room, owner: int = 1) -> None:
        self.place = place
        self.engine = place.engine
        self.live = place.new_map(owner)
        self.committed = place.new_map(owner)
        self.leases: list[Lease] = []
        self.absorbed = 0
        self.new_slip()

    def new_slip(self) -> None:
        self.slip_id = self.place.open_extent(SLIP_BYTES)
        self.slip_offset = int(self.engine.describe(self.slip_id)[0]["media_offset"][0])
        self.program = Program(self.place.region, self.slip_offset)
        self.absorbed = 0

    def lease(self, length: int = 65536) -> Lease:
        extent_id = self.place.open_extent(length)
        offset = int(self.engine.describe(extent_id)[0]["media_offset"][0])
        lease = lease_at(extent_id, offset, -(-length // 64) * 64, self.place.chunk)
        self.leases.append(lease)
        return lease

    def rooms(self) -> list[DirectRoom]:
        return [lease.room for lease in self.leases]

    def absorb(self, last: int | None = None, file_bytes_max: int = FILE_MAX) -> Absorbed:
        """Up to ``last``; what was taken is done."""
        last = self.program.count if last is None else last
        found = self.live.absorb(
            self.slip_offset, self.absorbed, last, self.rooms(), file_bytes_max=file_bytes_max
        )
        self.absorbed += found.count
        return found

    def end_lease(self, lease: Lease) -> tuple[int, int]:
        self.leases.remove(lease)
        return self.engine.close_lease(lease.id)

    def close_slip(self) -> None:
        """As the store does: nothing is appended any more, all is taken, all room comes back."""
        state_offset = self.slip_offset + SLIP_STATE_AT
        before = self.place.region.or_u64(state_offset, SLIP_CLOSED)
        assert before == self.program.count
        assert self.place.region.load_u64(state_offset) == before | SLIP_CLOSED
        assert self.absorb(before).error is None
        for lease in list(self.leases):
            self.end_lease(lease)
        self.engine.close_lease(self.slip_id)

    def publish(self) -> None:
        self.live.take_delta().apply(self.live, self.committed)

    def end(self) -> None:
        self.close_slip()
        self.live.close()
        self.committed.close()
        assert nothing_held(self.engine)


@contextmanager
def direct(
    granularity: Granularity = Granularity.LINE, *, chunk: int = 4096, segments: int = 16
) -> Iterator[Direct]:
    with room(granularity, chunk=chunk, segments=segments) as place:
        yield Direct(place)


def state_of(d: Direct) -> list[object]:
    """All that a refused descriptor must leave as it is."""
    counts = d.engine.statistics()
    return [
        (d.live.size, d.live.allocated, d.live.is_dirty, d.live.references()),
        d.engine.list().tolist(),
        d.engine.usage().tolist(),
        (counts.extents, counts.refs, counts.crcs, counts.bytes_written),
        [(lease.id, d.engine.describe(lease.id)[1].tolist()) for lease in d.leases],
        d.live.read(0, d.live.size).tobytes(),
    ]


def free_segments(d: Direct) -> list[int]:
    """Where no extent lies."""
    taken = (d.engine.list()["media_offset"] - d.engine.first) // d.engine.segment_size
    return [i for i in range(d.place.segments) if i not in set(taken.tolist())]
