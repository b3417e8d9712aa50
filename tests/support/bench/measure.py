"""What every section needs: its settings, the yardstick, statistics, progress, the machine.

Invariants
- A ratio is the median of the ratios of single runs, each to the yardstick of that run: a machine
  that is slower for a minute is slower for both.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from cxlfs.media import open_media
from cxlfs.native import crc32c, routines
from cxlfs.units import GIB, KIB, MIB, format_size

Figures = dict[str, Any]
"""A part of the JSON document: strings, numbers, lists and dictionaries of them."""
RAW_BYTES = 128 * MIB
"""Of the region that the yardstick copies into: far more than the caches hold."""
RAW_PASSES = 4
"""Over it for one sample, so that it takes as long as a case: on a machine that others use a sample
of some milliseconds is seldom interrupted, and a case always is."""
SPARE_BYTES = GIB
"""Left free in memory beside what a section needs."""


class MissingError(Exception):
    """Something that a section needs is not on this machine; the message says what."""


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. Sizes in bytes; directories exist."""

    size_bytes: int
    state_bytes: int
    runs: int
    quick: bool
    memory: Path
    """A private directory on tmpfs."""
    disk: Path
    """A private directory on a disk."""
    passthrough: str | None
    with_peers: bool

    def scaled(self, count: int, quick_count: int) -> int:
        return quick_count if self.quick else count

    def rounds(self) -> range:
        """The numbers of the runs: from 0, which does not count; a quick run has none of that."""
        return range(1 if self.quick else 0, self.runs + 1)


class Progress:
    """Says on stderr what runs now: on a terminal one line that changes, else one for each."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:6.1f} s] {text}"
        if self._is_terminal:
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r\033[K{line[:columns]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print(file=sys.stderr, flush=True)


class Yardstick:
    """Non-temporal copy into a touched mapping on tmpfs, CRC32C of a block in the cache, CRC32C of
    the mapping itself, and copying it out with its CRC32C: each of one core, in bytes per second.
    """

    NAMES = ("copy", "crc32c", "crc32c_of_memory", "read_crc32c")

    def __init__(self, directory: Path, *, quick: bool) -> None:
        self._passes = 1 if quick else RAW_PASSES
        self._path = directory / "raw.img"
        self._block = random.Random(1).randbytes(MIB)
        self._target = bytearray(MIB)
        self._media = open_media(str(self._path), create_size_bytes=RAW_BYTES)
        self.samples: dict[str, list[float]] = {name: [] for name in self.NAMES}
        self.sample()  # touches every page
        self.restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self._media.close()
        self._path.unlink()

    def sample(self) -> None:
        actions: dict[str, Callable[[int], object]] = {
            "copy": lambda i: self._media.copy(i * MIB, self._block),
            "crc32c": lambda _i: crc32c(self._block),
            "crc32c_of_memory": lambda i: self._media.crc32c(i * MIB, MIB),
            "read_crc32c": lambda i: self._media.read_into_crc32c(i * MIB, self._target),
        }
        for name, action in actions.items():
            began = time.perf_counter()
            for _ in range(self._passes):
                for index in range(RAW_BYTES // MIB):
                    action(index)
            elapsed = time.perf_counter() - began
            self.samples[name].append(self._passes * RAW_BYTES / elapsed)

    def restart(self) -> None:
        for samples in self.samples.values():
            samples.clear()

    def take(self) -> dict[str, float]:
        """The medians since the last call."""
        result = {name: statistics.median(samples) for name, samples in self.samples.items()}
        self.restart()
        return result


def raw_figures(taken: Sequence[dict[str, float]]) -> Figures:
    """Of the yardstick's medians of each run."""
    return {
        f"{name}_bytes_per_s": statistics.median(run[name] for run in taken)
        for name in Yardstick.NAMES
    }


def rate_figures(rates: Sequence[float], units: Sequence[float]) -> Figures:
    """A rate in bytes per second of each run, and what it is divided by in each."""
    return {
        "bytes_per_s": statistics.median(rates),
        "ratio": median_ratio(rates, units),
        "runs_bytes_per_s": list(rates),
    }


def median_ratio(values: Sequence[float], units: Sequence[float]) -> float:
    return statistics.median(v / u for v, u in zip(values, units, strict=True))


def percentiles(samples: Iterable[float]) -> Figures:
    """Of seconds."""
    ordered = sorted(samples)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]

    return {
        "p50_s": statistics.median(ordered),
        "p90_s": at(0.9),
        "p99_s": at(0.99),
        "count": len(ordered),
    }


def require_memory(directory: Path, needed_bytes: int) -> None:
    """Raises MissingError when tmpfs or the machine has no room for it."""
    text = Path("/proc/meminfo").read_text(encoding="ascii")
    found = re.search(r"MemAvailable:\s+(\d+) kB", text)
    available = int(found[1]) * KIB if found else needed_bytes + SPARE_BYTES
    free = min(available, shutil.disk_usage(directory).free)
    if free < needed_bytes + SPARE_BYTES:
        raise MissingError(
            f"needs {format_size(needed_bytes + SPARE_BYTES)} of memory with what stays free, "
            f"{directory} offers {format_size(free)}: give a smaller --size or --state-size, or "
            "another tmpfs with --memory"
        )


def private_bytes(pid: int) -> int:
    """Anonymous memory of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    found = re.search(r"RssAnon:\s+(\d+) kB", text)
    return int(found[1]) * KIB if found else 0


def _halt_poll_ns() -> int | None:
    """How long an idle processor of a virtual machine waits before it halts, from where waking it
    takes the host; None where that is no question.
    """
    try:
        return int(Path("/sys/module/haltpoll/parameters/guest_halt_poll_ns").read_text("ascii"))
    except (OSError, ValueError):
        return None


def machine() -> Figures:
    model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    chosen = routines()
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "copy": chosen.copy,
        "crc32c": chosen.crc32c,
        "halt_poll_ns": _halt_poll_ns(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[0],
    }
