"""Where copies belong: never two in one failure domain, the same on all ranks, evenly."""

from __future__ import annotations

import collections
import dataclasses
import math
import random

import pytest

from cxlfs.errors import JobConfigurationError
from cxlfs.job.protocol import (
    Attempt,
    Choice,
    Held,
    Inventory,
    Placement,
    Transfer,
    copysets,
    fetches,
    missing_copies,
    place_copies,
    rounds,
)
from cxlfs.job.protocol.planning import Excluded

ATTEMPT = Attempt(1, 100, "a")


def job(*seats: str) -> list[Inventory]:
    """Each rank's store, with its domain behind a colon; its own where there is none."""
    parts = [seat.partition(":") for seat in seats]
    return [Inventory(store, domain=domain or store) for store, _, domain in parts]


def nodes(count: int, ranks_each: int = 1, domains: int = 0) -> list[Inventory]:
    """Ranks in the order of their nodes; ``domains``: neighbours share one, or none do."""
    each = -(-count // domains) if domains else 1
    return job(*(f"s{i}:d{i // each}" for i in range(count) for _ in range(ranks_each)))


def holders(placement: Placement, inventories: list[Inventory], rank: int) -> list[Inventory]:
    return [inventories[holder] for holder in (rank, *placement.targets[rank])]


def test_pairs() -> None:
    assert place_copies(nodes(4), 2).targets == ((1,), (0,), (3,), (2,))


def test_three_nodes_and_two_copies_are_a_ring() -> None:
    assert place_copies(nodes(3), 2).targets == ((1,), (2,), (0,))
    assert place_copies(nodes(5), 2).targets == ((1,), (4,), (3,), (2,), (0,))


def test_ranks_of_a_node_meet_ranks_of_another() -> None:
    assert place_copies(nodes(2, ranks_each=3), 2).targets == ((3,), (4,), (5,), (0,), (1,), (2,))
    uneven = job("a", "a", "a", "b")
    assert place_copies(uneven, 2).targets == ((3,), (3,), (3,), (0,))


def test_nodes_of_one_rack_do_not_keep_each_others() -> None:
    assert place_copies(nodes(4, domains=2), 2).targets == ((2,), (3,), (0,), (1,))
    assert place_copies(job("a:x", "b:x", "c:x", "d:y"), 2).targets == ((3,), (3,), (3,), (1,))


@pytest.mark.parametrize("ring", [False, True])
def test_any_job(rng: random.Random, ring: bool) -> None:
    for _ in range(300):
        stores, count = rng.randrange(1, 13), rng.randrange(1, 13)
        domain = [f"d{rng.randrange(count)}" for _ in range(stores)]
        found = [rng.randrange(stores) for _ in range(rng.randrange(1, 30))]
        inventories = job(*(f"s{i}:{domain[i]}" for i in found))
        known = {inventory.domain for inventory in inventories}
        replicas = rng.randrange(1, 5)
        if len(known) < replicas:
            with pytest.raises(JobConfigurationError, match="failure domains"):
                place_copies(inventories, replicas, ring=ring)
            continue
        placement = place_copies(inventories, replicas, ring=ring)
        for rank in range(len(inventories)):
            its = holders(placement, inventories, rank)
            assert len({i.store for i in its}) == len({i.domain for i in its}) == replicas


@pytest.mark.parametrize("count", [4, 5, 7, 12, 100])
@pytest.mark.parametrize("replicas", [2, 3])
def test_no_store_keeps_more_than_another(count: int, replicas: int) -> None:
    inventories = nodes(count)
    for ring in (False, True):
        placement = place_copies(inventories, replicas, ring=ring)
        kept = collections.Counter(target for row in placement.targets for target in row)
        assert set(kept.values()) == {replicas - 1}
        assert len(kept) == count


@pytest.mark.parametrize(("replicas", "groups", "ring"), [(2, 50, 100), (3, 33 + 3, 100)])
def test_fewer_losses_take_all_copies_than_with_a_ring(
    replicas: int, groups: int, ring: int
) -> None:
    """What docs/job.md says of 100 nodes; 100 nodes are 32 groups of 3 and one of 4."""
    inventories = nodes(100)
    for in_ring, count in ((False, groups), (True, ring)):
        placement = place_copies(inventories, replicas, ring=in_ring)
        found = len(copysets(placement, inventories))
        print(f"{found} of {math.comb(100, replicas)}: {found / math.comb(100, replicas):.3%}")
        assert found == count


def test_a_replaced_store_changes_nobody_elses_group() -> None:
    before = nodes(12, ranks_each=2, domains=3)
    after = [i if i.store != "s5" else Inventory("new", domain=i.domain) for i in before]
    assert place_copies(before, 2) == place_copies(after, 2)


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(JobConfigurationError, match="ranks 0, 2 share a store"):
        place_copies(job("a:x", "b:y", "a:z"), 2)
    with pytest.raises(JobConfigurationError, match="2 failure domains, and there are 1: x"):
        place_copies(job("a:x", "b:x"), 2)


def choice(*held_by: str) -> Choice:
    return Choice(ATTEMPT, "", ("m",) * len(held_by), held_by)


def test_what_a_store_lacks_comes_from_ranks_that_have_the_holder() -> None:
    inventories = job("a", "a", "b", "b")
    assert fetches(choice("a", "a", "b", "b"), inventories) == ()
    assert fetches(choice("b", "a", "a", "a"), inventories) == (
        Transfer(0, 2, 0),
        Transfer(2, 0, 2),
        Transfer(3, 1, 3),
    )


def test_what_is_missing_or_damaged_is_copied_again() -> None:
    held = [Held(ATTEMPT, rank, 2, "m") for rank in range(2)]
    full = [Inventory("a", (held[0], held[1]), (), "a"), Inventory("b", (held[1],), (), "b")]
    placement = place_copies(full, 2)
    picked = choice("a", "b")
    assert missing_copies(placement, picked, full, ()) == (Transfer(0, 0, 1),)
    damaged = [Excluded(ATTEMPT, 1, "a"), Excluded(Attempt(2, 1, "b"), 0, "a")]
    assert missing_copies(placement, picked, full, damaged) == (
        Transfer(0, 0, 1),
        Transfer(1, 1, 0),
    )
    changed = Inventory("b", (dataclasses.replace(held[0], manifest="other"), held[1]), (), "b")
    assert missing_copies(placement, picked, [full[0], changed], ()) == (Transfer(0, 0, 1),)


def test_rounds_keep_ranks_from_having_too_many_at_once(rng: random.Random) -> None:
    transfers = [Transfer(n, *rng.sample(range(6), 2)) for n in range(80)]
    for width in (1, 4):
        found = rounds(transfers, width)
        assert sorted(t for some in found for t in some) == sorted(transfers)
        for some in found:
            ends = collections.Counter(end for t in some for end in (t.source, t.target))
            assert max(ends.values()) <= width
        assert len(found) <= 2 * 80 // width
    assert rounds([], 4) == []
