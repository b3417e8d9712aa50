"""How long reading a saved file back takes: by the kernel, and in place, in turns.

In place as a rank does that has saved through the kernel: it maps the medium anew each time.
"""

from __future__ import annotations

import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from cxlfs import client
from cxlfs.durable import opened_file, size_and_crc32c
from cxlfs.errors import JobFilesError
from cxlfs.job.reading_back import read_back

ROUNDS = 7
_PATTERN_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ReadingBack:
    """GB/s, and of each round the one beside the other."""

    size_bytes: int
    is_direct: bool
    kernel: float
    in_place: float
    ratio: float
    ratio_least: float


def measure_reading_back(directory: Path, size_bytes: int) -> ReadingBack:
    path = directory / "read-back"
    pattern = random.Random(size_bytes).randbytes(_PATTERN_BYTES)
    with path.open("wb") as file:
        for _ in range(size_bytes // _PATTERN_BYTES):
            file.write(pattern)
        os.fsync(file.fileno())
    try:
        is_direct = len(client.StoredFile(path)) == size_bytes
    except OSError:
        is_direct = False
    ways: list[list[float]] = [[], []]
    found = set()
    for _ in range(ROUNDS):
        for way, look in zip(ways, (_by_the_kernel, read_back), strict=True):
            client.forget()
            seconds, said = _timed(look, path)
            way.append(seconds)
            found.add(said)
    if len(found) != 1:
        raise AssertionError(f"they differ: {found}")
    path.unlink()
    ratios = sorted(kernel / in_place for kernel, in_place in zip(*ways, strict=True))
    speeds = [size_bytes / statistics.median(way) / 1e9 for way in ways]
    return ReadingBack(size_bytes, is_direct, *speeds, statistics.median(ratios), ratios[0])


def _timed(look: Callable[[Path], tuple[int, int]], path: Path) -> tuple[float, tuple[int, int]]:
    begin = time.monotonic()
    said = look(path)
    return time.monotonic() - begin, said


def _by_the_kernel(path: Path) -> tuple[int, int]:
    with opened_file(path, JobFilesError) as (descriptor, _):
        return size_and_crc32c(descriptor)
