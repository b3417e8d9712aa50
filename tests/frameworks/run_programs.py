"""Ordinary programs that save and load with one library each: ``NAME save``, or ``NAME load``, in
the directory that is current. The last line of the output is JSON: ``version``, and ``digest`` of
everything that was saved or loaded.

Never here: anything of this project: each runs in the library's own environment, and cannot know
how it was started.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
ITEMS = 1 << 20
"""Of each of the large arrays, 4 MiB."""


def digest(arrays: Iterable[tuple[str, Any]]) -> str:
    """Of names, types, shapes and bytes."""
    found = hashlib.sha256()
    for name, value in sorted(arrays, key=lambda each: each[0]):
        array = np.ascontiguousarray(value)
        found.update(f"{name} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return found.hexdigest()


def arrays(count: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    large = {f"layer{n}": rng.standard_normal(ITEMS).astype(np.float32) for n in range(count)}
    return {**large, "bias": np.arange(333, dtype=np.float64)}


# --- NumPy, HDF5, safetensors ---------------------------------------------------------------------


def numpy_save() -> str:
    given = arrays()
    for name, array in given.items():
        np.save(f"{name}.npy", array)
    np.savez("all.npz", **given)
    given["layer0"].tofile("layer0.bin")
    return digest(given.items())


def numpy_load() -> str:
    expected = arrays()
    loaded = {name: np.load(f"{name}.npy") for name in expected}
    with np.load("all.npz") as archive:
        assert digest((name, archive[name]) for name in archive.files) == digest(loaded.items())
    assert np.fromfile("layer0.bin", np.float32).tobytes() == loaded["layer0"].tobytes()
    for mode in ("r", "c"):
        mapped = {name: np.load(f"{name}.npy", mmap_mode=mode) for name in expected}
        assert digest(mapped.items()) == digest(loaded.items()), mode
    mapped["layer1"][5] = 7.0  # private: nothing of it in the file
    assert np.load("layer1.npy")[5] == loaded["layer1"][5]
    return digest(loaded.items())


def h5py_save() -> str:
    import h5py

    given = arrays()
    with h5py.File("state.h5", "w") as file:
        for name, array in given.items():
            file[name] = array if name != "layer2" else array * 0
    with h5py.File("state.h5", "a") as file:
        file["layer2"][:] = given["layer2"]
        file.create_dataset("packed", data=given["layer0"], chunks=(1 << 18,), compression="gzip")
    return digest([*given.items(), ("packed", given["layer0"])])


def h5py_load() -> str:
    import h5py

    with h5py.File("state.h5", "r") as file:
        return digest([(name, file[name][()]) for name in file])


def safetensors_save() -> str:
    from safetensors.numpy import save_file

    for _ in range(2):  # the second time over the first
        save_file(arrays(), "model.safetensors")
    return digest(arrays().items())


def safetensors_load() -> str:
    from safetensors import safe_open
    from safetensors.numpy import load_file

    with safe_open("model.safetensors", "numpy") as file:
        one = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118  no mapping
    found = digest(load_file("model.safetensors").items())
    assert digest(one) == found
    return found


# --- PyTorch --------------------------------------------------------------------------------------


def _tensors() -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(array) for name, array in arrays().items()}


def _of_tensors(state: dict[str, Any]) -> str:
    return digest((name, tensor.detach().numpy()) for name, tensor in state.items())


def torch_save() -> str:
    import torch

    for _ in range(2):
        torch.save(_tensors(), "named.pt")
    with open("file.pt", "wb") as file:  # noqa: PTH123  as people write it
        torch.save(_tensors(), file)
    return _of_tensors(_tensors())


def torch_load() -> str:
    import torch

    found = {
        _of_tensors(torch.load(name, mmap=mapped))
        for name in ("named.pt", "file.pt")
        for mapped in (False, True)
    }
    with open("file.pt", "rb") as file:  # noqa: PTH123
        found.add(_of_tensors(torch.load(file)))
    (only,) = found
    return only


def safetensors_torch_save() -> str:
    from safetensors.torch import save_file

    for _ in range(2):
        save_file(_tensors(), "model.safetensors")
    return _of_tensors(_tensors())


def safetensors_torch_load() -> str:
    from safetensors.torch import load_file

    return _of_tensors(load_file("model.safetensors"))


def dcp_save() -> str:
    import torch.distributed.checkpoint as dcp

    dcp.save(_tensors(), checkpoint_id="step")
    return _of_tensors(_tensors())


def dcp_load() -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    state = {name: torch.zeros_like(tensor) for name, tensor in _tensors().items()}
    dcp.load(state, checkpoint_id="step")
    return _of_tensors(state)


# --- trainers -------------------------------------------------------------------------------------


def _hugging_face(*, resume: bool) -> str:
    import torch
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1024, 1024)

        def forward(self, x: Any) -> dict[str, Any]:
            return {"loss": self.layer(x).square().mean()}

    found: list[str] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *_arguments: Any, **given: Any) -> None:
            found.append(_of_tensors(given["model"].state_dict()))

    transformers.utils.logging.set_verbosity_error()
    transformers.set_seed(1)
    given = TrainingArguments(
        "run",
        max_steps=3,
        save_steps=1,
        save_strategy="no" if resume else "steps",
        save_total_limit=2,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    data = [{"x": torch.linspace(-1, 1, 1024)}] * 64
    trainer = Trainer(Model(), given, train_dataset=data, callbacks=[Look()])
    trainer.train(resume_from_checkpoint=resume)
    return found[0] if resume else _of_tensors(trainer.model.state_dict())


def hugging_face_save() -> str:
    return _hugging_face(resume=False)


def hugging_face_load() -> str:
    return _hugging_face(resume=True)


def _lightning(resume: bool) -> str:
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1024, 1024)

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.layer(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    lightning.seed_everything(1, verbose=False)
    saver = ModelCheckpoint(dirpath="run", every_n_train_steps=1, save_last=True, save_top_k=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver],
        default_root_dir="run",
    )
    model = Model()
    items = torch.utils.data.DataLoader(torch.linspace(-1, 1, 64 * 1024).reshape(64, 1024))
    trainer.fit(model, items, ckpt_path="last" if resume else None, weights_only=False)
    return _of_tensors(model.state_dict())


def lightning_save() -> str:
    return _lightning(resume=False)


def lightning_load() -> str:
    return _lightning(resume=True)


# --- TensorFlow -----------------------------------------------------------------------------------


def _keras_model() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(1 << 14), keras.layers.Dense(64)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    return model


def _of_keras(model: Any) -> list[tuple[str, Any]]:
    return [(f"keras{number}", value.numpy()) for number, value in enumerate(model.variables)]


def tensorflow_save() -> str:
    import tensorflow as tf

    model = _keras_model()
    variables = {name: tf.Variable(array) for name, array in arrays().items()}
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(**variables), "run", max_to_keep=2)
    for step in range(3):
        manager.save(checkpoint_number=step)
    model.save("model.keras")
    model.save_weights("model.weights.h5")
    model.export("exported", verbose=False)
    return digest([*arrays().items(), *_of_keras(model)])


def tensorflow_load() -> str:
    import keras
    import tensorflow as tf

    variables = {name: tf.Variable(array * 0) for name, array in arrays().items()}
    checkpoint = tf.train.Checkpoint(**variables)
    checkpoint.restore(tf.train.latest_checkpoint("run")).assert_consumed()
    model = keras.models.load_model("model.keras")
    weights = _keras_model()
    weights.load_weights("model.weights.h5")
    exported = tf.saved_model.load("exported")
    assert digest(_of_keras(model)) == digest(_of_keras(weights))
    assert {v.numpy().tobytes() for v in exported.variables} <= {
        value.tobytes() for _, value in _of_keras(model)
    }
    return digest([(n, v.numpy()) for n, v in variables.items()] + _of_keras(model))


PROGRAMS: dict[str, tuple[str, Callable[[], str], Callable[[], str]]] = {
    "numpy": ("numpy", numpy_save, numpy_load),
    "h5py": ("h5py", h5py_save, h5py_load),
    "safetensors": ("safetensors", safetensors_save, safetensors_load),
    "torch": ("torch", torch_save, torch_load),
    "safetensors.torch": ("safetensors", safetensors_torch_save, safetensors_torch_load),
    "torch.distributed.checkpoint": ("torch", dcp_save, dcp_load),
    "transformers": ("transformers", hugging_face_save, hugging_face_load),
    "lightning": ("lightning", lightning_save, lightning_load),
    "tensorflow": ("tensorflow", tensorflow_save, tensorflow_load),
}
"""Of each: the module that has the version, how it saves, how it loads."""


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    name, what = sys.argv[1:3]
    module, save, load = PROGRAMS[name]
    found = save() if what == "save" else load()
    version = __import__(module).__version__
    print(json.dumps({"version": version, "digest": found, "at": str(Path.cwd())}))


if __name__ == "__main__":
    main()
