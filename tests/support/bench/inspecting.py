"""Section ``inspect``: how fast ``cxlfs inspect --stats`` and ``cxlfs diff`` read, beside CRC32C of
the same files that are read in the same way, with as many threads.

The files are on tmpfs, and hold random numbers of a normal distribution, a block of them again and
again. The programs' own code is called in this process: what a start of Python takes is left out.
"""

from __future__ import annotations

import json
import os
import statistics as medians
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cxlfs.checkpoint.tensors import Layout, difference, layout_of, statistics
from cxlfs.checkpoint.tensors.blocks import BLOCK_BYTES, TASK_BYTES, spread, threads
from cxlfs.native import crc32c
from cxlfs.units import MIB
from tests.support.bench.measure import (
    Figures,
    Progress,
    Settings,
    Yardstick,
    median_ratio,
    raw_figures,
    require_memory,
)

TYPES = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "F8_E4M3": 1, "I8": 1}
"""Names of safetensors, and bytes of an item."""
_TENSOR_BYTES = 64 * MIB


def measure_inspect(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError."""
    require_memory(settings.memory, 2 * settings.state_bytes)
    result: Figures = {"bytes": settings.state_bytes, "threads": threads(), "stats": {}}
    raw = []
    first, second = (settings.memory / f"{name}.safetensors" for name in ("first", "second"))
    with Yardstick(settings.memory, quick=settings.quick) as yardstick:
        try:
            for name in TYPES:
                say(f"inspect: writing {name}")
                _write(first, name, settings.state_bytes, 1.0)
                result["stats"][name] = _beside_crc32c(
                    settings, say, name, (first,), lambda pair: _statistics(pair[0])
                )
                if name == "F32":
                    _write(second, name, settings.state_bytes, 1.001)
                    result["diff"] = _beside_crc32c(
                        settings, say, "diff", (first, second), lambda pair: difference(*pair)
                    )
                    second.unlink()
                yardstick.sample()
                raw.append(yardstick.take())
        finally:
            for path in (first, second):
                path.unlink(missing_ok=True)
    result["raw"] = raw_figures(raw)
    return result


def _statistics(layout: Layout) -> None:
    found = statistics(layout)
    if any(isinstance(each, str) for each in found):
        raise AssertionError(found)


def _beside_crc32c(
    settings: Settings,
    say: Progress,
    name: str,
    paths: tuple[Path, ...],
    work: Callable[[list[Layout]], object],
) -> Figures:
    """Interleaved; the first round does not count."""
    layouts = [each for each in map(layout_of, paths) if each is not None]
    size = sum(path.stat().st_size for path in paths)
    rates: list[float] = []
    sums: list[float] = []
    for run in settings.rounds():
        say(f"inspect: {name}, run {run}/{settings.runs}")
        began = time.perf_counter()
        for path in paths:
            _sum(path)
        between = time.perf_counter()
        work(layouts)
        ended = time.perf_counter()
        if run:
            sums.append(size / (between - began))
            rates.append(size / (ended - between))
    return {
        "bytes_per_s": medians.median(rates),
        "crc32c_bytes_per_s": medians.median(sums),
        "ratio": median_ratio(rates, sums),
        "runs_bytes_per_s": rates,
        "runs_crc32c_bytes_per_s": sums,
    }


def _sum(path: Path) -> None:
    """CRC32C of every byte, in the pieces and threads that ``inspect`` has."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)

    def work(begin: int) -> int:
        buffer, found = memoryview(bytearray(BLOCK_BYTES)), 0
        for at in range(begin, min(begin + TASK_BYTES, size), BLOCK_BYTES):
            count = os.preadv(descriptor, [buffer[: size - at]], at)
            found = crc32c(buffer[:count], found)
        return found

    try:
        list(spread(range(0, size, TASK_BYTES), work))
    finally:
        os.close(descriptor)


def _write(path: Path, name: str, size_bytes: int, factor: float) -> None:
    """A file of safetensors, without the library."""
    item_bytes = TYPES[name]
    each = min(_TENSOR_BYTES, size_bytes)
    count = size_bytes // each
    header: dict[str, object] = {
        f"layers.{number}.mlp.weight": {
            "dtype": name,
            "shape": [each // item_bytes],
            "data_offsets": [number * each, (number + 1) * each],
        }
        for number in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = memoryview(_items(name, each // item_bytes, factor)).cast("B")
    with path.open("wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            file.write(data)


def _items(name: str, count: int, factor: float) -> NDArray[np.generic]:
    values = np.random.default_rng(1).standard_normal(count, dtype=np.float32)
    values *= np.float32(factor)
    if name == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if name in ("F8_E4M3", "I8"):  # any pattern but NaN
        return np.clip(np.abs(values) * 40, 0, 126).astype(np.uint8)
    return values.astype({"F32": np.float32, "F16": np.float16, "F64": np.float64}[name])
