"""HDF5, under Keras' and many other checkpoints: writes out of order, reopens, locks."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace, tell, wait_for_line

pytestmark = pytest.mark.frameworks("h5py")

h5py = pytest.importorskip("h5py", reason="pip install 'cxlfs[test]' has it")


def make_array(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((611, 1031)).astype(np.float32)


def assert_holds(path: Path, expected: dict[str, np.ndarray]) -> None:
    with h5py.File(path, "r") as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if hasattr(item, "shape") else None)
        assert sorted(names) == sorted(expected)
        for name, array in expected.items():
            assert file[name][()].tobytes() == array.tobytes()


def test_write_reopen_and_add(mnt: Path, twice: Twice) -> None:
    path = mnt / "model.weights.h5"
    expected = {"layers/dense/kernel": make_array(1), "layers/dense/bias": make_array(2)[0]}
    with h5py.File(path, "w") as file:
        for name, array in expected.items():
            file[name] = array
    expected["optimizer/momentum"] = make_array(3)
    with h5py.File(path, "a") as file:
        file.create_dataset(
            "optimizer/momentum",
            data=expected["optimizer/momentum"],
            chunks=(64, 128),
            compression="gzip",
        )
        file["layers/dense/kernel"][100:200] = 0.0
        expected["layers/dense/kernel"][100:200] = 0.0
    twice(lambda: assert_holds(path, expected))


def test_overwriting_one_name(mnt: Path, twice: Twice) -> None:
    path = mnt / "last.h5"
    for step in range(4):
        with h5py.File(path, "w") as file:
            file["weights"] = make_array(step)
    twice(lambda: assert_holds(path, {"weights": make_array(3)}))


def test_a_growing_dataset(mnt: Path, twice: Twice) -> None:
    path = mnt / "history.h5"
    rows = make_array(5)
    with h5py.File(path, "w") as file:
        history = file.create_dataset("history", shape=(0, 1031), maxshape=(None, 1031), dtype="f4")
        for row in range(0, 600, 50):
            history.resize(row + 50, axis=0)
            history[row:] = rows[row : row + 50]
            file.flush()
    twice(lambda: assert_holds(path, {"history": rows[:600]}))


HOLDER = """
import sys
import h5py
file = h5py.File(sys.argv[1], sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
file.close()
"""


@pytest.mark.parametrize(("held", "wanted"), [("r+", "r"), ("r+", "r+"), ("r", "r+")])
def test_locks_hold_between_processes(place: Workplace, held: str, wanted: str) -> None:
    path = place.mountpoint / "locked.h5"
    with h5py.File(path, "w") as file:
        file["weights"] = make_array(1)
    holder = place.python(HOLDER, path, held, stderr=sys.stderr)
    wait_for_line(holder)
    with pytest.raises(BlockingIOError, match="unable to lock file"):
        h5py.File(path, wanted)
    tell(holder)
    assert holder.wait() == 0
    h5py.File(path, wanted).close()
