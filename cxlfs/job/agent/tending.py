"""One node's part for the directory of a ``Checkpointer`` when the job's ranks are gone: what they
had committed is made whole again in the stores of all nodes, and drained.

The ranks of a job lie on the nodes in their order, as many on each: shards of rank r belong to node
r // (ranks of a node). That is what torchrun does.

Never: decides what counts (``protocol``); does anything while a rank of the job lives.

Invariants
- Only what all ranks had voted for is copied, and what arrives is compared with its manifest.
- A holder whose shards fail is left out by all nodes, as in a restore; each round leaves out one at
  least, so that the rounds end.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from cxlfs.errors import CxlfsError, JobMessageError, UndecidedError
from cxlfs.job import copying, files, lines, medium
from cxlfs.job.agent.events import Event, Tell
from cxlfs.job.engines import Engine, Link, gather
from cxlfs.job.engines.rendezvous import unheard
from cxlfs.job.exchange import Failures, exchange
from cxlfs.job.protocol import (
    Attempt,
    Choice,
    Inventory,
    Transfer,
    decode,
    digest_of,
    encode,
    fetches,
    judge,
    missing_copies,
    place_copies,
    rounds,
    verdict_on,
)
from cxlfs.job.protocol.messages import Stock
from cxlfs.job.protocol.planning import Excluded
from cxlfs.job.tier import Tier
from cxlfs.plain import PlainError, fields, number, parse, row, truth

LINKS_MAX = 4
"""Of a node at once: each takes as much memory as ``copying`` says."""
_BYTES_MAX = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """As those of the job's ``Checkpointer``."""

    replicas: int
    domain: str
    deadline_seconds: float
    tier: str | None = None
    tier_every: int = 1
    tier_keep: int | None = None
    placement: str = "groups"


