"""Section ``direct_torch``: PyTorch with ``cxlfs.torch``, and unchanged under ``cxlfs run``, beside
what PyTorch itself does on tmpfs.

Each way of saving or loading is measured in turn with what it is compared with, in a process that
keeps the state; saves of unchanged programs in one that was started as ``cxlfs run`` does it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import shutil
import signal
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from cxlfs.media import open_media
from cxlfs.units import MIB
from tests.support.bench.direct import preloading
from tests.support.bench.measure import (
    Figures,
    MissingError,
    Progress,
    Settings,
    Yardstick,
    median_ratio,
    rate_figures,
    raw_figures,
    require_memory,
)
from tests.support.bench.targets import mounted, warm
from tests.support.bench.workers import PATIENCE_SECONDS, WorkError

TENSOR_BYTES = 64 * MIB
STORE_SHARE = 3.2
"""Of the state: two versions, and a quarter is left (docs/direct.md, mapped files)."""
OTHERS_SHARE = 3.1
"""As in section ``frameworks``."""
THREAD_COUNT = 2

Action = Callable[[Path], object]


def measure_direct_torch(settings: Settings, say: Progress) -> Figures:
    """Raises MissingError, WorkError."""
    state_bytes = max(1, settings.state_bytes // TENSOR_BYTES) * TENSOR_BYTES
    store_bytes = int(state_bytes * STORE_SHARE) // MIB * MIB + 256 * MIB
    with contextlib.ExitStack() as stack:
        saver = stack.enter_context(_Child(state_bytes))
        with preloading():
            unchanged = stack.enter_context(_Child(state_bytes))
        names = saver.call("names", Path())
        require_memory(settings.memory, store_bytes + int(OTHERS_SHARE * state_bytes))
        yardstick = stack.enter_context(Yardstick(settings.memory, quick=settings.quick))
        say("direct_torch: making, mounting and touching the store")
        store, _pid = stack.enter_context(mounted(settings.memory / "torch.img", store_bytes))
        warm(store, store_bytes)
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=settings.memory)))
        phases: list[list[tuple[str, _Child, str, Path]]] = [
            [
                ("raw_state", saver, "raw", memory),
                ("save", saver, "our_save", store),
                ("save_tmpfs", saver, "save", memory),
                ("load_unverified", saver, "our_load_unverified", store),
                ("load", saver, "our_load", store),
                ("save_unchanged", unchanged, "save", store),
            ],
            [
                ("raw_state_by_two", saver, "raw_by_two", memory),
                ("dcp_save", saver, "our_dcp_save", store),
                ("dcp_save_tmpfs", saver, "dcp_save", memory),
                ("dcp_load", saver, "our_dcp_load", store),
                ("dcp_load_tmpfs", saver, "dcp_load", memory),
                ("async_save", saver, "our_async_save", store),
            ],
        ]
        if "safetensors_save" in names:
            phases.append(
                [
                    ("safetensors_save", unchanged, "safetensors_save", store),
                    ("safetensors_save_tmpfs", unchanged, "safetensors_save", memory),
                ]
            )
        seconds: dict[str, list[float]] = {}
        raw: dict[str, list[dict[str, float]]] = {}
        for phase in phases:
            for run in settings.rounds():
                label = f"run {run}/{settings.runs}" if run else "a run that does not count"
                for name, child, action, directory in phase:
                    yardstick.sample()
                    say(f"direct_torch: {label}: {name}")
                    taken = child.call(action, directory)
                    if run:
                        seconds.setdefault(name, []).append(float(taken))
                sampled = yardstick.take()
                if run:
                    for name, *_ in phase:
                        raw.setdefault(name, []).append(sampled)
            for directory in (store, memory):
                _clear(directory)
    return _figures(state_bytes, seconds, raw)


def _figures(
    state_bytes: int, seconds: dict[str, list[float]], raw: dict[str, list[dict[str, float]]]
) -> Figures:
    def rates(name: str) -> list[float]:
        return [state_bytes / each for each in seconds[name]]

    def of_raw(name: str, unit: str) -> Figures:
        return rate_figures(rates(name), [each[unit] for each in raw[name]])

    result: Figures = {
        "state_bytes": state_bytes,
        "raw": raw_figures(raw["save"]),
        "seconds": seconds,
        "raw_state": of_raw("raw_state", "copy"),
        "raw_state_by_two": of_raw("raw_state_by_two", "copy"),
        "dcp_save": of_raw("dcp_save", "copy"),
        "dcp_load": of_raw("dcp_load", "crc32c_of_memory"),
        "async_save": of_raw("async_save", "copy"),
        "save": of_raw("save", "copy"),
        "load_unverified_s": statistics.median(seconds["load_unverified"]),
    }
    by_two = median_ratio(rates("dcp_save"), rates("raw_state_by_two"))
    result["dcp_save"]["of_two_copies"] = by_two
    verified = [
        state_bytes / max(whole - before, 1e-9)
        for whole, before in zip(seconds["load"], seconds["load_unverified"], strict=True)
    ]
    result["verifying"] = rate_figures(verified, [each["crc32c_of_memory"] for each in raw["load"]])
    besides = {"save_unchanged": "save", "safetensors_save": "safetensors_save"}
    for name in ("save", "dcp_save", "dcp_load", *besides):
        if name in seconds:
            beside = rates(f"{besides.get(name, name)}_tmpfs")
            place = result.setdefault(name, rate_figures(rates(name), beside))
            place["of_tmpfs"] = median_ratio(rates(name), beside)
    return result


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


class _Child:
    """A process that has imported PyTorch, with a state of so many bytes."""

    def __init__(self, state_bytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, state_bytes), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_details: object) -> None:
        self._connection.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()

    def call(self, action: str, directory: Path) -> Any:
        """Seconds that it took. Raises MissingError, WorkError."""
        self._connection.send((action, directory))
        if not self._connection.poll(PATIENCE_SECONDS):
            raise WorkError(f"no answer for {PATIENCE_SECONDS:.0f} s from {action}")
        answer = self._connection.recv()
        if isinstance(answer, ImportError):
            raise MissingError(f"PyTorch is not installed ({answer}): pip install '.[frameworks]'")
        if isinstance(answer, str):
            raise WorkError(answer)
        return answer


def _serve(connection: Connection, state_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    warnings.simplefilter("ignore")
    actions: dict[str, Action] = {}
    while True:
        try:
            name, directory = connection.recv()
        except EOFError:
            return
        try:
            actions = actions or _actions(state_bytes)
            if name == "names":
                connection.send(set(actions))
                continue
            began = time.perf_counter()
            result = actions[name](directory)
            elapsed = time.perf_counter() - began
            if isinstance(result, float):  # it has taken the time itself
                elapsed = result
            del result
            connection.send(elapsed)
        except ImportError as error:
            connection.send(error)
        except Exception as error:  # noqa: BLE001  whatever it is, the parent tells it
            connection.send(f"{name}: {error!r}")


def _actions(state_bytes: int) -> dict[str, Action]:
    torch = importlib.import_module("torch")
    dcp = importlib.import_module("torch.distributed.checkpoint")
    ours = importlib.import_module("cxlfs.torch")
    generator = torch.Generator().manual_seed(1)
    base = torch.rand(TENSOR_BYTES // 4, generator=generator)
    state = {f"layer{i}.weight": base + i for i in range(state_bytes // TENSOR_BYTES)}
    targets: dict[str, Any] = {}

    def dcp_save(writer: Callable[..., Any], directory: Path) -> None:
        chosen = writer(directory / "dcp", thread_count=THREAD_COUNT)
        dcp.save(state, storage_writer=chosen, no_dist=True)

    def dcp_load(reader: Callable[..., Any], directory: Path) -> float:
        if not targets:
            targets.update({name: torch.zeros_like(value) for name, value in state.items()})
        began = time.perf_counter()
        dcp.load(targets, storage_reader=reader(directory / "dcp"), no_dist=True)
        return time.perf_counter() - began

    def async_save(directory: Path) -> float:
        began = time.perf_counter()
        saved = ours.async_save(state, checkpoint_id=directory / "dcp", no_dist=True)
        elapsed = time.perf_counter() - began
        saved.result()
        return elapsed

    def raw(directory: Path, count: int = 1) -> float:
        return _copied(
            [tensor.view(torch.uint8).numpy() for tensor in state.values()], directory, count
        )

    actions: dict[str, Action] = {
        "raw": raw,
        "raw_by_two": lambda d: raw(d, 2),
        "save": lambda d: torch.save(state, d / "state.pt"),
        "our_save": lambda d: ours.save(state, d / "state.pt"),
        "our_load_unverified": lambda d: ours.load(d / "state.pt", verify=False),
        "our_load": lambda d: ours.load(d / "state.pt", verify="always"),
        "dcp_save": lambda d: dcp_save(dcp.FileSystemWriter, d),
        "our_dcp_save": lambda d: dcp_save(ours.StorageWriter, d),
        "dcp_load": lambda d: dcp_load(dcp.FileSystemReader, d),
        "our_dcp_load": lambda d: dcp_load(ours.StorageReader, d),
        "our_async_save": async_save,
    }
    with contextlib.suppress(ImportError):
        safetensors = importlib.import_module("safetensors.torch")
        path = "state.safetensors"
        actions["safetensors_save"] = lambda d: safetensors.save_file(state, d / path)
    return actions


def _copied(arrays: list[Any], directory: Path, count: int) -> float:
    """Seconds for what the yardstick does, of bytes that no cache holds, by ``count`` threads."""
    paths = [directory / f"raw-{i}.img" for i in range(count)]
    with contextlib.ExitStack() as stack:
        media = [open_media(str(path), create_size_bytes=TENSOR_BYTES) for path in paths]
        for each in media:
            stack.enter_context(contextlib.closing(each))
            each.copy(0, bytes(TENSOR_BYTES))  # touches every page

        def copy(number: int) -> None:
            for array in arrays[number::count]:
                media[number].copy(0, array)

        pool = stack.enter_context(ThreadPoolExecutor(count))
        began = time.perf_counter()
        list(pool.map(copy, range(count)))
        elapsed = time.perf_counter() - began
    for path in paths:
        path.unlink()
    return elapsed
