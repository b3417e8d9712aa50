"""HDF5 by h5py: data sets written in place (``"a"``), or with ``w`` a file made anew each time."""

from __future__ import annotations

import sys

import h5py
import numpy as np

from tests.support.matrix.trainers.life import Life, save_steps, serve


def train(life: Life) -> None:
    path = life.directory / "model.h5"
    step = life.first
    if path.exists():
        with h5py.File(path, "r") as file:
            found = {name: file[name][:] for name in file}
            number = int(file.attrs["step"])
        step = life.resumed(found, {"attribute": number})
    else:
        life.nothing()

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        with h5py.File(path, "w" if "w" in sys.argv else "a") as file:
            for name, value in content.items():
                if name in file:
                    file[name][...] = value
                else:
                    file[name] = value
            file.attrs["step"] = step

    save_steps(life, step, save)


if __name__ == "__main__":
    serve({"h5py": h5py.__version__, "HDF5": h5py.version.hdf5_version}, train)
