"""Crashes of what comes after a crash: recoveries that are cut off, and daemons that are killed
before the power goes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import numpy as np

from cxlfs.media.crash import CrashCursor, EventLog, Indexes, InFlight, Mask, Words
from cxlfs.native import EventKind
from cxlfs.store import Store
from tests.support.crash.examiner import STAGE_RECOVERY
from tests.support.crash.runner import Judged, Limits, Result, Run, points
from tests.support.crash.tape import Tape, committed_state
from tests.support.crash.world import WORLD
from tests.support.stores import write_file

_EVENT = struct.Struct("=IIQQ")
_OTHER_THREAD = 1 << 31


class RecoveryRun(Run):
    """Every image is recovered, and the recovery is cut at each of its fences; with ``twice`` the
    recovery of what that leaves, too. Whatever is cut: the state is the one that the first recovery
    would have shown.
    """

    def __init__(
        self, tape: Tape, rng: random.Random, limits: Limits, *, twice: float = 0.0
    ) -> None:
        super().__init__(tape, rng, limits)
        self.twice = twice
        self.nested = 0
        self.nested_twice = 0

    def judge_image(self, indexes: Indexes, values: Words, judged: Judged) -> str | None:
        outcome = self.examiner.examine(indexes, values)
        problem = judged.problem(outcome)
        if problem is not None or outcome.state is None:
            return problem
        view = self.tape.view
        return self._cut_recovery(indexes, values, Judged([view(outcome.state)], view), 0)

    def _cut_recovery(
        self, indexes: Indexes, values: Words, judged: Judged, depth: int
    ) -> str | None:
        log = EventLog(self.examiner.log_of_recovery(indexes, values, depth))
        words = self.examiner.durable.words.copy()
        words[indexes] = values
        cursor = CrashCursor(words.tobytes(), log, self.tape.media.granularity)
        differs = indexes
        for event, _ in points(log):
            cursor.advance(event)
            differs = _and_settled(differs, cursor)
            in_flight = cursor.in_flight()
            for mask in few_masks(in_flight, self.rng):
                image = _differences(cursor, differs, *in_flight.patch(mask))
                problem = self._judge_nested(*image, judged, depth)
                if problem is not None:
                    return f"recovery {depth + 1} cut at its event {event}: {problem}"
        return None

    def _judge_nested(
        self, indexes: Indexes, values: Words, judged: Judged, depth: int
    ) -> str | None:
        durable = self.examiner.durable
        identity = durable.identity(durable.change(indexes, values))
        if identity in self.result.images:
            return None
        self.result.images.add(identity)
        self.nested += 1
        problem = judged.problem(self.examiner.examine(indexes, values, depth + 1))
        if problem is None and depth == 0 and self.rng.random() < self.twice:
            self.nested_twice += 1
            return self._cut_recovery(indexes, values, judged, 1)
        return problem


def few_masks(in_flight: InFlight, rng: random.Random) -> Iterator[Mask]:
    """Nothing, all, all but the last store, and random lines and words."""
    yield in_flight.none()
    if len(in_flight):
        yield in_flight.all()
        yield in_flight.until(int(in_flight.events[-1]))
        numbers, count = in_flight.groups(64)
        yield (np.frombuffer(rng.randbytes(count), dtype=np.uint8) < 128)[numbers]
        yield np.frombuffer(rng.randbytes(len(in_flight)), dtype=np.uint8) < 128


def _and_settled(indexes: Indexes, cursor: CrashCursor) -> Indexes:
    """``indexes`` and the words that became durable since the last call."""
    settled = [np.arange(first, end) for first, end in cursor.drain_settled()]
    return np.unique(np.concatenate([indexes, *settled]))


def _differences(
    cursor: CrashCursor, differs: Indexes, chosen: Indexes, content: Words
) -> tuple[Indexes, Words]:
    """An image of ``cursor`` as words that may differ from what another walk holds durable."""
    indexes = np.union1d(differs, chosen)
    values = cursor.durable[indexes]
    values[np.searchsorted(indexes, chosen)] = content
    return indexes, values


# --- daemons that are killed ----------------------------------------------------------------


def kill_then_cut(tape: Tape, rng: random.Random, limits: Limits, *, kills: int) -> Result:
    """The daemon is killed at some of the events (all it stored can be read, not all of it is
    durable), its successor recovers and saves a file, the power goes at any of its fences. Of
    ``limits`` the share counts, of the kills.
    """
    run = Run(tape, rng, limits)
    log = tape.media.recorded()
    ends = [0, *(end for end in _ends(log))]
    chosen = sorted(rng.sample(range(1, len(ends)), min(kills, len(ends) - 1)))
    try:
        finished = 0
        marks = [index for index, tag in run.log.marks()]
        for event in limits.share.of(chosen):
            run.examiner.advance(event)
            finished = sum(mark < event for mark in marks)
            run.result.points += 1
            problem = _one_kill(run, log[: ends[event]], event, finished)
            if problem is not None:
                run.fail(event, 0, f"killed at event {event}, {finished} verbs done: {problem}")
                break
    finally:
        run.result.work = run.examiner.work
        run.examiner.close()
    return run.result


def _one_kill(run: Run, log: bytes, event: int, finished: int) -> str | None:
    tape, examiner = run.tape, run.examiner
    in_flight = examiner.cursor.in_flight()
    indexes, values = in_flight.patch(in_flight.all())
    with examiner.image_of(indexes, values) as media:
        WORLD.enter(STAGE_RECOVERY)
        store = Store.open(media)
        opened = len(EventLog(media.recorded()))
        shown = tape.view(committed_state(store))
        write_file(store, 1, b"of the successor", b"durable" * 30)
        after = tape.view(committed_state(store))
        store.abandon()
        joined = EventLog(log + _by_another(media.recorded()))
    cursor = CrashCursor(tape.base, joined, tape.media.granularity)
    differs = np.zeros(0, dtype=np.int64)
    before = Judged(tape.allowed(finished), tape.view)
    durable = examiner.durable
    for place, _ in points(joined):
        if place < event:
            continue
        cursor.advance(place)
        differs = _and_settled(differs, cursor)
        then = place - event
        last = place == len(joined)
        judged = before if then < opened else Judged([after] if last else [shown, after], tape.view)
        flying = cursor.in_flight()
        for mask in few_masks(flying, run.rng):
            image = _differences(cursor, differs, *flying.patch(mask))
            run.result.images.add(durable.identity(durable.change(*image)))
            problem = judged.problem(examiner.examine(*image, depth=1))
            if problem is not None:
                return f"power cut at event {then} of the successor: {problem}"
    return None


def _ends(log: bytes) -> Iterator[int]:
    """Where each event of a log ends."""
    position = 0
    while position < len(log):
        kind, _thread, _offset, length = _EVENT.unpack_from(log, position)
        position += _EVENT.size
        if kind in (EventKind.STORE, EventKind.COPY):
            position += -(-length // 8) * 8
        yield position


def _by_another(log: bytes) -> bytes:
    """The same events by a thread of another process: its fences cover its own write-backs only."""
    changed = bytearray(log)
    position = 0
    for end in _ends(log):
        kind, thread, offset, length = _EVENT.unpack_from(log, position)
        _EVENT.pack_into(changed, position, kind, thread | _OTHER_THREAD, offset, length)
        position = end
    return bytes(changed)
