"""Read the items of tensors in blocks, on several cores, within bounded memory.

Other modules compute with the items. A strided tensor is read as it lies in its file, and what lies
between its items is dropped.

Invariants
- A block holds whole items, at most :data:`BLOCK_BYTES` of them, and is the caller's to change.
- What a tensor makes this module read is bounded: items that overlap each other are refused, and so
  are those that lie scattered.
- Results come in the order of what was asked for, so that sums of floats are the same each time.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cxlfs.checkpoint.model import BeyondLimitsError
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.tensors.compressed import inflated, span_of
from cxlfs.checkpoint.tensors.model import Part
from cxlfs.units import KIB, MIB

BLOCK_BYTES = 512 * KIB
"""With what is computed from it, a block stays in a core's own cache."""
TASK_BYTES = 64 * MIB
"""What one thread reads before it asks for more."""
THREADS_MAX = 16
_READS_MAX = 1 << 20
"""Of one part that is not contiguous."""

Bytes = NDArray[np.uint8]
Seen = Callable[[int, int], None]
"""Called with the bytes that were read so far, and with all that will be."""
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """How a part is read, in items: ``rows`` of ``run`` items, ``row_stride`` apart, at each place
    of ``outer`` (stride, size). ``repeats``: how often each item stands in the tensor (a dimension
    with stride 0).
    """

    run: int
    row_stride: int
    rows: int
    outer: tuple[tuple[int, int], ...]
    repeats: int

    @property
    def items(self) -> int:
        """Read from the file: each once."""
        return self.run * self.rows * math.prod(size for _, size in self.outer)

    @property
    def is_contiguous(self) -> bool:
        return self.rows == 1 and not self.outer


def access_of(part: Part, item_bytes: int) -> Access:
    """Raises BeyondLimitsError where the items overlap, or lie scattered."""
    repeats = run = 1
    apart: list[tuple[int, int]] = []
    reach = 1
    for stride, size in sorted(zip(part.strides, part.shape, strict=True)):
        if not size:
            return Access(0, 0, 1, (), 1)
        if size == 1:
            continue
        if not stride:
            repeats *= size
        elif not apart and stride == run:
            run = reach = run * size
        elif stride < reach:
            raise BeyondLimitsError("its items overlap each other")
        else:
            apart.append((stride, size))
            reach += stride * (size - 1)
    row_stride, rows = apart[0] if apart else (0, 1)
    found = Access(run, row_stride, rows, tuple(apart[1:]), repeats)
    in_row = -(-run * item_bytes // BLOCK_BYTES)
    reads = in_row * rows if in_row > 1 else -(-rows // _rows_at_once(found, item_bytes))
    if not found.is_contiguous and reads * math.prod(n for _, n in found.outer) > _READS_MAX:
        raise BeyondLimitsError("its items lie scattered over the file")
    return found


def _rows_at_once(access: Access, item_bytes: int) -> int:
    return max(1, BLOCK_BYTES // max(access.row_stride * item_bytes, 1))


class Buffer:
    """Memory for blocks of one thread."""

    def __init__(self) -> None:
        self._bytes: Bytes = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self._view = self._bytes.data

    def read(self, reader: Reader, offset: int, length: int) -> Bytes:
        """Raises IncompleteError, DamagedError."""
        reader.read_into(offset, self._view[:length])
        return self._bytes[:length]


def blocks(
    reader: Reader, part: Part, item_bytes: int, buffer: Buffer, items: range | None = None
) -> Iterator[Bytes]:
    """The items of a part, each once. ``items``: which of those of a contiguous part.

    Raises ProblemError.
    """
    access = access_of(part, item_bytes)
    step = BLOCK_BYTES // item_bytes
    if part.codec is not None:
        yield from _inflated(reader, part, access, item_bytes)
    elif access.is_contiguous:
        within = range(access.items) if items is None else items
        for first in range(within.start, within.stop, step):
            count = min(step, within.stop - first)
            yield buffer.read(reader, part.offset + first * item_bytes, count * item_bytes)
    else:
        axes = [range(0, stride * size, stride) for stride, size in access.outer]
        for place in itertools.product(*axes):
            yield from _rows(reader, part, access, item_bytes, sum(place), buffer)


def _inflated(reader: Reader, part: Part, access: Access, item_bytes: int) -> Iterator[Bytes]:
    size, step = access.items * item_bytes, BLOCK_BYTES // item_bytes * item_bytes
    if access.is_contiguous:
        for piece in inflated(reader, part, size, step):
            yield np.frombuffer(bytearray(piece), dtype=np.uint8)
        return
    word = np.dtype(f"V{item_bytes}")
    # A dimension that only repeats is read once, as everywhere.
    kept = [
        (n if stride else min(n, 1), stride)
        for n, stride in zip(part.shape, part.strides, strict=True)
    ]
    box = np.lib.stride_tricks.as_strided(
        span_of(reader, part, item_bytes).view(word),
        [n for n, _ in kept],
        [stride * item_bytes for _, stride in kept],
    )
    data = box.reshape(-1).view(np.uint8)
    for at in range(0, size, step):
        yield data[at : at + step].copy()


def _rows(
    reader: Reader, part: Part, access: Access, item_bytes: int, begin: int, buffer: Buffer
) -> Iterator[Bytes]:
    """The rows that begin at item ``begin``, without what lies between them."""
    at_once = _rows_at_once(access, item_bytes)
    step = BLOCK_BYTES // item_bytes
    run_bytes, stride_bytes = access.run * item_bytes, access.row_stride * item_bytes
    for row in range(0, access.rows, at_once):
        offset = part.offset + (begin + row * access.row_stride) * item_bytes
        count = min(at_once, access.rows - row)
        if count == 1:
            for first in range(0, access.run, step):
                length = min(step, access.run - first) * item_bytes
                yield buffer.read(reader, offset + first * item_bytes, length)
            continue
        data = buffer.read(reader, offset, (count - 1) * stride_bytes + run_bytes)
        seen = np.lib.stride_tricks.as_strided(
            data, (count, run_bytes), (stride_bytes, 1), writeable=False
        )
        yield seen.reshape(-1)  # a copy: rows are apart


def threads() -> int:
    """As many as this process has cores."""
    return max(1, min(THREADS_MAX, len(os.sched_getaffinity(0))))


def spread(
    tasks: Iterable[_Task], work: Callable[[_Task], _Result], count: int | None = None
) -> Iterator[_Result]:
    """Do each task on one of ``count`` threads; the results, in the order of the tasks."""
    waiting = list(tasks)
    number = min(count or threads(), len(waiting))
    if number <= 1:
        yield from map(work, waiting)
        return
    with concurrent.futures.ThreadPoolExecutor(number) as pool:
        try:
            yield from pool.map(work, waiting)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
