"""Programs of the guest that store, read and map files of the mount by themselves:

    python -m tests.vm.direct_programs write PATH SEED MIB THREADS
    python -m tests.vm.direct_programs hold PATH MAPPED SEED MIB
    python -m tests.vm.direct_programs plain SOURCE TARGET SEED MIB

The first tells what it counted. The second writes PATH, has MAPPED as memory, a child with the same
memory, and a lease; it says "ready", and for each line that it is given looks at the memory again,
and stores on. The third uses nothing of cxlfs: it is to run under ``cxlfs run``.

Never here: commands, judging anything but bytes.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.vm.ledger import content

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_size_t(-1).value
MIB = 1 << 20
PIECE_BYTES = 3 * MIB // 4
ROOM_BYTES = 512 << 10
"""Less than the least room that is left of a lease: it is stored without a question."""


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def write(path: str, seed: str, mib: str, threads: str) -> None:
    """Pieces that end nowhere in particular, by several threads."""
    from cxlfs import client

    data, count = memoryview(content(seed, int(mib) * MIB)), int(threads)
    with client.open(path, "wb") as file:

        def work(number: int) -> None:
            for start in range(number * PIECE_BYTES, len(data), count * PIECE_BYTES):
                file.write_at(data[start : start + PIECE_BYTES], start)

        workers = [threading.Thread(target=work, args=(number,)) for number in range(count)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        say(direct=file.direct, why_not=file.why_not, **client.counts()._asdict())


def hold(path: str, mapped: str, seed: str, mib: str) -> None:
    """Until it is killed; its child goes when it does, for a pipe ends then."""
    from cxlfs import client

    data = content(seed, int(mib) * MIB)
    file = client.open(path, "wb")
    file.write(data[: 2 * MIB])
    file.flush()
    memory = client.map(mapped, verify="no")
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.close(write_end)
        os.read(read_end, 1)
        os._exit(0)
    say(state="ready", direct=file.direct, mapped=memory.direct, copied=memory.copied_bytes)
    for _line in sys.stdin:
        error = ""
        try:
            file.write_at(data[:ROOM_BYTES], 2 * MIB)
            file.flush()
        except OSError as wrong:
            error = os.strerror(wrong.errno or 0)
        say(same=memory.view == data, error=error)


def _same(view: mmap.mmap | memoryview, data: bytes) -> None:
    if view[:] != data:
        raise SystemExit(f"{sys.argv[2]}: {len(data)} bytes are not what they were")


def plain(source: str, target: str, seed: str, mib: str) -> None:
    """Copies a file, reads both, maps one in each way, and takes mappings apart."""
    data = content(seed, int(mib) * MIB)
    with Path(source).open("rb") as file:
        _same(memoryview(file.read()), data)
    with Path(target).open("wb") as file:
        file.writelines(
            data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)
        )
    with Path(target).open("rb") as file:
        _same(memoryview(file.read()), data)
        kept: list[mmap.mmap] = []
        ways: tuple[tuple[int, int], ...] = (
            (mmap.MAP_PRIVATE, mmap.PROT_READ),
            (mmap.MAP_SHARED, mmap.PROT_READ),
            (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
            (mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE),
        )
        for flags, protection in ways:
            memory = mmap.mmap(file.fileno(), 0, flags=flags, prot=protection)
            _same(memory, data)
            if protection & mmap.PROT_WRITE:
                memory[5 * mmap.PAGESIZE : 6 * mmap.PAGESIZE] = bytes(mmap.PAGESIZE)
            kept.append(memory)
        _take_apart(file.fileno(), data)
        file.seek(0)
        _same(memoryview(file.read()), data)  # what was written to its memory is not the file's


def _take_apart(descriptor: int, data: bytes) -> None:
    """Map a part of it, and unmap every second piece of that, of which none begins or ends with a
    large page, and then the others, each looked at before.
    """
    start, length = MIB + 3 * mmap.PAGESIZE, len(data) - 3 * MIB
    places = [*range(0, length, 333 * mmap.PAGESIZE), length]
    pieces = list(itertools.pairwise(places))
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, start)
    if address == _MAP_FAILED:
        raise SystemExit(f"mmap of a part: {os.strerror(ctypes.get_errno())}")
    for first, last in (*pieces[1::2], *pieces[::2]):
        _same(memoryview(ctypes.string_at(address + first, last - first)), data[start:][first:last])
        if _libc.munmap(address + first, last - first) != 0:
            raise SystemExit(f"munmap of a part: {os.strerror(ctypes.get_errno())}")


ROLES: dict[str, Callable[..., None]] = {"write": write, "hold": hold, "plain": plain}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
