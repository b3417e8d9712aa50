"""Unchanged programs of each library under ``cxlfs run``: the same files, the same content, and
the direct way was taken where the library calls write(2) or its like.

Each saves three times at one path, twice through the kernel: what differs between these two (times,
random numbers) is no difference of the third.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import PROGRAM
from tests.support.mount import Workplace

PROGRAMS = Path(__file__).with_name("run_programs.py")
PATIENCE_SECONDS = 200


@dataclasses.dataclass(frozen=True)
class Expected:
    """``module``: what must be installed. ``varies``: files that two runs through the kernel make
    differently, by the ends of their names. ``direct``: the least part of the bytes of all files
    that is stored directly.
    """

    module: str
    direct: float
    varies: tuple[str, ...] = ()


LIBRARIES = {
    "numpy": Expected("numpy", 0.4),
    "h5py": Expected("h5py", 0.5),
    "safetensors": Expected("safetensors", 0.9),
    "torch": Expected("torch", 0.9),
    "safetensors.torch": Expected("safetensors", 0.9),
    "torch.distributed.checkpoint": Expected("torch", 0.9, varies=(".metadata",)),
    "transformers": Expected("transformers", 0.9),
    "lightning": Expected("lightning", 0.0),
    "tensorflow": Expected(
        "tensorflow",
        0.5,
        varies=(
            "run/checkpoint",
            ".keras",
            ".pb",
            ".index",
            "exported/variables/variables.data-00000-of-00001",
        ),
    ),
}


def python_with(name: str) -> str:
    """An interpreter that has the library; TensorFlow has an environment of its own."""
    module = LIBRARIES[name].module
    if module == "tensorflow":
        python = os.environ.get("CXLFS_TENSORFLOW_PYTHON")
        if python is None:
            pytest.skip("CXLFS_TENSORFLOW_PYTHON names no interpreter (tests/README.md)")
        return python
    needed = {module, "torch"} if name == "safetensors.torch" else {module}
    for each in needed:
        if importlib.util.find_spec(each) is None:
            pytest.skip(f"{each} is not installed")
    return sys.executable


def play(directory: Path, *command: str, run: bool) -> tuple[dict[str, str], int]:
    """What a program said in its last line, and how much was stored directly."""
    report = directory.parent / "report"
    settings = {"CXLFS_RUN_FROM": "4096", "CUDA_VISIBLE_DEVICES": "-1"}
    before = [*PROGRAM, "run", "--"] if run else []
    done = subprocess.run(
        [*before, *command],
        cwd=directory,
        env={**os.environ, "CXLFS_RUN_REPORT": str(report), **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    moved = json.loads(report.read_text())["direct_bytes"] if report.exists() else 0
    report.unlink(missing_ok=True)
    return said, moved


def files_of(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.tensorflow] if name == "tensorflow" else [])
        for name in LIBRARIES
    ],
)
def test_a_library_does_the_same(
    place: Workplace, name: str, record_property: Callable[[str, object], None]
) -> None:
    expected = LIBRARIES[name]
    program = (python_with(name), str(PROGRAMS), name)
    work = place.mountpoint / "work"
    found = []
    for run in (False, False, True):
        work.mkdir()
        said, saved = play(work, *program, "save", run=run)
        found.append((said["digest"], files_of(work)))
        size = size_of(work)
        if not run:
            work.rename(place.mountpoint / f"kernel{len(found)}")
    (digest, first), (_, second), (direct_digest, direct) = found
    assert direct_digest == digest
    assert direct.keys() == first.keys()
    varied = {path for path, content in first.items() if second[path] != content}
    assert all(path.endswith(expected.varies) for path in varied), varied
    assert {path for path, content in first.items() if direct[path] != content} <= varied
    assert saved >= expected.direct * size, (saved, size)

    through_kernel, nothing = play(work, *program, "load", run=False)
    loaded, _ = play(work, *program, "load", run=True)
    assert through_kernel["digest"] == loaded["digest"] == digest
    assert nothing == 0
    assert files_of(work) == direct
    for key, value in (
        ("version", said["version"]),
        ("files_bytes", size),
        ("direct_bytes", saved),
        ("varied", sorted(varied)),
    ):
        record_property(key, value)
