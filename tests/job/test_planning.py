"""Which checkpoint is chosen, why others are not, and what may be given back."""

from __future__ import annotations

import pytest

from cxlfs.job.protocol import (
    Attempt,
    Commit,
    Held,
    Inventory,
    Lineage,
    choose,
    collectable,
    digest_of,
    next_number,
)
from cxlfs.job.protocol.planning import Excluded

OLD, NEW = Attempt(1, 100, "a"), Attempt(2, 50, "b")


def held(attempt: Attempt, rank: int, world: int = 2, manifest: str = "") -> Held:
    return Held(attempt, rank, world, manifest or f"{attempt.id}{rank}")


def stores(*rows: tuple[Held, ...]) -> list[Inventory]:
    return [Inventory(f"s{index}", row) for index, row in enumerate(rows)]


def test_the_newest_is_that_of_the_largest_number() -> None:
    rows = [(held(OLD, rank), held(NEW, rank)) for rank in range(2)]
    choice, reasons = choose(stores(*rows), can_fetch=False)
    assert choice is not None
    assert (choice.attempt, choice.holders, reasons) == (NEW, ("s0", "s1"), ())
    assert choice.digest == digest_of(["b0", "b1"])


def test_one_that_a_rank_did_not_vote_for_is_none() -> None:
    choice, reasons = choose(stores((held(OLD, 0), held(NEW, 0)), (held(OLD, 1),)), can_fetch=True)
    assert choice is not None
    assert choice.attempt == OLD
    assert reasons == ()


@pytest.mark.parametrize("is_recorded", [False, True])
def test_nothing_older_than_what_another_number_of_ranks_has_committed(is_recorded: bool) -> None:
    rows = [(held(OLD, 0), held(NEW, 0, 3)), (held(OLD, 1), held(NEW, 1, 3))]
    found = stores(*rows)
    if is_recorded:
        found[0] = Inventory("s0", rows[0], (Commit(NEW, "d"),))
    else:
        found[1] = Inventory("s1", (*rows[1], held(NEW, 2, 3)))
    choice, reasons = choose(found, can_fetch=True)
    assert choice is None
    assert reasons == ("step 50 (attempt b, number 2): it is of another number of ranks than 2",)


def test_what_another_number_of_ranks_has_not_finished_is_passed_by() -> None:
    rows = [(held(OLD, 0), held(NEW, 0, 3)), (held(OLD, 1), held(NEW, 1, 3))]
    choice, _ = choose(stores(*rows), can_fetch=True)
    assert choice is not None
    assert choice.attempt == OLD


def test_ranks_that_changed_places_fetch_or_do_without() -> None:
    swapped = stores((held(OLD, 1),), (held(OLD, 0),))
    choice, _ = choose(swapped, can_fetch=True)
    assert choice is not None
    assert choice.holders == ("s1", "s0")
    choice, reasons = choose(swapped, can_fetch=False)
    assert choice is None
    assert "rank 0 can load its shards from none of s1" in reasons[0]


def test_the_own_store_comes_first_and_then_a_copy() -> None:
    rows = stores((held(OLD, 0), held(OLD, 1)), (held(OLD, 1), held(OLD, 0)))
    choice, _ = choose(rows, can_fetch=True)
    assert choice is not None
    assert choice.holders == ("s0", "s1")
    choice, _ = choose(rows, {Excluded(OLD, 1, "s1")}, can_fetch=True)
    assert choice is not None
    assert choice.holders == ("s0", "s0")


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        (
            ((held(OLD, 0), held(OLD, 1)), (held(OLD, 1, manifest="other"),)),
            "stores differ in the shards of rank 1",
        ),
    ],
)
def test_what_contradicts_itself_is_not_chosen(
    rows: tuple[tuple[Held, ...], ...], reason: str
) -> None:
    choice, reasons = choose(stores(*rows), can_fetch=True)
    assert choice is None
    assert reason in reasons[0]


def test_of_manifests_that_differ_the_recorded_commit_decides() -> None:
    """Whoever has another one is no holder, be it the rank's own store."""
    rows = stores(
        (held(OLD, 0, manifest="other"), held(OLD, 1)), (held(OLD, 1, manifest="x"), held(OLD, 0))
    )
    commit = Commit(OLD, digest_of(["a0", "a1"]))
    choice, _ = choose([rows[0], Inventory("s1", rows[1].held, (commit,))], can_fetch=True)
    assert choice is not None
    assert (choice.manifests, choice.holders) == (("a0", "a1"), ("s1", "s0"))
    both = (commit, Commit(OLD, digest_of(["other", "a1"])))
    choice, reasons = choose([rows[0], Inventory("s1", rows[1].held, both)], can_fetch=True)
    assert choice is None
    assert "stores differ in the shards of rank 0, 1" in reasons[0]


def test_stores_that_differ_in_everything_end() -> None:
    """Not every way to choose from them is looked at."""
    rows = [tuple(held(OLD, rank, 40, f"{rank}.{n}") for rank in range(40)) for n in range(40)]
    commit = Commit(OLD, digest_of([f"{rank}.39" for rank in range(40)]))
    found = [Inventory(f"s{n}", row, (commit,)) for n, row in enumerate(rows)]
    assert "stores differ" in choose(found, can_fetch=True)[1][0]


def test_shards_that_were_not_voted_for_are_not_chosen() -> None:
    rows = stores((held(OLD, 0),), (held(OLD, 1),))
    right = Commit(OLD, digest_of(["a0", "a1"]))
    wrong = Commit(OLD, digest_of(["a0", "x"]))
    for commit, chosen in ((right, True), (wrong, False)):
        found = [Inventory("s0", rows[0].held, (commit,)), rows[1]]
        assert (choose(found, can_fetch=True)[0] is not None) == chosen


def test_the_next_number_is_larger_than_any() -> None:
    assert next_number(stores((), ())) == 1
    assert next_number([Inventory("s0", (held(OLD, 0),), (Commit(Attempt(9, 1, "c"), ""),))]) == 10


def test_what_is_given_back() -> None:
    attempts = [Attempt(number, number, "a" * 20) for number in range(1, 7)]
    commits = tuple(Commit(attempts[i], "") for i in (0, 2, 3))
    inventory = Inventory("s", tuple(held(attempt, 0) for attempt in attempts), commits)
    committed = attempts[4]
    for keep, kept in ((1, {5}), (2, {4, 5}), (3, {3, 4, 5}), (9, {1, 3, 4, 5}), (0, {5})):
        gone = {attempt.number for attempt in collectable(inventory, committed, keep, Lineage())}
        assert gone == {1, 2, 3, 4, 5} - kept
