"""What changed between two checkpoints: tensors added and gone, and of the others how many items
changed and by how much.

A tensor is not read where both checkpoints are known to have the same bytes of it: it is in the
same file, in files of a store whose sizes and checksums are equal, or both formats keep equal
checksums of it. A damaged byte may hide so; ``verify`` is what finds damage.

Other modules read blocks and reduce them.

Invariants
- Two tensors are compared item by item, whatever strides and boxes they are stored with. Those that
  are stored differently are put together in memory, up to a limit; beyond it a reason says so.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
import threading
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cxlfs.checkpoint.model import BeyondLimitsError, ProblemError
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.checkpoint.tensors.blocks import (
    BLOCK_BYTES,
    TASK_BYTES,
    Buffer,
    Bytes,
    Seen,
    access_of,
    blocks,
    spread,
)
from cxlfs.checkpoint.tensors.compressed import TOGETHER_BYTES_MAX, span_of
from cxlfs.checkpoint.tensors.dtypes import ItemType
from cxlfs.checkpoint.tensors.families import FAMILIES, family_of
from cxlfs.checkpoint.tensors.model import Layout, Part, StoredTensor, span_items
from cxlfs.checkpoint.tensors.reducing import Change, Reducer
from cxlfs.checkpoint.tensors.statistics import NEVER_READ
from cxlfs.durable import promised_crc32c

_OVERLAP_MAX = 4
_TOGETHER = threading.Lock()
"""One thread at a time holds whole tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor that both have. ``change`` None: it was not compared, ``reason`` says why; or it
    is the same without having been read (``is_shared``).
    """

    name: str
    family: str
    before: StoredTensor
    after: StoredTensor
    change: Change | None
    reason: str | None = None
    is_shared: bool = False

    @property
    def is_changed(self) -> bool:
        return self.change is not None and self.change.changed > 0

    @property
    def relative(self) -> float | None:
        """The norm of the change by that of the tensor before; None: not known, or 0 before."""
        if self.is_shared:
            return 0.0
        if self.change is None or not self.change.squares_before:
            return None
        return math.sqrt(self.change.squares / self.change.squares_before)


@dataclasses.dataclass(frozen=True, slots=True)
class FamilyChange:
    """Of all tensors of one family that were compared, or are known to be the same."""

    family: str
    tensors: int
    tensors_changed: int
    items: int
    items_changed: int
    norm: float
    relative: float | None
    """None: some of them were not read, so that the norm before is not known."""


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """``bytes_shared``: of tensors that both have and that were not read."""

    added: tuple[StoredTensor, ...]
    gone: tuple[StoredTensor, ...]
    tensors: tuple[TensorChange, ...]
    bytes_read: int
    bytes_shared: int

    def families(self) -> list[FamilyChange]:
        found = []
        for family in FAMILIES:
            inside = [
                each for each in self.tensors if each.family == family and each.reason is None
            ]
            if inside:
                found.append(_of_family(family, inside))
        return found


def _of_family(family: str, inside: list[TensorChange]) -> FamilyChange:
    changes = [each.change for each in inside if each.change is not None]
    squares = sum(change.squares for change in changes)
    before = sum(change.squares_before for change in changes)
    is_known = len(changes) == len(inside) and before > 0
    return FamilyChange(
        family,
        len(inside),
        sum(each.is_changed for each in inside),
        sum(each.after.items for each in inside),
        sum(change.changed for change in changes),
        math.sqrt(squares),
        math.sqrt(squares / before) if is_known else None,
    )


def difference(
    before: Layout,
    after: Layout,
    *,
    reads_all: bool = False,
    threads: int | None = None,
    seen: Seen | None = None,
) -> Difference:
    """Of two checkpoints, tensor by tensor. ``reads_all``: shared ones too."""
    old, new = before.named(), after.named()
    shares = _Shares(before, after)
    budget = _OVERLAP_MAX * sum(file.size_bytes or 0 for file in (*before.files, *after.files))
    found: list[TensorChange] = []
    pairs: list[_Pair] = []
    read = shared = 0
    for name in [name for name in old if name in new]:
        one, other = old[name], new[name]
        reason = _why_not(one, other)
        is_shared = reason is None and not reads_all and shares.tensor(one, other)
        if reason is None and not is_shared:
            budget -= one.size_bytes + other.size_bytes
            taken = _pairs(len(found), one, other) if budget >= 0 else NEVER_READ
            if isinstance(taken, str):
                reason = taken
            else:
                pairs += taken
                read += one.size_bytes + other.size_bytes
        shared += other.size_bytes if is_shared else 0
        found.append(
            TensorChange(name, family_of(name), one, other, None, reason, is_shared=is_shared)
        )
    changes = _compared(before, after, pairs, threads, seen)
    return Difference(
        added=tuple(tensor for name, tensor in new.items() if name not in old),
        gone=tuple(tensor for name, tensor in old.items() if name not in new),
        tensors=tuple(_with(each, changes.get(at)) for at, each in enumerate(found)),
        bytes_read=read,
        bytes_shared=shared,
    )


def _with(found: TensorChange, result: Change | str | None) -> TensorChange:
    if isinstance(result, str):
        return dataclasses.replace(found, reason=result)
    if result is None and found.reason is None and not found.is_shared:
        return dataclasses.replace(found, change=Change())  # it has no items
    return dataclasses.replace(found, change=result)


def _why_not(one: StoredTensor, other: StoredTensor) -> str | None:
    if one.shape != other.shape:
        return f"its shape was {list(one.shape)} and is {list(other.shape)}"[:200]
    if one.reason is not None or other.reason is not None:
        return one.reason or other.reason
    if one.type is None or other.type is None or not one.type.same_as(other.type):
        return f"its type was {one.dtype} and is {other.dtype}"[:200]
    return None


# --- what is known to be the same -----------------------------------------------------------


class _Shares:
    """Whether bytes of two checkpoints are the same, without reading them."""

    def __init__(self, before: Layout, after: Layout) -> None:
        self._homes = before.home, after.home
        self._files = functools.cache(self._are_same)

    def tensor(self, one: StoredTensor, other: StoredTensor) -> bool:
        same_type = one.type == other.type  # the order of bytes, too
        return (
            same_type
            and len(one.parts) == len(other.parts)
            and all(self._part(a, b) for a, b in zip(one.parts, other.parts, strict=True))
        )

    def _part(self, one: Part, other: Part) -> bool:
        ours, theirs = (
            (each.start, each.shape, each.strides, each.codec, each.ahead_bytes)
            for each in (one, other)
        )
        if ours != theirs:
            return False
        if one.digest is not None and one.digest == other.digest:
            return True
        places = [(each.offset, each.size_bytes) for each in (one, other)]
        return places[0] == places[1] and self._files(one.file, other.file)

    def _are_same(self, one: str, other: str) -> bool:
        """It is one file, or a store says that both have one content."""
        try:
            paths = [
                home.path / name if name else home.path
                for home, name in zip(self._homes, (one, other), strict=True)
            ]
            found = [os.stat(path) for path in paths]  # noqa: PTH116
        except (OSError, ValueError):
            return False
        if os.path.samestat(found[0], found[1]):
            return True
        if found[0].st_size != found[1].st_size or found[0].st_dev != found[1].st_dev:
            return False
        promised = promised_crc32c(paths[0])
        return promised is not None and promised == promised_crc32c(paths[1])


# --- what is read ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    """Items of two parts for one thread. ``parts`` None: of the whole tensors, put together."""

    number: int
    tensors: tuple[StoredTensor, StoredTensor]
    types: tuple[ItemType, ItemType]
    parts: tuple[Part, Part] | None
    items: range | None
    size_bytes: int


def _pairs(number: int, one: StoredTensor, other: StoredTensor) -> list[_Pair] | str:
    if one.type is None or other.type is None:
        return "its items are not numbers"
    if not one.items:
        return []
    tensors, types = (one, other), (one.type, other.type)
    size = one.type.item_bytes
    step = TASK_BYTES // size
    found = []
    try:
        if not _are_alike(one, other):
            _check_together(one, size)
            _check_together(other, size)
            return [_Pair(number, tensors, types, None, None, one.size_bytes + other.size_bytes)]
        order = [sorted(each.parts, key=lambda part: part.start) for each in tensors]
        for parts in zip(*order, strict=True):
            a, b = parts
            access = access_of(a, size)
            both = a.size_bytes + b.size_bytes
            if not access.is_contiguous or not (a.codec is b.codec is None):
                found.append(_Pair(number, tensors, types, (a, b), None, both))
                continue
            for begin in range(0, access.items, step):
                items = range(begin, min(begin + step, access.items))
                found.append(_Pair(number, tensors, types, (a, b), items, 2 * size * len(items)))
    except ProblemError as error:
        return str(error)
    return found


def _are_alike(one: StoredTensor, other: StoredTensor) -> bool:
    """Cut into the same boxes, with the items of each in one order."""
    order = [sorted(each.parts, key=lambda part: part.start) for each in (one, other)]
    if len(order[0]) != len(order[1]):
        return False
    return all(
        (a.start, a.shape, _steps(a)) == (b.start, b.shape, _steps(b))
        for a, b in zip(*order, strict=True)
    )


def _steps(part: Part) -> tuple[int, ...]:
    """Strides of the dimensions that have more than one item: the others say nothing."""
    return tuple(s for s, size in zip(part.strides, part.shape, strict=True) if size > 1)


def _check_together(tensor: StoredTensor, item_bytes: int) -> None:
    spans = [span_items(part.shape, part.strides) * item_bytes for part in tensor.parts]
    if max(tensor.items * item_bytes, *spans, 0) > TOGETHER_BYTES_MAX:
        raise BeyondLimitsError("it is stored in another way, and too large to be put together")


def _compared(
    before: Layout,
    after: Layout,
    pairs: list[_Pair],
    threads: int | None,
    seen: Seen | None,
) -> dict[int, Change | str]:
    """Of each tensor that is in ``pairs``, by its number."""
    found: dict[int, Change | str] = {}
    homes = before.home, after.home
    tasks = list(_tasks(pairs))
    sizes = [sum(pair.size_bytes for pair in task) for task in tasks]
    results = spread(tasks, lambda task: _work(homes, task), threads)
    for read, done in zip(itertools.accumulate(sizes), results, strict=True):
        if seen is not None:
            seen(read, sum(sizes))
        for number, result in done:
            so_far = found.setdefault(number, Change())
            if isinstance(so_far, str):
                continue
            if isinstance(result, str):
                found[number] = result
            else:
                so_far.add(result)
    return found


def _tasks(pairs: list[_Pair]) -> Iterator[list[_Pair]]:
    task: list[_Pair] = []
    size = 0
    for pair in pairs:
        if task and size >= 2 * TASK_BYTES:
            yield task
            task, size = [], 0
        task.append(pair)
        size += pair.size_bytes
    if task:
        yield task


def _work(homes: tuple[Place, Place], task: list[_Pair]) -> list[tuple[int, Change | str]]:
    found: list[tuple[int, Change | str]] = []
    memory = Buffer(), Buffer(), Reducer()
    for pair in task:
        try:
            found.append((pair.number, _change_of(homes, pair, memory)))
        except ProblemError as error:
            found.append((pair.number, str(error)))
    return found


def _change_of(
    homes: tuple[Place, Place], pair: _Pair, memory: tuple[Buffer, Buffer, Reducer]
) -> Change:
    """Raises ProblemError."""
    one, other, reducer = memory
    found = Change()
    if pair.parts is None:
        with _TOGETHER:
            return _of_whole(homes, pair, reducer)
    a, b = pair.parts
    size = pair.types[0].item_bytes
    repeats = access_of(a, size).repeats
    with homes[0].open(a.file) as before, homes[1].open(b.file) as after:
        pieces = zip(
            blocks(before, a, size, one, pair.items),
            blocks(after, b, size, other, pair.items),
            strict=True,
        )
        for block, beside in pieces:
            found.add(reducer.change(block, beside, *pair.types))
    if repeats > 1:
        found.items *= repeats
        found.changed *= repeats
        found.unmeasured *= repeats
        found.squares *= repeats
        found.squares_before *= repeats
    return found


def _of_whole(homes: tuple[Place, Place], pair: _Pair, reducer: Reducer) -> Change:
    """Of tensors that are put together. Raises ProblemError."""
    found = Change()
    whole = [together(home, tensor) for home, tensor in zip(homes, pair.tensors, strict=True)]
    size = pair.types[0].item_bytes
    step = BLOCK_BYTES // size * size
    for at in range(0, len(whole[0]), step):
        ours, theirs = (each[at : at + step] for each in whole)
        found.add(reducer.change(ours, theirs, *pair.types))
    return found


def together(home: Place, tensor: StoredTensor) -> Bytes:
    """All items of a tensor in C order. Raises ProblemError."""
    of_item = tensor.type
    if of_item is None:
        raise BeyondLimitsError("its items are not numbers")
    size = of_item.item_bytes
    _check_together(tensor, size)
    word = np.dtype(f"V{size}")
    whole: NDArray[np.void] = np.zeros(tensor.shape, dtype=word)
    for part in tensor.parts:
        with home.open(part.file) as reader:
            data = _span(reader, part, size)
        steps = tuple(step * size for step in part.strides)
        box = np.lib.stride_tricks.as_strided(data.view(word), part.shape, steps)
        inside = tuple(slice(a, a + n) for a, n in zip(part.start, part.shape, strict=True))
        whole[inside] = box
    return whole.reshape(-1).view(np.uint8)


def _span(reader: Reader, part: Part, item_bytes: int) -> Bytes:
    """The bytes from the first item of a part to its last."""
    if part.codec is not None:
        return span_of(reader, part, item_bytes)
    data = np.empty(span_items(part.shape, part.strides) * item_bytes, dtype=np.uint8)
    if len(data):
        reader.read_into(part.offset, data.data)
    return data
