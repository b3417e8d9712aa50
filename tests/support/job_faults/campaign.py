"""Faults of real jobs, one after the other, in one life of a job as long as it can go on: each is a
start in which something goes wrong, and one in which nothing does. ``judge`` says what must hold.

| kind | what goes wrong |
|---|---|
| kill | a rank is killed: before, inside or behind an action, before or behind a message |
| power | at such a moment all ranks are killed, and all daemons |
| daemon | at such a moment a node's daemon is killed |
| slow | at such a moment a rank is stopped for longer than the others wait |
| cut | from such a moment on a rank neither reaches others nor hears of them |
| wipe | between two starts a node's store is empty |
| corrupt | a byte of a shard, a copy, a manifest or a commit is another one |
| full | a node's store has no room |
| permute | ranks come back on other nodes, and one of them is killed |
| world | the job is begun with one rank more, or less |
| redo | a step is saved again, or the job goes back, and a rank is killed |
| clock | clocks of some ranks go back by a year, and a rank is killed |

All is determined by the seed but what processes do between two moments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from cxlfs.control import discovery, mountinfo
from tests.support.job_faults.judge import BrokenError, Judge
from tests.support.job_faults.ranks import Start, a_moment, launch, wait_for
from tests.support.mount import MIB, Workplace, fast_directory, workplace

NODES = 3
STORE_BYTES = 64 * MIB
DEADLINE_SECONDS = 20.0
SHORT_SECONDS = 0.3
"""The deadline where ranks are stopped, or cut off."""
HANG_SECONDS = 60.0
DEEDS = {
    "kill": "kill",
    "permute": "kill",
    "redo": "kill",
    "clock": "kill",
    "slow": "stop",
    "cut": "cut",
    "daemon": "hold",
    "power": "hold",
}
NEED_STORES = ("daemon", "full")
KINDS = (
    "kill",
    "power",
    "daemon",
    "slow",
    "cut",
    "wipe",
    "corrupt",
    "full",
    "permute",
    "world",
    "redo",
    "clock",
)


@dataclasses.dataclass(slots=True)
class Outcome:
    """``moments``: which fate met a rank where; ``told``: how calls ended in starts with a fault;
    ``lives``: of the job, which begins anew where more was lost than copies can mend.
    """

    kind: str
    replicas: int
    faults: int = 0
    lives: int = 1
    met: int = 0
    told: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)


class Nodes:
    """A directory each: of a mounted store, or not."""

    def __init__(self, root: Path, places: list[Workplace]) -> None:
        self.root = root
        self.places = places
        self.roots = [
            (place.mountpoint if place else root) / f"node{number}"
            for number, place in enumerate(places or [None] * NODES)  # type: ignore[list-item]
        ]
        self.mount_again()

    def mount_again(self) -> None:
        for place in self.places:
            if not place.is_mounted or mountinfo.is_dead(str(place.mountpoint)):
                with _runtime_of(place):
                    place.mount()
                place.ends_clean = True
        for root in self.roots:
            root.mkdir(exist_ok=True)

    def kill_daemon(self, node: int) -> None:
        place = self.places[node]
        with _runtime_of(place):
            place.kill_daemon()

    def empty(self, node: int) -> None:
        shutil.rmtree(self.roots[node])
        self.roots[node].mkdir()


@contextlib.contextmanager
def _runtime_of(place: Workplace) -> Iterator[None]:
    """Where its daemon is found: each workplace looks for its own in a directory of its own."""
    with mock.patch.dict(os.environ, {discovery.ENVIRONMENT_OVERRIDE: str(place.runtime)}):
        yield


class Campaign:
    """``say`` gets a line now and then."""

    def __init__(self, nodes: Nodes, outcome: Outcome, seed: int) -> None:
        self.nodes = nodes
        self.outcome = outcome
        self.numbers = random.Random(f"{outcome.kind} {outcome.replicas} {seed}")
        self.starts = 0
        self.judge = Judge(outcome.replicas)

    def run(self, faults: int) -> None:
        """Raises BrokenError."""
        self._begin_life()
        while self.outcome.faults < faults:
            start = self._faulty()
            self._carry_out(start)
            self.outcome.faults += 1
            for row in self._judged(start):
                for line in row:
                    self.outcome.met += line["kind"] == "fate"
                    told = str(line.get("outcome", line.get("error", "")))
                    if told:
                        self.outcome.told[told] = self.outcome.told.get(told, 0) + 1
            self._mend()
            if not self._quiet(1):
                self.outcome.lives += 1
                self._begin_life()

    def _begin_life(self) -> None:
        self.judge = Judge(self.outcome.replicas)
        for node in range(NODES):
            self.nodes.empty(node)
        if not self._quiet(2):
            raise BrokenError("a first start does not begin")

    # --- starts -----------------------------------------------------------------------------

    def _start(self, saves: int, seats: tuple[Path, ...] | None = None) -> Start:
        self.starts += 1
        return Start(
            self.nodes.root / f"start{self.starts}",
            seats or tuple(self.nodes.roots),
            f"{self.numbers.random()}",
            self.outcome.replicas,
            saves,
            2,
            DEADLINE_SECONDS,
        )

    def _quiet(self, saves: int) -> bool:
        start = self._start(saves)
        self._run(start, lambda: None)
        try:
            return self.judge.judge_quiet(start)
        finally:
            shutil.rmtree(start.directory)

    def _run(self, start: Start, each_turn: Callable[[], None]) -> list[int]:
        statuses = wait_for(launch(start), HANG_SECONDS, each_turn)
        if statuses is None:
            raise BrokenError("ranks hang, though every wait has a deadline")
        return statuses

    def _judged(self, start: Start) -> list[list[dict[str, object]]]:
        errors = {
            "daemon": {"OSError", "FileNotFoundError", "ConnectionAbortedError"},
            "power": {"OSError"},
            "full": {"OSError"},
        }.get(self.outcome.kind, set())
        try:
            return self.judge.judge(start, errors=errors)
        finally:
            shutil.rmtree(start.directory)

    def _faulty(self) -> Start:
        kind, numbers = self.outcome.kind, self.numbers
        start = self._start(numbers.randint(1, 2))
        if kind in DEEDS:
            moment = a_moment(numbers, start.world, start.replicas, start.saves)
            start = dataclasses.replace(start, moment=moment, deed=DEEDS[kind])
        if kind in {"slow", "cut"}:
            start = dataclasses.replace(start, deadline_seconds=SHORT_SECONDS)
        if kind == "permute":
            start = dataclasses.replace(start, seats=tuple(numbers.sample(start.seats, NODES)))
        elif kind == "redo":
            start = dataclasses.replace(start, back=numbers.randint(1, 3))
        elif kind == "clock":
            back = tuple(rank for rank in range(NODES) if numbers.random() < 0.5)
            start = dataclasses.replace(start, clock_back=back)
        elif kind == "world":
            seats = start.seats[:-1] if numbers.random() < 0.5 else (*start.seats, start.seats[0])
            start = dataclasses.replace(start, seats=seats, saves=0)
        return start

    def _carry_out(self, start: Start) -> None:
        kind = self.outcome.kind
        if kind == "wipe":
            node = self.numbers.randrange(NODES)
            self.nodes.empty(node)
            self.judge.lose(node)
        elif kind == "corrupt":
            self._corrupt()
        elif kind == "full":
            self._fill()
        statuses = self._run(start, self._meanwhile(start))
        wanted = -signal.SIGKILL if start.deed == "kill" or kind == "power" else 0
        if any(status not in {0, wanted} for status in statuses):
            rows = [start.told(rank) for rank in range(start.world)]
            raise BrokenError(f"ranks ended with {statuses}: {rows}")

    def _meanwhile(self, start: Start) -> Callable[[], None]:
        """What is done while a rank is held, or stopped."""
        moment, kind = start.moment, self.outcome.kind
        if moment is None or start.deed not in {"hold", "stop"}:
            return lambda: None
        done = False
        since = 0.0

        def turn() -> None:
            nonlocal done, since
            if done or not any(line["kind"] == "fate" for line in start.told(moment.rank)):
                return
            since = since or time.monotonic()
            if kind == "slow" and time.monotonic() - since < 2 * SHORT_SECONDS:
                return
            done = True
            if kind == "daemon":
                self.nodes.kill_daemon(moment.rank)
            self._release(start, kind)

        return turn

    def _release(self, start: Start, kind: str) -> None:
        if kind == "power":
            for pid in _ranks_of(start):
                os.kill(pid, signal.SIGKILL)
            for node in range(len(self.nodes.places)):
                self.nodes.kill_daemon(node)
        elif kind == "slow":
            for pid in _ranks_of(start):
                os.kill(pid, signal.SIGCONT)
        (start.directory / "released").touch()

    # --- what is done to stores -------------------------------------------------------------

    def _corrupt(self) -> None:
        """One byte of one file of one attempt on one node."""
        node = self.numbers.randrange(NODES)
        files = sorted(
            path for path in self.nodes.roots[node].glob("step-*/**/*") if path.is_file()
        )
        path = self.numbers.choice(files)
        with path.open("r+b") as file:
            data = file.read()
            offset = self.numbers.randrange(len(data))
            file.seek(offset)
            file.write(bytes([data[offset] ^ (1 << self.numbers.randrange(8))]))
        self.judge.lose(node)

    def _fill(self) -> None:
        place = self.nodes.places[self.numbers.randrange(NODES)]
        place.announced.append("no-space")
        with contextlib.suppress(OSError), (place.mountpoint / "filler").open("wb") as file:
            while True:
                file.write(bytes(MIB))
                file.flush()
                os.fsync(file.fileno())

    def _mend(self) -> None:
        self.nodes.mount_again()
        for place in self.nodes.places:
            (place.mountpoint / "filler").unlink(missing_ok=True)


def _ranks_of(start: Start) -> Iterator[int]:
    """Those that are alive."""
    for rank in range(start.world):
        with contextlib.suppress(FileNotFoundError, ValueError):
            pid = int((start.directory / f"pid-{rank}").read_text())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 0)
                yield pid


def run_campaign(
    kind: str, faults: int, seed: int, *, replicas: int, in_stores: bool = True
) -> Outcome:
    """In stores of its own, each of a node, or in directories; cleaned up behind it."""
    outcome = Outcome(kind, replicas)
    with (
        contextlib.redirect_stdout(io.StringIO()),  # where a workplace shows its log in the end
        contextlib.ExitStack() as stack,
    ):
        root = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cxlfs-"))
        )
        places = []
        if in_stores:
            places = [stack.enter_context(workplace(size_bytes=STORE_BYTES)) for _ in range(NODES)]
        for place in places:
            place.announced.append(r"reverted: the previous version is back")
        try:
            Campaign(Nodes(root, places), outcome, seed).run(faults)
        except BrokenError as error:
            outcome.problems.append(f"fault {outcome.faults + 1}: {error}")
    return outcome
