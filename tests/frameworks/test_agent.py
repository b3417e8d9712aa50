"""Agents that are processes, and meet over torch: groups that break and form again, and a job whose
node is replaced. Threads and directories are in ``tests/job``; Orbax in an environment of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from cxlfs.errors import JobEngineError, UndecidedError
from cxlfs.job import Checkpointer, Committed, Restored
from cxlfs.job.engines import Engine
from cxlfs.job.engines.rendezvous import TorchMeeting
from tests.support.agents import OrbaxNodes, on_threads
from tests.support.cli import PROGRAM
from tests.support.job_ranks import Job, content
from tests.support.repository import ROOT

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow]
pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)
SECONDS = 30.0
PATIENCE_SECONDS = 100


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def joined(meetings: Sequence[TorchMeeting]) -> list[Engine]:
    found: dict[int, Engine] = {}

    def join(rank: int) -> None:
        found[rank] = meetings[rank].join(SECONDS)

    on_threads(len(meetings), join)
    return [found[rank] for rank in range(len(meetings))]


def test_a_group_is_over_when_an_agent_comes_anew() -> None:
    port = free_port()
    meetings = [TorchMeeting("127.0.0.1", port, rank, 3) for rank in range(3)]
    with pytest.raises(UndecidedError, match="not heard: rank 1, 2"):
        meetings[0].join(0.01)
    first = joined(meetings)
    assert [engine.world().rank for engine in first] == [0, 1, 2]
    assert len({engine.world().incarnation for engine in first}) == 1
    first[2].say("x", b"2")
    assert first[0].hear("x", [2], SECONDS) == {2: b"2"}
    meetings[1] = TorchMeeting("127.0.0.1", port, 1, 3)  # another process
    second = joined(meetings)
    with pytest.raises(UndecidedError, match="came anew"):
        first[0].hear("y", [2], SECONDS)
    assert second[1].hear("x", [2], 0.01) == {}  # of another group
    second[2].say("x", b"two")
    assert second[1].hear("x", [2], SECONDS) == {2: b"two"}


def test_who_holds_the_store_ends_and_comes_back() -> None:
    port = free_port()
    meetings = [TorchMeeting("127.0.0.1", port, rank, 2) for rank in range(2)]
    engines = joined(meetings)
    with pytest.raises(JobEngineError, match="cannot be listened on"):
        TorchMeeting("127.0.0.1", port, 0, 2)
    meetings.pop(0)
    engines.pop(0)
    with pytest.raises(UndecidedError, match="rank 0 was lost"):
        engines[0].hear("x", [0], SECONDS)
    with pytest.raises(UndecidedError, match=f"rank 0 at 127.0.0.1:{port}"):
        meetings[0].join(0.01)
    meetings.insert(0, TorchMeeting("127.0.0.1", port, 0, 2))
    engines = joined(meetings)
    engines[0].say("x", b"0")
    assert engines[1].hear("x", [0], SECONDS) == {0: b"0"}


def agents(
    roots: Sequence[Path], *arguments: object, program: Sequence[str | Path] = PROGRAM
) -> list[subprocess.Popen[str]]:
    """One on each node."""
    port = free_port()
    return [agent(roots, rank, port, *arguments, program=program) for rank in range(len(roots))]


def agent(
    roots: Sequence[Path],
    rank: int,
    port: int,
    *arguments: object,
    program: Sequence[str | Path] = PROGRAM,
    out: int | IO[str] = subprocess.PIPE,
    errors: int | IO[str] = subprocess.PIPE,
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(*program, "agent", roots[rank], "--json"),
            *("--nodes", str(len(roots)), "--node-rank", str(rank)),
            *("--rendezvous", f"127.0.0.1:{port}", "--domain", f"node{rank}"),
            *map(str, arguments),
        ],
        stdout=out,
        stderr=errors,
        text=True,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            # PyTorch's, of what other libraries have brought along
            "PYTHONWARNINGS": "ignore:The pynvml package:FutureWarning",
        },
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[list[dict[str, Any]]]:
    """What each of them has said, well."""
    found = []
    for process in processes:
        out, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, errors) == (0, ""), out
        found.append([json.loads(line) for line in out.splitlines()])
    return found


def saved(where: Path) -> Job:
    """By two ranks, with copies; the second store is lost."""
    job = Job(where, world=2)
    job.replicas = 2
    for row in job.start(lambda made: job.save(made, 10)):
        assert isinstance(row, list)
        assert isinstance(row[0], Committed)
    shutil.rmtree(job.store(1))
    return job


def test_a_replaced_node_is_served(tmp_path: Path) -> None:
    """Over gloo: what it had, and what it kept of the other, is there before the ranks begin."""
    job = saved(tmp_path)
    stores = [job.store(0), job.store(1)]
    told = ended(agents(stores, "--once", "--replicas", 2, "--deadline", 60))
    assert [row[-1]["state"] for row in told] == ["tended", "tended"]

    def come_back(made: Checkpointer) -> object:
        outcome = job.load(made)
        made.close()
        return outcome

    for outcome in job.start(come_back):
        assert isinstance(outcome, Restored)
        assert not outcome.is_fetched
    assert job.loaded == {rank: content(rank, 10) for rank in range(2)}


@pytest.mark.campaign
@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [4, 8, 16])
def test_a_job_of_many_nodes(tmp_path: Path, count: int) -> None:
    """Its processes save as Orbax does; two nodes are lost with agent and store, another agent is
    killed, and all are given what was kept.
    """
    nodes = OrbaxNodes(tmp_path, count)
    stores = [nodes.directory(rank) for rank in range(count)]
    arguments = ["--orbax", "--replicas", 2, "--coordinator", "127.0.0.1:1234"]
    running = Running(stores, tmp_path, arguments)
    try:
        nodes.ask()
        running.wait(lambda: not nodes.asks())
        assert [nodes.given(rank) for rank in range(count)] == [None] * count
        for step in (1, 2):
            nodes.save(step)
        running.wait(lambda: all("kept" in running.states(rank) for rank in range(count)))
        lost = (1, count - 2)  # of two groups of stores that have copies of each other's
        for rank in (*lost, 0):
            running.kill(rank)
        for rank in lost:
            nodes.wipe(rank)
        nodes.ask()
        for rank in (*lost, 0):
            running.begin(rank)
        running.wait(lambda: not nodes.asks())
        found = [nodes.given(rank) for rank in range(count)]
        assert found == [f"node {rank} step 2" for rank in range(count)]
    finally:
        running.end()


class Running:
    """Agents of an address of their own, what they say in a file each."""

    def __init__(self, roots: Sequence[Path], where: Path, arguments: Sequence[object]) -> None:
        self._roots, self._where, self._arguments = roots, where, arguments
        self._port = free_port()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        for rank in range(len(roots)):
            self.begin(rank)

    def begin(self, rank: int) -> None:
        names = (f"told-{rank}", f"log-{rank}")
        with (
            (self._where / names[0]).open("a") as out,
            (self._where / names[1]).open("a") as errors,
        ):
            self._processes[rank] = agent(
                self._roots, rank, self._port, *self._arguments, out=out, errors=errors
            )

    def kill(self, rank: int) -> None:
        self._processes[rank].kill()
        self._processes[rank].wait()

    def states(self, rank: int) -> list[str]:
        lines = (self._where / f"told-{rank}").read_text().splitlines(keepends=True)
        return [json.loads(line)["state"] for line in lines if line.endswith("\n")]

    def wait(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            told = [self.states(rank)[-3:] for rank in self._processes]
            assert time.monotonic() < until, told
            assert all(process.poll() is None for process in self._processes.values()), told
            time.sleep(0.1)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


STUCK = """
import sys, time
from pathlib import Path
from cxlfs.cli import main
from cxlfs.job import copying
reserve = copying._reserve
def stuck(manifest, root):
    reserve(manifest, root)
    (root / "stuck").touch()
    time.sleep(1000)
copying._reserve = stuck
sys.exit(main())
"""


def test_sigterm_in_mid_copy(tmp_path: Path) -> None:
    """One waits in gloo for the other: nothing holds them up, and nothing half done counts."""
    job = saved(tmp_path)
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    stores = [job.store(0), job.store(1)]
    processes = agents(stores, "--replicas", 2, program=[sys.executable, script])
    until = time.monotonic() + PATIENCE_SECONDS
    while not (job.store(1) / "stuck").exists():
        assert time.monotonic() < until
        assert [process.poll() for process in processes] == [None, None]
        time.sleep(0.05)
    for process in processes:
        process.terminate()
    assert [row[-1]["state"] for row in ended(processes)] == ["ended", "ended"]
    assert not list(job.store(1).glob("step-*/rank-?????"))
