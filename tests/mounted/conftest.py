"""Mounted tests: real mounts by real daemons. ``place`` is mounted; ``unmounted`` is not yet."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs import client
from tests.support.mount import STORE_BYTES, Workplace, why_not_mountable, workplace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = why_not_mountable()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.mounted)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=f"cannot mount here: {reason}"))


@pytest.fixture
def unmounted(request: pytest.FixtureRequest) -> Iterator[Workplace]:
    is_large = request.node.get_closest_marker("large_store") is not None
    with workplace(size_bytes=STORE_BYTES * (1 + is_large)) as place:
        yield place


@pytest.fixture
def place(unmounted: Workplace) -> Workplace:
    unmounted.mount()
    return unmounted


@pytest.fixture
def nothing_stays_mapped(unmounted: Workplace) -> Iterator[None]:
    """What this process has mapped of a store is let go before the store is unmounted."""
    assert unmounted
    yield
    gc.collect()  # an error that was caught refers to the frames that have the views
    client.forget()
    assert client.counts().media == 0


@pytest.fixture
def mnt(place: Workplace) -> Path:
    return place.mountpoint
