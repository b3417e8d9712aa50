"""Formats of ``oracle`` that one library writes and loads: of files, and of directories of files.

Never here: whole training programs (``oracle_training``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.oracle_values import Format, arrays, tensors


def _save_torch(path: Path, seed: int, *, zipped: bool = True) -> None:
    import torch

    value = {"model": tensors(seed), "epoch": seed, "lr": 0.1, "name": f"run{seed}"}
    torch.save(value, path, _use_new_zipfile_serialization=zipped)


def _load_torch(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def _save_safetensors(path: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    save_file(arrays(seed), path, {"step": str(seed)})


def _load_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        return [file.metadata(), {name: file.get_tensor(name) for name in file.keys()}]  # noqa: SIM118


def _save_shards(path: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    path.mkdir()
    weight_map = {}
    for number, (name, array) in enumerate(arrays(seed).items(), 1):
        file = f"model-{number:05}-of-00005.safetensors"
        weight_map[name] = file
        save_file({name: array}, path / file)
    index = {"metadata": {"total_size": seed}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _load_shards(path: Path) -> Any:
    """As transformers does: each tensor from the file that the index says."""
    from safetensors import safe_open

    index = json.loads((path / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        with safe_open(path / file, "np") as shard:
            found[name] = shard.get_tensor(name)
    return found


def _save_dcp(path: Path, seed: int) -> None:
    import torch.distributed.checkpoint as dcp

    writer = dcp.FileSystemWriter(path, thread_count=3)
    state = tensors(seed) | {"step": seed, "lr": [0.1, 0.2]}
    dcp.save(state, storage_writer=writer, no_dist=True)


def _load_dcp(path: Path) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp

    state: dict[str, Any] = {name: torch.zeros_like(each) for name, each in tensors(0).items()}
    state |= {"step": -1, "lr": None}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def _save_trainer(path: Path, seed: int) -> None:
    """What transformers' Trainer writes, in its order."""
    import torch

    path.mkdir()
    _save_safetensors(path / "model.safetensors", seed)
    torch.save({"args": seed}, path / "training_args.bin")
    torch.save({"state": tensors(seed + 1)}, path / "optimizer.pt")
    torch.save({"last_epoch": seed}, path / "scheduler.pt")
    torch.save({"cpu": torch.arange(1000 + seed)}, path / "rng_state.pth")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": seed, "log_history": []}))


def _load_trainer(path: Path) -> Any:
    """What its resume reads (``_load_from_checkpoint``, ``_load_optimizer_and_scheduler``)."""
    names = [name for name in ("optimizer.pt", "scheduler.pt") if (path / name).is_file()]
    if (path / "rng_state.pth").is_file():  # it resumes without, with other random numbers
        _load_torch(path / "rng_state.pth")
    return [
        _load_safetensors(path / "model.safetensors"),
        {name: _load_torch(path / name) for name in (names if len(names) == 2 else ())},
        json.loads((path / "trainer_state.json").read_text()),
    ]


class _Model:
    """A small network, its optimizer and accelerate around them."""

    def __init__(self, seed: int) -> None:
        import torch
        from accelerate import Accelerator

        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 5))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.ones(1, 20)).sum().backward()
        self.optimizer.step()
        self.accelerator = Accelerator(cpu=True)
        self.accelerator.prepare(self.model, self.optimizer)


def _save_accelerate(path: Path, seed: int) -> None:
    _Model(seed).accelerator.save_state(str(path))


def _load_accelerate(path: Path) -> Any:
    import torch

    made = _Model(99)
    made.accelerator.load_state(str(path))
    states = [made.model.state_dict(), made.optimizer.state_dict()]
    made.accelerator.free_memory()
    return [*states, torch.get_rng_state()]


def _save_npy(path: Path, seed: int) -> None:
    np.save(path, arrays(seed)["layers.0.w"])


def _save_npz(path: Path, seed: int) -> None:
    np.savez(path, **arrays(seed))


def _load_npz(path: Path) -> Any:
    with np.load(path) as found:
        return {name: found[name] for name in found.files}


def _save_pickle(path: Path, seed: int) -> None:
    import pickle

    path.write_bytes(pickle.dumps({"w": arrays(seed), "step": seed}))


def _load_pickle(path: Path) -> Any:
    import pickle

    with path.open("rb") as file:
        return pickle.load(file)  # noqa: S301  our own


def _save_joblib(path: Path, seed: int) -> None:
    import joblib

    joblib.dump({"w": arrays(seed), "step": seed}, path)


def _load_joblib(path: Path) -> Any:
    import joblib

    return joblib.load(path)


def _save_hdf5(path: Path, seed: int) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, array in arrays(seed).items():
            file[name.replace(".", "/")] = array


def _load_hdf5(path: Path) -> Any:
    import h5py

    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, each: (
                found.update({name: each[()]}) if isinstance(each, h5py.Dataset) else None
            )
        )
    return found


def _save_flax(path: Path, seed: int) -> None:
    from flax import serialization

    path.write_bytes(serialization.msgpack_serialize({"params": arrays(seed), "step": seed}))


