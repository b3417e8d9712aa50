"""Users who save, meddle, are killed and lose power: every promise holds in every history.

``CXLFS_HISTORY=N`` plays one history. A failure prints its number and what was done, made shorter.
"""

from __future__ import annotations

import os

import pytest

from tests.support.user_histories.run import report

FIRST = 1_000_000
"""The number of the first history is this times the seed of the run, and its own."""
HISTORIES = 150
PARTS = 20
HISTORIES_OF_PART = 500


def play(numbers: range) -> None:
    broken = [text for text in map(report, numbers) if text is not None]
    assert not broken, "\n".join(broken)


def test_histories(base_seed: int) -> None:
    if "CXLFS_HISTORY" in os.environ:
        first = int(os.environ["CXLFS_HISTORY"])
        play(range(first, first + 1))
        return
    play(range(base_seed * FIRST, base_seed * FIRST + HISTORIES))


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_histories(part: int, base_seed: int) -> None:
    first = base_seed * FIRST + HISTORIES + part * HISTORIES_OF_PART
    play(range(first, first + HISTORIES_OF_PART))
