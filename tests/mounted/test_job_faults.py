"""A few faults of jobs whose nodes have real stores: daemons that are killed, stores without room,
power that fails on all nodes. ``scripts/job-test`` is the same, long.
"""

from __future__ import annotations

import pytest

from tests.support.job_faults.campaign import run_campaign


@pytest.mark.parametrize(
    ("kind", "replicas"), [("daemon", 1), ("daemon", 2), ("full", 1), ("power", 2)]
)
def test_faults(kind: str, replicas: int, seed: int) -> None:
    outcome = run_campaign(kind, 1, seed, replicas=replicas)
    print(outcome)
    assert outcome.problems == []