def _load_flax(path: Path) -> Any:
    from flax import serialization

    return serialization.msgpack_restore(path.read_bytes())


def _save_orbax(path: Path, seed: int) -> None:
    import orbax.checkpoint as ocp

    tree = {n.replace(".", "_"): a for n, a in arrays(seed).items() if a.size}
    with ocp.StandardCheckpointer() as saver:
        saver.save(path, tree)


def _load_orbax(path: Path) -> Any:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as loader:
        found = loader.restore(path)
    return {name: np.asarray(each) for name, each in found.items()}


def _save_bundle(path: Path, seed: int) -> None:
    import tensorflow as tf

    variables = {n.replace(".", "_"): tf.Variable(a) for n, a in arrays(seed).items()}
    tf.train.Checkpoint(**variables, name=tf.Variable(f"run{seed}")).write(str(path))


def _load_bundle(path: Path) -> Any:
    import tensorflow as tf

    reader = tf.train.load_checkpoint(str(path))
    names = reader.get_variable_to_shape_map()
    return {name: np.asarray(reader.get_tensor(name)) for name in names}


def _save_keras(path: Path, seed: int) -> None:
    import keras

    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(30), keras.layers.Dense(5)])
    model.compile("adam", "mse")
    model.save(path)


def _load_keras(path: Path) -> Any:
    import keras

    model = keras.models.load_model(path)
    return [np.asarray(each) for each in model.get_weights()]


def _save_xgboost(path: Path, seed: int) -> None:
    import xgboost

    made = arrays(seed)["layers.0.w"]
    data = xgboost.DMatrix(made, made[:, 0])
    xgboost.train({"nthread": 1}, data, 3).save_model(path)


def _load_xgboost(path: Path) -> Any:
    import xgboost

    return bytes(xgboost.Booster({"nthread": 1}, model_file=path).save_raw())


def _save_lightgbm(path: Path, seed: int) -> None:
    import lightgbm

    made = np.random.default_rng(seed).random((200, 4))
    data = lightgbm.Dataset(made, made[:, 0])
    lightgbm.train({"verbose": -1, "num_threads": 1}, data, 3).save_model(path)


def _load_lightgbm(path: Path) -> Any:
    import lightgbm

    return lightgbm.Booster(model_file=path).model_to_string()


def _save_gguf(path: Path, seed: int) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("step", seed)
    for name, array in arrays(seed).items():
        if array.ndim == 2 and array.size:
            writer.add_tensor(name, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _load_gguf(path: Path) -> Any:
    import gguf

    return {each.name: np.array(each.data) for each in gguf.GGUFReader(path).tensors}


def _save_onnx(path: Path, seed: int) -> None:
    import onnx
    from onnx import helper, numpy_helper

    parts = [numpy_helper.from_array(a, n) for n, a in arrays(seed).items()]
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [], parts)), path)


def _load_onnx(path: Path) -> Any:
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path)
    onnx.checker.check_model(model)
    return {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}


LIBRARIES = (
    Format("torch", ("torch",), "step-7.pt", _save_torch, _load_torch, checked=True),
    Format(
        "torch-legacy",
        ("torch",),
        "step-7.pt",
        lambda path, seed: _save_torch(path, seed, zipped=False),
        _load_torch,
    ),
    Format("safetensors", ("safetensors",), "m.safetensors", _save_safetensors, _load_safetensors),
    Format("safetensors-sharded", ("safetensors",), "model", _save_shards, _load_shards),
    Format("dcp", ("torch",), "step-7", _save_dcp, _load_dcp, checked=True),
    Format("hugging-face", ("torch", "safetensors"), "checkpoint-7", _save_trainer, _load_trainer),
    Format("accelerate", ("accelerate",), "checkpoint_7", _save_accelerate, _load_accelerate),
    Format("numpy", ("numpy",), "a.npy", _save_npy, np.load),
    Format("numpy-archive", ("numpy",), "a.npz", _save_npz, _load_npz, checked=True),
    Format("pickle", ("numpy",), "m.pkl", _save_pickle, _load_pickle),
    Format("joblib", ("joblib",), "m.pkl", _save_joblib, _load_joblib),
    Format("hdf5", ("h5py",), "m.h5", _save_hdf5, _load_hdf5),
    Format("flax", ("flax",), "checkpoint_7", _save_flax, _load_flax),
    Format("orbax", ("orbax",), "7", _save_orbax, _load_orbax),
    Format("tensorflow", ("tensorflow",), "ckpt-7", _save_bundle, _load_bundle, checked=True),
    Format("keras", ("keras", "tensorflow"), "m.keras", _save_keras, _load_keras, checked=True),
    Format("xgboost", ("xgboost",), "m.ubj", _save_xgboost, _load_xgboost),
    Format("lightgbm", ("lightgbm",), "m.txt", _save_lightgbm, _load_lightgbm),
    Format("gguf", ("gguf",), "m.gguf", _save_gguf, _load_gguf),
    Format("onnx", ("onnx",), "m.onnx", _save_onnx, _load_onnx),
)
