"""The processes of one start of a job, forked from one that has imported all they need. Each writes
what it saw, line by line, to a file that outlives it.

A fault comes at a moment of one rank: before or behind an action of the protocol, inside of it (at
one of the calls into the file system that it makes), before or behind a message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxlfs.errors import CxlfsError
from cxlfs.job import Checkpointer
from cxlfs.job.protocol import Restored
from tests.support.job_faults.engine import DirectoryEngine

SAVING = ("Save", "Replicate", "WriteManifest", "RecordCommit", "Collect")
RESTORING = ("TakeStock", "Load", "RecordCommit")
MESSAGES = ("prepare", "saved", "vote", "recorded", "stock", "loaded", "tally")
_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.link"}
YEAR_SECONDS = 365 * 86400
_CALLS_IN_AN_ACTION = 12


@dataclasses.dataclass(frozen=True)
class Moment:
    """``what``: an action, or a message; ``when``: before, inside or behind; ``count``: the how
    manieth of them, and inside which call into the file system.
    """

    rank: int
    what: str
    when: str
    count: int = 1
    call: int = 1


def a_moment(numbers: random.Random, world: int, replicas: int, saves: int) -> Moment:
    what = numbers.choice([*SAVING * 2, *RESTORING, *MESSAGES])
    while replicas == 1 and what in {"Replicate", "saved"}:
        what = numbers.choice([*SAVING, *RESTORING, *MESSAGES])
    whens = ["before", "behind"] if what in MESSAGES else ["before", "inside", "inside", "behind"]
    rank = 0 if what in {"prepare", "tally"} else numbers.randrange(world)
    call = numbers.randint(1, _CALLS_IN_AN_ACTION)
    return Moment(rank, what, numbers.choice(whens), numbers.randint(1, saves), call)


@dataclasses.dataclass(frozen=True)
class Start:
    """``deed``: what happens at the moment: kill, stop, cut, or hold, which lets the parent do
    something meanwhile. ``seats[i]``: the directory of rank i. ``back``: by how many steps the job
    goes back before it saves.
    """

    directory: Path
    seats: tuple[Path, ...]
    seed: str
    replicas: int
    saves: int
    keep: int
    deadline_seconds: float
    moment: Moment | None = None
    deed: str = ""
    back: int = 0
    clock_back: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return len(self.seats)

    def told(self, rank: int) -> list[dict[str, Any]]:
        """What that rank saw; of a line that it did not finish nothing."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.directory / f"told-{rank}").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if "\n" in line]
        return []


