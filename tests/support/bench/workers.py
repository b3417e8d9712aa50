"""Processes that write and read files at the same time, from buffers that they keep.

Each has two page-aligned buffers in anonymous memory, touched before anything is timed. All wait
at a barrier and take the time themselves; the clock is the same for all of them.

Never here: what is measured and how often (``data``).
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import NamedTuple, Self

from cxlfs import client
from cxlfs.media import open_media
from cxlfs.units import MIB

COUNTS = (1, 2, 4)
BLOCK_BYTES_MAX = 16 * MIB
SCATTER_BYTES = MIB
PATIENCE_SECONDS = 600.0


class Job(NamedTuple):
    """``kind``: ``write``, ``read``, ``pwrite``, which times every call by itself, or ``scatter``,
    which writes as many blocks as there are at random places of a file that ``write`` made;
    ``client_write``, ``client_read`` and ``mapped_read`` by the client library; ``memcpy`` and
    ``raw_copy``, which is non-temporal, into a mapped file.
    """

    kind: str
    path: str
    block_bytes: int
    total_bytes: int
    sync: bool


class Done(NamedTuple):
    """Seconds of the clock when it began and ended; of each call where the job asks for it."""

    began: float
    ended: float
    calls: list[float]


class WorkError(Exception):
    """A worker failed; the message is what it said."""


class Workers:
    """As many processes as the largest of COUNTS."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Kept: a process that starts slowly finds a barrier only while somebody holds it.
        self._barriers = {count: context.Barrier(count) for count in COUNTS}
        self._connections: list[Connection] = []
        self._processes = []
        for index in range(max(COUNTS)):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, self._barriers, index), daemon=True
            )
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.join(5)
            if process.is_alive():
                process.kill()

    def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Each by a process of its own, all at once; raises WorkError."""
        used = self._connections[: len(jobs)]
        for connection, job in zip(used, jobs, strict=True):
            connection.send((len(jobs), job))
        results = []
        for connection in used:
            if not connection.poll(PATIENCE_SECONDS):
                raise WorkError(f"no answer for {PATIENCE_SECONDS:.0f} s from {jobs[0]}")
            results.append(connection.recv())
        failed = [result for result in results if isinstance(result, str)]
        if failed:
            raise WorkError("; ".join(failed))
        return results


def bytes_per_second(jobs: Sequence[Job], done: Sequence[Done]) -> float:
    """From when the first began until the last was done."""
    elapsed = max(each.ended for each in done) - min(each.began for each in done)
    return sum(job.total_bytes for job in jobs) / elapsed


def _serve(connection: Connection, barriers: dict[int, Barrier], index: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them
    source = mmap.mmap(-1, BLOCK_BYTES_MAX)
    source.write(random.Random(index).randbytes(BLOCK_BYTES_MAX))
    target = mmap.mmap(-1, BLOCK_BYTES_MAX)
    target.write(bytes(BLOCK_BYTES_MAX))
    while True:
        try:
            count, job = connection.recv()
        except EOFError:
            return
        try:
            connection.send(_ACTS[job.kind](job, barriers[count], source, target))
        except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
            barriers[count].abort()
            connection.send(f"{job}: {error!r}")
            return


def _write(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """As a save over one name: truncated before; close, which commits, is timed."""
    block = memoryview(source)[: job.block_bytes]
    fd = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        if os.pwrite(fd, block, offset) != job.block_bytes:
            raise WorkError("a short write")
    if job.sync:
        os.fsync(fd)
    os.close(fd)
    return Done(began, time.perf_counter(), [])


def _read(job: Job, barrier: Barrier, source: mmap.mmap, target: mmap.mmap) -> Done:
    """What ``_write`` wrote, with nothing of it in the page cache where that can be dropped."""
    block = memoryview(target)[: job.block_bytes]
    fd = os.open(job.path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        if os.preadv(fd, [block], offset) != job.block_bytes:
            raise WorkError("a short read")
    ended = time.perf_counter()
    os.close(fd)
    if block != memoryview(source)[: job.block_bytes]:
        raise WorkError("read something else than what was written")
    return Done(began, ended, [])


def _client_write(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """As ``_write``, without the kernel."""
    block = memoryview(source)[: job.block_bytes]
    file = client.open(job.path, "wb")
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        file.write_at(block, offset)
    if not file.direct:
        raise WorkError(f"not written directly: {file.why_not}")
    file.close()
    return Done(began, time.perf_counter(), [])


def _client_read(job: Job, barrier: Barrier, source: mmap.mmap, target: mmap.mmap) -> Done:
    """What ``_client_write`` wrote, verified and copied out."""
    block = memoryview(target)[: job.block_bytes]
    barrier.wait()
    began = time.perf_counter()
    with client.open(job.path) as file:
        for _ in range(0, job.total_bytes, job.block_bytes):
            if file.readinto(block) != job.block_bytes:
                raise WorkError("a short read")
    ended = time.perf_counter()
    if block != memoryview(source)[: job.block_bytes]:
        raise WorkError("read something else than what was written")
    return Done(began, ended, [])


def _mapped_read(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """What ``_client_write`` wrote, verified where it lies."""
    barrier.wait()
    began = time.perf_counter()
    with client.map(job.path, verify="first use") as mapped:
        for offset in range(0, job.total_bytes, job.block_bytes):
            block = mapped.read(offset, job.block_bytes)
        ended = time.perf_counter()
        if block != memoryview(source)[: job.block_bytes]:
            raise WorkError("read something else than what was written")
        block.release()
    return Done(began, ended, [])


def _memcpy(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """Into shared memory whose pages are there, as programs do that keep checkpoints in it."""
    block = memoryview(source)[: job.block_bytes]
    with open(job.path, "a+b") as file:  # noqa: PTH123  a descriptor is what is wanted
        file.truncate(job.total_bytes)
        shared = mmap.mmap(file.fileno(), job.total_bytes)
    for offset in range(0, job.total_bytes, mmap.PAGESIZE):
        shared[offset] = 0
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        shared[offset : offset + job.block_bytes] = block
    ended = time.perf_counter()
    shared.close()
    return Done(began, ended, [])


def _raw_copy(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """What the yardstick does, by as many processes as the case has."""
    block = memoryview(source)[: job.block_bytes]
    media = open_media(job.path, create_size_bytes=job.total_bytes)
    for offset in range(0, job.total_bytes, job.block_bytes):
        media.copy(offset, block)
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        media.copy(offset, block)
    ended = time.perf_counter()
    media.close()
    Path(job.path).unlink()  # where it is made again it has other pages
    return Done(began, ended, [])


def _pwrite(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    block = memoryview(source)[: job.block_bytes]
    calls = []
    fd = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    barrier.wait()
    began = time.perf_counter()
    for offset in range(0, job.total_bytes, job.block_bytes):
        before = time.perf_counter()
        os.pwrite(fd, block, offset)
        calls.append(time.perf_counter() - before)
    os.close(fd)
    return Done(began, time.perf_counter(), calls)


def _scatter(job: Job, barrier: Barrier, source: mmap.mmap, _target: mmap.mmap) -> Done:
    """The same bytes that ``_write`` wrote there in blocks of SCATTER_BYTES, so that ``_read``
    finds what it expects.
    """
    blocks = memoryview(source)[:SCATTER_BYTES]
    rng = random.Random(job.total_bytes)
    fd = os.open(job.path, os.O_WRONLY)
    barrier.wait()
    began = time.perf_counter()
    for _ in range(job.total_bytes // job.block_bytes):
        offset = rng.randrange(job.total_bytes // job.block_bytes) * job.block_bytes
        place = offset % SCATTER_BYTES
        if os.pwrite(fd, blocks[place : place + job.block_bytes], offset) != job.block_bytes:
            raise WorkError("a short write")
    os.close(fd)
    return Done(began, time.perf_counter(), [])


_ACTS = {
    "write": _write,
    "read": _read,
    "pwrite": _pwrite,
    "scatter": _scatter,
    "client_write": _client_write,
    "client_read": _client_read,
    "mapped_read": _mapped_read,
    "memcpy": _memcpy,
    "raw_copy": _raw_copy,
}
