"""Checkpoints of real libraries, unpacked anew for each test that may change them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import unpack_into

Unpack = Callable[[str], Path]


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """By the name of an archive: a directory with what is in it."""

    def unpacked(name: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        return unpack_into(name, place)

    return unpacked
