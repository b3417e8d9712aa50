"""Which attempt counts when stores leave and return: histories, seeded bugs, each rule alone."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from cxlfs.job.protocol import (
    TIER,
    Attempt,
    Commit,
    Decision,
    Held,
    Inventory,
    Kind,
    Line,
    Lineage,
    Seen,
    Verdict,
    collectable,
    digest_of,
    judge,
    line_after,
)
from tests.support import lineage_mutants as mutants
from tests.support.job_stores import ViolationError
from tests.support.lineage_histories import lineage_histories

COUNT = 400
CAMPAIGN_COUNT = 100_000
CAUGHT_WITHIN = 3000
MET = (
    "collected",
    "commits",
    "damage",
    "decisions",
    "goes on",
    "provisional lines",
    "question: ask, 1 heads",
    "question: ask, 2 heads",
    "stores that went back",
    "unseen, and provisional",
)


def run(first: int, count: int, *, stops: bool) -> None:
    met: collections.Counter[str] = collections.Counter()
    for world in lineage_histories(first, count, stops=stops):
        met.update(world.counts)
    print(f"{count} histories from {first} on, stops={stops}: {dict(met)}")
    rare = {"stores that went back", "unseen, and provisional", "question: ask, 2 heads"}
    wanted = set(MET) - (rare if stops or count < CAMPAIGN_COUNT else set())
    assert [what for what in sorted(wanted) if not met[what]] == []


@pytest.mark.parametrize("stops", [False, True])
def test_histories(seed: int, *, stops: bool) -> None:
    run(seed, COUNT, stops=stops)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("stops", [False, True])
def test_a_campaign_of_histories(seed: int, *, stops: bool) -> None:
    run(seed, CAMPAIGN_COUNT, stops=stops)


@pytest.mark.parametrize("mutant", mutants.IN_HISTORIES, ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found_in_histories(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(ViolationError) as caught:
        for _ in lineage_histories(1, CAUGHT_WITHIN, stops=False):
            pass
    print(caught.value)


# --- each rule alone ----------------------------------------------------------------------------

ROOT, LEFT, RIGHT = "a" * 20, "b" * 20, "c" * 20
WORLD = 2


def line(name: str, parent: Attempt | None, *members: str, **more: object) -> Line:
    made = Line(name, ROOT, parent, "", members, tuple((m,) for m in reversed(members)))
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def attempt(name: str, number: int) -> Attempt:
    return Attempt(number, number, name)


def held(*attempts: Attempt, world: int = WORLD) -> tuple[Held, ...]:
    """All shards of them: of both ranks, as two replicas are."""
    return tuple(Held(a, rank, world, f"{a}{rank}") for a in attempts for rank in range(world))


def commit(of: Attempt, world: int = WORLD) -> Commit:
    return Commit(of, digest_of([f"{of}{rank}" for rank in range(world)]))


def store(name: str, lines: Sequence[Line], *attempts: Attempt, **more: object) -> Inventory:
    made = Inventory(name, held(*attempts), tuple(map(commit, attempts)), name, ROOT, tuple(lines))
    return dataclasses.replace(made, **more)  # type: ignore[arg-type]


def verdict(*stores: Inventory, below: Inventory | None = None) -> Verdict:
    return judge(stores, can_fetch=True, below=below)


FIRST = line(ROOT, None, "s0", "s1")
OLD, LATER = attempt(ROOT, 3), attempt(ROOT, 5)
BRANCH = line(LEFT, OLD, "s2", "s3")
BRANCHED = attempt(LEFT, 4)


def test_descent_is_asked_for_and_no_number() -> None:
    """Old stores that come back are a question, whatever their numbers."""
    new = store("s2", [FIRST, BRANCH], BRANCHED)
    for old_head in (LATER, OLD):
        found = verdict(new, store("s0", [FIRST], OLD, old_head))
        if old_head == OLD:
            assert (found.kind, found.head) == (Kind.RESUME, BRANCHED)
        else:
            assert (found.kind, found.heads) == (Kind.ASK, (BRANCHED, LATER))
            assert found.loadable[:2] == (LATER, BRANCHED)
            assert "2 histories" in found.reasons[0]


def test_a_decision_answers_the_question_that_was_asked() -> None:
    old = store("s0", [FIRST], OLD, LATER)
    answer = Decision(BRANCHED, (BRANCHED, LATER))
    new = store("s2", [FIRST, BRANCH], BRANCHED, decision=answer)
    found = verdict(new, old)
    assert (found.kind, found.head) == (Kind.RESUME, BRANCHED)
    begun = line_after(found, (new, old), [(), ()], ["n0", "n1"], 7)
    assert begun.parent == BRANCHED
    assert [each.attempt for each in begun.gives_up] == [LATER]
    after = store("s2", [FIRST, BRANCH, begun], BRANCHED)
    assert verdict(after, old).head == BRANCHED
    later = attempt(ROOT, 6)
    assert verdict(after, store("s0", [FIRST], LATER, later)).kind is Kind.ASK
    other = dataclasses.replace(old, decision=Decision(LATER, answer.heads))
    assert verdict(new, other).kind is Kind.ASK, "answers that contradict each other"
    stale = store("s2", [FIRST, BRANCH], BRANCHED, decision=Decision(BRANCHED, (BRANCHED,)))
    assert verdict(stale, old).kind is Kind.ASK, "another question"


def test_what_a_required_store_never_had_is_no_commit() -> None:
    lacking = store("s1", [FIRST], OLD)
    half = store("s0", [FIRST], OLD, LATER, commits=(commit(OLD),))
    found = verdict(half, lacking)
    assert (found.kind, found.head, found.unheard) == (Kind.RESUME, OLD, ())


def test_a_store_without_the_record_says_nothing() -> None:
    """It was made anew under its old name, or an image of it was put back."""
    whole = store("s0", [FIRST], OLD, LATER, commits=())
    assert verdict(whole, store("s1", [])).head == LATER


def test_a_recorded_commit_stands() -> None:
    whole = store("s0", [FIRST], OLD, LATER)
    assert verdict(whole, store("s1", [FIRST], OLD)).head == LATER


def test_damage_is_no_absence() -> None:
    whole = store("s0", [FIRST], OLD, LATER, commits=())
    torn = tuple((LATER, rank) for rank in range(WORLD))
    assert verdict(whole, store("s1", [FIRST], OLD, damaged=torn)).head == LATER
    both = store("s0", [FIRST], OLD, damaged=torn)
    found = verdict(both, store("s1", [FIRST], OLD, damaged=torn))
    assert (found.kind, found.heads, found.loadable) == (Kind.ASK, (LATER,), (OLD,))
    assert "no store has the shards of rank 0" in found.reasons[0]


def test_a_parent_that_a_record_names_was_committed() -> None:
    """No store that is heard has it: that is a question, and nothing older is loaded."""
    after = line(RIGHT, LATER, "s0", "s1")
    found = verdict(store("s0", [FIRST, after], OLD), store("s1", [FIRST, after], OLD))
    assert (found.kind, found.heads) == (Kind.ASK, (LATER,))


def test_too_few_stores_are_named() -> None:
    """A majority of the head's line, and of each other known line that it has not settled."""
    one, other = store("s0", [FIRST], OLD), store("s9", [])
    assert verdict(one, other).unheard == ("s1",)
    sibling = line(RIGHT, OLD, "s4", "s5")
    known = [FIRST, BRANCH, sibling]
    rows = store("s2", known, BRANCHED), store("s3", known, BRANCHED)
    assert verdict(*rows).unheard == ("s4", "s5")
    settled = [FIRST, dataclasses.replace(BRANCH, settled=(RIGHT,)), sibling]
    rows = store("s2", settled, BRANCHED), store("s3", settled, BRANCHED)
    assert verdict(*rows).unheard == ()


