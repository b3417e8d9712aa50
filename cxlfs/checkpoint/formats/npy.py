"""NumPy's ``.npy`` and ``.npz``: a header in Python's syntax and the array; a zip of such files.

Source: numpy/lib/_format_impl.py (2.4). Complete: the array ends where the file does (an array of
objects is a pickle, and ends with it), or further arrays follow up to there; of an ``.npz`` the
archive has its end. ``.npz`` has a CRC-32 for each array.
"""

from __future__ import annotations

import ast
import re
import struct

import msgspec
import numpy as np

from cxlfs.checkpoint import limits, zips
from cxlfs.checkpoint.formats.base import is_cut
from cxlfs.checkpoint.jsons import Shape, checked, prepared
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
_OF_PYTHON_2 = re.compile(r"\b(\d+)L\b")
"""Its long integers, which NumPy still reads (``_filter_header``)."""
_ARRAYS_MAX = 100_000


@prepared
class _Fields(msgspec.Struct):
    shape: Shape


class Array:
    """The header of one ``.npy``. ``data``: where the array begins; of objects that is a pickle."""

    __slots__ = ("_is_fortran", "data", "dtype", "has_objects", "item_bytes", "shape")

    def __init__(self, head: bytes) -> None:
        """``head``: the first bytes of the file. Raises IncompleteError, DamagedError, ..."""
        if len(head) < 10:
            raise IncompleteError("its header is cut")
        if not head.startswith(MAGIC) or head[6] not in (1, 2, 3):
            raise BeyondLimitsError("it does not begin as such a file does")
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
        found = _type(fields.get("descr"))
        self.has_objects, self.item_bytes = found.hasobject, found.itemsize
        self.shape = checked(fields, _Fields, "its header").shape
        self._is_fortran = fields.get("fortran_order") is True

    @property
    def strides(self) -> tuple[int, ...] | None:
        """In items; None: C order."""
        if not self._is_fortran:
            return None
        found, step = [], 1
        for dimension in self.shape:
            found.append(step)
            step = min(step * max(dimension, 1), limits.NUMBER_MAX)
        return tuple(found)

    @property
    def size_bytes(self) -> int:
        size = self.item_bytes
        for dimension in self.shape:
            size = min(size * dimension, 1 << 80)
        return size


def _fields(source: str) -> dict[str, object]:
    for text in (source, _OF_PYTHON_2.sub(r"\1", source)):
        try:
            value = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            continue
        if isinstance(value, dict) and value.keys() == {"descr", "fortran_order", "shape"}:
            return value
    raise DamagedError("its header is damaged")


def _type(descr: object) -> np.dtype[np.void]:
    try:
        found: np.dtype[np.void] = np.lib.format.descr_to_dtype(descr)  # type: ignore[arg-type]
    except Exception as error:
        raise BeyondLimitsError("the type of its items is not understood") from error
    return found


class NumpyArray:
    kind = "numpy"

    def recognises(self, name: str, head: bytes) -> bool:
        return head.startswith(MAGIC) or name.endswith(".npy")

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if not reader.size_bytes:
            raise IncompleteError("it is empty")
        at = 0
        for number in range(_ARRAYS_MAX):
            at = self._take(reader, at, number, contents)
            if at == reader.size_bytes:
                return contents
        raise BeyondLimitsError("it has more arrays than are read")

    @staticmethod
    def _take(reader: Reader, at: int, number: int, contents: Contents) -> int:
        """One array of a file that may hold several; where the next one begins."""
        head = reader.read(at, min(_HEAD_BYTES, reader.size_bytes - at))
        if number and not is_cut(head[: len(MAGIC)], MAGIC) and not head.startswith(MAGIC):
            raise BeyondLimitsError(f"bytes follow the array at {at}, and are none")
        if is_cut(head[:10], MAGIC):
            if number and head[:1] != MAGIC[:1]:
                raise BeyondLimitsError(f"zeros follow the array at {at}")
            raise IncompleteError("its header was not written")
        array = Array(head)
        begin = at + array.data
        if array.has_objects:
            data = reader.read(begin, reader.size_bytes - begin)
            end = begin + read_pickle(data).end
        else:
            end = begin + array.size_bytes
        if end > reader.size_bytes:
            raise IncompleteError(f"the last {end - reader.size_bytes} bytes are missing")
        name = str(number) if number else ""
        contents.tensors.append(
            Tensor(name, array.dtype, array.shape, reader.name, begin, end - begin, array.strides)
        )
        return end


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
            found = Tensor(tensor, "", (), reader.name, None, None)
            if record.method == zips.STORED:
                try:
                    found = self._stored(reader, record, tensor)
                except BeyondLimitsError as error:  # NumPy gives its bytes, or asks another type
                    contents.notes.append(f"{name}: {error}")
                    continue
            contents.tensors.append(found)
        return contents

    @staticmethod
    def _stored(reader: Reader, record: Record, name: str) -> Tensor:
        head = reader.read(record.offset, min(record.size_bytes, _HEAD_BYTES))
        if not head.startswith(MAGIC):
            raise BeyondLimitsError("it is no array: NumPy gives its bytes")
        try:
            array = Array(head)
        except IncompleteError as error:
            raise DamagedError(f"tensor {name}: {error}") from error
        if not array.has_objects and array.data + array.size_bytes > record.size_bytes:
            raise DamagedError(f"tensor {name}: its size does not fit its shape")
        offset = record.offset + array.data
        size = array.size_bytes
        return Tensor(name, array.dtype, array.shape, reader.name, offset, size, array.strides)
