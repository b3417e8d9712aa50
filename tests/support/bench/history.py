"""Section ``history``: what keeping history adds to a save.

Two stores of one size are mounted, one that keeps history and one that does not (which no mount
option does), and saved to in turns. Both were filled twice before: the store with history has to
give up versions for each save. Another part does the same with 95 % of both stores in use, and
looks at the slowest saves.

Never here: a verdict.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.units import KIB, MIB
from tests.support.bench.measure import (
    Figures,
    MissingError,
    Progress,
    Settings,
    median_ratio,
    require_memory,
)
from tests.support.bench.targets import ended_by, make_store, mounted, run_cxlfs

STORE_BYTES = 1536 * MIB
QUICK_STORE_BYTES = 192 * MIB
BLOCK_BYTES = MIB
SIZES = {"4K": 4 * KIB, "1M": MIB, "64M": 64 * MIB}
QUICK_SIZES = {"4K": 4 * KIB, "1M": MIB}
SAVED_BYTES = 640 * MIB
SAVES_MIN, SAVES_MAX = 10, 1000
"""Of each size in each run: as many as write SAVED_BYTES."""
FULL_SHARE = 0.95
FULL_SAVES, QUICK_FULL_SAVES = 10_000, 200
FULL_SAVE_BYTES = 64 * KIB
SLOW = 1.5
"""A save that takes more than so many times the median without history is counted."""
START_SECONDS = 30.0
_NAMES = 4
_BLOCK = random.Random(5).randbytes(BLOCK_BYTES)
_WITHOUT = """
import functools, sys
import cxlfs.daemon.service as service
from cxlfs.cli import main
service.StoreOptions = functools.partial(service.StoreOptions, history=False)
sys.argv[0] = "cxlfs"
main()
"""
"""A daemon in the foreground that keeps no history."""


def measure_history(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError."""
    size_bytes = settings.scaled(STORE_BYTES, QUICK_STORE_BYTES)
    require_memory(settings.memory, 2 * size_bytes)
    result: Figures = {}
    with (
        mounted(settings.memory / "with.img", size_bytes) as (kept, _),
        _without(settings.memory / "without.img", size_bytes) as plain,
    ):
        stores = [kept, plain]
        for store in stores:
            say("history: filling a store with versions")
            for number in range(2 * size_bytes // (16 * MIB)):
                _save(store / f"warm{number % _NAMES}", 16 * MIB)
        for name, size in (QUICK_SIZES if settings.quick else SIZES).items():
            say(f"history: saves of {name}")
            result[name] = _measure(settings, stores, size)
        say(f"history: {FULL_SHARE:.0%} full")
        for store in stores:
            _fill(store)
        result["full"] = _slowest(settings, stores)
    return result


@contextlib.contextmanager
def _without(source: Path, size_bytes: int) -> Iterator[Path]:
    """A mount without history."""
    make_store(source, size_bytes)
    target = Path(tempfile.mkdtemp(prefix="cxlfs-bench-"))
    command = [sys.executable, "-c", _WITHOUT, "mount", str(source), str(target), "--foreground"]
    daemon = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while not target.is_mount():
            if daemon.poll() is not None or time.monotonic() > until:
                raise MissingError("a daemon without history does not start")
            time.sleep(0.05)
        with ended_by(lambda: run_cxlfs("umount", str(target)), target):
            yield target
    finally:
        daemon.terminate()
        daemon.wait()
        source.unlink()
        target.rmdir()


def _save(path: Path, size: int, *, by_rename: bool = False) -> None:
    """Over one name, as torch.save does it, or under another name that is renamed."""
    made = path.with_suffix(".tmp") if by_rename else path
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for offset in range(0, size, BLOCK_BYTES):
        os.write(fd, memoryview(_BLOCK)[: min(BLOCK_BYTES, size - offset)])
    os.close(fd)
    if by_rename:
        made.rename(path)


def _timed(stores: list[Path], number: int, size: int, *, by_rename: bool) -> list[float]:
    """Seconds of one save in each store, which one first by turns."""
    taken = [0.0, 0.0]
    for which in (0, 1) if number % 2 else (1, 0):
        path = stores[which] / f"f{number % _NAMES}"
        began = time.perf_counter()
        _save(path, size, by_rename=by_rename)
        taken[which] = time.perf_counter() - began
    return taken


def _measure(settings: Settings, stores: list[Path], size: int) -> Figures:
    """Mean seconds of a save: what is slow now and then counts."""
    figures: Figures = {}
    saves = max(SAVES_MIN, min(SAVES_MAX, SAVED_BYTES // size))
    for way, by_rename in (("over", False), ("rename", True)):
        runs: list[list[float]] = []
        for run in settings.rounds():
            taken = [_timed(stores, n, size, by_rename=by_rename) for n in range(saves)]
            if run:
                runs.append([statistics.fmean(column) for column in zip(*taken, strict=True)])
        kept, plain = ([run[which] for run in runs] for which in (0, 1))
        figures[way] = {
            "with_s": statistics.median(kept),
            "without_s": statistics.median(plain),
            "ratio": median_ratio(kept, plain),
        }
    return figures


def _fill(store: Path) -> None:
    """Write until FULL_SHARE of what ``df`` says the store can hold is in use."""
    number = 0
    while True:
        told = os.statvfs(store)
        used = 1 - told.f_bavail / told.f_blocks
        if used >= FULL_SHARE:
            return
        wanted = int((FULL_SHARE - used) * told.f_blocks * told.f_frsize)
        size = min(16 * MIB, max(BLOCK_BYTES, wanted // BLOCK_BYTES * BLOCK_BYTES))
        _save(store / f"full{number}", size)
        number += 1


def _slowest(settings: Settings, stores: list[Path]) -> Figures:
    """Of many small saves over a few names, one after the other."""
    count = settings.scaled(FULL_SAVES, QUICK_FULL_SAVES)
    taken = [_timed(stores, n, FULL_SAVE_BYTES, by_rename=False) for n in range(count)]
    kept, plain = (sorted(column) for column in zip(*taken, strict=True))
    limit = SLOW * statistics.median(plain)
    return {
        "saves": count,
        "with": _spread(kept, limit),
        "without": _spread(plain, limit),
        "ratio": statistics.median(kept) / statistics.median(plain),
    }


def _spread(seconds: list[float], limit_s: float) -> Figures:
    return {
        "p50_s": statistics.median(seconds),
        "p99_s": seconds[len(seconds) * 99 // 100],
        "worst_s": seconds[-1],
        "slow_count": sum(each > limit_s for each in seconds),
    }
