"""TensorFlow and Orbax: too large for this environment, so each runs in one of its own.

``CXLFS_TENSORFLOW_PYTHON`` and ``CXLFS_ORBAX_PYTHON`` name the interpreters that have them; without
them the one that runs the tests is tried. tests/README.md has the commands that make them.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.mount import MIB, Workplace, workplace
from tests.support.replicator import Replicators

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


def run_two_processes(
    python: str, directories: Sequence[Path], steps: int, kill_at: int = -1, failure: str = ""
) -> tuple[list[subprocess.CompletedProcess[str]], Replicators]:
    """As on two nodes; JAX knows of a scheduler how many there are. Who is left is ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    with Replicators(directories, port, failure) as replicators:
        for rank, directory in enumerate(directories):
            scheduler = {
                "SLURM_JOB_ID": "1",
                "SLURM_NTASKS": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": "0",
                "SLURM_STEP_NODELIST": "localhost",
            }
            processes.append(
                subprocess.Popen(
                    [
                        python,
                        HERE / "train_orbax_multi_tier.py",
                        directory,
                        str(steps),
                        str(kill_at),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **scheduler, "JAX_PLATFORMS": "cpu"},
                )
            )
        if kill_at >= 0:
            processes[1].wait(PATIENCE_SECONDS)
            processes[0].kill()
        done = []
        for process in processes:
            out, err = process.communicate(timeout=PATIENCE_SECONDS)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    assert replicators.problems == []
    return done, replicators


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_orbax_multi_tier(place: Workplace) -> None:
    """Two nodes with a store each, and a stand-in for the service beside them; one is killed."""
    python = interpreter("CXLFS_ORBAX_PYTHON", "orbax")
    with workplace(size_bytes=256 * MIB) as other:
        other.mount()
        nodes = [each.mountpoint / "run" for each in (place, other)]
        done, said = run_two_processes(python, nodes, 3)
        reports = [json.loads(each.stdout.splitlines()[-1]) for each in done]
        assert reports == [{"first": 0, "steps": ["0", "1", "2"]}] * 2
        assert said.chosen is None
        done, said = run_two_processes(python, nodes, 9, kill_at=6)
        assert said.chosen == 2
        assert done[1].returncode == -9
        done, said = run_two_processes(python, nodes, 9)
        assert said.chosen in {5, 6}
        reports = [json.loads(each.stdout.splitlines()[-1]) for each in done]
        steps = [str(step) for step in range(9)]
        assert reports == [{"first": said.chosen + 1, "steps": steps}] * 2
        done, _ = run_two_processes(python, nodes, 9, failure="a module is gone")
        assert all("Replicator fatal errors: a module is gone" in each.stderr for each in done)
