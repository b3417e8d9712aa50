"""Mistakes in which attempt counts, planted one at a time: the histories must find each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from cxlfs.job.protocol import Attempt, Inventory, Kind, Lineage, Seen, Verdict, planning
from tests.support import lineage_histories
from tests.support.lineage_histories import World

Patch = pytest.MonkeyPatch


def the_largest_number_is_the_newest(patch: Patch) -> None:
    """What this project did before there were lines."""
    heads = Seen.heads

    def largest(self: Seen) -> tuple[Attempt, ...]:
        return heads(self)[-1:]

    patch.setattr(Seen, "heads", largest)


def an_older_one_if_the_head_cannot_be_loaded(patch: Patch) -> None:
    judge = planning.judge

    def fallback(inventories: Any, excluded: Any = (), **how: Any) -> Verdict:
        verdict = judge(inventories, excluded, **how)
        older = [each for each in verdict.loadable if each not in verdict.heads]
        if verdict.kind is not Kind.ASK or len(verdict.heads) != 1 or not older:
            return verdict
        return dataclasses.replace(verdict, kind=Kind.RESUME, heads=(older[0],))

    patch.setattr(lineage_histories, "judge", fallback)


def a_decision_covers_what_comes_later(patch: Patch) -> None:
    def gives_up(self: Lineage, line: Any, attempt: Attempt) -> bool:
        return any(
            (self.leads_to(attempt, given.attempt) or self.leads_to(given.attempt, attempt))
            and not self.leads_to(attempt, given.instead)
            for given in line.gives_up
        )

    patch.setattr(Lineage, "_gives_up", gives_up)


def it_is_collected_by_number(patch: Patch) -> None:
    def older(inventory: Inventory, committed: Attempt, keep: int, _lineage: Any) -> list[Attempt]:
        recorded = sorted({c.attempt for c in inventory.commits if c.attempt <= committed})
        known = {held.attempt for held in inventory.held} | set(recorded)
        kept = {committed, *recorded[-keep:]}
        return sorted(a for a in known - kept if a.number < committed.number)

    patch.setattr(lineage_histories, "collectable", older)


def votes_come_before_the_record(patch: Patch) -> None:
    patch.setattr(World, "late_records", True)


def two_starts_share_a_store(patch: Patch) -> None:
    patch.setattr(World, "no_fence", True)


def other_lines_are_not_asked_for(patch: Patch) -> None:
    unheard = Seen.unheard

    def own_alone(self: Seen, head: Attempt | None) -> tuple[str, ...]:
        found = unheard(self, head)
        line = None if head is None else self.lineage.lines.get(head.id)
        return tuple(store for store in found if line is None or store in line.members)

    patch.setattr(Seen, "unheard", own_alone)


def one_store_of_a_line_is_enough(patch: Patch) -> None:
    unheard = Seen.unheard

    def any_member(self: Seen, head: Attempt | None) -> tuple[str, ...]:
        found = unheard(self, head)
        line = None if head is None else self.lineage.lines.get(head.id)
        return () if line is not None and set(line.members) & self.heard.keys() else found

    patch.setattr(Seen, "unheard", any_member)


def damage_is_an_absence(patch: Patch) -> None:
    """A shard that cannot be read speaks against the commit."""
    init = Seen.__init__

    def forgetful(self: Seen, inventories: Any) -> None:
        init(self, [dataclasses.replace(each, damaged=()) for each in inventories])

    patch.setattr(Seen, "__init__", forgetful)


def a_recorded_commit_is_refuted(patch: Patch) -> None:
    heads = Seen.heads

    def doubtful(self: Seen) -> tuple[Attempt, ...]:
        self.recorded = frozenset()
        return heads(self)

    patch.setattr(Seen, "heads", doubtful)


def a_store_without_the_record_refutes(patch: Patch) -> None:
    """It was made anew under its old name, or went back."""

    def any_store(self: Seen, store: str, _line: Any) -> bool:
        return store in self.heard

    patch.setattr(Seen, "has_record", any_store)


IN_HISTORIES: tuple[Callable[[Patch], None], ...] = (
    the_largest_number_is_the_newest,
    an_older_one_if_the_head_cannot_be_loaded,
    a_decision_covers_what_comes_later,
    it_is_collected_by_number,
    votes_come_before_the_record,
    two_starts_share_a_store,
    one_store_of_a_line_is_enough,
)
"""The others need what few histories have: a test of their rule finds them."""
