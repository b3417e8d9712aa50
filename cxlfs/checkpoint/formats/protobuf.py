"""Fields of a protocol buffer message, within limits; nothing is built of them.

Source: https://protobuf.dev/programming-guides/encoding/. Never here: what a field means.
"""

from __future__ import annotations

from collections.abc import Iterator

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError
from cxlfs.checkpoint.varints import varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


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
