"""A tape, cut at every fence and after every verb, in all the ways that the masks choose."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from cxlfs.media import Granularity
from cxlfs.media.crash import CrashCursor, EventLog, Indexes, InFlight, Mask, Words
from cxlfs.native import EventKind
from tests.support.crash.examiner import Examiner, Outcome, Work
from tests.support.crash.masks import Chooser
from tests.support.crash.tape import State, Tape, difference

T = TypeVar("T")
FAILURES_MAX = 3
"""Of one tape: the first ones tell."""


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """An image that was not judged well; ``image`` is its hash, ``event`` where it was cut."""

    event: int
    image: str
    problem: str


@dataclasses.dataclass(slots=True)
class Result:
    """Of one tape. ``images``: hashes of the distinct images judged."""

    points: int = 0
    images: set[int] = dataclasses.field(default_factory=set)
    work: Work = dataclasses.field(default_factory=Work)
    failures: list[Failure] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A part of the cuts of a tape: one in ``every``, from number ``first`` on.

    Invariants: all shares of one ``every`` are all cuts. No share is empty.
    """

    first: int = 0
    every: int = 1

    def of(self, cuts: Sequence[T]) -> Sequence[T]:
        """Return this share of ``cuts``, at least one of them."""
        return cuts[self.first % min(self.every, len(cuts)) :: self.every]


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Which cuts: this ``share`` of those at events from ``first_event`` on; ``headers``: every
    subset of the words of each record's header; ``random_masks`` of each kind; ``only``: report no
    image but that one; so many failures tell enough.
    """

    first_event: int = 0
    share: Share = Share()
    headers: bool = False
    random_masks: int = 32
    pairs_max: int = 400
    only: int | None = None
    failures_max: int = FAILURES_MAX


class Run:
    """One tape, one seed. :meth:`cut_everywhere`; subclasses do more with each image."""

    def __init__(self, tape: Tape, rng: random.Random, limits: Limits) -> None:
        self.tape = tape
        self.rng = rng
        self.limits = limits
        self.result = Result()
        self.log = tape.media.events()
        cursor = CrashCursor(tape.base, self.log, tape.media.granularity)
        self.examiner = Examiner(cursor, tape.past)
        self.page = tape.media.granularity is Granularity.PAGE
        self._headers_until = limits.first_event

    def cut_everywhere(self) -> Result:
        """Judge every image chosen; stops after ``failures_max`` failures."""
        try:
            for event, finished in self.limits.share.of(self._cuts()):
                self.result.points += 1
                self._cut(event, finished)
                if len(self.result.failures) >= self.limits.failures_max:
                    break
        finally:
            self.result.work = self.examiner.work
            self.examiner.close()
        return self.result

    def _cuts(self) -> list[tuple[int, int]]:
        """(events done, verbs finished) of each cut; the last one is at the end."""
        finished, cuts = 0, []
        for event, is_mark in points(self.log):
            finished += is_mark
            if event >= self.limits.first_event:
                cuts.append((event, finished))
        return cuts

    def _cut(self, event: int, finished: int) -> None:
        in_flight = self.examiner.advance(event)
        judged = Judged(self.tape.allowed(finished), self.tape.view)
        durable = self.examiner.durable
        seen: set[int] = set()
        for mask in self._masks(in_flight, event):
            indexes, values = in_flight.patch(mask)
            identity = durable.identity(durable.change(indexes, values))
            if identity in seen:
                continue
            seen.add(identity)
            problem = self.judge_image(indexes, values, judged)
            if problem is not None and self.limits.only in (None, identity):
                verb = self.tape.names[min(finished, len(self.tape.names) - 1)]
                where = f"{finished} verbs done, in {verb}, {mask.sum()} of {len(mask)} words"
                self.fail(event, identity, f"{where}: {problem}")
                break
        # The others had to be judged all the same: what recoveries read decides what is chosen.
        self.result.images |= seen if self.limits.only is None else seen & {self.limits.only}

    def judge_image(self, indexes: Indexes, values: Words, judged: Judged) -> str | None:
        """What is wrong with one image, if anything is."""
        return judged.problem(self.examiner.examine(indexes, values))

    def fail(self, event: int, identity: int, problem: str) -> None:
        self.result.failures.append(Failure(event, f"{identity:016x}", problem))

    def _masks(self, in_flight: InFlight, event: int) -> Iterator[Mask]:
        """What to try; grows with what recoveries turn out to read."""
        limits = self.limits
        chooser = Chooser(
            in_flight,
            self.rng,
            page=self.page,
            random_masks=limits.random_masks,
            pairs_max=limits.pairs_max,
        )
        yield from chooser.corners()
        if not len(in_flight):
            return
        varied = -1
        while (relevant := self.examiner.relevant[in_flight.words]).sum() > varied:
            varied = int(relevant.sum())
            yield from chooser.subsets(relevant)
        if limits.headers:
            yield from chooser.headers(self.log, self._headers_until)
            self._headers_until = event


class Judged:
    """Outcomes compared with the states allowed, each once."""

    def __init__(self, allowed: list[State], view: Callable[[State], State]) -> None:
        self._allowed = allowed
        self._view = view
        self._problems: dict[int, tuple[Outcome, str | None]] = {}

    def problem(self, outcome: Outcome) -> str | None:
        known = self._problems.get(id(outcome))
        if known is None:
            known = self._problems[id(outcome)] = outcome, self._compare(outcome)
        return known[1]

    def _compare(self, outcome: Outcome) -> str | None:
        if outcome.problem is not None:
            return outcome.problem
        assert outcome.state is not None
        seen = self._view(outcome.state)
        if seen in self._allowed:
            return None
        closest = min((difference(seen, state) for state in self._allowed), key=len)
        return f"the state is none of {len(self._allowed)}; from the closest: {closest}"


def points(log: EventLog) -> Iterator[tuple[int, bool]]:
    """(events done, whether a verb has just returned): before every fence, behind every mark, and
    at the end.
    """
    for index, entry in enumerate(log.entries):
        if entry[0] == EventKind.FENCE:
            yield index, False
        elif entry[0] == EventKind.MARK:
            yield index + 1, True
    yield len(log), False


def cut_everywhere(tape: Tape, rng: random.Random, limits: Limits | None = None) -> Result:
    """See :class:`Run`."""
    return Run(tape, rng, limits if limits is not None else Limits()).cut_everywhere()
