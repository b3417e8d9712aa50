"""Orbax's CheckpointManager, two kept, and ``restore(latest_step())``."""

from __future__ import annotations

import jax
import numpy as np
import orbax.checkpoint as ocp

from tests.support.matrix.trainers.life import Life, save_steps, serve, state


def train(life: Life) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(life.directory, options=options) as manager:
        latest = manager.latest_step()
        if latest is None:
            step = life.nothing()
        else:
            template = {"step": np.zeros(1, np.int64), **state(0)}
            found = manager.restore(latest, args=ocp.args.StandardRestore(template))
            number = int(found.pop("step")[0])
            step = life.resumed(found, {"directory": latest, "step": number})

        def save(step: int, content: dict[str, np.ndarray]) -> None:
            args = ocp.args.StandardSave({"step": np.full(1, step), **content})
            manager.save(step, args=args)
            manager.wait_until_finished()

        save_steps(life, step, save)


if __name__ == "__main__":
    serve({"orbax": ocp.__version__, "jax": jax.__version__}, train)
