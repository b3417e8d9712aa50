"""Section ``units``: saving a checkpoint directory in a unit, beside the same outside of one.

Two directories of one mount are saved in turn, which one first by turns; one of them is below a
policy. A save writes every file and then the marker; all of it is closed, so it is durable. Besides
the time of each pair the processor time of all of them is compared.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from cxlfs.units import KIB, MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    median_ratio,
    require_memory,
)
from tests.support.bench.targets import mounted, run_cxlfs, warm

MARKER = "trainer_state.json"
BLOCK_BYTES = MIB
SHAPES = {"8x32M": (8, 32 * MIB, 4 * MIB), "200x256K": (200, 256 * KIB, 256 * KIB)}
"""Name: files, bytes of each, and of each in a quick run."""
STORE_SHARE = 7
"""The store's size in states: of two directories old and new, and what was removed for a while."""
ROUNDS_EACH = 4
"""Pairs of saves in each run: a save takes a tenth of a second."""

Save = Callable[[Path, int, int], None]


def _write(path: Path, size: int, block: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        for offset in range(0, size, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, size - offset)])


def _save(directory: Path, count: int, size: int, *, by_rename: bool) -> None:
    block = memoryview(_BLOCK)
    for name in [*(f"shard-{number}" for number in range(count)), MARKER]:
        path = directory / name
        length = size if name != MARKER else 100
        if by_rename:
            temporary = directory / f"{name}.tmp"
            _write(temporary, length, block)
            temporary.rename(path)
        else:
            _write(path, length, block)


def _new(directory: Path, count: int, size: int) -> None:
    directory.mkdir()
    _save(directory, count, size, by_rename=False)


def _over(directory: Path, count: int, size: int) -> None:
    _save(directory, count, size, by_rename=False)


def _renamed(directory: Path, count: int, size: int) -> None:
    _save(directory, count, size, by_rename=True)


_BLOCK = os.urandom(BLOCK_BYTES)
WAYS: dict[str, Save] = {"new": _new, "over": _over, "rename": _renamed}


def measure_unit_saves(settings: Settings, say: Progress) -> Figures:
    """Seconds of each way to save each shape, inside and outside of a unit; raises MissingError."""
    sizes = {
        name: (count, settings.scaled(size, quick)) for name, (count, size, quick) in SHAPES.items()
    }
    store_bytes = STORE_SHARE * max(count * size for count, size in sizes.values()) + 128 * MIB
    require_memory(settings.memory, store_bytes)
    result: Figures = {}
    with mounted(settings.memory / "units.img", store_bytes) as (store, pid):
        say("units: touching the store")
        warm(store, store_bytes)
        places = [store / "inside", store / "outside"]
        for place in places:
            place.mkdir()
        run_cxlfs("policy", "set", str(places[0]), "--unit", "checkpoint-*", "--done", MARKER)
        for shape, (count, size) in sizes.items():
            for way, save in WAYS.items():
                say(f"units: {count} files of {size // KIB} KiB, {way}")
                result[f"{shape}_{way}"] = _measure(
                    places, lambda d, s=save, n=count, b=size: s(d, n, b), way, settings, pid
                )
    return result


def _measure(
    places: list[Path], save: Callable[[Path], None], way: str, settings: Settings, pid: int
) -> Figures:
    seconds: list[list[float]] = [[], []]
    busy_ns = [0, 0]
    for number in range(ROUNDS_EACH * settings.runs + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            directory = places[which] / "checkpoint-1"
            if number == 0 and way != "new":
                directory.mkdir()
            busy, began = _busy_ns(pid), time.perf_counter()
            save(directory)
            elapsed = time.perf_counter() - began
            if number:  # the first pair does not count
                seconds[which].append(elapsed)
                busy_ns[which] += _busy_ns(pid) - busy
            if way == "new":
                _remove(directory)
    if way != "new":
        for place in places:
            _remove(place / "checkpoint-1")
    return {
        "inside_s": statistics.median(seconds[0]),
        "outside_s": statistics.median(seconds[1]),
        "ratio": median_ratio(seconds[0], seconds[1]),
        "busy_ratio": busy_ns[0] / busy_ns[1],
        "runs_inside_s": seconds[0],
        "runs_outside_s": seconds[1],
    }


def _busy_ns(pid: int) -> int:
    """Processor time of a daemon and of this process, which others on the machine change little."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    daemon = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    return daemon + time.process_time_ns()


def _remove(directory: Path) -> None:
    """For good at once: what has another name is no unit."""
    aside = directory.parent / "removed"
    directory.rename(aside)
    shutil.rmtree(aside)
