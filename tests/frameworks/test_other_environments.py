"""TensorFlow and Orbax: too large for this environment, so each runs in one of its own.

``CXLFS_TENSORFLOW_PYTHON`` and ``CXLFS_ORBAX_PYTHON`` name the interpreters that have them; without
them the one that runs the tests is tried. tests/README.md has the commands that make them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.support.cli import PROGRAM
from tests.support.mount import MIB, Workplace, workplace

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


class Agents:
    """``cxlfs agent --orbax`` on two nodes, whose directories these are."""

    def __init__(self, directories: Sequence[Path], where: Path) -> None:
        self._directories = directories
        self._logs = [where / f"agent{rank}.jsonl" for rank in range(len(directories))]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        rendezvous, coordinator = free_port(), free_port()
        for rank, directory in enumerate(self._directories):
            directory.mkdir(exist_ok=True)
            (directory / "jax-init-info.txt").unlink(missing_ok=True)
            options = {
                "--nodes": len(self._directories),
                "--node-rank": rank,
                "--rendezvous": f"127.0.0.1:{rendezvous}",
                "--coordinator": f"127.0.0.1:{coordinator}",
                "--replicas": 2,
                "--domain": f"node{rank}",
                "--keep": 9,
                "--deadline": 60,
            }
            words = [str(word) for pair in options.items() for word in pair]
            command = [*PROGRAM, "agent", directory, "--orbax", "--allow-volatile", "--json"]
            with self._logs[rank].open("ab") as log:
                process = subprocess.Popen([*command, *words], stdout=log, stderr=log)
            self._processes.append(process)
        return self

    def __exit__(self, *_error: object) -> None:
        for process in self._processes:
            process.terminate()
        codes = [process.wait(PATIENCE_SECONDS) for process in self._processes]
        self._processes.clear()
        assert codes == [0, 0], self.log()

    def log(self) -> str:
        return "\n".join(log.read_text() for log in self._logs)

    def steps(self, state: str) -> list[int | None]:
        """Of the events of that state, alike on both nodes."""
        found = []
        for log in self._logs:
            lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
            events = [json.loads(line) for line in lines]
            found.append([event["step"] for event in events if event["state"] == state])
        assert found[0] == found[1], self.log()
        return found[0]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def run_two_processes(
    python: str, directories: Sequence[Path], steps: int, kill_at: int = -1
) -> list[subprocess.CompletedProcess[str]]:
    """As on two nodes; JAX knows of a scheduler how many there are. Who is left is ended."""
    processes = []
    for rank, directory in enumerate(directories):
        scheduler = {
            "SLURM_JOB_ID": "1",
            "SLURM_NTASKS": "2",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_STEP_NODELIST": "localhost",
        }
        program = HERE / "train_orbax_multi_tier.py"
        processes.append(
            subprocess.Popen(
                [python, program, directory, str(steps), str(kill_at)],
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
    return done


def reports(done: Sequence[subprocess.CompletedProcess[str]]) -> list[dict[str, Any]]:
    assert [each.returncode for each in done] == [0] * len(done), [each.stderr for each in done]
    return [json.loads(each.stdout.splitlines()[-1]) for each in done]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_orbax_multi_tier(place: Workplace, tmp_path: Path) -> None:
    """Two nodes with a store each, and an agent on each. One is killed in mid-save; then one loses
    its store, and gets its steps back from the other.
    """
    pytest.importorskip("torch")
    python = interpreter("CXLFS_ORBAX_PYTHON", "orbax")
    with workplace(size_bytes=256 * MIB) as other:
        other.mount()
        nodes = [each.mountpoint / "run" for each in (place, other)]
        with Agents(nodes, tmp_path) as agents:
            done = run_two_processes(python, nodes, 3)
            assert reports(done) == [{"first": 0, "steps": ["0", "1", "2"]}] * 2
            done = run_two_processes(python, nodes, 9, kill_at=6)
            assert done[1].returncode == -9
            done = run_two_processes(python, nodes, 9)
            assert agents.steps("answered")[:2] == [None, 2], agents.log()
            chosen = agents.steps("answered")[2]
            assert chosen in {5, 6}
            steps = [str(step) for step in range(9)]
            assert reports(done) == [{"first": chosen + 1, "steps": steps}] * 2
        shutil.rmtree(nodes[1])
        with Agents(nodes, tmp_path) as agents:
            kept = max(step for step in agents.steps("kept") if step is not None)
            done = run_two_processes(python, nodes, 12)
            assert agents.steps("answered")[-1] == kept
            assert [report["first"] for report in reports(done)] == [kept + 1] * 2
        for node in nodes:
            (node / ".cxlfs-agent" / "job.json").write_text("{")
        with Agents(nodes, tmp_path):
            done = run_two_processes(python, nodes, 12)
        assert all("Replicator fatal errors: rank 0: " in each.stderr for each in done)
