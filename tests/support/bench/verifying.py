"""Section ``verify``: how fast the data pass of ``cxlfs verify`` goes, in the daemon and on the
unmounted store.

Both map the store anew, so one pass that is not counted touches the pages before.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.media import Media, open_media
from cxlfs.units import MIB
from cxlfs.verify import PASSES, Finding, run_steps
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    median_ratio,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import CXLFS, make_store, run_cxlfs

FILE_BYTES = 64 * MIB
DATA_SHARE = 0.6
"""How full the store is."""
OF_DATA = frozenset(each.id for each in PASSES if each.data)


def measure_verify(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError."""
    require_memory(settings.memory, settings.size_bytes)
    files = max(1, int(settings.size_bytes * DATA_SHARE) // FILE_BYTES)
    data_bytes = files * FILE_BYTES
    rates: dict[str, list[float]] = {"live": [], "offline": []}
    raw = []
    source = settings.memory / "verify.img"
    with contextlib.ExitStack() as stack:
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        target = stack.enter_context(tempfile.TemporaryDirectory(prefix="cxlfs-bench-"))
        make_store(source, settings.size_bytes)
        stack.callback(source.unlink)
        for run in range(settings.runs):
            label = f"verify: run {run + 1}/{settings.runs}"
            with _mounted_again(source, target):
                if run == 0:
                    say("verify: writing data")
                    _write(Path(target), files)
                say(f"{label}: the mounted store")
                _live_rate(target)
                yardstick.sample()
                rates["live"].append(_live_rate(target))
            say(f"{label}: the store's file")
            media = open_media(str(source), read_only=True)
            try:
                _data_pass_rate(media)
                yardstick.sample()
                rates["offline"].append(_data_pass_rate(media))
            finally:
                media.close()
            yardstick.sample()
            raw.append(yardstick.take())
    result: Figures = {"data_bytes": data_bytes, "raw": raw_figures(raw)}
    for name, values in rates.items():
        result[name] = {
            "bytes_per_s": statistics.median(values),
            "ratio": median_ratio(values, [each["crc32c"] for each in raw]),
            "ratio_of_memory": median_ratio(values, [each["crc32c_of_memory"] for each in raw]),
            "runs_bytes_per_s": values,
        }
    return result


@contextlib.contextmanager
def _mounted_again(source: Path, target: str) -> Iterator[None]:
    run_cxlfs("mount", str(source), target)
    try:
        yield
    finally:
        run_cxlfs("umount", target)


def _write(directory: Path, files: int) -> None:
    block = memoryview(os.urandom(MIB))
    for index in range(files):
        with (directory / f"data-{index:04d}").open("wb", buffering=0) as file:
            for _ in range(FILE_BYTES // MIB):
                file.write(block)


def _live_rate(target: str) -> float:
    """By when the program says that a pass has ended."""
    command = [CXLFS, "verify", target, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        began, rate = time.perf_counter(), 0.0
        for line in process.stdout or ():
            report = json.loads(line)
            now = time.perf_counter()
            if report.get("pass_id") in OF_DATA and "done" in report:
                rate = report["done"] / (now - began)
            began = now
    if process.returncode or not rate:
        raise SystemExit(f"verify of a fresh store ended with {process.returncode}")
    return rate


def _data_pass_rate(media: Media) -> float:
    """From the end of the pass before it to its own; the other passes are not timed."""
    began = time.perf_counter()
    for step in run_steps(media, structure_only=False):
        if isinstance(step, Finding):
            raise SystemExit(f"a fresh store is damaged: {step}")
        if not step.finished:
            continue
        now = time.perf_counter()
        if step.pass_id in OF_DATA:
            return step.done / (now - began)
        began = now
    raise SystemExit("there is no data pass")
