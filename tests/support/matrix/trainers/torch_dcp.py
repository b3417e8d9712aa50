"""torch.distributed.checkpoint: into one directory again and again, or with ``steps`` into
``step-N``, of which two are kept and the newest is resumed from. One process, four files.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from tests.support.matrix.trainers.life import TENSOR_ITEMS, TENSORS, Life, save_steps, serve

KEEP = 2


def steps(directory: Path) -> list[Path]:
    return sorted(directory.glob("step-*"), key=lambda path: int(path.name[5:]))


def newest(directory: Path) -> Path | None:
    if "steps" in sys.argv:
        return (steps(directory) or [None])[-1]
    path = directory / "dcp"
    return path if path.exists() else None


def train(life: Life) -> None:
    path = newest(life.directory)
    step = life.first
    if path is None:
        life.nothing()
    else:
        loaded = {f"tensor-{n}": torch.zeros(TENSOR_ITEMS) for n in range(TENSORS)}
        number = torch.zeros(1, dtype=torch.int64)
        dcp.load({"model": loaded, "step": number}, checkpoint_id=path)
        step = life.resumed(loaded, {"step": int(number)})

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        model = {name: torch.from_numpy(value) for name, value in content.items()}
        target = life.directory / (f"step-{step}" if "steps" in sys.argv else "dcp")
        writer = dcp.FileSystemWriter(target, thread_count=4)
        dcp.save({"model": model, "step": torch.tensor([step])}, storage_writer=writer)
        if "steps" in sys.argv:
            for old in steps(life.directory)[:-KEEP]:
                shutil.rmtree(old)

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"torch": torch.__version__}, train)
