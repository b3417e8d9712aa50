"""NumPy: ``save``, ``savez``, and memory maps of every mode."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace, tell, wait_for_line

SHAPE = (700, 1031)


def make_array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def test_save_and_load(mnt: Path, twice: Twice) -> None:
    array = make_array(1)
    np.save(mnt / "array.npy", make_array(0))
    np.save(mnt / "array.npy", array)
    twice(lambda: np.load(mnt / "array.npy").tobytes() == array.tobytes())


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_seek_back_while_they_are_written(mnt: Path, twice: Twice, save: object) -> None:
    arrays = {"weights": make_array(1), "bias": make_array(2)[0], "empty": np.empty(0)}
    assert callable(save)
    save(mnt / "arrays.npz", **arrays)

    def compare() -> None:
        with np.load(mnt / "arrays.npz") as loaded:
            assert set(loaded) == set(arrays)
            for name, array in arrays.items():
                assert loaded[name].tobytes() == array.tobytes()

    twice(compare)


@pytest.mark.parametrize("mode", ["r", "c"])
def test_a_map_for_reading(mnt: Path, twice: Twice, mode: str) -> None:
    array = make_array(3)
    np.save(mnt / "array.npy", array)

    def compare() -> bool:
        mapped = np.load(mnt / "array.npy", mmap_mode=mode)  # type: ignore[arg-type]
        return bool(mapped.tobytes() == array.tobytes())

    twice(compare)


def test_a_map_for_reading_and_writing(mnt: Path, twice: Twice) -> None:
    array = make_array(4)
    np.save(mnt / "array.npy", array)
    mapped = np.load(mnt / "array.npy", mmap_mode="r+")
    mapped[5:9, 100:900] *= -2.0
    array[5:9, 100:900] *= -2.0
    mapped.flush()
    mapped[-1, -1] = array[-1, -1] = 7.0  # after the last msync: it goes out with the mapping
    del mapped
    twice(lambda: np.load(mnt / "array.npy").tobytes() == array.tobytes())


def test_a_new_map(mnt: Path, twice: Twice) -> None:
    """The file is made by writing its last byte: what is not filled in reads as zeros."""
    array = np.zeros(SHAPE, dtype=np.float32)
    mapped = np.memmap(mnt / "new.dat", dtype=np.float32, mode="w+", shape=SHAPE)
    for target in (mapped, array):
        target[::7] = np.arange(SHAPE[1])
    mapped.flush()
    del mapped

    def compare() -> bool:
        back = np.memmap(mnt / "new.dat", dtype=np.float32, mode="r", shape=SHAPE)
        return bool(back.tobytes() == array.tobytes())

    twice(compare)
    assert (mnt / "new.dat").stat().st_size == array.nbytes


OTHER = """
import sys
import numpy as np
mapped = np.memmap(sys.argv[1], dtype=np.int64, mode="r+", shape=(100_000,))
print("ready", flush=True)
sys.stdin.readline()
assert mapped[1] == 11
mapped[2] = 22
mapped.flush()
print("done", flush=True)
sys.stdin.readline()
"""


def test_two_processes_share_a_map(place: Workplace, twice: Twice) -> None:
    path = place.mountpoint / "shared.dat"
    mapped = np.memmap(path, dtype=np.int64, mode="w+", shape=(100_000,))
    mapped.flush()
    other = place.python(OTHER, path, stderr=sys.stderr)
    wait_for_line(other)
    mapped[1] = 11
    tell(other)
    wait_for_line(other, b"done")
    assert mapped[2] == 22
    del mapped
    tell(other)
    assert other.wait() == 0
    expected = np.zeros(100_000, dtype=np.int64)
    expected[1:3] = 11, 22
    twice(lambda: np.fromfile(path, dtype=np.int64).tobytes() == expected.tobytes())
