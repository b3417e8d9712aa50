"""The sample that a run draws of long tests: repeatable, never empty, everything in its turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sample import left_out, number_of_commit

CASES = [*[("a", 4)] * 10, *[("b", 3)] * 2, ("c", 5), *[("a", 4)] * 3]


def drawn(number: int) -> set[int]:
    return {*range(len(CASES))} - left_out(CASES, number)


def test_the_same_number_draws_the_same() -> None:
    assert drawn(7) == drawn(7) != drawn(8)


@pytest.mark.parametrize("number", [0, 1, 2, 3, 1 << 27])
def test_each_group_keeps_at_least_one_case(number: int) -> None:
    assert {CASES[position] for position in drawn(number)} == {*CASES}


def test_consecutive_numbers_draw_every_case() -> None:
    assert set().union(*(drawn(number) for number in range(20, 24))) == {*range(len(CASES))}


def test_without_git_the_number_is_the_default(tmp_path: Path) -> None:
    assert number_of_commit(tmp_path, 5) == 5
