"""Room that one program fills by itself: open extents to which nobody but it appends.

Never here: whose room it is, when it comes back (``direct``), what is stored there.

Where a program is about to write much, what it gets lies as the file does, modulo the unit (2 MiB):
so a mapped file has the largest pages there are, and can be mapped from a DAX device at all. A
segment's payload begins behind its header: the rest of its first unit is passed over, for smaller
files. Where room is scarce, or segments are small, it is not, and for each a little of the file
goes elsewhere (``docs/direct.md``): into an *offcut*, what was passed over once to get there.

Checksums of what a program stores lie behind its slip, in a *slot* of each lease, until they are
taken in: behind the lease they would end its last page.

Invariants
- Room that must not be handed out again yet is an open extent that nobody refers to: it keeps its
  bytes, and its segment, without a rule of its own.
- An offcut is such an extent, too, and no program ever hears of it.
- A slot is of one lease from when this is given until nobody stores there any more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import NoSpaceError
from cxlfs.native.direct import DirectRoom
from cxlfs.store.leases import lease_whole
from cxlfs.units import MIB

if TYPE_CHECKING:
    from cxlfs.store.volume import Volume

ROOM_BYTES_MAX = 64 * MIB
_SHARE = 4
"""A request gets at most this part of the room there is."""
_CRC_BYTES = 4
_ALIGNMENT_BYTES = 64
_SEGMENT_UNITS_MIN = 4
"""Of smaller segments too little would lie as the file does."""
_PASSING_UNITS_MIN = 8
"""Of smaller segments too much would be passed over: at four units a quarter of the room."""
_PLACED_UNITS_MIN = 2
"""Less than that, of a request or at a segment's end, is taken as it comes."""
_ODD_DIVISOR = 2
"""At most this part of a unit goes into an offcut; more is passed over, for a new one."""
_GAP_DIVISOR = 32
"""A program leaves so much of a unit in front of what it stores: then all that follows begins with
a unit, whichever thread gets it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """An open extent: ``length_bytes`` from ``media_offset`` on."""

    lease_id: int
    media_offset: int
    length_bytes: int
    data: DirectRoom


class Places:
    """Of one file that a program writes to: slots for checksums, ``slot_bytes`` each from
    ``media_offset`` on; and room passed over, none at first.
    """

    def __init__(self, media_offset: int, slot_bytes: int, count: int) -> None:
        self.offcut: Room | None = None
        self._first = media_offset
        self._slot_bytes = slot_bytes
        self._idle = list(range(count))[::-1]

    def take_slot(self) -> int:
        """Media offset of an idle one; there is one for each lease that a file may have."""
        return self._first + self._idle.pop() * self._slot_bytes

    def give_back_slots(self, rooms: Iterable[Room]) -> None:
        """Of leases that nobody stores into any more."""
        for room in rooms:
            self._idle.append((room.data.crc_offset - self._first) // self._slot_bytes)


class _Wanted(NamedTuple):
    least_bytes: int
    bytes: int
    kept_bytes: int


class Rooms:
    """One for each store."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._unit_bytes = volume.superblock.unit_bytes
        self._gap_bytes_max = self._unit_bytes // _GAP_DIVISOR
        self._placed_bytes_min = _PLACED_UNITS_MIN * self._unit_bytes
        segment_units = volume.superblock.segment_size_bytes // self._unit_bytes
        self._places = segment_units >= _SEGMENT_UNITS_MIN
        self._passes = segment_units >= _PASSING_UNITS_MIN
        room_bytes_max = min(ROOM_BYTES_MAX, volume.superblock.segment_payload_bytes)
        self.slot_bytes = self._crc_bytes(room_bytes_max)
        """What the checksums of one lease take at most."""

    def take(self, least_bytes: int, wanted_bytes: int, *, kept_bytes: int) -> Room:
        """One of at least ``least_bytes``; ``kept_bytes``: what is promised to others. Raises
        NoSpaceError.
        """
        share_bytes = self._share(least_bytes, kept_bytes)
        wanted = _Wanted(least_bytes, min(wanted_bytes, share_bytes), kept_bytes)
        return self._open(*self._lease(wanted), crc_offset=0)

    def take_some(
        self,
        least_bytes: int,
        wanted_bytes: int,
        *,
        kept_bytes: int,
        count_max: int,
        file_offset: int,
        places: Places,
    ) -> list[Room]:
        """One at least, and more until they have ``wanted_bytes``: none goes beyond its segment.
        They are for the bytes of the file from ``file_offset`` on, in this order. Raises
        NoSpaceError.
        """
        missing_bytes = min(wanted_bytes, self._share(least_bytes, kept_bytes))
        page_bytes = self._volume.space.align_bytes
        file_offset -= file_offset % page_bytes
        if file_offset % self._unit_bytes <= self._gap_bytes_max:
            file_offset -= file_offset % self._unit_bytes
        placed = self._places and missing_bytes >= self._placed_bytes_min
        rooms: list[Room] = []
        while not rooms or (len(rooms) < count_max and missing_bytes >= least_bytes):
            wanted = _Wanted(least_bytes, missing_bytes, kept_bytes)
            try:
                room = (
                    self._take_placed(wanted, file_offset, places, last=len(rooms) + 1 == count_max)
                    if placed
                    else self._take(wanted, places)
                )
            except NoSpaceError:
                if not rooms:
                    raise
                break
            rooms.append(room)
            missing_bytes -= room.length_bytes
            file_offset += room.data.capacity_bytes // page_bytes * page_bytes
        return rooms

    def _take_placed(
        self, wanted: _Wanted, file_offset: int, places: Places, *, last: bool
    ) -> Room:
        """The next one of a file that goes on at ``file_offset``. ``last``: of this request, which
        is not to end with the least of it.
        """
        space = self._volume.space
        position, room_bytes = space.next_piece(wanted.least_bytes)
        odd_bytes = (position - file_offset) % self._unit_bytes
        if odd_bytes and room_bytes:
            passes = last or (self._passes and not space.is_scarce)
            odd = None if passes else self._cut_off(places, odd_bytes)
            if odd is not None:
                return odd
            if room_bytes < self._placed_bytes_min:
                return self._take(wanted, places)
            over_bytes = self._unit_bytes - odd_bytes
            passed = space.lease(
                over_bytes, over_bytes, kept_bytes=wanted.kept_bytes, in_order=True
            )
            self.drop_offcut(places)
            places.offcut = self._open(*passed, crc_offset=0)
        return self._take(wanted, places, in_order=room_bytes > 0)

    def _cut_off(self, places: Places, odd_bytes: int) -> Room | None:
        """Room for exactly so many bytes of a file; None: they are too many."""
        volume, room = self._volume, places.offcut
        page_bytes = volume.space.align_bytes
        needed_bytes = -(-odd_bytes // page_bytes) * page_bytes
        if (
            room is None
            or room.length_bytes < needed_bytes
            or odd_bytes > self._unit_bytes // _ODD_DIVISOR
        ):
            return None
        offset, length = volume.engine.close_lease(room.lease_id)
        odd = self._open(offset, needed_bytes, crc_offset=places.take_slot())
        places.offcut = None
        if length > needed_bytes:
            places.offcut = self._open(offset + needed_bytes, length - needed_bytes, crc_offset=0)
        return odd

    def drop_offcut(self, places: Places) -> None:
        """What is left of it goes back."""
        room, places.offcut = places.offcut, None
        if room is not None:
            self.give_back([room])

    def _share(self, least_bytes: int, kept_bytes: int) -> int:
        """What a request may have. Raises NoSpaceError where that is less than ``least_bytes``."""
        share_bytes = self._share_now(kept_bytes)
        if share_bytes < least_bytes and self._volume.release_dead():
            share_bytes = self._share_now(kept_bytes)
        if share_bytes < least_bytes:
            raise self._volume.space.shortfall(least_bytes, kept_bytes)
        return share_bytes

    def _share_now(self, kept_bytes: int) -> int:
        if self._volume.is_nearly_used_up:  # which counts the reserve anew
            return 0
        return (self._volume.space.available_bytes - kept_bytes) // _SHARE

    def _take(self, wanted: _Wanted, places: Places, *, in_order: bool = False) -> Room:
        offset, length = self._lease(wanted, in_order=in_order)
        return self._open(offset, length, crc_offset=places.take_slot())

    def _lease(self, wanted: _Wanted, *, in_order: bool = False) -> tuple[int, int]:
        least_bytes = wanted.least_bytes
        return lease_whole(
            self._volume.space,
            least_bytes,
            min(max(wanted.bytes, least_bytes), ROOM_BYTES_MAX),
            kept_bytes=wanted.kept_bytes,
            bytes_max=ROOM_BYTES_MAX,
            in_order=in_order,
        )

    def _open(self, offset: int, length: int, *, crc_offset: int) -> Room:
        """The extent of what is given; no ``crc_offset``: no program fills it."""
        lease_id = self._volume.allocate_extent_id()
        self._volume.engine.lease(lease_id, offset, length)
        return Room(lease_id, offset, length, DirectRoom(lease_id, crc_offset, length))

    def _crc_bytes(self, data_bytes: int) -> int:
        chunks = -(-data_bytes // self._volume.superblock.chunk_bytes)
        return -(-chunks * _CRC_BYTES // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def keep(self, room: Room) -> Room | None:
        """Its extent ends, so that others can refer to it; the room behind it becomes one of its
        own, which keeps it, and its segment, from being handed out. None: there is none, since all
        of it was stored, and appended.
        """
        volume = self._volume
        offset, length = volume.engine.close_lease(room.lease_id)
        start = -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start >= offset + length:
            return None
        lease_id = volume.allocate_extent_id()
        volume.engine.lease(lease_id, start, offset + length - start)
        return dataclasses.replace(room, lease_id=lease_id)

    def give_back(self, rooms: Iterable[Room]) -> None:
        """Nobody stores there any more."""
        for room in rooms:
            offset, length = self._volume.engine.close_lease(room.lease_id)
            self._volume.space.give_back(offset, length)
