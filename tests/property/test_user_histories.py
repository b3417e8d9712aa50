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
ACROSS = 50
PARTS = 20
PARTS_ACROSS = 4
HISTORIES_OF_PART = 500


def play(numbers: range, *, crosses: bool = False) -> None:
    if "CXLFS_HISTORY" in os.environ:
        first = int(os.environ["CXLFS_HISTORY"])
        numbers = range(first, first + 1)
    reports = (report(number, crosses=crosses) for number in numbers)
    broken = [text for text in reports if text is not None]
    assert not broken, "\n".join(broken)


def part_of(base_seed: int, part: int) -> range:
    first = base_seed * FIRST + HISTORIES + part * HISTORIES_OF_PART
    return range(first, first + HISTORIES_OF_PART)


def test_histories(base_seed: int) -> None:
    play(range(base_seed * FIRST, base_seed * FIRST + HISTORIES))


def test_histories_across_borders(base_seed: int) -> None:
    """Names move into savers' directories, out of them, and from one to another."""
    play(range(base_seed * FIRST, base_seed * FIRST + ACROSS), crosses=True)


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_histories(part: int, base_seed: int) -> None:
    play(part_of(base_seed, part))


@pytest.mark.campaign
@pytest.mark.timeout(0)
@pytest.mark.parametrize("part", range(PARTS_ACROSS))
def test_many_histories_across_borders(part: int, base_seed: int) -> None:
    play(part_of(base_seed, part), crosses=True)
