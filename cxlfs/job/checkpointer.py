"""``Checkpointer``: save one step of a whole job on all its nodes, and resume from the newest one.

Never: decides what counts (``protocol``), imports a framework (``engines``).

Invariants
- The engine, and what counts calls and attempts, belong to the thread of ``pending`` while anything
  is in flight, and to the caller's else: a call that talks itself waits until nothing is.
- A call that raises an error of before takes part in what all ranks decide, with a vote against:
  the others know at once, and all go on to count alike.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from cxlfs.errors import (
    InvariantError,
    JobConfigurationError,
    NotRestoredError,
    UndecidedError,
)
from cxlfs.job import engines, files, medium
from cxlfs.job.copies import Copies
from cxlfs.job.driver import drive, reason_of
from cxlfs.job.engines import Engine, engine_named
from cxlfs.job.pending import NOT_BEGUN, InOrder, PendingCheckpoint, raising, writing
from cxlfs.job.protocol import (
    TIER,
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
    Replicate,
    Restored,
    Restoring,
    Save,
    Saving,
    TakeStock,
    TakeStockBelow,
    Undecided,
    WriteManifest,
    next_number,
    recorders_of,
)
from cxlfs.job.reachable import Reachable
from cxlfs.job.resharding import Resharded, Resharding, remove_brought
from cxlfs.job.room import Room

if TYPE_CHECKING:
    from cxlfs.job.tier import Tier

log = logging.getLogger(__name__)

DEADLINE_SECONDS_DEFAULT = 600.0
STEP_MAX = 10**18
_KEYS_KEPT_CALLS = 4
_WAITS_EACH = 5
"""Deadlines that a checkpoint in flight can use up: room, PREPARE, its own save, votes, records."""
_WAITS_FOR_COPIES = 3
"""And those of others: copies that a restore makes again, who has saved, copying."""
DOMAIN_VARIABLE = "CXLFS_DOMAIN"
_DOMAIN_MAX = 255

_Snapshot = TypeVar("_Snapshot")


class Checkpointer:
    """One in each process of the job, made on all ranks alike.

    ``root``: a directory of this node's mounted store; ranks of one node share it. ``replicas``: in
    how many stores, each of another failure domain, the shards of each rank lie; ``domain``: with
    what else this node fails (a rack, a power supply), by default what CXLFS_DOMAIN says, or the
    node's name; ``placement``: where copies lie, "groups" or "ring". ``keep``: how many committed
    checkpoints stay. ``deadline_seconds``: how long a rank waits for the others at each step of the
    protocol; the slowest save has to fit, and the slowest copy. What is in flight is waited for
    5 * ``in_flight`` times as long, 8 * with copies.
    ``allow_volatile``: commit although a store lies in memory that is gone with the power.
    ``in_flight``: how many asynchronous checkpoints, and snapshots, there may be. ``tier``: the URL
    of a place in an object store, to which what is committed is drained behind training, and from
    which comes back what no store has; ``tier_every``: every how many commits; ``tier_keep``: how
    many stay there (None: all).

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
        domain: str | None = None,
        placement: str = "groups",
        tier: str | None = None,
        tier_every: int = 1,
        tier_keep: int | None = None,
        keep: int = 2,
        engine: str | Engine = "auto",
        deadline_seconds: float = DEADLINE_SECONDS_DEFAULT,
        allow_volatile: bool = False,
        in_flight: int = 1,
    ) -> None:
        if min(keep, in_flight, tier_every, tier_keep or 1) < 1 or deadline_seconds <= 0:
            raise JobConfigurationError("counts are 1 or more, a deadline lies ahead")
        self.root = Path(root)
        self.keep = keep
        self.deadline_seconds = deadline_seconds
        self.engine = engine_named(engine) if isinstance(engine, str) else engine
        self.world = self.engine.world()
        self.domain = domain_of(domain)
        self.copies = Copies(
            *(self.root, self.engine, replicas, placement), each_its_own=tier is not None
        )
        self._room = Room(self.root, keep, self.copies)
        self.store = medium.identity(self.root)
        self._leave = weakref.finalize(self, medium.leave, medium.attend(self.root))
        self.medium, is_volatile = medium.medium_of(self.root)
        self._refusal = ""
        if is_volatile and not allow_volatile:
            self._refusal = f"{self.root} lies in memory that is gone with the power"
        self._calls = 0
        self._manifest: files.Manifest | None = None
        self._next_number: int | None = None
        self._met: tuple[Inventory, ...] = ()
        self._known: tuple[Inventory, ...] = ()
        self._said: dict[int, list[str]] = {}
        self.in_flight = in_flight
        self._tier = _tier_of(tier, self.root, self.world.rank, tier_every, tier_keep)
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
        ``restore_from_checkpoint``, or closed); JobTierError of a checkpoint before, when this one
        has ended, with its ``outcome``.
        """
        self._check(step)
        self._settle_or_refuse(step, in_flight_max=0)
        outcome = self._checkpoint(step, save)
        self._raise_of_tier(outcome)
        return outcome

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

        Raises UndecidedError, AbortedError, JobConfigurationError; JobTierError of a checkpoint
        before, when this one is on its way, with what is returned else as its ``outcome``.
        """
        self._check(step)
        self._settle_or_refuse(step, in_flight_max=self.in_flight - 1)
        write = writing(save, snapshot)
        pending = PendingCheckpoint(step, self._patience_seconds())
        self._background.begin(pending, lambda: self._checkpoint(step, write))
        self._raise_of_tier(pending)
        return pending

    def wait(self) -> None:
        """Until nothing is in flight, or on its way to the tier. Raises UndecidedError,
        AbortedError, JobTierError: of checkpoints that nobody asked, or the deadline has passed.
        """
        failure = self._background.settle(0, self._patience_seconds())
        self._room.finish(self.deadline_seconds)
        if self._tier is not None:
            self._tier.wait(self.deadline_seconds)
        if failure is not None:
            raise failure
        self._raise_of_tier(None)

    def close(self) -> None:
        """``wait``, and no further checkpoints. Before the process group is destroyed."""
        self._is_closed = True
        self.wait()
        self._leave()

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
            self._background.begin(pending, lambda: self._restoring(raising(failure)))
            raise failure
        return self._restoring(lambda machine, action: self._restore(machine, action, load))

    def restore_resharded(
        self,
        load: Callable[[Reachable], object],
        *,
        check: Callable[[Reachable], Collection[int] | None],
        heads: Collection[str] = (),
        stores: Sequence[str | os.PathLike[str]] = (),
    ) -> Resharded:
        """Where ``restore_from_checkpoint`` has raised NotRestoredError as the job has another
        number of ranks, or each needs more than it saved: all load one checkpoint, each the parts
        that it needs. ``check`` returns whose these are (None: all), or raises if what it is given
        is not enough for this rank; of parts in stores that only other ranks reach it finds the
        files named in ``heads``. They are then brought into this rank's directory, verified, and
        removed when ``load`` has read them. ``stores``: directories of other nodes that this rank
        reaches itself.

        Raises NotRestoredError, UndecidedError, AbortedError, JobConfigurationError.
        """
        self._check_open()
        self.wait()
        if not self._met:
            raise JobConfigurationError("restore_from_checkpoint comes first, on all ranks")
        call = self._place().call
        roots, seconds = (self.root, *map(Path, stores)), self.deadline_seconds
        gather, name = functools.partial(self._gather, call), f"{call}/parts"
        resharding = Resharding(self.engine, gather, roots, heads, name, seconds)
        found, ahead = resharding.restore(check, load)
        self.copies.settle(self._met)
        self._room.settle(self._met, self.store)
        self._next_number = max(ahead, next_number(self._known))
        return found

    def _gather(self, call: int, phase: str, body: bytes) -> dict[int, bytes]:
        """What all ranks say of it. Raises UndecidedError."""
        key = f"{call}/{phase}"
        self._said.setdefault(call, []).append(key)
        heard = engines.gather(self.engine, key, body, self.deadline_seconds)
        missing = sorted(set(range(self.world.size)) - set(heard))
        if missing:
            raise self._unheard(phase, missing)
        return heard

    # --- driving ----------------------------------------------------------------------------

    def _patience_seconds(self) -> float:
        """How long what is in flight may take: longer than what ends by deadlines of its own."""
        waits = _WAITS_EACH + (_WAITS_FOR_COPIES if self.copies.replicas > 1 else 0)
        return waits * self.in_flight * self.deadline_seconds

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
            pending, lambda: self._checkpoint(step, raising(failure), refusal=refusal)
        )
        raise failure

    def _checkpoint(
        self, step: int, save: Callable[[Path], object], *, refusal: str = ""
    ) -> Committed | Aborted:
        if self._next_number is None:
            raise InvariantError("a checkpoint without a number")
        self._room.wait(self.deadline_seconds)
        attempt = Attempt(self._next_number, step, secrets.token_hex(8))
        self._next_number += 1
        machine = Saving(
            self._place(),
            attempt,
            replicas=self.copies.replicas,
            placement=self.copies.placement,
            recorders=recorders_of(self._met),
            refusal=refusal or self._refusal,
        )
        outcome = self._drive(machine, lambda action: self._save(action, save))
        if isinstance(outcome, Committed):
            if self._tier is not None:
                self._tier.begin(outcome.attempt, self.world.size)
            return dataclasses.replace(outcome, copies=self.copies.stores())
        if isinstance(outcome, Aborted):
            return outcome
        raise InvariantError(f"saving ended with {outcome}")

    def _restoring(
        self, act: Callable[[Restoring, Action], Inventory | None]
    ) -> Restored | Nothing:
        has_tier = self._tier is not None
        machine = Restoring(self._place(), can_fetch=True, has_tier=has_tier)
        try:
            outcome = self._drive(machine, lambda action: act(machine, action))
        finally:
            self._met, self._known = machine.inventories, machine.everywhere
        self.copies.settle(machine.inventories)
        loaded = outcome.attempt if isinstance(outcome, Restored) else None
        self._room.settle(machine.inventories, self.store, loaded)
        self._next_number = next_number(machine.everywhere)
        if loaded is not None:
            self._fill(machine)
            self._drain_again(machine, loaded)
        if isinstance(outcome, Restored | Nothing):
            return outcome
        raise InvariantError(f"restoring ended with {outcome}")

    def _fill(self, machine: Restoring) -> None:
        """Beside training, and before the next checkpoint."""
        name, pending = f"{machine.place.call}/fill", PendingCheckpoint(0, 0.0, is_seen=True)
        self._background.begin(
            pending, lambda: self.copies.fill(machine, name, self.deadline_seconds)
        )

    def _drain_again(self, machine: Restoring, attempt: Attempt) -> None:
        """What was on its way to the tier when the job ended."""
        known = () if machine.below is None else machine.below.commits
        if self._tier is not None and attempt not in {commit.attempt for commit in known}:
            self._tier.begin(attempt, self.world.size)

    def _raise_of_tier(self, outcome: Committed | Aborted | PendingCheckpoint | None) -> None:
        """What went wrong on the way to the tier: behind what was asked for, which it costs not."""
        failure = None if self._tier is None else self._tier.failure()
        if failure is not None:
            failure.outcome = outcome
            raise failure

    def _unheard(self, phase: str, missing: Sequence[int]) -> UndecidedError:
        ranks = ", ".join(map(str, missing))
        return UndecidedError(
            f"{phase}: not heard within {self.deadline_seconds:g} s: rank {ranks}"
        )

    def _place(self) -> Place:
        self._calls += 1
        for key in self._said.pop(self._calls - _KEYS_KEPT_CALLS, []):
            self.engine.forget(key)
        world = self.world
        return Place(world.rank, world.size, world.incarnation, self._calls, world.group_size)

    def _drive(self, machine: Machine, act: Callable[[Action], str | Inventory | None]) -> Outcome:
        said = self._said.setdefault(self._calls, [])
        outcome = drive(
            machine, self.engine, act, deadline_seconds=self.deadline_seconds, said=said
        )
        if isinstance(outcome, Undecided):
            raise self._unheard(outcome.phase, outcome.missing)
        if isinstance(outcome, NotRestored):
            raise NotRestoredError("; ".join(outcome.reasons))
        return outcome

    def _save(self, action: Action, save: Callable[[Path], object]) -> str | None:
        rank = self.world.rank
        match action:
            case Save(attempt):
                self._room.begun(attempt)
                directory = files.begin(self.root, attempt, rank)
                save(directory)
                self._manifest = self._measured(attempt, directory)
            case Replicate():
                name = f"{self._calls}/copies"
                self.copies.replicate(self._saved_manifest(), name, self.deadline_seconds)
            case WriteManifest():
                return files.seal(self.root, self._saved_manifest())
            case RecordCommit(attempt, digest):
                files.record_commit(self.root, attempt, rank, digest, self.copies.stores_of_node())
            case Discard(attempt):
                self.copies.discard(attempt)
            case Collect(attempt):
                self._room.collect(attempt, None if self._tier is None else self._tier.holds)
            case _:
                raise InvariantError(f"not an action of saving: {action}")
        return None

    def _measured(self, attempt: Attempt, directory: Path) -> files.Manifest:
        shards = files.measure(directory)
        node, world = os.uname().nodename, self.world
        return files.Manifest(
            *(attempt, world.rank, world.size, node, self.store, self.medium, shards, self.domain)
        )

    def _saved_manifest(self) -> files.Manifest:
        if self._manifest is None:
            raise InvariantError("nothing was saved")
        return self._manifest

    def _restore(
        self, machine: Restoring, action: Action, load: Callable[[Path], object]
    ) -> Inventory | None:
        match action:
            case TakeStock():
                remove_brought(self.root)
                return files.logged_inventory(self.root, self.store, self.domain)
            case TakeStockBelow() if self._tier is not None:
                return self._tier.stock()
            case Load(attempt, shard, holder, manifest):
                name = f"{machine.place.call}/fetch/{machine.round}"
                self.copies.fetch(machine, name, self.deadline_seconds)
                if holder == TIER and self._tier is not None:
                    self._tier.bring(attempt, shard)
                if holder in {self.store, TIER}:
                    load(files.verify(self.root, attempt, shard, manifest))
                else:  # verified when it came
                    load(files.rank_path(self.root, attempt, shard))
            case RecordCommit(attempt, digest):
                files.record_commit(self.root, attempt, self.world.rank, digest)
            case _:
                raise InvariantError(f"not an action of restoring: {action}")
        return None


def _tier_of(url: str | None, root: Path, rank: int, every: int, keep: int | None) -> Tier | None:
    if url is None:
        return None
    from cxlfs.job.tier import Tier  # noqa: PLC0415  a job without a tier needs none of it

    return Tier(url, root, rank, every=every, keep=keep)


def domain_of(stated: str | None) -> str:
    """Raises JobConfigurationError."""
    if stated is None:
        stated = os.environ.get(DOMAIN_VARIABLE) or os.uname().nodename
    if not 0 < len(stated) <= _DOMAIN_MAX:
        raise JobConfigurationError(f"the name of a domain has 1 to {_DOMAIN_MAX} characters")
    return stated
