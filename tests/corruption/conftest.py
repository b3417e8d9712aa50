from __future__ import annotations

import os

import pytest

from tests.support.corrupt import Anatomy
from tests.support.verdict import good_store

CAMPAIGN = os.environ.get("CXLFS_CAMPAIGN") == "1"


@pytest.fixture
def sample_count() -> int | None:
    """How many of the possible damages of one structure to try; None (CXLFS_CAMPAIGN=1): all."""
    return None if CAMPAIGN else 10


@pytest.fixture(params=[True, False], ids=["closed", "crashed"])
def is_closed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def anatomy(is_closed: bool) -> Anatomy:
    return good_store(closed=is_closed)
