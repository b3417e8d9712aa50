"""Section ``latency``: how long single calls take, and how many small files a second.

A store in a file on tmpfs, also with processors that stay awake, and one on a disk, and beside them
tmpfs and the disk themselves. Each run measures all of them, one after the other; the first run is
not counted.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from cxlfs.daemon import linux
from cxlfs.units import KIB, MIB
from tests.support.bench.measure import Figures, Progress, Settings, percentiles, require_memory
from tests.support.bench.targets import Target, file_system_of, mounted

STORE_BYTES = 512 * MIB
DATA = random.Random(4).randbytes(4 * KIB)
NAMES = 50
"""Names that are replaced in turn."""


def measure_latency(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError."""
    require_memory(settings.memory, STORE_BYTES + 64 * MIB)
    calls: dict[str, dict[str, list[float]]] = {}
    rates: dict[str, dict[str, list[float]]] = {}
    with contextlib.ExitStack() as stack:
        targets = _targets(stack, settings)
        for run in settings.rounds():
            label = f"run {run}/{settings.runs}" if run else "a run that does not count"
            for target in targets:
                say(f"latency: {label}: {target.name}")
                with linux.wakeup_latency_limit(0) if target.awake else contextlib.nullcontext():
                    measured = _calls(target, settings.scaled(200, 20))
                    counted = _small_files(target.directory, settings.scaled(1000, 100))
                if not run:
                    continue
                for name, samples in measured.items():
                    calls.setdefault(target.name, {}).setdefault(name, []).extend(samples)
                for name, rate in counted.items():
                    rates.setdefault(target.name, {}).setdefault(name, []).append(rate)
    return {
        "disk": file_system_of(settings.disk),
        **{
            name: {
                **{call: percentiles(samples) for call, samples in calls[name].items()},
                **{kind: statistics.median(values) for kind, values in rates[name].items()},
            }
            for name in calls
        },
    }


def _targets(stack: contextlib.ExitStack, settings: Settings) -> list[Target]:
    result = []
    for name, parent in (("tmpfs", settings.memory), ("disk", settings.disk)):
        store, _pid = stack.enter_context(mounted(parent / "small.img", STORE_BYTES))
        result.append(Target(f"store_on_{name}", store))
        if name == "tmpfs" and os.access(linux.CPU_LATENCY_DEVICE, os.W_OK):
            result.append(Target("store_on_tmpfs_awake", store, awake=True))
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="bench-"))
        # On a disk a file replaced by rename is safe after an fsync; a store needs none.
        result.append(Target(name, Path(own), sync=name == "disk"))
    return result


def _calls(target: Target, count: int) -> dict[str, list[float]]:
    """Seconds of each fsync, close and rename, and of a whole save of 4 KiB by rename."""
    directory = target.directory
    samples: dict[str, list[float]] = {"fsync": [], "close": [], "rename": [], "replace": []}
    clock = time.perf_counter
    for index in range(count):
        fd = os.open(directory / "synced", os.O_WRONLY | os.O_CREAT, 0o644)
        os.pwrite(fd, DATA, index * len(DATA))
        began = clock()
        os.fsync(fd)
        samples["fsync"].append(clock() - began)
        os.close(fd)
        fd = os.open(directory / "closed", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(fd, DATA)
        began = clock()
        os.close(fd)
        samples["close"].append(clock() - began)
        final = directory / f"final-{index % NAMES}"
        began = clock()
        os.rename(directory / "closed", final)  # noqa: PTH104  the call itself is timed
        samples["rename"].append(clock() - began)
        samples["replace"].append(replace(directory / "new", final, sync=target.sync))
    return samples


def replace(temporary: Path, final: Path, *, sync: bool) -> float:
    """Create, write 4 KiB, close, and rename over an older file."""
    began = time.perf_counter()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(fd, DATA)
    if sync:
        os.fsync(fd)
    os.close(fd)
    os.rename(temporary, final)  # noqa: PTH104  as above
    return time.perf_counter() - began


def _small_files(directory: Path, count: int) -> dict[str, float]:
    """Empty files made, looked at and removed, each per second."""
    below = directory / "many"
    below.mkdir()
    paths = [str(below / f"file-{index:05d}") for index in range(count)]
    moments = [time.perf_counter()]
    for path in paths:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
    moments.append(time.perf_counter())
    for path in paths:
        os.stat(path)  # noqa: PTH116  the call itself is timed
    moments.append(time.perf_counter())
    for path in paths:
        os.unlink(path)  # noqa: PTH108  as above
    moments.append(time.perf_counter())
    below.rmdir()
    kinds = ("creates_per_s", "stats_per_s", "unlinks_per_s")
    return {kind: count / (moments[i + 1] - moments[i]) for i, kind in enumerate(kinds)}
