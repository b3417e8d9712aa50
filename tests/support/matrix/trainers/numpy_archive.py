"""``numpy.savez`` of one name; with ``shards`` eight files by ``numpy.save``, one after the other,
as a program writes them that takes no care: the one that must be seen to fail.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from tests.support.matrix.trainers.life import Life, save_steps, serve


def load(directory: Path) -> dict[str, np.ndarray] | None:
    if "shards" in sys.argv:
        return {path.stem: np.load(path) for path in directory.glob("tensor-*.npy")} or None
    path = directory / "state.npz"
    if not path.exists():
        return None
    with np.load(path) as archive:
        return dict(archive)


def train(life: Life) -> None:
    found = load(life.directory)
    step = life.nothing() if found is None else life.resumed(found, {})

    def save(_step: int, content: dict[str, np.ndarray]) -> None:
        if "shards" in sys.argv:
            for name, value in content.items():
                np.save(life.directory / f"{name}.npy", value)
        else:
            np.savez(life.directory / "state.npz", **content)

    save_steps(life, step, save)


if __name__ == "__main__":
    serve({"numpy": np.__version__}, train)
