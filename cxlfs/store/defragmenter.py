"""Files that were overwritten here and there become sequential again, in the background.

Each piece of such a file lies in another 64 KiB chunk, all of which is verified to read it: 4 KiB
pieces cost sixteen times their bytes. Gathered in the order of the file they are one reference.

Never here: how data is moved (``mover``), getting space back (``cleaner``).

Invariants
- Only what rests is moved: no version is open, nobody else shares the bytes, all is published.
- No more than RATE_BYTES_PER_SECOND, and only while there is room beside what the cleaner wants.
- A file is gone through once for each of its commits: what did not get better then is left alone.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError, MediaError, NoSpaceError
from cxlfs.store.mover import MOVE_BYTES_MAX
from cxlfs.store.resting import Allowance, FilesAtRest, rests
from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    from cxlfs.native.extents import Rows
    from cxlfs.native.maps import FileMap
    from cxlfs.store.mover import Mover
    from cxlfs.store.namespace import Inode
    from cxlfs.store.room import Room
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

RATE_BYTES_PER_SECOND = 64 * MIB
"""Two hundredths of what one core copies and verifies; a file of 2 GiB takes half a minute."""
_REF_BYTES = 8
"""Looking at one reference counts as so many bytes moved."""
_WINDOW_BYTES = MOVE_BYTES_MAX
_PIECE_BYTES = 128 * KIB
"""A window is worth moving when its pieces are shorter than this on the average,"""
_PIECES_MIN = 8
"""and at least so many."""
_SHARED_MAX = 16
"""A file whose bytes have more references each is left alone: all of them would follow."""
_WINDOWS_AT_ONCE = 64
_ROOM = 8
"""What can be had beside the reserve is at least this part of all segments,"""
_ROOM_FREE = 16
"""and what is free of it at least this, else a rollover comes first."""


class Defragmenter:
    """One for each volume."""

    def __init__(self, volume: Volume, mover: Mover, room: Room) -> None:
        self.volume = volume
        self.mover = mover
        self.room = room
        self._files: FilesAtRest[tuple[int, int]] = FilesAtRest(volume.namespace)
        """Seen: commit and references of each file, as the last look left it."""
        self._current: Inode | None = None
        self._offset = 0
        self._is_busy = False
        """Something of the current file was passed over, because it was being written."""
        self._allowance = Allowance()

    def step(self, now: float) -> bool:
        """One short piece of work (``now``: monotonic seconds); True when there is more at once."""
        if self.volume.read_only or not self._allowance.grow(now, RATE_BYTES_PER_SECOND):
            return False
        inode = self._file(now)
        if inode is None or not self._has_room():
            return False
        try:
            return self._gather(inode)
        except NoSpaceError:
            return False
        except (CorruptionError, MediaError) as error:
            self.volume.watch(error)
            if self.volume.read_only:
                raise
            log.info("inode %d is left in pieces: %s", inode.ino, error.message)
            self._end(inode)
            return True

    # --- when -------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        space = self.volume.space
        spare = space.reachable_count - self.volume.refresh_reserve()
        dead = space.collect_dead()
        if spare + dead < len(space.states) // _ROOM:
            return False
        if spare < len(space.states) // _ROOM_FREE and dead:
            self.room.free_dead()
            spare = space.reachable_count - self.volume.refresh_reserve()
        return spare > 0

    # --- which ------------------------------------------------------------------------------

    def _file(self, now: float) -> Inode | None:
        """The file to go on with, or the next one in pieces among a few that are looked at."""
        inodes = self.volume.namespace.inodes
        current = self._current
        if current is not None and inodes.get(current.ino) is current and rests(current):
            return current
        self._current = None
        found = self._files.next(now, self._is_in_pieces)
        if found is not None:
            self._current, self._offset, self._is_busy = found, 0, False
        return found

    def _is_in_pieces(self, inode: Inode) -> bool:
        content = inode.content
        refs = content.ref_count
        if refs < _PIECES_MIN + content.allocated // MIB:
            return False
        commit, refs_then = self._files.seen.get(inode.ino, (-1, 0))
        return commit != inode.commit_lsn or refs > 2 * refs_then

    def _next_window(self, content: FileMap) -> int:
        """Go on to the next part of the file that is worth moving: its references; 0: not among a
        few.
        """
        piece_bytes = min(_PIECE_BYTES, self.volume.space.lease_bytes_max // 4)
        for _ in range(_WINDOWS_AT_ONCE):
            if self._offset >= content.size:
                return 0
            mapped, refs = content.mapped(self._offset, _WINDOW_BYTES)
            if refs >= _PIECES_MIN and mapped < refs * piece_bytes:
                return refs
            self._offset += _WINDOW_BYTES
        return 0

    # --- moving -----------------------------------------------------------------------------

    def _gather(self, inode: Inode) -> bool:
        """One step of a file; True: there is more to look at."""
        content, engine = inode.content, self.volume.engine
        refs = self._next_window(content)
        if not refs:
            if self._offset >= content.size:
                self._end(inode)
            return True
        found = engine.live_ranges_of(content, self._offset, _WINDOW_BYTES)
        self._allowance.bytes_left -= found.visited * _REF_BYTES
        ranges = found.ranges
        if found.visited > _SHARED_MAX * refs:
            self._end(inode)
            return True
        alone = (ranges["owner_count"] == 1) & (ranges["owner"] == inode.ino)
        is_busy = bool(found.busy.any())
        self._is_busy |= is_busy
        if is_busy or not alone.all() or not len(ranges):
            self._offset += _WINDOW_BYTES
            return True
        chosen = self.mover.choose(ranges)
        moved = self.mover.move(
            chosen, found.owners, lambda size: self.volume.space.cleaner_lease(size, born=0)
        )
        self._allowance.bytes_left -= moved
        is_all = moved == int(ranges["length"].sum())
        reached = self._offset + _WINDOW_BYTES if is_all else _reached(chosen, moved)
        self._offset = max(self._offset + 1, reached)
        return True

    def _end(self, inode: Inode) -> None:
        """Done until the file changes; what was busy is not, and closing it need change nothing."""
        self._current = None
        if self._is_busy:
            self._files.look_again = True
        else:
            self._files.seen[inode.ino] = (inode.commit_lsn, inode.content.ref_count)


def _reached(chosen: Rows, moved: int) -> int:
    """The file offset up to which so many bytes of the ranges go."""
    ends = np.cumsum(chosen["length"])
    row = min(int(np.searchsorted(ends, moved)), len(chosen) - 1)
    return int(chosen["file_offset"][row]) + int(chosen["length"][row]) - (int(ends[row]) - moved)
