from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import pytest

from tests.support.corrupt import Anatomy
from tests.support.verdict import Picture, good_picture, good_store

T = TypeVar("T")
OneIn = Callable[[int, Iterable[T]], Iterator[T]]
CAMPAIGN = os.environ.get("CXLFS_CAMPAIGN") == "1"


@pytest.fixture
def sample_count() -> int | None:
    """How many of the possible damages of one structure to try; None (CXLFS_CAMPAIGN=1): all."""
    return None if CAMPAIGN else 4


@pytest.fixture
def rng(sample: int, seed: int) -> random.Random:
    """Each sample draws other bits and places."""
    return random.Random(f"{sample} {seed}")


@pytest.fixture
def one_in(sample: int) -> OneIn:
    """Draw one in so many of all places, each time; ``CXLFS_CAMPAIGN=1``: all of them."""

    def draw(every: int, places: Iterable[T]) -> Iterator[T]:
        if CAMPAIGN:
            return iter(places)
        return itertools.islice(places, sample % every, None, every)

    return draw


@pytest.fixture(params=["closed", "crashed", "chained"])
def life(request: pytest.FixtureRequest) -> dict[str, bool]:
    """How the store ended, for ``good_store``: the last one with records in three journals."""
    return {"closed": request.param == "closed", "chained": request.param == "chained"}


@pytest.fixture
def anatomy(life: dict[str, bool]) -> Anatomy:
    return good_store(**life)


@pytest.fixture
def good(life: dict[str, bool]) -> Picture:
    """What a user sees of the store of ``anatomy``."""
    return good_picture(**life)
