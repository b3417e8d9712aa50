"""safetensors: temporary file, rename before close, and readers that map."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.frameworks.conftest import Twice
from tests.support.mount import Workplace

pytestmark = pytest.mark.frameworks("safetensors")

safetensors = pytest.importorskip("safetensors", reason="pip install 'cxlfs[test]' has it")


def make_tensors(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "embedding": random.standard_normal((3001, 257)).astype(np.float32),
        "half": random.standard_normal((129, 511)).astype(np.float16),
        "tokens": random.integers(0, 1 << 40, size=4097),
        "mask": random.integers(0, 2, size=(33, 77)).astype(bool),
        "empty": np.empty((0, 5), dtype=np.float32),
    }


def assert_same(loaded: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(loaded) == set(expected)
    for name, array in expected.items():
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert loaded[name].tobytes() == array.tobytes()


def load_mapped(path: Path) -> dict[str, np.ndarray]:
    with safetensors.safe_open(path, framework="numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  no mapping


def test_save_and_load(mnt: Path, twice: Twice) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = make_tensors(1)
    save_file(tensors, mnt / "model.safetensors", metadata={"step": "1"})

    def compare() -> None:
        assert_same(load_file(mnt / "model.safetensors"), tensors)
        assert_same(load_mapped(mnt / "model.safetensors"), tensors)

    twice(compare)


def test_overwritten_while_mapped(mnt: Path, twice: Twice) -> None:
    """A server holds the old model open, mapped, while the trainer saves the next one over it."""
    from safetensors.numpy import save_file

    old, new = make_tensors(2), make_tensors(3)
    path = mnt / "model.safetensors"
    save_file(old, path)
    with safetensors.safe_open(path, framework="numpy") as file:
        first = file.get_tensor("embedding")
        save_file(new, path)
        assert first.tobytes() == old["embedding"].tobytes()
        assert_same({name: file.get_tensor(name) for name in old}, old)
        assert_same(load_mapped(path), new)
    assert [p.name for p in mnt.iterdir()] == [path.name], "no temporary file is left"
    twice(lambda: assert_same(load_mapped(path), new))


def test_space_of_what_was_overwritten_comes_back(place: Workplace) -> None:
    """More saves over one name than would fit beside each other."""
    from safetensors.numpy import save_file

    path = place.mountpoint / "model.safetensors"
    tensors = {"weights": np.arange(12 << 20, dtype=np.float32)}  # 48 MiB of 160 MiB
    for step in range(6):
        tensors["weights"][0] = step
        save_file(tensors, path)
    assert load_mapped(path)["weights"].tobytes() == tensors["weights"].tobytes()
