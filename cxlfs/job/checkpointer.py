"""``Checkpointer``: save one step of a whole job on all its nodes, and resume from the newest one.

Never: decides what counts (``protocol``), imports a framework (``engines``).

Invariants
- The engine, and what counts calls and attempts, belong to the thread of ``pending`` while anything
  is in flight, and to the caller's else: a call that talks itself waits until nothing is.
- A call that raises an error of before takes part in what all ranks decide, with a vote against:
  the others know at once, and all go on to count alike.
"""

from __future__ import annotations

import logging
import os
import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from cxlfs.errors import (
    InvariantError,
    JobConfigurationError,
    NotRestoredError,
    UndecidedError,
)
from cxlfs.job import files, medium
from cxlfs.job.driver import drive, reason_of
from cxlfs.job.engines import Engine, engine_named
from cxlfs.job.pending import NOT_BEGUN, InOrder, PendingCheckpoint
from cxlfs.job.protocol import (
    Aborted,
    Action,
    Attempt,
    Collect,
    Committed,
    Discard,
    Inventory,
    Load,
    Machine,
    Nothing,
    NotRestored,
    Outcome,
    Place,
    RecordCommit,
    Restored,
    Restoring,
    Save,
    Saving,
    TakeStock,
    Undecided,
    WriteManifest,
    collectable,
    next_number,
)

log = logging.getLogger(__name__)

DEADLINE_SECONDS_DEFAULT = 600.0
STEP_MAX = 10**18
_KEYS_KEPT_CALLS = 4
_WAITS_EACH = 4
"""Deadlines that a checkpoint in flight can use up: PREPARE, its own save, votes, records."""

_Snapshot = TypeVar("_Snapshot")


