"""Writing the journal: one record for each transaction, in two copies.

Never here: reading it back (``journal_reader``), choosing segments (``space``), what records mean.

Invariants
- Records are 64-byte aligned, append-only and never changed once stored.
- A record's ``fenced_lsn`` names the last record that was durable before it was stored. On line and
  byte granularity that is always the one before: no record is stored before its predecessor is
  fenced. On page media records may queue up between commit points; recovery then stops at the
  first missing one, and only a later record with fenced_lsn at or behind it proves damage.
- Both copies carry the same bytes at the same place in their segments; either one is enough.
- If a journal goes on in another segment, it ends with a continuation, which holds the header of
  that segment. The journal keeps space for it free.
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


CONTINUATION_BYTES = layout.RECORD_DTYPE.itemsize + layout.SEGMENT_DTYPE.itemsize
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
        self._superblock = superblock
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
        return self._end - self._position - CONTINUATION_BYTES

    def append(self, payload: bytes, operation_count: int) -> tuple[int, int]:
        """Store one record; returns its LSN and time.

        Durable after :meth:`fence`. The caller made sure that ``record_bytes(payload)`` fits.
        """
        length = record_bytes(payload)
        position = self._position
        if length > self.free_bytes:
            raise InvariantError("the journal segment has no room for this record")
        lsn = self.last_lsn + 1
        time_ns = time.time_ns()
        if 0 < self.last_time_ns - time_ns <= CLOCK_BACK_NS:
            time_ns = self.last_time_ns
        data = _record(
            *(layout.RECORD_TRANSACTION, payload, operation_count, lsn, self.fenced_lsn, time_ns),
            *(self.header.epoch, self._seed),
        )
        media = self.media
        for base in self._bases:
            media.store(base + position, data)
            media.write_back(base + position, length)
        self._position = position + length
        self.last_lsn = lsn
        self.last_time_ns = time_ns
        return lsn, time_ns

    def end(self, successor: segments.SegmentHeader) -> None:
        """Store the continuation: records go on in ``successor``.

        The next fence of the media makes it durable. The caller fences before it appends a record
        to the successor.
        """
        store_continuation(
            self.media,
            self._superblock,
            self.header,
            successor,
            position=self._position,
            fenced_lsn=self.fenced_lsn,
        )

    def fence(self) -> None:
        """Make every record stored so far durable."""
        self.media.fence()
        self.fenced_lsn = self.last_lsn

    @property
    def must_fence_each(self) -> bool:
        """Line and byte granularity: a fence is cheap, so every record gets one."""
        return self._always_fenced


def store_continuation(
    media: Media,
    superblock: Superblock,
    header: segments.SegmentHeader,
    successor: segments.SegmentHeader,
    *,
    position: int,
    fenced_lsn: int,
) -> None:
    """Store the header of ``successor`` as a continuation in both copies of a journal.

    The continuation takes no number: its LSN is that of the successor's first record. If
    ``position`` leaves too little space, nothing is stored. Readers then find the successor by its
    own headers.
    """
    if position + CONTINUATION_BYTES > superblock.segment_size_bytes:
        return
    payload = segments.encode(successor, superblock.uuid)
    seed = segments.record_seed(header.nonce, header.epoch, superblock.uuid)
    kind, lsn, now = layout.RECORD_CONTINUATION, successor.first_lsn, time.time_ns()
    data = _record(kind, payload, 0, lsn, fenced_lsn, now, header.epoch, seed)
    for index in (header.index, header.partner):
        offset = superblock.segment_offset(index) + position
        media.store(offset, data)
        media.write_back(offset, len(data))


def _record(  # noqa: PLR0917 - in the order of the fields; by name it takes 3 times as long
    kind: int,
    payload: bytes,
    operation_count: int,
    lsn: int,
    fenced_lsn: int,
    time_ns: int,
    epoch: int,
    seed: int,
) -> bytes:
    """Return the bytes of a record."""
    length = record_bytes(payload)
    padded = payload.ljust(length - layout.RECORD_DTYPE.itemsize, b"\0")
    head = _RECORD.pack(
        *(layout.RECORD_MAGIC, kind, operation_count, length, len(payload)),
        *(lsn, epoch, fenced_lsn, time_ns, crc32c(padded, seed), 0, 0, 0),
    )[:_SUMMED_BYTES]
    return head + crc32c(head, seed).to_bytes(4, "little") + padded


def record_bytes(payload: bytes) -> int:
    """Bytes that a record with this payload takes in the journal."""
    length = layout.RECORD_DTYPE.itemsize + len(payload)
    return -(-length // layout.RECORD_ALIGN) * layout.RECORD_ALIGN