class _Teller:
    def __init__(self, start: Start, rank: int) -> None:
        self._file = os.open(
            start.directory / f"told-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )

    def __call__(self, kind: str, **what: object) -> None:
        os.write(self._file, json.dumps({"kind": kind, **what}).encode() + b"\n")


class _Fate:
    """Does the deed at the moment, once."""

    def __init__(self, start: Start, rank: int, tell: _Teller) -> None:
        self._start = start
        self._tell = tell
        self._moment = start.moment if start.moment and start.moment.rank == rank else None
        self._seen = 0
        self._calls_left = 0
        self.is_cut = False
        if self._moment is not None and self._moment.when == "inside":
            sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def around(self, what: str) -> Any:
        moment = self._moment
        mine = moment is not None and moment.what == what
        self._seen += mine
        mine = mine and moment is not None and self._seen == moment.count
        if mine and moment is not None:
            self._come("before")
            self._calls_left = moment.call if moment.when == "inside" else 0
        yield
        self._calls_left = 0
        if mine:
            self._come("behind")

    def _audit(self, event: str, _arguments: object) -> None:
        if self._calls_left and event in _EVENTS:
            self._calls_left -= 1
            if not self._calls_left:
                self._come("inside")

    def _come(self, when: str) -> None:
        moment = self._moment
        if moment is None or moment.when != when:
            return
        self._moment = None
        deed = self._start.deed
        self._tell("fate", deed=deed)
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif deed == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif deed == "cut":
            self.is_cut = True
        elif deed == "hold":
            while not (self._start.directory / "released").exists():
                time.sleep(0.001)


class _Engine(DirectoryEngine):
    def __init__(self, start: Start, rank: int, fate: _Fate) -> None:
        super().__init__(start.directory, rank, start.world, lambda _key: fate.is_cut)
        self._fate = fate

    def say(self, key: str, body: bytes, *, to_all: bool = True) -> None:
        """The phase is the second word of a key; its last may be ``tally``."""
        words = key.split("/")
        with self._fate.around("tally" if words[-1] == "tally" else words[1]):
            super().say(key, body, to_all=to_all)


class _Checkpointer(Checkpointer):
    fate: _Fate

    def _save(self, action: Any, save: Any) -> Any:
        with self.fate.around(type(action).__name__):
            return super()._save(action, save)

    def _restore(self, machine: Any, action: Any, load: Any) -> Any:
        with self.fate.around(type(action).__name__):
            return super()._restore(machine, action, load)


def launch(start: Start) -> list[int]:
    """The processes of all ranks."""
    start.directory.mkdir(parents=True)
    pids = []
    for rank in range(start.world):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = _live(start, rank)
            finally:
                os._exit(status)
        pids.append(pid)
    return pids


def _live(start: Start, rank: int) -> int:
    tell = _Teller(start, rank)
    (start.directory / f"pid-{rank}").write_text(str(os.getpid()))
    logging.disable(logging.CRITICAL)
    if rank in start.clock_back:
        now, now_ns = time.time, time.time_ns
        time.time = lambda: now() - YEAR_SECONDS
        time.time_ns = lambda: now_ns() - YEAR_SECONDS * 10**9
    try:
        _work(start, rank, tell)
    except (CxlfsError, OSError) as error:
        tell("raised", error=type(error).__name__, text=str(error)[:300])
    except BaseException as error:  # noqa: BLE001 - the judge hears of it
        tell("failed", error=type(error).__name__, text=str(error)[:300])
        return 1
    return 0


def _work(start: Start, rank: int, tell: _Teller) -> None:
    fate = _Fate(start, rank, tell)
    engine = _Engine(start, rank, fate)
    _Checkpointer.fate = fate
    numbers = random.Random(f"{start.seed} {rank}")

    def save(directory: Path) -> None:
        data = numbers.randbytes(numbers.randint(1, 40_000))
        tell("saving", attempt=directory.parent.name, sha256=hashlib.sha256(data).hexdigest())
        (directory / "shard.bin").write_bytes(data)

    def load(directory: Path) -> None:
        data = (directory / "shard.bin").read_bytes()
        tell("loaded", attempt=directory.parent.name, sha256=hashlib.sha256(data).hexdigest())

    with _Checkpointer(
        start.seats[rank],
        engine=engine,
        replicas=start.replicas,
        keep=start.keep,
        deadline_seconds=start.deadline_seconds,
        allow_volatile=True,
        domain=start.seats[rank].name,
    ) as made:
        found = made.restore_from_checkpoint(load)
        tell("restored", **_plain(found))
        step = found.step if isinstance(found, Restored) else 100
        for _ in range(start.saves):
            step += 1 - start.back
            tell("outcome", **_plain(made.distributed_checkpoint(max(step, 0), save)))


def _plain(outcome: Any) -> dict[str, object]:
    plain = {"outcome": type(outcome).__name__, **dataclasses.asdict(outcome)}
    if "attempt" in plain:
        attempt = outcome.attempt
        plain["attempt"] = [attempt.number, attempt.step, attempt.id]
    return plain


def wait_for(pids: list[int], seconds: float, each_turn: Callable[[], None]) -> list[int] | None:
    """The statuses of all; None: they do not end."""
    end = time.monotonic() + seconds
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        each_turn()
        for pid in pids:
            if pid not in statuses:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    statuses[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for pid in set(pids) - set(statuses):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        time.sleep(0.002)
    return [statuses[pid] for pid in pids]
