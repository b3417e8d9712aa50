"""Ranks of a job as threads of one process, over an engine in memory, each with a directory of its
own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from cxlfs.job import Checkpointer
from cxlfs.job.engines import World
from tests.support.job_links import QueueLink, Switch

WORLD = 3
SECONDS = 20.0

_Result = TypeVar("_Result")


class Board:
    """What all ranks of one start of the job have said."""

    def __init__(self, size: int, incarnation: str) -> None:
        self.size = size
        self.incarnation = incarnation
        self.said: dict[tuple[str, int], bytes] = {}
        self.changed = threading.Condition()
        self.switch = Switch(is_stream=True)

    def say(self, key: str, rank: int, body: bytes) -> None:
        with self.changed:
            self.said[key, rank] = body
            self.changed.notify_all()

    def hear(self, key: str, ranks: Sequence[int], seconds: float) -> dict[int, bytes]:
        with self.changed:
            self.changed.wait_for(lambda: all((key, r) in self.said for r in ranks), seconds)
            return {r: self.said[key, r] for r in ranks if (key, r) in self.said}


def boards_made(patch: pytest.MonkeyPatch) -> list[Board]:
    """Of each start from now on its own is added."""
    boards: list[Board] = []
    make = Board.__init__

    def init(self: Board, size: int, incarnation: str) -> None:
        make(self, size, incarnation)
        boards.append(self)

    patch.setattr(Board, "__init__", init)
    return boards


class ThreadEngine:
    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank

    def world(self) -> World:
        return World(self.rank, self.board.size, self.board.incarnation)

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        del to, near
        self.board.say(key, self.rank, body)

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        del near
        return self.board.hear(key, ranks, seconds)

    def link(self, other: int, name: str, seconds: float) -> QueueLink:
        return self.board.switch.link(self.rank, other, name, seconds)

    def forget(self, key: str) -> None:
        with self.board.changed:
            self.board.said.pop((key, self.rank), None)


def on_all_ranks(
    size: int,
    incarnation: str,
    task: Callable[[ThreadEngine], _Result],
    absent: tuple[int, ...] = (),
) -> dict[int, _Result | Exception]:
    """What each rank's task returned or raised; those that are absent never begin."""
    board = Board(size, incarnation)
    found: dict[int, _Result | Exception] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = task(ThreadEngine(board, rank))
        except Exception as error:  # noqa: BLE001 - it is what the test asks for
            found[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(size) if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def content(rank: int, step: int) -> bytes:
    return b"rank %d step %d\n" % (rank, step) * 5000


class Job:
    """One job over several starts: each rank has a directory, by its number unless ``seats``."""

    def __init__(self, root: Path, world: int = WORLD) -> None:
        self.root = root
        self.world = world
        self.starts = 0
        self.seats = list(range(world))
        self.absent: tuple[int, ...] = ()
        self.seconds = SECONDS
        self.in_flight = 1
        self.replicas = 1
        self.placement = "groups"
        self.domains: list[str] = []
        """Of the ranks; none: a domain for each store."""
        self.unheard = "branch"
        self.tier: str | None = None
        self.tier_every = 1
        self.tier_keep: int | None = None
        self.loaded: dict[int, bytes] = {}

    def store(self, rank: int) -> Path:
        return self.root / f"node{self.seats[rank]}"

    def domain(self, rank: int) -> str:
        return self.domains[rank] if self.domains else self.store(rank).name

    def start(self, task: Callable[[Checkpointer], object]) -> list[object]:
        """Each rank makes a Checkpointer, and does that."""
        self.starts += 1

        def one(engine: ThreadEngine) -> object:
            made = Checkpointer(
                self.store(engine.rank),
                engine=engine,
                deadline_seconds=self.seconds,
                allow_volatile=True,
                in_flight=self.in_flight,
                replicas=self.replicas,
                domain=self.domain(engine.rank),
                placement=self.placement,
                unheard=self.unheard,
                tier=self.tier,
                tier_every=self.tier_every,
                tier_keep=self.tier_keep,
            )
            try:
                return task(made)
            finally:
                made._room.finish(SECONDS)

        found = on_all_ranks(self.world, str(self.starts), one, self.absent)
        return [found[rank] for rank in sorted(found)]

    def load(self, made: Checkpointer) -> object:
        def take(directory: Path) -> None:
            self.loaded[made.world.rank] = (directory / "deep" / "shard.bin").read_bytes()

        return made.restore_from_checkpoint(take)

    def save(self, made: Checkpointer, *steps: int) -> list[object]:
        self.load(made)
        rank = made.world.rank
        return [
            made.distributed_checkpoint(step, lambda path, s=step: write(path, rank, s))  # type: ignore[misc]
            for step in steps
        ]

    def attempts(self, rank: int) -> list[str]:
        return sorted(path.name for path in self.store(rank).glob("step-*"))


def write(directory: Path, rank: int, step: int) -> None:
    (directory / "deep").mkdir()
    (directory / "deep" / "shard.bin").write_bytes(content(rank, step))
    (directory / "empty").touch()
