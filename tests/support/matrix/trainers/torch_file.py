"""``torch.save`` of one name, again and again: by the name, or with ``file`` to a file object."""

from __future__ import annotations

import sys

import numpy as np
import torch

from tests.support.matrix.trainers.life import Life, save_steps, serve


def train(life: Life) -> None:
    path = life.directory / "checkpoint.pt"
    step = life.first
    if path.exists():
        loaded = torch.load(path)
        step = life.resumed(loaded["model"], {"step": loaded["step"]})
    else:
        life.nothing()

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        model = {name: torch.from_numpy(value) for name, value in content.items()}
        if "file" in sys.argv:
            with path.open("wb") as file:
                torch.save({"step": step, "model": model}, file)
        else:
            torch.save({"step": step, "model": model}, path)

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"torch": torch.__version__}, train)
