"""Simulated media: memory whose every store, write-back and fence is recorded, so that tests can
ask what a power cut at any moment could have left behind (:mod:`cxlfs.media.crash`).

Never: used by a running store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from cxlfs.media.crash import CrashCursor, EventLog, InFlight, Mask, Words
from cxlfs.media.memory import MemoryMedia
from cxlfs.native import Granularity


class SimulatedMedia(MemoryMedia):
    """``size_bytes`` of recorded memory; recording starts at once, over zeros or ``image``."""

    def __init__(
        self,
        size_bytes: int,
        granularity: Granularity = Granularity.LINE,
        *,
        image: bytes | memoryview | None = None,
    ) -> None:
        super().__init__(size_bytes, granularity, kind="simulated")
        self._base: bytes = b""
        if image is not None:
            self.load(image)
        self.restart()

    def restart(self) -> None:
        """Forget the log; what is in memory now counts as durable."""
        self._base = bytes(self.unguarded_memory())
        self.record(on=True)

    def load(self, image: bytes | memoryview) -> None:
        """Replace the first bytes by ``image``, unrecorded; call :meth:`restart` afterwards."""
        self.unguarded_memory()[: len(image)] = image

    def mark(self, tag: int) -> None:
        """Put a mark into the log, for instance before and after each operation of a workload."""
        self.record_mark(tag)

    def image(self) -> bytes:
        """What the processor sees: the content had every store become durable."""
        return bytes(self.unguarded_memory())

    def events(self) -> EventLog:
        """The log since the last :meth:`restart`."""
        return EventLog(self.recorded())

    def cursor(self) -> CrashCursor:
        """A walk over the log so far, from its beginning."""
        return CrashCursor(self._base, self.events(), self.granularity)

    def crash_image(
        self, event_index: int, choose: Callable[[InFlight], Mask] | None = None
    ) -> bytes:
        """One image of a power cut after the first ``event_index`` events. ``choose`` picks what
        of the words in flight became durable; None: nothing of them.
        """
        cursor = self.cursor()
        cursor.advance(event_index)
        in_flight = cursor.in_flight()
        mask = choose(in_flight) if choose is not None else in_flight.none()
        return cursor.image(mask)


class CrashTarget:
    """One media that shows image after image of a walk, without copying a whole image each time.

    ``with target.crashed(mask) as media:`` patches the words chosen into the media; on leaving,
    those words and everything that was stored meanwhile (recovery stores too) are put back.
    Invariant: between uses the media equals ``cursor.durable``.
    """

    def __init__(self, cursor: CrashCursor) -> None:
        self.cursor = cursor
        self.media = SimulatedMedia(
            cursor.size_bytes, cursor.granularity, image=cursor.image(cursor.in_flight().none())
        )
        self._words: Words = np.frombuffer(self.media.unguarded_memory(), dtype="<u8")
        cursor.drain_settled()

    def close(self) -> None:
        """Give the memory back."""
        self._words = np.zeros(0, dtype="<u8")
        self.media.close()

    def advance(self, event_index: int) -> InFlight:
        """Walk on, and bring the media along; returns what is in flight there."""
        self.cursor.advance(event_index)
        for first, end in self.cursor.drain_settled():
            self._words[first:end] = self.cursor.durable[first:end]
        return self.cursor.in_flight()

    @contextlib.contextmanager
    def crashed(self, in_flight: InFlight, mask: Mask) -> Iterator[SimulatedMedia]:
        """The media as a power cut left it with the words of ``mask``; its log starts empty.

        Do not ask it for :meth:`SimulatedMedia.cursor`: its base is not kept (that would copy the
        image); use ``CrashCursor(base, media.events(), ...)`` with ``base`` from
        ``cursor.image(mask)`` to crash a recovery.
        """
        indexes, values = in_flight.patch(mask)
        self._words[indexes] = values
        self.media.record(on=True)
        try:
            yield self.media
        finally:
            durable = self.cursor.durable
            self._words[indexes] = durable[indexes]
            for first, end in self.media.events().stored_words():
                self._words[first:end] = durable[first:end]
            self.media.record(on=True)
