"""A few faults of jobs whose nodes have real stores: daemons that are killed, stores without room,
power that fails. ``scripts/job-test`` is the same, long.
"""

from __future__ import annotations

import pytest

from tests.support.job_faults.campaign import run_campaign
from tests.support.job_faults.nodes import Beside

FAULTS_UNTIL_FOUND = 40


@pytest.mark.parametrize(
    ("kind", "replicas"),
    [
        ("daemon", 1),
        ("daemon", 2),
        ("full", 1),
        ("power", 2),
        ("power-lines", 2),
        ("clock", 1),
        ("agent", 2),
    ],
)
def test_faults(kind: str, replicas: int, seed: int) -> None:
    outcome = run_campaign(kind, 1, seed, replicas=replicas, nodes=2)
    print(outcome)
    assert outcome.problems == []


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("kind", "beside"),
    [("power", Beside.FORGOTTEN), ("power-lines", Beside.LINES_FORGOTTEN)],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_medium_that_forgets_is_found(kind: str, beside: Beside, seed: int) -> None:
    """It says of everything that it is durable, and has nothing of it when the power fails."""
    outcome = run_campaign(kind, FAULTS_UNTIL_FOUND, seed, replicas=1, nodes=2, beside=beside)
    print(outcome)
    assert outcome.problems != []
