"""HDF5 files: listed by HDF5's library, in a process that may fail."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from cxlfs.checkpoint import Checkpoint, Level, hdf5_apart, hdf5_child, inspect


@pytest.fixture(params=[0, 1024])
def later(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w", libver="latest", userblock_size=request.param) as file:
        file["a"] = np.arange(100.0)
        file["group/b"] = np.ones((3, 4), ">i2")
        file["group/bool"] = np.array([True, False])
        file.create_dataset(
            "group/chunked", data=np.zeros((50, 50)), chunks=True, compression="gzip"
        )
        file.create_dataset("never written", (10,), "f8")
        for number in range(40):
            file[f"many/{number}"] = np.full(3, number, "f4")
        file["group/up"] = file["/"]
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/a")
    return path


def looked_at(path: Path, level: Level = Level.CONTENT) -> Checkpoint:
    found = inspect(path, level)
    assert found is not None
    return found


def test_tensors_of_a_later_version(later: Path) -> None:
    assert looked_at(later, Level.STRUCTURE).tensors == ()
    found = looked_at(later)
    assert (found.words, found.notes, len(found.tensors)) == ("complete", (), 5 + 40)
    data = later.read_bytes()
    with h5py.File(later) as file:
        for tensor in found.tensors:
            array = file[tensor.name]
            assert tensor.shape == array.shape
            assert tensor.dtype == ("bool" if array.dtype == bool else array.dtype.str)
            if tensor.offset is not None:
                assert data[tensor.offset :][: tensor.size_bytes] == array[()].tobytes()
    without = {tensor.name for tensor in found.tensors if tensor.offset is None}
    assert without == {"group/chunked", "never written"}


def test_a_file_of_both_kinds(tmp_path: Path) -> None:
    """Groups that keep the order in which things were made are of the later version."""
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(10.0)
        file.create_group("ordered", track_order=True)["b"] = np.arange(20.0)
    found = looked_at(path)
    assert (found.words, found.notes) == ("complete", ())
    assert sorted(tensor.name for tensor in found.tensors) == ["a", "ordered/b"]


def test_a_group_that_was_never_written(later: Path) -> None:
    data = later.read_bytes()
    states = []
    at = data.index(b"OHDR", data.index(b"OHDR") + 1)
    while at > 0:
        later.write_bytes(data[: at + 16] + bytes(8) + data[at + 24 :])
        states.append(looked_at(later).words)
        at = data.find(b"OHDR", at + 1) if len(states) < 4 else -1
    assert all(words.startswith("damaged: HDF5's library cannot read it") for words in states)


def test_inside_an_archive(later: Path, tmp_path: Path) -> None:
    """Keras keeps its weights so: the file begins somewhere in another one."""
    path = tmp_path / "model.keras"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("metadata.json", '{"keras_version": "3"}')
        archive.writestr("config.json", "{}")
        archive.write(later, "model.weights.h5")
    found = looked_at(path)
    assert (found.kind, found.words) == ("keras", "complete")
    data = path.read_bytes()
    (tensor,) = [each for each in found.tensors if each.name == "a"]
    assert tensor.offset is not None
    assert data[tensor.offset :][:800] == np.arange(100.0).tobytes()


CHILDREN = {
    "crash": (
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        f"damaged: HDF5's library ends with signal {int(signal.SIGSEGV)} reading it",
    ),
    "hang": ("import time; time.sleep(60)", "unknown: HDF5's library took more than 0.5 s"),
    "killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "unknown: HDF5's library ended with code -9",
    ),
    "fails": ("raise SystemExit(7)", "unknown: HDF5's library ended with code 7"),
    "without h5py": ("raise SystemExit(3)", "unknown: h5py cannot be imported; next: pip install"),
    "nonsense": ("print('{')", "damaged: what HDF5's library says of it is not JSON"),
    "list": ("print('[]')", "damaged: what HDF5's library says of it is damaged"),
    "numbers": (
        'print(\'{"tensors": [], "attributes": [7]}\')',
        "damaged: what HDF5's library says of it is damaged",
    ),
    "behind": (
        (
            'print(\'{"attributes": [], "tensors": [{"name": "w", "shape": [], "dtype": "f4", '
            '"offset": 1000000, "size": 4}]}\')'
        ),
        "damaged: tensor w lies behind the end",
    ),
    "later": (
        'print(\'{"tensors": [], "attributes": [], "problem": "bad version number"}\')',
        "unknown: HDF5's library does not read it: bad version number",
    ),
    "memory": (
        'print(\'{"tensors": [], "attributes": [], "problem": "memory allocation failed"}\')',
        "unknown: HDF5's library does not read it",
    ),
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that_fails(
    later: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    program, words = CHILDREN[name]
    shutil.copy(Path(hdf5_apart.__file__), tmp_path / "hdf5_apart.py")
    (tmp_path / "hdf5_child.py").write_text(program)
    monkeypatch.setattr(hdf5_apart, "__file__", str(tmp_path / "hdf5_apart.py"))
    monkeypatch.setattr(hdf5_apart, "SECONDS_MAX", 0.5 if name == "hang" else 30.0)
    assert looked_at(later).words.startswith(words)


def test_the_child_can_open_nothing_and_has_limits(later: Path) -> None:
    program = f"""
import runpy, resource, sys
child = runpy.run_path({str(Path(hdf5_child.__file__))!r})
child["_limit"]()
try:
    open({str(later)!r}, "rb")
except OSError as error:
    assert error.errno == 24, error
else:
    raise SystemExit(1)
assert resource.getrlimit(resource.RLIMIT_FSIZE) == (0, 0)
try:
    bytearray(3 << 30)
except MemoryError:
    sys.exit(0)
sys.exit(2)
"""
    assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0


def test_changed_at_random(later: Path, rng: random.Random) -> None:
    """More of them by hand: docs/frameworks.md."""
    data = later.read_bytes()
    for _ in range(8):
        changed = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        later.write_bytes(changed)
        assert looked_at(later).words.split(":")[0] in (
            "complete",
            "incomplete",
            "damaged",
            "unknown",
        )
