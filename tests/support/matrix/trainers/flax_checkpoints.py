"""flax' own checkpoints (msgpack, temporary file and rename), two kept, ``latest_checkpoint``."""

from __future__ import annotations

import flax
import jax
import numpy as np
from flax.training import checkpoints

from tests.support.matrix.trainers.life import Life, save_steps, serve


def train(life: Life) -> None:
    flax.config.update("flax_use_orbax_checkpointing", False)
    directory = str(life.directory)
    latest = checkpoints.latest_checkpoint(directory)
    if latest is None:
        step = life.nothing()
    else:
        found = checkpoints.restore_checkpoint(directory, None)
        number = int(found.pop("step"))
        step = life.resumed(found, {"name": int(latest.rsplit("_", 1)[1]), "step": number})

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        checkpoints.save_checkpoint(directory, {"step": step, **content}, step=step, keep=2)

    save_steps(life, step, save)


if __name__ == "__main__":
    serve({"flax": flax.__version__, "jax": jax.__version__}, train)
