"""Stores for a test; what they leave behind is looked at after it (tests/support/shop.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxlfs.media import Granularity
from cxlfs.store import Store, unit_copying
from tests.support.shop import Shop
from tests.support.unit_steps import AT_ONCE


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.check()


@pytest.fixture(params=[Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
def granularity(request: pytest.FixtureRequest) -> Granularity:
    value = request.param
    assert isinstance(value, Granularity)
    return value


@pytest.fixture
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit is copied in many."""
    monkeypatch.setattr(unit_copying, "FILES_AT_ONCE", AT_ONCE)
    monkeypatch.setattr(unit_copying, "NAMES_AT_ONCE", AT_ONCE + 1)


@pytest.fixture
def store(shop: Shop, granularity: Granularity) -> Store:
    """An empty store."""
    return shop.new(granularity=granularity)
