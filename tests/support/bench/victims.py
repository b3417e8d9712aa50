"""Two small programs that only want to get on, while others do what they do: one reads 4 KiB of
its own file, one saves a small file by rename. ``scripts/stalls`` prints how long they waited.

Invariants
- They pause between two calls: they show what others make them wait for, and are no load.
- A wait that has begun when they are told to stop is counted: the longest may be the last.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from cxlfs.units import KIB, MIB
from tests.support.bench.measure import Figures, percentiles
from tests.support.bench.workers import WorkError

KINDS = ("read", "save")
PAUSE_SECONDS = 0.002
PATIENCE_SECONDS = 600.0
_READ_BYTES = MIB
_DATA = bytes(range(256)) * (4 * KIB // 256)


class Victims:
    """Both, in processes of their own, from when the block begins until ``waits`` is called."""

    def __init__(self, directory: Path) -> None:
        (directory / "victim").write_bytes(_DATA * (_READ_BYTES // len(_DATA)))
        context = multiprocessing.get_context("fork")
        self._connections: dict[str, Connection] = {}
        self._processes = []
        for kind in KINDS:
            here, there = context.Pipe()
            self._connections[kind] = here
            theirs = tuple(self._connections.values())
            arguments = (there, kind, str(directory), theirs)
            process = context.Process(target=_live, args=arguments, daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
        for kind in KINDS:
            self._told(kind)

    def __enter__(self) -> Self:
        for connection in self._connections.values():
            connection.send("begin")
        return self

    def __exit__(self, *_details: object) -> None:
        for connection in self._connections.values():
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def waits(self) -> Figures:
        """Stop them: of each kind the median, p99 and the worst, in seconds, and how many."""
        for connection in self._connections.values():
            connection.send("end")
        result = {}
        for kind in KINDS:
            samples = self._told(kind)
            if not isinstance(samples, list):
                raise WorkError(f"the program that would {kind} said: {samples}")
            result[kind] = {**percentiles(samples), "worst_s": max(samples)}
        return result

    def _told(self, kind: str) -> object:
        connection = self._connections[kind]
        if not connection.poll(PATIENCE_SECONDS):
            raise WorkError(f"the program that would {kind} waits for ever")
        try:
            return connection.recv()
        except EOFError as error:
            raise WorkError(f"the program that would {kind} has ended") from error


def _live(
    connection: Connection, kind: str, directory: str, theirs: tuple[Connection, ...]
) -> None:
    """``theirs``: the parent's ends, which a fork has brought along. While any is open here, the
    end of the parent would not be seen.
    """
    for each in theirs:
        each.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    act = {"read": _read, "save": _save}[kind]
    os.chdir(directory)
    samples: list[float] = []
    try:
        connection.send("ready")
        connection.recv()
        while not samples or not connection.poll(PAUSE_SECONDS):
            began = time.perf_counter()
            act(len(samples))
            samples.append(time.perf_counter() - began)
        connection.send(samples)
    except EOFError:
        return
    except OSError as error:
        connection.send(str(error))


def _read(number: int) -> None:
    """4 KiB of a file, opened anew each time."""
    fd = os.open("victim", os.O_RDONLY)
    try:
        offset = number * len(_DATA) % _READ_BYTES
        if os.pread(fd, len(_DATA), offset) != _DATA:
            raise OSError("read something else than what was written")
    finally:
        os.close(fd)


def _save(_number: int) -> None:
    fd = os.open("victim.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.write(fd, _DATA)
    finally:
        os.close(fd)
    os.rename("victim.new", "victim.saved")  # noqa: PTH104  as short as can be
