"""Faults of jobs of real processes, a few of each kind, in plain directories (mounted stores are in
``tests/mounted/test_job_faults.py``); and that what is wrong would be seen. ``scripts/job-test`` is
the same, long.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cxlfs.job import aside, files
from cxlfs.job.agent import Tending
from cxlfs.job.protocol import (
    Asked,
    Attempt,
    Nothing,
    NotRestored,
    Restoring,
    Saving,
    planning,
    restoring,
)
from cxlfs.job.protocol.messages import Vote
from tests.support.job_faults import campaign

FAULTS_UNTIL_FOUND = 40

Patch = pytest.MonkeyPatch


def in_a_new_process(run: Callable[..., campaign.Outcome], *arguments: Any) -> campaign.Outcome:
    """Ranks are forked, and threads do not survive that: where obstore was used before, those that
    it has begun are not there for its next call, which never returns.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(run, *arguments).result()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("kill", 1),
        ("kill", 2),
        ("power", 2),
        ("slow", 2),
        ("partition", 1),
        ("wipe", 1),
        ("wipe", 2),
        ("corrupt-shard", 2),
        ("corrupt-copy", 2),
        ("corrupt-manifest", 1),
        ("corrupt-commit", 2),
        ("permute", 2),
        ("world", 1),
        ("redo", 2),
        ("clock", 1),
        ("collection", 1),
        ("replication", 2),
        ("drain", 1),
        ("agent", 1),
        ("agent", 2),
        ("agent-drain", 2),
    ],
)
def test_faults(kind: str, replicas: int, seed: int) -> None:
    run = functools.partial(campaign.run_campaign, replicas=replicas, in_stores=False)
    drains = kind in {"drain", "agent-drain"}
    outcome = in_a_new_process(run, kind, 1, seed) if drains else run(kind, 1, seed)
    print(outcome)
    assert outcome.problems == []


def bytes_are_not_compared(patch: Patch) -> None:
    patch.setattr(
        files, "verify", lambda root, attempt, rank, _digest: files.rank_path(root, attempt, rank)
    )


def copies_are_not_fetched(patch: Patch) -> None:
    def judge(inventories: Any, excluded: Any = (), **how: Any) -> Any:
        return planning.judge(inventories, excluded, **{**how, "can_fetch": False})

    patch.setattr(restoring, "judge", judge)


def it_begins_anew(patch: Patch) -> None:
    load_next = Restoring._load_next

    def anew(self: Restoring) -> Any:
        action = load_next(self)
        if isinstance(self.outcome, NotRestored | Asked):
            self._finish(Nothing())
        return action

    patch.setattr(Restoring, "_load_next", anew)


def a_deadline_aborts(patch: Patch) -> None:
    voted = Saving._voted

    def aborting(self: Saving, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        return voted(self, heard | {rank: Vote(None, "", "late") for rank in missing}, ())

    patch.setattr(Saving, "_voted", aborting)


def what_others_committed_is_passed_by(patch: Patch) -> None:
    def judge(inventories: Any, excluded: Any = (), **how: Any) -> Any:
        world = len(inventories)
        own = [
            dataclasses.replace(
                each,
                held=tuple(held for held in each.held if held.world == world),
                commits=tuple(
                    commit
                    for commit in each.commits
                    if all(h.world == world for h in each.held if h.attempt == commit.attempt)
                ),
                lines=tuple(line for line in each.lines if len(line.members) == world),
            )
            for each in inventories
        ]
        return planning.judge(own, excluded, **how)

    patch.setattr(restoring, "judge", judge)


def nothing_is_given_back(patch: Patch) -> None:
    patch.setattr(aside, "set_aside", lambda *_arguments: None)


def the_largest_step_is_the_newest(patch: Patch) -> None:
    def before(self: Attempt, other: Attempt) -> bool:
        return (self.step, self.number, self.id) < (other.step, other.number, other.id)

    patch.setattr(Attempt, "__lt__", before)


def a_vote_is_not_where_it_says(patch: Patch) -> None:
    def seal(root: Path, manifest: files.Manifest) -> str:
        del root
        return files.digest_of_bytes(manifest.encode())

    patch.setattr(files, "seal", seal)


def an_agent_says_what_it_has_not_done(patch: Patch) -> None:
    patch.setattr(Tending, "_exchange", lambda *_arguments: set())


def what_a_killed_agent_left_is_in_the_way(patch: Patch) -> None:
    patch.setattr(files, "begin_anew", files.begin)


@pytest.mark.parametrize(
    ("mistake", "kind", "replicas"),
    [
        (bytes_are_not_compared, "corrupt-shard", 1),
        (copies_are_not_fetched, "wipe", 2),
        (it_begins_anew, "wipe", 1),
        (what_others_committed_is_passed_by, "world", 1),
        (nothing_is_given_back, "kill", 1),
        (the_largest_step_is_the_newest, "redo", 1),
        (a_vote_is_not_where_it_says, "kill", 1),
        (what_a_killed_agent_left_is_in_the_way, "agent", 2),
        pytest.param(a_deadline_aborts, "partition", 1, marks=pytest.mark.campaign),
        pytest.param(an_agent_says_what_it_has_not_done, "agent", 2, marks=pytest.mark.campaign),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_mistake_is_found(
    mistake: Callable[[Patch], None],
    kind: str,
    replicas: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mistake(monkeypatch)
    outcome = campaign.run_campaign(
        kind, FAULTS_UNTIL_FOUND, seed, replicas=replicas, in_stores=False
    )
    print(outcome)
    assert outcome.problems != []
