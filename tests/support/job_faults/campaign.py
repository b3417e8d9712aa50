"""Faults of real jobs, one after the other, in one life of a job as long as it can go on: each is a
start in which something goes wrong (``kinds``) at a moment of the protocol (``moments``), and one
in which nothing does. ``judge`` says what must hold.

All is determined by the seed but what processes do between two moments.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import multiprocessing
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

from cxlfs.errors import CxlfsError
from tests.support.job_faults.agent_faults import AgentFault, newest_in
from tests.support.job_faults.engine import Partition
from tests.support.job_faults.judge import BrokenError, Judge
from tests.support.job_faults.kinds import AGENT, AGENT_DRAIN, KINDS, Kind
from tests.support.job_faults.moments import RESTORE, Moment, a_moment, call_of
from tests.support.job_faults.nodes import STORE_BYTES, Beside, Nodes, environment_of_lines
from tests.support.job_faults.ranks import (
    COPIED_DIRECTLY,
    SAVED_DIRECTLY,
    Start,
    launch,
    wait_for,
)
from tests.support.mount import fast_directory, workplace

DEADLINE_SECONDS = 20.0
SHORT_SECONDS = 0.3
"""The deadline where ranks stand still, or do not reach each other."""
HANG_SECONDS = 60.0
CUT_WITHIN_SECONDS = 0.01
"""Power fails at any time of these, behind the moment."""
TRIES = 3
"""Starts for each fault: not each moment comes in each of them."""
_OFFERED = ("restore TakeStock", "stock", "offers", "loaded")
"""Moments of a restore in another number of ranks."""


@dataclasses.dataclass(slots=True)
class Outcome:
    """``phases``: how many came when; ``told``: how calls ended in starts with a fault; ``lives``:
    of the job, which begins anew where more was lost than copies can mend.
    """

    kind: str
    replicas: int
    nodes: int
    faults: int = 0
    lives: int = 1
    phases: dict[str, int] = dataclasses.field(default_factory=dict)
    told: dict[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)

    def count(self, phase: str, told: list[list[dict[str, object]]]) -> None:
        self.faults += 1
        self.phases[phase] = self.phases.get(phase, 0) + 1
        for line in (line for row in told for line in row):
            what = str(line.get("outcome", line.get("error", "")))
            if line["kind"] in {SAVED_DIRECTLY, COPIED_DIRECTLY}:
                what = str(line["kind"])
            if what:
                self.told[what] = self.told.get(what, 0) + 1


class Campaign:
    def __init__(self, nodes: Nodes, outcome: Outcome, seed: int) -> None:
        self.nodes = nodes
        self.outcome = outcome
        self.kind: Kind = KINDS[outcome.kind]
        self.numbers = random.Random(f"{outcome.kind} {outcome.replicas} {seed}")
        self.starts = 0
        self.judge = Judge(outcome.replicas)
        self.seats: list[int] = []
        """The node of each rank."""
        self._tier = nodes.root / "tier"
        self._is_done = False
        """What was to go wrong did."""
        self._agents: AgentFault | None = None
        self._chances = random.Random()
        """Of what is done meanwhile: how much of it is drawn depends on what processes do."""

    def run(self, faults: int) -> None:
        """Raises BrokenError."""
        try:
            self._run_all(faults)
        finally:
            self._end_agents()

    def _run_all(self, faults: int) -> None:
        self._begin_life()
        while self.outcome.faults < faults:
            if self.starts > 2 * TRIES * faults + 2 * TRIES * self.outcome.lives:
                raise BrokenError(f"the moments of {self.kind.name} do not come")
            phase = self.kind.phases[self.outcome.faults % len(self.kind.phases)]
            start = self._faulty(phase)
            self._carry_out(start)
            told = self._judged(start)
            self._behind(start)
            if self._is_done:
                self.outcome.count(phase, told)
            self.nodes.mount_again()
            self.nodes.make_room()
            resumes = self._quiet(1)
            self._end_agents()
            if not resumes:
                self.outcome.lives += 1
                self._begin_life()

    def _begin_life(self) -> None:
        self.judge = Judge(self.outcome.replicas)
        self.seats = list(range(self.outcome.nodes))
        for node in self.seats:
            self.nodes.empty(node)
        shutil.rmtree(self._tier, ignore_errors=True)
        if not self._quiet(2):
            raise BrokenError("a first start does not begin")

    # --- starts -----------------------------------------------------------------------------

    def _start(self, saves: int) -> Start:
        self.starts += 1
        is_world, is_drain = self.kind.name == "world", self.kind.name == "drain"
        return Start(
            self.nodes.root / f"start{self.starts}",
            tuple(self.nodes.roots[node] for node in self.seats),
            f"{self.numbers.random()}",
            self.outcome.replicas,
            saves,
            2,
            DEADLINE_SECONDS,
            stores=tuple(self.nodes.roots) if is_world else (),
            tier=self._tier.as_uri() if is_drain else None,
        )

    def _quiet(self, saves: int) -> bool:
        start = self._start(saves)
        if self.kind.name == AGENT_DRAIN:
            start = dataclasses.replace(start, tier=self._tier.as_uri())
        self._run(start, lambda: None)
        try:
            return self.judge.judge_quiet(start)
        finally:
            shutil.rmtree(start.directory)

    def _run(self, start: Start, each_turn: Callable[[], None]) -> list[int]:
        if start.tier:
            self._tier.mkdir(exist_ok=True)
        statuses = wait_for(launch(start), HANG_SECONDS, each_turn)
        if statuses is None:
            rows = [start.told(rank) for rank in range(start.world)]
            raise BrokenError(f"ranks hang, though every wait has a deadline: {rows}")
        return statuses

    def _judged(self, start: Start) -> list[list[dict[str, object]]]:
        try:
            return self.judge.judge(start, errors=set(self.kind.errors))
        finally:
            shutil.rmtree(start.directory)

    def _faulty(self, phase: str) -> Start:
        kind, numbers = self.kind, self.numbers
        if kind.name == "permute":
            numbers.shuffle(self.seats)
        elif kind.name == "world":
            self._change_world()
        start = self._start(numbers.randint(1, 2))
        more: dict[str, object] = {"deed": kind.deed, "moment": self._moment(start, phase)}
        if kind.name == "slow" and self.nodes.places and numbers.random() < 0.5:
            more["deed"] = "hold"
        if kind.name == "partition":
            more["parts"] = self._parts()
        elif kind.name == "redo":
            more["back"] = numbers.randint(1, 3)
        elif kind.name == "clock":
            more["clock_back"] = tuple(r for r in range(start.world) if numbers.random() < 0.5)
        if kind.name in {"slow", "partition"}:
            more["deadline_seconds"] = SHORT_SECONDS
        return dataclasses.replace(start, **more)  # type: ignore[arg-type]

    def _moment(self, start: Start, phase: str) -> Moment:
        kind, numbers = self.kind, self.numbers
        given = {"world": start.world, "replicas": start.replicas, "saves": start.saves}
        moment = a_moment(numbers, phase, **given)
        if kind.what:
            when = numbers.choice(["before", "inside", "inside", "behind"])
            count = numbers.randint(1, start.saves)
            rank = numbers.randrange(start.world)
            moment = Moment(rank, kind.what, when, count, call_of(numbers))
        elif kind.name == "world" and phase == RESTORE:
            when = numbers.choice(["before", "behind"])
            what = numbers.choice(_OFFERED)
            moment = Moment(numbers.randrange(start.world), what, when)
        return moment

    def _change_world(self) -> None:
        """By one rank: on at least as many nodes as replicas; at most one node has two."""
        ranks, nodes = range(len(self.seats)), self.outcome.nodes
        spared = [
            rank
            for rank in ranks
            if len({*self.seats[:rank], *self.seats[rank + 1 :]}) >= self.outcome.replicas
        ]
        if spared and (len(ranks) > nodes or self.numbers.random() < 0.5):
            self.seats.pop(self.numbers.choice(spared))
            return
        unused = [node for node in range(nodes) if node not in self.seats]
        self.seats.append(self.numbers.choice(unused or self.seats))

    def _parts(self) -> tuple[int, ...]:
        world = len(self.seats)
        if self.numbers.random() < 0.2:
            return tuple(range(world))
        first = self.numbers.sample(range(world), self.numbers.randint(1, world - 1))
        return tuple(int(rank in first) for rank in range(world))

    def _carry_out(self, start: Start) -> None:
        self._chances = random.Random(self.numbers.random())
        self._is_done = start.deed in {"kill", "stop", "part"}  # else it is done from here
        if self.kind.name == "clock" and self.nodes.places:
            self.nodes.set_clock_back(self._chances.randrange(len(self.nodes.places)))
        if self.kind.name.startswith("corrupt"):
            self.judge.lose(self._node_of(start))
        if self.kind.name in {AGENT, AGENT_DRAIN}:
            root = self.nodes.root / f"agents{self.starts}"
            seed = self._chances.random()
            tier = self._tier if self.kind.name == AGENT_DRAIN else None
            self._agents = AgentFault(root, start.seats, start.replicas, seed, tier)
        daemon = 0
        if start.deed == "hold" and self.kind.name == "slow":
            daemon = self.nodes.daemon(self._node_of(start))
        statuses = self._run(start, self._meanwhile(start, daemon))
        if daemon:
            os.kill(daemon, signal.SIGCONT)
        self._is_done &= any(line["kind"] == "fate" for line in _told_of_moment(start))
        may_be_killed = start.deed == "kill" or self.kind.name.startswith("power")
        wanted = {0, -signal.SIGKILL if may_be_killed else 0}
        if set(statuses) - wanted:
            rows = [start.told(rank) for rank in range(start.world)]
            raise BrokenError(f"ranks ended with {statuses}: {rows}")

    def _node_of(self, start: Start) -> int:
        return self.seats[start.moment.rank] if start.moment else 0

    # --- at the moment, and behind it -------------------------------------------------------

    def _meanwhile(self, start: Start, daemon: int) -> Callable[[], None]:
        """What is done when the moment has come, and when ``SHORT_SECONDS`` have passed twice."""
        pending = [self._at_moment, self._afterwards]
        due = 0.0

        def turn() -> None:
            nonlocal due
            if not due and any(line["kind"] == "fate" for line in _told_of_moment(start)):
                due = time.monotonic() + self._delay_seconds(start)
            if due and pending and time.monotonic() >= due:
                pending.pop(0)(start, daemon)
                due = time.monotonic() + 2 * SHORT_SECONDS

        return turn

    def _delay_seconds(self, start: Start) -> float:
        return self._chances.random() * CUT_WITHIN_SECONDS if start.deed == "go" else 0.0

    def _at_moment(self, start: Start, daemon: int) -> None:
        kind, node = self.kind.name, self._node_of(start)
        self._is_done = True
        if kind == "daemon":
            self.nodes.kill_daemon(node)
        elif self._agents is not None:
            self._agents.at_moment()
        elif kind.startswith("power"):
            self._cut_power(start, node)
        elif kind == "full":
            self.nodes.fill(node)
        elif kind.startswith("corrupt"):
            self._is_done = self._corrupt(node, kind.removeprefix("corrupt-"))
        elif daemon:
            os.kill(daemon, signal.SIGSTOP)
        if start.deed == "hold":
            (start.directory / "released").touch()

    def _afterwards(self, start: Start, daemon: int) -> None:
        if daemon:
            os.kill(daemon, signal.SIGCONT)
        elif start.deed == "stop":
            for pid in _ranks_of(start):
                os.kill(pid, signal.SIGCONT)
        elif start.deed == "part" and self._chances.random() < 0.5:
            Partition(start.directory).heal()

    def _cut_power(self, start: Start, node: int) -> None:
        cut = [node] if self._chances.random() < 0.3 else list(range(self.outcome.nodes))
        pids = dict(enumerate(_ranks_of(start)))
        ranks = [pid for rank, pid in pids.items() if pid and self.seats[rank] in cut]
        self.nodes.cut_power(cut, ranks, self._chances)

    def _corrupt(self, node: int, what: str) -> bool:
        """One bit of one file of one attempt. False: there is none."""
        names = {
            "shard": "step-*/rank-?????/shard.bin",
            "copy": "step-*/rank-?????/shard.bin",
            "manifest": "step-*/rank-?????/manifest.json",
            "commit": "step-*/commit-*.json",
        }
        own = {f"rank-{rank:05d}" for rank, seat in enumerate(self.seats) if seat == node}
        paths = sorted(self.nodes.roots[node].glob(names[what]))
        if what in {"shard", "copy"}:
            paths = [path for path in paths if (path.parent.name in own) == (what == "shard")]
        if not paths:
            return False
        with self._chances.choice(paths).open("r+b") as file:
            data = file.read()
            offset = self._chances.randrange(len(data))
            file.seek(offset)
            file.write(bytes([data[offset] ^ (1 << self._chances.randrange(8))]))
        return True

    def _behind(self, start: Start) -> None:
        """What was committed meanwhile is lost, or damaged, too."""
        node = self._node_of(start)
        if self.kind.name == "wipe":
            self.nodes.lose(node)
            self.judge.lose(node)
        elif self.kind.name.startswith("corrupt"):
            self.judge.lose(node)
        elif self._agents is not None:
            self._agents.behind_ranks(self.nodes, self.judge, self.seats)
            self._is_done = True
            told = f"agent killed: {self._agents.when}"
            self.outcome.told[told] = self.outcome.told.get(told, 0) + 1
            if self.kind.name == AGENT_DRAIN:
                self._lose_all()
        elif self.kind.name == "drain":
            self._lose_all()

    def _lose_all(self) -> None:
        """In half of them; what is in the tier has to come back."""
        self.judge.below = newest_in(self._tier)
        if not self.judge.below or self._chances.random() < 0.5:
            return
        if self._agents is not None:
            self._agents.agents.end()
        for each in range(self.outcome.nodes):
            self.nodes.empty(each)
            self.judge.lose(each)
        if self._agents is not None:
            self._agents.agents.begin_all()

    def _end_agents(self) -> None:
        if self._agents is not None:
            self._agents.agents.end()
            self._agents = None


def _told_of_moment(start: Start) -> list[dict[str, object]]:
    return start.told(start.moment.rank) if start.moment else []


def _ranks_of(start: Start) -> Iterator[int]:
    """The process of each; 0: it has ended."""
    for rank in range(start.world):
        pid = 0
        with contextlib.suppress(FileNotFoundError, ValueError, ProcessLookupError):
            found = int((start.directory / f"pid-{rank}").read_text())
            os.kill(found, 0)
            pid = found
        yield pid


def run_campaign(
    kind: str,
    faults: int,
    seed: int,
    *,
    replicas: int,
    nodes: int = 3,
    in_stores: bool = True,
    beside: Beside | None = None,
) -> Outcome:
    """In stores of its own, each of a node, or in directories; cleaned up behind it. That a store
    cannot be mounted, or is not clean in the end, is a problem, too.
    """
    outcome = Outcome(kind, replicas, nodes)
    beside = beside or KINDS[kind].beside
    if in_stores and beside.is_of_lines:
        return _in_a_process_of_lines(outcome, faults, seed, beside)
    return _run_to_the_end(outcome, faults, seed, beside, in_stores=in_stores)


def _in_a_process_of_lines(outcome: Outcome, faults: int, seed: int, beside: Beside) -> Outcome:
    """Ranks are forked, and have what their parent began with."""
    with tempfile.TemporaryDirectory(prefix="cxlfs-") as directory:
        environment = environment_of_lines(Path(directory), beside)
        context = multiprocessing.get_context("spawn")
        with (
            mock.patch.dict(os.environ, environment),
            ProcessPoolExecutor(max_workers=1, mp_context=context) as pool,
        ):
            run = functools.partial(_run_to_the_end, outcome, faults, seed, beside, in_stores=True)
            return pool.submit(run).result()


def _run_to_the_end(
    outcome: Outcome, faults: int, seed: int, beside: Beside, *, in_stores: bool
) -> Outcome:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # where a workplace shows its log
            _run_in_places(outcome, faults, seed, beside, in_stores=in_stores)
    except (AssertionError, CxlfsError, OSError) as error:
        outcome.problems.append(
            f"fault {outcome.faults + 1}: {type(error).__name__}: {error}"[:2000]
        )
    return outcome


def _run_in_places(
    outcome: Outcome, faults: int, seed: int, beside: Beside, *, in_stores: bool
) -> None:
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(dir=fast_directory(), prefix="cxlfs-")
        root = Path(stack.enter_context(temporary))
        count = outcome.nodes if in_stores else 0
        places = [stack.enter_context(workplace(size_bytes=STORE_BYTES)) for _ in range(count)]
        for place in places:
            place.announced.append(r"reverted: the previous version is back")
        made = Nodes(root, places, outcome.nodes, beside if in_stores else Beside.NOTHING)
        Campaign(made, outcome, seed).run(faults)
