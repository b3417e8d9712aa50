"""The protocol under histories of faults: what must hold holds, and planted mistakes are found."""

from __future__ import annotations

import collections
from collections.abc import Callable

import pytest

from tests.support.job_group_mutants import GROUP_MUTANTS
from tests.support.job_histories import histories
from tests.support.job_mutants import MUTANTS
from tests.support.job_stores import FAULTS_AND_OUTCOMES, ViolationError

COUNT = 400
CAMPAIGN_COUNT = 100_000
CAUGHT_WITHIN = 3000
CAUGHT_FROM = {
    "a_group_that_is_not_heard_has_loaded": 340,
    "failed_copies_are_reported_as_made": 1600,
}
"""Of mistakes that few histories show: nothing before shows them."""

MET = (
    *FAULTS_AND_OUTCOMES,
    "Nothing",
    "Part told",
    "Prepare told",
    "Tally told",
    "collections",
    "copies made again",
    "deadlines",
    "shards fetched",
)


def run(first: int, count: int) -> None:
    met: collections.Counter[str] = collections.Counter()
    for _, history in histories(first, count):
        met.update(history.counts)
    print(f"{count} histories from {first} on: {dict(met)}")
    assert [what for what in MET if met[what] < count // 100] == []


def test_histories(seed: int) -> None:
    run(seed, COUNT)


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_campaign_of_histories(seed: int) -> None:
    run(seed, CAMPAIGN_COUNT)


@pytest.mark.parametrize("mutant", [*MUTANTS, *GROUP_MUTANTS], ids=lambda mutant: mutant.__name__)
def test_a_planted_mistake_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(ViolationError) as caught:
        for _ in histories(CAUGHT_FROM.get(mutant.__name__, 1), CAUGHT_WITHIN):
            pass
    print(caught.value)
