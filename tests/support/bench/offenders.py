"""What programs do that might make others wait: the bodies that ``stalls`` runs, each in a process
of its own, in the mounted directory.

Invariants
- Each takes a path and numbers, and ends by itself: after a count, or after some seconds.
- "No space left on device" is an answer, counted where it is expected; anything else is a failure.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import random
import resource
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from cxlfs.units import KIB, MIB
from tests.support.bench.measure import private_bytes
from tests.support.bench.workers import WorkError

BLOCK = random.Random(9).randbytes(MIB)
PAGE = BLOCK[: 4 * KIB]
SPARE_DESCRIPTORS = 64


def together(body: Callable[..., int], arguments: Sequence[tuple[object, ...]]) -> list[int]:
    """Run ``body`` once for each tuple of arguments, all at once; what each returned. Raises
    WorkError.
    """
    context = multiprocessing.get_context("fork")
    processes, connections = [], []
    for given in arguments:
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(there, body, given), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        connections.append(here)
    results = []
    for connection, process in zip(connections, processes, strict=True):
        try:
            results.append(connection.recv())
        except EOFError:
            results.append(f"a process ended with status {process.exitcode}")
        process.join()
    failed = [result for result in results if isinstance(result, str)]
    if failed:
        raise WorkError(f"{body.__name__}: {'; '.join(failed)}")
    return results


def _run(connection: Connection, body: Callable[..., int], given: tuple[object, ...]) -> None:
    try:
        connection.send(body(*given))
    except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
        connection.send(repr(error))


def save_by_rename(directory: str, count: int) -> int:
    """``count`` saves of 4 KiB over 50 names."""
    for index in range(count):
        fd = os.open(f"{directory}/other.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, PAGE)
        os.close(fd)
        os.rename(f"{directory}/other.new", f"{directory}/other-{index % 50}")  # noqa: PTH104
    return count


def scatter(path: str, seed: int, count: int, sync_every: int) -> int:
    """``count`` writes of 4 KiB at random blocks of a file, with an fsync now and then."""
    rng = random.Random(seed)
    fd = os.open(path, os.O_WRONLY)
    blocks = os.fstat(fd).st_size // len(PAGE)
    full = 0
    for index in range(count):
        try:
            os.pwrite(fd, PAGE, rng.randrange(blocks) * len(PAGE))
            if index % sync_every == sync_every - 1:
                os.fsync(fd)
        except OSError as error:
            full += _count_full(error)
    _close(fd)
    return full


def allocate(path: str, size_bytes: int, seconds: float) -> int:
    """Reserve room and give it back, again and again; how often."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        os.posix_fallocate(fd, 0, size_bytes)
        os.ftruncate(fd, 0)
        rounds += 1
    os.close(fd)
    return rounds


def allocate_bytes(path: str, count: int) -> int:
    """One byte in each of ``count`` places 8 KiB apart; then a write to each third of them."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    for index in range(count):
        os.posix_fallocate(fd, index * 8 * KIB, 1)
    for index in range(0, count, 3):
        os.pwrite(fd, b"x", index * 8 * KIB)
    os.close(fd)
    return count


def descriptors_each() -> int:
    """How many files one process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1] - SPARE_DESCRIPTORS


def open_and_unlink(directory: str, number: int, count: int) -> int:
    """``count`` files that have no name any more, all open at once; closed by the end of the
    process.
    """
    _allow(count)
    for index in range(count):
        path = f"{directory}/unlinked-{number}-{index}"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(fd, b"x")
        os.unlink(path)  # noqa: PTH108  as short as can be
    return count


def open_directories(path: str, count: int, pid: int) -> int:
    """``count`` listings of one directory, begun and not ended; the memory of the process ``pid``
    when all are open.
    """
    _allow(count)
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            next(stack.enter_context(os.scandir(path)))
        return private_bytes(pid)


def ask_for_room(path: str, seconds: float) -> int:
    """The size of the file system after every write."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        os.pwrite(fd, PAGE, rounds % 1024 * len(PAGE))
        os.fstatvfs(fd)
        rounds += 1
    os.close(fd)
    return rounds


def write_and_close(path: str, seconds: float) -> int:
    """Open a file, write one block of it, close it, again and again; how often."""
    rng = random.Random(3)
    blocks = os.stat(path).st_size // len(PAGE)  # noqa: PTH116  as short as can be
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, PAGE, rng.randrange(blocks) * len(PAGE))
        os.close(fd)
        rounds += 1
    return rounds


def change_and_remove(path: str, blocks: int, seconds: float) -> int:
    """Open a file and write one block of it, cut it to half, and remove it while it is open, so
    long apart; how many changes.
    """
    pauses = threading.Event()
    with Path(path).open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), PAGE, blocks // 2 * len(PAGE))
        pauses.wait(seconds)
        os.ftruncate(file.fileno(), blocks // 2 * len(PAGE))
        pauses.wait(seconds)
    pauses.wait(seconds)
    with Path(path).open("r+b", buffering=0) as file:
        file.write(PAGE)
        Path(path).unlink()
        pauses.wait(seconds)
    pauses.wait(seconds)
    return 4


def write_in_turn(path: str, count: int) -> int:
    """``count`` processes, one after the other, write through one open file."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    for _ in range(count):
        child = os.fork()
        if child == 0:
            os.write(fd, b"x")
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            raise WorkError("a writer failed")
    os.close(fd)
    return count


def set_attributes(path: str, seconds: float) -> int:
    """An extended attribute of 60 KiB, set again and again; how often."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        os.setxattr(path, "user.large", BLOCK[: 60 * KIB])
        rounds += 1
    return rounds


def save_over(path: str, size_bytes: int, seconds: float) -> int:
    """Saves of a whole file over itself, as a trainer's; how many found no room."""
    full, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for _ in range(0, size_bytes, len(BLOCK)):
                os.write(fd, BLOCK)
        except OSError as error:
            full += _count_full(error)
        _close(fd)
    return full


def _count_full(error: OSError) -> int:
    if error.errno != errno.ENOSPC:
        raise error
    return 1


def _close(fd: int) -> None:
    """What had no room says so again here."""
    try:
        os.close(fd)
    except OSError as error:
        _count_full(error)


def _allow(descriptors: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, descriptors + SPARE_DESCRIPTORS), hard))
