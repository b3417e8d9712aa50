"""What an execution read, and outcomes remembered by it.

The argument: time and random numbers are fixed (:mod:`.world`), so an execution depends on nothing
but the bytes that it reads. Another image with the same bytes in the same places must go the same
way, whatever stands elsewhere. A *footprint* is the set of words that one execution read; the key
of an image under it is a hash of those words. An outcome is remembered by footprint and key.

What readers of journals read is told apart (:mod:`.readings`): their answers are part of the key
in the place of their words.

Hashes are sums of mixed words modulo 2**64, so that the hash of a patched image costs only the
words patched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from cxlfs.media.crash import WORD_BYTES, Indexes, Mask, Words

_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

Ranges = list[tuple[int, int]]
"""(media offset, length) of each read, in any order."""
T = TypeVar("T")
Answers = Callable[[Any], bytes]
"""What an image answers to a question."""


def words_read(reads: Ranges, word_count: int) -> Mask:
    """One flag for each word of the media."""
    read = np.zeros(word_count, dtype=np.bool_)
    for offset, length in reads:
        read[offset // WORD_BYTES : -(-(offset + length) // WORD_BYTES)] = True
    return read


def mix(indexes: Indexes, values: Words) -> Words:
    """A hash of each word and its place (the finalizer of splitmix64)."""
    mixed = values + (indexes.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


class Durable:
    """The certain content of a walk, mixed. ``version`` changes whenever it does."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.version = 0
        self.mixed: Words = mix(np.arange(len(words)), words)
        self.total = int(self.mixed.sum())

    def settle(self, ranges: Iterable[tuple[int, int]]) -> None:
        """``words`` changed in word ranges [first, end)."""
        for first, end in ranges:
            before = int(self.mixed[first:end].sum())
            self.mixed[first:end] = mix(np.arange(first, end), self.words[first:end])
            self.total = (self.total + int(self.mixed[first:end].sum()) - before) & _MASK
            self.version += 1

    def change(self, indexes: Indexes, values: Words) -> Words:
        """What each word adds to a hash when it becomes ``values``."""
        return mix(indexes, values) - self.mixed[indexes]

    def identity(self, change: Words) -> int:
        """The hash of the whole image with such a change."""
        return (self.total + int(change.sum())) & _MASK


@dataclasses.dataclass(slots=True, eq=False)
class _Footprint(Generic[T]):
    """``outcomes``: by the hash of the words, then by the answers to ``questions``."""

    read: Mask
    questions: tuple[Any, ...]
    outcomes: dict[int, dict[tuple[bytes, ...], T]] = dataclasses.field(default_factory=dict)
    version: int = -1
    base: int = 0


class Memory(Generic[T]):
    """Outcomes of executions over images of one walk."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._footprints: dict[tuple[bytes, tuple[Any, ...]], _Footprint[T]] = {}

    def recall(self, indexes: Indexes, change: Words, answer: Answers | None = None) -> T | None:
        """The outcome of an image that is ``durable`` but for ``indexes``, if it is known."""
        for footprint in self._footprints.values():
            found = footprint.outcomes.get(self._key(footprint, indexes, change))
            if found is None:
                continue
            answers: tuple[bytes, ...] = ()
            for question in footprint.questions if answer is not None else ():
                answers += (answer(question),)
                if not any(known[: len(answers)] == answers for known in found):
                    break  # the next question would not have been asked
            outcome = found.get(answers)
            if outcome is not None:
                return outcome
        return None

    def remember(
        self,
        read: Mask,
        indexes: Indexes,
        change: Words,
        outcome: T,
        readings: Sequence[tuple[Any, bytes]] = (),
    ) -> None:
        """An execution over this image read the words ``read``, was told ``readings`` (question
        and answer of each), and came to ``outcome``.
        """
        questions = tuple(question for question, _ in readings)
        name = np.packbits(read).tobytes(), questions
        footprint = self._footprints.get(name)
        if footprint is None:
            footprint = self._footprints[name] = _Footprint(read, questions)
        answers = tuple(answer for _, answer in readings)
        footprint.outcomes.setdefault(self._key(footprint, indexes, change), {})[answers] = outcome

    def _key(self, footprint: _Footprint[T], indexes: Indexes, change: Words) -> int:
        if footprint.version != self._durable.version:
            footprint.base = int(self._durable.mixed[footprint.read].sum())
            footprint.version = self._durable.version
        return (footprint.base + int(change[footprint.read[indexes]].sum())) & _MASK
