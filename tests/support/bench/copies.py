"""One of two processes that copy shards to each other's store: raw gloo, the least that a copy can
be, and the copy, in turns. ``scripts/bench-copies`` runs two of these.

    python -m tests.support.bench.copies DIRECTORY SIZE_BYTES FILES RUNS RUNS_BEFORE

Each line of what the receiving one prints is a turn: how many seconds each took, and how much
processor time at both ends and, where it is given (CXLFS_BENCH_DAEMON), in the mount's process.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.job import copying, files, incoming
from cxlfs.job.engines import Link, Pending
from cxlfs.job.engines.torch import TorchEngine, TorchLink
from cxlfs.job.pieces import PIECE_BYTES, PIECES_IN_FLIGHT
from cxlfs.job.protocol import Attempt

ATTEMPT = Attempt(1, 1, "0" * 16)
SECONDS = 120.0
READ_BYTES = 1 << 20
DAEMON = os.environ.get("CXLFS_BENCH_DAEMON", "")


def raw(link: Link, buffers: list[memoryview], size_bytes: int, *, sends: bool) -> None:
    """As many bytes, from memory into memory, in the same pieces."""
    waiting: collections.deque[Pending] = collections.deque()
    for number in range(size_bytes // PIECE_BYTES):
        if len(waiting) == PIECES_IN_FLIGHT:
            waiting.popleft().wait()
        buffer = buffers[number % PIECES_IN_FLIGHT]
        waiting.append(link.send(buffer) if sends else link.receive(buffer))
    while waiting:
        waiting.popleft().wait()


def least_sent(link: Link, buffers: list[memoryview], paths: list[Path]) -> None:
    """Read and sent."""
    waiting: collections.deque[Pending] = collections.deque()
    number = 0
    for path in paths:
        with path.open("rb", buffering=0) as file:
            for _ in range(path.stat().st_size // PIECE_BYTES):
                if len(waiting) == PIECES_IN_FLIGHT:
                    waiting.popleft().wait()
                buffer = buffers[number % PIECES_IN_FLIGHT]
                file.readinto(buffer)
                waiting.append(link.send(buffer))
                number += 1
    while waiting:
        waiting.popleft().wait()


def least_received(link: Link, buffers: list[memoryview], paths: list[Path], each: int) -> None:
    """Received, written, synced and read back: nothing reserved, nothing compared."""
    waiting: collections.deque[Pending] = collections.deque()
    count = each // PIECE_BYTES
    with concurrent.futures.ThreadPoolExecutor(incoming.READERS) as readers:
        read: list[concurrent.futures.Future[None]] = []
        for number in range(len(paths) * count + PIECES_IN_FLIGHT):
            buffer = buffers[number % PIECES_IN_FLIGHT]
            if number >= PIECES_IN_FLIGHT:
                waiting.popleft().wait()
                file, place = divmod(number - PIECES_IN_FLIGHT, count)
                descriptor = os.open(paths[file], os.O_WRONLY | os.O_CREAT, 0o666)
                os.pwrite(descriptor, buffer, place * PIECE_BYTES)
                os.close(descriptor)
                if place == count - 1:
                    read.append(readers.submit(read_back, paths[file]))
            if number < len(paths) * count:
                waiting.append(link.receive(buffer))
        for one in read:
            one.result()


def read_back(path: Path) -> None:
    buffer, at = bytearray(READ_BYTES), 0
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        while count := os.preadv(file.fileno(), [buffer], at):
            at += count


def saved(root: Path, size_bytes: int, count: int) -> files.Manifest:
    directory = files.begin(root, ATTEMPT, 0)
    for number in range(count):
        with (directory / f"{number}.bin").open("wb") as file:
            for _ in range(size_bytes // count // PIECE_BYTES):
                file.write(os.urandom(PIECE_BYTES))
    manifest = files.Manifest(ATTEMPT, 0, 2, "", "", files.Medium(), files.measure(directory))
    files.seal(root, manifest)
    return manifest


def processor_seconds(rank: int) -> float:
    """Of this process; rank 1 counts the mount's."""
    used = time.process_time()
    if DAEMON and rank:
        row = Path(f"/proc/{DAEMON}/stat").read_text().rpartition(")")[2].split()
        used += (int(row[11]) + int(row[12])) / os.sysconf("SC_CLK_TCK")
    return used


class End:
    """One of the two."""

    def __init__(self, where: Path, size_bytes: int, count: int) -> None:
        self.engine = TorchEngine()
        self.rank = self.engine.world().rank
        self.size_bytes = size_bytes
        self.own, self.source = where / str(self.rank), files.rank_path(where / "0", ATTEMPT, 0)
        self.own.mkdir()
        if self.rank == 0:
            saved(self.own, size_bytes, count)
        self.names = [f"{number}.bin" for number in range(count)]
        self.buffers = [
            memoryview(bytearray(os.urandom(PIECE_BYTES))) for _ in range(PIECES_IN_FLIGHT)
        ]

    def carry(self, what: str, link: Link) -> None:
        sends = self.rank == 0
        there = [(self.source if sends else self.own) / name for name in self.names]
        if what == "raw":
            raw(link, self.buffers, self.size_bytes, sends=sends)
        elif what == "least" and sends:
            least_sent(link, self.buffers, there)
        elif what == "least":
            least_received(link, self.buffers, there, self.size_bytes // len(there))
        elif sends:
            copying.send(link, self.source, (self.source / files.MANIFEST_NAME).read_bytes())
        else:
            copying.receive(link, self.own, copying.Wanted(ATTEMPT, 0, 2))

    @contextlib.contextmanager
    def link(self, name: str, what: str) -> Iterator[Link]:
        if what == "raw":
            link: Link = TorchLink(self.engine._store, self.rank, 1 - self.rank, name, SECONDS)
        else:
            link = self.engine.link(1 - self.rank, name, SECONDS)
        yield link
        link.close(is_done=True)

    def clear(self) -> None:
        if self.rank == 1:
            shutil.rmtree(self.own)
            self.own.mkdir()


def main() -> None:
    import torch
    from torch import distributed

    where, size_bytes, count, runs, before = Path(sys.argv[1]), *map(int, sys.argv[2:6])
    distributed.init_process_group("gloo")
    end = End(where, size_bytes, count)
    for run in range(before + runs):
        took: dict[str, float] = {}
        for what in ("raw", "least", "copy"):
            with end.link(f"{what}{run}", what) as link:
                distributed.barrier()
                begun, used = time.perf_counter(), processor_seconds(end.rank)
                end.carry(what, link)
                distributed.barrier()
                took[what] = time.perf_counter() - begun
                spent = torch.tensor(processor_seconds(end.rank) - used)
                distributed.all_reduce(spent)
                took[f"{what} processors"] = float(spent)
            end.clear()
        if end.rank == 1 and run >= before:
            print(json.dumps(took), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
