"""Megatron-LM's layout, replayed: it needs GPUs. In the order of its ``save_checkpoint`` with
``--ckpt-format torch`` a file of ``torch.save`` for each of two tensor-parallel ranks (here one
process, one after the other), then the tracker, written in place; resumed from what the tracker
names. Two are kept.
"""

from __future__ import annotations

import shutil

import numpy as np
import torch

from tests.support.matrix.trainers.life import TENSORS, Life, save_steps, serve

KEEP = 2
RANKS = 2


def train(life: Life) -> None:
    tracker = life.directory / "latest_checkpointed_iteration.txt"

    def name(iteration: int, rank: int) -> str:
        return str(
            life.directory / f"iter_{iteration:07d}" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"
        )

    if tracker.exists():
        iteration = int(tracker.read_text().strip())
        ranks = [torch.load(name(iteration, rank)) for rank in range(RANKS)]
        found = {key: value for loaded in ranks for key, value in loaded["model"].items()}
        numbers = {f"rank {rank}": loaded["iteration"] for rank, loaded in enumerate(ranks)}
        step = life.resumed(found, {"tracker": iteration, **numbers})
    else:
        step = life.nothing()

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        values = list(content.items())
        for rank in range(RANKS):
            (life.directory / f"iter_{step:07d}" / f"mp_rank_{rank:02d}").mkdir(
                parents=True, exist_ok=True
            )
            part = values[rank * TENSORS // RANKS : (rank + 1) * TENSORS // RANKS]
            model = {key: torch.from_numpy(value) for key, value in part}
            torch.save({"iteration": step, "model": model}, name(step, rank))
        with tracker.open("w") as file:
            file.write(str(step))
        for old in sorted(life.directory.glob("iter_*"))[:-KEEP]:
            shutil.rmtree(old)

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve({"torch": torch.__version__}, train)
