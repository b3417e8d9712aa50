"""Room that fallocate promised to files.

Never here: who may take what is left (``space``), contents, the count of what is still wanted (the
engine keeps it as holes are filled).

Invariants
- A promise is a range of one file, of whole blocks; what counts of it are the blocks that its holes
  in the live content would fill, so that writing uses it up and nothing else has to be told.
- It lasts until the range is punched or truncated, the file is overwritten, taken back from a
  killed writer or gone, or the store is closed; the media knows nothing of it.
- A file has at most RANGES_MAX of them: then the nearest are joined, which promises more.

What it can mean in a log-structured store: the first write of each byte of the range finds room,
whatever others write meanwhile. Bytes written a second time, and pieces below 4 KiB (which carry
the file block around them along), take more than was promised, until the cleaner has compacted;
and so does metadata that grows by a segment or more.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlfs.native.extents import Engine
    from cxlfs.store.namespace import Inode

_BLOCK_BYTES = 4096
_SMALL_LEASES = 8
RANGES_MAX = 256

Ranges = list[tuple[int, int]]


class Promises:
    """One for each volume. All ranges are [start, end), in file bytes."""

    def __init__(self, engine: Engine, *, lease_bytes_max: int) -> None:
        self._engine = engine
        self._lease_bytes_max = lease_bytes_max
        self._of: dict[int, Ranges] = {}

    def add(self, inode: Inode, start: int, end: int) -> None:
        """Rounded to blocks, joined with what touches it. Raises OutOfMemoryError."""
        start = start // _BLOCK_BYTES * _BLOCK_BYTES
        end = -(-end // _BLOCK_BYTES) * _BLOCK_BYTES
        ranges = self.of(inode)
        near = [r for r in ranges if r[0] <= end and r[1] >= start]
        start = min([start, *(r[0] for r in near)])
        end = max([end, *(r[1] for r in near)])
        self.put(inode, _few(sorted([*(r for r in ranges if r not in near), (start, end)])))

    def remove(self, inode: Inode, start: int, end: int) -> None:
        """The range is not promised any more."""
        ranges = self.of(inode)
        if ranges:
            rest = [(low, min(high, start)) for low, high in ranges if low < start]
            rest += [(max(low, end), high) for low, high in ranges if high > end]
            self.put(inode, _few(sorted(rest)))

    def of(self, inode: Inode) -> Ranges:
        """What the file was promised, sorted and apart."""
        return self._of.get(inode.ino, [])

    def put(self, inode: Inode, ranges: Ranges) -> None:
        """Set what :meth:`of` tells, for the live content as it is now."""
        if ranges or inode.ino in self._of:
            inode.content.promise(ranges)
        if ranges:
            self._of[inode.ino] = ranges
        else:
            self._of.pop(inode.ino, None)

    def drop(self, inode: Inode) -> None:
        self.put(inode, [])

    def bytes_open(self, writer: Inode | None = None, start: int = 0, end: int = 0) -> int:
        """Room that must stay for what was promised and is not written yet; with a writer, for a
        write of its [start, end). One that uses its own promise up only has to leave the others'.
        """
        size_bytes = self._engine.promised_bytes
        if size_bytes and writer is not None and writer.ino in self._of:
            own_bytes, is_used_up = writer.content.promised(start, end - start)
            size_bytes -= own_bytes if is_used_up else 0
        return size_bytes + self._overhead_bytes(size_bytes)

    def largest_bytes(self, room_bytes: int) -> int:
        """The largest further promise that fits into so much room, whole blocks."""
        lease_bytes = self._lease_bytes_max
        promised_bytes = self._engine.promised_bytes
        room_bytes += promised_bytes + self._overhead_bytes(promised_bytes)
        room_bytes -= _SMALL_LEASES * _BLOCK_BYTES
        leases, rest_bytes = divmod(room_bytes, lease_bytes + _BLOCK_BYTES)
        all_bytes = leases * lease_bytes + min(rest_bytes, lease_bytes - 1)
        return max(0, all_bytes - promised_bytes) // _BLOCK_BYTES * _BLOCK_BYTES

    def _overhead_bytes(self, size_bytes: int) -> int:
        """A lease may lose a block at its end; leases begin small and grow."""
        leases = size_bytes // self._lease_bytes_max + _SMALL_LEASES
        return leases * _BLOCK_BYTES if size_bytes else 0


def _few(ranges: Ranges) -> Ranges:
    """At most RANGES_MAX of them."""
    while len(ranges) > RANGES_MAX:
        gaps = [later[0] - before[1] for before, later in itertools.pairwise(ranges)]
        at = gaps.index(min(gaps))
        ranges[at : at + 2] = [(ranges[at][0], ranges[at + 1][1])]
    return ranges
