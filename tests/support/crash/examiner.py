"""One media on which image after image of a walk is recovered, judged, and undone.

An image is judged in two executions, each beginning with nothing but the media:

1. *recovery*: the production code opens the store; everything a user can see is taken down;
2. *tail*: a second opening must show the same; verify must find nothing; then files are created,
   overwritten and renamed, and everything is deleted: no byte may stay behind.

Both are remembered by what they read (:mod:`.footprint`); where a recovery reads journals, by what
the reader made of them (:mod:`.readings`). An outcome is used again only where what decided it is
the same, so that every distinct image is judged. One image in ``IN_FULL_EVERY`` is recovered even
so: it must come to the outcome that was remembered, and verify runs right behind the recovery.
There it reads what the crash left of the old journal too, which differs in every torn image.

Before one recovery in ``READER_EVERY``, the reader of docs/ must say of the image what a read-only
opening says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from cxlfs.media import SimulatedMedia
from cxlfs.media.crash import WORD_BYTES, CrashCursor, EventLog, Indexes, InFlight, Mask, Words
from cxlfs.native import EventKind
from cxlfs.native.extents import Engine
from cxlfs.store import Store
from cxlfs.store.hidden import is_unlisted
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.verify import run_passes
from tests.support.crash.footprint import Answers, Durable, Memory, words_read
from tests.support.crash.readings import Question, Reading, ReadingMedia
from tests.support.crash.tape import State, difference, recovered_state
from tests.support.crash.world import WORLD
from tests.support.reader import contradiction
from tests.support.stores import write_file

STAGE_RECOVERY = 100
STAGE_TAIL = 200
IN_FULL_EVERY = 32
READER_EVERY = 64
"""A reading takes 24 ms, of which the reader's checksums in NumPy are most. 1: all recoveries."""
History = Mapping[tuple[int, int], tuple[bytes, bytes]]
"""Name and content of each row, by its key."""
_MADE, _MOVED = b"\xffmade afterwards", b"\xffmoved afterwards"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What an image came to: a problem, or the state that recovery showed."""

    state: State | None
    problem: str | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Tail:
    """What followed the recovery to ``state``; what it read, and what the recovery had stored."""

    state: State
    problem: str | None
    read: Mask
    stored_before: Mask


@dataclasses.dataclass(slots=True)
class Work:
    """How often what was done, images apart."""

    examined: int = 0
    recoveries: int = 0
    tails: int = 0
    verifications: int = 0
    readings: int = 0


class Examiner:
    """Invariant: between examinations the media equals ``cursor.durable``."""

    def __init__(self, cursor: CrashCursor, past: History | None = None) -> None:
        self.cursor = cursor
        self.past = past or {}
        """What rows of history say, if they come back."""
        nothing = cursor.image(cursor.in_flight().none())
        self.media = ReadingMedia(cursor.size_bytes, cursor.granularity, image=nothing)
        self.media.reads = []
        self.media.readings = []
        self.words: Words = np.frombuffer(self.media.unguarded_memory(), dtype="<u8")
        cursor.drain_settled()
        self.durable = Durable(cursor.durable)
        self._memories: dict[int, tuple[Memory[Outcome], Memory[_Tail]]] = {}
        self.relevant: Mask = np.zeros(len(self.words), dtype=np.bool_)
        """Words that some recovery has read."""
        self.work = Work()

    def close(self) -> None:
        """Give the memory back."""
        self.words = np.zeros(0, dtype="<u8")
        self.media.close()

    def advance(self, event_index: int) -> InFlight:
        """Walk on; returns what is in flight there."""
        self.cursor.advance(event_index)
        settled = self.cursor.drain_settled()
        for first, end in settled:
            self.words[first:end] = self.cursor.durable[first:end]
        self.durable.settle(settled)
        return self.cursor.in_flight()

    # --- one image --------------------------------------------------------------------------

    def examine(self, indexes: Indexes, values: Words, depth: int = 0) -> Outcome:
        """Judge the image in which ``indexes`` have ``values``. ``depth``: of how many recoveries
        that were cut off it is the successor; each has its own time and random numbers.
        """
        if depth not in self._memories:
            self._memories[depth] = Memory(self.durable), Memory(self.durable)
        outcomes, tails = self._memories[depth]
        change = self.durable.change(indexes, values)
        with self.image_of(indexes, values):
            known = outcomes.recall(indexes, change, self._answers())
            self.work.examined += 1
            in_full = self.work.examined % IN_FULL_EVERY == 0
            if known is not None and (known.problem is not None or not in_full):
                return known
            complaint = self._ask_reader()
            if complaint is not None:
                return Outcome(None, complaint)
            outcome = self._recover(depth)
            read = words_read(self.media.reads, len(self.words))
            self.relevant |= read
            for reading in self.media.readings:
                self._looked_at(reading)
            if outcome.state is not None:
                tail = self._tail(outcome.state, indexes, tails, depth, verify=in_full)
                outcome = Outcome(outcome.state, tail.problem)
                read |= tail.read & ~tail.stored_before
            readings = [(reading.question, reading.answer) for reading in self.media.readings]
            outcomes.remember(read, indexes, change, outcome, readings)
        if known is not None and (known.state, known.problem) != (outcome.state, outcome.problem):
            return Outcome(None, "equal words and equal records came to another outcome")
        return outcome

    def _answers(self) -> Answers:
        """Asks the image that is there now, each question once."""
        known: dict[Question, bytes] = {}

        def answer(question: Question) -> bytes:
            if question not in known:
                reading = question.ask(self.media)
                self._looked_at(reading)
                known[question] = reading.answer
            return known[question]

        return answer

    def _looked_at(self, reading: Reading) -> None:
        for offset, length in reading.words:
            end = -(-(offset + length) // WORD_BYTES)
            self.relevant[offset // WORD_BYTES : end] = True

    def log_of_recovery(self, indexes: Indexes, values: Words, depth: int = 0) -> bytes:
        """What a recovery of that image stores, writes back and fences, as the recorder's log."""
        with self.image_of(indexes, values):
            self._recover(depth)
            return self.media.recorded()

    @contextlib.contextmanager
    def image_of(self, indexes: Indexes, values: Words) -> Iterator[SimulatedMedia]:
        """The media as that image, with an empty log; afterwards as it was."""
        self.words[indexes] = values
        self.media.record(on=True)
        self.media.reads.clear()
        self.media.readings.clear()
        try:
            yield self.media
        finally:
            self._undo(indexes)

    def _ask_reader(self) -> str | None:
        """What the reader of docs/ and the production code say differently of this image."""
        if self.work.recoveries % READER_EVERY != READER_EVERY // 4:
            return None
        self.work.readings += 1
        image = bytes(self.media.unguarded_memory())
        copy = SimulatedMedia(len(image), self.media.granularity, image=image)
        try:
            return contradiction(copy, image)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            return f"the reader: {type(error).__name__}: {error}"
        finally:
            copy.close()

    def _recover(self, depth: int) -> Outcome:
        self.work.recoveries += 1
        WORLD.enter(STAGE_RECOVERY + depth)
        self.media.told_apart = True
        try:
            store = _open(self.media)
            if store.read_only or store.recovery.lost or store.recovery.problems:
                why = f"{store.read_only_reason} {store.recovery.problems}"
                return Outcome(None, f"recovery complains: {why}")
            found = recovered_state(store)
            _check_history(store, self.past)
            store.abandon()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            return Outcome(None, f"recovery: {type(error).__name__}: {error}")
        finally:
            self.media.told_apart = False
        return Outcome(found, None)

    def _tail(
        self, state: State, indexes: Indexes, tails: Memory[_Tail], depth: int, *, verify: bool
    ) -> _Tail:
        """What follows, over the media as recovery left it."""
        stored = self._stored()
        problem = None
        if verify:
            self.work.verifications += 1
            problem = _verify(self.media)
        changed = np.union1d(indexes, np.flatnonzero(stored))
        change = self.durable.change(changed, self.words[changed])
        known = tails.recall(changed, change)
        if known is not None and known.state == state and problem is None:
            return dataclasses.replace(known, stored_before=stored)
        self.work.tails += 1
        self.media.reads.clear()
        WORLD.enter(STAGE_TAIL + depth)
        try:
            problem = problem or _tail(self.media, state)
        except Exception as error:  # noqa: BLE001 - as above
            problem = f"afterwards: {type(error).__name__}: {error}"
        read = words_read(self.media.reads, len(self.words))
        tail = _Tail(state, problem, read, stored)
        tails.remember(read, changed, change, tail)
        return tail

    def _stored(self) -> Mask:
        """Words that were stored as a whole since the image was made."""
        stored = np.zeros(len(self.words), dtype=np.bool_)
        for kind, _thread, offset, length in EventLog(self.media.recorded()).entries:
            if kind in (EventKind.STORE, EventKind.COPY):
                stored[-(-offset // WORD_BYTES) : (offset + length) // WORD_BYTES] = True
        return stored

    def _undo(self, indexes: Indexes) -> None:
        durable = self.cursor.durable
        self.words[indexes] = durable[indexes]
        for first, end in EventLog(self.media.recorded()).stored_words():
            self.words[first:end] = durable[first:end]
        self.media.record(on=True)


# --- executions -----------------------------------------------------------------------------


def _open(media: SimulatedMedia) -> Store:
    store = Store.open(media)
    if isinstance(media, ReadingMedia):
        _note_extents(media, store.volume.engine)
    return store


def _check_history(store: Store, past: History) -> None:
    """A row that comes back says what it said before. Raises AssertionError, CorruptionError."""
    for row in store.past:
        if row.archived is None:
            continue  # recovery has taken something back by now
        content = b"" if row.content is None else bytes(row.content.read(0, row.size))
        assert past.get(row.key) == (row.name, content), f"history has another {row.name!r}"


def _note_extents(media: ReadingMedia, engine: Engine) -> None:
    """What C may read without asking Python: every extent that is known."""
    infos = engine.list()
    media.reads.extend(zip(infos["media_offset"].tolist(), infos["length"].tolist(), strict=True))


def _verify(media: SimulatedMedia, store: Store | None = None) -> str | None:
    findings = list(run_passes(media, structure_only=False, store=store))
    return f"verify finds {findings}" if findings else None


def _tail(media: SimulatedMedia, found: State) -> str | None:
    """See the module; None when all is well."""
    store = _open(media)
    if store.read_only or store.recovery.lost or store.recovery.problems:
        return f"a second opening complains: {store.read_only_reason} {store.recovery.problems}"
    again = recovered_state(store)
    if again != found:
        return f"a second opening differs: {difference(again, found)}"
    problem = _verify(media)
    if problem is not None:
        return f"after a second opening {problem}"
    use(store)
    store.close()
    return None


def use(store: Store) -> None:
    """Create, overwrite, rename; delete everything: no byte may be left. Raises AssertionError."""
    before = store.statfs().free_bytes
    ino = write_file(store, 1, _MADE, b"first")
    write_file(store, 1, _MADE, b"second" * 1000)
    store.rename(1, _MADE, 1, _MOVED)
    assert store.lookup(1, _MOVED).ino == ino, "a rename lost the file"
    assert store.lookup(1, _MOVED).size == 6000, "an overwrite has another size"
    store.unlink(1, _MOVED)
    free = store.statfs().free_bytes
    assert free == before, f"{before - free} bytes leaked by create and delete"
    delete_all(store, 1)
    store.units.clock = lambda: math.inf  # where a policy makes units, the removal was one
    while store.units.maintain():
        pass
    for uid in store.pins.users():
        for pin in store.pins.of_user(uid):
            store.pins.remove(uid, pin.name)
    while store.pins.step():
        pass
    place = store.aside.directory()
    if place is not None:
        delete_all(store, place.ino)
        store.remove_directory(1, ASIDE_NAME)
    store.past.forget_all()
    volume = store.volume
    volume.rollover()
    volume.rollover()
    assert volume.engine.statistics().extents == 0, "extents are left in an empty store"
    kept = {*volume.current.segments, *volume.fallback.segments}
    space = volume.space
    used = {index for index, state in enumerate(space.states) if state}
    lost = {index for index in used - kept if not space.is_open(index)}
    assert not lost, f"segments {lost} leaked"


def delete_all(store: Store, ino: int) -> None:
    for name, child in list((store.namespace.get(ino).entries or {}).items()):
        if is_unlisted(store.namespace.get(ino), name):
            continue  # open units need what lies there
        if store.namespace.get(child).entries is not None:
            delete_all(store, child)
            store.remove_directory(ino, name)
        else:
            store.unlink(ino, name)
