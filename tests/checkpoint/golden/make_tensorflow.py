#!/usr/bin/env python3
"""Checkpoints of TensorFlow, Keras, Orbax and flax, as small as they get: ``*.tar.xz`` beside this
file.

Needs an environment of its own:
    python3 -m venv ~/makers && ~/makers/bin/pip install tensorflow-cpu==2.21.0 \
        orbax-checkpoint==0.12.8 jax==0.10.2 jaxlib==0.10.2 flax
    ~/makers/bin/python tests/checkpoint/golden/make_tensorflow.py
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from pack import pack_each

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def make_tensorflow(place: Path) -> None:
    import tensorflow as tf

    tf.random.set_seed(1)
    checkpoint = tf.train.Checkpoint(
        w=tf.Variable(tf.random.normal([8, 16])),
        b=tf.Variable(tf.zeros([16], tf.bfloat16)),
        step=tf.Variable(5, dtype=tf.int64),
        s=tf.Variable("hello"),
    )
    manager = tf.train.CheckpointManager(checkpoint, str(place / "run"), max_to_keep=3)
    for number in (10, 20):
        manager.save(checkpoint_number=number)

    class Model(tf.Module):
        def __init__(self) -> None:
            self.v = tf.Variable([1.0, 2.0])

        @tf.function(input_signature=[tf.TensorSpec([2])])
        def __call__(self, x: tf.Tensor) -> tf.Tensor:
            return x * self.v

    tf.saved_model.save(Model(), str(place / "saved"))


def make_keras(place: Path) -> None:
    import keras

    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    model.save(place / "model.keras")
    model.save_weights(place / "model.weights.h5")


def make_orbax(place: Path) -> None:
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    generator = np.random.default_rng(1)
    large = jnp.asarray(generator.integers(0, 4, (64, 64)).astype(np.float32))
    with ocp.CheckpointManager(place) as manager:
        for step in (1, 2):
            tree = {"w": large, "b": {"c": jnp.zeros(16)}}
            manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()


def make_flax(place: Path) -> None:
    import flax
    import jax.numpy as jnp
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", False)
    tree = {"w": jnp.ones((8, 16)), "b": jnp.zeros(16, jnp.bfloat16), "step": 9, "lr": 0.5}
    checkpoints.save_checkpoint(place, tree, step=9)


MAKERS = {
    "tensorflow": make_tensorflow,
    "keras": make_keras,
    "orbax": make_orbax,
    "flax": make_flax,
}


if __name__ == "__main__":
    pack_each(MAKERS)
