"""When a checkpoint is due: after so many steps, or so many seconds, alike on all ranks.

Clocks differ, and a rank that saves alone waits for all the others. So rank 0's clock decides, and
not at each step: ranks *meet* at a step that they agreed on, there rank 0 tells whether a
checkpoint is due and at which step they meet next. In between nothing is said.

Never: waits without a deadline; uses a checkpointer's engine, which may be in use by what is in
flight.

Invariants
- Rank 0 waits for nobody; the others wait for it at a meeting alone.
- The next meeting is half of the steps ahead that are left at the pace since the last one, and at
  most twice as far as that one was: steps that turn up to twice as slow make no checkpoint late by
  more than one step. That is some 2 log2(steps between checkpoints) messages for each.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

from cxlfs.errors import JobConfigurationError, JobMessageError, UndecidedError
from cxlfs.job.checkpointer import DEADLINE_SECONDS_DEFAULT
from cxlfs.job.engines import Engine, engine_named
from cxlfs.plain import PlainError, fields, number, parse, truth

_MESSAGE_BYTES_MAX = 1 << 10
_KEYS_KEPT_MEETINGS = 1000
"""How many meetings a rank may be behind rank 0, which waits for nobody."""


def every(
    steps: int | None = None,
    seconds: float | None = None,
    *,
    engine: str | Engine = "auto",
    deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
    clock: Callable[[], float] = time.monotonic,
) -> Schedule:
    """A checkpoint every so many steps, or seconds, or what comes first of both. Made on all ranks
    alike; with ``seconds`` it makes an engine of its own (none that a Checkpointer has).

    Raises JobConfigurationError, JobEngineError.
    """
    if steps is None and seconds is None:
        raise JobConfigurationError("every how many steps, or seconds?")
    if (steps is not None and steps < 1) or (seconds is not None and not seconds > 0):
        raise JobConfigurationError("steps are 1 or more, and seconds more than none")
    if seconds is None:
        return Schedule(steps, None)
    made = engine_named(engine) if isinstance(engine, str) else engine
    return Schedule(steps, Meetings(seconds, made, deadline_seconds, clock))


class Schedule:
    def __init__(self, steps: int | None, meetings: Meetings | None) -> None:
        self._steps = steps
        self._meetings = meetings
        self._last: int | None = None

    def due(self, step: int) -> bool:
        """Asked once behind each step, on all ranks. Steps count from 0: every 10 steps means
        behind step 9, 19, ..., wherever the job began; if some are not asked about, behind the
        first that is.

        Raises UndecidedError (rank 0 was not heard), JobConfigurationError (another step than on
        rank 0), JobMessageError.
        """
        last, self._last = self._last, step
        went_back = last is not None and step <= last
        since = step - 1 if last is None or went_back else last
        is_due = self._steps is not None and (step + 1) // self._steps > (since + 1) // self._steps
        if self._meetings is None:
            return is_due
        if is_due:
            self._meetings.begin_anew()
        return self._meetings.due(step, at_once=went_back) or is_due


class Meetings:
    """The part of a schedule that goes by the clock of rank 0."""

    def __init__(
        self, seconds: float, engine: Engine, deadline_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._seconds = seconds
        self._engine = engine
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._leads = engine.world().rank == 0
        self._begun = clock()
        self._count = 0
        self._next_step = 0
        self._met: tuple[int, float] | None = None
        self._gap = 1

    def begin_anew(self) -> None:
        """A checkpoint is made for another reason."""
        self._begun = self._clock()

    def due(self, step: int, *, at_once: bool) -> bool:
        """``at_once``: all ranks went back to an earlier step, and meet there."""
        if step < self._next_step and not at_once:
            return False
        key = f"every/{self._count}"
        body = self._decide(step) if self._leads else None
        if body is not None:
            self._engine.say(key, body)
        found = self._engine.hear(key, [0], self._deadline_seconds).get(0)
        if found is None:
            raise UndecidedError(
                f"whether a checkpoint is due: not heard within {self._deadline_seconds:g} s: "
                "rank 0"
            )
        if self._leads and self._count >= _KEYS_KEPT_MEETINGS:
            self._engine.forget(f"every/{self._count - _KEYS_KEPT_MEETINGS}")
        self._count += 1
        its_step, is_due, self._next_step = _decode(found)
        if its_step != step:
            raise JobConfigurationError(
                f"rank 0 asks whether a checkpoint is due at step {its_step}, this rank at {step}",
                next_step="ask once behind each step, on all ranks",
            )
        return is_due

    def _decide(self, step: int) -> bytes:
        now = self._clock()
        is_due = now - self._begun >= self._seconds
        if is_due:
            self._begun = now
        left = self._begun + self._seconds - now
        if self._met is None or step <= self._met[0]:
            self._gap = 1
        else:
            pace = (now - self._met[1]) / (step - self._met[0])
            ahead = left / pace / 2 if pace > 0 else float("inf")
            self._gap = max(1, int(min(2 * self._gap, ahead)))
        self._met = step, now
        plain = {"step": step, "due": is_due, "next": step + self._gap}
        return json.dumps(plain, separators=(",", ":")).encode()


def _decode(data: bytes) -> tuple[int, bool, int]:
    try:
        found = fields(parse(data, _MESSAGE_BYTES_MAX), ("step", "due", "next"))
        return number(found["step"]), truth(found["due"]), number(found["next"])
    except PlainError as error:
        raise JobMessageError(f"not a message: {error}") from None
