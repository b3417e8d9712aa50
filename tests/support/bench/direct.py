"""Section ``direct``: programs that store file data by themselves, beside the same through the
kernel, tmpfs, and a plain copy into shared memory; readers, and how soon a mapping is there.

Within a run every case is measured in every way, one after the other, the yardstick before each
case. The first run is not counted.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs import client
from cxlfs.cli.run import environment_for, library_path
from cxlfs.units import MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    median_ratio,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import mounted, warm
from tests.support.bench.workers import Job, Workers, bytes_per_second

WRITE_BYTES = 320 * MIB
QUICK_DIVISOR = 8
STORE_SHARE = 8
"""A file is at most this part of the store: two writers keep the version before."""
COUNTS = (1, 2)
WAYS = {
    "kernel": ("write", "read"),
    "client": ("client_write", "client_read"),
    "mapped": (None, "mapped_read"),
    "preloaded": ("write", None),
    "tmpfs": ("write", "read"),
    "memcpy": ("memcpy", None),
    "raw": ("raw_copy", None),
    "kernel_large": ("write", None),
    "preloaded_large": ("write", None),
    "raw_large": ("raw_copy", None),
}
"""Kinds of jobs for writers and readers."""
LARGE_BYTES = 16 * MIB
"""What one call of the ways named large writes: savers write a tensor in one call."""
UNDER_RUN = ("preloaded", "preloaded_large")
IN_MEMORY = ("tmpfs", "memcpy", "raw", "raw_large")
FILES = {"mapped": "client"}
"""Whose files are read, where not one's own."""
MAP_TIMES = 5


def measure_direct(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    require_memory(settings.memory, settings.size_bytes + 4 * WRITE_BYTES)
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(Workers())
        with preloading():
            under = stack.enter_context(Workers())
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        say("direct: making, mounting and touching the store")
        source = settings.memory / "direct.img"
        store, _pid = stack.enter_context(mounted(source, settings.size_bytes))
        warm(store, settings.size_bytes)
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.memory)))
        return _measure(settings, say, yardstick, plain, under, store, memory)


def _measure(  # noqa: PLR0917  what one run needs
    settings: Settings,
    say: Progress,
    yardstick: Yardstick,
    plain: Workers,
    under: Workers,
    store: Path,
    memory: Path,
) -> Figures:
    file_bytes = min(
        WRITE_BYTES // (QUICK_DIVISOR if settings.quick else 1),
        settings.size_bytes // STORE_SHARE // MIB * MIB,
    )
    rates: dict[tuple[str, str, int], list[float]] = {}
    raw: list[dict[str, float]] = []
    opened: list[float] = []
    for run in settings.rounds():
        label = f"run {run}/{settings.runs}" if run else "a run that does not count"
        for kind, count, way in _cases():
            yardstick.sample()
            say(f"direct: {label}: {count} {kind}, {way}")
            directory = memory if way in IN_MEMORY else store
            job = WAYS[way][kind == "read"]
            jobs = [
                Job(
                    str(job),
                    str(directory / f"{FILES.get(way, way)}-{i}"),
                    LARGE_BYTES if way.endswith("_large") else MIB,
                    file_bytes,
                    sync=False,
                )
                for i in range(count)
            ]
            rate = bytes_per_second(jobs, (under if way in UNDER_RUN else plain).run(jobs))
            if run:
                rates.setdefault((kind, way, count), []).append(rate)
        if run:
            opened += _open_times(store / "client-0")
        taken = yardstick.take()
        if run:
            raw.append(taken)
    units = {"write": "copy", "read": "read_crc32c"}
    result: Figures = {"file_bytes": file_bytes, "raw": raw_figures(raw)}
    for (kind, way, count), values in rates.items():
        place = result.setdefault(kind, {}).setdefault(way, {})
        unit = "crc32c_of_memory" if way == "mapped" else units[kind]
        place[str(count)] = rate_figures(values, [each[unit] for each in raw])
    for count in COUNTS:
        beside = rates["write", "kernel", count]
        for way in ("client", "preloaded"):
            ratio = median_ratio(rates["write", way, count], beside)
            result["write"][way][str(count)]["of_kernel"] = ratio
        for way in ("kernel_large", "preloaded_large", "raw_large"):
            ratio = median_ratio(rates["write", way, count], rates["write", "raw_large", 1])
            result["write"][way][str(count)]["ratio"] = ratio
    result["map_s"] = statistics.median(opened)
    return result


@contextlib.contextmanager
def preloading() -> Iterator[None]:
    """What is started meanwhile is started as ``cxlfs run`` does it."""
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = environment_for(library_path(), os.environ)["LD_PRELOAD"]
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_PRELOAD"]
        else:
            os.environ["LD_PRELOAD"] = before


def _cases() -> Iterator[tuple[str, int, str]]:
    for count in COUNTS:
        for kind in ("write", "read"):
            for way, jobs in WAYS.items():
                if jobs[kind == "read"] is not None:
                    yield kind, count, way


def _open_times(path: Path) -> list[float]:
    """Seconds until a file is there as memory, nothing of it verified."""
    taken = []
    for _ in range(MAP_TIMES):
        began = time.perf_counter()
        with client.map(path, verify="no"):
            taken.append(time.perf_counter() - began)
    return taken
