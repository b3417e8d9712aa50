"""The life of an agent: groups that form, break and form again; what is told of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from cxlfs.errors import JobEngineError, UndecidedError, UsageError
from cxlfs.job.agent import Event, Pace, serve, serve_once
from cxlfs.job.engines import Engine
from tests.support.agents import Groups, on_threads
from tests.support.cli import PROGRAM, assert_two_lines, make_run

PACE = Pace(deadline_seconds=20.0, pause_seconds=0.001)


class Enough(Exception):  # noqa: N818 - it ends what never ends by itself
    pass


class Counting:
    """Counts its rounds; ``fails`` at one of them, and has ``enough`` of them at another."""

    def __init__(self, fails: int = -1, enough: int = 3) -> None:
        self.groups: list[str] = []
        self.done: list[bytes] = []
        self._fails = fails
        self._enough = enough

    def begin(self, engine: Engine) -> None:
        self.groups.append(engine.world().incarnation)

    def report(self) -> bytes:
        return b"%d" % len(self.done)

    def decide(self, told: list[bytes], *, is_last: bool) -> bytes:
        return b" ".join(told) + (b" last" if is_last else b"")

    def carry_out(self, data: bytes) -> None:
        self.done.append(data)
        if len(self.done) == self._fails:
            raise OSError(28, "No space left on device", "/mnt/ckpt")
        if len(self.done) == self._enough:
            raise Enough

    def end(self) -> None:
        self.done.append(b"end")


def lives(works: list[Counting], pace: Pace = PACE) -> list[list[Event]]:
    groups = Groups(len(works))
    told: list[list[Event]] = [[] for _ in works]

    def run(rank: int) -> None:
        with pytest.raises(Enough):
            serve(groups.meeting(rank), works[rank], told[rank].append, pace)

    on_threads(len(works), run)
    return told


def test_rank_0_decides_and_all_do_the_same() -> None:
    works = [Counting(), Counting(), Counting()]
    told = lives(works)
    assert [work.done for work in works] == [[b"0 0 0", b"1 1 1", b"2 2 2"]] * 3
    assert [[event.state for event in row] for row in told] == [["together"]] * 3


def test_who_fails_says_so_and_all_come_together_again() -> None:
    """The others do not hear it in the next round."""
    works = [Counting(enough=5), Counting(fails=2, enough=5)]
    told = lives(works, Pace(deadline_seconds=0.5, pause_seconds=0.001))
    assert works[0].groups == works[1].groups == ["0", "1"]
    assert [event.state for event in told[0]] == ["together", "waiting", "together"]
    assert told[0][1].text == "not heard: rank 1"
    assert told[1][1].text == "/mnt/ckpt: No space left on device"
    assert all(row[1].next_step for row in told)


def test_the_same_is_told_once() -> None:
    tries: list[float] = []

    class Nobody:
        def join(self, seconds: float) -> Engine:
            tries.append(seconds)
            if len(tries) == 4:
                raise JobEngineError("no torch")
            raise UndecidedError("not heard: rank 1")

    told: list[Event] = []
    with pytest.raises(JobEngineError):
        serve(Nobody(), Counting(), told.append, PACE)
    assert [event.text for event in told] == ["not heard: rank 1"]


def test_once_ends_when_all_have_done_it() -> None:
    works = [Counting(), Counting()]
    groups = Groups(2)
    on_threads(
        2, lambda rank: serve_once(groups.meeting(rank), works[rank], lambda _event: None, PACE)
    )
    assert [work.done for work in works] == [[b"0 0 last", b"end"]] * 2


def test_once_waits_no_longer_than_its_deadline() -> None:
    tries: list[float] = []

    class Nobody:
        def join(self, seconds: float) -> Engine:
            tries.append(seconds)
            raise UndecidedError("not heard: rank 1")

    with pytest.raises(UndecidedError, match="not heard: rank 1"):
        serve_once(Nobody(), Counting(), lambda _event: None, Pace(0.05, 0.01))
    assert 0 < len(tries) < 10
    assert set(tries) == {0.05}


# --- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--nodes", "2"), ("--rendezvous HOST:PORT",)),
        (("--nodes", "2", "--node-rank", "2"), ("no node 2 of 2",)),
        (("--nodes", "2", "--rendezvous", "here"), ("not an address",)),
        (("--orbax", "--coordinator", "here"), ("here is not an address",)),
        (("--once", "--tier", "nonsense"), ("nonsense: not the URL",)),
    ],
)
def test_usage(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    words: tuple[str, ...],
) -> None:
    said = make_run(capfd)("agent", tmp_path, *arguments)
    assert_two_lines(said, UsageError.exit_code, "cxlfs agent", *words)


def test_a_number_of_nodes_that_is_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NNODES", "4-8")
    said = make_run(capfd)("agent", tmp_path)
    assert_two_lines(said, UsageError.exit_code, "cxlfs agent", "4-8 is no number", "--nodes N")


def test_what_torchrun_and_slurm_say(monkeypatch: pytest.MonkeyPatch) -> None:
    from cxlfs.cli.agent import Place, place_of

    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "7")
    assert place_of(None, None, None) == Place(1, 0, "")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_NNODES", "4")
    monkeypatch.setenv("SLURM_NODEID", "3")
    assert place_of(None, None, "node0:1") == Place(4, 3, "node0:1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_ADDR", "node1")
    monkeypatch.setenv("MASTER_PORT", "2")
    assert place_of(None, None, None) == Place(9, 7, "node1:2")
    assert place_of(2, 1, "a:3") == Place(2, 1, "a:3")


def test_once_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    said = make_run(capfd)("agent", tmp_path, "--once", "--json")
    assert said.code == 0
    assert [document["state"] for document in said.documents] == ["together", "tended"]
    assert {document["path"] for document in said.documents} == {os.fspath(tmp_path)}
    assert signal.getsignal(signal.SIGTERM) is before


def test_sigterm_ends_a_service(tmp_path: Path) -> None:
    command = [*PROGRAM, "agent", tmp_path, "--orbax", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        patience = threading.Timer(60, process.kill)
        patience.start()
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "together"
        process.terminate()
        rest = process.stdout.read()
        assert process.wait() == 0
        patience.cancel()
        patience.join()
    assert json.loads(rest)["state"] == "ended"
