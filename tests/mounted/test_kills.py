"""Savers under kills at random moments: the old or the new version of each file, bit for bit.

``scripts/kill-test`` is the same with other numbers.
"""

from __future__ import annotations

import pytest

from tests.support.direct_kills import DIRECT_KINDS, run_direct_campaign
from tests.support.kill_campaign import KINDS, Outcome, run_campaign


def assert_kept(outcome: Outcome, kills: int) -> None:
    assert outcome.problems == []
    assert outcome.verified
    assert outcome.kills == kills
    assert outcome.in_flight == outcome.old + outcome.new
    assert outcome.old > 0, "no kill hit a save: this shows nothing"
    assert outcome.saves > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_of_the_writer(seed: int) -> None:
    outcome = run_campaign("writer", 20, seed)
    assert_kept(outcome, 20)
    assert outcome.in_flight + outcome.between == 20


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "kills"), [("daemon", 5), ("several", 2), ("cleaner", 2)])
def test_kills_of_the_daemon(seed: int, kind: str, kills: int) -> None:
    outcome = run_campaign(kind, kills, seed)
    assert_kept(outcome, kills)
    savers = len(KINDS[kind])
    assert outcome.in_flight + outcome.between == savers * kills
    assert outcome.errors_seen == savers * kills, "every saver hears that its file system is gone"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_while_mounting(seed: int) -> None:
    outcome = run_campaign("mount", 3, seed)
    assert_kept(outcome, 3)
    assert sum(outcome.moments.values()) == 3


KILLS_OF_BOTH = 20
"""Among so many some hit a save, and some saves end."""


def assert_nothing_of_others_lost(outcome: Outcome, kills: int) -> None:
    assert outcome.problems == []
    assert outcome.verified
    assert outcome.kills >= kills
    assert outcome.in_flight + outcome.saves > 0, "nobody saved anything: this shows nothing"
    if kills >= KILLS_OF_BOTH:
        assert outcome.in_flight > 0, "no kill hit a save"
        assert outcome.saves > 0, "no save ended"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "kills"),
    [("direct-writer", 6), ("direct-daemon", 1), ("direct-both", 2), ("direct-stopped", 2)],
)
def test_kills_of_who_stores_by_himself(seed: int, kind: str, kills: int) -> None:
    assert_nothing_of_others_lost(run_direct_campaign(kind, kills, seed), kills)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", DIRECT_KINDS)
def test_many_kills_of_who_stores_by_himself(seed: int, kind: str) -> None:
    assert_nothing_of_others_lost(run_direct_campaign(kind, 200, seed), 200)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills(seed: int, kind: str) -> None:
    kills = 1000 if kind == "writer" else 200
    outcome = run_campaign(kind, kills, seed)
    assert_kept(outcome, kills)
    if kind == "cleaner":
        cleaning = kills - outcome.moments.get("neither", 0)
        assert cleaning > kills // 4, "too few kills hit the cleaner"
    if kind == "mount":
        before = kills - outcome.moments.get("after it answered", 0)
        assert before > kills // 4, "too few kills hit a daemon that was mounting"
