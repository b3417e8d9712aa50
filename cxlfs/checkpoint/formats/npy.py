"""NumPy's ``.npy`` and ``.npz``: a header in Python's syntax and the array; a zip of such files.

Source: numpy/lib/_format_impl.py (2.4). Complete: the array ends where the file does (an array of
objects is a pickle, and ends with it); of an ``.npz`` the archive has its end. ``.npz`` has a
CRC-32 for each array.
"""

from __future__ import annotations

import ast
import re
import struct

from cxlfs.checkpoint import limits, zips
from cxlfs.checkpoint.formats.base import is_cut
from cxlfs.checkpoint.jsons import shape
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Tensor,
)
from cxlfs.checkpoint.pickles import read_pickle
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.zips import Archive, Record

MAGIC = b"\x93NUMPY"
_HEADER_CHARACTERS_MAX = 10_000
"""NumPy's own limit (``max_header_size``), for the same reason: the header is parsed as Python."""
_HEAD_BYTES = 12 + _HEADER_CHARACTERS_MAX
_TYPE = re.compile(r"[<>|=]?([?biufcSaUVmMO])(\d{0,9})(\[\w{1,20}\])?")
_DEPTH_MAX = 8


class Array:
    """The header of one ``.npy``. ``data``: where the array begins; ``item_bytes`` 0: objects."""

    __slots__ = ("data", "dtype", "item_bytes", "shape")

    def __init__(self, head: bytes) -> None:
        """``head``: the first bytes of the file. Raises IncompleteError, DamagedError, ..."""
        if len(head) < 10:
            raise IncompleteError("its header is cut")
        if not head.startswith(MAGIC) or head[6] not in (1, 2, 3):
            raise DamagedError("it does not begin as such a file does")
        width = "<H" if head[6] == 1 else "<L"
        begin = 8 + struct.calcsize(width)
        if len(head) < begin:
            raise IncompleteError("its header is cut")
        length = int(struct.unpack_from(width, head, 8)[0])
        if length > _HEADER_CHARACTERS_MAX:
            raise BeyondLimitsError("its header is larger than what is read")
        self.data = begin + length
        if len(head) < self.data:
            raise IncompleteError("its header is cut")
        fields = _fields(head[begin : self.data].decode("utf-8", "replace"))
        self.dtype = str(fields.get("descr"))[: limits.NAME_CHARACTERS_MAX]
        self.item_bytes = _item_bytes(fields.get("descr"), 0)
        self.shape = shape(fields.get("shape"), "the array")

    @property
    def size_bytes(self) -> int:
        size = self.item_bytes
        for dimension in self.shape:
            size = min(size * dimension, 1 << 80)
        return size


def _fields(source: str) -> dict[object, object]:
    try:
        value = ast.literal_eval(source.strip(" \n\0"))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError) as error:
        raise DamagedError("its header is damaged") from error
    if not isinstance(value, dict):
        raise DamagedError("its header is damaged")
    return value


def _item_bytes(descr: object, depth: int) -> int:
    """Bytes of one item; 0 for objects."""
    if depth > _DEPTH_MAX:
        raise BeyondLimitsError("its type is nested deeper than what is read")
    if isinstance(descr, list):
        return sum(_field_bytes(field, depth) for field in descr)
    if isinstance(descr, tuple) and len(descr) == 2:
        return _item_bytes(descr[0], depth + 1) * _product(descr[1])
    match = _TYPE.fullmatch(descr) if isinstance(descr, str) else None
    if match is None:
        raise DamagedError("the type of its items cannot be")
    if match[1] == "O":
        return 0
    size = int(match[2] or "1")
    return size * 4 if match[1] == "U" else size


def _field_bytes(field: object, depth: int) -> int:
    if not isinstance(field, tuple) or not 2 <= len(field) <= 3:
        raise DamagedError("the type of its items cannot be")
    size = _item_bytes(field[1], depth + 1)
    return size * _product(field[2]) if len(field) == 3 else size


def _product(dimensions: object) -> int:
    size = 1
    for dimension in shape(dimensions if isinstance(dimensions, tuple) else (dimensions,), "it"):
        size = min(size * dimension, 1 << 80)
    return size


class NumpyArray:
    kind = "numpy"

    def recognises(self, name: str, head: bytes) -> bool:
        return head.startswith(MAGIC) or name.endswith(".npy")

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        head = reader.head(_HEAD_BYTES)
        if is_cut(head[:10], MAGIC):
            raise IncompleteError("its header was not written")
        array = Array(head)
        if not array.item_bytes and "O" in array.dtype:
            self._check_objects(reader, array)
        elif array.data + array.size_bytes > reader.size_bytes:
            missing = array.data + array.size_bytes - reader.size_bytes
            raise IncompleteError(f"the last {missing} bytes are missing")
        elif array.data + array.size_bytes < reader.size_bytes:
            raise DamagedError("bytes follow the array")
        contents.tensors.append(
            Tensor("", array.dtype, array.shape, reader.name, array.data, array.size_bytes)
        )
        return contents

    @staticmethod
    def _check_objects(reader: Reader, array: Array) -> None:
        length = reader.size_bytes - array.data
        found = read_pickle(reader.read(array.data, length))
        if found.end != length:
            raise DamagedError("bytes follow the array")


class NumpyArchive:
    kind = "numpy-archive"

    def recognises(self, name: str, head: bytes) -> bool:
        return name.endswith(".npz") and (head.startswith(zips.MAGIC) or is_cut(head, zips.MAGIC))

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        archive = Archive(reader)
        contents.regions = archive.regions(reader.name)
        for name, record in archive.records.items():
            if not name.endswith(".npy"):
                continue
            tensor = name.removesuffix(".npy")
            if record.method == zips.STORED:
                contents.tensors.append(self._stored(reader, record, tensor))
            else:
                contents.tensors.append(Tensor(tensor, "", (), reader.name, None, None))
        return contents

    @staticmethod
    def _stored(reader: Reader, record: Record, name: str) -> Tensor:
        length = min(record.size_bytes, _HEAD_BYTES)
        try:
            array = Array(reader.read(record.offset, length))
        except IncompleteError as error:
            raise DamagedError(f"tensor {name}: {error}") from error
        if array.item_bytes and array.data + array.size_bytes != record.size_bytes:
            raise DamagedError(f"tensor {name}: its size does not fit its shape")
        offset = record.offset + array.data
        return Tensor(name, array.dtype, array.shape, reader.name, offset, array.size_bytes)
