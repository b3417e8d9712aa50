"""Getting space back: roll over for dead segments, give up versions kept aside, compact half-dead
segments.

Never here: deciding that a write fails (``files``), reading on behalf of users.

Invariants
- Data is verified before it is moved: damage is never given a new, valid checksum.
- The source is not touched: it becomes dead when the record of the move is durable, and is used
  again only after a root that does not name it.
- A move leaves every live, committed and aside content equal, byte for byte.
- The cleaner takes at most one segment out of the reserve before a rollover gives some back.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError, MediaError, NoSpaceError
from cxlfs.format import layout
from cxlfs.format.operations import MoveOperation, Operation
from cxlfs.store.versions import extent_operations

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cxlfs.store.namespace import Inode
    from cxlfs.store.room import Room
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

BACKGROUND_USED_MAX = 0.5
"""In the background only segments that are at most half alive are worth moving."""
FOREGROUND_USED_MAX = 0.97
"""A write that would fail is worth almost any move; above this it gives back next to nothing."""
_MOVE_BYTES = layout.OP_MOVE_DTYPE.itemsize + layout.OPERATION_DTYPE.itemsize + 8
_RECORD_REST_BYTES = 8192


class Cleaner:
    """One for each volume. ``unmovable``: segments with damage, left where they are."""

    def __init__(self, volume: Volume, versions: Versions, room: Room) -> None:
        self.volume = volume
        self.versions = versions
        self.room = room
        self.unmovable: set[int] = set()
        self._running = False

    # --- verbs ------------------------------------------------------------------------------

    def reclaim(self, needed_bytes: int) -> bool:
        """Make room in the foreground, for file data or (0) for metadata; False when nothing more
        can be had.
        """
        if self._running or self.volume.read_only:
            return False
        self._running = True
        try:
            return self.room.make(needed_bytes) or self._clean_round(FOREGROUND_USED_MAX)
        except NoSpaceError:
            return False
        finally:
            self._running = False

    def step(self) -> bool:
        """One short piece of background work; True when there is more."""
        space = self.volume.space
        low = max(space.reserve + 1, len(space.states) // 4)
        if self._running or self.volume.read_only or space.free_count >= low:
            return False
        if space.collect_dead() * 4 >= low:
            self.room.free_dead()
            return True
        self._running = True
        try:
            return self._clean_round(BACKGROUND_USED_MAX)
        except NoSpaceError:
            return False
        finally:
            self._running = False

    # --- choosing ---------------------------------------------------------------------------

    def _clean_round(self, used_max: float) -> bool:
        """Compact segments until the cleaner's own is full, then roll over; False: none left."""
        payload = self.volume.superblock.segment_payload_bytes
        moved_bytes = 0
        cleaned = 0
        for index, used in self._victims(used_max):
            if cleaned and moved_bytes + used > payload:
                break
            if self.volume.space.free_count < self.volume.refresh_reserve() and cleaned:
                break
            log.debug("compacting segment %d: %d bytes are alive", index, used)
            is_empty = self._clean(index)
            log.debug("segment %d is %s", index, "empty" if is_empty else "left as it is")
            if is_empty:
                moved_bytes += used
                cleaned += 1
                self.volume.counters.cleaned_segments += 1
        if cleaned:
            self.room.free_dead()
        return cleaned > 0

    def _victims(self, used_max: float) -> list[tuple[int, int]]:
        """Segments to compact, emptiest first, with the bytes alive in each."""
        usage = self.volume.engine.usage()
        limit = used_max * self.volume.superblock.segment_payload_bytes
        space = self.volume.space
        found = [
            (index, int(usage[index]))
            for index in space.data_segments()
            if usage[index] <= limit and index not in self.unmovable and not space.is_open(index)
        ]
        return sorted(found, key=lambda item: item[1])

    # --- moving -----------------------------------------------------------------------------

    def _clean(self, index: int) -> bool:
        """Move everything alive out of a segment; False when it must stay."""
        refs = self.volume.engine.segment_refs(index)
        if refs is None:
            return False
        try:
            for batch in self._batches(_ranges(refs)):
                self._move(batch)
        except (CorruptionError, MediaError) as error:
            self.volume.watch(error)
            if self.volume.read_only:
                raise
            self.unmovable.add(index)
            place = error.media_offset if isinstance(error, CorruptionError) else error.offset
            message = f"segment {index} is not compacted: {error.message}"
            self.volume.event("damage", message, media_offset=place)
            return False
        return True

    def _batches(self, ranges: list[_Range]) -> Iterator[list[_Range]]:
        """Runs of ranges whose moves fit one record."""
        limit = self.volume.record_bytes_max - min(
            _RECORD_REST_BYTES, self.volume.record_bytes_max // 2
        )
        batch: list[_Range] = []
        size = 0
        for item in ranges:
            item_bytes = _MOVE_BYTES + 8 * len(item.owners)
            if batch and size + item_bytes > limit:
                yield batch
                batch, size = [], 0
            batch.append(item)
            size += item_bytes
        if batch:
            yield batch

    def _move(self, ranges: list[_Range]) -> None:
        """Copy the ranges into new extents, commit, re-aim every reference."""
        pending = list(ranges)
        while pending:
            total = sum(item.length for item in pending)
            offset, capacity = self.volume.space.cleaner_lease(total)
            target_id = self.volume.allocate_extent_id()
            engine = self.volume.engine
            engine.lease(target_id, offset, capacity)
            moves: list[tuple[_Range, int]] = []
            position = 0
            try:
                while pending and position < capacity:
                    item = pending[0]
                    length = min(item.length, capacity - position)
                    engine.copy_extent(item.extent_id, item.start, length, target_id)
                    moves.append((item.head(length), position))
                    position += length
                    pending[:1] = [] if length == item.length else [item.tail(length)]
                self._commit_moves(moves, target_id)
            finally:
                unused_offset, unused = engine.close_lease(target_id)
                self.volume.space.give_back(unused_offset, unused)

    def _commit_moves(self, moves: list[tuple[_Range, int]], target_id: int) -> None:
        volume = self.volume
        info, crcs = volume.engine.describe(target_id)
        ops: list[Operation] = list(extent_operations(info, crcs))
        for item, position in moves:
            inos = tuple(ino for ino in item.owners if _is_known(volume.namespace.inodes[ino]))
            ops.append(
                MoveOperation(item.extent_id, item.start, item.length, target_id, position, inos)
            )
        self.versions.fence_data()
        volume.commit(ops)
        volume.engine.publish(target_id)
        for item, position in moves:
            for ino in item.owners:
                self._re_aim(volume.namespace.inodes[ino], item, target_id, position)
            volume.counters.moved_bytes += item.length

    def _re_aim(self, inode: Inode, item: _Range, target_id: int, position: int) -> None:
        for content in (inode.live, inode.committed, inode.aside):
            if content is not None:
                content.move(item.extent_id, item.start, item.length, target_id, position)


