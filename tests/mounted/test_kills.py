"""One checkpoint overwritten under kills at random moments: the old or the new one, bit for bit.

``scripts/kill-test`` is the same with other numbers.
"""

from __future__ import annotations

import pytest

from tests.support.kill_campaign import Outcome, run_campaign


def assert_kept(outcome: Outcome, kills: int) -> None:
    assert outcome.problems == []
    assert outcome.verified
    assert outcome.kills == kills
    assert outcome.old + outcome.new + outcome.between == kills
    assert outcome.old > 0, "no kill hit a save: this shows nothing"
    assert outcome.saves > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_the_writer(seed: int) -> None:
    assert_kept(run_campaign("writer", 40, seed), 40)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_the_daemon(seed: int) -> None:
    outcome = run_campaign("daemon", 10, seed)
    assert_kept(outcome, 10)
    assert outcome.errors_seen == 10, "every writer hears that its file system is gone"


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("kind", "kills"), [("writer", 1000), ("daemon", 200)])
def test_many_kills(seed: int, kind: str, kills: int) -> None:
    assert_kept(run_campaign(kind, kills, seed), kills)
