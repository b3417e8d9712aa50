"""Room that an open file writes into: given before it is needed, taken back when it is not.

Never here: who may take what is left (``space``), contents.

Invariants
- A content has at most two leases: the one in use, and the one that takes over from it.
- Every content with a lease is known here until the lease is given back. Giving back is allowed at
  any time: the next write asks for another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import NoSpaceError
from cxlfs.store.space import LEASE_BYTES_MAX, LEASE_BYTES_MIN

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.promises import Promises
    from cxlfs.store.space import Space
    from cxlfs.store.version import Version
    from cxlfs.store.volume import Volume

_WRITES_PER_LEASE = 4
"""A lease has room for so many writes as large as the one that asked for the last."""
_LEASES_AHEAD_MAX = 16
"""A lease taken ahead is at most this part of the room there is."""
_WRITERS_FEW = 4
"""So many writers at once have leases that double each time; those of more grow by a quarter, so
that what they have not used yet is a fifth of their data and not half of it."""
_SHORT_ENDS_MAX = 4
"""Pieces of segments that are passed over for one lease: the end of one, and remnants."""


def lease_whole(
    space: Space,
    least_bytes: int,
    wanted_bytes: int,
    *,
    kept_bytes: int,
    bytes_max: int,
    in_order: bool = False,
) -> tuple[int, int]:
    """As ``Space.lease``, but never less than ``least_bytes``: what is handed out next may be the
    end of a segment, and shorter. Raises NoSpaceError.
    """
    short: list[tuple[int, int]] = []
    try:
        while len(short) < _SHORT_ENDS_MAX:
            offset, length = space.lease(
                least_bytes,
                wanted_bytes,
                kept_bytes=kept_bytes,
                bytes_max=bytes_max,
                in_order=in_order,
            )
            if length >= least_bytes:
                return offset, length
            short.append((offset, length))
        raise space.shortfall(least_bytes, kept_bytes)
    finally:
        for piece in short:
            space.give_back(*piece)


class Leases:
    """One for each volume."""

    def __init__(self, volume: Volume, promises: Promises) -> None:
        self.volume = volume
        self.promises = promises
        self._leased: dict[FileMap, None] = {}

    @property
    def count(self) -> int:
        """Contents that have one."""
        return len(self._leased)

    def give(
        self,
        inode: Inode,
        version: Version,
        *,
        needed_bytes: int,
        wanted_bytes: int,
        kept_bytes: int = 0,
    ) -> None:
        """Give the live map room that lets a write go on; ``kept_bytes`` (see ``promises``) stay
        available. Raises NoSpaceError.
        """
        self.close(inode.content)
        wanted_bytes = max(needed_bytes, wanted_bytes)
        grown_bytes = self._grown(version, wanted_bytes * _WRITES_PER_LEASE)
        wanted_bytes = max(wanted_bytes, min(version.lease_bytes, self._share(kept_bytes)))
        self._attach(inode, needed_bytes, wanted_bytes, kept_bytes)
        version.lease_bytes = grown_bytes

    def _grown(self, version: Version, wanted_bytes: int = 0) -> int:
        """The next lease of a file that keeps growing."""
        if len(self._leased) > _WRITERS_FEW:
            return min(version.lease_bytes * 5 // 4, LEASE_BYTES_MAX)
        return min(max(version.lease_bytes * 2, wanted_bytes), LEASE_BYTES_MAX)

    def _share(self, kept_bytes: int) -> int:
        """What one of so many writers may have of the room there is, beyond what it writes now."""
        if self.volume.is_nearly_used_up:
            return LEASE_BYTES_MIN
        spare_bytes = self.volume.space.available_bytes - kept_bytes
        return max(LEASE_BYTES_MIN, spare_bytes // (len(self._leased) + 1) // 2)

    def give_ahead(self, inode: Inode, version: Version) -> tuple[int, int] | None:
        """Give the live map the room that its next writes will want, so that none has to wait for
        it: media offset and length.
        """
        return self.give_spare(inode, version) if inode.content.wants_lease else None

    def give_spare(self, inode: Inode, version: Version) -> tuple[int, int] | None:
        """Give the live map room before it is asked for. Nothing happens (None) where room is
        scarce: there each write takes what it needs.
        """
        if self.volume.read_only or self.volume.is_nearly_used_up:
            return None
        kept_bytes = self.promises.bytes_open()
        spare_bytes = self.volume.space.available_bytes - kept_bytes
        wanted_bytes = min(version.lease_bytes, spare_bytes // _LEASES_AHEAD_MAX)
        if wanted_bytes >= LEASE_BYTES_MIN:
            try:
                room = self._attach(inode, LEASE_BYTES_MIN, wanted_bytes, kept_bytes)
            except NoSpaceError:
                return None
            version.lease_bytes = self._grown(version)
            return room
        return None

    def _attach(
        self, inode: Inode, needed_bytes: int, wanted_bytes: int, kept_bytes: int
    ) -> tuple[int, int]:
        # The reserve is that of now: whether room is scarce was asked before.
        offset, length = self.volume.space.lease(needed_bytes, wanted_bytes, kept_bytes=kept_bytes)
        extent_id = self.volume.allocate_extent_id()
        self.volume.engine.lease(extent_id, offset, length)
        inode.content.attach_lease(extent_id)
        self._leased[inode.content] = None
        return offset, length

    def close(self, content: FileMap) -> None:
        """Give back what a content has not used."""
        self._leased.pop(content, None)
        for offset, length in content.close_leases():
            self.volume.space.give_back(offset, length)

    def close_all(self) -> None:
        """Every content's: room is needed, and whoever writes on asks for some again."""
        for content in list(self._leased):
            self.close(content)
