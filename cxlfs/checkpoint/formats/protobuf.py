"""Fields of a protocol buffer message, within limits; nothing is built of them.

Source: https://protobuf.dev/programming-guides/encoding/. Never here: what a field means.

Invariants
- A message passes ``check`` only if a library that knows the same fields can parse it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError
from cxlfs.checkpoint.varints import varint

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
TEXT = "text"
"""Of a field that must be UTF-8."""
Messages = Mapping[str, Mapping[int, str]]
"""Of each kind of message: its fields that are messages, by their kind, and those that are TEXT."""
_DEPTH_MAX = 100
"""The libraries' own."""


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


def check(data: bytes, kind: str, messages: Messages, fields_max: int) -> int:
    """Look through a message and those inside it; how many fields there are.

    Raises DamagedError; BeyondLimitsError: it has more fields than ``fields_max``, or is too deep.
    """
    count = 0
    waiting = [(data, kind, 0)]
    while waiting:
        message, kind, depth = waiting.pop()
        if depth > _DEPTH_MAX:
            raise BeyondLimitsError("it is nested deeper than what is read")
        known = messages[kind]
        for field, value in fields(message):
            count += 1
            if count > fields_max:
                raise BeyondLimitsError("it has more fields than are looked at")
            inside = known.get(field)
            if inside is None or isinstance(value, int):
                continue
            if inside != TEXT:
                waiting.append((value, inside, depth + 1))
            elif not _is_text(value):
                raise DamagedError("a text in it is none")
    return count


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
