"""Room that one program fills by itself: open extents to which nobody but it appends.

Never here: whose room it is, when it comes back (``direct``), what is stored there.

Where a program is about to write much, what it gets lies as the file does, modulo the unit (2 MiB):
so a mapped file has the largest pages there are, and can be mapped from a DAX device at all. A
segment's payload begins behind its header, hence for each segment a little of the file goes
elsewhere (``docs/direct.md``): into an *offcut*, what was passed over once to get there.

Invariants
- Room that must not be handed out again yet is an open extent that nobody refers to: it keeps its
  bytes, and its segment, without a rule of its own.
- An offcut is such an extent, too, and no program ever hears of it.
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
_PLACED_UNITS_MIN = 2
"""Less than that, of a request or at a segment's end, is taken as it comes."""
_ODD_DIVISOR = 2
"""At most this part of a unit goes into an offcut; more is passed over, for a new one."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """An open extent: ``length_bytes`` from ``media_offset`` on, data and behind it checksums."""

    lease_id: int
    media_offset: int
    length_bytes: int
    data: DirectRoom


@dataclasses.dataclass(slots=True)
class Offcut:
    """Of one file that a program writes to: room passed over, none at first."""

    room: Room | None = None


class _Wanted(NamedTuple):
    least_bytes: int
    bytes: int
    kept_bytes: int


class Rooms:
    """One for each store."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._unit_bytes = volume.superblock.unit_bytes
        self._placed_bytes_min = _PLACED_UNITS_MIN * self._unit_bytes
        segment_units = volume.superblock.segment_size_bytes // self._unit_bytes
        self._places = segment_units >= _SEGMENT_UNITS_MIN

    def take(self, least_bytes: int, wanted_bytes: int, *, kept_bytes: int) -> Room:
        """One of at least ``least_bytes``; ``kept_bytes``: what is promised to others. Raises
        NoSpaceError.
        """
        share_bytes = self._share(least_bytes, kept_bytes)
        return self._take(_Wanted(least_bytes, min(wanted_bytes, share_bytes), kept_bytes))

    def take_some(
        self,
        least_bytes: int,
        wanted_bytes: int,
        *,
        kept_bytes: int,
        count_max: int,
        file_offset: int,
        offcut: Offcut,
    ) -> list[Room]:
        """One at least, and more until they have ``wanted_bytes``: none goes beyond its segment.
        They are for the bytes of the file from ``file_offset`` on, in this order. Raises
        NoSpaceError.
        """
        missing_bytes = min(wanted_bytes, self._share(least_bytes, kept_bytes))
        page_bytes = self._volume.space.align_bytes
        file_offset -= file_offset % page_bytes
        placed = self._places and missing_bytes >= self._placed_bytes_min
        rooms: list[Room] = []
        while not rooms or (len(rooms) < count_max and missing_bytes >= least_bytes):
            wanted = _Wanted(least_bytes, missing_bytes, kept_bytes)
            try:
                room = (
                    self._take_placed(wanted, file_offset, offcut, last=len(rooms) + 1 == count_max)
                    if placed
                    else self._take(wanted)
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
        self, wanted: _Wanted, file_offset: int, offcut: Offcut, *, last: bool
    ) -> Room:
        """The next one of a file that goes on at ``file_offset``. ``last``: of this request, which
        is not to end with the least of it.
        """
        space = self._volume.space
        position, room_bytes = space.next_piece(wanted.least_bytes)
        odd_bytes = (position - file_offset) % self._unit_bytes
        if odd_bytes and room_bytes:
            odd = None if last else self._cut_off(offcut, odd_bytes)
            if odd is not None:
                return odd
            if room_bytes < self._placed_bytes_min:
                return self._take(wanted)
            over_bytes = self._unit_bytes - odd_bytes
            passed = space.lease(
                over_bytes, over_bytes, kept_bytes=wanted.kept_bytes, in_order=True
            )
            self.drop_offcut(offcut)
            offcut.room = self._open(*passed)
        return self._take(wanted, in_order=room_bytes > 0)

    def _cut_off(self, offcut: Offcut, odd_bytes: int) -> Room | None:
        """Room for exactly so many bytes of a file; None: they are too many."""
        volume, room = self._volume, offcut.room
        page_bytes = volume.space.align_bytes
        needed_bytes = -(-(odd_bytes + self._crc_bytes(odd_bytes)) // page_bytes) * page_bytes
        if (
            room is None
            or room.length_bytes < needed_bytes
            or odd_bytes > self._unit_bytes // _ODD_DIVISOR
        ):
            return None
        offset, length = volume.engine.close_lease(room.lease_id)
        odd = self._open(offset, needed_bytes, odd_bytes)
        offcut.room = None
        if length > needed_bytes:
            offcut.room = self._open(offset + needed_bytes, length - needed_bytes)
        return odd

    def drop_offcut(self, offcut: Offcut) -> None:
        """What is left of it goes back."""
        room, offcut.room = offcut.room, None
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

    def _take(self, wanted: _Wanted, *, in_order: bool = False) -> Room:
        least_bytes = wanted.least_bytes
        offset, length = lease_whole(
            self._volume.space,
            least_bytes,
            min(max(wanted.bytes, least_bytes), ROOM_BYTES_MAX),
            kept_bytes=wanted.kept_bytes,
            bytes_max=ROOM_BYTES_MAX,
            in_order=in_order,
        )
        return self._open(offset, length)

    def _open(self, offset: int, length: int, capacity_bytes: int | None = None) -> Room:
        """The extent of what is given: ``capacity_bytes`` for data, or all but the checksums."""
        lease_id = self._volume.allocate_extent_id()
        self._volume.engine.lease(lease_id, offset, length)
        crc_bytes = self._crc_bytes(length if capacity_bytes is None else capacity_bytes)
        if capacity_bytes is None:
            capacity_bytes = length - crc_bytes
        data = DirectRoom(lease_id, offset + length - crc_bytes, capacity_bytes)
        return Room(lease_id, offset, length, data)

    def _crc_bytes(self, data_bytes: int) -> int:
        chunks = -(-data_bytes // self._volume.superblock.chunk_bytes)
        return -(-chunks * _CRC_BYTES // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def keep(self, room: Room) -> Room:
        """Its extent ends, so that others can refer to it; the room behind it becomes one of its
        own, which keeps it, and its segment, from being handed out.
        """
        volume = self._volume
        offset, length = volume.engine.close_lease(room.lease_id)
        start = -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        lease_id = volume.allocate_extent_id()
        volume.engine.lease(lease_id, start, offset + length - start)
        return dataclasses.replace(room, lease_id=lease_id)

    def give_back(self, rooms: Iterable[Room]) -> None:
        """Nobody stores there any more."""
        for room in rooms:
            offset, length = self._volume.engine.close_lease(room.lease_id)
            self._volume.space.give_back(offset, length)
