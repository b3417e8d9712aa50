"""The protocol under faults that Hypothesis chooses: nothing breaks it, and what breaks a mistaken
one is made as small as it goes.
"""

from __future__ import annotations

import collections
from collections.abc import Callable

import hypothesis
import pytest

from tests.support import job_mutants
from tests.support.job_planned import PLANS, Plan, PlannedHistory
from tests.support.job_stores import FAULTS_AND_OUTCOMES, ViolationError

COUNT = 200
CAMPAIGN_RUNS, CAMPAIGN_COUNT = 40, 2500
"""Each run begins anew: what Hypothesis keeps of what it has tried grows."""
CAUGHT_WITHIN = 3000


def run(count: int, seed: int, failed: list[Plan] | None = None) -> collections.Counter[str]:
    """Raises ViolationError, of the smallest plan that shows it; the last of ``failed`` is that."""
    met: collections.Counter[str] = collections.Counter()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count,
        database=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(PLANS)
    def histories(plan: Plan) -> None:
        history = PlannedHistory(plan)
        try:
            history.run()
        except ViolationError:
            if failed is not None:
                failed.append(plan)
            raise
        met.update({"histories": 1, **history.counts})

    histories()
    return met


def test_histories(seed: int) -> None:
    met = run(COUNT, seed)
    print(dict(met))
    assert [what for what in FAULTS_AND_OUTCOMES if met[what] < COUNT // 40] == []


@pytest.mark.campaign
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", range(CAMPAIGN_RUNS))
def test_a_campaign_of_histories(number: int, seed: int) -> None:
    met = run(CAMPAIGN_COUNT, seed + number)
    print(dict(met))
    assert met["histories"] >= CAMPAIGN_COUNT


@pytest.mark.parametrize(
    "mutant",
    [
        job_mutants.a_vote_not_heard_is_one_against,
        pytest.param(job_mutants.an_exception_is_no_vote, marks=pytest.mark.campaign),
        pytest.param(
            job_mutants.who_hears_no_tally_takes_it_for_an_abort, marks=pytest.mark.campaign
        ),
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_a_planted_mistake_is_found_and_made_small(
    mutant: Callable[[pytest.MonkeyPatch], None], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left is what it takes: a few faults."""
    mutant(monkeypatch)
    failed: list[Plan] = []
    with pytest.raises(ViolationError):
        run(CAUGHT_WITHIN, seed, failed)
    smallest = failed[-1]
    print(smallest)
    assert sum(len(start.strikes) for start in smallest.starts) <= 4
