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
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from cxlfs.errors import (
    CxlfsError,
    ForkError,
    InvariantError,
    JobConfigurationError,
    JobMessageError,
    NotRestoredError,
    NotWholeError,
    UndecidedError,
)
from cxlfs.job import engines, files, lines, medium, ownership
from cxlfs.job.copies import Copies
from cxlfs.job.driver import drive, reason_of
from cxlfs.job.engines import Engine, engine_named
from cxlfs.job.exchange import LINK_SHARE
from cxlfs.job.offers import decode_roots, encode_roots
from cxlfs.job.pending import NOT_BEGUN, InOrder, PendingCheckpoint, raising, writing
from cxlfs.job.protocol import (
    TIER,
    Aborted,
    Action,
    Asked,
    Attempt,
    BeginLine,
    Collect,
    Committed,
    Discard,
    Inventory,
    Kind,
    Line,
    Lineage,
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
    Verdict,
    WriteManifest,
    decode,
    encode,
    line_after,
    next_number,
    recorders_of,
    stores_of_copies,
    verdict_on,
)
from cxlfs.job.protocol.messages import Begun
from cxlfs.job.reachable import Reachable, inventories
from cxlfs.job.resharding import Resharded, Resharding, remove_brought
from cxlfs.job.room import Room

if TYPE_CHECKING:
    from cxlfs.job.tier import Tier

log = logging.getLogger(__name__)

