"""Ranks of a job as threads of one process, over an engine in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from cxlfs.job.engines import World

_Result = TypeVar("_Result")


class Board:
    """What all ranks of one start of the job have said."""

    def __init__(self, size: int, incarnation: str) -> None:
        self.size = size
        self.incarnation = incarnation
        self.said: dict[tuple[str, int], bytes] = {}
        self.changed = threading.Condition()

    def say(self, key: str, rank: int, body: bytes) -> None:
        with self.changed:
            self.said[key, rank] = body
            self.changed.notify_all()

    def hear(self, key: str, ranks: list[int], seconds: float) -> dict[int, bytes]:
        with self.changed:
            self.changed.wait_for(lambda: all((key, r) in self.said for r in ranks), seconds)
            return {r: self.said[key, r] for r in ranks if (key, r) in self.said}


class ThreadEngine:
    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank

    def world(self) -> World:
        return World(self.rank, self.board.size, self.board.incarnation)

    def gather(self, key: str, body: bytes, seconds: float) -> dict[int, bytes]:
        self.board.say(key, self.rank, body)
        return self.board.hear(key, list(range(self.board.size)), seconds)

    def broadcast(self, key: str, body: bytes | None, seconds: float) -> bytes | None:
        if body is not None:
            self.board.say(key, self.rank, body)
        return self.board.hear(key, [0], seconds).get(0)

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
