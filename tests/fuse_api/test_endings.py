"""How processes end: by an exit code, by a signal, asked for by their parent or not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cxlfs.fuse import endings as endings_module
from cxlfs.fuse.endings import Endings
from cxlfs.fuse.processes import Process, ProcessTable
from cxlfs.store.unit_rules import Ending

WAIT = "import sys; sys.stdin.readline(); sys.exit(int(sys.argv[1]))"
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def run(code: int = 0) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", WAIT, str(code)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def endings() -> Iterator[Endings]:
    made = Endings(ProcessTable())
    yield made
    made.close()


def watch(endings: Endings, process: subprocess.Popen[bytes]) -> Process:
    known = None
    while known is None and process.poll() is None:  # as long as it is in execve
        known = ProcessTable().identify(process.pid)
    assert known is not None
    endings.watch(known)
    assert endings.of(known) is Ending.ALIVE
    return known


def until_it_ends(process: subprocess.Popen[bytes]) -> None:
    """Its parent has not asked how: it is a zombie."""
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)


@pytest.mark.parametrize(("code", "ending"), [(0, Ending.WELL), (3, Ending.BADLY)])
def test_an_exit_code(endings: Endings, start: Start, code: int, ending: Ending) -> None:
    process = start(code)
    known = watch(endings, process)
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    until_it_ends(process)
    assert endings.of(known) is ending
    process.wait()
    assert endings.of(known) is ending


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal(endings: Endings, start: Start, number: int) -> None:
    process = start()
    known = watch(endings, process)
    process.send_signal(number)
    until_it_ends(process)
    assert endings.of(known) is Ending.KILLED


def test_nobody_asked_before_its_parent_did(endings: Endings, start: Start) -> None:
    """From then on only the kernel can say, since Linux 6.15."""
    process = start()
    known = watch(endings, process)
    process.kill()
    process.wait()
    assert endings.of(known) in {Ending.KILLED, Ending.UNKNOWN}
    release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
    if release >= (6, 15):
        assert endings.of(known) is Ending.KILLED


def test_a_kernel_that_cannot_say(
    endings: Endings, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings_module, "_PIDFD_GET_INFO", 0)
    process = start()
    known = watch(endings, process)
    process.kill()
    process.wait()
    assert endings.of(known) is Ending.UNKNOWN


def test_a_process_that_is_gone(endings: Endings) -> None:
    gone = Process(2**22 - 1, 1)
    endings.watch(gone)
    assert endings.of(gone) is Ending.UNKNOWN
    reused = Process(os.getpid(), 1)  # the number of a process that began later
    endings.watch(reused)
    assert endings.of(reused) is Ending.UNKNOWN


def test_descriptors_are_given_back(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings_module, "_WATCHED_MAX", 2)
    before = len(list(Path("/proc/self/fd").iterdir()))
    endings = Endings(ProcessTable())
    processes = [start() for _ in range(3)]
    pipes = len(processes)
    known = [watch(endings, process) for process in processes]
    assert endings.are_many
    assert len(list(Path("/proc/self/fd").iterdir())) == before + pipes + 3
    endings.keep_only(known[:1])
    assert not endings.are_many
    assert len(list(Path("/proc/self/fd").iterdir())) == before + pipes + 1
    assert endings.of(known[0]) is Ending.ALIVE
    processes[0].kill()
    until_it_ends(processes[0])
    assert endings.of(known[0]) is Ending.KILLED
    assert len(list(Path("/proc/self/fd").iterdir())) == before + pipes
    endings.close()
