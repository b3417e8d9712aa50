"""DeepSpeed's engine on a processor, one process: ``save_checkpoint`` into ``global_stepN``, then
``latest``; resumed by ``load_checkpoint``, which asks ``latest``. It has no rotation: two are kept
by the program.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import deepspeed
import numpy as np
import torch

from tests.support.matrix.trainers.life import Life, save_steps, serve
from tests.support.matrix.trainers.torch_models import Model, get_state, make_optimizer, set_state

KEEP = 2


def make_engine(directory: str) -> deepspeed.DeepSpeedEngine:
    """The only rank of a group."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{directory}/rendezvous",
        rank=0,
        world_size=1,
        verbose=False,
    )
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=make_optimizer(model),
        config={"train_batch_size": 1},
        dist_init_required=False,
    )
    return engine


def train(life: Life) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        engine = make_engine(scratch)
    path, client = engine.load_checkpoint(str(life.directory))
    if path is None:
        step = life.nothing()
    else:
        found = get_state(engine.module, engine.optimizer)
        number = int(Path(path).parent.name.removeprefix("global_step"))
        numbers = {"directory": number, "client": client["step"], "engine": engine.global_steps}
        step = life.resumed(found, numbers)

    def save(step: int, _content: dict[str, np.ndarray]) -> None:
        set_state(engine.module, engine.optimizer, step)
        engine.global_steps = step
        engine.save_checkpoint(str(life.directory), client_state={"step": step})
        saved = life.directory.glob("global_step*")
        for old in sorted(saved, key=lambda path: int(path.name[11:]))[:-KEEP]:
            shutil.rmtree(old)

    save_steps(life, step, save)


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    serve({"deepspeed": deepspeed.__version__, "torch": torch.__version__}, train)
