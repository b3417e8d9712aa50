"""Room that one program fills by itself: open extents to which nobody but it appends.

Never here: whose room it is, when it comes back (``direct``), what is stored there.

Invariants
- Room that must not be handed out again yet is an open extent that nobody refers to: it keeps its
  bytes, and its segment, without a rule of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

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


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """An open extent: ``length_bytes`` from ``media_offset`` on, data and behind it checksums."""

    lease_id: int
    media_offset: int
    length_bytes: int
    data: DirectRoom


class Rooms:
    """One for each store."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def take(self, least_bytes: int, wanted_bytes: int, *, kept_bytes: int) -> Room:
        """One of at least ``least_bytes``; ``kept_bytes``: what is promised to others. Raises
        NoSpaceError.
        """
        share_bytes = self._share(least_bytes, kept_bytes)
        return self._take(least_bytes, min(wanted_bytes, share_bytes), kept_bytes)

    def take_some(
        self, least_bytes: int, wanted_bytes: int, *, kept_bytes: int, count_max: int
    ) -> list[Room]:
        """One at least, and more until they have ``wanted_bytes``: none goes beyond its segment.
        Raises NoSpaceError.
        """
        missing_bytes = min(wanted_bytes, self._share(least_bytes, kept_bytes))
        rooms = [self._take(least_bytes, missing_bytes, kept_bytes)]
        while len(rooms) < count_max:
            missing_bytes -= rooms[-1].length_bytes
            if missing_bytes < least_bytes:
                break
            try:
                rooms.append(self._take(least_bytes, missing_bytes, kept_bytes))
            except NoSpaceError:
                break
        return rooms

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

    def _take(self, least_bytes: int, wanted_bytes: int, kept_bytes: int) -> Room:
        volume = self._volume
        offset, length = lease_whole(
            volume.space,
            least_bytes,
            min(max(wanted_bytes, least_bytes), ROOM_BYTES_MAX),
            kept_bytes=kept_bytes,
            bytes_max=ROOM_BYTES_MAX,
        )
        lease_id = volume.allocate_extent_id()
        volume.engine.lease(lease_id, offset, length)
        chunks = -(-length // volume.superblock.chunk_bytes)
        crc_bytes = -(-chunks * _CRC_BYTES // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        data = DirectRoom(lease_id, offset + length - crc_bytes, length - crc_bytes)
        return Room(lease_id, offset, length, data)

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
