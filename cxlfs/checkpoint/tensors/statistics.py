"""Statistics of tensors: smallest, largest, mean and norm of their items, and how many are NaN or
Inf.

Other modules read blocks and reduce them. Each byte is read once, tensors that share it as well.

Invariants
- What is read is at most four times as large as the files: tensors that claim more are left out,
  with a reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from cxlfs.checkpoint.model import ProblemError
from cxlfs.checkpoint.tensors.blocks import TASK_BYTES, Buffer, Seen, access_of, blocks, spread
from cxlfs.checkpoint.tensors.model import Layout, Part, StoredTensor
from cxlfs.checkpoint.tensors.reducing import Moments, Number, Reducer

_OVERLAP_MAX = 4
NEVER_READ = "it overlaps other tensors, and more would be read than the files hold"


@dataclasses.dataclass(frozen=True, slots=True)
class Statistics:
    """``minimum``, ``maximum``, ``mean`` and ``norm`` (the root of the sum of squares) are those of
    the finite items; None where there is none. ``items`` counts components of complex numbers.
    """

    items: int
    nan: int
    inf: int
    minimum: Number | None
    maximum: Number | None
    mean: float | None
    norm: float | None

    @classmethod
    def of(cls, found: Moments) -> Statistics:
        finite = found.items - found.nan - found.inf
        mean = found.total / finite if finite else None
        norm = math.sqrt(found.squares) if finite else None
        return cls(found.items, found.nan, found.inf, found.minimum, found.maximum, mean, norm)


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Items of a part, for one thread; ``items`` None: all of them, and not contiguous."""

    tensor: int
    part: Part
    items: range | None


def statistics(
    layout: Layout,
    tensors: Sequence[StoredTensor] | None = None,
    threads: int | None = None,
    seen: Seen | None = None,
) -> list[Statistics | str]:
    """Of each tensor (None: of all), or why there is none."""
    wanted = layout.tensors if tensors is None else tensors
    found, pieces, same = _planned(layout, wanted)
    tasks = list(_tasks(pieces))
    sizes = [sum(map(_bytes_of, task)) for task in tasks]
    results = spread(tasks, lambda task: _work(layout, wanted, task), threads)
    for read, done in zip(itertools.accumulate(sizes), results, strict=True):
        if seen is not None:
            seen(read, sum(sizes))
        for number, result in done:
            so_far = found[number]
            if isinstance(result, str):
                found[number] = so_far if isinstance(so_far, str) else result
            elif isinstance(so_far, Moments):
                so_far.add(result)
    for number, known in same.items():
        found[number] = found[known]
    return [each if isinstance(each, str) else Statistics.of(each) for each in found]


def _planned(
    layout: Layout, wanted: Sequence[StoredTensor]
) -> tuple[list[Moments | str], list[_Piece], dict[int, int]]:
    """Of each tensor an empty result, or why it is not read; what is read; and for each tensor that
    is the same as one before it, which one that is.
    """
    budget = _OVERLAP_MAX * sum(file.size_bytes or 0 for file in layout.files)
    found: list[Moments | str] = []
    pieces: list[_Piece] = []
    first: dict[tuple[str, tuple[Part, ...]], int] = {}
    same: dict[int, int] = {}
    for number, tensor in enumerate(wanted):
        found.append(Moments() if tensor.reason is None else tensor.reason)
        if tensor.reason is not None:
            continue
        known = first.setdefault((tensor.dtype, tensor.parts), number)
        if known != number:
            same[number] = known
            continue
        budget -= tensor.size_bytes
        taken = _pieces(number, tensor) if budget >= 0 else NEVER_READ
        if isinstance(taken, str):
            found[number] = taken
        else:
            pieces += taken
    return found, pieces, same


def _pieces(number: int, tensor: StoredTensor) -> list[_Piece] | str:
    """What there is to do for a tensor; a text: why it cannot be done."""
    of_item = tensor.type
    if of_item is None:
        return "its items are not numbers"
    found = []
    step = TASK_BYTES // of_item.item_bytes
    try:
        for part in tensor.parts:
            access = access_of(part, of_item.item_bytes)
            if not access.is_contiguous or part.codec is not None:
                found.append(_Piece(number, part, None))
                continue
            begins = range(0, access.items, step)
            ends = (min(begin + step, access.items) for begin in begins)
            found += [_Piece(number, part, range(*each)) for each in zip(begins, ends, strict=True)]
    except ProblemError as error:
        return str(error)
    return found


def _tasks(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces of one file, in the order in which they lie there, with enough to read."""
    ordered = sorted(pieces, key=lambda each: (each.part.file, each.part.offset))
    task: list[_Piece] = []
    size = 0
    for piece in ordered:
        if task and (size >= TASK_BYTES or task[0].part.file != piece.part.file):
            yield task
            task, size = [], 0
        task.append(piece)
        size += _bytes_of(piece)
    if task:
        yield task


def _bytes_of(piece: _Piece) -> int:
    """Those of a part that is read in several pieces are shared out among them."""
    if piece.items is None:
        return piece.part.size_bytes
    return piece.part.size_bytes * len(piece.items) // max(piece.part.items, 1)


def _work(
    layout: Layout, tensors: Sequence[StoredTensor], task: list[_Piece]
) -> list[tuple[int, Moments | str]]:
    """Of each piece of a task."""
    found: list[tuple[int, Moments | str]] = []
    buffer, reducer = Buffer(), Reducer()
    try:
        with layout.home.open(task[0].part.file) as reader:
            for piece in task:
                of_item = tensors[piece.tensor].type
                if of_item is None:
                    continue
                of_piece = Moments()
                try:
                    size = of_item.item_bytes
                    for block in blocks(reader, piece.part, size, buffer, piece.items):
                        of_piece.add(reducer.moments(block, of_item))
                except ProblemError as error:
                    found.append((piece.tensor, str(error)))
                else:
                    repeats = access_of(piece.part, size).repeats
                    found.append((piece.tensor, of_piece.times(repeats)))
    except ProblemError as error:
        found = [(piece.tensor, str(error)) for piece in task]
    return found
