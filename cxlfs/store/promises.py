"""Room that fallocate promised to open files.

Never here: who may take what is left (``space``), contents.

Invariants
- A promise is a range of one file; what counts of it are the bytes that are still holes in the live
  content, so that writing uses it up and nothing else has to be told.
- It lasts until the last writer closes the file, or the range is punched or truncated; the media
  knows nothing of it.

What it can mean in a log-structured store: the first write of each byte of the range finds room,
whatever others write meanwhile. Bytes written a second time, and pieces below 4 KiB (which carry
the file block around them along), take more than was promised, until the cleaner has compacted;
and so does metadata that grows by a segment or more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode

_BLOCK_BYTES = 4096
_SMALL_LEASES = 8

Ranges = list[tuple[int, int]]


class Promises:
    """One for each volume. All ranges are [start, end), in file bytes."""

    def __init__(self, *, lease_bytes_max: int) -> None:
        self._lease_bytes_max = lease_bytes_max
        self._of: dict[int, tuple[Inode, Ranges]] = {}

    def add(self, inode: Inode, start: int, end: int) -> None:
        """Joined with what touches it."""
        ranges = self.of(inode)
        near = [r for r in ranges if r[0] <= end and r[1] >= start]
        start = min([start, *(r[0] for r in near)])
        end = max([end, *(r[1] for r in near)])
        self.put(inode, sorted([*(r for r in ranges if r not in near), (start, end)]))

    def remove(self, inode: Inode, start: int, end: int) -> None:
        """The range is not promised any more."""
        ranges = self.of(inode)
        if ranges:
            rest = [(low, min(high, start)) for low, high in ranges if low < start]
            rest += [(max(low, end), high) for low, high in ranges if high > end]
            self.put(inode, sorted(rest))

    def of(self, inode: Inode) -> Ranges:
        """What the file was promised, sorted and apart."""
        return self._of[inode.ino][1] if inode.ino in self._of else []

    def put(self, inode: Inode, ranges: Ranges) -> None:
        """Set what :meth:`of` tells."""
        if ranges:
            self._of[inode.ino] = (inode, ranges)
        else:
            self.drop(inode)

    def drop(self, inode: Inode) -> None:
        self._of.pop(inode.ino, None)

    def bytes_open(self, writer: Inode | None = None, start: int = 0, end: int = 0) -> int:
        """Room that must stay for what was promised and is not written yet; with a writer, for a
        write of its [start, end). One that uses its own promise up only has to leave the others'.
        """
        if not self._of:
            return 0
        blocks = sum(
            -(-_holes(inode, low, high) // _BLOCK_BYTES)
            for inode, ranges in self._of.values()
            if inode is not writer or not any(_holes(inode, *r) for r in _clip(ranges, start, end))
            for low, high in ranges
        )
        return blocks * _BLOCK_BYTES + self._overhead_bytes(blocks * _BLOCK_BYTES)

    def _overhead_bytes(self, size_bytes: int) -> int:
        """A lease may lose a block at its end; leases begin small and grow."""
        leases = size_bytes // self._lease_bytes_max + _SMALL_LEASES
        return leases * _BLOCK_BYTES if size_bytes else 0


def _clip(ranges: Ranges, start: int, end: int) -> Iterator[tuple[int, int]]:
    for low, high in ranges:
        if low < end and high > start:
            yield max(low, start), min(high, end)


def _holes(inode: Inode, start: int, end: int) -> int:
    return end - start - inode.content.mapped(start, end - start)[0]
