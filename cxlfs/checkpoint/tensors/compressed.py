"""Arrays that are compressed: the headers of those that ``numpy.savez_compressed`` deflates, and
the bytes of any part that is one compressed stream.

Other modules compute with the items, and choose the library for Zstandard.

Invariants
- Whatever a stream inflates to, no more is in memory than was asked for, and the window of a frame.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cxlfs.checkpoint import limits, zstd
from cxlfs.checkpoint.formats.npy import MAGIC, Array
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, ProblemError, Tensor
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.checkpoint.tensors.dtypes import item_type
from cxlfs.checkpoint.tensors.model import (
    Codec,
    Part,
    StoredTensor,
    dense_strides,
    span_items,
)
from cxlfs.checkpoint.zips import DEFLATED, Archive, Record
from cxlfs.units import MIB

_SUFFIX = ".npz"
_HEAD_BYTES = 12 + 10_000
_READ_BYTES = 1 << 18
TOGETHER_BYTES_MAX = 256 * MIB
"""Of a tensor, or a part of one, that is held in memory as a whole."""


def tensors_in(home: Place, tensors: list[Tensor]) -> dict[tuple[str, str], StoredTensor]:
    """By file and name: those of ``tensors`` that are deflated arrays."""
    found: dict[tuple[str, str], StoredTensor] = {}
    by_file: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        if (tensor.file or home.name).endswith(_SUFFIX):
            by_file.setdefault(tensor.file, []).append(tensor)
    for file, inside in by_file.items():
        try:
            with home.open(file) as reader:
                archive = Archive(reader)
                for tensor in inside:
                    record = archive.records.get(f"{tensor.name}.npy")
                    if record is not None and record.method == DEFLATED:
                        found[file, tensor.name] = _array(reader, record, tensor.name)
        except ProblemError as error:
            for tensor in inside:
                found[file, tensor.name] = StoredTensor(tensor.name, "", (), (), str(error))
    return found


def _array(reader: Reader, record: Record, name: str) -> StoredTensor:
    try:
        head = _head(reader, record)
        if not head.startswith(MAGIC):
            raise BeyondLimitsError("it is no array: NumPy gives its bytes")
        array = Array(head)
        if (
            item_type(array.dtype) is not None
            and array.data + array.size_bytes != record.size_bytes
        ):
            raise DamagedError("its size does not fit its shape")
    except ProblemError as error:
        return StoredTensor(name, "", (), (), str(error))
    strides = dense_strides(array.shape) if array.strides is None else array.strides
    start = (0,) * len(array.shape)
    size = record.stored_bytes
    place = reader.name, record.offset, size
    part = Part(*place, start, array.shape, strides, Codec.DEFLATE, array.data)
    return StoredTensor(name, array.dtype, array.shape, (part,))


def _head(reader: Reader, record: Record) -> bytes:
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    data = reader.read(record.offset, min(record.stored_bytes, _HEAD_BYTES + 1024))
    try:
        return machine.decompress(data, min(record.size_bytes, _HEAD_BYTES))
    except zlib.error as error:
        raise DamagedError(f"it cannot be inflated: {error}") from error


# --- reading --------------------------------------------------------------------------------


def inflated(reader: Reader, part: Part, size_bytes: int, block_bytes: int) -> Iterator[bytes]:
    """The first ``size_bytes`` of the items of a compressed part, in pieces of ``block_bytes``; the
    last may be shorter. Raises DamagedError, BeyondLimitsError.
    """
    if part.ahead_bytes + size_bytes > limits.FRAME_BYTES_MAX:
        raise BeyondLimitsError("it inflates to more than is read")
    stream = _Deflated(reader, part) if part.codec is Codec.DEFLATE else _Zstandard(reader, part)
    for length in _lengths(part.ahead_bytes, block_bytes):
        _exactly(stream, length)
    for length in _lengths(size_bytes, block_bytes):
        yield _exactly(stream, length)


def span_of(reader: Reader, part: Part, item_bytes: int) -> NDArray[np.uint8]:
    """All from the first item of a compressed part to its last. Raises DamagedError,
    BeyondLimitsError.
    """
    size = span_items(part.shape, part.strides) * item_bytes
    if size > TOGETHER_BYTES_MAX:
        raise BeyondLimitsError("it is compressed, and too large to be inflated as a whole")
    pieces = inflated(reader, part, size, _READ_BYTES)
    return np.frombuffer(bytearray().join(pieces), dtype=np.uint8)


class _Stream(Protocol):
    def read(self, length: int) -> bytes:
        """At most ``length`` bytes; none at the end."""
        ...


def _exactly(stream: _Stream, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        piece = stream.read(length - len(found))
        if not piece:
            raise DamagedError("it does not inflate to its size")
        found += piece
    return bytes(found)


def _lengths(size_bytes: int, block_bytes: int) -> Iterator[int]:
    for at in range(0, size_bytes, block_bytes):
        yield min(block_bytes, size_bytes - at)


class _Stored:
    """The bytes of a part as they are in the file, one after the other."""

    def __init__(self, reader: Reader, part: Part) -> None:
        self._reader, self._at, self._end = reader, part.offset, part.offset + part.size_bytes

    def read(self, length: int = -1) -> bytes:
        left = self._end - self._at
        length = left if length < 0 else min(length, left)
        data = self._reader.read_data(self._at, min(length, _READ_BYTES))
        self._at += len(data)
        return data


class _Deflated:
    def __init__(self, reader: Reader, part: Part) -> None:
        self._stored = _Stored(reader, part)
        self._machine = zlib.decompressobj(-zlib.MAX_WBITS)
        self._pending = b""

    def read(self, length: int) -> bytes:
        """Raises DamagedError."""
        while not self._machine.eof:
            self._pending = self._pending or self._stored.read(_READ_BYTES)
            is_last = not self._pending
            try:
                piece = self._machine.decompress(self._pending, length)
            except zlib.error as error:
                raise DamagedError(f"it cannot be inflated: {error}") from error
            self._pending = self._machine.unconsumed_tail
            if piece or is_last:
                return piece
        return b""


class _Zstandard:
    def __init__(self, reader: Reader, part: Part) -> None:
        self._stored = _Stored(reader, part)
        self._machine = zstd.machine()

    def read(self, length: int) -> bytes:
        """Raises DamagedError."""
        while not self._machine.eof:
            data = self._stored.read(_READ_BYTES) if self._machine.needs_input else b""
            is_last = self._machine.needs_input and not data
            try:
                piece: bytes = self._machine.decompress(data, length)
            except zstd.ZstdError as error:
                raise DamagedError(f"it cannot be inflated: {str(error)[:200]}") from error
            if piece or is_last:
                return piece
        return b""
