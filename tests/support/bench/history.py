"""Section ``history``: what keeping history adds to a save.

Two stores of one size, one that keeps history and one that does not, are used without a mount and
in turns, so that nothing but the store is compared. The store with history is full of dead versions
before it is measured: each save has to give up some. A second part does the same with 95 % of both
stores in use, and looks at the slowest saves.

Never here: a verdict.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.media import open_media
from cxlfs.store import Store, StoreOptions
from cxlfs.types import ROOT_INO
from cxlfs.units import KIB, MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    median_ratio,
    require_memory,
)

STORE_BYTES = 1536 * MIB
QUICK_STORE_BYTES = 192 * MIB
SEGMENT_BYTES = 16 * MIB
QUICK_SEGMENT_BYTES = 2 * MIB
BLOCK_BYTES = MIB
SIZES = {"4K": 4 * KIB, "1M": MIB, "64M": 64 * MIB}
QUICK_SIZES = {"4K": 4 * KIB, "1M": MIB}
SAVED_BYTES = 640 * MIB
SAVES_MIN, SAVES_MAX = 10, 2000
"""Of each size in each run: as many as write SAVED_BYTES."""
FULL_SHARE = 0.95
FULL_SAVES, QUICK_FULL_SAVES = 10_000, 200
FULL_SAVE_BYTES = 64 * KIB
SLOW = 1.5
"""A save that takes more than so many times the median without history is counted."""
_NAMES = 4
_BLOCK = random.Random(5).randbytes(BLOCK_BYTES)


def measure_history(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError."""
    size_bytes = settings.scaled(STORE_BYTES, QUICK_STORE_BYTES)
    require_memory(settings.memory, 2 * size_bytes)
    segment_bytes = settings.scaled(SEGMENT_BYTES, QUICK_SEGMENT_BYTES)
    with _pair(settings.memory, size_bytes, segment_bytes) as stores:
        result: Figures = {}
        for store in stores:
            say("history: filling a store with versions")
            for number in range(2 * size_bytes // (16 * MIB)):
                _save(store, b"warm%d" % (number % _NAMES), 16 * MIB)
        for name, size in (QUICK_SIZES if settings.quick else SIZES).items():
            say(f"history: saves of {name}")
            result[name] = _measure(settings, stores, size)
        say(f"history: {FULL_SHARE:.0%} full")
        for store in stores:
            _fill(store)
        result["full"] = _slowest(settings, stores)
        return result


@contextlib.contextmanager
def _pair(directory: Path, size_bytes: int, segment_bytes: int) -> Iterator[list[Store]]:
    """The store with history, and the one without."""
    paths = [directory / "with.img", directory / "without.img"]
    with contextlib.ExitStack() as stack:
        stores = []
        for path, history in zip(paths, (True, False), strict=True):
            media = open_media(str(path), create_size_bytes=size_bytes)
            stack.callback(path.unlink)
            stack.callback(media.close)
            Store.format(media, segment_size_bytes=segment_bytes)
            store = Store.open(media, StoreOptions(history=history))
            stack.callback(store.close)
            stores.append(store)
        yield stores


def _save(store: Store, name: bytes, size: int, *, by_rename: bool = False) -> None:
    """Over one name, as torch.save does it, or under another name that is renamed."""
    made = name + b".tmp" if by_rename else name
    inode = store.namespace.find(ROOT_INO, made)
    if inode is None:
        _, handle = store.create(ROOT_INO, made, 0o644, 0, 0, os.O_WRONLY)
    else:
        handle = store.open_file(inode.ino, os.O_WRONLY | os.O_TRUNC)
    for offset in range(0, size, BLOCK_BYTES):
        store.write(handle, offset, memoryview(_BLOCK)[: min(BLOCK_BYTES, size - offset)])
    store.flush(handle, writer_killed=False)
    store.release(handle)
    if by_rename:
        store.rename(ROOT_INO, made, ROOT_INO, name)


def _timed(stores: list[Store], number: int, size: int, *, by_rename: bool) -> list[float]:
    """Seconds of one save in each store, and of a step of the work behind it, which one first by
    turns.
    """
    taken = [0.0, 0.0]
    for which in (0, 1) if number % 2 else (1, 0):
        began = time.perf_counter()
        _save(stores[which], b"f%d" % (number % _NAMES), size, by_rename=by_rename)
        stores[which].maintain(time.monotonic())
        taken[which] = time.perf_counter() - began
    return taken


def _measure(settings: Settings, stores: list[Store], size: int) -> Figures:
    """Mean seconds of a save, with the time of giving up versions."""
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


def _fill(store: Store) -> None:
    """Write until FULL_SHARE of what the store can hold is in use."""
    number = 0
    while True:
        told = store.statfs()
        used = 1 - told.free_bytes / told.total_bytes
        if used >= FULL_SHARE:
            return
        size = min(16 * MIB, max(BLOCK_BYTES, int((FULL_SHARE - used) * told.total_bytes)))
        _save(store, b"full%d" % number, size // BLOCK_BYTES * BLOCK_BYTES)
        number += 1


def _slowest(settings: Settings, stores: list[Store]) -> Figures:
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
