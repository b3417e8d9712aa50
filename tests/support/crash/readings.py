"""What a recovery reads of journals, told by what the reader makes of it instead of by its words.

A torn record is rejected whichever of its words are missing. The executions over all such images
are the same from there on, but each has other words under its footprint. So the production code's
reader runs on every image, and what it came to (the records, where they end, what it says of bad
copies) stands for the words that it looked at. That is a tenth of a recovery.

Never: for a reader that compares copies or is left half-way, nor behind the first store of an
execution: there the words themselves count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator

from cxlfs.format import journal_reader
from cxlfs.format.journal_reader import RecordBatch, SegmentReader
from cxlfs.format.segments import SegmentHeader
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media, SimulatedMedia
from tests.support.crash.footprint import Ranges


class ReadingMedia(SimulatedMedia):
    """Notes what is read through it, and which extents an engine may read past it."""

    reads: Ranges
    readings: list[Reading]
    told_apart: bool = False
    """Whether what readers of journals read goes to ``readings`` instead of ``reads``."""

    def _read_into(self, offset: int, buffer: object) -> None:
        """All that read bytes come by here."""
        self.reads.append((offset, len(buffer)))  # type: ignore[arg-type]
        super()._read_into(offset, buffer)

    def crc32c(self, offset: int, length: int, seed: int = 0) -> int:
        self.reads.append((offset, length))
        return super().crc32c(offset, length, seed)

    @contextlib.contextmanager
    def aside(self) -> Iterator[Ranges]:
        """Meanwhile what is read is noted in another list."""
        before, self.reads = self.reads, []
        try:
            yield self.reads
        finally:
            self.reads = before


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """Which segment of which store is read, and from where on."""

    block: Superblock
    header: SegmentHeader
    expected_lsn: int

    def ask(self, media: ReadingMedia) -> Reading:
        """What the production code's reader makes of it on ``media`` as it is."""
        reader = SegmentReader(media, self.block, self.header, expected_lsn=self.expected_lsn)
        with media.aside() as words:
            try:
                answer = _told(list(reader.batches()), reader)
            except Exception:  # noqa: BLE001 - the recovery runs into it, and that is judged
                answer = b""
        return Reading(self, answer, words)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """``answer``: a hash of all that a reader gives its caller. ``words``: what it looked at."""

    question: Question
    answer: bytes
    words: Ranges


def _told(batches: list[RecordBatch], reader: SegmentReader) -> bytes:
    """Batches as they are, and the scan; not what else lies in a window."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in batches:
        digest.update(b"batch")
        ends = batch.starts + batch.rows["length"].astype(batch.starts.dtype)
        for column in (batch.starts, batch.rows, batch.media_offsets, batch.copy_numbers):
            digest.update(column.tobytes())
        for start, end in zip(batch.starts.tolist(), ends.tolist(), strict=True):
            digest.update(batch.data[start:end])
    digest.update(repr(reader.scan).encode())
    return digest.digest()


class NotedReader(SegmentReader):
    """Takes the place of the production code's in a world where executions are remembered."""

    def __init__(
        self,
        media: Media,
        superblock: Superblock,
        header: SegmentHeader,
        *,
        expected_lsn: int,
        compare: bool = False,
        end: int | None = None,
    ) -> None:
        super().__init__(
            media, superblock, header, expected_lsn=expected_lsn, compare=compare, end=end
        )
        self._noted_media: ReadingMedia | None = None
        if isinstance(media, ReadingMedia) and end is None and not compare:
            self._noted_media = media
        self._question = Question(superblock, header, expected_lsn)

    def batches(self) -> Iterator[RecordBatch]:
        media = self._noted_media
        if media is None or not media.told_apart or media.recorded():
            yield from super().batches()
            return
        with media.aside() as words:
            try:
                batches = list(super().batches())
            except BaseException:
                media.readings.append(Reading(self._question, b"", words))
                raise
        media.readings.append(Reading(self._question, _told(batches, self), words))
        yield from batches

    def __iter__(self) -> Iterator[journal_reader.Record]:
        self._noted_media = None  # it may be left half-way
        return super().__iter__()


@contextlib.contextmanager
def noted_readers() -> Iterator[None]:
    """The store's recovery reads journals through :class:`NotedReader`."""
    before = journal_reader.SegmentReader
    journal_reader.SegmentReader = NotedReader  # type: ignore[misc]
    try:
        yield
    finally:
        journal_reader.SegmentReader = before  # type: ignore[misc]