DEADLINE_SECONDS_DEFAULT = 600.0
STEP_MAX = 10**18
_KEYS_KEPT_CALLS = 4
_NONCE_BYTES = 32
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
    ``unheard``: what a start does that hears too few stores to know that there is nothing newer:
    "branch" goes on, and says so in the log and in its record; "stop" asks an operator.

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
        unheard: str = "branch",
    ) -> None:
        if unheard not in {"branch", "stop"}:
            raise JobConfigurationError(f"unheard={unheard!r}: it is branch or stop")
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
        self._stops = unheard == "stop"
        self._lock: list[tuple[int, int] | None] = []
        weakref.finalize(self, _release, self._lock)
        self._line: Line | None = None
        self._lineage = Lineage()
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
        _release(self._lock)

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
        """All ranks load the checkpoint that descends from all others: ``load`` reads the files
        that this rank saved, which were verified byte by byte. It is called again where any rank
        could not load them, with other holders of the same checkpoint, never with an older one.
        ``Nothing``: a first start.

        Raises UndecidedError (not all were heard), NotWholeError (the checkpoint cannot be loaded
        whole), ForkError (there are several histories), both UndecidedErrors; NotRestoredError;
        AbortedError of an asynchronous checkpoint.
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
        below = self._known[len(self._met) :]
        verdict, nonces, began = self._verdict_of_all(call, roots, below)
        head = verdict.head
        if head is None:
            raise self._asked(Asked(verdict.heads, verdict.reasons, verdict.loadable))
        resharding = Resharding(self.engine, gather, roots, heads, name, seconds=seconds, head=head)
        found, ahead = resharding.restore(check, load)
        self._began(verdict, self._begin_line(call, verdict, nonces, began), None)
        self._next_number = max(ahead, next_number(self._known))
        return found

    def _verdict_of_all(
        self, call: int, roots: Sequence[Path], below: Sequence[Inventory]
    ) -> tuple[Verdict, tuple[str, ...], int]:
        """Of the stores of all ranks, and of all others that any of them reaches. Raises
        UndecidedError, NotRestoredError, JobMessageError.
        """
        own = encode_roots(inventories(roots), *self._nonce())
        told = [decode_roots(body) for _, body in sorted(self._gather(call, "roots", own).items())]
        reached = [inventory for each in told for inventory in each.inventories]
        verdict = verdict_on([*self._met, *reached, *below])
        if verdict.kind is Kind.REFUSE:
            raise NotRestoredError("; ".join(verdict.reasons))
        if verdict.kind is Kind.NOTHING:
            raise NotRestoredError("no rank reaches any part of a committed checkpoint")
        return verdict, tuple(each.nonce for each in told), told[0].began

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
        if self._next_number is None or self._line is None:
            raise InvariantError("a checkpoint of no line")
        self._room.wait(self.deadline_seconds)
        attempt = Attempt(self._next_number, step, self._line.id)
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
        has_tier, (nonce, began) = self._tier is not None, self._nonce()
        machine = Restoring(
            self._place(),
            can_fetch=True,
            has_tier=has_tier,
            nonce=nonce,
            began=began,
            replicas=self.copies.replicas,
            placement=self.copies.placement,
            stops=self._stops,
        )
        try:
            outcome = self._drive(machine, lambda action: act(machine, action))
        finally:
            self._met, self._known = machine.inventories, machine.everywhere
        if isinstance(outcome, Asked):
            raise self._asked(outcome)
        loaded = outcome.attempt if isinstance(outcome, Restored) else None
        if machine.verdict is not None and machine.line is not None:
            self._began(machine.verdict, machine.line, loaded)
        if loaded is not None:
            self._fill(machine)
            self._drain_again(machine, loaded)
        if isinstance(outcome, Restored | Nothing):
            return outcome
        raise InvariantError(f"restoring ended with {outcome}")

    def _nonce(self) -> tuple[str, int]:
        """What this rank adds to the id of a line, and when it did, by its clock."""
        return secrets.token_hex(_NONCE_BYTES), int(time.time())

    def _began(self, verdict: Verdict, line: Line, loaded: Attempt | None) -> None:
        """Its record is durable in all stores: checkpoints can be made."""
        self._line, self._lineage = line, verdict.seen.lineage.joined(line)
        if line.is_provisional:
            log.warning(
                "line %s goes on without stores that may have newer checkpoints: %s",
                *(line.id, ", ".join(verdict.unheard)),
            )
        self.copies.settle(self._met)
        self._room.settle(self._met, self.store, self._lineage, line.id, loaded)
        self._next_number = next_number(self._known)

    def _begin_line(self, call: int, verdict: Verdict, nonces: Sequence[str], began: int) -> Line:
        """As ``Restoring`` does, where ranks have come to a verdict otherwise. Raises
        NotRestoredError, UndecidedError, JobConfigurationError, JobMessageError.
        """
        targets = stores_of_copies(self._met, self.copies.replicas, self.copies.placement)
        line, reason = line_after(verdict, self._met, targets, nonces, began), ""
        if self.world.rank in recorders_of(self._met):
            try:
                self._write_line(verdict, line, None)
            except (CxlfsError, OSError) as error:
                reason = reason_of(error)
        told = {}
        for rank, data in self._gather(call, "line", encode(Begun(line.id, reason))).items():
            body = decode(data)
            if not isinstance(body, Begun):
                raise JobMessageError("a message in the place of a line")
            told[rank] = body.reason or ("" if body.line == line.id else "it is of another line")
        if any(told.values()):
            named = (f"rank {rank}: {why}" for rank, why in sorted(told.items()) if why)
            raise NotRestoredError("; ".join(named))
        return line

    def _write_line(self, verdict: Verdict, line: Line, commit: tuple[Attempt, str] | None) -> None:
        """Durable in this store, and who may vote here from now on. Raises OSError, CxlfsError."""
        if self._tier is not None and self.world.rank == 0:
            self._tier.claim(line.job, is_first=line.parent is None)
        lines.keep(self.root, [*verdict.seen.lineage.lines.values(), line])
        medium.mark_lines(self.root)
        if commit is not None:
            files.record_commit(self.root, commit[0], self.world.rank, commit[1])
        lines.own(self.root, line)

    def _take_stock(self) -> Inventory:
        """Of this store, which this start has for itself. Raises CxlfsError, OSError."""
        if not self._lock:
            self._lock.append(ownership.take(self.root, self.world.incarnation))
        return files.logged_inventory(self.root, self.store, self.domain)

    def _asked(self, asked: Asked) -> CxlfsError:
        """What the operator is told; each store keeps the question."""
        if self.world.rank in recorders_of(self._met):
            question = lines.Question(asked.heads, asked.loadable, asked.reasons, int(time.time()))
            try:
                lines.ask(self.root, question)
            except OSError:
                log.warning("%s: the question is not kept", self.root, exc_info=True)
        text = "; ".join(asked.reasons)
        if asked.loadable:
            text += f". Could be loaded: {', '.join(map(str, asked.loadable))}"
        ways = [f"--resume {each.id}/{each.number}" for each in asked.loadable[:2]]
        command = f"cxlfs job decide {self.root} {' or '.join(ways)}"
        if not asked.heads:
            command = f"cxlfs job decide {self.root} --anew"
        step = f"bring the absent stores back, or on one node: {command}"
        if not ways and asked.heads:
            step = f"bring the absent stores back; cxlfs job status {self.root} names them"
        kind = UndecidedError if set(asked.heads) <= set(asked.loadable) else NotWholeError
        return (ForkError if len(asked.heads) > 1 else kind)(text, next_step=step)

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
            case WriteManifest(attempt):
                lines.require_owner(self.root, attempt.id)
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
        job = "" if self._line is None else self._line.job
        return files.Manifest(
            *(attempt, world.rank, world.size, node, self.store, self.medium, shards, self.domain),
            job,
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
                return self._take_stock()
            case TakeStockBelow() if self._tier is not None:
                return self._tier.stock()
            case Load(attempt, shard, holder, manifest):
                name = f"{machine.place.call}/fetch/{machine.round}"
                if machine.verdict is not None:  # no shards come before the lines that led to them
                    lines.keep(self.root, machine.verdict.seen.lineage.lines.values())
                self.copies.fetch(machine, name, LINK_SHARE * self.deadline_seconds)
                if holder == TIER and self._tier is not None:
                    self._tier.bring(attempt, shard)
                if holder in {self.store, TIER}:
                    load(files.verify(self.root, attempt, shard, manifest))
                else:  # verified when it came
                    load(files.rank_path(self.root, attempt, shard))
            case BeginLine(line, choice) if machine.verdict is not None:
                commit = None if choice is None else (choice.attempt, choice.digest)
                self._write_line(machine.verdict, line, commit)
            case _:
                raise InvariantError(f"not an action of restoring: {action}")
        return None


def _release(lock: list[tuple[int, int] | None]) -> None:
    while lock:
        ownership.release(lock.pop())


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
