"""One of two processes that copy shards to each other's store: raw gloo, the copy, and the same
work without the way, in turns. ``scripts/bench-copies`` runs two of these.

    python -m tests.support.bench.copies DIRECTORY SIZE_BYTES FILES RUNS
"""

from __future__ import annotations

import collections
import json
import os
import sys
import time
from pathlib import Path

from cxlfs.job import copying, files
from cxlfs.job.copying import PIECE_BYTES, PIECES_IN_FLIGHT
from cxlfs.job.engines import Link, Pending
from cxlfs.job.engines.torch import TorchEngine
from cxlfs.job.protocol import Attempt

ATTEMPT = Attempt(1, 1, "0" * 16)
SECONDS = 120.0


def raw(link: Link, size_bytes: int, *, sends: bool) -> None:
    """As many bytes, from memory into memory, in the same pieces."""
    buffers = [bytearray(os.urandom(PIECE_BYTES)) for _ in range(PIECES_IN_FLIGHT)]
    waiting: collections.deque[Pending] = collections.deque()
    for number in range(size_bytes // PIECE_BYTES):
        if len(waiting) == PIECES_IN_FLIGHT:
            waiting.popleft().wait()
        buffer = buffers[number % PIECES_IN_FLIGHT]
        waiting.append(link.send(buffer) if sends else link.receive(buffer))
    while waiting:
        waiting.popleft().wait()


def alone(source: Path, root: Path, manifest: files.Manifest) -> None:
    """What both ends do: read, compare, reserve, write, sync, read back; on one processor."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    copying._reserve(manifest, root)
    staged = files.staging_path(root, manifest.attempt, manifest.rank)
    buffer = memoryview(bytearray(PIECE_BYTES))
    with (
        copying._Reader(source, manifest.shards) as reader,
        copying._Writer(staged, manifest.shards) as writer,
    ):
        for parts in copying._pieces(manifest.shards):
            reader.fill(parts, buffer)
            writer.take(parts, buffer)
        copying._finish(writer, manifest, root)
    os.sched_setaffinity(0, processors)


def saved(root: Path, size_bytes: int, count: int) -> files.Manifest:
    directory = files.begin(root, ATTEMPT, 0)
    for number in range(count):
        with (directory / f"{number}.bin").open("wb") as file:
            for _ in range(size_bytes // count // PIECE_BYTES):
                file.write(os.urandom(PIECE_BYTES))
    manifest = files.Manifest(ATTEMPT, 0, 2, "", "", files.Medium(), files.measure(directory))
    files.seal(root, manifest)
    return manifest


def main() -> None:
    from torch import distributed

    where, size_bytes, count, runs = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    distributed.init_process_group("gloo")
    engine = TorchEngine()
    rank = engine.world().rank
    own, source = where / str(rank), files.rank_path(where / "0", ATTEMPT, 0)
    own.mkdir()
    if rank == 0:
        saved(own, size_bytes, count)
    distributed.barrier()
    data = (source / files.MANIFEST_NAME).read_bytes()
    for run in range(runs + 1):  # the first does not count
        took = {}
        for what in ("raw", "copy", "alone"):
            link = engine.link(1 - rank, f"{what}{run}", SECONDS)
            distributed.barrier()
            begun = time.perf_counter()
            if what == "raw":
                raw(link, size_bytes, sends=rank == 0)
            elif what == "copy" and rank == 0:
                copying.send(link, source, data)
            elif what == "copy":
                copying.receive(link, own, copying.Wanted(ATTEMPT, 0, 2))
            elif rank == 1:
                alone(source, own, files.decode_manifest(data, source))
            took[what] = time.perf_counter() - begun
            distributed.barrier()
            link.close(is_done=True)
            if rank == 1:
                files.remove_rank(own, ATTEMPT, 0)
        if rank == 1 and run:
            print(json.dumps(took), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
