"""Moving data: bytes that are alive are copied into a new extent, in the order of the files they
belong to, and one record re-aims every reference to them.

Never here: what is worth moving (``cleaner``, ``defragmenter``).

Invariants
- Data is verified in the pass that copies it: damage is never given a new, valid checksum.
- The source is not touched: it becomes dead when the record of the move is durable, and is used
  again only after a root that does not name it.
- A move leaves every live, committed and aside content equal, byte for byte, and none of them
  refers to a moved source any more: what the record says of a content is done to it as well.
- One step is short: it moves at most MOVE_BYTES_MAX in MOVE_RANGES_MAX ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cxlfs.errors import OutOfMemoryError
from cxlfs.format import layout
from cxlfs.format.operations import MoveOperation, Operation
from cxlfs.store.versions import extent_operations
from cxlfs.units import MIB

if TYPE_CHECKING:
    from cxlfs.native.extents import Rows
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

MOVE_BYTES_MAX = 4 * MIB
"""Of one step: copied and verified in 1 to 2 ms."""
MOVE_RANGES_MAX = 1024
"""Of one step: scattered 4 KiB blocks come to as many bytes. Each is 72 bytes of the record and
some 5 µs of Python."""
_OPERATION_BYTES = layout.OP_MOVE_DTYPE.itemsize + layout.OPERATION_DTYPE.itemsize + 8
_RECORD_REST_BYTES = 8192

Lease = Callable[[int], tuple[int, int]]
"""Room for so many bytes, or fewer: media offset and length. Raises NoSpaceError."""


class Mover:
    """One for each volume."""

    def __init__(self, volume: Volume, versions: Versions) -> None:
        self.volume = volume
        self.versions = versions

    def choose(self, ranges: Rows) -> Rows:
        """As many of the first ``ranges`` (LIVE_RANGE_DTYPE, at least one) as one step moves, the
        last one maybe in part.
        """
        ranges = ranges[:MOVE_RANGES_MAX]
        limit = self.volume.record_bytes_max
        limit -= min(_RECORD_REST_BYTES, limit // 2)
        record = np.cumsum(_OPERATION_BYTES + 8 * ranges["owner_count"])
        count = max(1, int(np.searchsorted(record, limit, side="right")))
        ends = np.cumsum(ranges["length"][:count])
        count = min(count, int(np.searchsorted(ends, MOVE_BYTES_MAX)) + 1)
        chosen = ranges[:count].copy()
        beyond = int(ends[count - 1]) - MOVE_BYTES_MAX
        if beyond > 0:
            chosen["length"][-1] -= np.uint64(beyond)
        return chosen

    def move(self, chosen: Rows, owners: npt.NDArray[np.uint64], lease: Lease) -> int:
        """Copy ``chosen`` into a new extent in the room that ``lease`` gives, as far as it goes,
        commit, re-aim every reference: bytes moved. Durable when it returns.

        Raises CorruptionError, MediaError (a source is damaged: nothing was moved), NoSpaceError.
        """
        engine = self.volume.engine
        offset, capacity = lease(int(chosen["length"].sum()))
        target_id = self.volume.allocate_extent_id()
        engine.lease(target_id, offset, capacity)
        try:
            moves = engine.copy_ranges(chosen, target_id)
            if len(moves):
                self._commit(moves, chosen, owners, target_id)
        finally:
            unused_offset, unused = engine.close_lease(target_id)
            self.volume.space.give_back(unused_offset, unused)
        moved = int(moves["length"].sum())
        self.volume.counters.moved_bytes += moved
        return moved

    def share(self, moves: Rows, inode: Inode) -> None:
        """Let a file at rest, which alone refers to the sources of ``moves`` (MOVE_DTYPE), refer to
        the same bytes of another one: the targets, which that one has committed. One record.

        Raises NoSpaceError, MediaError: nothing has changed.
        """
        ino = inode.ino
        ops: list[Operation] = []
        for source_id, start, length, target_id, position in moves.tolist():
            ops.append(MoveOperation(source_id, start, length, target_id, position, (ino,)))
        self.versions.fence_data()
        self.volume.commit(ops)
        self._follow([ino], moves)

    def _commit(
        self, moves: Rows, chosen: Rows, owners: npt.NDArray[np.uint64], target_id: int
    ) -> None:
        volume = self.volume
        inodes = volume.namespace.inodes
        info, crcs = volume.engine.describe(target_id)
        ops: list[Operation] = list(extent_operations(info.tobytes(), crcs.tobytes()))
        known: dict[int, bool] = {}
        places = chosen[["first_owner", "owner_count"]].tolist()
        for row, (first, count) in zip(moves.tolist(), places, strict=False):
            inos = owners[first : first + count].tolist()
            for ino in inos:
                if ino not in known:
                    known[ino] = ino in inodes and _is_known(inodes[ino])
            names = tuple(ino for ino in inos if known[ino])
            source_id, start, length, _, position = row
            ops.append(MoveOperation(source_id, start, length, target_id, position, names))
        self.versions.fence_data()
        volume.commit(ops)
        volume.engine.publish(target_id)
        self._follow(known, moves)

    def _follow(self, inos: Iterable[int], moves: Rows) -> None:
        """The journal says so already: contents that did not follow must not be built upon."""
        inodes, part_of = self.volume.namespace.inodes, self.versions.clones.part_of
        contents = [c for ino in inos for c in _contents(inodes.get(ino), part_of(ino))]
        contents += [c for ino in inos for c in self.versions.past.held_contents(ino)]
        try:
            self.volume.engine.move(contents, moves)
        except OutOfMemoryError as error:
            self.volume.stop_writing(f"a committed move could not be followed: {error.message}")
            raise


def _is_known(inode: Inode) -> bool:
    """The journal knows the inode; an uncommitted one may share what others have committed."""
    return inode.links > 0 and not inode.uncommitted


def _contents(inode: Inode | None, part: FileMap | None) -> list[FileMap]:
    """``part``: its second map in the making (``clones``). None: only held history has it."""
    if inode is None:
        return []
    return [c for c in (inode.live, inode.committed, inode.aside, part) if c is not None]