class _Range:
    """Bytes [start, start + length) of an extent that some inodes reference."""

    __slots__ = ("extent_id", "length", "owners", "start")

    def __init__(self, extent_id: int, start: int, length: int, owners: tuple[int, ...]) -> None:
        self.extent_id = extent_id
        self.start = start
        self.length = length
        self.owners = owners

    def head(self, length: int) -> _Range:
        return _Range(self.extent_id, self.start, length, self.owners)

    def tail(self, length: int) -> _Range:
        return _Range(self.extent_id, self.start + length, self.length - length, self.owners)


def _is_known(inode: Inode) -> bool:
    """The journal knows the inode; an uncommitted one may share what others have committed."""
    return inode.links > 0 and not inode.uncommitted


def _ranges(refs: np.ndarray[tuple[int], np.dtype[np.void]]) -> list[_Range]:
    """References as ranges that do not overlap: shared bytes are moved once."""
    order = np.lexsort((refs["extent_offset"], refs["extent_id"]))
    result: list[_Range] = []
    for extent_id, start, length, owner in refs[order].tolist():
        last = result[-1] if result else None
        if last is not None and last.extent_id == extent_id and start < last.start + last.length:
            end = max(last.start + last.length, start + length)
            owners = last.owners if owner in last.owners else (*last.owners, owner)
            result[-1] = _Range(extent_id, last.start, end - last.start, owners)
        else:
            result.append(_Range(extent_id, start, length, (owner,)))
    return result
