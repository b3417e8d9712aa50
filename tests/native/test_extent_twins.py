"""The same content of another file: all of it, shared, and clean."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cxlfs.native.extents import FileMap
from tests.support.extents import Room, room


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


def test_a_twin_has_all_and_is_clean(place: Room) -> None:
    """What is written to one of them is none of the other's."""
    content = place.new_map(capacity=1 << 16)
    content.write(0, b"a" * 100)
    content.write(8192, b"b" * 100)
    content.truncate(10_000)
    content.take_delta().apply(content, None)
    assert content.twin(77) is None, "its extent is open"
    content.close_leases()
    twin = content.twin(77)
    assert twin is not None
    assert (twin.owner, twin.size, twin.is_dirty) == (77, 10_000, False)
    assert twin.references() == content.export(0, 1 << 40).tobytes()
    assert bytes(twin.read(0, 20_000)) == bytes(content.read(0, 20_000))
    twin.truncate(50)
    delta = twin.take_delta()
    assert (delta.cut, delta.size, delta.refs.tolist()) == (50, 50, [])
    delta.apply(twin, None)
    assert content.size == 10_000
    content.close()
    assert bytes(twin.read(0, 100)) == b"a" * 50


def test_a_twin_of_nothing(place: Room) -> None:
    content = FileMap(place.engine, owner=1)
    for size in (0, 5000):
        content.truncate(size)
        twin = content.twin(2)
        assert twin is not None
        assert (twin.size, twin.references(), twin.is_dirty) == (size, b"", False)
