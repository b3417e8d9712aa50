"""Writing the journal: one record for each transaction, in two copies.

Never here: reading it back (``journal_reader``), choosing segments (``space``), what records mean.

Invariants
- Records are 64-byte aligned, append-only and never changed once stored.
- A record's ``fenced_lsn`` names the last record that was durable before it was stored. On line and
  byte granularity that is always the one before: no record is stored before its predecessor is
  fenced. On page media records may queue up between commit points; recovery then stops at the
  first missing one, and only a later record with fenced_lsn at or behind it proves damage.
- Both copies carry the same bytes at the same place in their segments; either one is enough.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cxlfs.errors import InvariantError
from cxlfs.format import layout, segments
from cxlfs.format.packing import packer
from cxlfs.media import Granularity
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media

_RECORD = packer(layout.RECORD_DTYPE)
_SUMMED_BYTES = layout.RECORD_DTYPE.itemsize - 4


CLOCK_BACK_NS = 1_000_000_000
"""A clock that goes back by no more is being adjusted: times stand still meanwhile. One that goes
back further was wrong before."""


class Journal:
    """The open end of the journal: one segment and its mirror.

    ``last_lsn``: of the newest record stored; ``fenced_lsn``: of the newest known to be durable.
    """

    def __init__(
        self,
        media: Media,
        superblock: Superblock,
        header: segments.SegmentHeader,
        *,
        last_lsn: int,
    ) -> None:
        self.media = media
        self.header = header
        self.last_lsn = last_lsn
        self.fenced_lsn = last_lsn
        self.last_time_ns = 0
        self._seed = segments.record_seed(header.nonce, header.epoch, superblock.uuid)
        self._bases = (
            superblock.segment_offset(header.index),
            superblock.segment_offset(header.partner),
        )
        self._position = layout.SEGMENT_HEADER_BYTES
        self._end = superblock.segment_size_bytes
        self._always_fenced = media.granularity is not Granularity.PAGE

    @property
    def used_bytes(self) -> int:
        return self._position - layout.SEGMENT_HEADER_BYTES

    @property
    def size_bytes(self) -> int:
        return self._end - layout.SEGMENT_HEADER_BYTES

    @property
    def free_bytes(self) -> int:
        return self._end - self._position

    def append(self, payload: bytes, operation_count: int) -> tuple[int, int]:
        """Store one record; returns its LSN and time.

        Durable after :meth:`fence`. The caller made sure that ``record_bytes(payload)`` fits.
        """
        length = record_bytes(payload)
        position = self._position
        if length > self._end - position:
            raise InvariantError("the journal segment has no room for this record")
        lsn = self.last_lsn + 1
        time_ns = time.time_ns()
        if 0 < self.last_time_ns - time_ns <= CLOCK_BACK_NS:
            time_ns = self.last_time_ns
        padded = payload.ljust(length - layout.RECORD_DTYPE.itemsize, b"\0")
        head = _RECORD.pack(
            layout.RECORD_MAGIC,
            layout.RECORD_TRANSACTION,
            operation_count,
            length,
            len(payload),
            lsn,
            self.header.epoch,
            self.fenced_lsn,
            time_ns,
            crc32c(padded, self._seed),
            0,
            0,
            0,
        )[:_SUMMED_BYTES]
        data = head + crc32c(head, self._seed).to_bytes(4, "little") + padded
        media = self.media
        for base in self._bases:
            media.store(base + position, data)
            media.write_back(base + position, length)
        self._position = position + length
        self.last_lsn = lsn
        self.last_time_ns = time_ns
        return lsn, time_ns

    def fence(self) -> None:
        """Make every record stored so far durable."""
        self.media.fence()
        self.fenced_lsn = self.last_lsn

    @property
    def must_fence_each(self) -> bool:
        """Line and byte granularity: a fence is cheap, so every record gets one."""
        return self._always_fenced


def record_bytes(payload: bytes) -> int:
    """Bytes that a record with this payload takes in the journal."""
    length = layout.RECORD_DTYPE.itemsize + len(payload)
    return -(-length // layout.RECORD_ALIGN) * layout.RECORD_ALIGN
