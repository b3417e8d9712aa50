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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cxlfs.errors import JobEngineError, UndecidedError
from cxlfs.job import Checkpointer, Committed, Restored
from cxlfs.job.engines import Engine
from cxlfs.job.engines.rendezvous import TorchMeeting
from tests.support.agents import on_threads
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
    return [
        subprocess.Popen(
            [
                *(*program, "agent", root, "--json"),
                *("--nodes", str(len(roots)), "--node-rank", str(rank)),
                *("--rendezvous", f"127.0.0.1:{port}", "--domain", f"node{rank}"),
                *map(str, arguments),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
                # PyTorch's, of what other libraries have brought along
                "PYTHONWARNINGS": "ignore:The pynvml package:FutureWarning",
            },
        )
        for rank, root in enumerate(roots)
    ]


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
