"""Which checkpoint all ranks load, and from whom; the line that begins so; what may be given back.

Pure functions of what was gathered: every rank computes the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import itertools
import json
from collections.abc import Collection, Sequence

from cxlfs.job.protocol.lineage import Lineage, LineageError, Seen, line_id
from cxlfs.job.protocol.model import (
    TIER,
    Attempt,
    Decision,
    Held,
    Inventory,
    Line,
    digest_of,
)

_TRIED_MAX = 256
"""Ways to choose from stores that differ: eight ranks of two manifests each."""
_NAMED_MAX = 8
"""Attempts that an operator is told could be loaded."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Excluded:
    """A holder whose shards of an attempt could not be loaded."""

    attempt: Attempt
    shard: int
    holder: str


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Rank i loads shard i: of manifest ``manifests[i]``, from store ``holders[i]``."""

    attempt: Attempt
    digest: str
    manifests: tuple[str, ...]
    holders: tuple[str, ...]


class Refusal(Exception):  # noqa: N818 - a reason why an attempt is not chosen, no error of anybody's
    """Why an attempt cannot be loaded."""


class Kind(enum.Enum):
    RESUME = "resume"
    NOTHING = "nothing"
    ASK = "ask"
    """An operator has to decide."""
    REFUSE = "refuse"
    """What stores say contradicts itself, or is another job's."""
    OTHER_WORLD = "other world"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a start may do. ``heads``: attempts without a descendant, before any decision;
    ``choice``: of RESUME; ``decision``: the operator's that it follows; ``unheard``: the stores
    that may have commits which nobody has heard of. ``loadable``: of ASK.
    """

    kind: Kind
    seen: Seen
    heads: tuple[Attempt, ...] = ()
    choice: Choice | None = None
    reasons: tuple[str, ...] = ()
    decision: Decision | None = None
    unheard: tuple[str, ...] = ()
    loadable: tuple[Attempt, ...] = ()

    @property
    def head(self) -> Attempt | None:
        if self.decision is not None:
            return self.decision.resume
        return self.heads[0] if len(self.heads) == 1 else None


def choose(
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded] = (),
    *,
    can_fetch: bool,
    below: Inventory | None = None,
) -> tuple[Choice | None, tuple[str, ...]]:
    """What all ranks load; else None, and why not. See ``judge``."""
    verdict = judge(inventories, excluded, can_fetch=can_fetch, below=below)
    return verdict.choice, verdict.reasons


def judge(
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded] = (),
    *,
    can_fetch: bool,
    below: Inventory | None = None,
) -> Verdict:
    """The one attempt that may be the newest commit and has no descendant; each rank's shards have
    a holder that is not excluded, or an operator is asked: never an older attempt.
    ``inventories[i]`` is that of the store which rank i has now. Without ``can_fetch`` a rank
    loads from that store alone, or from the tier ``below``, of which every rank takes what no
    store has.
    """
    everywhere = [*inventories, *([] if below is None else [below])]
    try:
        seen = Seen(everywhere)
        heads = seen.heads()
        jobs = sorted({each.job for each in everywhere if each.job})
        if len(jobs) > 1:
            return Verdict(Kind.REFUSE, seen, heads, reasons=(_of_two_jobs(everywhere),))
        decision = _decision_about(heads, everywhere)
        head = decision.resume if decision is not None else heads[0] if len(heads) == 1 else None
        if head is None and heads:
            found = _loadable(seen.attempts, everywhere, inventories, excluded, can_fetch=can_fetch)
            return Verdict(Kind.ASK, seen, heads, reasons=_fork(heads), loadable=found)
        unheard = _unheard(seen, head, below)
    except LineageError as error:
        return Verdict(Kind.REFUSE, Seen(()), reasons=(str(error),))
    if head is None:
        return Verdict(Kind.NOTHING, seen, heads, None, (), decision, unheard)
    try:
        choice = _choice_from(head, everywhere, inventories, excluded, can_fetch=can_fetch)
    except Refusal as refusal:
        reasons = (f"{head}: {refusal}",)
        if _is_of_another_world(head, everywhere, len(inventories)):
            return Verdict(Kind.OTHER_WORLD, seen, heads, None, reasons, decision, unheard)
        others = seen.attempts - {head}
        loadable = _loadable(others, everywhere, inventories, excluded, can_fetch=can_fetch)
        return Verdict(Kind.ASK, seen, heads, None, reasons, decision, unheard, loadable)
    return Verdict(Kind.RESUME, seen, heads, choice, (), decision, unheard)


def verdict_on(inventories: Sequence[Inventory]) -> Verdict:
    """As ``judge``, without who would load what: of any stores, for any number of ranks. RESUME:
    there is one head.
    """
    verdict = judge(inventories, can_fetch=True)
    if verdict.head is None or verdict.kind in {Kind.REFUSE, Kind.NOTHING}:
        return verdict
    return dataclasses.replace(verdict, kind=Kind.RESUME, choice=None)


def _of_two_jobs(inventories: Sequence[Inventory]) -> str:
    stores: dict[str, str] = {}
    for rank, inventory in enumerate(inventories):
        where = "the tier" if inventory.store == TIER else f"rank {rank}, store {inventory.store}"
        stores.setdefault(inventory.job, where)
    named = "; ".join(f"{where}: job {job}" for job, where in sorted(stores.items()) if job)
    return f"these are checkpoints of several jobs: {named}"


def _fork(heads: Sequence[Attempt]) -> tuple[str, ...]:
    named = " and ".join(map(str, heads))
    return (f"none of {named} leads to the other: the job has {len(heads)} histories",)


def _decision_about(
    heads: tuple[Attempt, ...], inventories: Sequence[Inventory]
) -> Decision | None:
    """The one answer to the question that is asked now. Answers that differ are none."""
    found = {each.decision for each in inventories if each.decision is not None}
    answers = {each for each in found if set(each.heads) == set(heads)}
    return answers.pop() if len(answers) == 1 else None


def _unheard(seen: Seen, head: Attempt | None, below: Inventory | None) -> tuple[str, ...]:
    """Stores that may have commits of which nobody has heard."""
    found = seen.unheard(head)
    if head is not None or found:
        return found
    lines = seen.lineage.lines.values()
    has_begun_unseen = below is not None and bool(below.job) and not lines
    if has_begun_unseen or any(each.parent is None and each.is_provisional for each in lines):
        return ("those of another first start of this job",)
    return ()


def _loadable(
    attempts: Collection[Attempt],
    everywhere: Sequence[Inventory],
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded],
    *,
    can_fetch: bool,
) -> tuple[Attempt, ...]:
    """The latest of them that could be loaded."""
    found = []
    for attempt in sorted(attempts, reverse=True):
        with contextlib.suppress(Refusal):
            _choice_from(attempt, everywhere, inventories, excluded, can_fetch=can_fetch)
            found.append(attempt)
    return tuple(found[:_NAMED_MAX])


def _choice_from(
    attempt: Attempt,
    everywhere: Sequence[Inventory],
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded],
    *,
    can_fetch: bool,
) -> Choice:
    """Raises Refusal."""
    held = {(h, i.store) for i in everywhere for h in i.held if h.attempt == attempt}
    known = {c.digest for i in everywhere for c in i.commits if c.attempt == attempt}
    return _choice_of(attempt, held, known, inventories, excluded, can_fetch=can_fetch)


def _is_of_another_world(attempt: Attempt, inventories: Sequence[Inventory], world: int) -> bool:
    worlds = {h.world for i in inventories for h in i.held if h.attempt == attempt}
    return bool(worlds) and worlds != {world}


# --- the line of a start ------------------------------------------------------------------------


def line_after(
    verdict: Verdict,
    inventories: Sequence[Inventory],
    targets: Sequence[Sequence[str]],
    nonces: Sequence[str],
    began: int,
) -> Line:
    """The record of the start that follows a verdict, the same on all ranks."""
    seen, head, choice = verdict.seen, verdict.head, verdict.choice
    lineage, is_decided = seen.lineage, verdict.decision is not None
    known = lineage.known_to(head)
    old = {name for line in lineage.led_by(head) for name in line.settled}
    is_settled = is_decided or not verdict.unheard
    line = Line(
        "",
        next((each.job for each in seen.inventories if each.job), ""),
        head,
        "" if choice is None else choice.digest,
        tuple(inventory.store for inventory in inventories),
        tuple(map(tuple, targets)),
        tuple(sorted(lineage.lines.keys() - known)),
        () if is_decided else seen.closes(head),
        tuple(sorted(lineage.lines.keys() - old)) if is_settled else (),
        seen.gives_up(head) if is_decided and head is not None else (),
        bool(verdict.unheard),
        began,
    )
    own = line_id(nonces, json.dumps(dataclasses.asdict(line), sort_keys=True))
    return dataclasses.replace(line, id=own, job=line.job or own)


# --- an attempt ---------------------------------------------------------------------------------


def _choice_of(
    attempt: Attempt,
    holdings: Collection[tuple[Held, str]],
    known: Collection[str],
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded],
    *,
    can_fetch: bool,
) -> Choice:
    """``known``: digests of recorded commits. Raises Refusal."""
    world = len(inventories)
    if any(held.world != world for held, _ in holdings):
        raise Refusal(f"it is of another number of ranks than {world}")
    by_rank: dict[int, list[tuple[str, str]]] = {}
    for held, store in holdings:
        by_rank.setdefault(held.rank, []).append((held.manifest, store))
    for rank in range(world):
        if rank not in by_rank:
            raise Refusal(f"no store has the shards of rank {rank}")
    manifests = voted_for([{m for m, _ in by_rank[rank]} for rank in range(world)], known)
    holders = []
    for rank, inventory in enumerate(inventories):
        stores = {store for manifest, store in by_rank[rank] if manifest == manifests[rank]}
        usable = {s for s in stores if Excluded(attempt, rank, s) not in excluded}
        if not can_fetch:
            usable &= {inventory.store, TIER}
        if not usable:
            raise Refusal(f"rank {rank} can load its shards from none of {_list_of(stores)}")
        nearest = min(usable - {TIER}, default=TIER)
        holders.append(inventory.store if inventory.store in usable else nearest)
    return Choice(attempt, digest_of(manifests), manifests, tuple(holders))


def voted_for(told: Sequence[Collection[str]], known: Collection[str]) -> tuple[str, ...]:
    """The manifest that each rank has voted with, of those that stores have of it (``told[rank]``,
    one at least). Where they differ the recorded commits decide, whose digests are ``known``.

    Raises Refusal.
    """
    differing = ", ".join(str(rank) for rank, each in enumerate(told) if len(each) > 1)
    ways = itertools.product(*(sorted(each) for each in told))
    for manifests in itertools.islice(ways, _TRIED_MAX):
        if set(known) == {digest_of(manifests)} or not (known or differing):
            return manifests
    if differing:
        raise Refusal(f"stores differ in the shards of rank {differing}")
    raise Refusal("the shards are not those that were voted for")


def _list_of(stores: Collection[str]) -> str:
    return ", ".join(sorted(stores))


def recorders_of(inventories: Sequence[Inventory]) -> frozenset[int]:
    """One rank of each store, the first: it records there what is committed."""
    first: dict[str, int] = {}
    for rank, inventory in enumerate(inventories):
        first.setdefault(inventory.store, rank)
    return frozenset(first.values())


def collectable(
    inventory: Inventory, committed: Attempt, keep: int, lineage: Lineage
) -> list[Attempt]:
    """What a store gives back once ``committed`` is recorded in every store: all that leads to it,
    but for the newest ``keep`` of these that are recorded as committed, ``committed`` among them;
    and what the lines that led to it have closed, or a decision was against.
    """
    recorded = {commit.attempt for commit in inventory.commits} | {committed}
    known = {held.attempt for held in inventory.held} | recorded
    older = [a for a in known if a in recorded and lineage.leads_to(a, committed)]
    kept = set(sorted(older, reverse=True)[: max(keep, 1)])
    return sorted(
        attempt
        for attempt in known - kept
        if lineage.is_behind(attempt, committed, is_recorded=attempt in recorded)
    )
