"""Fields of a protocol buffer message, within limits; nothing is built of them.

Source: https://protobuf.dev/programming-guides/encoding/. Never here: what a field means.
"""

from __future__ import annotations

from collections.abc import Iterator

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10
_MASK = (1 << 64) - 1


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next byte is. Raises DamagedError."""
    value = shift = 0
    for index in range(at, min(at + _VARINT_BYTES_MAX, len(data))):
        value |= (data[index] & 0x7F) << shift
        shift += 7
        if data[index] < 0x80:
            return value & _MASK, index + 1
    raise DamagedError("a number of it has no end")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field. Raises DamagedError, BeyondLimitsError."""
    at = 0
    for _ in range(limits.PROTOBUF_FIELDS_MAX):
        if at == len(data):
            return
        tag, at = varint(data, at)
        field, kind = tag >> 3, tag & 7
        if not field:
            raise DamagedError("a field of it has no number")
        if kind == _VARINT:
            value, at = varint(data, at)
            yield field, value
            continue
        if kind == _BYTES:
            length, at = varint(data, at)
        elif kind in (_FIXED32, _FIXED64):
            length = 4 if kind == _FIXED32 else 8
        else:
            raise DamagedError("a field of it has a type that is not known")
        if at + length > len(data):
            raise DamagedError("a field of it goes on behind its end")
        piece = data[at : at + length]
        at += length
        yield field, piece if kind == _BYTES else int.from_bytes(piece, "little")
    raise BeyondLimitsError("it has more fields than are read")
