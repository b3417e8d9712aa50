"""History on the media: rows are stored in batches, so that it outlives the daemon.

Other modules say what a row is (``past``), what a batch looks like (``format.history``), and read
batches at an opening (``past_loading``).

Invariants
- A batch is stored behind the records that ended its rows: they are durable first.
- Nothing waits for a batch, and nothing depends on one. A row that no batch has is lost in a crash.
- A row counts only while each segment with its data has the epoch that its batch names. A segment
  gets a new epoch before anything is stored into it, so no row can show bytes of somebody else, and
  giving history back needs no record.
- What a user has forgotten is in no batch when :meth:`Archive.erase` returns.
- The segments of the archive count as free, and are given up before a write would fail. One whose
  rows are all gone is free.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import OutOfMemoryError
from cxlfs.format import history, layout, segments
from cxlfs.native.maps import FileMap
from cxlfs.native.snapshot import describe
from cxlfs.store.past_rows import ArchiveSegment, Row
from cxlfs.store.space import State

if TYPE_CHECKING:
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

ROWS_PER_BATCH = 256
"""A batch of them takes 1 to 2 ms."""
WAIT_S = 1.0
"""A row waits so long for others."""
_SEGMENTS_MIN = 2
_SEGMENTS_PART = 32
"""The archive takes so many segments, or that part of all."""
_KEPT_FREE = 2
"""Segments beyond the reserve that the archive leaves to others."""
_ZEROS = bytes(1 << 20)


class Archive:
    """Of one volume. ``is_on`` False: nothing is stored any more."""

    def __init__(self, volume: Volume, *, is_on: bool) -> None:
        self.volume = volume
        self.is_on = is_on and not volume.read_only
        self._segments: list[ArchiveSegment] = []
        """The last one is written to."""
        self._waiting: collections.deque[Row] = collections.deque()
        self._deadline: float | None = None
        self._has_no_room = False

    def adopt(self, found: Sequence[ArchiveSegment]) -> None:
        """Segments that an opening found, the oldest first; their rows are known already."""
        if self.is_on:
            self._segments = list(found)
            for segment in list(found):
                if not segment.live:
                    self._free(segment)

    @property
    def segment_count(self) -> int:
        return len(self._segments)

    # --- rows -------------------------------------------------------------------------------

    def add(self, row: Row) -> None:
        """A row is complete: it waits to be stored."""
        if self.is_on:
            self._waiting.append(row)

    def drop(self, row: Row) -> None:
        """A row is gone. The batch that has it may stay: its data segments are used again, or what
        it says is of no interest.
        """
        if row.archived is not None and self.is_on:
            segment, row.archived = row.archived, None
            self._drop_from(segment)

    def renew(self, row: Row) -> None:
        """The data of a row may have moved: what its batch says of it is worth nothing."""
        if row.archived is not None and not row.is_gone:
            self.add(row)

    # --- storing ----------------------------------------------------------------------------

    def step(self, now_monotonic: float) -> bool:
        """Store one batch if it is due; True when there is more. Raises MediaError."""
        if not self._waiting or not self.is_on or self.volume.read_only:
            return False
        if self._deadline is None:
            self._deadline = now_monotonic + WAIT_S
        if now_monotonic < self._deadline and (
            len(self._waiting) < ROWS_PER_BATCH or self._has_no_room
        ):
            return False
        self._deadline = None
        self._has_no_room = not self._store_some()
        return len(self._waiting) >= ROWS_PER_BATCH and not self._has_no_room

    def finish(self) -> None:
        """Store all that waits, as far as there is room; from then on the archive stays as it is.

        Raises MediaError.
        """
        while self._waiting and self.is_on and not self.volume.read_only and self._store_some():
            pass
        self.is_on = False

    def _store_some(self) -> bool:
        """Store the rows that have waited longest; False: there is no room, or no memory."""
        rows = list[Row]()
        while self._waiting and len(rows) < ROWS_PER_BATCH:
            row = self._waiting.popleft()
            if not row.is_gone:
                rows.append(row)
        try:
            if not rows or self._store(rows):
                return True
        except OutOfMemoryError as error:
            log.info("history is not stored yet: %s", error.message)
        left = (row for row in self._waiting if not row.is_gone)
        self._waiting = collections.deque((*rows, *left))
        return False

    def _store(self, rows: list[Row]) -> bool:
        """One batch of them, or several where one is larger than a segment."""
        volume = self.volume
        self._fence()
        batch = make_batch(volume, rows)
        head = self._segments[-1] if self._segments else None
        data = b"" if head is None else self._encode(batch, head)
        if head is None or len(data) > head.size_bytes - head.used_bytes:
            if len(data or self._encode(batch, None)) > volume.superblock.segment_payload_bytes:
                half = len(rows) // 2
                return half == 0 or (self._store(rows[:half]) and self._store(rows[half:]))
            head = self._take()
            if head is None:
                return False
            data = self._encode(batch, head)
        with volume.writing:
            volume.media.copy(head.start + head.used_bytes, data)
            volume.media.fence()
        head.used_bytes += len(data)
        for row in rows:
            before = row.archived
            head.add(row)
            if before is not None:
                self._drop_from(before)
        return True

    def _fence(self) -> None:
        """Every record so far is durable: those that ended the rows are."""
        self.volume.fence()

    def _encode(self, batch: history.Batch, head: ArchiveSegment | None) -> bytes:
        offset, seed = (0, 0) if head is None else (head.used_bytes, head.seed)
        return history.encode(batch, offset=offset, seed=seed)

    # --- segments ---------------------------------------------------------------------------

    def _take(self) -> ArchiveSegment | None:
        """A new segment to write to; None: others need what is free."""
        volume = self.volume
        limit = max(_SEGMENTS_MIN, volume.superblock.segment_count // _SEGMENTS_PART)
        if len(self._segments) >= limit:
            self.give_up_oldest()
        self._compact()
        if volume.space.free_count <= volume.refresh_reserve() + _KEPT_FREE:
            return None
        index = volume.space.take(State.HISTORY)
        header = segments.SegmentHeader(
            role=layout.ROLE_HISTORY,
            index=index,
            epoch=volume.space.new_epoch(),
            nonce=volume.nonce,
        )
        with volume.writing:
            segments.store(volume.media, volume.superblock, header)
            volume.media.fence()
        segment = ArchiveSegment.of(volume.superblock, header)
        self._segments.append(segment)
        return segment

    def _compact(self) -> None:
        """Rows of a segment of which half is gone wait to be stored anew; it is free then."""
        for segment in self._segments[:-1]:
            if segment.live * 2 <= segment.stored:
                segment.stored = 0  # not again
                self._waiting.extend(row for row in segment.rows if row.archived is segment)
                return

    def _drop_from(self, segment: ArchiveSegment) -> None:
        segment.drop_one()
        if not segment.live:
            self._free(segment)

    def _free(self, segment: ArchiveSegment) -> None:
        """Its rows are in no batch from now on."""
        self._segments.remove(segment)
        for row in segment.rows:
            if row.archived is segment:
                row.archived = None
        segment.rows = []
        self.volume.space.give_up([segment.index])

    def give_up_oldest(self) -> bool:
        """Give up the segment that was written to first; False when there is none. Its rows stay
        until the daemon ends.
        """
        if not self._segments:
            return False
        self._free(self._segments[0])
        return True

    # --- forgetting -------------------------------------------------------------------------

    def erase(self, rows: Sequence[Row]) -> None:
        """Make sure that rows are in no batch that an opening would find: all of the archive is
        overwritten, and the other rows wait to be stored anew. Earlier batches may have a row too,
        and so may segments that were given up and not used since. Call it before the rows are
        dropped. Durable. Raises MediaError.
        """
        if self.volume.read_only:
            return
        erased = set(map(id, rows))
        stored = (r for each in self._segments for r in each.rows if r.archived is each)
        left = [row for row in (*stored, *self._waiting) if id(row) not in erased]
        self._overwrite_all()
        while self._segments:
            self._free(self._segments[-1])
        self._waiting = collections.deque(left)

    def _overwrite_all(self) -> None:
        """Overwrite the batches in every segment whose header says that it holds some."""
        volume, block = self.volume, self.volume.superblock
        with volume.writing:
            for header in segments.read_all(volume.media, block):
                unused = volume.space.states[header.index] in {State.FREE, State.HISTORY}
                if header.role != layout.ROLE_HISTORY or not unused:
                    continue
                found = ArchiveSegment.of(block, header)
                scanned = history.scan(volume.media, found.start, found.size_bytes, seed=found.seed)
                end = max((end for end, _ in scanned), default=0)
                for done in range(0, end, len(_ZEROS)):
                    volume.media.copy(found.start + done, _ZEROS[: min(len(_ZEROS), end - done)])
            volume.media.fence()


def make_batch(volume: Volume, rows: Sequence[Row]) -> history.Batch:
    """What a batch says of rows. Raises OutOfMemoryError."""
    contents: list[FileMap] = [row.content for row in rows if row.content is not None]
    told = describe(volume.engine, contents)
    sizes = zip(told.sizes.tolist(), told.counts.tolist(), strict=True)
    table, strings, attributes = [], list[bytes](), list[tuple[int, int]]()
    for row in rows:
        size, ref_count = (0, 0) if row.content is None else next(sizes)
        table.append(_told(row, size, ref_count))
        strings += (row.name, row.target)
        for name, value in row.stored_xattrs.items():
            strings += (name, value)
            attributes.append((len(name), len(value)))
    block = volume.superblock
    places = (told.extents["media_offset"] - block.first_segment_offset) // block.segment_size_bytes
    indexes = np.unique(places).tolist()
    epochs = volume.space.epochs
    return history.Batch(
        lsn=volume.last_lsn,
        rows=np.array(table, layout.HISTORY_ROW_DTYPE),
        segments=np.array(
            [(index, epochs[index]) for index in indexes], layout.HISTORY_SEGMENT_DTYPE
        ),
        extents=told.extents,
        checksums=told.checksums,
        references=told.references,
        attributes=np.array(attributes, layout.HISTORY_ATTRIBUTE_DTYPE),
        strings=b"".join(strings),
    )


def _told(row: Row, size: int, ref_count: int) -> tuple[int, ...]:
    """In the order of HISTORY_ROW_DTYPE."""
    return (
        row.died_lsn,
        row.died_ns,
        row.ino,
        row.parent,
        row.born_lsn,
        row.born_ns,
        size,
        ref_count,
        row.atime_ns,
        row.mtime_ns,
        row.birth_ns,
        row.key[1],
        int(row.death),
        row.mode,
        row.uid,
        row.gid,
        row.rdev,
        row.flags,
        len(row.name),
        len(row.target),
        len(row.xattrs or ()) + 1,
    )
