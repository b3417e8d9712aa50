"""Whose shards are copied to which ranks, so that no failure takes all copies of one.

Stores are put into *groups* of as many as there are replicas, each of another failure domain; what
a store holds is copied to the others of its group. A store that is left over joins a group, in
which each then copies to those behind it. ``docs/job.md`` says why groups, and not one ring.

Pure functions of what was gathered: every rank computes the same.

Invariants
- The copies of a rank's shards, its own among them, lie in stores of different domains.
- As long as the ranks keep their order, a store that was replaced changes nobody else's group.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Sequence

from cxlfs.errors import JobConfigurationError
from cxlfs.job.protocol.model import TIER, Inventory
from cxlfs.job.protocol.planning import Choice, Excluded

PLACEMENTS = ("groups", "ring")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Transfer:
    """The shards of rank ``shard`` go from rank ``source``'s store to rank ``target``'s."""

    shard: int
    source: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """``targets[i]``: the ranks that keep a copy of rank i's shards, each in its store."""

    targets: tuple[tuple[int, ...], ...]

    def transfers(self) -> tuple[Transfer, ...]:
        """What is to be brought where when all ranks have saved."""
        return tuple(
            Transfer(rank, rank, target)
            for rank, targets in enumerate(self.targets)
            for target in targets
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A store, and the ranks that have it."""

    store: str
    domain: str
    ranks: tuple[int, ...]


def place_copies(
    inventories: Sequence[Inventory], replicas: int, *, ring: bool = False
) -> Placement:
    """``inventories[i]``: of the store that rank i has. ``ring``: one group of all, in which each
    store copies to those behind it.

    Raises JobConfigurationError (there are fewer domains than replicas; ranks that share a store
    differ in its domain).
    """
    nodes = _nodes(inventories)
    domains = {node.domain for node in nodes}
    if len(domains) < replicas:
        named = ", ".join(sorted(domains)[:8])
        raise JobConfigurationError(
            f"{replicas} replicas lie in {replicas} failure domains, and there are "
            f"{len(domains)}: {named}",
            next_step="state the domain of each rank's store (domain=, CXLFS_DOMAIN), start on "
            "more nodes, or lower replicas",
        )
    targets: list[tuple[int, ...]] = [()] * len(inventories)
    for group in [_mixed(nodes)] if ring else _groups(nodes, replicas):
        for index, node in enumerate(group):
            behind = group[index + 1 :] + group[:index]
            holders = _holders(node, behind, replicas - 1)
            for local, rank in enumerate(node.ranks):
                targets[rank] = tuple(h.ranks[local % len(h.ranks)] for h in holders)
    return Placement(tuple(targets))


def stores_of_copies(
    inventories: Sequence[Inventory], replicas: int, placement: str
) -> tuple[tuple[str, ...], ...]:
    """For each rank the stores that keep copies of its shards. Raises JobConfigurationError."""
    if replicas == 1:
        return ((),) * len(inventories)
    placed = place_copies(inventories, replicas, ring=placement == "ring")
    return tuple(tuple(inventories[t].store for t in targets) for targets in placed.targets)


def _nodes(inventories: Sequence[Inventory]) -> list[_Node]:
    """In the order of their lowest ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        ranks.setdefault(inventory.store, []).append(rank)
    nodes = []
    for store, own in ranks.items():
        stated = {inventories[rank].domain for rank in own}
        if len(stated) > 1:
            raise JobConfigurationError(
                f"ranks {', '.join(map(str, own))} share a store and state different failure "
                f"domains for it: {', '.join(sorted(stated))}",
                next_step="state one domain for a store (domain=, CXLFS_DOMAIN)",
            )
        nodes.append(_Node(store, stated.pop(), tuple(own)))
    return nodes


def _by_domain(nodes: Sequence[_Node]) -> dict[str, list[_Node]]:
    found: dict[str, list[_Node]] = {}
    for node in nodes:
        found.setdefault(node.domain, []).append(node)
    return found


def _groups(nodes: Sequence[_Node], count: int) -> list[list[_Node]]:
    """From the domains of which most is left: so that as little as possible is left over."""
    left = _by_domain(nodes)
    groups: list[list[_Node]] = []
    while len(left) >= count:
        most = sorted(left, key=lambda domain: (-len(left[domain]), left[domain][0].ranks[0]))
        groups.append([left[domain].pop(0) for domain in most[:count]])
        left = {domain: rest for domain, rest in left.items() if rest}
    over = [node for rest in left.values() for node in rest]
    for node in sorted(over, key=lambda node: node.ranks[0]):
        strange = [sum(other.domain == node.domain for other in group) for group in groups]
        best = min(range(len(groups)), key=lambda i: (strange[i], len(groups[i]), i))
        groups[best].append(node)
    return groups


def _mixed(nodes: Sequence[_Node]) -> list[_Node]:
    """Neighbours of different domains, as far as it goes."""
    rows = list(_by_domain(nodes).values())
    longest = max(map(len, rows))
    return [row[index] for index in range(longest) for row in rows if index < len(row)]


def _holders(node: _Node, behind: Sequence[_Node], count: int) -> list[_Node]:
    """The first of them that are all of different domains."""
    holders: list[_Node] = []
    for other in behind:
        taken = {node.domain, *(holder.domain for holder in holders)}
        if len(holders) < count and other.domain not in taken:
            holders.append(other)
    return holders


# --- what is brought where when a job comes back ------------------------------------------------


def fetches(choice: Choice, inventories: Sequence[Inventory]) -> tuple[Transfer, ...]:
    """What ranks need of a choice that their own stores lack, from ranks that have the holder. What
    the tier below has each brings itself.
    """
    having: dict[str, list[int]] = {}
    for rank, inventory in enumerate(inventories):
        having.setdefault(inventory.store, []).append(rank)
    return tuple(
        Transfer(rank, having[holder][rank % len(having[holder])], rank)
        for rank, holder in enumerate(choice.holders)
        if holder not in {inventories[rank].store, TIER}
    )


def missing_copies(
    placement: Placement,
    choice: Choice,
    inventories: Sequence[Inventory],
    excluded: Collection[Excluded],
) -> tuple[Transfer, ...]:
    """What belongs in stores that do not have it, or have it damaged; each rank has its own."""
    attempt, voted = choice.attempt, set(enumerate(choice.manifests))
    having = {
        (held.rank, inventory.store)
        for inventory in inventories
        for held in inventory.held
        if held.attempt == attempt and (held.rank, held.manifest) in voted
    }
    having -= {(e.shard, e.holder) for e in excluded if e.attempt == attempt}
    return tuple(
        transfer
        for transfer in placement.transfers()
        if (transfer.shard, inventories[transfer.target].store) not in having
    )


def rounds(transfers: Sequence[Transfer], width: int) -> list[list[Transfer]]:
    """One behind the other, so that no rank is an end of more than ``width`` at once."""
    found: list[list[Transfer]] = []
    busy: dict[int, collections.Counter[int]] = {}
    for transfer in transfers:
        ends = (
            busy.setdefault(transfer.source, collections.Counter()),
            busy.setdefault(transfer.target, collections.Counter()),
        )
        turn = next(n for n in itertools.count() if all(end[n] < width for end in ends))
        for end in ends:
            end[turn] += 1
        found += [[] for _ in range(turn + 1 - len(found))]
        found[turn].append(transfer)
    return found


def copysets(placement: Placement, inventories: Sequence[Inventory]) -> frozenset[frozenset[str]]:
    """The sets of stores that hold all copies of some shard: losing one of them loses it."""
    return frozenset(
        frozenset(inventories[holder].store for holder in (rank, *targets))
        for rank, targets in enumerate(placement.targets)
    )