def test_a_record_that_is_missing_or_damaged_is_a_fault() -> None:
    found = verdict(store("s2", [BRANCH], BRANCHED), store("s3", [BRANCH], BRANCHED))
    assert found.kind is Kind.REFUSE
    assert f"record of line {ROOT}" in found.reasons[0]
    torn = store("s2", [FIRST], OLD, torn=(LEFT,))
    assert verdict(torn, store("s3", [FIRST], OLD)).kind is Kind.REFUSE
    assert verdict(torn, store("s3", [FIRST, BRANCH], OLD)).kind is Kind.RESUME
    two = store("s3", [dataclasses.replace(FIRST, began=9)], OLD)
    assert verdict(store("s2", [FIRST], OLD), two).kind is Kind.REFUSE
    round_about = line(ROOT, BRANCHED, "s0", "s1")
    assert verdict(store("s0", [round_about, BRANCH], BRANCHED)).kind is Kind.REFUSE


def test_stores_of_two_jobs_are_refused_by_name() -> None:
    found = verdict(store("s0", [FIRST], OLD), store("s1", [], job="another"))
    assert found.kind is Kind.REFUSE
    assert "rank 1, store s1: job another" in found.reasons[0]
    found = verdict(store("s0", [FIRST], OLD), below=Inventory(TIER, job="another"))
    assert "the tier: job another" in found.reasons[0]


def test_a_first_start_beside_another_one_is_not_sure() -> None:
    """The tier knows the job, and no store that is heard does."""
    found = verdict(Inventory("s0"), Inventory("s1"), below=Inventory(TIER, job=ROOT))
    assert found.kind is Kind.NOTHING
    assert found.unheard != ()
    begun = line_after(found, found.seen.inventories[:2], [(), ()], ["n0", "n1"], 1)
    assert (begun.job, begun.is_provisional) == (ROOT, True)


