"""Pass 4: check both copies of each journal of the newest root and of the fallback.

The pass reads every record, and the headers and continuations that lead from one journal to the
next. Other modules apply records, and check the headers that a root names (pass 3).

Invariants
- Damage in one copy is a finding only if the copy must have been durable. A crash may tear bytes
  that were being written, and the next opening starts a new journal.
- A record proves that the headers of its journal and the continuation before it were durable.
- Memory is bounded by one segment and its mirror.
"""

from __future__ import annotations

from collections.abc import Iterator

from cxlfs.errors import CorruptionError
from cxlfs.format import journal_chain, journal_reader, layout, operations, segments
from cxlfs.format.journal_reader import BadCopy, SegmentReader, SegmentScan
from cxlfs.format.roots import Root
from cxlfs.format.segments import SegmentHeader
from cxlfs.format.superblock import Superblock
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import Finding, make
from cxlfs.verify.media_passes import header_problem, headers_of_journal

RECORDS_AT_ONCE = 128
_RESTARTS_MAX = 3


def check_journal(context: Context) -> Steps:
    """Starts again when a mounted store has begun a new journal meanwhile."""
    told: set[tuple[str, int | None]] = set()
    for _ in range(_RESTARTS_MAX):
        if context.live:
            context.read_roots()
        root = context.newest
        block = context.superblock
        if root is None or block is None:
            return
        for step in _Pass(context, block, root).run():
            if isinstance(step, Finding):
                if (step.id, step.media_offset) in told:
                    continue
                told.add((step.id, step.media_offset))
            yield step
        if not context.is_superseded(root):
            return


