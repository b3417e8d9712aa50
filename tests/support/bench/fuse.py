"""Section ``fuse``: a mounted store beside a bare FUSE server, which does what any such server has
to do and nothing else: writers, the time of each 4 KiB ``pwrite``, and of saving a small file.

Within a run every case is measured on all of them, one after the other; the first run is not
counted. Where client and server take turns it matters on which processors they are: the bare
server leaves that to the kernel, and is there once more, with client and server on one.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cxlfs.units import KIB, MIB
from tests.support.bench.bare import bare_mount
from tests.support.bench.latency import DATA, NAMES, replace
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    median_ratio,
    percentiles,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import mounted, warm
from tests.support.bench.workers import Job, Workers, bytes_per_second

COUNTS = (1, 2)
FILE_BYTES = 320 * MIB
QUICK_FILE_BYTES = 16 * MIB
STORE_SHARE = 8
"""A file is at most this part of the store: two writers keep the version before."""
PWRITE_BYTES, QUICK_PWRITE_BYTES = 8 * MIB, MIB
SAVES, QUICK_SAVES = 400, 50
STORE, BARE, BARE_ONE_CORE = "store", "bare", "bare_one_core"


class Served(NamedTuple):
    """``processor``: what server and client are bound to, if anything."""

    name: str
    directory: Path
    processor: int | None = None


def measure_fuse(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    files_bytes = max(COUNTS) * FILE_BYTES + 64 * MIB
    require_memory(settings.memory, settings.size_bytes + files_bytes)
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers())
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        say("fuse: making, mounting and touching the store; compiling a bare server")
        processor = min(os.sched_getaffinity(0))
        bare = stack.enter_context(bare_mount(settings.memory))
        bound = stack.enter_context(bare_mount(settings.memory, processor))
        source = settings.memory / "fuse.img"
        store, _pid = stack.enter_context(mounted(source, settings.size_bytes))
        warm(store, settings.size_bytes)
        targets = [Served(STORE, store), Served(BARE, bare)]
        return _measure(
            settings, say, yardstick, workers, [*targets, Served(BARE_ONE_CORE, bound, processor)]
        )


def _measure(
    settings: Settings,
    say: Progress,
    yardstick: Yardstick,
    workers: Workers,
    targets: Sequence[Served],
) -> Figures:
    rates: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, str], list[list[float]]] = {}
    raw: list[dict[str, float]] = []
    for run in settings.rounds():
        label = f"run {run}/{settings.runs}" if run else "a run that does not count"
        for count in COUNTS:
            yardstick.sample()
            for target in targets:
                if target.processor is None:
                    say(f"fuse: {label}: {count} writers on {target.name}")
                    rates.setdefault((target.name, count), []).append(
                        _rate(settings, workers, target, count)
                    )
        for target in targets:
            say(f"fuse: {label}: single calls on {target.name}")
            with _bound_to(target.processor):
                for kind, samples in _calls(settings, target.directory):
                    times.setdefault((kind, target.name), []).append(samples)
        raw.append(yardstick.take())
    counted = -settings.runs
    units = [each["copy"] for each in raw[counted:]]
    result: Figures = {"raw": raw_figures(raw[counted:]), "write": {}}
    for (name, count), values in rates.items():
        figures = rate_figures(values[counted:], units)
        figures["of_bare"] = median_ratio(values[counted:], rates[BARE, count][counted:])
        result["write"].setdefault(name, {})[str(count)] = figures
    for (kind, name), runs in times.items():
        result.setdefault(kind, {})[name] = _time_figures(runs[counted:], times[kind, BARE])
    return result


def _time_figures(runs: Sequence[Sequence[float]], bare: Sequence[Sequence[float]]) -> Figures:
    """``times_bare`` is the median of the runs' own ratios, of medians and of means."""
    figures = percentiles(sample for run in runs for sample in run)
    beside = bare[-len(runs) :]
    for name, average in (("p50", statistics.median), ("mean", statistics.fmean)):
        mine, others = ([average(run) for run in each] for each in (runs, beside))
        figures[f"{name}_times_bare"] = median_ratio(mine, others)
    figures["mean_s"] = statistics.fmean(sample for run in runs for sample in run)
    return figures


def _rate(settings: Settings, workers: Workers, target: Served, count: int) -> float:
    size = min(
        settings.scaled(FILE_BYTES, QUICK_FILE_BYTES),
        settings.size_bytes // STORE_SHARE // MIB * MIB,
    )
    jobs = [
        Job("write", str(target.directory / f"file-{index}"), MIB, size, sync=False)
        for index in range(count)
    ]
    return bytes_per_second(jobs, workers.run(jobs))


def _calls(settings: Settings, directory: Path) -> Iterator[tuple[str, list[float]]]:
    """Seconds of each 4 KiB pwrite, one after the other, and of each save of 4 KiB by rename."""
    calls = []
    fd = os.open(directory / "calls", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for offset in range(0, settings.scaled(PWRITE_BYTES, QUICK_PWRITE_BYTES), 4 * KIB):
        before = time.perf_counter()
        os.pwrite(fd, DATA, offset)
        calls.append(time.perf_counter() - before)
    os.close(fd)
    yield "pwrite_4kib", calls
    yield (
        "save",
        [
            replace(directory / "new", directory / f"final-{index % NAMES}", sync=False)
            for index in range(settings.scaled(SAVES, QUICK_SAVES))
        ],
    )


@contextlib.contextmanager
def _bound_to(processor: int | None) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    if processor is not None:
        os.sched_setaffinity(0, {processor})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
