"""Section ``frameworks``: saving and loading a model's state, beside tmpfs.

Both do the same calls in turn, over one name. A load ends when a byte of every page of every tensor
was looked at: a mapped file costs nothing before.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cxlfs.units import MIB
from tests.support.bench.measure import (
    Figures,
    MissingError,
    Progress,
    Settings,
    median_ratio,
    require_memory,
)
from tests.support.bench.targets import mounted, warm

TENSOR_BYTES = 64 * MIB
STORE_SHARE = 2.75
"""The store's size in states: the new version, the one before, and room for the cleaner."""
OTHERS_SHARE = 4.1
"""In states: the one in memory, a loaded one, and two files on tmpfs."""

Actions = dict[str, Callable[[Path], object]]


def measure_frameworks(settings: Settings, say: Progress) -> Figures:
    """Seconds of each action on both; raises MissingError."""
    actions, state_bytes = _actions(settings.state_bytes)
    store_bytes = int(state_bytes * STORE_SHARE) // MIB * MIB + 256 * MIB
    require_memory(settings.memory, store_bytes + int((OTHERS_SHARE - 1) * state_bytes))
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"store": [], "tmpfs": []} for name in actions
    }
    with contextlib.ExitStack() as stack:
        say("frameworks: making, mounting and touching the store")
        store, _pid = stack.enter_context(mounted(settings.memory / "state.img", store_bytes))
        warm(store, store_bytes)
        own = stack.enter_context(tempfile.TemporaryDirectory(dir=settings.memory))
        for run in settings.rounds():
            label = f"run {run}/{settings.runs}" if run else "a run that does not count"
            for pair in _pairs(actions):
                for target, directory in (("store", store), ("tmpfs", Path(own))):
                    for name in pair:
                        say(f"frameworks: {label}: {name} on {target}")
                        elapsed = _time(actions[name], directory)
                        if run:
                            seconds[name][target].append(elapsed)
                    _clear(directory)
    result: Figures = {"state_bytes": state_bytes}
    for name, both in seconds.items():
        result[name] = {
            "store_s": statistics.median(both["store"]),
            "tmpfs_s": statistics.median(both["tmpfs"]),
            "bytes_per_s": state_bytes / statistics.median(both["store"]),
            "ratio_to_tmpfs": median_ratio(both["tmpfs"], both["store"]),
            "runs_store_s": both["store"],
            "runs_tmpfs_s": both["tmpfs"],
        }
    return result


def _actions(wanted_bytes: int) -> tuple[Actions, int]:
    """What is done in a directory, and the size of the state; a save comes before its loads."""
    try:
        torch = importlib.import_module("torch")
        checkpoint = importlib.import_module("torch.distributed.checkpoint")
    except ImportError as error:
        raise MissingError(
            f"PyTorch is not installed ({error}): pip install '.[frameworks]'"
        ) from error
    # One process is what is meant; DCP warns of it each time.
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    count = max(1, wanted_bytes // TENSOR_BYTES)
    generator = torch.Generator().manual_seed(1)
    base = torch.rand(TENSOR_BYTES // 4, generator=generator)
    state = {f"layer{index}.weight": base + index for index in range(count)}

    def look(loaded: dict[str, Any]) -> None:
        if set(loaded) != set(state):
            raise MissingError("a loaded state has other tensors than the saved one")
        for tensor in loaded.values():
            tensor.view(torch.uint8)[::4096].sum()

    actions: Actions = {
        "torch_save": lambda d: torch.save(state, d / "state.pt"),
        "torch_load": lambda d: look(torch.load(d / "state.pt")),
        "torch_load_mmap": lambda d: look(torch.load(d / "state.pt", mmap=True)),
        "dcp_save": lambda d: checkpoint.save(state, checkpoint_id=d / "dcp", no_dist=True),
        "dcp_load": lambda d: checkpoint.load(state, checkpoint_id=d / "dcp", no_dist=True),
    }
    with contextlib.suppress(ImportError):
        safetensors = importlib.import_module("safetensors.torch")
        path = "state.safetensors"
        actions["safetensors_save"] = lambda d: safetensors.save_file(state, d / path)
        actions["safetensors_load"] = lambda d: look(safetensors.load_file(d / path))
    return actions, count * TENSOR_BYTES


def _pairs(actions: Actions) -> list[list[str]]:
    """Each save with its loads."""
    pairs: list[list[str]] = []
    for name in actions:
        if name.endswith("_save"):
            pairs.append([])
        pairs[-1].append(name)
    return pairs


def _time(action: Callable[[Path], object], directory: Path) -> float:
    """With the page cache dropped before, where it can be: what is loaded is read and verified."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    began = time.perf_counter()
    action(directory)
    return time.perf_counter() - began


def _clear(directory: Path) -> None:
    """Make room for the next format; torch.save overwrites its file, as trainers do."""
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.suffix != ".pt":
            path.unlink()
