"""Frames of Zstandard: inflated within a limit, or gone through from block to block. The standard
library of Python 3.11 has none.

Source: RFC 8878. Inflating is small and slow (a megabyte takes a second), for the headers that
OCDBT compresses; of arrays only the blocks are gone through.
Without dictionaries; the checksum of a frame is not compared, what lies in it has its own.

Never here: what the bytes mean. Whatever is wrong is a DamagedError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError

MAGIC = bytes.fromhex("28b52ffd")
_RAW, _RLE, _COMPRESSED = 0, 1, 2
_LITERAL_BITS = (*(0,) * 16, 1, 1, 1, 1, 2, 2, 3, 3, 4, 6, *range(7, 17))
_LITERAL_BASES = (*range(16), 16, 18, 20, 22, 24, 28, 32, 40, 48, *(64 << n for n in range(11)))
_MATCH_BITS = (*(0,) * 32, 1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, *range(7, 17))
_MATCH_BASES = (
    *range(3, 35),
    *(35, 37, 39, 41, 43, 47, 51, 59, 67, 83, 99),
    *((128 << n) + 3 for n in range(10)),
)
_LITERAL_COUNTS = (4, 3, *(2,) * 11, 1, 1, 1, *(2,) * 9, 3, 2, *(1,) * 5, *(-1,) * 4)
_MATCH_COUNTS = (1, 4, 3, 2, 2, 2, 2, 2, 2, *(1,) * 37, *(-1,) * 7)
_OFFSET_COUNTS = (*(1,) * 6, 2, 2, 2, *(1,) * 15, *(-1,) * 5)
_OFFSET_CODE_MAX = 31
_HUFFMAN_BITS_MAX = 11
_WEIGHT_ACCURACY_MAX = 6
_BLOCK_BYTES_MAX = 128 << 10
_DESCRIBED_BYTES = 5
"""Magic and descriptor."""
_CHECKSUM_BYTES = 4
_BLOCK_HEAD_BYTES = 3


class _Cell(NamedTuple):
    """Of a decoding table: the symbol, and how the next state is read."""

    symbol: int
    bits: int
    base: int


Table = tuple[list[_Cell], int]
"""Cells, and the bits of a state."""


class _Backward:
    """Bits from the end of a stream towards its beginning; zeros beyond it."""

    def __init__(self, data: bytes) -> None:
        if not data or not data[-1]:
            raise DamagedError("a stream of bits has no end")
        self._value = int.from_bytes(data, "little")
        self.left = self._value.bit_length() - 1

    def read(self, count: int) -> int:
        self.left -= count
        if self.left >= 0:
            return (self._value >> self.left) & ((1 << count) - 1)
        return (self._value << -self.left) & ((1 << count) - 1) if self.left > -count else 0


def inflate(data: bytes, limit: int) -> bytes:
    """The content of one frame, which ``data`` begins with; never more than ``limit`` bytes.

    Raises DamagedError, BeyondLimitsError.
    """
    try:
        return _Frame(data, limit).inflate()
    except (IndexError, ValueError) as error:
        raise DamagedError("compressed bytes are damaged") from error


def is_whole(read: Callable[[int, int], bytes], size_bytes: int) -> bool:
    """Whether one frame of ``size_bytes`` ends where they do, and none of its blocks lacks its end.

    ``read``: bytes of it, by offset and length; each is read once. What lies in a block between its
    head and its end is not looked at.
    """
    at = min(_DESCRIBED_BYTES, size_bytes)
    head = read(0, at)
    if len(head) < _DESCRIBED_BYTES or not head.startswith(MAGIC):
        return False
    about = head[4]
    single = about >> 5 & 1
    dictionary, content = (0, 1, 2, 4)[about & 3], (single, 2, 4, 8)[about >> 6]
    at += (1 - single) + dictionary + content
    end = size_bytes - (_CHECKSUM_BYTES if about >> 2 & 1 else 0)
    while at + _BLOCK_HEAD_BYTES <= end:
        kind, size, is_last = _block_head(read(at, _BLOCK_HEAD_BYTES))
        at += _BLOCK_HEAD_BYTES
        stored = 1 if kind == _RLE else size
        if kind > _COMPRESSED or size > _BLOCK_BYTES_MAX or at + stored > end:
            return False
        if not _has_end(read(at, stored)) and kind == _COMPRESSED:
            return False
        at += stored
        if is_last:
            return at == end
    return False


def _block_head(data: bytes) -> tuple[int, int, bool]:
    """Kind and size of a block, and whether it is the last."""
    head = int.from_bytes(data, "little")
    return head >> 1 & 3, head >> 3, bool(head & 1)


def _has_end(block: bytes) -> bool:
    """A block ends with its sequences, or with literals and a count of none: streams of bits, the
    last byte of which is not zero. Literals that are not compressed may be anything.
    """
    try:
        kind, width, size, stored = _literals_head(block)
        end = width + (1 if kind == _RLE else size if kind == _RAW else stored)
        has_sequences = block[end] != 0 or end + 1 != len(block)
        return block[-1] != 0 if has_sequences else kind in (_RAW, _RLE) or block[end - 1] != 0
    except (IndexError, DamagedError):
        return False


def _literals_head(block: bytes) -> tuple[int, int, int, int]:
    """Kind, bytes of the head, bytes of the literals, bytes that they are compressed to (or 0)."""
    kind, form = block[0] & 3, block[0] >> 2 & 3
    if kind in (_RAW, _RLE):
        width = (1, 2, 1, 3)[form]
        size, stored = int.from_bytes(block[:width], "little") >> (3 if width == 1 else 4), 0
    else:
        width, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
        head = int.from_bytes(block[:width], "little") >> 4
        size, stored = head & ((1 << bits) - 1), head >> bits & ((1 << bits) - 1)
    if size > _BLOCK_BYTES_MAX or width + stored > len(block):
        raise DamagedError("compressed bytes are damaged")
    return kind, width, size, stored


class _Frame:
    """What blocks hand on to each other: the output, tables, and the last three offsets."""

    def __init__(self, data: bytes, limit: int) -> None:
        self._data = data
        self._limit = limit
        self._out = bytearray()
        self._offsets = [1, 4, 8]
        self._huffman: Table | None = None
        self._tables: dict[str, Table] = {}

    def inflate(self) -> bytes:
        at = self._begin()
        while True:
            kind, size, is_last = _block_head(self._take(at, _BLOCK_HEAD_BYTES))
            at += _BLOCK_HEAD_BYTES
            if kind == _RLE:
                self._put(self._take(at, 1) * min(size, self._limit + 1))
                at += 1
            elif kind in (_RAW, _COMPRESSED):
                block = self._take(at, size)
                at += size
                if kind == _RAW:
                    self._put(block)
                else:
                    self._block(block)
            else:
                raise DamagedError("compressed bytes are damaged")
            if is_last:
                return bytes(self._out)

    def _begin(self) -> int:
        """Where the first block is."""
        if self._data[:4] != MAGIC:
            raise DamagedError("compressed bytes are damaged")
        about = self._data[4]
        single = about >> 5 & 1
        if about & 3:
            raise BeyondLimitsError("it is compressed with a dictionary")
        sizes = (1 if single else 0, 2, 4, 8)
        return 5 + (1 - single) + sizes[about >> 6]

    def _take(self, at: int, size: int) -> bytes:
        if at + size > len(self._data):
            raise DamagedError("compressed bytes are cut")
        return self._data[at : at + size]

    def _put(self, data: bytes | bytearray) -> None:
        if len(self._out) + len(data) > self._limit:
            raise BeyondLimitsError("it inflates to more than is read")
        self._out += data

    # --- a block ----------------------------------------------------------------------------

    def _block(self, block: bytes) -> None:
        literals, at = self._literals(block)
        count = block[at]
        at += 1
        if count == 255:
            count = int.from_bytes(block[at : at + 2], "little") + 0x7F00
            at += 2
        elif count > 127:
            count = (count - 128 << 8) + block[at]
            at += 1
        if not count:
            self._put(literals)
            return
        modes = block[at]
        at += 1
        for name, shift, counts in (
            ("literals", 6, _LITERAL_COUNTS),
            ("offsets", 4, _OFFSET_COUNTS),
            ("matches", 2, _MATCH_COUNTS),
        ):
            at = self._table(name, modes >> shift & 3, counts, block, at)
        self._sequences(literals, count, _Backward(block[at:]))

    def _table(self, name: str, mode: int, counts: tuple[int, ...], block: bytes, at: int) -> int:
        if mode == 0:
            self._tables[name] = _decoding_table(counts, 5 if name == "offsets" else 6)
        elif mode == 1:
            self._tables[name] = ([_Cell(block[at], 0, 0)], 0)
            return at + 1
        elif mode == 2:
            found, accuracy, at = _read_counts(block, at, 9)
            self._tables[name] = _decoding_table(found, accuracy)
        elif name not in self._tables:
            raise DamagedError("compressed bytes are damaged")
        return at

    def _sequences(self, literals: bytes, count: int, bits: _Backward) -> None:
        tables = [self._tables[name][0] for name in ("literals", "offsets", "matches")]
        states = [bits.read(self._tables[name][1]) for name in ("literals", "offsets", "matches")]
        used = 0
        for number in range(count):
            literal, offset, match = (table[s] for table, s in zip(tables, states, strict=True))
            if offset.symbol > _OFFSET_CODE_MAX:
                raise DamagedError("compressed bytes are damaged")
            distance = (1 << offset.symbol) + bits.read(offset.symbol)
            length = _MATCH_BASES[match.symbol] + bits.read(_MATCH_BITS[match.symbol])
            take = _LITERAL_BASES[literal.symbol] + bits.read(_LITERAL_BITS[literal.symbol])
            if number < count - 1:
                states[0] = literal.base + bits.read(literal.bits)
                states[2] = match.base + bits.read(match.bits)
                states[1] = offset.base + bits.read(offset.bits)
            if bits.left < 0 or used + take > len(literals):
                raise DamagedError("compressed bytes are damaged")
            self._put(literals[used : used + take])
            used += take
            self._copy(self._offset(distance, take), length)
        self._put(literals[used:])

    def _offset(self, value: int, literals: int) -> int:
        """1 to 3 stand for the last offsets; without literals for others of them."""
        recent = self._offsets
        if value > 3:
            offset = value - 3
            self._offsets = [offset, recent[0], recent[1]]
            return offset
        index = value - 1 + (literals == 0)
        offset = recent[0] - 1 if index == 3 else recent[index]
        if index:
            rest = [each for n, each in enumerate(recent) if n != min(index, 2)]
            self._offsets = [offset, *rest]
        return offset

    def _copy(self, offset: int, length: int) -> None:
        out = self._out
        if not 0 < offset <= len(out):
            raise DamagedError("compressed bytes are damaged")
        piece = out[-offset:] if offset >= length else out[-offset:] * (length // offset + 1)
        self._put(piece[:length])

    # --- literals ---------------------------------------------------------------------------

    def _literals(self, block: bytes) -> tuple[bytes, int]:
        """The literals of a block, and where its sequences begin."""
        kind, width, size, packed = _literals_head(block)
        if kind == _RLE:
            return block[width : width + 1] * size, width + 1
        if kind == _RAW:
            return block[width : width + size], width + size
        form, end = block[0] >> 2 & 3, width + packed
        at = width
        if kind == _COMPRESSED:
            self._huffman, at = _read_huffman(block, at)
        if self._huffman is None:
            raise DamagedError("compressed bytes are damaged")
        return self._huffman_streams(block[at:end], size, single=form == 0), end

    def _huffman_streams(self, data: bytes, size: int, *, single: bool) -> bytes:
        if single:
            return self._huffman_stream(data, size)
        lengths = [int.from_bytes(data[n : n + 2], "little") for n in (0, 2, 4)]
        each = (size + 3) // 4
        at, out = 6, b""
        for length in lengths:
            out += self._huffman_stream(data[at : at + length], each)
            at += length
        return out + self._huffman_stream(data[at:], size - 3 * each)

    def _huffman_stream(self, data: bytes, size: int) -> bytes:
        if self._huffman is None or size < 0:
            raise DamagedError("compressed bytes are damaged")
        cells, width = self._huffman
        bits = _Backward(data)
        state = bits.read(width)
        out = bytearray()
        mask = (1 << width) - 1
        for _ in range(size):
            cell = cells[state]
            out.append(cell.symbol)
            state = (state << cell.bits) & mask | bits.read(cell.bits)
        return bytes(out)


# --- tables ---------------------------------------------------------------------------------


def _decoding_table(counts: tuple[int, ...] | list[int], accuracy: int) -> Table:
    """Section 4.1.1: symbols spread over the states, as often as ``counts`` says (-1: once)."""
    size = 1 << accuracy
    symbols = [0] * size
    high = size - 1
    for symbol, count in enumerate(counts):
        if count == -1:
            symbols[high] = symbol
            high -= 1
    at, step, mask = 0, (size >> 1) + (size >> 3) + 3, size - 1
    for symbol, count in enumerate(counts):
        for _ in range(max(count, 0)):
            symbols[at] = symbol
            at = (at + step) & mask
            while at > high:
                at = (at + step) & mask
    following = [1 if count == -1 else count for count in counts]
    cells = []
    for symbol in symbols:
        state = following[symbol]
        following[symbol] += 1
        bits = accuracy - (state.bit_length() - 1)
        cells.append(_Cell(symbol, bits, (state << bits) - size))
    return cells, accuracy


def _read_counts(data: bytes, at: int, accuracy_max: int) -> tuple[list[int], int, int]:
    """Counts and accuracy of a table, and where the next byte is."""
    value = int.from_bytes(data[at : at + 512], "little")
    position = 4
    accuracy = (value & 15) + 5
    if accuracy > accuracy_max:
        raise DamagedError("compressed bytes are damaged")
    remaining = 1 << accuracy
    counts: list[int] = []

    def peek(count: int) -> int:
        return value >> position & ((1 << count) - 1)

    while remaining > 0 and len(counts) < 256:
        position, count = _read_count(peek, position, remaining)
        counts.append(count)
        remaining -= abs(count)
        if count == 0:
            while True:
                repeat = peek(2)
                position += 2
                counts += [0] * repeat
                if repeat != 3 or len(counts) > 256:
                    break
    if remaining or len(counts) > 256:
        raise DamagedError("compressed bytes are damaged")
    return counts, accuracy, at + (position + 7) // 8


def _read_count(peek: Callable[[int], int], position: int, remaining: int) -> tuple[int, int]:
    """Small values take a bit less (section 4.1.1)."""
    width = (remaining + 1).bit_length()
    value = peek(width)
    lower = (1 << width - 1) - 1
    threshold = (1 << width) - 1 - (remaining + 1)
    if value & lower < threshold:
        return position + width - 1, (value & lower) - 1
    if value > lower:
        value -= threshold
    return position + width, value - 1


def _read_huffman(block: bytes, at: int) -> tuple[Table, int]:
    """Section 4.2.1: weights of the symbols, the last of which is implied."""
    head = block[at]
    at += 1
    if head > 127:
        count = head - 127
        packed = block[at : at + (count + 1) // 2]
        weights = [nibble for byte in packed for nibble in (byte >> 4, byte & 15)][:count]
        at += (count + 1) // 2
    else:
        weights = _read_weights(block[at : at + head])
        at += head
    total = sum(1 << weight - 1 for weight in weights if weight)
    if not total:
        raise DamagedError("compressed bytes are damaged")
    width = total.bit_length()
    rest = (1 << width) - total
    if rest & (rest - 1) or width > _HUFFMAN_BITS_MAX:
        raise DamagedError("compressed bytes are damaged")
    weights.append(rest.bit_length())
    cells: list[_Cell] = []
    for weight in range(1, width + 1):
        for symbol, each in enumerate(weights):
            if each == weight:
                cells += [_Cell(symbol, width + 1 - weight, 0)] * (1 << weight - 1)
    if len(cells) != 1 << width:
        raise DamagedError("compressed bytes are damaged")
    return (cells, width), at


def _read_weights(data: bytes) -> list[int]:
    """Weights in two interleaved states."""
    counts, accuracy, at = _read_counts(data, 0, _WEIGHT_ACCURACY_MAX)
    cells, width = _decoding_table(counts, accuracy)
    bits = _Backward(data[at:])
    states = [bits.read(width), bits.read(width)]
    weights: list[int] = []
    turn = 0
    while len(weights) < 255:
        cell = cells[states[turn]]
        weights.append(cell.symbol)
        states[turn] = cell.base + bits.read(cell.bits)
        if bits.left < 0:
            weights.append(cells[states[1 - turn]].symbol)
            return weights
        turn = 1 - turn
    raise DamagedError("compressed bytes are damaged")
