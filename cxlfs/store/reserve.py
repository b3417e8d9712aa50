"""How many segments must stay free, so that metadata can grow and the cleaner can work.

Never here: how large metadata is (``volume``), who may take what is left (``space``).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING, Protocol

from cxlfs.format import layout
from cxlfs.store.rolling import JOURNAL_SEGMENTS, is_short

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.store.rolling import RolloverUnderWay

CLEANER_SEGMENTS = 1
"""Of the reserve, for moved data: what the cleaner fills before what it emptied is free."""
_SLACK_BYTES = 64 << 10


class Segments(Protocol):
    """Of one metadata set; it never changes."""

    @property
    def segments(self) -> Sized: ...

    @property
    def journal_segments(self) -> Sized: ...


class Reserve:
    """One for each volume."""

    def __init__(self, superblock: Superblock) -> None:
        self._segment_count = superblock.segment_count
        self._payload_bytes = superblock.segment_payload_bytes
        self._slack_bytes = _SLACK_BYTES if superblock.unit_bytes == layout.UNIT_BYTES else 1 << 10
        self._known: tuple[object, int] = (None, 0)
        """What was asked last, and the answer: each new file asks twice, and it stays the same as
        long as the sets do, and the next one needs as many segments.
        """

    def set_segments(self, image_bytes: int) -> int:
        """Upper bound of the segments of a metadata set with such an image."""
        image_bytes += image_bytes // 8 + self._slack_bytes
        return -(-image_bytes // self._payload_bytes) + 2

    def segments(
        self,
        image_bytes: int,
        wanted: int,
        current: Segments,
        fallback: Segments,
        running: RolloverUnderWay | None,
    ) -> int:
        """The next metadata set (``wanted``), what the two after it need beyond what they release,
        one journal more while a large image is made, and the cleaner's. All, when it is the limit.
        """
        if wanted - 2 > layout.IMAGE_SEGMENTS_MAX:
            return self._segment_count
        question = (current, fallback, wanted, is_short(image_bytes))
        if running is None and question == self._known[0]:
            return self._known[1]
        kept = (len(current.segments), len(fallback.segments))
        coming = since = 0
        if running is not None:
            since = len(current.journal_segments) - running.journals_before
            coming = kept[1] + len(running.dead)
            kept = (running.image_segments + since, kept[0] - since)
        growth = max(0, wanted - kept[0]) + max(0, wanted - kept[1])
        is_large = since <= JOURNAL_SEGMENTS and not is_short(image_bytes)
        extra = CLEANER_SEGMENTS + (JOURNAL_SEGMENTS if is_large else 0)
        reserve = max(wanted + growth + extra - coming, extra)
        if running is None:
            self._known = (question, reserve)
        return reserve
