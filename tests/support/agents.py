"""Agents of a job's nodes as threads, round by round, and beside them what a job does with its
directories: Orbax's side of the protocol of files, without Orbax.
"""

from __future__ import annotations

import itertools
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from cxlfs.job.agent import Event, Keeper, OrbaxAgent, Pace, Settings, Tending, service
from cxlfs.job.agent.service import Work
from cxlfs.job.engines import Engine
from tests.support.checkpoints import unpack_into
from tests.support.job_ranks import SECONDS, Board, ThreadEngine

MARK = "mark.txt"
"""A file of each step that says whose it is."""


class OrbaxNodes:
    """A directory for each node, and the agents that live there now."""

    def __init__(self, root: Path, world: int = 2, replicas: int = 1, keep: int = 2) -> None:
        self.world = world
        self.replicas = replicas
        self.keep = keep
        self.seconds = SECONDS
        self.tier: str | None = None
        self.events: list[list[Event]] = [[] for _ in range(world)]
        self._root = root
        self._golden = unpack_into("orbax", _made(root / "golden")) / "2"
        self._starts = itertools.count()
        for rank in range(world):
            self.directory(rank).mkdir()
        self.start()

    def directory(self, rank: int) -> Path:
        return self._root / f"node{rank}"

    # --- agents -----------------------------------------------------------------------------

    def start(self) -> None:
        """All of them anew, as after a reboot; they have met once the first round is done."""
        board = Board(self.world, str(next(self._starts)))
        self._engines = [ThreadEngine(board, rank) for rank in range(self.world)]
        self._agents: list[OrbaxAgent] = []
        self._rounds = 0

    def rounds(self, count: int = 1, *, is_last: bool = False) -> list[Exception | None]:
        """What went wrong with each, of one of these."""
        if not self._agents:
            self._agents = [self._agent(rank) for rank in range(self.world)]
        begins = self._rounds == 0
        numbers = range(self._rounds, self._rounds + count)
        self._rounds += count
        failed: list[Exception | None] = [None] * self.world

        def run(rank: int) -> None:
            agent, engine = self._agents[rank], self._engines[rank]
            try:
                if begins:
                    agent.begin(engine)
                for number in numbers:
                    pace = Pace(self.seconds)
                    service._round(engine, agent, number, pace, is_last=is_last)
            except Exception as error:  # noqa: BLE001 - it is what the test asks for
                failed[rank] = error

        on_threads(self.world, run)
        return failed

    def _agent(self, rank: int) -> OrbaxAgent:
        def keeper_of(kept: Path, engine: Engine) -> Keeper:
            return Keeper(
                kept,
                engine=engine,
                replicas=self.replicas,
                domain=f"node{rank}",
                keep=self.keep,
                tier=self.tier,
                deadline_seconds=self.seconds,
                allow_volatile=True,
            )

        tell = self.events[rank].append
        return OrbaxAgent(self.directory(rank), rank, keeper_of, tell, "127.0.0.1:1234")

    def states(self, rank: int = 0) -> list[str]:
        return [event.state for event in self.events[rank]]

    # --- the job ----------------------------------------------------------------------------

    def ask(self, *ranks: int, job: str = "run1", unit: str = "steps", interval: int = 2) -> None:
        for rank in ranks or range(self.world):
            peers = [each for each in range(self.world) if each != rank]
            lines = [
                f"job-name: {job}",
                "framework: orbax",
                f"assume-data-parallelism: {self.world}",
                f"node-rank: {rank}",
                f"nodes: {self.world}",
                f"peer-ranks: {peers}",
                f"backup-interval-{unit}: {interval}",
            ]
            (self.directory(rank) / "replicator.yaml").write_text("\n".join(lines))

    def asks(self) -> list[int]:
        """Who has no answer yet."""
        names = [self.directory(rank) / "replicator.yaml" for rank in range(self.world)]
        return [rank for rank, name in enumerate(names) if name.exists()]

    def save(self, step: int, *ranks: int) -> None:
        for rank in ranks or range(self.world):
            path = self.directory(rank) / f"{step}.orbax-checkpoint-tmp"
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(self._golden, path)
            (path / MARK).write_text(f"node {rank} step {step}")
            path.rename(self.directory(rank) / str(step))

    def wipe(self, rank: int) -> None:
        shutil.rmtree(self.directory(rank))
        self.directory(rank).mkdir()

    def given(self, rank: int) -> str | None:
        """What a job finds that has got its answer, as Orbax goes about it; None: it begins anew.
        Raises RuntimeError: what it was told instead.
        """
        directory = self.directory(rank)
        failed = directory / "replicator.failed"
        if failed.exists():
            reason = failed.read_text()
            failed.unlink()
            raise RuntimeError(reason)
        (marker,) = directory.glob("*.restore")
        step = marker.name.split("-")[-3].removeprefix("s")
        if step == "0" and marker.is_file():
            marker.unlink()
        else:
            marker.replace(directory / step)
        steps = self.steps(rank)
        return (directory / str(max(steps)) / MARK).read_text() if steps else None

    def steps(self, rank: int) -> list[int]:
        """What the job sees."""
        names = [path.name for path in self.directory(rank).iterdir()]
        return sorted(int(name) for name in names if name.isdigit())


def on_threads(count: int, task: Callable[[int], object]) -> None:
    threads = [threading.Thread(target=task, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Groups:
    """Where agents that are threads meet: all of them each time, for a group of its own."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._boards: list[Board] = []
        self._all = threading.Barrier(world, self._begin)

    def _begin(self) -> None:
        self._boards.append(Board(self._world, str(len(self._boards))))

    def meeting(self, rank: int) -> Meeting:
        return Meeting(self, rank)

    def join(self, rank: int) -> Engine:
        self._all.wait(SECONDS)
        return ThreadEngine(self._boards[-1], rank)


class Meeting:
    def __init__(self, groups: Groups, rank: int) -> None:
        self._groups = groups
        self._rank = rank

    def join(self, seconds: float) -> Engine:
        del seconds
        return self._groups.join(self._rank)


def tend(
    roots: Sequence[Path], settings: Callable[[int], Settings]
) -> tuple[list[list[Event]], list[Exception | None]]:
    """``--once`` on each node: what was told, and what was raised."""
    groups = Groups(len(roots))
    told: list[list[Event]] = [[] for _ in roots]
    failed: list[Exception | None] = [None for _ in roots]

    def run(rank: int) -> None:
        work: Work = Tending(roots[rank], settings(rank), told[rank].append)
        try:
            pace = Pace(SECONDS, pause_seconds=0.01)
            service.serve_once(groups.meeting(rank), work, told[rank].append, pace)
        except Exception as error:  # noqa: BLE001 - it is what the test asks for
            failed[rank] = error

    on_threads(len(roots), run)
    return told, failed


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path