class _Pass:
    """One attempt, under one newest root."""

    def __init__(self, context: Context, block: Superblock, root: Root) -> None:
        self.context = context
        self.block = block
        self.root = root
        self.records = 0

    def run(self) -> Steps:
        yield from self._current()
        fallback = self.context.fallback
        if fallback is not None and self.context.keeps_fallback():
            yield from self._fallback(fallback)
        yield Amount(self.records, self.records)

    # --- the journal in use -----------------------------------------------------------------

    def _current(self) -> Steps:
        header = self._first_segment(self.root)
        if header is None:
            if self.root.journal_segment is not None:
                offset = self.block.segment_offset(self.root.journal_segment)
                message = f"no header of journal {self.root.journal_epoch} is left"
                yield make("journal-lost", message, media_offset=offset)
            return
        if self.context.live:
            yield from self._live_segments(header)
            return
        lsn = self.root.image_lsn + 1
        headers = segments.read_all(self.context.media, self.block)
        before: SegmentScan | None = None
        while header is not None:
            reader = self._reader(header, lsn)
            yield from self._records(reader, fenced_lsn=0)
            scan = reader.scan
            if scan.last_lsn >= header.first_lsn:
                yield from self._way_to(header, before)
            if scan.lost_lsn is not None:
                yield self._lost(reader, scan.lost_lsn)
                return
            if scan.unknown_type is not None:
                yield _unknown(scan, self.block.segment_offset(header.index) + scan.end)
                return
            lsn, before = scan.last_lsn + 1, scan
            header = journal_chain.find_next(self.context.media, self.block, headers, scan)

    def _live_segments(self, header: SegmentHeader | None) -> Steps:
        """Of a mounted store it is known how far the journal reaches, and what is durable."""
        store = self.context.store()
        journal = None if store is None else store.volume.journal
        if journal is None:
            return
        epoch, end = journal.header.epoch, layout.SEGMENT_HEADER_BYTES + journal.used_bytes
        last_lsn, fenced_lsn = journal.last_lsn, journal.fenced_lsn
        headers = segments.read_all(self.context.media, self.block)
        before: SegmentScan | None = None
        while header is not None and header.epoch <= epoch:
            newest = header.epoch == epoch
            reader = self._reader(header, header.first_lsn, end=end if newest else None)
            yield from self._records(reader, fenced_lsn=fenced_lsn)
            lsn = reader.scan.last_lsn + 1
            if self.context.is_superseded(self.root):
                return
            yield from self._way_to(header, before)
            if newest:
                if lsn <= last_lsn:
                    yield self._lost(reader, lsn)
                return
            before = reader.scan
            header = journal_chain.find_next(self.context.media, self.block, headers, before)
            if header is None:
                yield self._lost(reader, lsn)

    # --- the journal that is kept -----------------------------------------------------------

    def _fallback(self, fallback: Root) -> Steps:
        """From the fallback image on, journals lead to the newest image."""
        lsn, goal = fallback.image_lsn + 1, self.root.image_lsn
        header = self._first_segment(fallback)
        epoch = fallback.next_epoch - 1 if header is None else header.epoch
        headers = segments.read_all(self.context.media, self.block)
        if header is None and fallback.journal_segment is None:
            header = journal_reader.find_successor(headers, after_epoch=epoch, first_lsn=lsn)
        before: SegmentScan | None = None
        while header is not None and lsn <= goal:
            if self.context.is_superseded(self.root):
                return
            reader = self._reader(header, lsn)
            yield from self._records(reader, fenced_lsn=0)
            yield from self._way_to(header, before)
            lsn, before = reader.scan.last_lsn + 1, reader.scan
            header = journal_chain.find_next(self.context.media, self.block, headers, before)
        if before is not None and lsn > goal:
            yield from _bad_last_copies(before, self._first_segment(self.root))
        if lsn <= goal and not self.context.is_superseded(self.root):
            offset = self.block.segment_offset(fallback.image_segments[0])
            message = (
                f"root {fallback.generation} is kept as a fallback, but its journal ends "
                f"before record {lsn} of {goal}"
            )
            yield make("fallback-journal-incomplete", message, media_offset=offset)

    def _way_to(self, header: SegmentHeader, before: SegmentScan | None) -> Steps:
        """Check what leads from the journal ``before`` to a journal that holds a record.

        ``before`` is None if a root names the journal.
        """
        if before is None or self.context.is_superseded(self.root):
            return
        yield from _bad_last_copies(before, header)
        for wanted in headers_of_journal(header):
            problem = header_problem(self.context.media, self.block, wanted)
            if problem is not None:
                name = ("primary", "mirror")[wanted.copy_number]
                message = f"header of journal segment {wanted.index} ({name}): {problem}"
                offset = self.block.segment_offset(wanted.index)
                yield make("journal-header-damaged", message, media_offset=offset)

    # --- records ----------------------------------------------------------------------------

    def _first_segment(self, root: Root) -> SegmentHeader | None:
        if root.journal_segment is None or root.journal_mirror is None:
            return None
        return journal_reader.read_header(
            self.context.media,
            self.block,
            root.journal_segment,
            root.journal_mirror,
            root.journal_epoch,
        )

    def _reader(self, header: SegmentHeader, lsn: int, end: int | None = None) -> SegmentReader:
        return SegmentReader(
            self.context.media, self.block, header, expected_lsn=lsn, compare=True, end=end
        )

    def _records(self, reader: SegmentReader, *, fenced_lsn: int) -> Steps:
        """Read them all; ``fenced_lsn``: of the last one that is known to be durable."""
        for record in reader:
            self.records += 1
            fenced_lsn = max(fenced_lsn, record.fenced_lsn)
            try:
                operations.decode(record.payload, record.operation_count, record.media_offset)
            except CorruptionError as error:
                message = f"record {record.lsn}: {error.message}"
                yield make("journal-record-malformed", message, media_offset=record.media_offset)
            if self.records % RECORDS_AT_ONCE == 0:
                yield Amount(self.records, 0)
                self.context.require_open()
        yield from _bad_copies(reader.scan.bad_copies, fenced_lsn)

    def _lost(self, reader: SegmentReader, lsn: int) -> Finding:
        offset = self.block.segment_offset(reader.scan.header.index) + reader.scan.end
        message = f"record {lsn} was durable, and is damaged in both copies"
        return make("journal-record-lost", message, media_offset=offset)


def _unknown(scan: SegmentScan, media_offset: int) -> Finding:
    message = f"record {scan.last_lsn + 1} has the unknown type {scan.unknown_type}"
    return make("journal-record-malformed", message, media_offset=media_offset)


def _bad_last_copies(scan: SegmentScan, following: SegmentHeader | None) -> Iterator[Finding]:
    """Check the end of a journal that ``following`` continues (None: the store was closed).

    If one opening wrote both journals, it made every record durable. Another opening, after a
    crash, leaves the last records as they are: one copy may be torn.
    """
    if following is None or following.nonce == scan.header.nonce:
        yield from _bad_copies(scan.bad_copies, scan.last_lsn)
    for bad in scan.bad_continuations:
        name = ("primary", "mirror")[bad.copy_number]
        message = f"the continuation of journal {scan.header.epoch} is damaged in the {name} copy"
        yield make("journal-copy-damaged", message, media_offset=bad.media_offset)


def _bad_copies(found: list[BadCopy], fenced_lsn: int) -> Iterator[Finding]:
    for bad in found:
        name = ("primary", "mirror")[bad.copy_number]
        if bad.contradicts:
            message = f"record {bad.lsn}: the copies are valid but differ"
            yield make("journal-copies-contradict", message, media_offset=bad.media_offset)
        elif bad.lsn <= fenced_lsn:
            message = f"record {bad.lsn} is damaged in the {name} copy"
            yield make("journal-copy-damaged", message, media_offset=bad.media_offset)
