from __future__ import annotations

import pytest

from tests.support.order import long_first


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize(("long", "others"), [(0, 0), (1, 0), (0, 5), (5, 40), (7, 101), (9, 2)])
def test_nothing_is_lost(long: int, others: int, workers: int) -> None:
    everything = range(long + others)
    ordered = long_first(everything[:long], everything[long:], workers)
    assert sorted(ordered) == list(everything)


def test_each_part_begins_with_long_ones() -> None:
    ordered = long_first(["l1", "l2", "l3"], ["a", "b", "c", "d", "e", "f", "g", "h"], 3)
    assert ordered[:3] == ["l1", "a", "b"]
    assert ordered[3:7] == ["l2", "c", "d", "e"]
    assert ordered[7:] == ["l3", "f", "g", "h"]
