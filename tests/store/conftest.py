"""Stores for a test; what they leave behind is looked at after it (tests/support/shop.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop
from tests.support.unit_scenes import finish_work
from tests.support.unit_users import Back, Users


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
def store(shop: Shop, granularity: Granularity) -> Store:
    """An empty store."""
    return shop.new(granularity=granularity)


@pytest.fixture
def users(store: Store) -> Users:
    return Users(store)


@pytest.fixture(params=["the writer is killed", "a crash"])
def back(request: pytest.FixtureRequest, shop: Shop) -> Back:
    """What is open goes back."""

    def go(store: Store) -> Store:
        if request.param == "a crash":
            store = shop.reopen(store, units=UnitsMode.AUTO)
            finish_work(store)
            return store
        store.units.ending_of = lambda _writer: Ending.KILLED
        store.units.settle()
        finish_work(store)
        return store

    return go
