"""Section ``fragmentation``: how fast a file is read from front to back when it was just written,
when it was overwritten at random places, and when the daemon has gathered its pieces; how long that
takes; and what the first write to a file in pieces costs.

While the writer has the file open the daemon leaves it as it is, so nothing changes under the
reads that are to find it in pieces.
"""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from cxlfs.media import Granularity, MemoryMedia
from cxlfs.store import Store
from cxlfs.units import GIB, KIB, MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import mounted, statistics_of, warm
from tests.support.bench.workers import Job, WorkError, Workers, bytes_per_second

STATES = ("fresh", "fragmented", "gathered")
STORE_BYTES_MAX = 2 * GIB
FILE_SHARE = 8
"""Of the store: there is room to gather, and nothing to clean."""
WRITE_BYTES = 4 * KIB
READS = 3
POLL_SECONDS = 0.1
STILL_SECONDS = 2.0
"""Nothing was moved for so long: it is done."""
PATIENCE_SECONDS = 120.0
REFERENCES = (100_000, 500_000)
QUICK_REFERENCES = (1000, 5000)
_NEXT_WRITES = 100


class Gathering(NamedTuple):
    """Seconds from the last close until the first piece was seen to move, and from there until the
    last one; bytes moved.
    """

    waited_s: float
    worked_s: float
    moved_bytes: int


def measure_fragmentation(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    result = _reads(settings, say)
    result["first_write"] = {
        str(count): _first_write(count, settings.runs, say)
        for count in (QUICK_REFERENCES if settings.quick else REFERENCES)
    }
    return result


# --- reads --------------------------------------------------------------------------------------


def _reads(settings: Settings, say: Progress) -> Figures:
    size_bytes = min(settings.size_bytes, STORE_BYTES_MAX)
    file_bytes = size_bytes // FILE_SHARE // MIB * MIB
    require_memory(settings.memory, size_bytes)
    rates: dict[str, list[float]] = {state: [] for state in STATES}
    gathered: list[Gathering] = []
    raw: list[dict[str, float]] = []
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers())
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        say("fragmentation: making, mounting and touching the store")
        source = settings.memory / "fragmentation.img"
        directory, _pid = stack.enter_context(mounted(source, size_bytes))
        warm(directory, size_bytes)
        path = directory / "file"
        for run in settings.rounds():
            label = f"fragmentation: run {run}/{settings.runs}"
            found: dict[str, float] = {}
            yardstick.sample()
            say(f"{label}: writing and reading a file of {file_bytes // MIB} MiB")
            workers.run([Job("write", str(path), MIB, file_bytes, sync=False)])
            found["fresh"] = _read_rate(workers, path, file_bytes)
            held = os.open(path, os.O_WRONLY)
            say(f"{label}: overwriting {file_bytes // WRITE_BYTES} blocks at random, and reading")
            workers.run([Job("scatter", str(path), WRITE_BYTES, file_bytes, sync=False)])
            found["fragmented"] = _read_rate(workers, path, file_bytes)
            yardstick.sample()
            work = _gathering(directory, held, file_bytes, label, say)
            say(f"{label}: reading what was gathered")
            found["gathered"] = _read_rate(workers, path, file_bytes)
            yardstick.sample()
            taken = yardstick.take()
            if run:
                raw.append(taken)
                gathered.append(work)
                for state, rate in found.items():
                    rates[state].append(rate)
    result: Figures = {"file_bytes": file_bytes, "raw": raw_figures(raw)}
    for state in STATES:
        result[state] = rate_figures(rates[state], rates["fresh"])
    result["gathering"] = {
        "waited_s": statistics.median(each.waited_s for each in gathered),
        "worked_s": statistics.median(each.worked_s for each in gathered),
        "moved_bytes": statistics.median(each.moved_bytes for each in gathered),
        "bytes_per_s": statistics.median(each.moved_bytes / each.worked_s for each in gathered),
    }
    return result