def test_a_line_has_a_part_of_every_rank() -> None:
    found = verdict(Inventory("s0"), Inventory("s1"))
    made = [
        line_after(found, found.seen.inventories, [(), ()], nonces, 1)
        for nonces in (["n0", "n1"], ["n0", "n2"], ["n3", "n1"], ["n0", "n1"])
    ]
    assert made[0] == made[3]
    assert len({each.id for each in made}) == 3
    assert all(each.job == each.id for each in made)


def test_what_a_start_left_unfinished_goes_and_nothing_else() -> None:
    """Behind a commit: what leads to it, and what the lines that led to it have seen to be none."""
    unfinished = attempt(ROOT, 6)
    rows = (
        store("s0", [FIRST], OLD, LATER, unfinished, commits=(commit(OLD), commit(LATER))),
        store("s1", [FIRST], OLD, LATER),
    )
    found = verdict(*rows)
    assert found.head == LATER
    begun = line_after(found, rows, [(), ()], ["n0", "n1"], 1)
    newest = attempt(begun.id, 7)
    foreign = attempt(LEFT, 4)
    lineage = Lineage([FIRST, begun, BRANCH])
    inventory = store("s0", [FIRST, begun, BRANCH], OLD, LATER, unfinished, foreign, newest)
    inventory = dataclasses.replace(
        inventory, commits=tuple(map(commit, (OLD, LATER, foreign, newest)))
    )
    assert collectable(inventory, newest, 1, lineage) == [OLD, LATER, unfinished]
    assert collectable(inventory, newest, 2, lineage) == [OLD, unfinished]


# --- what was saved before there were lines -----------------------------------------------------

BEFORE, NEXT = Attempt(1, 10, "1" * 16), Attempt(2, 20, "2" * 16)


def test_what_was_saved_before_goes_on_in_the_order_of_numbers() -> None:
    rows = [store(name, [], BEFORE, NEXT, job="") for name in ("s0", "s1")]
    found = verdict(*rows)
    assert (found.kind, found.head, found.unheard) == (Kind.RESUME, NEXT, ())
    begun = line_after(found, rows, [(), ()], ["n0", "n1"], 1)
    newest = attempt(begun.id, 3)
    after = [store(name, [begun], BEFORE, NEXT, newest) for name in ("s0", "s1")]
    assert verdict(*after).head == newest
    assert collectable(after[0], newest, 2, Lineage([begun])) == [BEFORE]


def test_what_was_saved_before_and_comes_back_later_is_a_question_once() -> None:
    rows = [store(name, [], BEFORE, job="") for name in ("s0", "s1")]
    begun = line_after(verdict(*rows), rows, [(), ()], ["n0", "n1"], 1)
    known = store("s0", [begun], BEFORE)
    back = store("s2", [], NEXT, job="")
    found = verdict(known, back)
    assert (found.kind, found.heads) == (Kind.ASK, (BEFORE, NEXT))
    answer = Decision(BEFORE, found.heads)
    decided = verdict(dataclasses.replace(known, decision=answer), back)
    second = line_after(decided, (known, back), [(), ()], ["n2", "n3"], 2)
    assert verdict(store("s0", [begun, second], BEFORE), back).head == BEFORE


def test_two_of_one_number_are_two_histories() -> None:
    twin = dataclasses.replace(NEXT, id="3" * 16)
    found = verdict(store("s0", [], NEXT, job=""), store("s1", [], twin, job=""))
    assert (found.kind, found.heads) == (Kind.ASK, (NEXT, twin))


def test_the_newest_of_before_that_cannot_be_loaded_is_a_question() -> None:
    rows = [store(name, [], BEFORE, job="") for name in ("s0", "s1")]
    rows[0] = dataclasses.replace(rows[0], commits=(commit(BEFORE), commit(NEXT)))
    found = verdict(*rows)
    assert (found.kind, found.heads, found.loadable) == (Kind.ASK, (NEXT,), (BEFORE,))


# --- seeded bugs, each in the rule that it breaks -----------------------------------------------

ALONE: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]], ...] = (
    (mutants.other_lines_are_not_asked_for, test_too_few_stores_are_named),
    (mutants.damage_is_an_absence, test_damage_is_no_absence),
    (mutants.a_recorded_commit_is_refuted, test_a_recorded_commit_stands),
    (mutants.a_store_without_the_record_refutes, test_a_store_without_the_record_says_nothing),
    (mutants.the_largest_number_is_the_newest, test_descent_is_asked_for_and_no_number),
)


@pytest.mark.parametrize(("mutant", "test"), ALONE, ids=lambda one: one.__name__)
def test_a_planted_mistake_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None],
    test: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, AttributeError)):
        test()


def test_what_is_seen_has_one_reading() -> None:
    """A store that two ranks share is one store."""
    shared = store("s0", [FIRST], OLD)
    assert Seen([shared, shared]).heads() == Seen([shared]).heads() == (OLD,)
