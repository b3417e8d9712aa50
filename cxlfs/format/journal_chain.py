"""Find the journal that continues another one.

Each journal has a header in both copies. The continuation at the end of the journal before it holds
the same header, in both copies too. Other modules read records (``journal_reader``) and decide what
damage means (``recovery``, ``verify``).

Invariants
- One good copy of these four is enough to read every record of a journal.
- A crash leaves continuations to journals that were never used. Such a journal has no good header
  and no record, and nothing goes on there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.format import journal_reader
from cxlfs.format.segments import SegmentHeader

if TYPE_CHECKING:
    from cxlfs.format.journal_reader import SegmentScan
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media


def find_next(
    media: Media, superblock: Superblock, headers: list[SegmentHeader], scan: SegmentScan
) -> SegmentHeader | None:
    """Return the primary header of the journal that continues another one, or None.

    Args:
        media: The media of the store.
        superblock: The superblock of the store.
        headers: Every good segment header of the store.
        scan: The scan of the other journal, which was read to its end.
    """
    found = journal_reader.find_successor(
        headers, after_epoch=scan.header.epoch, first_lsn=scan.last_lsn + 1
    )
    for named in scan.continuations:
        if found is not None and found.epoch >= named.epoch:
            break
        if is_used(media, superblock, named):
            return named
    return found


def is_used(media: Media, superblock: Superblock, header: SegmentHeader) -> bool:
    """True if the journal with this header has a record or a continuation."""
    reader = journal_reader.SegmentReader(media, superblock, header, expected_lsn=header.first_lsn)
    for _ in reader:
        return True
    return bool(reader.scan.continuations)