def _read_rate(workers: Workers, path: Path, file_bytes: int) -> float:
    jobs = [Job("read", str(path), MIB, file_bytes, sync=False)]
    return statistics.median(bytes_per_second(jobs, workers.run(jobs)) for _ in range(READS))


def _gathering(directory: Path, held: int, file_bytes: int, label: str, say: Progress) -> Gathering:
    """What the daemon does once the last descriptor for writing is closed, until it is done."""
    before = _moved_bytes(directory)
    os.close(held)
    began = seen = time.monotonic()
    first, last, moved = None, began, 0
    while first is None or seen - last < STILL_SECONDS:
        time.sleep(POLL_SECONDS)
        seen, now = time.monotonic(), _moved_bytes(directory) - before
        if now > moved:
            first, last, moved = (seen if first is None else first), seen, now
            say(f"{label}: {moved / file_bytes:.0%} gathered")
        if seen - began > PATIENCE_SECONDS:
            raise WorkError(f"{moved} bytes gathered in {PATIENCE_SECONDS:.0f} s, and no end of it")
    # The first piece moved between two looks: the time until the one before is the least it waited.
    waited = max(0.0, first - began - POLL_SECONDS)
    return Gathering(waited, last - began - waited, moved)


def _moved_bytes(directory: Path) -> int:
    return int(statistics_of(directory)["moved_bytes"])


# --- the first write ----------------------------------------------------------------------------


def _first_write(count: int, runs: int, say: Progress) -> Figures:
    """Seconds of the first 4 KiB write after the store and then the file were opened, to a file of
    ``count`` references; of those that follow; and of the first one after the file was closed and
    opened once more. All that is done under the store's lock.
    """
    say(f"fragmentation: first write to a file of {count} references: making it")
    media = MemoryMedia(256 * MIB + count * 6 * KIB // MIB * MIB, Granularity.LINE)
    Store.format(media)
    store = Store.open(media)
    places = [place * 2 * WRITE_BYTES for place in range(count)]
    random.Random(count).shuffle(places)
    block = random.Random(4).randbytes(WRITE_BYTES)
    attributes, handle = store.create(1, b"file", 0o644, 0, 0, os.O_WRONLY)
    for number, place in enumerate(places):
        _write(store, handle, place, block)
        if number % 20_000 == 0:
            store.fsync(handle)
    _close(store, handle)
    figures: Figures = {}
    samples: dict[str, list[float]] = {"first_s": [], "next_s": [], "again_s": []}
    for run in range(runs):
        say(f"fragmentation: run {run + 1}/{runs}: first write to {count} references")
        store.close()
        store = Store.open(media)
        handle = store.open_file(attributes.ino, os.O_WRONLY)
        references = store.namespace.get(attributes.ino).content.ref_count
        if references != count:
            raise WorkError(f"{references} references instead of {count}")
        times = _timed_writes(store, handle, places[: 1 + _NEXT_WRITES], block)
        samples["first_s"].append(next(times))
        samples["next_s"].append(statistics.median(times))
        _close(store, handle)
        handle = store.open_file(attributes.ino, os.O_WRONLY)
        samples["again_s"].extend(_timed_writes(store, handle, places[:1], block))
        _close(store, handle)
    store.close()
    media.close()
    figures.update({name: statistics.median(values) for name, values in samples.items()})
    return figures


def _timed_writes(store: Store, handle: int, places: list[int], block: bytes) -> Iterator[float]:
    for place in places:
        began = time.perf_counter()
        _write(store, handle, place, block)
        yield time.perf_counter() - began


def _write(store: Store, handle: int, place: int, block: bytes) -> None:
    done = store.write(handle, place, block)
    if done != len(block):
        raise WorkError(f"wrote {done} bytes of {len(block)}")


def _close(store: Store, handle: int) -> None:
    store.flush(handle, writer_killed=False)
    store.release(handle)
