"""safetensors: eight bytes of length, a header in JSON, and the tensors without gaps.

Source: the format's README and safetensors/src/tensor.rs (0.8). Complete: the file ends where its
last tensor does. It has no checksums.
"""

from __future__ import annotations

import msgspec

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.jsons import Name, Number, Shape, checked, parse_json, prepared
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Tensor,
)
from cxlfs.checkpoint.place import Reader

_LENGTH_BYTES = 8
_ITEM_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}


_KEYS = frozenset({"__metadata__", "dtype", "shape", "data_offsets"})


@prepared
class _Claim(msgspec.Struct):
    """What the header says of a tensor."""

    dtype: Name
    shape: Shape
    data_offsets: tuple[Number, Number]


class SafeTensors:
    kind = "safetensors"

    def recognises(self, name: str, head: bytes) -> bool:
        del head
        return name.endswith(".safetensors")

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        if reader.size_bytes < _LENGTH_BYTES:
            raise IncompleteError("it is empty" if not reader.size_bytes else "its header is cut")
        length = int.from_bytes(reader.read(0, _LENGTH_BYTES), "little")
        begin = _LENGTH_BYTES + length
        if not length:
            raise IncompleteError("its header was not written")
        if length > limits.JSON_BYTES_MAX:
            raise _too_long(length, reader.size_bytes)
        if begin > reader.size_bytes:
            raise IncompleteError("it ends in its header")
        data = reader.read(_LENGTH_BYTES, length)
        if not data.strip(b"\0"):
            raise IncompleteError("its header was not written")
        header = checked(
            parse_json(data, "its header", once=_KEYS), dict[Name, object], "its header"
        )
        metadata = _metadata(header)
        end = 0
        for name, claim in sorted(header.items(), key=_first_byte):
            tensor = _tensor(name, claim, reader.name, begin)
            if tensor.offset != begin + end or tensor.size_bytes is None:
                raise DamagedError(f"tensor {name[:200]} does not follow the one before it")
            end += tensor.size_bytes
            contents.tensors.append(tensor)
        contents.root = metadata
        _check_end(reader.size_bytes, begin + end, contents.tensors)
        return contents


def _metadata(header: dict[str, object]) -> object:
    """What is said beside the tensors: texts alone, or the library refuses the file."""
    found = header.pop("__metadata__", None)
    return None if found is None else checked(found, dict[str, str], "its metadata")


def _too_long(length: int, size_bytes: int) -> Exception:
    if length > size_bytes:
        return DamagedError("the length of its header cannot be")
    return BeyondLimitsError("its header is larger than what is read")


def _check_end(size_bytes: int, end: int, tensors: list[Tensor]) -> None:
    if size_bytes > end:
        raise DamagedError(f"{size_bytes - end} bytes follow its last tensor")
    if size_bytes < end:
        cut = next(t for t in tensors if (t.offset or 0) + (t.size_bytes or 0) > size_bytes)
        raise IncompleteError(f"{end - size_bytes} bytes are missing from tensor {cut.name} on")


def _first_byte(item: tuple[str, object]) -> tuple[int, int]:
    offsets = item[1].get("data_offsets") if isinstance(item[1], dict) else None
    if isinstance(offsets, list) and len(offsets) == 2 and all(type(n) is int for n in offsets):
        return offsets[0], offsets[1]
    return 0, 0


def _tensor(name: str, claim: object, file: str, begin: int) -> Tensor:
    what = f"tensor {name[:200]}"
    if isinstance(claim, list):  # what the library reads as well, and nobody writes
        raise BeyondLimitsError(f"what is said of {what} has no names")
    found = checked(claim, _Claim, what)
    first, last = found.data_offsets
    bits = _ITEM_BITS.get(found.dtype)
    if bits is not None:
        for dimension in found.shape:
            bits = min(bits * dimension, 1 << 80)
        if bits % 8 or bits // 8 != last - first:
            raise DamagedError(f"the size of {what} does not fit its shape")
    elif last < first:
        raise DamagedError(f"the place of {what} cannot be")
    else:
        raise BeyondLimitsError(f"the type of {what} is not known: {found.dtype[:20]}")
    return Tensor(name, found.dtype, found.shape, file, begin + first, last - first)
