"""What a library makes of a checkpoint: ``FORMAT make DIRECTORY``, or ``FORMAT load`` with one path
on each line of the input and one JSON object on each of the output.

``digest`` is of everything that was loaded, ``error`` why nothing was. Each load runs in a fork, so
that what one breaks does not meet the next.

Never here: anything of this project: it runs in the library's own environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
LOAD_SECONDS = 30


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """Of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(arrays, key=lambda each: each[0]):
        array = np.asarray(value)
        data = repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()
        found.update(f"{name} {array.dtype} {array.shape} {len(data)} ".encode() + data)
    return found.hexdigest()


def flat(tree: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{name}/{key}")
    elif isinstance(tree, (list, tuple)):
        yield f"{name}/length", len(tree)
        for number, value in enumerate(tree):
            yield from flat(value, f"{name}/{number}")
    else:
        yield name, tree


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


# --- TensorFlow -------------------------------------------------------------------------------


def _variables() -> dict[str, Any]:
    import tensorflow as tf
    from tensorflow.python.framework.dtypes import float8_e5m2, int4  # type: ignore[import-not-found]

    return {
        "w": tf.Variable(random(64, 33)),
        "b": tf.Variable(tf.cast(random(16), tf.bfloat16)),
        "step": tf.Variable(5, dtype=tf.int64),
        "s": tf.Variable(["hello", "", "x" * 300]),
        "c": tf.Variable(tf.complex(random(5), random(5))),
        "flags": tf.Variable([True, False]),
        "few": tf.Variable(tf.cast([1, -2, 3], int4)),
        "small": tf.Variable(tf.cast(random(7), float8_e5m2)),
    }


def make_tensorflow(place: Path) -> None:
    import tensorflow as tf

    tf.train.Checkpoint(**_variables()).write(str(place / "ckpt-3"))


def make_tensorflow_shards(place: Path) -> None:
    import tensorflow as tf

    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=4000)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    variables = _variables()
    del variables["few"]  # these cannot be divided
    tf.train.Checkpoint(**variables).write(str(place / "ckpt-3"), options=options)


def load_tensorflow(place: Path) -> str:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(place / "ckpt-3"))
    names = reader.get_variable_to_shape_map()
    return digest((name, reader.get_tensor(name)) for name in names)


def make_saved_model(place: Path) -> None:
    import tensorflow as tf

    class Model(tf.Module):
        def __init__(self) -> None:
            self.v = tf.Variable(random(48))
            words = place.parent / "words.txt"
            words.write_text("one\ntwo\nthree\n")
            self.words = tf.lookup.StaticVocabularyTable(
                tf.lookup.TextFileInitializer(
                    str(words),
                    tf.string,
                    tf.lookup.TextFileIndex.WHOLE_LINE,
                    tf.int64,
                    tf.lookup.TextFileIndex.LINE_NUMBER,
                ),
                1,
            )

        @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
        def __call__(self, word: Any) -> Any:
            return tf.cast(self.words.lookup(word), tf.float32) * self.v

    tf.saved_model.save(Model(), str(place / "saved"))


def load_saved_model(place: Path) -> str:
    import tensorflow as tf

    model = tf.saved_model.load(str(place / "saved"))
    words = ("one", "two", "three", "four")
    return digest([("v", model.v.numpy())] + [(w, model(tf.constant(w)).numpy()) for w in words])


# --- Keras ------------------------------------------------------------------------------------


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(17), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    return model


def _weights(model: Any) -> str:
    state = [model.variables, model.optimizer.variables]
    return digest((f"{i} {j}", v) for i, vs in enumerate(state) for j, v in enumerate(vs))


def make_keras(place: Path) -> None:
    model = _model()
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    model.save(place / "model.keras")


def load_keras(place: Path) -> str:
    import keras

    return _weights(keras.models.load_model(place / "model.keras"))


def make_keras_weights(place: Path) -> None:
    model = _model()
    model.fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
    model.save_weights(place / "model.weights.h5")


def load_keras_weights(place: Path) -> str:
    model = _model()
    model.load_weights(place / "model.weights.h5")
    return _weights(model)


# --- Orbax, flax ------------------------------------------------------------------------------


def _tree() -> dict[str, Any]:
    import jax.numpy as jnp

    return {
        "w": jnp.asarray(random(64, 33)),
        "inner": {"b": jnp.zeros(16, jnp.bfloat16), "n": jnp.arange(900)},
        "step": 9,
    }


