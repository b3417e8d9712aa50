"""Mounted tests: real mounts by real daemons. ``place`` is mounted; ``unmounted`` is not yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
def mnt(place: Workplace) -> Path:
    return place.mountpoint
