"""The process that looks at bytes: it answers, and nothing that it does holds the daemon up."""

from __future__ import annotations

import io
import os
import pickle
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import trio

from cxlfs.checkpoint.judge import Evidence, Verdict
from cxlfs.daemon import judge as judging
from cxlfs.daemon.judge import Judge, Read
from cxlfs.errors import CorruptionError

T = TypeVar("T")
CHILD = """
import os, socket, struct, sys, time
channel = socket.socket(fileno=0)
def send(message):
    channel.sendall(struct.pack("<L", len(message)) + message)
how = sys.argv[1]
if how == "silent":
    time.sleep(1000)
send(b"S")
channel.recv(1 << 16)
if how == "dies":
    os._exit(1)
if how == "hangs":
    time.sleep(1000)
if how == "nonsense":
    send(b"Vnot json")
if how == "unknown word":
    send(b'V["certainly", ""]')
if how == "no list":
    send(b"V7")
if how == "much":
    channel.sendall(struct.pack("<L", 1 << 31))
    time.sleep(1000)
while how == "greedy":
    send(struct.pack("<cBQL", b"R", 0, 0, 1 << 20))
    left = struct.unpack("<L", channel.recv(4))[0]
    while left:
        left -= len(channel.recv(left))
if how == "elsewhere":
    send(struct.pack("<cBQL", b"R", 2, 0, 1))
if how == "too large a piece":
    send(struct.pack("<cBQL", b"R", 0, 0, 1 << 31))
time.sleep(1000)
"""


def npz(count: int = 3) -> bytes:
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, **{f"array{n}": np.arange(100.0) for n in range(count)})
    return file.getvalue()


def reading(new: bytes, old: bytes) -> Read:
    return lambda which, at, length: (new if which == "new" else old)[at : at + length]


def running(judge: Judge, work: Callable[[Judge], Awaitable[T]]) -> T:
    async def main() -> T:
        try:
            return await work(judge)
        finally:
            await judge.aclose()

    return trio.run(main)


def ask(judge: Judge, name: bytes, new: bytes, old: bytes) -> Verdict:
    return running(judge, lambda j: j.judge(name, len(new), len(old), reading(new, old)))


def test_it_answers() -> None:
    async def work(judge: Judge) -> list[Evidence]:
        found = []
        for new in (npz(), npz(2), npz()[:500], b""):
            verdict = await judge.judge(b"a.npz", len(new), len(npz()), reading(new, npz()))
            found.append(verdict.evidence)
        return found

    found = running(Judge(), work)
    assert found == [Evidence.NONE, Evidence.BEGINNING, Evidence.STRONG, Evidence.STRONG]


def test_damaged_bytes_are_not_judged() -> None:
    def read(which: str, offset: int, length: int) -> bytes:
        raise CorruptionError(f"{which} at {offset}, {length} bytes", structure="file data")

    verdict = running(Judge(), lambda j: j.judge(b"a.npz", 1000, 1000, read))
    assert verdict.evidence is Evidence.UNKNOWN


@pytest.mark.parametrize(
    "how",
    [
        "silent", "dies", "hangs", "nonsense", "unknown word", "no list", "much", "greedy",
        "elsewhere", "too large a piece",
    ],
)  # fmt: skip
def test_a_child_that_fails_takes_nothing_back(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(judging, "QUESTION_SECONDS", 0.3 if how in {"hangs", "much"} else 10)
    monkeypatch.setattr(judging, "_START_SECONDS", 0.3 if how == "silent" else 10)
    judge = Judge((sys.executable, "-I", "-c", CHILD, how))
    assert ask(judge, b"a.npz", npz(), npz()).evidence is Evidence.UNKNOWN
    assert [r.levelname for r in caplog.records if "judged" in r.message] == ["WARNING"]


def test_a_child_that_cannot_be_started() -> None:
    judge = Judge(("/no/such/program",))
    assert ask(judge, b"a.npz", npz(), npz()).evidence is Evidence.UNKNOWN


def test_after_a_failure_there_is_a_new_one() -> None:
    async def work(judge: Judge) -> list[Evidence]:
        found = []
        for _ in range(2):
            verdict = await judge.judge(b"a.npz", 10, len(npz()), reading(npz()[:10], npz()))
            found.append(verdict.evidence)
            process = judge._process
            assert process is not None
            process.kill()
            await process.wait()
            verdict = await judge.judge(b"a.npz", 10, len(npz()), reading(npz()[:10], npz()))
            found.append(verdict.evidence)
        return found

    unknown = Evidence.UNKNOWN
    assert running(Judge(), work) == [Evidence.STRONG, unknown, Evidence.STRONG, unknown]


def test_hostile_bytes_have_limits() -> None:
    """A pickle that builds what takes all memory, and one that takes all time."""
    bomb = b"\x80\x04]" + b"\x94(" + b"h\x00" * 30_000_000 + b"e."
    for hostile in (bomb, b"\x80\x04" + b"(" * 40_000_000 + b"."):
        began = time.monotonic()
        verdict = ask(Judge(), b"a.pkl", hostile, pickle.dumps({"a": 1}))
        assert verdict.evidence in set(Evidence)
        assert time.monotonic() - began < 60


def test_it_goes_when_nobody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(judge: Judge) -> tuple[bool, bool]:
        await judge.judge(b"a.npz", 0, len(npz()), reading(b"", npz()))
        await judge.rest()
        stays = judge._process is not None
        monkeypatch.setattr(judging, "IDLE_SECONDS", -1.0)
        await judge.rest()
        return stays, judge._process is None

    assert running(Judge(), work) == (True, True)


def _state_of(pid: int) -> tuple[str, list[str]]:
    """What /proc says of it, and its descriptors, which root alone may list."""
    process = Path(f"/proc/{pid}")
    files = [each.name for each in (process / "fd").iterdir()] if os.geteuid() == 0 else None
    return (process / "status").read_text(), files or ["0", "1", "2"]


def test_it_has_no_rights_and_no_files() -> None:
    async def work(judge: Judge) -> tuple[str, list[str]]:
        await judge.judge(b"a.npz", 0, len(npz()), reading(b"", npz()))
        assert judge._process is not None
        return _state_of(judge._process.pid)

    status, files = running(Judge(), work)
    assert sorted(files) == ["0", "1", "2"]
    if os.geteuid() == 0:
        fields = dict(line.split(":", 1) for line in status.splitlines())
        assert fields["Uid"].split() == ["65534"] * 4
        assert int(fields["CapEff"], 16) == 0
        assert not fields["Groups"].split()