class Checkpointer:
    """One in each process of the job, made on all ranks alike.

    ``root``: a directory of this node's mounted store; ranks of one node share it. ``keep``: how
    many committed checkpoints stay. ``deadline_seconds``: how long a rank waits for the others at
    each step of the protocol; the slowest save has to fit. What is in flight is waited for
    4 * ``in_flight`` times as long. ``allow_volatile``: commit although a store lies in memory that
    is gone with the power. ``in_flight``: how many asynchronous checkpoints, and snapshots, there
    may be.

    Methods are called from one thread at a time. As a context manager it closes itself. One that
    is dropped finishes what is in flight, as the end of the process does, and what went wrong
    with that is logged as an error.

    Raises JobConfigurationError, JobEngineError, OSError.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        replicas: int = 1,
        tier: object = None,
        keep: int = 2,
        engine: str | Engine = "auto",
        deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
        allow_volatile: bool = False,
        in_flight: int = 1,
    ) -> None:
        if replicas != 1 or tier is not None:
            raise JobConfigurationError(
                "copies on other nodes and a tier below are not part of this version",
                next_step="replicas=1, tier=None: what is committed lies on each rank's own node",
            )
        if keep < 1 or in_flight < 1 or deadline_seconds <= 0:
            raise JobConfigurationError("keep and in_flight are 1 or more, a deadline lies ahead")
        self.root = Path(root)
        self.keep = keep
        self.deadline_seconds = deadline_seconds
        self.engine = engine_named(engine) if isinstance(engine, str) else engine
        self.world = self.engine.world()
        self.store = medium.identity(self.root)
        self.medium, is_volatile = medium.medium_of(self.root)
        self._refusal = ""
        if is_volatile and not allow_volatile:
            self._refusal = f"{self.root} lies in memory that is gone with the power"
        self._calls = 0
        self._next_number: int | None = None
        self._said: dict[int, list[str]] = {}
        self.in_flight = in_flight
        self._background = InOrder()
        self._is_closed = False
        weakref.finalize(self, self._background.report)

    # --- verbs ------------------------------------------------------------------------------

    def distributed_checkpoint(
        self, step: int, save: Callable[[Path], object]
    ) -> Committed | Aborted:
        """All ranks save one step, each its part: ``save`` writes files into the empty directory
        that it is given. On ``Committed`` all of it is durable and was read back; ``Aborted`` has
        the reasons of the ranks that could not, and the step before is what a restart finds. An
        exception of ``save`` is such a reason, and logged.

        Asynchronous ones are waited for, and what went wrong with them is raised instead.

        Raises UndecidedError, AbortedError, JobConfigurationError (before
        ``restore_from_checkpoint``, or closed).
        """
        self._check(step)
        self._settle_or_refuse(step, in_flight_max=0)
        return self._checkpoint(step, save)

    def async_checkpoint(
        self,
        step: int,
        save: Callable[[Path, _Snapshot], object],
        *,
        snapshot: Callable[[], _Snapshot],
    ) -> PendingCheckpoint:
        """As ``distributed_checkpoint``, beside training. ``snapshot`` runs before this returns:
        what it returns must share nothing with what training changes from then on (tensors copied,
        to the host if device memory is short, and the copies complete). ``save`` writes that into
        the directory, in another thread, which no other rank's call waits for.

        Checkpoints are made in the order of the calls. Where ``in_flight`` are not done, the oldest
        is waited for before the snapshot is taken. ``wait`` of what is
        returned has the verdict. A failure of which nobody asked is raised by the next call, and
        that one's checkpoint is not begun. An exception of ``snapshot`` is a vote against, as one
        of ``save``.

        Raises UndecidedError, AbortedError, JobConfigurationError.
        """
        self._check(step)
        self._settle_or_refuse(step, in_flight_max=self.in_flight - 1)
        write = _writing(save, snapshot)
        pending = PendingCheckpoint(step, self._patience_seconds())
        return self._background.begin(pending, lambda: self._checkpoint(step, write))

    def wait(self) -> None:
        """Until nothing is in flight. Raises UndecidedError, AbortedError: of checkpoints that
        nobody asked, or the deadline has passed.
        """
        failure = self._background.settle(0, self._patience_seconds())
        if failure is not None:
            raise failure

    def close(self) -> None:
        """``wait``, and no further checkpoints. Before the process group is destroyed."""
        self._is_closed = True
        self.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            log.exception("beside the error that ends the job")
            error.add_note(f"and: {failure}")

    def restore_from_checkpoint(self, load: Callable[[Path], object]) -> Restored | Nothing:
        """All ranks load the newest checkpoint that is whole: ``load`` reads the files that this
        rank saved, which were verified byte by byte. It is called again, with an older checkpoint,
        where any rank could not load the first. ``Nothing``: a first start.

        Raises UndecidedError, NotRestoredError; AbortedError of an asynchronous checkpoint.
        """
        self._check_open()
        failure = self._background.settle(0, self._patience_seconds())
        if failure is not None:
            pending = PendingCheckpoint(0, self._patience_seconds(), is_seen=True)
            self._background.begin(pending, lambda: self._restoring(_raising(failure)))
            raise failure
        return self._restoring(lambda action: self._restore(action, load))

    # --- driving ----------------------------------------------------------------------------

    def _patience_seconds(self) -> float:
        """How long what is in flight may take: longer than what ends by deadlines of its own."""
        return _WAITS_EACH * self.in_flight * self.deadline_seconds

    def _check_open(self) -> None:
        if self._is_closed:
            raise JobConfigurationError("this checkpointer is closed")

    def _check(self, step: int) -> None:
        self._check_open()
        if self._next_number is None:
            raise JobConfigurationError(
                "nothing was restored yet",
                next_step="call restore_from_checkpoint first, at each start of the job",
            )
        if not 0 <= step <= STEP_MAX:
            raise JobConfigurationError(f"a step lies between 0 and {STEP_MAX}")

    def _settle_or_refuse(self, step: int, in_flight_max: int) -> None:
        """Raises what went wrong before; the other ranks hear of it from the thread."""
        failure = self._background.settle(in_flight_max, self._patience_seconds())
        if failure is None:
            return
        refusal = f"{NOT_BEGUN}: {reason_of(failure)}"
        pending = PendingCheckpoint(step, self._patience_seconds(), is_seen=True)
        self._background.begin(
            pending, lambda: self._checkpoint(step, _raising(failure), refusal=refusal)
        )
        raise failure

    def _checkpoint(
        self, step: int, save: Callable[[Path], object], *, refusal: str = ""
    ) -> Committed | Aborted:
        if self._next_number is None:
            raise InvariantError("a checkpoint without a number")
        attempt = Attempt(self._next_number, step, secrets.token_hex(8))
        self._next_number += 1
        machine = Saving(self._place(), attempt, refusal=refusal or self._refusal)
        outcome = self._drive(machine, lambda action: self._save(action, save))
        if isinstance(outcome, Committed | Aborted):
            return outcome
        raise InvariantError(f"saving ended with {outcome}")

    def _restoring(self, act: Callable[[Action], Inventory | None]) -> Restored | Nothing:
        machine = Restoring(self._place(), can_fetch=False)
        outcome = self._drive(machine, act)
        self._next_number = next_number(machine.inventories)
        if isinstance(outcome, Restored | Nothing):
            return outcome
        raise InvariantError(f"restoring ended with {outcome}")

    def _place(self) -> Place:
        self._calls += 1
        for key in self._said.pop(self._calls - _KEYS_KEPT_CALLS, []):
            self.engine.forget(key)
        return Place(self.world.rank, self.world.size, self.world.incarnation, self._calls)

    def _drive(self, machine: Machine, act: Callable[[Action], str | Inventory | None]) -> Outcome:
        said = self._said.setdefault(self._calls, [])
        outcome = drive(
            machine, self.engine, act, deadline_seconds=self.deadline_seconds, said=said
        )
        if isinstance(outcome, Undecided):
            ranks = ", ".join(map(str, outcome.missing))
            raise UndecidedError(
                f"{outcome.phase}: not heard within {self.deadline_seconds:g} s: rank {ranks}"
            )
        if isinstance(outcome, NotRestored):
            raise NotRestoredError("; ".join(outcome.reasons))
        return outcome

    def _save(self, action: Action, save: Callable[[Path], object]) -> str | None:
        rank = self.world.rank
        match action:
            case Save(attempt):
                save(files.begin(self.root, attempt, rank))
            case WriteManifest(attempt, world):
                shards = files.measure(files.staging_path(self.root, attempt, rank))
                node = os.uname().nodename
                return files.seal(
                    self.root,
                    files.Manifest(attempt, rank, world, node, self.store, self.medium, shards),
                )
            case RecordCommit(attempt, digest):
                files.record_commit(self.root, attempt, rank, digest)
            case Discard(attempt):
                files.remove_rank(self.root, attempt, rank)
            case Collect(attempt):
                inventory, _ = files.take_stock(self.root, self.store)
                older = collectable(inventory, attempt, self.keep)
                files.remove_older(self.root, older, rank, attempt)
            case _:
                raise InvariantError(f"not an action of saving: {action}")
        return None

    def _restore(self, action: Action, load: Callable[[Path], object]) -> Inventory | None:
        match action:
            case TakeStock():
                inventory, problems = files.take_stock(self.root, self.store)
                for problem in problems:
                    log.warning("left out: %s", problem)
                return inventory
            case Load(attempt, shard, holder, manifest):
                if holder != self.store:
                    raise InvariantError("a rank loads from its own store")
                load(files.verify(self.root, attempt, shard, manifest))
            case RecordCommit(attempt, digest):
                files.record_commit(self.root, attempt, self.world.rank, digest)
            case _:
                raise InvariantError(f"not an action of restoring: {action}")
        return None


def _writing(
    save: Callable[[Path, _Snapshot], object], snapshot: Callable[[], _Snapshot]
) -> Callable[[Path], object]:
    """What saves the snapshot that is taken here; or raises, where it could not be."""
    try:
        taken = snapshot()
    except Exception as error:  # noqa: BLE001 - it is this rank's vote against
        return _raising(error)
    return lambda directory: save(directory, taken)


def _raising(error: BaseException) -> Callable[[object], None]:
    def fail(_given: object) -> None:
        raise error

    return fail
