"""What blocks of items come to: smallest, largest, sum, sum of squares, NaN and Inf; and what two
blocks differ in, item by item.

NumPy has no bfloat16 and no floats of eight bits, and is slow with float16. So that all floats run
at the speed of memory, a block is looked at as integers first. Floats with a sign are ordered as
integers with a sign are: two maxima of integers say what is smallest and largest, and whether there
is any NaN or Inf. Then the block is summed as float32 in rows of 256, and the rows as float64.
Where that could be wrong (NaN, Inf, a square that float32 cannot hold) it is summed as float64.

Other modules read the blocks.

Invariants
- Sums are those of finite items alone; NaN and Inf are counted beside them.
- The error of a sum is at most 1e-5 of the sum of the magnitudes, that of a sum of squares at most
  1e-5 of itself.
- Of bits that are the same nothing has changed, and of others something has: -0.0 and 0.0 differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cxlfs.checkpoint.tensors.blocks import BLOCK_BYTES, Bytes
from cxlfs.checkpoint.tensors.dtypes import ItemType, Kind, byte_values

Number = int | float
_ROW = 256
_ONES = np.ones(_ROW, dtype=np.float32)
_SQUARE_MIN = 2.0**-80
"""Mean squares below it are of items whose squares float32 may not hold."""
_UNSIGNED = {16: np.uint16, 32: np.uint32, 64: np.uint64}
_SIGNED = {16: np.int16, 32: np.int32, 64: np.int64}
_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]


@dataclasses.dataclass(slots=True)
class Moments:
    """Of items seen so far. ``minimum`` and ``maximum`` are None where none was finite."""

    items: int = 0
    nan: int = 0
    inf: int = 0
    minimum: Number | None = None
    maximum: Number | None = None
    total: float = 0.0
    squares: float = 0.0

    def add(self, other: Moments) -> None:
        self.items += other.items
        self.nan += other.nan
        self.inf += other.inf
        self.total += other.total
        self.squares += other.squares
        self.see(other.minimum, other.maximum)

    def see(self, smallest: Number | None, largest: Number | None) -> None:
        if smallest is not None and (self.minimum is None or smallest < self.minimum):
            self.minimum = smallest
        if largest is not None and (self.maximum is None or largest > self.maximum):
            self.maximum = largest

    def times(self, count: int) -> Moments:
        """Of items that stand so often each."""
        return Moments(
            self.items * count,
            self.nan * count,
            self.inf * count,
            self.minimum,
            self.maximum,
            self.total * count,
            self.squares * count,
        )


@dataclasses.dataclass(slots=True)
class Change:
    """Of pairs of items: how many differ in their bits, and by how much. ``unmeasured``: pairs that
    differ and of which one is NaN or Inf; they are in no sum.
    """

    items: int = 0
    changed: int = 0
    unmeasured: int = 0
    squares_before: float = 0.0
    squares: float = 0.0
    largest: float = 0.0

    def add(self, other: Change) -> None:
        self.items += other.items
        self.changed += other.changed
        self.unmeasured += other.unmeasured
        self.squares_before += other.squares_before
        self.squares += other.squares
        self.largest = max(self.largest, other.largest)


class Reducer:
    """Reduces blocks of one type; memory for one thread."""

    def __init__(self) -> None:
        self._words = np.empty(BLOCK_BYTES // 4, dtype=np.uint32)
        self._other = np.empty(BLOCK_BYTES // 4, dtype=np.uint32)

    def moments(self, block: Bytes, of_item: ItemType) -> Moments:
        """Of a block of whole items; the block is changed where it is big-endian."""
        _order(block, of_item)
        with np.errstate(all="ignore"):
            if of_item.kind is Kind.BYTE:
                return _of_bytes(block, of_item)
            if of_item.kind is Kind.INTEGER:
                return _of_integers(block, of_item)
            return self._of_floats(block, of_item)

    def change(self, before: Bytes, after: Bytes, of_item: ItemType, other: ItemType) -> Change:
        """Of two blocks of as many items, of types that differ in the order of bytes at most."""
        _order(before, of_item)
        _order(after, other)
        size = of_item.component_bytes
        words = _UNSIGNED.get(of_item.bits, np.uint8)
        with np.errstate(all="ignore"):
            found = Change(len(before) // size)
            different = before.view(words) != after.view(words)
            found.changed = int(np.count_nonzero(different))
            if of_item.kind is not Kind.FLOAT or of_item.bits == 64:
                _measure(found, _doubles(before, of_item), _doubles(after, of_item), different)
                return found
            if not self._measure_floats(found, before, after, of_item):
                found.squares_before = found.squares = found.largest = 0.0
                _measure(found, _doubles(before, of_item), _doubles(after, of_item), different)
        return found

    # --- floats -----------------------------------------------------------------------------

    def _of_floats(self, block: Bytes, of_item: ItemType) -> Moments:
        unsigned, signed = block.view(_UNSIGNED[of_item.bits]), block.view(_SIGNED[of_item.bits])
        sign = 1 << (of_item.bits - 1)
        top, bottom = int(signed.max()), int(unsigned.max())
        if max(top, bottom - sign) >= of_item.infinity_bits:
            return _of_doubles(_doubles(block, of_item))
        if top < 0:  # all are negative: the nearest to zero is the smallest as an integer
            top = int(signed.min()) + 2 * sign
        if bottom < sign:  # none is negative
            bottom = int(unsigned.min())
        ends = np.array([bottom, top], dtype=unsigned.dtype)
        smallest, largest = _doubles(ends.view(np.uint8), of_item).tolist()
        found = Moments(len(unsigned), minimum=smallest, maximum=largest)
        if smallest == largest == 0:
            return found
        if of_item.bits == 64:
            doubles = block.view(np.float64)
            found.total, found.squares = float(doubles.sum()), _squares(doubles)
            return found
        for floats in self._as_floats(block, of_item, self._words):
            found.total += _sum(floats)
            found.squares += _squares(floats)
        if not _are_sound(found.total, found.squares, found.items):
            doubles = _doubles(block, of_item)
            found.total, found.squares = float(doubles.sum()), _squares(doubles)
        return found

    def _measure_floats(
        self, found: Change, before: Bytes, after: Bytes, of_item: ItemType
    ) -> bool:
        """False: it has to be done as float64."""
        pairs = zip(
            self._as_floats(before, of_item, self._words),
            self._as_floats(after, of_item, self._other),
            strict=True,
        )
        for one, other in pairs:
            found.squares_before += _squares(one)
            if not found.changed:
                continue
            other = np.subtract(other, one, out=self._other[: len(one)].view(np.float32))  # noqa: PLW2901  in its place
            bits = other.view(np.uint32)
            largest = max(int(other.view(np.int32).max()), int(bits.max()) - (1 << 31), 0)
            value = float(np.array([largest], dtype=np.uint32).view(np.float32)[0])
            found.largest = max(found.largest, value)
            found.squares += _squares(other)
        is_sound = _are_sound(0.0, found.squares_before, found.items)
        return is_sound and (not found.changed or _are_sound(0.0, found.squares, found.items))

    def _as_floats(
        self, block: Bytes, of_item: ItemType, target: NDArray[np.uint32]
    ) -> list[_Floats] | _Halves:
        """The items as float32. Those of 16 bits come in two lots, every other item in each."""
        if of_item.bits == 32:
            return [block.view(np.float32)]
        return _Halves(block, of_item, target)


class _Halves:
    """Items of 16 bits, two in each word of 32: sign, exponent and fraction are put where those of
    a float32 are. What is then wrong is the bias of the exponent, a factor.
    """

    def __init__(self, block: Bytes, of_item: ItemType, target: NDArray[np.uint32]) -> None:
        self._block, self._item, self._target = block, of_item, target

    def __iter__(self) -> Iterator[_Floats]:
        pairs = len(self._block) // 4
        words = self._block[: 4 * pairs].view(np.uint32)
        target = self._target[:pairs]
        if pairs:
            np.left_shift(words, 16, out=target)
            yield self._in_place(target)
            np.bitwise_and(words, 0xFFFF_0000, out=target)
            yield self._in_place(target)
        rest = self._block[4 * pairs :]
        if len(rest):
            yield _doubles(rest, self._item).astype(np.float32)

    def _in_place(self, target: NDArray[np.uint32]) -> _Floats:
        floats = target.view(np.float32)
        moved = 8 - self._item.exponent_bits
        if moved:
            signed = target.view(np.int32)
            np.right_shift(signed, moved, out=signed)
            # The sign was copied on the way: all of its copies but the first go.
            np.bitwise_and(target, ~np.uint32(((1 << moved) - 1) << (31 - moved)), out=target)
            bias = (1 << (self._item.exponent_bits - 1)) - 1
            np.multiply(floats, np.float32(2.0 ** (127 - bias)), out=floats)
        return floats


def _order(block: Bytes, of_item: ItemType) -> None:
    if of_item.is_big_endian:
        block.view(_UNSIGNED[of_item.bits]).byteswap(inplace=True)


def _squares(values: _Floats | _Doubles) -> float:
    """Their sum: in rows, and the rows as float64."""
    whole = len(values) // _ROW * _ROW
    rows = values[:whole].reshape(-1, _ROW)
    found = float(np.vecdot(rows, rows).sum(dtype=np.float64)) if whole else 0.0
    if whole < len(values):
        rest = values[whole:].astype(np.float64)
        found += float(np.vecdot(rest, rest))
    return found


def _sum(values: _Floats) -> float:
    whole = len(values) // _ROW * _ROW
    in_rows = np.vecdot(values[:whole].reshape(-1, _ROW), _ONES)
    found = float(in_rows.sum(dtype=np.float64)) if whole else 0.0
    return found + float(values[whole:].sum(dtype=np.float64)) if whole < len(values) else found


def _are_sound(total: float, squares: float, items: int) -> bool:
    return math.isfinite(total) and math.isfinite(squares) and squares >= items * _SQUARE_MIN


def _doubles(block: Bytes, of_item: ItemType) -> _Doubles:
    """The items as float64, exactly (integers of 64 bits: rounded)."""
    if of_item.kind is Kind.BYTE:
        return byte_values(of_item.name)[block]
    if of_item.kind is Kind.INTEGER:
        words = _SIGNED if of_item.is_signed else _UNSIGNED
        return block.view(words[of_item.bits]).astype(np.float64)
    if of_item.name == "bfloat16":
        words_32 = block.view(np.uint16).astype(np.uint32)
        return (words_32 << 16).view(np.float32).astype(np.float64)
    return block.view({16: np.float16, 32: np.float32, 64: np.float64}[of_item.bits]).astype(
        np.float64
    )


def _of_doubles(values: _Doubles) -> Moments:
    finite = values[np.isfinite(values)]
    nan = int(np.count_nonzero(np.isnan(values)))
    found = Moments(len(values), nan, len(values) - len(finite) - nan)
    if len(finite):
        found.see(float(finite.min()), float(finite.max()))
        found.total = float(finite.sum())
        found.squares = _squares(finite)
    return found


def _of_integers(block: Bytes, of_item: ItemType) -> Moments:
    items = block.view((_SIGNED if of_item.is_signed else _UNSIGNED)[of_item.bits])
    found = _of_doubles(items.astype(np.float64))
    found.minimum, found.maximum = int(items.min()), int(items.max())
    return found


def _of_bytes(block: Bytes, of_item: ItemType) -> Moments:
    """By how often each of the 256 patterns stands there; they are counted in pairs."""
    pairs = len(block) // 2
    table = np.bincount(block[: 2 * pairs].view(np.uint16), minlength=1 << 16).reshape(256, 256)
    counts = table.sum(axis=0) + table.sum(axis=1)
    if len(block) % 2:
        counts[block[-1]] += 1
    values = byte_values(of_item.name)
    finite = np.isfinite(values)
    nan = int(counts[np.isnan(values)].sum())
    found = Moments(len(block), nan, int(counts[~finite].sum()) - nan)
    there = finite & (counts > 0)
    if there.any():
        smallest, largest = float(values[there].min()), float(values[there].max())
        whole = not of_item.is_float
        found.see(int(smallest) if whole else smallest, int(largest) if whole else largest)
        found.total = float((counts[there] * values[there]).sum())
        found.squares = float((counts[there] * values[there] ** 2).sum())
    return found


def _measure(
    found: Change, before: _Doubles, after: _Doubles, different: NDArray[np.bool_]
) -> None:
    finite = np.isfinite(before)
    found.squares_before = _squares(before[finite])
    if not found.changed:
        return
    change = after[different] - before[different]
    measured = change[np.isfinite(change)]
    found.unmeasured = len(change) - len(measured)
    if len(measured):
        found.squares = _squares(measured)
        found.largest = float(np.abs(measured).max())
