"""Checkpoints of real libraries, unpacked anew for each test that may change them."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"
Unpack = Callable[[str], Path]


def unpack_into(name: str, place: Path) -> Path:
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        for member in archive:
            path = place / member.name
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content.read())
    return place


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """By the name of an archive: a directory with what is in it."""

    def unpacked(name: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        return unpack_into(name, place)

    return unpacked