class Tending:
    """Raises OSError, JobFilesError."""

    def __init__(self, root: Path, settings: Settings, tell: Tell) -> None:
        self._root = root
        self._settings = settings
        self._tell = tell
        self._store = medium.identity(root)
        self._engine: Engine | None = None
        self._wants = True
        self._calls = 0
        self._said: list[str] = []

    # --- rounds -----------------------------------------------------------------------------

    def begin(self, engine: Engine) -> None:
        self._engine = engine
        self._wants = True
        self._calls = 0
        self._said = []

    def report(self) -> bytes:
        """Raises OSError."""
        lives = medium.has_ranks(self._root)
        self._wants = self._wants or lives
        return json.dumps({"lives": lives, "wants": self._wants}).encode()

    def decide(self, told: list[bytes], *, is_last: bool) -> bytes:
        """Rank 0's part. Raises JobMessageError."""
        reports = [_read(body, ("lives", "wants")) for body in told]
        lives = [rank for rank, (lives, _) in enumerate(reports) if lives]
        tends = not lives and any(wants for _, wants in reports)
        return json.dumps({"tends": tends, "is_in_vain": is_last and bool(lives)}).encode()

    def carry_out(self, data: bytes) -> None:
        """Raises CxlfsError, OSError."""
        tends, is_in_vain = _read(data, ("tends", "is_in_vain"))
        if is_in_vain:
            raise UndecidedError("ranks of the job live", next_step="wait until they have ended")
        if tends:
            self._wants = False
            self.tend()

    def end(self) -> None:
        """Nothing is on its way."""

    # --- making whole -----------------------------------------------------------------------

    def tend(self) -> None:
        """Raises UndecidedError, JobMessageError, JobConfigurationError, OSError."""
        rows = self._stocks()
        world = _world_of(rows)
        if world == 0:
            self._tell(Event("tended", "there is nothing of a job here"))
            return
        size = self._group().world().size
        if world % size:
            text = f"{world} ranks do not lie on {size} nodes, as many on each"
            next_step = "start an agent on each node of the job, and say how many there are"
            self._tell(Event("not-tended", text, next_step))
            return
        own = _PerNode(world // size, self._group().world().rank)
        self._make_whole(own, rows)
        self._drain(own)

    def _make_whole(self, own: _PerNode, rows: Sequence[Inventory]) -> None:
        """What the job resumes from: in the stores of its ranks, with its copies."""
        excluded: set[Excluded] = set()
        inventories = [rows[own.node(rank)] for rank in range(own.count * len(rows))]
        while True:
            verdict = judge(inventories, excluded, can_fetch=True)
            choice = verdict.choice
            if choice is None:
                text = "; ".join(verdict.reasons) or "nothing was committed"
                next_step = "start the job: what its own stores have it finds itself"
                if len(verdict.heads) > 1:
                    next_step = f"say which counts: cxlfs job decide {self._root} --resume LINE"
                self._tell(Event("not-tended", text, next_step))
                return
            lines.keep(self._root, verdict.seen.lineage.lines.values())
            failed = self._exchange(own, choice, fetches(choice, inventories))
            if not failed:
                break
            excluded |= {Excluded(choice.attempt, t.shard, choice.holders[t.shard]) for t in failed}
        digest = digest_of(choice.manifests)
        for rank in own.ranks():
            files.record_commit(self._root, choice.attempt, rank, digest)
        is_ring = self._settings.placement == "ring"
        placement = place_copies(inventories, self._settings.replicas, ring=is_ring)
        missing = missing_copies(placement, choice, inventories, excluded)
        failed = self._exchange(own, choice, missing)
        self._say(choice.attempt, len(missing) - len(failed), len(failed))

    def _say(self, attempt: Attempt, made: int, failed: int) -> None:
        if failed:
            text = f"step {attempt.step}: {failed} copies could not be made"
            next_step = "look at the log; the job's next commit makes its own"
            self._tell(Event("not-tended", text, next_step, attempt.step))
        else:
            text = f"step {attempt.step} is whole on all nodes; copies that were made: {made}"
            self._tell(Event("tended", text, step=attempt.step))

    # --- shards on their way ----------------------------------------------------------------

    def _exchange(
        self, own: _PerNode, choice: Choice, transfers: Iterable[Transfer]
    ) -> set[Transfer]:
        """From node to node. Which of all of them failed, at either end."""
        attempt, manifests = choice.attempt, choice.manifests
        wanted = {Transfer(t.shard, own.node(t.source), own.node(t.target)): t for t in transfers}
        self._calls += 1
        name, seconds = f"tend/{self._calls}", self._settings.deadline_seconds

        def send(link: Link, transfer: Transfer) -> None:
            directory = files.rank_path(self._root, attempt, transfer.shard)
            copying.send_sealed(link, directory, manifests[transfer.shard])

        def receive(link: Link, transfer: Transfer) -> None:
            shard = transfer.shard
            expected = copying.Wanted(attempt, shard, len(manifests), manifests[shard])
            copying.receive(link, self._root, expected)

        failures: Failures = {}
        for turn in rounds(tuple(wanted), LINKS_MAX):
            failures |= exchange(self._group(), turn, name, seconds, send, receive)
        failed = [index for index, transfer in enumerate(wanted) if transfer in failures]
        told = self._gather(name, json.dumps({"failed": failed}).encode())
        everybody = {index for body in told for index in _indices(body)}
        return {transfer for n, transfer in enumerate(wanted.values()) if n in everybody}

    # --- the tier ---------------------------------------------------------------------------

    def _drain(self, own: _PerNode) -> None:
        """What this node's ranks had committed and not drained, oldest first."""
        settings = self._settings
        if settings.tier is None:
            return
        inventory, _ = files.take_stock(self._root, self._store)
        recorded = {commit.attempt for commit in inventory.commits}
        for held in inventory.held:
            attempt, rank = held.attempt, held.rank
            is_due = rank in own.ranks() and attempt.number % settings.tier_every == 0
            if (
                attempt not in recorded
                or not is_due
                or files.has_drained(self._root, attempt, rank)
            ):
                continue
            tier = Tier(
                *(settings.tier, self._root, rank),
                every=settings.tier_every,
                keep=settings.tier_keep,
            )
            tier.begin(attempt, held.world)
            tier.wait(settings.deadline_seconds)
            failure, what = tier.failure(), f"step {attempt.step}, rank {rank}"
            if failure is not None:
                text = f"{what}: {failure.message}"
                self._tell(Event("not-drained", text, failure.next_step, attempt.step))
                return
            self._tell(Event("drained", f"{what}: it is in the tier", step=attempt.step))

    # --- talking ----------------------------------------------------------------------------

    def _stocks(self) -> list[Inventory]:
        """Of all nodes."""
        self._calls += 1
        own = files.logged_inventory(self._root, self._store, self._settings.domain)
        found = []
        for data in self._gather(f"stock/{self._calls}", encode(Stock(own))):
            body = decode(data)
            if not isinstance(body, Stock) or body.inventory is None:
                raise JobMessageError("a message in the place of an inventory")
            found.append(body.inventory)
        return found

    def _gather(self, key: str, body: bytes) -> list[bytes]:
        """By node. Raises UndecidedError."""
        engine = self._group()
        self._said.append(key)
        heard = gather(engine, key, body, self._settings.deadline_seconds)
        missing = [rank for rank in range(engine.world().size) if rank not in heard]
        if missing:
            raise unheard(missing)
        while len(self._said) > 2:  # all have heard what came before the last
            engine.forget(self._said.pop(0))
        return [heard[rank] for rank in sorted(heard)]

    def _group(self) -> Engine:
        if self._engine is None:
            raise CxlfsError("no group yet")
        return self._engine


@dataclasses.dataclass(frozen=True, slots=True)
class _PerNode:
    """``count`` ranks of the job on each node; this one has ``number``."""

    count: int
    number: int

    def node(self, rank: int) -> int:
        return rank // self.count

    def ranks(self) -> range:
        return range(self.number * self.count, (self.number + 1) * self.count)


def _world_of(rows: Sequence[Inventory]) -> int:
    """Of what the job resumes from, or of the attempt with the largest number where that is not
    known; 0: there is none.
    """
    head = verdict_on(rows).head
    held = [held for inventory in rows for held in inventory.held]
    found = [each for each in held if each.attempt == head] or held
    return max(found).world if found else 0


def _indices(body: bytes) -> tuple[int, ...]:
    try:
        return row(fields(parse(body, _BYTES_MAX), ("failed",))["failed"], number)
    except PlainError as error:
        raise JobMessageError(f"what an agent could not copy: {error}") from None


def _read(body: bytes, names: tuple[str, ...]) -> tuple[bool, ...]:
    try:
        found = fields(parse(body, _BYTES_MAX), names)
        return tuple(truth(found[name]) for name in names)
    except PlainError as error:
        raise JobMessageError(f"what an agent has: {error}") from None
