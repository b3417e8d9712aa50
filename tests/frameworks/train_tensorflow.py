"""An ordinary TensorFlow training script: it knows nothing of what its directory lies on.

    train_tensorflow.py DIRECTORY STEPS     train up to STEPS, saving each, the last three kept
    train_tensorflow.py DIRECTORY --show    print what the latest checkpoint holds, and what is kept

Prints one JSON document: the latest step, the checkpoints kept, a digest of every variable.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import tensorflow as tf

KEEP = 3


def main() -> None:
    directory, steps = sys.argv[1], sys.argv[2]
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [
            tf.keras.Input((256,)),
            tf.keras.layers.Dense(512, "relu", name="hidden"),
            tf.keras.layers.Dense(10, name="logits"),
        ]
    )
    optimizer = tf.keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = tf.train.CheckpointManager(checkpoint, directory, max_to_keep=KEEP)
    if manager.latest_checkpoint is not None:
        checkpoint.restore(manager.latest_checkpoint).assert_existing_objects_matched()
    if steps != "--show":
        train(model, optimizer, step, int(steps), manager)
    if steps != "--show":
        model.save(Path(directory) / "final.keras")
        model.save_weights(Path(directory) / "final.weights.h5")
    variables = [*model.variables, *optimizer.variables, step]
    report = {
        "step": int(step),
        "kept": [Path(path).name for path in manager.checkpoints],
        "files": sorted(path.name for path in Path(directory).iterdir()),
        "keras": digest(tf.keras.models.load_model(Path(directory) / "final.keras").variables),
        "model": digest(model.variables),
        "all": digest(variables),
    }
    print(json.dumps(report))


def train(
    model: tf.keras.Model,
    optimizer: tf.keras.optimizers.Optimizer,
    step: tf.Variable,
    steps: int,
    manager: tf.train.CheckpointManager,
) -> None:
    while int(step) < steps:
        inputs = tf.random.stateless_normal((32, 256), seed=(int(step), 7))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        step.assign_add(1)
        manager.save(checkpoint_number=int(step))


def digest(variables: list[tf.Variable]) -> str:
    total = hashlib.sha256()
    for variable in variables:
        total.update(variable.numpy().tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    main()
