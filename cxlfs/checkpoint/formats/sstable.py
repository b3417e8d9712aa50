"""The table that TensorFlow's index is: keys and values in blocks with checksums.

Source: LevelDB, doc/table_format.md; tensorflow/core/lib/io/table_builder.cc (2.21), which writes
blocks without compression unless told otherwise.

Never here: what keys and values mean (``tensorflow``).
"""

from __future__ import annotations

from collections.abc import Iterator

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.content import masked
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError
from cxlfs.checkpoint.place import Reader
from cxlfs.checkpoint.varints import varint
from cxlfs.native import crc32c

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_TRAILER_BYTES = 5
_PLAIN = 0


class Table:
    """An open table. ``entries`` verifies each block as it is read."""

    def __init__(self, reader: Reader) -> None:
        """Raises IncompleteError: it has no footer."""
        self._reader = reader
        if reader.size_bytes < _FOOTER_BYTES:
            raise IncompleteError("it is empty" if not reader.size_bytes else "it has no end")
        footer = reader.tail(_FOOTER_BYTES)
        if int.from_bytes(footer[-8:], "little") != _MAGIC:
            raise IncompleteError("it has no end")
        _, at = varint(footer, 0)
        _, at = varint(footer, at)
        self._index, at = varint(footer, at)
        self._index_bytes, _ = varint(footer, at)

    def entries(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values in their order. Raises DamagedError, BeyondLimitsError."""
        count = 0
        end = 0
        for _, handle in _entries(self._block(self._index, self._index_bytes)):
            offset, at = varint(handle, 0)
            size, _ = varint(handle, at)
            if offset < end:  # one block twice would be read as often as it is named
                raise DamagedError("its blocks overlap")
            end = offset + size
            for entry in _entries(self._block(offset, size)):
                count += 1
                if count > limits.TENSORS_MAX:
                    raise BeyondLimitsError("it has more entries than are read")
                yield entry

    def _block(self, offset: int, size: int) -> bytes:
        if offset + size + _TRAILER_BYTES > self._reader.size_bytes:
            raise DamagedError("a block of it lies behind its end")
        data = self._reader.read(offset, size + _TRAILER_BYTES)
        expected = int.from_bytes(data[-4:], "little")
        if masked(crc32c(data[:-4])) != expected:
            raise DamagedError(f"the checksum of its block at {offset} differs")
        if data[size] != _PLAIN:
            raise BeyondLimitsError("it is compressed")
        return data[:size]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys share their beginnings with the one before them."""
    if len(block) < 4:
        raise DamagedError("a block of it is too short")
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 - 4 * restarts
    if end < 0:
        raise DamagedError("a block of it is too short")
    at = 0
    key = b""
    while at < end:
        shared, at = varint(block, at)
        unshared, at = varint(block, at)
        length, at = varint(block, at)
        if shared > len(key) or at + unshared + length > end:
            raise DamagedError("an entry of it goes on behind its end")
        if shared + unshared > limits.NAME_CHARACTERS_MAX:
            raise DamagedError("a name in it is too long")
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        yield key, block[at : at + length]
        at += length
