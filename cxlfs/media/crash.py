"""What a power cut may leave: walks the recorder's log and keeps, for every 8-byte word, the
content that is certain and the contents that are possible.

Never: touches a mapping; it works on copies and on the log.

Model (the weakest one that real hardware and kernels stay within)
- Each aligned 8-byte word is, on its own, what it was when it last was certain, or what any later
  store made of it. Stores of other words do not matter, not even of the same line, sector or page.
- LINE: a store is certain once some thread wrote back its line afterwards and that same thread
  then fenced; a copy (past the cache) once the thread that copied fenced.
- BYTE: a store or copy is certain once its thread fenced.
- PAGE: a fence (of any thread) makes certain whatever stands in the pages that were written back or
  copied to since the fence before; all other dirty pages may reach the disk early, in any order,
  and torn. To see sectors or pages whole, choose by groups of 512 or 4096 bytes.
- A word that is certain never goes back to what an earlier store made of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cxlfs.errors import invariant
from cxlfs.native import EventKind, Granularity

WORD_BYTES = 8
LINE_BYTES = 64
PAGE_BYTES = 4096

_EVENT = struct.Struct("=IIQQ")  # cxl_event
_STORES = (int(EventKind.STORE), int(EventKind.COPY))

Words = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
Indexes = npt.NDArray[np.int64]


class EventLog:
    """The recorder's log, taken apart: one array per field, one entry per event."""

    def __init__(self, log: bytes) -> None:
        # Plain lists beside the arrays: a walk takes one event at a time, where lists are faster.
        self.entries: list[tuple[int, int, int, int]] = []
        """(kind, thread, offset, length) of each event."""
        self._payloads: list[int] = []
        position = 0
        while position < len(log):
            entry = _EVENT.unpack_from(log, position)
            position += _EVENT.size
            self.entries.append(entry)
            self._payloads.append(position)
            if entry[0] in _STORES:
                position += -(-entry[3] // WORD_BYTES) * WORD_BYTES
        invariant(position == len(log), "the recorder's log ends inside an event")
        self._log = memoryview(log)
        columns = np.array(self.entries, dtype=np.uint64).reshape(-1, 4)
        self.kinds = columns[:, 0]
        self.threads = columns[:, 1]
        self.offsets = columns[:, 2]
        """Media offset in bytes; of a MARK its tag."""
        self.lengths = columns[:, 3]

    def __len__(self) -> int:
        return len(self._payloads)

    def payload(self, index: int) -> memoryview:
        """The bytes that a STORE or COPY brought; empty for other events."""
        kind, _, _, length = self.entries[index]
        start = self._payloads[index]
        return self._log[start : start + (length if kind in _STORES else 0)]

    def indexes(self, kind: EventKind) -> Indexes:
        """Where the events of one kind stand."""
        return np.flatnonzero(self.kinds == kind)

    def marks(self) -> list[tuple[int, int]]:
        """(event index, tag) of each mark."""
        return [(int(at), int(self.offsets[at])) for at in self.indexes(EventKind.MARK)]

    def stored_words(self) -> Iterator[tuple[int, int]]:
        """Word ranges [first, end) that stores and copies touched, in order."""
        for kind, _, offset, length in self.entries:
            if kind in _STORES:
                yield _words_of(offset, length)


@dataclass(frozen=True, slots=True)
class InFlight:
    """Words that may or may not have become durable, in the order of their stores. A word stored
    more than once stands here more than once: the last one chosen wins.
    """

    words: Indexes
    """Which word of the media (byte offset / 8)."""
    values: Words
    """The content the store gave it, all 8 bytes."""
    events: Indexes
    """Index of that store in the log."""

    def __len__(self) -> int:
        return len(self.words)

    def none(self) -> Mask:
        return np.zeros(len(self.words), dtype=np.bool_)

    def all(self) -> Mask:
        return np.ones(len(self.words), dtype=np.bool_)

    def until(self, event_index: int) -> Mask:
        """Everything stored before an event: memory that became durable in program order."""
        return self.events < event_index

    def groups(self, unit_bytes: int) -> tuple[Indexes, int]:
        """Number of the group of each word, and how many groups there are, where a group is what
        lies in one aligned unit: 8 words apart, 64 lines, 512 sectors, 4096 pages.
        """
        units, numbers = np.unique(self.words // (unit_bytes // WORD_BYTES), return_inverse=True)
        return numbers.reshape(-1).astype(np.int64), len(units)

    def choose_groups(self, unit_bytes: int, chosen: Mask) -> Mask:
        """The mask of the words in the groups that ``chosen`` (one flag for each group) names."""
        numbers, count = self.groups(unit_bytes)
        invariant(len(chosen) == count, f"{len(chosen)} flags for {count} groups")
        return np.asarray(chosen, dtype=np.bool_)[numbers]

    def patch(self, mask: Mask) -> tuple[Indexes, Words]:
        """The words that ``mask`` changes, each once, and what they become."""
        words, values = self.words[mask][::-1], self.values[mask][::-1]
        unique, last = np.unique(words, return_index=True)
        return unique, values[last]


@dataclass(slots=True)
class _Store:
    """A store or copy of which some words are not certain yet."""

    event: int
    thread: int
    is_copy: bool
    first: int
    values: Words
    open: Mask = field(init=False)
    """Words that are still in flight."""

    def __post_init__(self) -> None:
        self.open = np.ones(len(self.values), dtype=np.bool_)

    @property
    def end(self) -> int:
        return self.first + len(self.values)


class CrashCursor:
    """A walk over a log. ``position`` events have happened; moves forward only."""

    def __init__(self, base: bytes, log: EventLog, granularity: Granularity) -> None:
        """``base``: the media when the log began, all of it certain."""
        padded = base + bytes(-len(base) % WORD_BYTES)
        self.size_bytes = len(base)
        self.log = log
        self.granularity = granularity
        self.position = 0
        self.durable: Words = np.frombuffer(bytearray(padded), dtype="<u8")
        """Certain content of each word. Read it, do not write it."""
        self._current = self.durable.copy()
        self._stores: list[_Store] = []
        # Written back but not fenced: (thread, first word, end word, event of the write-back).
        self._written_back: list[tuple[int, int, int, int]] = []
        self._settled: list[tuple[int, int]] = []

    # ------------------------------------------------------------------------------------ walk

    def advance(self, event_index: int) -> None:
        """Let events happen until ``event_index`` of them have."""
        invariant(
            self.position <= event_index <= len(self.log),
            f"cannot walk from event {self.position} to {event_index} of {len(self.log)}",
        )
        for index in range(self.position, event_index):
            kind, thread, offset, length = self.log.entries[index]
            if kind in _STORES:
                self._on_store(index)
            elif kind == EventKind.WRITE_BACK:
                first, end = self._unit_range(offset, length)
                self._written_back.append((thread, first, end, index))
            elif kind == EventKind.FENCE:
                self._on_fence(index, thread)
        self.position = event_index

    def _unit_range(self, offset: int, length: int) -> tuple[int, int]:
        """Words of the lines or pages that a range touches."""
        unit = PAGE_BYTES if self.granularity == Granularity.PAGE else LINE_BYTES
        first = offset // unit * unit // WORD_BYTES
        end = -(-(offset + length) // unit) * unit // WORD_BYTES
        return first, min(end, len(self._current))

    def _on_store(self, index: int) -> None:
        kind, thread, offset, length = self.log.entries[index]
        is_copy = kind == EventKind.COPY
        first, end = _words_of(offset, length)
        start = offset - first * WORD_BYTES
        self._current[first:end].view(np.uint8)[start : start + length] = self.log.payload(index)
        values = self._current[first:end].copy()
        self._stores.append(_Store(index, thread, is_copy, first, values))
        if is_copy and self.granularity == Granularity.PAGE:
            self._written_back.append((thread, *self._unit_range(offset, length), index))

    def _on_fence(self, index: int, thread: int) -> None:
        if self.granularity == Granularity.PAGE:
            for _, first, end, _ in self._written_back:
                self._settle(first, end, index)
            self._written_back.clear()
        else:
            own = [entry for entry in self._written_back if entry[0] == thread]
            self._written_back = [entry for entry in self._written_back if entry[0] != thread]
            line = self.granularity == Granularity.LINE
            if line:
                for _, first, end, event in own:
                    self._settle(first, end, event)
            for store in self._stores:
                if store.thread == thread and (store.is_copy or not line):
                    self._settle(store.first, store.end, store.event + 1)
        self._stores = [store for store in self._stores if store.open.any()]

    def _settle(self, first: int, end: int, before: int) -> None:
        """Words [first, end) become certain: at least as new as the last store before an event."""
        changed = False
        for store in self._stores:
            if store.event >= before:
                break
            low, high = max(first, store.first), min(end, store.end)
            if low >= high:
                continue
            piece = slice(low - store.first, high - store.first)
            still_open = store.open[piece]
            self.durable[low:high][still_open] = store.values[piece][still_open]
            still_open[:] = False
            changed = True
        if changed:
            self._settled.append((first, end))

    # ---------------------------------------------------------------------------------- images

    def in_flight(self) -> InFlight:
        """What is not certain now. Stores that bring what is certain anyway are left out."""
        words, values, events = [], [], []
        for store in self._stores:
            open_words = np.flatnonzero(store.open)
            words.append(open_words + store.first)
            values.append(store.values[open_words])
            events.append(np.full(len(open_words), store.event, dtype=np.int64))
        if not words:
            empty = np.zeros(0, dtype=np.int64)
            return InFlight(empty, np.zeros(0, dtype=np.uint64), empty)
        return self._without_idle(
            np.concatenate(words), np.concatenate(values), np.concatenate(events)
        )

    def _without_idle(self, words: Indexes, values: Words, events: Indexes) -> InFlight:
        """Leave out versions equal to the version of the same word before them."""
        order = np.argsort(words, kind="stable")
        by_word, version = words[order], values[order]
        previous = np.empty_like(version)
        previous[1:] = version[:-1]
        begins = np.ones(len(by_word), dtype=np.bool_)
        begins[1:] = by_word[1:] != by_word[:-1]
        previous[begins] = self.durable[by_word[begins]]
        kept = np.sort(order[version != previous])
        return InFlight(words[kept], values[kept], events[kept])

    def image(self, mask: Mask) -> bytes:
        """A whole image with the words of ``mask`` (over :meth:`in_flight` now) durable."""
        words, values = self.in_flight().patch(mask)
        image = self.durable.copy()
        image[words] = values
        return image.tobytes()[: self.size_bytes]

    def drain_settled(self) -> list[tuple[int, int]]:
        """Word ranges in which ``durable`` changed since the last call."""
        settled, self._settled = self._settled, []
        return settled


def _words_of(offset: int, length: int) -> tuple[int, int]:
    """Words [first, end) that a byte range touches."""
    return offset // WORD_BYTES, -(-(offset + length) // WORD_BYTES)
