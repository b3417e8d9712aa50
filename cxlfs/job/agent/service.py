"""The life of an agent: it comes together with the others, and in rounds all of them do the same.

Never: what is done in a round (``orbax``, ``tending``); waits without a deadline.

Invariants
- Whatever fails, but what was asked for cannot be: it is told, with the next step, and the agents
  come together again.
- Nothing has to be put in order when an agent ends: it may be killed at any moment.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import NoReturn, Protocol

from cxlfs.errors import CxlfsError, JobEngineError, UndecidedError
from cxlfs.job.agent.events import Event, Tell, changes_only
from cxlfs.job.engines import Engine
from cxlfs.job.engines.rendezvous import Meeting, unheard

PAUSE_SECONDS = 1.0
"""Between two rounds."""
_PAUSE_SECONDS_MAX = 30.0
PATIENCE_SECONDS = 60.0
"""Until a service says that others are not heard. Who is busy for longer comes again."""


class Work(Protocol):
    """What is done in rounds."""

    def begin(self, engine: Engine) -> None: ...
    def report(self) -> bytes: ...
    def decide(self, told: list[bytes], *, is_last: bool) -> bytes: ...
    def carry_out(self, data: bytes) -> None: ...
    def end(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """``deadline_seconds``: how long others are waited for, at most; ``pause_seconds``: between
    rounds.
    """

    deadline_seconds: float
    pause_seconds: float = PAUSE_SECONDS


def serve(meeting: Meeting, work: Work, tell: Tell, pace: Pace) -> NoReturn:
    """Until it is ended from outside. Raises JobEngineError."""
    tell = changes_only(tell)
    patience_seconds = min(pace.deadline_seconds, PATIENCE_SECONDS)
    pace = dataclasses.replace(pace, deadline_seconds=patience_seconds)
    pause = pace.pause_seconds
    while True:
        try:
            engine = _joined(meeting, work, tell, pace)
            for number in itertools.count():
                _round(engine, work, number, pace, is_last=False)
                pause = pace.pause_seconds
                time.sleep(pause)
        except JobEngineError:
            raise
        except UndecidedError as error:  # who waits, waits where all meet
            tell(_told_of(error))
            time.sleep(pace.pause_seconds)
        except (CxlfsError, OSError) as error:
            tell(_told_of(error))
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS_MAX)


def serve_once(meeting: Meeting, work: Work, tell: Tell, pace: Pace) -> None:
    """What is to be done now. Raises UndecidedError (who was not there in time) and what the work
    raises.
    """
    tell = changes_only(tell)
    end = time.monotonic() + pace.deadline_seconds
    while True:
        try:
            engine = _joined(meeting, work, tell, pace)
            _round(engine, work, 0, pace, is_last=True)
            work.end()
            _leave(engine, pace)
        except UndecidedError as error:  # also: one came anew
            if time.monotonic() >= end:
                raise
            tell(_told_of(error))
            time.sleep(pace.pause_seconds)
        else:
            return


def _joined(meeting: Meeting, work: Work, tell: Tell, pace: Pace) -> Engine:
    engine = meeting.join(pace.deadline_seconds)
    work.begin(engine)
    size = engine.world().size
    tell(Event("together", f"agents that are together: {size}"))
    return engine


def _round(engine: Engine, work: Work, number: int, pace: Pace, *, is_last: bool) -> None:
    """Raises UndecidedError, and what the work raises."""
    world, key = engine.world(), f"round/{number}"
    engine.say(key, work.report(), to=(0,))
    if world.rank == 0:
        heard = engine.hear(key, range(world.size), pace.deadline_seconds)
        missing = [rank for rank in range(world.size) if rank not in heard]
        if missing:
            raise unheard(missing)
        told = [heard[rank] for rank in range(world.size)]
        engine.say(f"{key}/decided", work.decide(told, is_last=is_last))
    decided = engine.hear(f"{key}/decided", [0], pace.deadline_seconds)
    if 0 not in decided:
        raise unheard([0])
    for name in (f"round/{number - 1}", f"round/{number - 1}/decided"):
        engine.forget(name)
    work.carry_out(decided[0])


def _leave(engine: Engine, pace: Pace) -> None:
    """Who holds the key-value store ends last: others may have still to read in it."""
    world = engine.world()
    engine.say("left", b"", to=(0,))
    if world.rank == 0:
        engine.hear("left", range(world.size), pace.deadline_seconds)


def _told_of(error: CxlfsError | OSError) -> Event:
    if isinstance(error, CxlfsError):
        is_of_ranks = error.next_step == UndecidedError.default_next_step
        next_step = "none: the agents come together again" if is_of_ranks else error.next_step
        return Event("waiting", error.message, next_step)
    where = f"{error.filename}: " if error.filename else ""
    return Event("waiting", f"{where}{error.strerror}", "look at the directory and its mount")
