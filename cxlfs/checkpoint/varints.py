"""Numbers of a variable number of bytes, as protocol buffers, LevelDB and OCDBT have them.

Source: https://protobuf.dev/programming-guides/encoding/. Never here: anything made of them.
"""

from __future__ import annotations

from cxlfs.checkpoint.model import DamagedError

_BYTES_MAX = 10
_MASK = (1 << 64) - 1


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where the next byte is. Raises DamagedError."""
    value = shift = 0
    for index in range(at, min(at + _BYTES_MAX, len(data))):
        value |= (data[index] & 0x7F) << shift
        shift += 7
        if data[index] < 0x80:
            return value & _MASK, index + 1
    raise DamagedError("a number of it has no end")
