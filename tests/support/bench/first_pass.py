"""Section ``first_pass``: the first pass over a store after mounting beside the second one.

What the first one pays for are page faults. On a store that was just made the pages of the file
are not there yet: each is found and zeroed. On one that was used before they are, and only the
daemon's mapping of them is new. The same is done to plain memory in the same run.

Each pass writes a file of PASS_SHARE of the store, which is removed before the next one; the
passes that read read the last one.
"""

from __future__ import annotations

import time
from pathlib import Path

from cxlfs.media import open_media
from cxlfs.units import GIB, MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import make_store, served_once, statistics_of
from tests.support.bench.workers import Job, WorkError, Workers, bytes_per_second

CASES = {
    "new_write": "write, store just made",
    "mounted_again_write": "write, mounted again",
    "mounted_again_read": "read, mounted again",
}
STORE_BYTES_MAX = GIB
PASS_SHARE = 0.75
_PATIENCE_SECONDS = 30.0
_POLL_SECONDS = 0.1


def measure_first_pass(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    size_bytes = min(settings.size_bytes, STORE_BYTES_MAX)
    pass_bytes = int(size_bytes * PASS_SHARE) // MIB * MIB
    require_memory(settings.memory, size_bytes + pass_bytes)
    rates: dict[str, dict[str, list[float]]] = {
        name: {"first": [], "later": []} for name in (*CASES, "memory")
    }
    raw: list[dict[str, float]] = []
    with Workers() as workers, Yardstick(settings.memory, quick=settings.quick) as yardstick:
        for run in settings.rounds():
            label = f"first_pass: run {run}/{settings.runs}"
            found: dict[str, tuple[float, float]] = {}
            yardstick.sample()
            say(f"{label}: plain memory")
            found["memory"] = _of_memory(settings.memory / "memory.img", pass_bytes)
            found |= _of_store(
                settings.memory / "first.img", size_bytes, pass_bytes, workers, label, say
            )
            yardstick.sample()
            taken = yardstick.take()
            if run:
                raw.append(taken)
                for name, (first, later) in found.items():
                    rates[name]["first"].append(first)
                    rates[name]["later"].append(later)
    result: Figures = {"pass_bytes": pass_bytes, "raw": raw_figures(raw)}
    for name, of in rates.items():
        result[name] = {which: rate_figures(of[which], of["later"]) for which in of}
    return result


def _of_memory(path: Path, pass_bytes: int) -> tuple[float, float]:
    """Rates of copying into the mapping of a new file, and once more into the same pages."""
    block = bytes(range(256)) * (MIB // 256)
    media = open_media(str(path), create_size_bytes=pass_bytes)
    rates = []
    for _ in range(2):
        began = time.perf_counter()
        for offset in range(0, pass_bytes, MIB):
            media.copy(offset, block)
        rates.append(pass_bytes / (time.perf_counter() - began))
    media.close()
    path.unlink()
    return rates[0], rates[1]


def _of_store(
    source: Path, size_bytes: int, pass_bytes: int, workers: Workers, label: str, say: Progress
) -> dict[str, tuple[float, float]]:
    def passes(case: str, kind: str, directory: Path) -> tuple[float, float]:
        path, rates = directory / "file", []
        for which in ("first", "later"):
            say(f"{label}: {CASES[case]}: {which} pass")
            if kind == "write":
                remove_file(directory, path, pass_bytes)
            jobs = [Job(kind, str(path), MIB, pass_bytes, sync=False)]
            rates.append(bytes_per_second(jobs, workers.run(jobs)))
        return rates[0], rates[1]

    found = {}
    make_store(source, size_bytes)
    try:
        for case in CASES:
            with served_once(source) as (directory, _pid):
                found[case] = passes(case, case.rpartition("_")[2], directory)
    finally:
        source.unlink()
    return found


def remove_file(directory: Path, path: Path, pass_bytes: int) -> None:
    """And wait until there is room for the next pass without anything having to make it."""
    path.unlink(missing_ok=True)
    until = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        found = statistics_of(directory)
        if found["segments_free"] * found["segment_size_bytes"] > pass_bytes:
            return
        time.sleep(_POLL_SECONDS)
    raise WorkError(f"no room for a pass {_PATIENCE_SECONDS:.0f} s after the last one was removed")
