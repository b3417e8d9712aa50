"""Reading the journal back: records in order, then exactly one reason to stop.

Never here: what records mean, deciding what to do about damage (``recovery``).

Invariants
- A record is delivered only if header and payload checksums, epoch, LSN and length are right, in
  the primary or else in the mirror copy.
- The first record that is good in neither copy ends the journal. It is the torn end, unless a
  later good record says (``fenced_lsn``) that the missing one was durable: that is damage.
- Memory is bounded by one segment; a record's length is checked before it is used.
- What is summed in vain is bounded by a few segments, however many records a forger made that are
  good but for their payload: beyond that everything counts as damaged.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cxlfs.errors import MediaError
from cxlfs.format import layout, segments
from cxlfs.format.packing import packer
from cxlfs.native import crc32c, crc32c_each

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media

_RECORD = packer(layout.RECORD_DTYPE)
_HEADER_BYTES = layout.RECORD_DTYPE.itemsize
_SUMMED_BYTES = _HEADER_BYTES - 4
_WALK = struct.Struct("<I4xI4xQQ")
"""Magic, length, LSN and epoch of a record header: what leads from one record to the next."""
_WINDOW_BYTES_FIRST = 4 << 20
_WINDOW_BYTES_MAX = 32 << 20
_LOOK_AHEAD_BYTES = 1 << 20
_RECORD_BYTES = 1 << 20
"""What a record takes at most, when this program wrote it; a longer one is read all the same."""
_VAIN_SEGMENTS = 8
"""Two copies, read twice, may be damaged in every record: twice as many segments."""


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
    kind: int = layout.RECORD_TRANSACTION


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
    unknown_type: int | None = None
    """Type of a good record at the end, which this program does not know."""
    continuations: list[segments.SegmentHeader] = dataclasses.field(default_factory=list)
    """Headers in continuations, the newest first. There are two if the copies differ."""
    bad_continuations: list[BadCopy] = dataclasses.field(default_factory=list)
    """A copy of the newest continuation that is damaged, or holds another header."""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordBatch:
    """Good records that follow each other: ``rows`` are their headers (RECORD_DTYPE), which stand
    at ``starts`` in ``data``, payloads behind them. ``media_offsets``, ``copy_numbers``: where
    each was read.
    """

    data: bytearray
    starts: npt.NDArray[np.int64]
    rows: npt.NDArray[np.void]
    media_offsets: npt.NDArray[np.int64]
    copy_numbers: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def length(self) -> int:
        """Bytes of the segment that the records take."""
        return int(self.rows["length"].sum())

    def before(self, lsn: int) -> RecordBatch:
        """The records in front of that one."""
        count = int((self.rows["lsn"] < lsn).sum())
        return RecordBatch(
            self.data,
            self.starts[:count],
            self.rows[:count],
            self.media_offsets[:count],
            self.copy_numbers[:count],
        )

    def payload(self, index: int) -> bytes:
        first = int(self.starts[index]) + _HEADER_BYTES
        return bytes(self.data[first : first + int(self.rows["payload_bytes"][index])])

    def __iter__(self) -> Iterator[Record]:
        fields = ("lsn", "time_ns", "fenced_lsn", "operation_count", "payload_bytes", "length")
        columns = [self.rows[name].tolist() for name in fields]
        places = (self.starts.tolist(), self.media_offsets.tolist(), self.copy_numbers.tolist())
        for start, offset, copy, lsn, time_ns, fenced, operations, payload_bytes, length in zip(
            *places, *columns, strict=True
        ):
            first = start + _HEADER_BYTES
            payload = bytes(self.data[first : first + payload_bytes])
            yield Record(lsn, time_ns, fenced, operations, payload, offset, length, copy)


class _Copy:
    """The bytes of one copy of a journal segment; what cannot be read stands as zeros.

    Read in windows, of which the first is small; or all of it at once, when ``whole``.
    """

    def __init__(
        self, media: Media, superblock: Superblock, index: int, size: int, *, whole: bool
    ) -> None:
        self.base = superblock.segment_offset(index)
        self._media = media
        self._size = size
        self._next_bytes = size if whole else _WINDOW_BYTES_FIRST
        self._start = 0
        self._data = self.read(0, size) if whole else bytearray()

    def read(self, position: int, length: int) -> bytearray:
        """Anew from the media."""
        return _read_tolerantly(self._media, self.base + position, length)

    def window(self, position: int, length: int) -> tuple[bytearray, int]:
        """Bytes with [position, +length), which lies in the segment, and where in them."""
        inside = position - self._start
        if not 0 <= inside <= len(self._data) - length:
            size = min(max(length, self._next_bytes), self._size - position)
            self._next_bytes = _WINDOW_BYTES_MAX
            self._data, self._start, inside = self.read(position, size), position, 0
        return self._data, inside


def _read_tolerantly(media: Media, offset: int, length: int) -> bytearray:
    data = bytearray(length)
    try:
        media.read_into(offset, data)
    except MediaError as error:
        if error.offset is None:
            raise
    else:
        return data
    for start in range(0, length, 4096):
        size = min(4096, length - start)
        try:
            data[start : start + size] = media.read(offset + start, size)
        except MediaError:
            data[start : start + size] = bytes(size)
    return data


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

    ``compare``: look at both copies of every record, as they stood when the reader was made.
    ``end``: read so many bytes of the segment (a multiple of RECORD_ALIGN; all by default).
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
            _Copy(media, superblock, header.index, self._size, whole=compare),
            _Copy(media, superblock, header.partner, self._size, whole=compare),
        )
        self._compare = compare
        self._superblock = superblock
        self._seed = segments.record_seed(header.nonce, header.epoch, superblock.uuid)
        self._expected_lsn = expected_lsn
        self._vain_bytes_left = _VAIN_SEGMENTS * self._size
        self.scan = SegmentScan(header, layout.SEGMENT_HEADER_BYTES, expected_lsn - 1)

    def __iter__(self) -> Iterator[Record]:
        if self._compare:
            yield from self._compared()
        else:
            for batch in self.batches():
                yield from batch

    def batches(self) -> Iterator[RecordBatch]:
        """The same records, many at once; without ``compare``."""
        while True:
            position, lsn = self.scan.end, self.scan.last_lsn + 1
            batch = self._undamaged(position, lsn)
            if not len(batch):
                batch = self._one_by_one(position, lsn)
            if not len(batch):
                break
            self.scan.end += batch.length
            self.scan.last_lsn += len(batch)
            yield batch
        self._find_continuation(position, lsn)
        self._look_ahead(position, lsn)

    def _compared(self) -> Iterator[Record]:
        position, lsn = self.scan.end, self._expected_lsn
        while (record := self._either(position, lsn)) is not None:
            if record.copy_number == 0:
                other = self._record_at(1, position, lsn)
                if other is None or not _same(record, other):
                    self._note_bad_copy(record, 1, position, contradicts=other is not None)
            position += record.length
            self.scan.end = position
            self.scan.last_lsn = lsn
            lsn += 1
            yield record
        self._find_continuation(position, lsn)
        self._look_ahead(position, lsn)

    # --- many at once -----------------------------------------------------------------------

    def _undamaged(self, position: int, lsn: int) -> RecordBatch:
        """The records up to the first that is not good in the primary copy, or leaves the window.

        The checks of _record_at over all of them at once: 100 000 records in some 20 ms.
        """
        primary = self._copies[0]
        if position + _HEADER_BYTES > self._size:
            return self._batch(bytearray(), [], 0)
        data, first = primary.window(position, min(_RECORD_BYTES, self._size - position))
        starts = self._walk(data, first, lsn)
        rows = _rows(data)[starts // _HEADER_BYTES]
        begins = starts.astype(np.uint64)
        lengths = rows["length"].astype(np.uint64)
        heads = np.full(len(starts), _SUMMED_BYTES, dtype=np.uint64)
        good = crc32c_each(data, begins, heads, self._seed) == rows["crc"]
        payloads = crc32c_each(data, begins + _HEADER_BYTES, lengths - _HEADER_BYTES, self._seed)
        good &= payloads == rows["payload_crc"]
        good &= rows["type"] == layout.RECORD_TRANSACTION
        good &= rows["payload_bytes"] <= lengths - _HEADER_BYTES
        count = len(good) if good.all() else int(np.argmin(good))
        return RecordBatch(
            data,
            starts[:count],
            rows[:count],
            starts[:count] + (primary.base + position - first),
            np.zeros(count, dtype=np.int64),
        )

    def _walk(self, data: bytearray, first: int, lsn: int) -> npt.NDArray[np.int64]:
        """Where records of the right LSN and epoch seem to begin, each behind the one before."""
        rows = _rows(data)[first // _HEADER_BYTES :]
        places = np.flatnonzero(rows["magic"] == layout.RECORD_MAGIC)
        starts = places * _HEADER_BYTES + first
        lengths = rows["length"][places].astype(np.int64)
        fits = (lengths % layout.RECORD_ALIGN == 0) & (lengths >= _HEADER_BYTES)
        fits &= starts + lengths <= len(data)
        fits &= rows["epoch"][places] == self.scan.header.epoch
        fits &= rows["lsn"][places] == np.uint64(lsn) + np.arange(len(places), dtype=np.uint64)
        fits &= starts == np.concatenate(([first], (starts + lengths)[:-1]))[: len(starts)]
        if fits.all():
            return starts
        count = int(np.argmin(fits))
        position = int(starts[count - 1] + lengths[count - 1]) if count else first
        return np.concatenate((starts[:count], self._walk_slowly(data, position, lsn + count)))

    def _walk_slowly(self, data: bytearray, position: int, lsn: int) -> npt.NDArray[np.int64]:
        """As _walk, where payloads look like headers, or records are followed by older ones."""
        starts: list[int] = []
        epoch = self.scan.header.epoch
        while position + _HEADER_BYTES <= len(data):
            magic, length, found_lsn, found_epoch = _WALK.unpack_from(data, position)
            if magic != layout.RECORD_MAGIC or found_lsn != lsn or found_epoch != epoch:
                break
            if length % layout.RECORD_ALIGN or not _HEADER_BYTES <= length <= len(data) - position:
                break
            starts.append(position)
            position += length
            lsn += 1
        return np.array(starts, dtype=np.int64)

    def _one_by_one(self, position: int, lsn: int) -> RecordBatch:
        """From the first record on that is damaged in the primary copy: as much as a window."""
        data = bytearray()
        found: list[Record] = []
        taken = 0
        while taken < _WINDOW_BYTES_FIRST:
            record = self._either(position + taken, lsn + len(found))
            if record is None:
                break
            copy, inside = self._copies[record.copy_number].window(position + taken, record.length)
            data += copy[inside : inside + record.length]
            found.append(record)
            taken += record.length
        return self._batch(data, found, position)

    def _batch(self, data: bytearray, found: list[Record], position: int) -> RecordBatch:
        ends = np.cumsum([record.length for record in found], dtype=np.int64)
        starts = np.concatenate(([0], ends))[:-1].astype(np.int64)
        copies = np.array([record.copy_number for record in found], dtype=np.int64)
        bases = np.array([copy.base for copy in self._copies])
        offsets = bases[copies] + position + starts
        return RecordBatch(data, starts, _rows(data)[starts // _HEADER_BYTES], offsets, copies)

    # --- one record -------------------------------------------------------------------------

    def _either(self, position: int, lsn: int) -> Record | None:
        """The record from the primary or else from the mirror copy."""
        record = self._record_at(0, position, lsn)
        if record is None:
            record = self._record_at(1, position, lsn)
            if record is not None:
                self.scan.mirror_used += 1
                self._note_bad_copy(record, 0, position, contradicts=False)
        return record

    def _note_bad_copy(
        self, record: Record, copy_number: int, position: int, *, contradicts: bool
    ) -> None:
        bad = self._copies[copy_number].base + position
        self.scan.bad_copies.append(
            BadCopy(record.lsn, record.length, copy_number, bad, record.media_offset, contradicts)
        )

    def _record_at(
        self, number: int, position: int, lsn: int, kind: int | None = layout.RECORD_TRANSACTION
    ) -> Record | None:
        """Return the record if it is good and of that kind (None: of any kind)."""
        if position + _HEADER_BYTES > self._size or self._vain_bytes_left <= 0:
            return None
        copy = self._copies[number]
        data, inside = copy.window(position, _HEADER_BYTES)
        fields = _RECORD.unpack_from(data, inside)
        magic, found, count, length, payload_bytes, found_lsn, epoch, fenced, time_ns = fields[:9]
        if (
            magic != layout.RECORD_MAGIC
            or found_lsn != lsn
            or epoch != self.scan.header.epoch
            or fields[12] != crc32c(bytes(data[inside : inside + _SUMMED_BYTES]), self._seed)
            or (kind is not None and found != kind)
            or not _HEADER_BYTES <= length <= self._size - position
            or length % layout.RECORD_ALIGN
            or payload_bytes > length - _HEADER_BYTES
        ):
            return None
        data, inside = copy.window(position, length)
        padded = bytes(data[inside + _HEADER_BYTES : inside + length])
        if crc32c(padded, self._seed) != fields[9]:
            self._vain_bytes_left -= length
            return None
        payload = padded[:payload_bytes]
        offset = copy.base + position
        return Record(lsn, time_ns, fenced, count, payload, offset, length, number, found)

    def _find_continuation(self, position: int, lsn: int) -> None:
        """Note the segment in which the journal goes on."""
        found: list[tuple[segments.SegmentHeader, Record]] = []
        for number in (0, 1):
            record = self._record_at(number, position, lsn, None)
            if record is not None and record.kind != layout.RECORD_CONTINUATION:
                if record.kind != layout.RECORD_TRANSACTION:
                    self.scan.unknown_type = record.kind
                continue
            named = None if record is None else self._successor_in(record)
            if record is not None and named is not None:
                found.append((named, record))
        found.sort(key=lambda item: -item[0].epoch)
        self.scan.continuations = list(dict.fromkeys(named for named, _ in found))
        if not found or (len(found) == 2 and _same(*(record for _, record in found))):
            return
        good = found[0][1]
        bad = 1 - good.copy_number
        offset = self._copies[bad].base + position
        self.scan.bad_continuations = [
            BadCopy(lsn, good.length, bad, offset, good.media_offset, contradicts=False)
        ]

    def _successor_in(self, record: Record) -> segments.SegmentHeader | None:
        """Return the header in a continuation, or None if no journal can go on there."""
        header = segments.decode_named(record.payload, self._superblock)
        mine = self.scan.header
        follows = (
            isinstance(header, segments.SegmentHeader)
            and header.role == layout.ROLE_JOURNAL
            and header.copy_number == 0
            and header.epoch > mine.epoch
            and header.first_lsn == record.lsn
        )
        return header if follows and isinstance(header, segments.SegmentHeader) else None

    # --- behind the end ---------------------------------------------------------------------

    def _look_ahead(self, position: int, missing_lsn: int) -> None:
        """Search both copies behind the end for a record that proves the missing one durable.

        In small pieces, which stay in the cache: what lies there was never used, mostly.
        """
        for number, copy in enumerate(self._copies):
            for first in range(position, self._size, _LOOK_AHEAD_BYTES):
                data = copy.read(first, min(_LOOK_AHEAD_BYTES, self._size - first))
                rows = _rows(data)
                places = np.flatnonzero(rows["magic"] == layout.RECORD_MAGIC)
                found = rows[places]
                proofs = (
                    (found["epoch"] == self.scan.header.epoch)
                    & (found["fenced_lsn"] >= missing_lsn)
                    & (found["lsn"] > missing_lsn)
                )
                for index, lsn in zip(
                    places[proofs].tolist(), found["lsn"][proofs].tolist(), strict=True
                ):
                    place = first + index * _HEADER_BYTES
                    if (
                        self._record_at(number, place, lsn, None) is not None
                        or self._vain_bytes_left <= 0
                    ):
                        self.scan.lost_lsn = missing_lsn
                        return


def _rows(data: bytearray) -> npt.NDArray[np.void]:
    return np.frombuffer(data, dtype=layout.RECORD_DTYPE)


def _same(record: Record, other: Record) -> bool:
    offset, copy_number = record.media_offset, record.copy_number
    return other._replace(media_offset=offset, copy_number=copy_number) == record


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
