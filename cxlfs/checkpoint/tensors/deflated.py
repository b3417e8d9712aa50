"""Arrays of ``.npz`` that ``numpy.savez_compressed`` deflates: their headers, and their bytes.

Other modules compute with the items. Memory: one block, and what zlib keeps.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from cxlfs.checkpoint.formats.npy import MAGIC, Array
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, ProblemError, Tensor
from cxlfs.checkpoint.place import Place, Reader
from cxlfs.checkpoint.tensors.model import Part, StoredTensor, dense_strides
from cxlfs.checkpoint.zips import DEFLATED, Archive, Record

_SUFFIX = ".npz"
_HEAD_BYTES = 12 + 10_000
_READ_BYTES = 1 << 18


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
        if array.item_bytes and array.data + array.size_bytes != record.size_bytes:
            raise DamagedError("its size does not fit its shape")
    except ProblemError as error:
        return StoredTensor(name, "", (), (), str(error))
    strides = dense_strides(array.shape) if array.strides is None else array.strides
    start = (0,) * len(array.shape)
    size = record.stored_bytes
    part = Part(reader.name, record.offset, size, start, array.shape, strides, array.data)
    return StoredTensor(name, array.dtype, array.shape, (part,))


def _head(reader: Reader, record: Record) -> bytes:
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    data = reader.read(record.offset, min(record.stored_bytes, _HEAD_BYTES + 1024))
    try:
        return machine.decompress(data, min(record.size_bytes, _HEAD_BYTES))
    except zlib.error as error:
        raise DamagedError(f"it cannot be inflated: {error}") from error


def inflated(reader: Reader, part: Part, size_bytes: int, block_bytes: int) -> Iterator[bytes]:
    """The first ``size_bytes`` of the items of a deflated part, in pieces of ``block_bytes``; the
    last may be shorter. Raises DamagedError.
    """
    machine = zlib.decompressobj(-zlib.MAX_WBITS)
    ahead, left = part.inflated_ahead or 0, size_bytes
    kept = bytearray()
    at, end = part.offset, part.offset + part.size_bytes
    pending = b""
    while left:
        if not pending and not machine.eof and at < end:
            length = min(_READ_BYTES, end - at)
            pending = reader.read_data(at, length)
            at += length
        try:
            piece = machine.decompress(pending, block_bytes)
        except zlib.error as error:
            raise DamagedError(f"it cannot be inflated: {error}") from error
        pending = machine.unconsumed_tail
        if not piece and not pending and (machine.eof or at >= end):
            raise DamagedError("it does not inflate to its size")
        dropped = min(ahead, len(piece))
        ahead -= dropped
        kept += piece[dropped:]
        while len(kept) >= block_bytes or (kept and len(kept) >= left):
            take = min(block_bytes, left)
            yield bytes(kept[:take])
            del kept[:take]
            left -= take
            if not left:
                return
