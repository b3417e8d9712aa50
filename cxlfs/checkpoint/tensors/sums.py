"""CRC32C of files and of ranges in them, each byte read once, on several cores.

A file is cut where a range begins or ends. Each piece gets a checksum of its own, and those of
ranges and of whole files are put together from them.

Other modules say which ranges. Memory: one block for each thread, and the list of pieces.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cxlfs.checkpoint.model import BeyondLimitsError, ProblemError
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.tensors.blocks import BLOCK_BYTES, TASK_BYTES, Buffer, spread
from cxlfs.native import crc32c

_POLYNOMIAL = 0x82F6_3B78
_JOINS_MAX = 1 << 22
"""Of pieces, for all ranges of a checkpoint: tensors that overlap have pieces in common."""

Range = tuple[int, int]
"""``[begin, end)`` of a file."""


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """Of one file. ``problem``: why not all of it could be read. ``ranges``: those asked for that
    lie in what was read.
    """

    size_bytes: int
    crc32c: int | None
    ranges: dict[Range, int]
    problem: str | None = None


@functools.cache
def _after_zero_bits(power: int) -> tuple[int, ...]:
    """What 2**power zero bits make of each bit of a checksum."""
    if not power:
        return (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    half = _after_zero_bits(power - 1)
    return tuple(_applied(half, row) for row in half)


def _applied(rows: tuple[int, ...], vector: int) -> int:
    found = bit = 0
    while vector:
        if vector & 1:
            found ^= rows[bit]
        vector >>= 1
        bit += 1
    return found


def joined(first: int, second: int, second_bytes: int) -> int:
    """The checksum of two pieces that follow each other, from those of both."""
    bits, power = 8 * second_bytes, 0
    while bits:
        if bits & 1:
            first = _applied(_after_zero_bits(power), first)
        bits >>= 1
        power += 1
    return first ^ second


def file_sums(
    place: Place, wanted: Mapping[str, Sequence[Range]], threads: int | None = None
) -> dict[str, Sums]:
    """Of each file, as long as it is now. Raises BeyondLimitsError: ranges overlap too much."""
    sizes: dict[str, int] = {}
    found: dict[str, Sums] = {}
    for name in wanted:
        try:
            with place.open(name) as reader:
                sizes[name] = reader.size_bytes
        except ProblemError as error:
            found[name] = Sums(0, None, {}, str(error))
    tasks = [
        task
        for name in wanted
        if name in sizes
        for task in _tasks(name, _cuts(wanted[name], sizes[name]))
    ]
    pieces: dict[str, list[tuple[Range, int]]] = {name: [] for name in sizes}
    problems: dict[str, str] = {}
    for task, done in zip(
        tasks, spread(tasks, lambda each: _work(place, each), threads), strict=True
    ):
        pieces[task.file] += done.pieces
        if done.problem is not None:
            problems.setdefault(task.file, done.problem)
    left = _JOINS_MAX
    for name, size in sizes.items():
        inside = pieces[name]
        index = {piece[0][0]: number for number, piece in enumerate(inside)}
        ranges: dict[Range, int] = {}
        for each in {*wanted[name]}:
            taken = list(_covering(inside, index, each, left))
            left -= len(taken)
            value = _together(taken, each)
            if value is not None:
                ranges[each] = value
        whole = _together(inside, (0, size))
        found[name] = Sums(size, whole, ranges, problems.get(name))
    return {name: found[name] for name in wanted}


def _cuts(ranges: Iterable[Range], size_bytes: int) -> list[int]:
    ends = {end for each in ranges for end in each if 0 < end < size_bytes}
    return [0, *sorted(ends), size_bytes] if size_bytes else []


@dataclasses.dataclass(frozen=True, slots=True)
class _Task:
    file: str
    cuts: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    pieces: list[tuple[Range, int]]
    problem: str | None = None


def _tasks(file: str, cuts: list[int]) -> Iterator[_Task]:
    """Neighbouring pieces for one thread, none larger than what a task reads."""
    group: list[int] = cuts[:1]
    for begin, end in itertools.pairwise(cuts):
        for stop in [*range(begin + TASK_BYTES, end, TASK_BYTES), end]:
            group.append(stop)
            if stop - group[0] >= TASK_BYTES:
                yield _Task(file, tuple(group))
                group = [stop]
    if len(group) > 1:
        yield _Task(file, tuple(group))


def _work(place: Place, task: _Task) -> _Done:
    found: list[tuple[Range, int]] = []
    buffer = Buffer()
    at, last = task.cuts[0], task.cuts[-1]
    begin, crc, number = at, 0, 1
    try:
        with place.open(task.file) as reader:
            while at < last:
                block = buffer.read(reader, at, min(BLOCK_BYTES, last - at)).data
                seen = 0
                while seen < len(block):
                    take = min(len(block) - seen, task.cuts[number] - at - seen)
                    crc = crc32c(block[seen : seen + take], crc)
                    seen += take
                    if at + seen == task.cuts[number]:
                        found.append(((begin, at + seen), crc))
                        begin, crc, number = at + seen, 0, number + 1
                at += len(block)
    except ProblemError as error:
        return _Done(found, str(error))
    return _Done(found)


def _covering(
    pieces: list[tuple[Range, int]], index: dict[int, int], wanted: Range, left: int
) -> Iterator[tuple[Range, int]]:
    """The pieces of a range, in their order. Raises BeyondLimitsError."""
    number = index.get(wanted[0])
    while number is not None and number < len(pieces) and pieces[number][0][1] <= wanted[1]:
        left -= 1
        if left < 0:
            raise BeyondLimitsError("its tensors overlap more than what is put together")
        yield pieces[number]
        number += 1


def _together(pieces: list[tuple[Range, int]], wanted: Range) -> int | None:
    """None: the pieces are not all of it."""
    at, crc = wanted[0], 0
    for (begin, end), value in pieces:
        if begin != at:
            return None
        crc = joined(crc, value, end - begin)
        at = end
    return crc if at == wanted[1] else None
