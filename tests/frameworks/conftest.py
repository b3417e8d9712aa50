"""Real frameworks, unchanged, through a real mount: ``place`` is mounted and has room for them.

What a test leaves must verify clean, structure and data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cli import run_program
from tests.support.mount import MIB, Workplace, workplace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.mounted)
            item.add_marker(pytest.mark.frameworks)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Workplace]:
    """Those whose states are large are slow."""
    is_slow = request.node.get_closest_marker("slow") is not None
    with workplace(size_bytes=(512 if is_slow else 160) * MIB) as place:
        place.mount()
        yield place
        if place.is_mounted:
            place.unmount()
        verified = run_program("verify", place.source)
        assert verified.code == 0, verified


@pytest.fixture
def places(place: Workplace) -> Iterator[tuple[Workplace, Workplace]]:
    """Two stores, mounted: those of two nodes."""
    with workplace(size_bytes=256 * MIB) as other:
        other.mount()
        yield place, other


@pytest.fixture
def mnt(place: Workplace) -> Path:
    return place.mountpoint


@dataclasses.dataclass(frozen=True, slots=True)
class Twice:
    """Compare now, and again after a remount: nothing may live in caches alone.

    A comparison asserts for itself, or returns whether all was the same.
    """

    place: Workplace

    def __call__(self, compare: Callable[[], bool | None]) -> None:
        assert compare() in (None, True)
        self.place.remount()
        assert compare() in (None, True)


@pytest.fixture
def twice(place: Workplace) -> Twice:
    return Twice(place)
