"""Which words of those in flight reached the media: the choices that the campaign makes.

A *unit* is what is chosen as a whole: a cache line on line and byte media, a 512-byte sector on
page media. Units that recovery never looks at are not varied one by one: they are absent, present
or random together, because no choice among them can make a difference.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import numpy as np

from cxlfs.format import layout
from cxlfs.media.crash import WORD_BYTES, EventLog, InFlight, Mask
from cxlfs.native import EventKind

LINE_BYTES = 64
SECTOR_BYTES = 512
ALL_SUBSETS_MAX = 8
PREFIXES_MAX = SINGLES_MAX = 64
HEADER_WORDS = layout.RECORD_DTYPE.itemsize // WORD_BYTES
_MAGIC = layout.RECORD_MAGIC.to_bytes(4, "little")


class Chooser:
    """Draws masks for one cut; everything drawn depends on ``rng`` alone. ``random_masks`` of whole
    units, and as many of single words; of more than ``pairs_max`` pairs of units so many are drawn.
    """

    def __init__(
        self,
        in_flight: InFlight,
        rng: random.Random,
        *,
        page: bool,
        random_masks: int,
        pairs_max: int,
    ) -> None:
        self.in_flight = in_flight
        self.rng = rng
        self.random_masks = random_masks
        self.pairs_max = pairs_max
        self.unit_bytes = SECTOR_BYTES if page else LINE_BYTES
        self._groups, self.count = in_flight.groups(self.unit_bytes)

    # --- choosing ---------------------------------------------------------------------------

    def corners(self) -> Iterator[Mask]:
        """Nothing, everything, and memory that became durable in program order."""
        in_flight = self.in_flight
        yield in_flight.none()
        if not len(in_flight):
            return
        yield in_flight.all()
        events = np.unique(in_flight.events)
        if len(events) > PREFIXES_MAX:
            events = events[np.linspace(0, len(events) - 1, PREFIXES_MAX).astype(np.int64)]
        for event in events[1:].tolist():
            yield in_flight.until(event)

    def subsets(self, relevant: Mask) -> Iterator[Mask]:
        """Subsets of the units that hold a word of ``relevant``: all of them when they are few,
        else those of at most two, all but at most two, and random ones. The other units are there,
        are not, or are random.
        """
        units = np.unique(self._groups[relevant]).tolist()
        if len(units) <= ALL_SUBSETS_MAX:
            for size in range(len(units) + 1):
                for chosen in itertools.combinations(units, size):
                    yield self._units(units, chosen)
        else:
            for chosen in self._few(units):
                yield self._units(units, chosen)
                yield self._units(units, set(units).difference(chosen))
        for _ in range(self.random_masks):
            yield self._units(units, [unit for unit in units if self.rng.random() < 0.5])
            yield self._random_words(relevant)

    def _few(self, units: list[int]) -> Iterator[tuple[int, ...]]:
        yield ()
        alone = units if len(units) <= SINGLES_MAX else self.rng.sample(units, SINGLES_MAX)
        yield from ((unit,) for unit in alone)
        pairs = len(units) * (len(units) - 1) // 2
        if pairs <= self.pairs_max:
            yield from itertools.combinations(units, 2)
        else:
            for _ in range(self.pairs_max):
                first, second = self.rng.sample(units, 2)
                yield first, second

    def _units(self, units: list[int], chosen: Iterable[int]) -> Mask:
        flags = self._background()
        flags[units] = False
        flags[list(chosen)] = True
        return flags[self._groups]

    def _random_words(self, relevant: Mask) -> Mask:
        mask = self._background()[self._groups]
        draws = np.frombuffer(self.rng.randbytes(len(mask)), dtype=np.uint8) < 128
        mask[relevant] = draws[relevant]
        return mask

    def _background(self) -> Mask:
        """What becomes of units that nobody looks at."""
        kind = self.rng.randrange(3)
        if kind == 2:
            draws = np.frombuffer(self.rng.randbytes(self.count), dtype=np.uint8)
            return draws < 128
        return np.full(self.count, kind == 1, dtype=np.bool_)

    # --- headers of records -----------------------------------------------------------------

    def headers(self, log: EventLog, first_event: int) -> Iterator[Mask]:
        """For records stored since ``first_event``: at most two words of each header and all but at
        most two, all else of the record being there: of the first copy without the second, and of
        the second without the first one's header.
        """
        in_flight = self.in_flight
        stored: dict[bytes, Mask] = {}
        for event in np.unique(in_flight.events).tolist():
            kind, _thread, offset, length = log.entries[event]
            if event < first_event or kind != EventKind.STORE or length % layout.RECORD_ALIGN:
                continue
            payload = bytes(log.payload(event))
            if not payload.startswith(_MAGIC):
                continue
            first = offset // WORD_BYTES
            mine = in_flight.events == event
            header = mine & (in_flight.words < first + HEADER_WORDS)
            before = in_flight.until(event)
            if payload in stored:
                before = before & ~stored[payload]
            stored[payload] = header
            places = np.flatnonzero(header)
            for size in _few_or_most(len(places)):
                for chosen in itertools.combinations(places, size):
                    mask = before | (mine & ~header)
                    mask[list(chosen)] = True
                    yield mask


def _few_or_most(count: int) -> list[int]:
    """How many of so many: at most two, or all but at most two."""
    return sorted({*range(min(3, count + 1)), *range(max(count - 2, 0), count + 1)})
