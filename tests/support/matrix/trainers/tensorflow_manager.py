"""TensorFlow's CheckpointManager, three kept, and ``restore(latest_checkpoint)``."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tests.support.matrix.trainers.life import TENSOR_ITEMS, TENSORS, Life, save_steps, serve


def train(life: Life) -> None:
    variables = {f"tensor-{n}": tf.Variable(np.zeros(TENSOR_ITEMS, "f4")) for n in range(TENSORS)}
    number = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(step=number, state=variables)
    manager = tf.train.CheckpointManager(checkpoint, str(life.directory), max_to_keep=3)
    if manager.latest_checkpoint is None:
        step = life.nothing()
    else:
        checkpoint.restore(manager.latest_checkpoint).assert_consumed()
        found = {name: value.numpy() for name, value in variables.items()}
        step = life.resumed(found, {"step": int(number.numpy())})

    def save(step: int, content: dict[str, np.ndarray]) -> None:
        number.assign(step)
        for name, value in content.items():
            variables[name].assign(value)
        manager.save(checkpoint_number=step)

    save_steps(life, step, save)


if __name__ == "__main__":
    serve({"tensorflow": tf.__version__}, train)
