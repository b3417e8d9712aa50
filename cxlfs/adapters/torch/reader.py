"""A StorageReader for ``torch.distributed.checkpoint``: files are mapped, and copied once, from the
medium into the tensors that want them.

    dcp.load(state, storage_reader=StorageReader("/mnt/ckpt/step-7"))

Never: a tensor that refers to the medium; a byte in one that was not verified on the way.

Invariants
- What PyTorch's FileSystemReader reads this one reads: archives that it does not know itself are
  left to that one.
- A planner is asked by the caller's thread alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import serialization
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from cxlfs import client
from cxlfs.adapters.torch.archives import Content

THREAD_COUNT_MAX = 8
_SHARE_BYTES = 32 << 20
"""Of one thread at a time."""
_STEP_BYTES = 1 << 20
"""Verified, and copied while it is in the processor's cache."""
_ZIP = b"PK\x03\x04"


class _Place(Protocol):
    """What PyTorch keeps of an item in the metadata."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: Sequence[str] | None


class StorageReader(FileSystemReader):  # type: ignore[misc]  # torch is not typed here
    """As FileSystemReader. ``thread_count``: that verify and copy; None: as many as processors."""

    def __init__(self, path: str | os.PathLike[str], *, thread_count: int | None = None) -> None:
        if thread_count is not None and thread_count < 1:
            raise ValueError(f"thread_count {thread_count}: 1 or more")
        super().__init__(path)
        self.thread_count = thread_count or min(os.cpu_count() or 1, THREAD_COUNT_MAX)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises OSError (EIO names the file and the bytes that are damaged), and what a planner
        does.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, []).append(item)
        left: list[ReadItem] = []
        with ThreadPoolExecutor(self.thread_count) as pool:
            for name, items in by_file.items():
                with client.map(Path(self.path) / name) as mapped:
                    left += _File(mapped, self.storage_data, pool).read(items, planner)
        if left:
            super().read_data(dataclasses.replace(plan, items=left), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """One archive in a mapped file, verified where it is looked at."""

    mapped: client.MappedFile
    offset: int
    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice, /) -> memoryview:
        start, end, _ = part.indices(self.length)
        return self.mapped.read(self.offset + start, max(end - start, 0))


class _File:
    def __init__(
        self, mapped: client.MappedFile, places: Mapping[object, _Place], pool: ThreadPoolExecutor
    ) -> None:
        self._mapped = mapped
        self._places = places
        self._pool = pool
        self._base = np.frombuffer(mapped.view, np.uint8).ctypes.data if len(mapped) else 0

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> list[ReadItem]:
        """Those that are left to PyTorch."""
        left: list[ReadItem] = []
        tensors: list[tuple[ReadItem, torch.Tensor, torch.Tensor]] = []
        for item in sorted(items, key=lambda each: self._places[each.storage_index].offset):
            place = self._places[item.storage_index]
            if place.transform_descriptors:
                left.append(item)
            elif item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(self._mapped.read(place.offset, place.length)))
            elif (tensor := self._tensor(place.offset, place.length)) is None:
                left.append(item)
            else:
                for dimension, (start, size) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    tensor = tensor.narrow(dimension, start, size)
                target = planner.resolve_tensor(item).detach()
                if target.size() != tensor.size():
                    raise ValueError(
                        f"{item.storage_index}: {tuple(tensor.size())} is stored, and "
                        f"{tuple(target.size())} wanted"
                    )
                tensors.append((item, tensor, target))
        shares = [share for _, tensor, target in tensors for share in self._shares(tensor, target)]
        for _ in self._pool.map(lambda share: share(), shares):
            pass
        for item, _, target in tensors:
            torch.autograd.graph.increment_version(target)  # as copy_ does
            planner.commit_tensor(item, target)
        return left

    def _tensor(self, offset: int, length: int) -> torch.Tensor | None:
        """What an archive holds, as memory of the file, of which nothing was verified; None where
        PyTorch is to find out what it is.
        """
        window = _Window(self._mapped, offset, length)
        if bytes(window[: len(_ZIP)]) != _ZIP:
            return None
        memory = (ctypes.c_ubyte * length).from_address(self._base + offset)
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        try:
            reader = torch._C.PyTorchFileReader(Content(window))  # noqa: SLF001
            if reader.get_record("byteorder") != sys.byteorder.encode():
                return None
            loaded = serialization._load(  # noqa: SLF001
                reader,
                "cpu",
                serialization._weights_only_unpickler,  # noqa: SLF001
                overall_storage=storage,
                encoding="utf-8",
            )
        except (RuntimeError, serialization.pickle.UnpicklingError):
            return None
        if type(loaded) is not torch.Tensor or loaded.layout is not torch.strided:
            return None
        start, end = _span(loaded)
        inside = self._base + offset <= start <= end <= self._base + offset + length
        return loaded if inside or loaded.numel() == 0 else None

    def _shares(self, tensor: torch.Tensor, target: torch.Tensor) -> Iterator[Callable[[], None]]:
        if tensor.numel() == 0:
            return
        start, end = _span(tensor)
        if not _are_alike(tensor, target):
            yield functools.partial(self._convert, tensor, target, start - self._base, end - start)
            return
        to = target.data_ptr()
        for at in range(0, end - start, _SHARE_BYTES):
            length = min(_SHARE_BYTES, end - start - at)
            yield functools.partial(self._copy, start + at, to + at, length)

    def _copy(self, start: int, to: int, length: int) -> None:
        for at in range(0, length, _STEP_BYTES):
            step = min(_STEP_BYTES, length - at)
            self._mapped.verify(start + at - self._base, step)
            ctypes.memmove(to + at, start + at, step)

    def _convert(
        self, tensor: torch.Tensor, target: torch.Tensor, offset: int, length: int
    ) -> None:
        self._mapped.verify(offset, length)
        target.copy_(tensor)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses between which its elements lie."""
    start = int(tensor.data_ptr())
    if tensor.numel() == 0:
        return start, start
    last = sum((n - 1) * step for n, step in zip(tensor.size(), tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _are_alike(tensor: torch.Tensor, target: torch.Tensor) -> bool:
    """The bytes of one are those of the other, one behind the other."""
    return (
        type(target) is torch.Tensor
        and target.layout is torch.strided
        and target.device.type == "cpu"
        and target.dtype == tensor.dtype
        and not target.is_quantized
        and tensor.is_contiguous()
        and target.is_contiguous()
        and tensor.is_conj() == target.is_conj()
        and tensor.is_neg() == target.is_neg()
    )
