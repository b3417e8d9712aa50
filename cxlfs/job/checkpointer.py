"""``Checkpointer``: save one step of a whole job on all its nodes, and resume from the newest one.

Never: decides what counts (``protocol``), imports a framework (``engines``).
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from cxlfs.errors import (
    InvariantError,
    JobConfigurationError,
    NotRestoredError,
    UndecidedError,
)
from cxlfs.job import files, medium
from cxlfs.job.driver import drive
from cxlfs.job.engines import Engine, engine_named
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


class Checkpointer:
    """One in each process of the job, made on all ranks alike.

    ``root``: a directory of this node's mounted store; ranks of one node share it. ``keep``: how
    many committed checkpoints stay. ``deadline_seconds``: how long a rank waits for the others at
    each step of the protocol; the slowest save has to fit. ``allow_volatile``: commit although a
    store lies in memory that is gone with the power.

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
    ) -> None:
        if replicas != 1 or tier is not None:
            raise JobConfigurationError(
                "copies on other nodes and a tier below are not part of this version",
                next_step="replicas=1, tier=None: what is committed lies on each rank's own node",
            )
        if keep < 1 or deadline_seconds <= 0:
            raise JobConfigurationError("keep is 1 or more, and a deadline lies ahead")
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

    # --- verbs ------------------------------------------------------------------------------

    def distributed_checkpoint(
        self, step: int, save: Callable[[Path], object]
    ) -> Committed | Aborted:
        """All ranks save one step, each its part: ``save`` writes files into the empty directory
        that it is given. On ``Committed`` all of it is durable and was read back; ``Aborted`` has
        the reasons of the ranks that could not, and the step before is what a restart finds. An
        exception of ``save`` is such a reason, and logged.

        Raises UndecidedError, JobConfigurationError (before ``restore_from_checkpoint``).
        """
        if self._next_number is None:
            raise JobConfigurationError(
                "nothing was restored yet",
                next_step="call restore_from_checkpoint first, at each start of the job",
            )
        if not 0 <= step <= STEP_MAX:
            raise JobConfigurationError(f"a step lies between 0 and {STEP_MAX}")
        attempt = Attempt(self._next_number, step, secrets.token_hex(8))
        self._next_number += 1
        machine = Saving(self._place(), attempt, refusal=self._refusal)
        outcome = self._drive(machine, lambda action: self._save(action, save))
        if isinstance(outcome, Committed | Aborted):
            return outcome
        raise InvariantError(f"saving ended with {outcome}")

    def restore_from_checkpoint(self, load: Callable[[Path], object]) -> Restored | Nothing:
        """All ranks load the newest checkpoint that is whole: ``load`` reads the files that this
        rank saved, which were verified byte by byte. It is called again, with an older checkpoint,
        where any rank could not load the first. ``Nothing``: a first start.

        Raises UndecidedError, NotRestoredError.
        """
        machine = Restoring(self._place(), can_fetch=False)
        outcome = self._drive(machine, lambda action: self._restore(action, load))
        self._next_number = next_number(machine.inventories)
        if isinstance(outcome, Restored | Nothing):
            return outcome
        raise InvariantError(f"restoring ended with {outcome}")

    # --- driving ----------------------------------------------------------------------------

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
