"""Keras: ``ModelCheckpoint`` of one ``.keras``, resumed by ``load_model``; with ``backup`` the
callback ``BackupAndRestore``, which resumes by itself. Each epoch is a step.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

from tests.support.matrix.trainers.life import TENSOR_ITEMS, TENSORS, Life, serve, state


@keras.saving.register_keras_serializable("matrix")
class Holder(keras.layers.Layer):
    """The state, as weights that a loss does not move."""

    def build(self, shape: Any) -> None:
        self.held = [
            self.add_weight(shape=(TENSOR_ITEMS,), initializer="zeros", name=f"tensor-{number}")
            for number in range(TENSORS)
        ]
        super().build(shape)

    def call(self, inputs: Any) -> Any:
        return inputs + sum(keras.ops.take(each, 0) for each in self.held) * 0.0


def make_model() -> keras.Model:
    inputs = keras.Input((1,))
    model = keras.Model(inputs, Holder(name="holder")(inputs))
    model.compile(keras.optimizers.SGD(0.0), loss="mse", run_eagerly=True)
    return model


def held(model: keras.Model) -> dict[str, np.ndarray]:
    weights = model.get_layer("holder").held
    return {f"tensor-{number}": weight.numpy() for number, weight in enumerate(weights)}


class Before(keras.callbacks.Callback):
    """Comes before the callback that saves."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del logs
        weights = self.model.get_layer("holder").held
        for weight, value in zip(weights, state(epoch + 1).values(), strict=True):
            weight.assign(value)
        self.life.begin(epoch + 1)


class Behind(keras.callbacks.Callback):
    """Comes behind it."""

    def __init__(self, life: Life) -> None:
        super().__init__()
        self.life = life

    def on_train_begin(self, logs: object = None) -> None:
        del logs
        if not self.life.has_resumed:
            epoch = self.model._initial_epoch  # what BackupAndRestore has set
            if epoch is None and not self.model.get_layer("holder").held[0].numpy().any():
                self.life.nothing()
            else:
                self.life.resumed(held(self.model), {"epoch": epoch or 0})

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        del logs
        self.life.end(epoch + 1)
        self.model.stop_training = not self.life.goes_on


def train(life: Life) -> None:
    path = life.directory / "model.keras"
    step = life.first
    if "backup" in sys.argv:
        model = make_model()
        saver = keras.callbacks.BackupAndRestore(
            str(life.directory / "backup"), delete_checkpoint=False
        )
    else:
        if path.exists():
            model = keras.models.load_model(path)
            model.run_eagerly = True
            step = life.resumed(held(model), {})
        else:
            model = make_model()
            life.nothing()
        saver = keras.callbacks.ModelCheckpoint(str(path))
    item = np.zeros((1, 1), np.float32)
    callbacks = [Before(life), saver, Behind(life)]
    model.fit(item, item, epochs=1 << 20, initial_epoch=step, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    serve({"keras": keras.__version__}, train)
