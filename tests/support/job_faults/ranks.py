"""The processes of one start of a job, forked from one that has imported all they need. Each writes
what it saw, line by line, to a file that outlives it. A fault comes at a moment of one rank.
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
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxlfs.errors import CxlfsError, JobFilesError, NotRestoredError
from cxlfs.job import Nothing, Reachable, Resharded, Restored
from tests.support.job_faults.engine import DirectoryEngine, Partition
from tests.support.job_faults.in_pieces import a_shard, cut_small, write
from tests.support.job_faults.moments import Fate, Moment, watched

YEAR_SECONDS = 365 * 86400
SAVED_DIRECTLY, COPIED_DIRECTLY = "shard saved directly", "shard copied directly"


@dataclasses.dataclass(frozen=True)
class Start:
    """``deed``: what happens at the moment: kill, stop, part (the network, in ``parts``), hold,
    which lets the parent do something meanwhile, or go, which lets it do that beside. ``seats[i]``:
    the directory of rank i. ``back``: by how many steps the job goes back before it saves.
    ``stores``: where those look who come in another number of ranks; ``tier``: its URL, or none.
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
    parts: tuple[int, ...] = ()
    stores: tuple[Path, ...] = ()
    tier: str | None = None

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


def _deed(start: Start, tell: _Teller) -> None:
    tell("fate", deed=start.deed)
    if start.deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif start.deed == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif start.deed == "part":
        Partition(start.directory).begin(start.parts)
    elif start.deed == "hold":
        while not (start.directory / "released").exists():
            time.sleep(0.001)


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
    is_mine = start.moment is not None and start.moment.rank == rank
    cut_small(lambda: tell(COPIED_DIRECTLY))
    fate = Fate(start.moment if is_mine else None, lambda: _deed(start, tell))
    engine, kind = watched(DirectoryEngine(start.directory, rank, start.world), fate)
    numbers = random.Random(f"{start.seed} {rank}")

    def save(directory: Path) -> None:
        data = a_shard(numbers)
        tell("saving", attempt=directory.parent.name, sha256=hashlib.sha256(data).hexdigest())
        if write(directory / "shard.bin", data, numbers):
            tell(SAVED_DIRECTLY)

    def load(directory: Path, part: int = rank) -> None:
        data = (directory / "shard.bin").read_bytes()
        sha256 = hashlib.sha256(data).hexdigest()
        tell("loaded", attempt=directory.parent.name, part=part, sha256=sha256)

    def load_all(found: Reachable) -> None:
        for part in range(found.world):
            load(found.verified(part), part)

    with kind(
        start.seats[rank],
        engine=engine,
        replicas=start.replicas,
        keep=start.keep,
        deadline_seconds=start.deadline_seconds,
        allow_volatile=True,
        domain=start.seats[rank].name,
        tier=start.tier,
    ) as made:
        found: Restored | Resharded | Nothing
        try:
            found = made.restore_from_checkpoint(load)
        except NotRestoredError:
            if not start.stores:
                raise
            found = made.restore_resharded(load_all, check=_require_all, stores=start.stores)
        tell("restored", **_plain(found))
        step = 100 if isinstance(found, Nothing) else found.step
        for _ in range(start.saves):
            step += 1 - start.back
            tell("outcome", **_plain(made.distributed_checkpoint(max(step, 0), save)))


def _require_all(found: Reachable) -> None:
    if found.missing:
        raise JobFilesError(f"no shards of {found.missing}")


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
