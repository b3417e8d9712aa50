from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.corrupt import Anatomy, Damage
from tests.support.verdict import good_store


@pytest.fixture
def closed() -> Anatomy:
    """A store that was closed."""
    return good_store(closed=True)


@pytest.fixture
def crashed() -> Anatomy:
    """A store whose daemon was killed, with records in its journal."""
    return good_store(closed=False)


@pytest.fixture
def closed_damage(closed: Anatomy) -> Iterator[Damage]:
    """Damage to the closed store, taken back at the end."""
    with Damage(closed.media) as damage:
        yield damage


@pytest.fixture
def crashed_damage(crashed: Anatomy) -> Iterator[Damage]:
    with Damage(crashed.media) as damage:
        yield damage