def make_orbax(place: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(place) as manager:
        manager.save(7, args=ocp.args.StandardSave(_tree()))
        manager.wait_until_finished()


def load_orbax(place: Path) -> str:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(place) as manager:
        step = manager.latest_step()
        if step is None:
            raise ValueError("there is no step")
        return digest(flat(manager.restore(step, args=ocp.args.StandardRestore(_tree()))))


def make_orbax_items(place: Path) -> None:
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave(_tree()), config=ocp.args.JsonSave({"lr": 0.5})
    )
    with ocp.CheckpointManager(place) as manager:
        manager.save(7, args=args)
        manager.wait_until_finished()


def load_orbax_items(place: Path) -> str:
    import orbax.checkpoint as ocp

    args = ocp.args.Composite(state=ocp.args.PyTreeRestore(), config=ocp.args.JsonRestore())
    with ocp.CheckpointManager(place) as manager:
        found = manager.restore(7, args=args)
        return digest([*flat(found.state), *flat(found.config, "config")])


def make_flax(place: Path) -> None:
    import flax
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", False)
    checkpoints.save_checkpoint(place, {**_tree(), "lr": 0.5, "name": "run"}, step=9)


def load_flax(place: Path) -> str:
    import flax
    from flax.training import checkpoints

    flax.config.update("flax_use_orbax_checkpointing", False)
    target = {**_tree(), "lr": 0.0, "name": ""}
    found = checkpoints.restore_checkpoint(place, target)
    if found is target:
        raise ValueError("there is no checkpoint")
    return digest(flat(found))


# --- HDF5, NumPy ------------------------------------------------------------------------------


def _make_hdf5(place: Path, options: dict[str, Any], **how: Any) -> None:
    import h5py

    with h5py.File(place / "state.h5", "w", **how) as file:
        group = file.create_group("layers/dense")
        group.create_dataset("w", data=random(64, 33), **options)
        group.create_dataset("b", data=random(16), **options)
        file.create_dataset("words", data=["hello", "you"], dtype=h5py.string_dtype())
        file.attrs["step"] = 9


def make_hdf5(place: Path) -> None:
    _make_hdf5(place, {})


def make_hdf5_chunks(place: Path) -> None:
    _make_hdf5(place, {"chunks": True, "compression": "gzip", "fletcher32": True})


def make_hdf5_latest(place: Path) -> None:
    _make_hdf5(place, {}, libver="latest")


def load_hdf5(place: Path) -> str:
    import h5py

    found: list[tuple[str, Any]] = []
    with h5py.File(place / "state.h5", "r") as file:
        found.append(("step", file.attrs["step"]))
        file.visititems(
            lambda name, each: found.append((name, each[()] if hasattr(each, "dtype") else 0))
        )
    return digest(found)


def make_npz(place: Path) -> None:
    np.savez(place / "state.npz", w=random(64, 33), b=random(16), step=9)


def load_npz(place: Path) -> str:
    with np.load(place / "state.npz") as found:
        return digest((name, found[name]) for name in found.files)


FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Path], str], str]] = {
    "tensorflow": (make_tensorflow, load_tensorflow, "tensorflow"),
    "tensorflow-shards": (make_tensorflow_shards, load_tensorflow, "tensorflow"),
    "saved-model": (make_saved_model, load_saved_model, "tensorflow"),
    "keras": (make_keras, load_keras, "keras"),
    "keras-weights": (make_keras_weights, load_keras_weights, "keras"),
    "orbax": (make_orbax, load_orbax, "orbax.checkpoint"),
    "orbax-items": (make_orbax_items, load_orbax_items, "orbax.checkpoint"),
    "flax": (make_flax, load_flax, "flax.training.checkpoints"),
    "hdf5": (make_hdf5, load_hdf5, "h5py"),
    "hdf5-chunks": (make_hdf5_chunks, load_hdf5, "h5py"),
    "hdf5-latest": (make_hdf5_latest, load_hdf5, "h5py"),
    "npz": (make_npz, load_npz, "numpy"),
}


def answer(load: Callable[[Path], str], place: Path) -> dict[str, str]:
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return {"digest": load(place)}
    except BaseException as error:  # noqa: BLE001  whatever the library makes of it
        return {"error": f"{type(error).__name__}: {error}"[:300]}


def load_apart(load: Callable[[Path], str], place: Path) -> dict[str, str]:
    """In a fork that has LOAD_SECONDS."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        signal.alarm(LOAD_SECONDS)
        os.write(writing, json.dumps(answer(load, place)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        words = said.read()
    _, status = os.waitpid(child, 0)
    return json.loads(words) if words else {"error": f"it ended with status {status}"}


def main() -> None:
    name, what = sys.argv[1:3]
    make, load, module = FORMATS[name]
    __import__(module)
    if what == "make":
        make(Path(sys.argv[3]))
        return
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        said.write(json.dumps(load_apart(load, Path(line.strip()))) + "\n")
        said.flush()


if __name__ == "__main__":
    main()
