"""One node's part for an Orbax job with multi-tier checkpoints: steps are agreed on, kept, copied
to other nodes, and given to the job when it begins again.

Never: the protocol of files (``orbax_files``), what follows from what was told (``rounds``).

Invariants
- What a job is given was kept by all agents: read whole, its copies made. None begins anew while
  there is a step anywhere.
- An agent that was begun again knows what it needs from the directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cxlfs.errors import (
    CxlfsError,
    InvariantError,
    JobConfigurationError,
    JobFilesError,
    JobTierError,
    NotRestoredError,
)
from cxlfs.job import files
from cxlfs.job.agent import rounds
from cxlfs.job.agent.events import Event, Tell
from cxlfs.job.agent.keeper import Keeper
from cxlfs.job.agent.orbax_files import KEPT, OrbaxDirectory
from cxlfs.job.agent.rounds import NOTHING, Decision, Report
from cxlfs.job.driver import reason_of
from cxlfs.job.engines import Engine
from cxlfs.job.protocol import Aborted, Attempt, Committed, Restored

KeeperOf = Callable[[Path, Engine], Keeper]
"""Of that directory, in that group."""


class OrbaxAgent:
    """``coordinator``: address of process 0 of the job, where it is to take its number from here.

    Raises OSError, JobFilesError.
    """

    def __init__(
        self, root: Path, rank: int, keeper_of: KeeperOf, tell: Tell, coordinator: str = ""
    ) -> None:
        self._directory = OrbaxDirectory(root, rank)
        self._rank = rank
        self._keeper_of = keeper_of
        self._tell = tell
        self._coordinator = coordinator
        self._keeper: Keeper | None = None
        self._kept = -1
        self._refused: set[int] = set()
        self._answered = ""
        self._given: Attempt | None = None
        self._steps_then: list[int] = []
        self._since = time.monotonic()
        if coordinator:
            self._directory.forget_introduction()

    # --- rounds -----------------------------------------------------------------------------

    def begin(self, engine: Engine) -> None:
        """In a group that has come together. Raises CxlfsError, OSError."""
        self._keeper = self._keeper_of(self._directory.root / KEPT, engine)
        newest = self._keeper.meet()
        self._kept = -1 if newest is None else newest.step
        self._refused.clear()
        if self._coordinator:
            self._directory.introduce(self._coordinator)

    def report(self) -> bytes:
        """Raises OSError."""
        asked = saver = None
        problem, steps = "", list[int]()
        try:
            asked = self._directory.request()
        except JobFilesError as error:  # nobody else's concern
            self._refuse(error)
        try:
            saver = self._directory.saver()
            steps = self._directory.steps()
        except JobFilesError as error:
            problem = reason_of(error)
        is_same = set(steps) <= set(self._steps_then)
        return rounds.encode(
            Report(
                asked,
                saver,
                self._answered if is_same else "",
                tuple(steps[: rounds.STEPS_MAX]),
                self._directory.has_any(),
                problem,
            )
        )

    def decide(self, told: list[bytes], *, is_last: bool) -> bytes:
        """Rank 0's part. Raises JobMessageError."""
        return rounds.encode(
            rounds.decide(
                [rounds.report_of(body) for body in told],
                keep=self._group().keep,
                kept=self._kept,
                refused=frozenset(self._refused),
                elapsed_seconds=time.monotonic() - self._since,
                is_last=is_last,
            )
        )

    def carry_out(self, data: bytes) -> None:
        """Raises CxlfsError, OSError."""
        decision = rounds.decision_of(data)
        match decision.kind:
            case "answer":
                self._answer(decision)
            case "again":
                self._give_again()
            case "keep":
                self._keep(decision.steps[0])
            case "refuse":
                self._refuse(JobConfigurationError(decision.reason))
            case _:
                self._say_who_waits(decision)
        if decision.floor:
            self._directory.remove_before(decision.floor)

    def _say_who_waits(self, decision: Decision) -> None:
        if decision.waiting:
            ranks = ", ".join(map(str, decision.waiting))
            next_step = f"start the job's process on node {ranks}"
            self._tell(
                Event(
                    "asked",
                    f"the job has not asked on node {ranks}",
                    next_step,
                    None,
                    decision.waiting,
                )
            )

    # --- keeping ----------------------------------------------------------------------------

    def _keep(self, step: int) -> Attempt | None:
        """On all nodes, or on none."""
        self._since = time.monotonic()
        question = self._group().question
        if question is not None:
            self._refused.add(step)
            self._tell(
                Event("not-kept", f"step {step}: {question.message}", question.next_step, step)
            )
            return None
        outcome = self._checkpoint(step)
        if isinstance(outcome, Committed):
            self._kept = step
            self._directory.forget_aside()
            copies = f"; copies of it: {len(outcome.copies)}" if outcome.copies else ""
            self._tell(Event("kept", f"step {step} is kept on all nodes{copies}", step=step))
            return outcome.attempt
        self._refused.add(step)
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in outcome.reasons)
        next_step = "none: a newer step is tried, or the one that was kept before is there"
        self._tell(Event("not-kept", f"step {step}: {reasons}", next_step, step))
        return None

    def _checkpoint(self, step: int) -> Committed | Aborted:
        """What went wrong on the way to the tier has cost nothing else."""
        try:
            return self._group().distributed_checkpoint(
                step, lambda into: self._directory.link(step, into)
            )
        except JobTierError as error:
            self._tell(Event("not-drained", error.message, error.next_step))
            if isinstance(error.outcome, Committed | Aborted):
                return error.outcome
            raise

    # --- answering --------------------------------------------------------------------------

    def _answer(self, decision: Decision) -> None:
        """What cannot be loaded is told the job, which ends; who is not heard is waited for."""
        try:
            attempt = self._chosen(decision)
        except (NotRestoredError, JobConfigurationError) as error:
            self._refuse(error)
            return
        try:
            self._give(attempt)
        except OSError as error:  # others go on: this one's process has to know
            self._refuse(JobFilesError(f"{error.filename}: {error.strerror}"))
            raise

    def _chosen(self, decision: Decision) -> Attempt | None:
        keeper = self._group()
        newest = keeper.meet()
        if keeper.question is not None:
            raise keeper.question
        self._kept = -1 if newest is None else newest.step
        for step in decision.steps:
            made = self._keep(step) if step > self._kept else None
            if made is not None:
                return made
        outcome = keeper.restore_from_checkpoint(lambda _path: None)
        if isinstance(outcome, Restored):
            self._kept = outcome.step
            return outcome.attempt
        if decision.has_any:
            raise NotRestoredError("there are steps, and none that is whole on all nodes")
        return None

    def _give(self, attempt: Attempt | None) -> None:
        request = self._directory.request()
        if request is None:  # it went meanwhile: a process that is there asks again
            pass
        elif attempt is None:
            self._directory.answer(request, None, None)
            self._tell(Event("answered", "there is nothing to go on from"))
        else:
            shards = files.rank_path(self._group().root, attempt, self._rank)
            self._directory.answer(request, attempt.step, shards)
            self._tell(Event("answered", f"goes on from step {attempt.step}", step=attempt.step))
        self._given = attempt
        self._answered = NOTHING if attempt is None else str(attempt.step)
        self._steps_then = self._directory.steps()
        self._since = time.monotonic()

    def _give_again(self) -> None:
        """To the nodes that ask: nothing was finished since."""
        if self._directory.request() is not None:
            self._give(self._given)

    def _refuse(self, error: CxlfsError) -> None:
        self._answered = ""
        if self._directory.refuse(f"{error.message}; next: {error.next_step}"):
            self._tell(Event("refused", error.message, error.next_step))

    def end(self) -> None:
        """What is on its way to other nodes and to the tier is waited for. Raises CxlfsError."""
        if self._keeper is not None:
            self._keeper.close()

    def _group(self) -> Keeper:
        if self._keeper is None:
            raise InvariantError("no group yet")
        return self._keeper
