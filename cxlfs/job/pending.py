"""Checkpoints on their way: one thread takes them in the order in which they were begun, and what
went wrong with one is kept until somebody has seen it.

Never: says anything to other ranks, or knows how a checkpoint is saved.

Invariants
- One thread at a time, and one checkpoint at a time in it: none overtakes another.
- The thread lives while there is work, and is no daemon: the interpreter ends behind it. What it
  works for is not collected before.
- What a checkpoint was given (the snapshot) is let go of before there is room for another.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from cxlfs.errors import AbortedError, InvariantError, UndecidedError
from cxlfs.job.protocol import Aborted, Committed

log = logging.getLogger(__name__)

_Snapshot = TypeVar("_Snapshot")

NOT_BEGUN = "not begun"
"""How the reason of a rank begins that raised an error of before instead of saving."""


class PendingCheckpoint:
    """One checkpoint that was begun. All of it may be called from any thread."""

    def __init__(self, step: int, seconds: float, *, is_seen: bool = False) -> None:
        self.step = step
        self._seconds = seconds
        self._ended = threading.Event()
        self._outcome: object = None
        self._error: BaseException | None = None
        self._is_seen = is_seen

    def done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float | None = None) -> Committed | Aborted:
        """What ``distributed_checkpoint`` would have returned or raised; the next call then says no
        more of it. None: as long as the checkpointer's own calls wait.

        Raises UndecidedError, also where it is still in flight.
        """
        seconds = self._seconds if seconds is None else seconds
        if not self._ended.wait(seconds):
            raise still_in_flight(self.step, seconds)
        self._is_seen = True
        if self._error is not None:
            raise self._error
        if isinstance(self._outcome, Committed | Aborted):
            return self._outcome
        raise InvariantError(f"a checkpoint ended with {self._outcome}")

    def run(self, task: Callable[[], object]) -> None:
        """Keeps what it returns or raises."""
        try:
            self._outcome = task()
        except BaseException as error:  # which the next call raises
            log.warning("the checkpoint of step %d failed", self.step, exc_info=True)
            self._error = error.with_traceback(None)  # whose frames would hold the snapshot
        if isinstance(self._outcome, Aborted):
            log.warning("aborted: %s", self._outcome)
        self._ended.set()

    def unseen_failure(self) -> BaseException | None:
        """What nobody was told. A rank that did not begin has raised why: no other does for it."""
        if self._is_seen or not self.done():
            return None
        if self._error is not None:
            return self._error
        outcome = self._outcome
        if isinstance(outcome, Aborted):
            reasons = [(r, text) for r, text in outcome.reasons if not text.startswith(NOT_BEGUN)]
            if reasons:
                told = "; ".join(f"rank {rank}: {text}" for rank, text in reasons)
                return AbortedError(f"the checkpoint of step {self.step}: {told}")
        return None

    def see(self) -> None:
        self._is_seen = True


class InOrder:
    """What is in flight. ``begin`` and ``settle`` are called from one thread at a time."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: collections.deque[tuple[PendingCheckpoint, Callable[[], object]]] = (
            collections.deque()
        )
        self._in_flight = 0
        self._thread: threading.Thread | None = None
        self._unsettled: list[PendingCheckpoint] = []

    def begin(self, pending: PendingCheckpoint, task: Callable[[], object]) -> PendingCheckpoint:
        self._unsettled.append(pending)
        with self._changed:
            self._waiting.append((pending, task))
            self._in_flight += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cxlfs-checkpoint")
                self._thread.start()
        return pending

    def settle(self, in_flight_max: int, seconds: float) -> BaseException | None:
        """Waits until no more are in flight. The first failure that nobody has seen, with the
        others as its notes, or that the wait took too long; all of them count as seen then.
        """
        with self._changed:
            has_room = self._changed.wait_for(lambda: self._in_flight <= in_flight_max, seconds)
        failures = []
        for pending in self._unsettled:
            failure = pending.unseen_failure()
            if failure is not None:
                failures.append(failure)
                pending.see()
        self._unsettled = [pending for pending in self._unsettled if not pending.done()]
        if not has_room and self._unsettled:
            failures.append(still_in_flight(self._unsettled[0].step, seconds))
        if not failures:
            return None
        for other in failures[1:]:
            failures[0].add_note(f"and: {other}")
        return failures[0]

    def report(self) -> None:
        """To the log, what nobody can be told otherwise. Takes no lock: a collection may call it in
        any thread.
        """
        for pending in list(self._unsettled):
            failure = pending.unseen_failure()
            if not pending.done():
                log.error("the checkpoint of step %d was left in flight", pending.step)
            elif failure is not None:
                log.error("nobody asked how it ended: %s: %s", type(failure).__name__, failure)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                pending, task = self._waiting.popleft()
            pending.run(task)
            del pending, task
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()


def still_in_flight(step: int, seconds: float) -> UndecidedError:
    return UndecidedError(f"the checkpoint of step {step} is still in flight after {seconds:g} s")


def writing(
    save: Callable[[Path, _Snapshot], object], snapshot: Callable[[], _Snapshot]
) -> Callable[[Path], object]:
    """What saves the snapshot that is taken here; or raises, where it could not be."""
    try:
        taken = snapshot()
    except Exception as error:  # noqa: BLE001 - it is this rank's vote against
        return raising(error)
    return lambda directory: save(directory, taken)


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_given: object) -> None:
        raise error

    return fail
