"""Read every byte of a checkpoint, and compare every checksum that its format has.

On a cxlfs mount reading is itself a verification: the store refuses bytes whose checksum differs,
and the tensor that they belong to is found by its place in the file.

Never here: what a format is. Memory: one piece of a file and one of what it inflates to.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

from cxlfs.checkpoint import limits, zstd
from cxlfs.checkpoint.model import (
    Algorithm,
    BeyondLimitsError,
    Contents,
    DamagedError,
    IncompleteError,
    ProblemError,
    Region,
    Tensor,
)
from cxlfs.checkpoint.place import Place, Reader, UnreadableRangeError
from cxlfs.checkpoint.varints import varint
from cxlfs.native import crc32c
from cxlfs.units import MIB

_CRC32, _CRC32C = 0xEDB8_8320, 0x82F6_3B78
"""Polynomials, lowest bit last."""
_MASK_DELTA = 0xA282EAD8
_HOLE_BYTES_MIN = MIB
"""Smaller ones are not worth a word."""
_LENGTH_BYTES_MAX = 10
"""Of a varint."""
_Update = Callable[[bytes, int], int]


def verify_content(place: Place, contents: Contents) -> None:
    """Adds a problem for each file that does not hold what was written; the first one in each."""
    by_file: dict[str, list[Region]] = {}
    for region in contents.regions:
        by_file.setdefault(region.file, []).append(region)
    for file in contents.files:
        if file.size_bytes is None or not file.is_needed:
            continue
        regions = sorted(by_file.get(file.name, ()), key=lambda each: each.offset)
        try:
            with place.open(file.name) as reader:
                _verify_file(reader, regions, contents)
        except UnreadableRangeError as error:
            words = _words(contents, file.name, error.offset, error.length, "")
            contents.problems.append(DamagedError(f"{words}: {error}" if words else str(error)))
        except ProblemError as error:
            contents.problems.append(error)


def _verify_file(reader: Reader, regions: list[Region], contents: Contents) -> None:
    at = holes = 0
    for region in regions:
        if region.offset < at:
            raise DamagedError(f"{region.label[:200]} overlaps what lies before it")
        holes += _read_through(reader, at, region.offset)
        end = region.offset + region.size_bytes
        if end > reader.size_bytes:
            raise IncompleteError(f"it ends in {region.label[:200]}")
        if region.algorithm is Algorithm.ZSTD:
            is_good, what = zstd.is_frame(_pieces(reader, region.offset, end)), "frame"
        else:
            is_good, what = _checksum(reader, region) == region.expected, "checksum"
        if not is_good:
            label = f"the {what} of {region.label[:200]} differs"
            words = _words(contents, region.file, region.offset, region.size_bytes, label)
            raise DamagedError(words)
        at = end
    holes += _read_through(reader, at, reader.size_bytes)
    _say_holes(reader, holes, contents)


def _words(contents: Contents, file: str, offset: int, length: int, otherwise: str) -> str:
    """``tensor NAME``, for the first tensor that has one of these bytes."""
    tensor = _tensor_at(contents.tensors, file, offset, length)
    if tensor is None:
        return otherwise
    many = len(contents.files) > 1 and file
    return f"tensor {tensor.name[:200]}" + (f" of {file}" if many else "")


def _tensor_at(tensors: list[Tensor], file: str, offset: int, length: int) -> Tensor | None:
    for tensor in tensors:
        if tensor.file != file or tensor.offset is None or tensor.size_bytes is None:
            continue
        if tensor.offset < offset + length and offset < tensor.offset + tensor.size_bytes:
            return tensor
    return None


def _pieces(reader: Reader, begin: int, end: int) -> Iterator[bytes]:
    while begin < end:
        length = min(limits.READ_BYTES, end - begin)
        yield reader.read_data(begin, length)
        begin += length


def _read_through(reader: Reader, begin: int, end: int) -> int:
    """What has no checksum of its own: the system may still refuse it. Returns how many bytes are
    holes, of which there is nothing to read.
    """
    holes = 0
    for first, last, is_hole in reader.stretches(begin, end):
        holes += last - first if is_hole else 0
        for _ in () if is_hole else _pieces(reader, first, last):
            pass
    return holes


def _say_holes(reader: Reader, holes: int, contents: Contents) -> None:
    """A hole may be zeros that a copy or a file system has left out, or room that was given before
    the data came.
    """
    if holes < _HOLE_BYTES_MIN:
        return
    sizes = [t.size_bytes or 0 for t in contents.tensors if t.file == reader.name]
    if sizes and holes >= sum(sizes) - _HOLE_BYTES_MIN:
        raise BeyondLimitsError("nothing of its tensors was written: they are holes")
    name = f"{reader.name}: " if reader.name else ""
    contents.notes.append(f"{name}{holes} bytes of it are holes: zeros, or never written")


def _checksum(reader: Reader, region: Region) -> int:
    end = region.offset + region.size_bytes
    if region.algorithm is Algorithm.STRINGS:
        return _strings_checksum(reader, region)
    if region.deflated:
        return _inflated_checksum(_pieces(reader, region.offset, end))
    is_zip = region.algorithm is Algorithm.CRC32
    update: _Update = zlib.crc32 if is_zip else crc32c
    value = 0
    for first, last, is_hole in reader.stretches(region.offset, end):
        if is_hole:
            value = after_zeros(value, last - first, _CRC32 if is_zip else _CRC32C)
            continue
        for piece in _pieces(reader, first, last):
            value = update(piece, value)
    return masked(value) if region.algorithm is Algorithm.CRC32C_MASKED else value


def after_zeros(crc: int, length: int, polynomial: int) -> int:
    """The checksum of what ``crc`` is of, with ``length`` zeros behind it.

    A zero bit is a linear map of the 32 bits; the map of many is made by squaring.
    """
    rows = [polynomial] + [1 << bit for bit in range(31)]
    value, bits = crc ^ 0xFFFF_FFFF, 8 * length
    while bits:
        if bits & 1:
            value = _product(rows, value)
        rows = [_product(rows, row) for row in rows]
        bits >>= 1
    return value ^ 0xFFFF_FFFF


def _product(rows: list[int], vector: int) -> int:
    found = 0
    for bit, row in enumerate(rows):
        if vector >> bit & 1:
            found ^= row
    return found


def _strings_checksum(reader: Reader, region: Region) -> int:
    """Of lengths, their own checksum and the strings; -1: they are no strings.

    Source: tensorflow/core/util/tensor_bundle/tensor_bundle.cc, ``WriteStringTensor`` (2.21).
    """
    if region.items > region.size_bytes:
        return -1
    head_bytes = min(region.size_bytes, _LENGTH_BYTES_MAX * region.items + 4)
    head = reader.read(region.offset, head_bytes)
    value = total = at = 0
    for _ in range(region.items):
        try:
            length, at = varint(head, at)
        except DamagedError:
            return -1
        total += length
        value = crc32c(length.to_bytes(4 if length < 1 << 32 else 8, "little"), value)
    stored = head[at : at + 4]
    if at + 4 + total != region.size_bytes or int.from_bytes(stored, "little") != masked(value):
        return -1
    value = crc32c(stored, value)
    begin = region.offset + at + 4
    for piece in _pieces(reader, begin, begin + total):
        value = crc32c(piece, value)
    return masked(value)


def _inflated_checksum(pieces: Iterator[bytes]) -> int:
    """The CRC-32 of what deflated pieces stand for; -1: they are not deflated data."""
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    value = 0
    try:
        for piece in pieces:
            left = piece
            while left:
                value = zlib.crc32(machine.decompress(left, limits.READ_BYTES), value)
                left = machine.unconsumed_tail
        value = zlib.crc32(machine.flush(), value)
    except zlib.error:
        return -1
    return value if machine.eof else -1


def masked(crc: int) -> int:
    """As LevelDB and TensorFlow store a CRC32C (util/crc32c.h)."""
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFF_FFFF
