"""Reading the journal back: records in order, then exactly one reason to stop.

Never here: what records mean, deciding what to do about damage (``recovery``).

Invariants
- A record is delivered only if header and payload checksums, epoch, LSN and length are right, in
  the primary or else in the mirror copy.
- The first record that is good in neither copy ends the journal. It is the torn end, unless a
  later good record says (``fenced_lsn``) that the missing one was durable: that is damage.
- Memory is bounded by one segment; a record's length is checked before it is used.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cxlfs import layout, segments
from cxlfs.errors import MediaError
from cxlfs.native import crc32c, crc32c_each
from cxlfs.packing import packer

if TYPE_CHECKING:
    from cxlfs.media import Media
    from cxlfs.superblock import Superblock

_RECORD = packer(layout.RECORD_DTYPE)
_HEADER_BYTES = layout.RECORD_DTYPE.itemsize
_SUMMED_BYTES = _HEADER_BYTES - 4
_WALK = struct.Struct("<I4xI4xQQ")
"""Magic, length, LSN and epoch of a record header: what leads from one record to the next."""


class Record(NamedTuple):
    """One good record; ``payload`` without padding."""

    lsn: int
    time_ns: int
    fenced_lsn: int
    operation_count: int
    payload: bytes
    media_offset: int
    length: int
    copy_number: int


@dataclasses.dataclass(frozen=True, slots=True)
class BadCopy:
    """A record that is good in the other copy of its journal; ``media_offset``: of the bad one."""

    lsn: int
    length: int
    copy_number: int
    media_offset: int
    good_media_offset: int
    contradicts: bool
    """It is valid by itself, but says something else than the primary copy."""


@dataclasses.dataclass(slots=True)
class SegmentScan:
    """What reading one journal segment came to; complete once its records are used up."""

    header: segments.SegmentHeader
    end: int
    """Bytes from the start of the segment that good records reach."""
    last_lsn: int
    mirror_used: int = 0
    """Records that were good in the mirror only."""
    bad_copies: list[BadCopy] = dataclasses.field(default_factory=list)
    """Those in the primary copy; with ``compare`` those in the mirror too."""
    lost_lsn: int | None = None
    """LSN of a record that was durable and is good in neither copy: damage."""


class _Copy:
    """The bytes of one copy of a journal segment; what cannot be read stands as zeros."""

    def __init__(self, media: Media, superblock: Superblock, index: int, size: int) -> None:
        self.base = superblock.segment_offset(index)
        self.data = _read_tolerantly(media, self.base, size)


def _read_tolerantly(media: Media, offset: int, length: int) -> bytes:
    try:
        return media.read(offset, length)
    except MediaError as error:
        if error.offset is None:
            raise
    pieces = []
    for start in range(offset, offset + length, 4096):
        size = min(4096, offset + length - start)
        try:
            pieces.append(media.read(start, size))
        except MediaError:
            pieces.append(bytes(size))
    return b"".join(pieces)


def read_header(
    media: Media, superblock: Superblock, primary: int, mirror: int, epoch: int
) -> segments.SegmentHeader | None:
    """The header of a journal segment from whichever copy is good and of this epoch."""
    for index, copy_number in ((primary, 0), (mirror, 1)):
        header = segments.read(media, superblock, index)
        if (
            isinstance(header, segments.SegmentHeader)
            and header.role == layout.ROLE_JOURNAL
            and header.epoch == epoch
            and header.copy_number == copy_number
            and header.partner == (mirror if copy_number == 0 else primary)
        ):
            return dataclasses.replace(header, index=primary, partner=mirror, copy_number=0)
    return None


class SegmentReader:
    """Iterates over the records of one journal segment; ``scan`` tells how it ended.

    ``compare``: look at both copies of every record. ``end``: read so many bytes of the segment (a
    multiple of RECORD_ALIGN; all by default). What is read is what stood there at the beginning.
    """

    def __init__(
        self,
        media: Media,
        superblock: Superblock,
        header: segments.SegmentHeader,
        *,
        expected_lsn: int,
        compare: bool = False,
        end: int | None = None,
    ) -> None:
        self._size = superblock.segment_size_bytes if end is None else end
        self._copies = (
            _Copy(media, superblock, header.index, self._size),
            _Copy(media, superblock, header.partner, self._size),
        )
        self._compare = compare
        self._seed = segments.record_seed(header.nonce, header.epoch, superblock.uuid)
        self._expected_lsn = expected_lsn
        self.scan = SegmentScan(header, layout.SEGMENT_HEADER_BYTES, expected_lsn - 1)

    def __iter__(self) -> Iterator[Record]:
        position = layout.SEGMENT_HEADER_BYTES
        primary, mirror = self._copies
        lsn = self._expected_lsn
        if not self._compare:
            for found in self._undamaged():
                position += found.length
                self.scan.end = position
                self.scan.last_lsn = lsn
                lsn += 1
                yield found
        while True:
            record = self._record_at(primary, 0, position, lsn)
            if record is None:
                record = self._record_at(mirror, 1, position, lsn)
                if record is None:
                    break
                self.scan.mirror_used += 1
                self._note_bad_copy(record, 0, position, contradicts=False)
            elif self._compare:
                other = self._record_at(mirror, 1, position, lsn)
                if other is None or not _same(record, other):
                    self._note_bad_copy(record, 1, position, contradicts=other is not None)
            position += record.length
            self.scan.end = position
            self.scan.last_lsn = lsn
            lsn += 1
            yield record
        self._look_ahead(position, lsn)

    def _undamaged(self) -> Iterator[Record]:
        """The records up to the first one that is not good in the primary copy.

        The checks of _record_at over all of them at once: 100 000 records in a third of the time.
        """
        data, base = self._copies[0].data, self._copies[0].base
        starts = np.array(self._walk(data), dtype=np.uint64)
        rows = np.frombuffer(data, dtype=layout.RECORD_DTYPE)[starts // _HEADER_BYTES]
        lengths = rows["length"].astype(np.uint64)
        heads = np.full(len(starts), _SUMMED_BYTES, dtype=np.uint64)
        good = crc32c_each(data, starts, heads, self._seed) == rows["crc"]
        payloads = crc32c_each(data, starts + _HEADER_BYTES, lengths - _HEADER_BYTES, self._seed)
        good &= payloads == rows["payload_crc"]
        good &= rows["type"] == layout.RECORD_TRANSACTION
        good &= rows["payload_bytes"] <= lengths - _HEADER_BYTES
        count = len(good) if good.all() else int(np.argmin(good))
        fields = ("lsn", "time_ns", "fenced_lsn", "operation_count", "payload_bytes", "length")
        columns = [rows[name][:count].tolist() for name in fields]
        for start, lsn, time_ns, fenced, operations, payload_bytes, length in zip(
            starts[:count].tolist(), *columns, strict=True
        ):
            first = start + _HEADER_BYTES
            payload = data[first : first + payload_bytes]
            yield Record(lsn, time_ns, fenced, operations, payload, base + start, length, 0)

    def _walk(self, data: bytes) -> list[int]:
        """Where records of the right LSN and epoch seem to begin, each behind the one before."""
        starts: list[int] = []
        position, lsn = layout.SEGMENT_HEADER_BYTES, self._expected_lsn
        epoch = self.scan.header.epoch
        while position + _HEADER_BYTES <= self._size:
            magic, length, found_lsn, found_epoch = _WALK.unpack_from(data, position)
            if magic != layout.RECORD_MAGIC or found_lsn != lsn or found_epoch != epoch:
                break
            if length % layout.RECORD_ALIGN or not _HEADER_BYTES <= length <= self._size - position:
                break
            starts.append(position)
            position += length
            lsn += 1
        return starts

    def _note_bad_copy(
        self, record: Record, copy_number: int, position: int, *, contradicts: bool
    ) -> None:
        bad = self._copies[copy_number].base + position
        self.scan.bad_copies.append(
            BadCopy(record.lsn, record.length, copy_number, bad, record.media_offset, contradicts)
        )

    def _record_at(self, copy: _Copy, number: int, position: int, lsn: int) -> Record | None:
        data = copy.data
        if position + _HEADER_BYTES > self._size:
            return None
        fields = _RECORD.unpack_from(data, position)
        magic, kind, count, length, payload_bytes, found_lsn, epoch, fenced, time_ns = fields[:9]
        if (
            magic != layout.RECORD_MAGIC
            or found_lsn != lsn
            or epoch != self.scan.header.epoch
            or fields[12] != crc32c(data[position : position + _SUMMED_BYTES], self._seed)
            or kind != layout.RECORD_TRANSACTION
            or not _HEADER_BYTES <= length <= self._size - position
            or length % layout.RECORD_ALIGN
            or payload_bytes > length - _HEADER_BYTES
        ):
            return None
        padded = data[position + _HEADER_BYTES : position + length]
        if crc32c(padded, self._seed) != fields[9]:
            return None
        payload = padded[:payload_bytes]
        offset = copy.base + position
        return Record(lsn, time_ns, fenced, count, payload, offset, length, number)

    def _look_ahead(self, position: int, missing_lsn: int) -> None:
        """Search both copies behind the end for a record that proves the missing one durable."""
        for number, copy in enumerate(self._copies):
            rows = np.frombuffer(copy.data, dtype=layout.RECORD_DTYPE)
            start = position // _HEADER_BYTES
            places = start + np.flatnonzero(rows["magic"][start:] == layout.RECORD_MAGIC)
            found = rows[places]
            proofs = (
                (found["epoch"] == self.scan.header.epoch)
                & (found["fenced_lsn"] >= missing_lsn)
                & (found["lsn"] > missing_lsn)
            )
            for index, lsn in zip(
                places[proofs].tolist(), found["lsn"][proofs].tolist(), strict=True
            ):
                place = index * _HEADER_BYTES
                if self._record_at(copy, number, place, lsn) is not None:
                    self.scan.lost_lsn = missing_lsn
                    return


def _same(record: Record, other: Record) -> bool:
    return other._replace(media_offset=record.media_offset, copy_number=0) == record


def find_successor(
    headers: list[segments.SegmentHeader], *, after_epoch: int, first_lsn: int
) -> segments.SegmentHeader | None:
    """The newest journal segment that begins with ``first_lsn``, among all segment headers.

    Several can begin there when openings were cut off; only the last of them can hold records.
    """
    found = [
        header
        for header in headers
        if header.role == layout.ROLE_JOURNAL
        and header.first_lsn == first_lsn
        and header.epoch > after_epoch
    ]
    if not found:
        return None
    return as_primary(max(found, key=lambda header: (header.epoch, -header.copy_number)))


def as_primary(header: segments.SegmentHeader) -> segments.SegmentHeader:
    """The header of the primary copy, made from that of either copy."""
    if header.copy_number == 0:
        return header
    return dataclasses.replace(header, index=header.partner, partner=header.index, copy_number=0)
