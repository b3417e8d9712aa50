"""A zarr group with ``mode="w"``, which removes the old one first; with ``consolidate`` its
metadata is consolidated at the end.
"""

from __future__ import annotations

import sys

import numpy as np
import zarr

from tests.support.matrix.trainers.life import Life, save_steps, serve


def train(life: Life) -> None:
    path = life.directory / "model.zarr"
    step = life.first
    if path.exists():
        group = zarr.open_group(path, mode="r")
        found = {name: array[:] for name, array in group.arrays()}
        step = life.resumed(found, {"attribute": group.attrs["step"]})
    else:
        life.nothing()

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        group = zarr.open_group(path, mode="w", attributes={"step": step})
        for name, value in content.items():
            group.create_array(name, data=value, chunks=(16_384,))
        if "consolidate" in sys.argv:
            zarr.consolidate_metadata(path)

    save_steps(life, step, save)


if __name__ == "__main__":
    serve({"zarr": zarr.__version__}, train)
