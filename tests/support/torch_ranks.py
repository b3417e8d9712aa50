"""Starts of a job as torchrun makes them, cheaper: a program that has imported PyTorch once forks
the ranks of each start, which meet over gloo.

A program of a test imports this and calls ``start``; the test runs it with ``run_program``.

Invariants
- As under torchrun, a rank that fails ends the others, and the environment of each says which
  rank of how many it is.
- Nothing outlives the program.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.support.repository import ROOT

SECONDS = 200


def run_program(program: str, where: Path, *arguments: object) -> str:
    """What it, and every rank that it started, printed."""
    script = where / "program.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def say(text: str) -> None:
    """A line of its own, whatever other ranks say meanwhile."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def as_node(mountpoint: str, at: str) -> None:
    """This process, and what it begins, sees that mount at ``at``, as on a node of its own. Needs
    root; called before there are other threads.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    clone_newns, recursive, bind, private = 0x20000, 0x4000, 0x1000, 1 << 18
    calls = [
        ("unshare", (clone_newns,)),
        ("mount", (b"none", b"/", None, recursive | private, None)),
        ("mount", (mountpoint.encode(), at.encode(), None, bind, None)),
    ]
    for name, given in calls:
        if getattr(libc, name)(*given) != 0:
            raise OSError(ctypes.get_errno(), name)


def on_nodes(mountpoints: Sequence[str], at: str) -> Callable[[int], object]:
    """The ``first`` of ``start``: each rank finds at ``at`` the store of its own node."""
    return lambda rank: as_node(mountpoints[rank], at)


def start(
    ranks: int,
    task: Callable[..., object],
    *arguments: object,
    first: Callable[[int], object] | None = None,
) -> bool:
    """Whether all ranks ended well; each is in a process group, which is gone when this returns.
    ``first`` is called with the rank, before there is anything but Python.
    """
    sys.stdout.flush()
    reader, writer = os.pipe()
    children = []
    port = b""
    for rank in range(ranks):
        before = [] if first is None else [functools.partial(first, rank)]
        join = functools.partial(_join, rank, ranks, port, writer)
        work = functools.partial(_be, [*before, join, functools.partial(task, *arguments), _leave])
        children.append(_fork(work))
        port = port or os.read(reader, 16)  # where rank 0 listens: only then are there others
    os.close(reader)
    os.close(writer)
    is_well = True
    while children:
        pid, status = os.wait()
        children.remove(pid)
        if status and is_well:
            is_well = False
            for child in children:
                os.kill(child, signal.SIGTERM)
    return is_well


def _fork(work: Callable[[], object]) -> int:
    """This process has one thread: what a fork takes along is whole."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
    except BaseException:  # noqa: BLE001 - nothing may go on as the parent in a child
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def _be(parts: list[Callable[[], object]]) -> None:
    for part in parts:
        part()


def _join(rank: int, ranks: int, port: bytes, writer: int) -> None:
    from torch import distributed

    store = distributed.TCPStore(
        "127.0.0.1", int(port or 0), is_master=rank == 0, wait_for_workers=False
    )
    if rank == 0:
        os.write(writer, str(store.port).encode())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "GROUP_RANK": 0}
    os.environ.update({name: str(value) for name, value in names.items()})
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)


def _leave() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()
