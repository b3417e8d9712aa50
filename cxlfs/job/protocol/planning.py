"""Which checkpoint all ranks load, and from whom; what may be given back; the next number.

Pure functions of what was gathered: every rank computes the same.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence

from cxlfs.job.protocol.model import TIER, Attempt, Held, Inventory, digest_of

_TRIED_MAX = 256
"""Ways to choose from stores that differ: eight ranks of two manifests each."""


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


def choose(
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded] = (),
    *,
    can_fetch: bool,
    below: Inventory | None = None,
) -> tuple[Choice | None, tuple[str, ...]]:
    """The newest attempt that all have voted for, and of which each rank's shards have a holder
    that is not excluded; ``inventories[i]`` is that of the store which rank i has now. Without
    ``can_fetch`` a rank loads from that store alone, or from the tier ``below``, of which every
    rank takes what no store has. Else None; and why not newer ones, or any.
    """
    everywhere = [*inventories, *([] if below is None else [below])]
    by_attempt: dict[Attempt, set[tuple[Held, str]]] = {}
    for inventory in everywhere:
        for held in inventory.held:
            by_attempt.setdefault(held.attempt, set()).add((held, inventory.store))
    for inventory in everywhere:
        for commit in inventory.commits:
            by_attempt.setdefault(commit.attempt, set())
    reasons: list[str] = []
    others = of_other_worlds(everywhere, len(inventories))
    for attempt in sorted(by_attempt, reverse=True):
        if attempt in others:
            told = f"{attempt}: it is of another number of ranks than {len(inventories)}"
            return None, (*reasons, told)
        known = {c.digest for i in everywhere for c in i.commits if c.attempt == attempt}
        try:
            choice = _choice_of(
                *(attempt, by_attempt[attempt], known, inventories, excluded),
                can_fetch=can_fetch,
            )
        except Refusal as refusal:
            reasons.append(f"{attempt}: {refusal}")
        else:
            return choice, tuple(reasons)
    return None, tuple(reasons)


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


def of_other_worlds(inventories: Sequence[Inventory], world: int) -> set[Attempt]:
    """What another number of ranks than ``world`` has committed: all of these have voted for it, or
    somebody has recorded it. Nothing older is loaded in its place.
    """
    votes: dict[Attempt, set[tuple[int, int]]] = {}
    for held in (held for inventory in inventories for held in inventory.held):
        if held.world != world:
            votes.setdefault(held.attempt, set()).add((held.world, held.rank))
    recorded = {commit.attempt for inventory in inventories for commit in inventory.commits}
    return {
        attempt
        for attempt, found in votes.items()
        if attempt in recorded or any(len(found) >= size for size, _ in found)
    }


def next_number(inventories: Sequence[Inventory]) -> int:
    """Larger than that of every attempt that any of the stores knows."""
    numbers = [held.attempt.number for inventory in inventories for held in inventory.held]
    numbers += [commit.attempt.number for inventory in inventories for commit in inventory.commits]
    return max(numbers, default=0) + 1


def recorders_of(inventories: Sequence[Inventory]) -> frozenset[int]:
    """One rank of each store, the first: it records there what is committed."""
    first: dict[str, int] = {}
    for rank, inventory in enumerate(inventories):
        first.setdefault(inventory.store, rank)
    return frozenset(first.values())


def collectable(inventory: Inventory, committed: Attempt, keep: int) -> list[Attempt]:
    """What a store gives back once ``committed`` is recorded in every store: all that is older, but
    for the newest ``keep`` that are recorded as committed, ``committed`` among them.
    """
    recorded = {commit.attempt for commit in inventory.commits} | {committed}
    older = sorted((a for a in recorded if a <= committed), reverse=True)
    kept = set(older[: max(keep, 1)])
    known = {held.attempt for held in inventory.held} | recorded
    return sorted(attempt for attempt in known if attempt < committed and attempt not in kept)
