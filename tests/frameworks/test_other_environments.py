"""TensorFlow and Orbax: too large for this environment, so each runs in one of its own.

``CXLFS_TENSORFLOW_PYTHON`` and ``CXLFS_ORBAX_PYTHON`` name the interpreters that have them; without
them the one that runs the tests is tried. tests/README.md has the commands that make them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.mount import Workplace

HERE = Path(__file__).parent
PATIENCE_SECONDS = 280


def interpreter(variable: str, module: str) -> str:
    python = os.environ.get(variable, sys.executable)
    found = subprocess.run(
        [python, "-c", f"import importlib.util as u, sys; sys.exit(not u.find_spec('{module}'))"],
        check=False,
    )
    if found.returncode != 0:
        pytest.skip(f"{python} has no {module}: name one that has in {variable}")
    return python


def run(python: str, program: str, *arguments: object) -> dict[str, Any]:
    done = subprocess.run(
        [python, HERE / program, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1"},
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.tensorflow
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tensorflow_checkpoint_manager(place: Workplace) -> None:
    """Ten saves, three kept, in two runs of which the second resumes."""
    python = interpreter("CXLFS_TENSORFLOW_PYTHON", "tensorflow")
    directory = place.mountpoint / "run"
    first = run(python, "train_tensorflow.py", directory, 4)
    assert first["step"] == 4
    place.remount()
    trained = run(python, "train_tensorflow.py", directory, 10)
    assert trained["step"] == 10
    assert trained["kept"] == ["ckpt-8", "ckpt-9", "ckpt-10"]
    kept = [f"ckpt-{n}{end}" for n in (8, 9, 10) for end in (".data-00000-of-00001", ".index")]
    assert trained["files"] == sorted([*kept, "checkpoint", "final.keras", "final.weights.h5"])
    assert trained["keras"] == trained["model"]
    assert run(python, "train_tensorflow.py", directory, "--show") == trained
    place.remount()
    assert run(python, "train_tensorflow.py", directory, "--show") == trained


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_orbax_checkpoint_manager(place: Workplace) -> None:
    """Every step is committed by the rename of its directory."""
    python = interpreter("CXLFS_ORBAX_PYTHON", "orbax")
    directory = place.mountpoint / "run"
    saved = run(python, "train_orbax.py", directory, 5)
    assert saved["kept"] == [4, 5]
    assert saved["names"] == ["4", "5"]
    assert saved["restored"] == saved["expected"]
    place.remount()
    assert run(python, "train_orbax.py", directory, "--show") == saved
