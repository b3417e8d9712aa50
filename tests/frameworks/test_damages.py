"""Checkpoints that real libraries wrote, damaged in each way, and loaded by them again: none that
they cannot load is called complete, but for what no checksum and no structure can show.

Each library runs in the environment that ``scripts/frameworks`` makes; without it, a test is
skipped. The table of docs/frameworks.md is what these tests print (``-s``).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlfs.checkpoint import State
from tests.support.damages import ALIKE, FAILS, Library, counted, try_damages
from tests.support.matrix.environments import DEFAULT_DIRECTORY

DAMAGES = 200
NOT_COMPLETE = (State.INCOMPLETE, State.DAMAGED, State.UNKNOWN, "none")
UNSEEN = {
    "tensorflow": 0.0,
    "tensorflow-shards": 0.0,
    "saved-model": 0.15,
    "keras": 0.0,
    "keras-weights": 0.05,
    "orbax": 0.15,
    "orbax-items": 0.15,
    "flax": 0.05,
    "hdf5": 0.05,
    "hdf5-chunks": 0.3,
    "hdf5-latest": 0.05,
    "npz": 0.0,
}
"""Of those that the library cannot load, the part that may be called complete: names that were
changed to others in SavedModel and flax, assets, compressed arrays without a checksum (Orbax) or
with one that is HDF5's own (chunks), texts and attributes of HDF5."""
ENVIRONMENTS = {
    "tensorflow": ("tensorflow", "tensorflow-shards", "saved-model", "keras", "keras-weights"),
    "orbax": ("orbax", "orbax-items", "flax"),
    "torch": ("hdf5", "hdf5-chunks", "hdf5-latest", "npz"),
}


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_library_makes_of_damage(name: str, tmp_path: Path, seed: int) -> None:
    (environment,) = (each for each, names in ENVIRONMENTS.items() if name in names)
    python = DEFAULT_DIRECTORY / environment / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{python} is not there: scripts/frameworks makes it")
    place = tmp_path / "checkpoint"
    place.mkdir()
    seen = list(try_damages(Library(python, name), place, DAMAGES, seed))
    counts = counted(seen)
    print(f"\n{name}: {len(seen)} tried")
    for (library, state), count in sorted(counts.items()):
        print(f"  {count:5}  the library: {library}; cxlfs good: {state}")
    failed = [each for each in seen if each.library == FAILS]
    unseen = [each for each in failed if each.content not in NOT_COMPLETE]
    assert len(failed) > len(seen) // 8, "damage that does nothing shows nothing"
    assert len(unseen) <= UNSEEN[name] * len(failed), unseen[:5]
    has_checksums = not UNSEEN[name]
    wrong = [each for each in seen if each.library != ALIKE and each.content == State.COMPLETE]
    assert not (has_checksums and wrong), wrong[:5]
