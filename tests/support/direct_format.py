"""How descriptors, rows of MAP and checksums of chunks lie in memory, for programs in Python that
store file data by themselves: what csrc/client/direct.h says.

Never here: who stores where, and when.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from cxlfs.native import crc32c
from cxlfs.native.direct import ROW_BYTES, SLIP_DESCRIPTOR_BYTES

DESCRIPTOR = struct.Struct("<QQQQQIIQQ")
"""sequence, lease, file offset, extent offset, length, tail checksum, flags, reserved twice."""
ROW = struct.Struct("<6QII")

assert DESCRIPTOR.size == SLIP_DESCRIPTOR_BYTES
assert ROW.size == ROW_BYTES


class Row(NamedTuple):
    """One of MAP."""

    file_offset: int
    length_bytes: int
    extent_id: int
    extent_offset: int
    extent_media_offset: int
    extent_length: int
    first_chunk: int
    crc_count: int


def descriptor(*fields: int) -> bytes:
    """Of DESCRIPTOR; those that are left out at the end are 0."""
    return DESCRIPTOR.pack(*fields, *[0] * (9 - len(fields)))


def rows_of(payload: bytes, count: int) -> list[Row]:
    """Those that an answer begins with."""
    return [Row._make(ROW.unpack_from(payload, number * ROW_BYTES)) for number in range(count)]


def chunk_seed(extent_id: int, index: int) -> int:
    """The checksum of a chunk of which nothing is there yet."""
    return crc32c(struct.pack("<QQ", extent_id, index))


def by_chunks(start: int, data: bytes, chunk_bytes: int) -> Iterator[tuple[int, int, bytes]]:
    """Pieces of what is stored from byte ``start`` of an extent on: the number of the chunk that
    each is in, where it begins there, and its bytes.
    """
    done = 0
    while done < len(data):
        chunk, inside = divmod(start + done, chunk_bytes)
        piece = data[done : done + chunk_bytes - inside]
        yield chunk, inside, piece
        done += len(piece)
