"""Section ``data``: writers and readers of separate files through the mount, on both transports,
beside tmpfs; with ``peers`` also beside other file systems.

Within a run every case is measured on every target, one after the other, with the yardstick
before each case. The first run is not counted: it brings everything into its usual place.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from cxlfs.units import KIB, MIB, format_size
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    percentiles,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import (
    Target,
    file_system_of,
    find_dax,
    find_passthrough,
    mounted,
    passed_through,
    warm,
)
from tests.support.bench.workers import COUNTS, Job, Workers, bytes_per_second

KINDS = ("write", "read")
TRANSPORTS = ("native", "pyfuse3")
BLOCKS_BYTES = {
    4 * KIB: 8 * MIB,
    64 * KIB: 64 * MIB,
    MIB: 320 * MIB,
    8 * MIB: 320 * MIB,
}
"""Size of a block, and how much of each file one writer or reader handles at most: a tenth of a
second, for which small blocks need fewer bytes. In 40 MiB two writers of 1 MiB came to half the
rate."""
QUICK_DIVISOR = 8
STORE_SHARE = 12
"""A file is at most this part of the store: four writers keep the version before, and the cleaner
has room."""
PWRITE_BYTES = 16 * MIB
PWRITE_QUICK_BYTES = 2 * MIB


class Case(NamedTuple):
    kind: str
    workers: int
    block_bytes: int

    def __str__(self) -> str:
        what = f"{self.kind}r" if self.kind == "write" else "reader"
        return f"{self.workers} {what}{'s' * (self.workers > 1)} of {format_size(self.block_bytes)}"


CASES = [Case(kind, count, size) for size in BLOCKS_BYTES for count in COUNTS for kind in KINDS]
"""Readers read what the writers before them wrote."""


def measure_data(settings: Settings, say: Progress) -> Figures:
    """The figures of ``data``, with ``peers`` in them; raises MissingError, WorkError."""
    stores_bytes = len(TRANSPORTS) * settings.size_bytes
    peers_bytes = 2 * max(COUNTS) * _file_bytes(settings, MIB)
    require_memory(settings.memory, stores_bytes + peers_bytes)
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(Workers())
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        say("data: making, mounting and touching the stores")
        targets = list(_stores(stack, settings))
        targets.append(Target("tmpfs", _directory(stack, settings.memory)))
        peers: Figures = {}
        if settings.with_peers:
            found, peers = _peers(stack, settings)
            targets += found
        result = _measure(targets, settings, workers, yardstick, say)
    result["peers"] = peers
    return result


def _measure(
    targets: Sequence[Target],
    settings: Settings,
    workers: Workers,
    yardstick: Yardstick,
    say: Progress,
) -> Figures:
    rates: dict[tuple[Case, str], list[float]] = {}
    calls: dict[str, list[float]] = {target.name: [] for target in targets}
    raw: list[dict[str, float]] = []
    for run in settings.rounds():
        label = f"run {run}/{settings.runs}" if run else "a run that does not count"
        for case in CASES:
            yardstick.sample()
            for target in targets:
                if case.workers not in target.counts:
                    continue
                say(f"data: {label}: {case} on {target.name}")
                jobs = _jobs(case, target, _file_bytes(settings, case.block_bytes))
                rate = bytes_per_second(jobs, workers.run(jobs))
                if run:
                    rates.setdefault((case, target.name), []).append(rate)
        for target in targets:
            say(f"data: {label}: time of each 4 KiB pwrite on {target.name}")
            size = settings.scaled(PWRITE_BYTES, PWRITE_QUICK_BYTES)
            job = Job("pwrite", str(target.directory / "calls"), 4 * KIB, size, sync=False)
            (done,) = workers.run([job])
            if run:
                calls[target.name] += done.calls
        taken = yardstick.take()
        if run:
            raw.append(taken)
    units = [each["copy"] for each in raw]
    throughput: Figures = {}
    for (case, name), values in rates.items():
        place = throughput.setdefault(case.kind, {}).setdefault(name, {})
        place.setdefault(str(case.workers), {})[str(case.block_bytes)] = rate_figures(values, units)
    return {
        "raw": raw_figures(raw),
        "throughput": throughput,
        "pwrite_4kib": {name: percentiles(samples) for name, samples in calls.items()},
    }


def _jobs(case: Case, target: Target, file_bytes: int) -> list[Job]:
    return [
        Job(
            case.kind,
            str(target.directory / f"file-{index}"),
            case.block_bytes,
            file_bytes,
            sync=target.sync,
        )
        for index in range(case.workers)
    ]


def _file_bytes(settings: Settings, block_bytes: int) -> int:
    """A whole number of blocks."""
    part = max(8 * MIB, settings.size_bytes // STORE_SHARE // (8 * MIB) * (8 * MIB))
    wanted = BLOCKS_BYTES[block_bytes]
    return min(part, max(MIB, wanted // QUICK_DIVISOR) if settings.quick else wanted)


def _stores(stack: contextlib.ExitStack, settings: Settings) -> Iterator[Target]:
    for transport in TRANSPORTS:
        source = settings.memory / f"{transport}.img"
        directory, _pid = stack.enter_context(
            mounted(source, settings.size_bytes, "-o", f"transport={transport}")
        )
        warm(directory, settings.size_bytes)
        yield Target(transport, directory)


def _peers(stack: contextlib.ExitStack, settings: Settings) -> tuple[list[Target], Figures]:
    """Those that this machine has, and for each what it is or why it is missing."""
    targets = []
    told: Figures = {}
    program = find_passthrough(settings.passthrough)
    if program is None:
        told["passthrough"] = "not present: no passthrough_hp, passthrough_ll or bindfs on PATH"
    else:
        below = _directory(stack, settings.memory)
        targets.append(Target("passthrough", stack.enter_context(passed_through(program, below))))
        told["passthrough"] = f"{Path(program).name} over tmpfs"
    kind = file_system_of(settings.disk)
    # One writer: with fsync more of them measure the disk's queue.
    targets.append(Target("disk", _directory(stack, settings.disk), counts=(1,), sync=True))
    told["disk"] = f"{kind} with fsync"
    dax = find_dax()
    for each in dax:
        targets.append(Target(each.name, _directory(stack, each.directory)))
        told[each.name] = f"{each.directory}"
    if not dax:
        told["dax"] = "not present: no file system on /dev/pmem* is mounted with dax"
    return targets, told


def _directory(stack: contextlib.ExitStack, parent: Path) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parent, prefix="bench-")))
