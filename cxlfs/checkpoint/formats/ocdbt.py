"""OCDBT, the tree in which Orbax keeps arrays: its manifest, the newest version's root, and where
in the files of data each value lies.

Source: tensorstore/kvstore/ocdbt/index.rst and format/ (0.1.86). A manifest and a node are framed
alike: magic, length, version, compression, content, CRC32C.

Never here: what keys mean (``orbax``). Trees of more than one level are not followed: their files
are looked for, their values are not located.
"""

from __future__ import annotations

import dataclasses

from cxlfs.checkpoint import limits, zstd
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError
from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.varints import varint
from cxlfs.native import crc32c

MANIFEST = "manifest.ocdbt"
MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
NODE_MAGIC = bytes.fromhex("0cdb20de")
HEAD_BYTES = 12
CHECKSUM_BYTES = 4
_CONTENT_BYTES_MAX = 4 << 20
"""Of one manifest or node: about a second of inflating."""
_PLAIN, _ZSTD = 0, 1
_SINGLE = 0
_FILES_MAX = 100_000
_ENTRIES_MAX = 200_000
_OUT_OF_LINE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """``[offset, offset + length)`` of ``file`` (relative to the manifest) holds a key's value."""

    key: str
    file: str
    offset: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Contents:
    """What the newest version holds. ``values`` None: the tree has more than one level.
    ``texts``: values that lie in the tree itself, by their keys.
    """

    files: tuple[str, ...]
    values: tuple[Value, ...] | None
    texts: dict[str, bytes] = dataclasses.field(default_factory=dict)


class _Cursor:
    """Reads numbers one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self) -> int:
        value, self._at = varint(self._data, self._at)
        return value

    def numbers(self, count: int) -> list[int]:
        return [self.number() for _ in range(count)]

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise DamagedError("it is shorter than it says")
        piece = self._data[self._at : end]
        self._at = end
        return piece


def read_contents(place: Place) -> Contents:
    """Of the tree whose manifest lies in a directory. Raises ProblemError."""
    with place.open(MANIFEST) as reader:
        body = unframed(reader.read(0, reader.size_bytes), MANIFEST_MAGIC, MANIFEST)
    cursor = _Cursor(body)
    cursor.take(16)  # uuid
    if cursor.number() != _SINGLE:
        raise BeyondLimitsError(f"{MANIFEST} is kept in numbered files")
    cursor.numbers(2)  # bytes of values in line, and of nodes
    cursor.take(1)  # arity of the tree of versions
    if cursor.number() == _ZSTD:
        cursor.take(4)  # level
    files = _files(cursor)
    count = cursor.number()
    if not 0 < count <= _ENTRIES_MAX:
        raise DamagedError(f"{MANIFEST} names no version")
    cursor.numbers(count)  # generations
    cursor.take(count)  # heights
    columns = [cursor.numbers(count)[-1] for _ in range(3)]
    number, offset, length = columns
    if number >= len(files):
        raise DamagedError(f"{MANIFEST} names a file that there cannot be")
    return _node(place, files, files[number], offset, length)


def unframed(data: bytes, magic: bytes, name: str) -> bytes:
    """The content of a manifest or node, its checksum compared."""
    if len(data) < HEAD_BYTES + CHECKSUM_BYTES or not data.startswith(magic):
        raise IncompleteError(f"{name} was not written to its end")
    length = int.from_bytes(data[4:HEAD_BYTES], "little")
    if length > len(data):
        raise IncompleteError(f"{name} was not written to its end")
    expected = int.from_bytes(data[-CHECKSUM_BYTES:], "little")
    if length < len(data) or crc32c(data[:-CHECKSUM_BYTES]) != expected:
        raise DamagedError(f"the checksum of {name} differs")
    version, at = varint(data, HEAD_BYTES)
    compression, at = varint(data, at)
    if version != 0 or compression not in (_PLAIN, _ZSTD):
        raise BeyondLimitsError(f"{name} is of a version that is not known")
    body = data[at:-CHECKSUM_BYTES]
    return body if compression == _PLAIN else zstd.inflate(body, _CONTENT_BYTES_MAX)


def _files(cursor: _Cursor) -> list[str]:
    """A table of files: each name begins as the one before it."""
    count = cursor.number()
    if count > _FILES_MAX:
        raise BeyondLimitsError("it names more files than are read")
    if not count:
        return []
    prefixes = [0, *cursor.numbers(count - 1)]
    suffixes = cursor.numbers(count)
    cursor.numbers(count)  # how much of each name is a base path
    found: list[str] = []
    name = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(name) or prefix + suffix > limits.NAME_CHARACTERS_MAX:
            raise DamagedError("a name of a file is damaged")
        name = name[:prefix] + cursor.take(suffix)
        found.append(name.decode("utf-8", "replace"))
    return found


def _node(place: Place, files: list[str], file: str, offset: int, length: int) -> Contents:
    with place.open(file) as reader:
        if offset + length > reader.size_bytes:
            raise IncompleteError(f"{place.full_name(file)} was not written to its end")
        data = reader.read(offset, length)
    cursor = _Cursor(unframed(data, NODE_MAGIC, f"the root in {place.full_name(file)}"))
    height = cursor.take(1)[0]
    inside = _files(cursor)
    everything = tuple(dict.fromkeys((*files, *inside)))
    if height:
        return Contents(everything, None)
    return Contents(everything, *_values(cursor, inside))


def _values(cursor: _Cursor, files: list[str]) -> tuple[tuple[Value, ...], dict[str, bytes]]:
    """Of a leaf: keys, then lengths, kinds, places of what is out of line, and all that is not."""
    count = cursor.number()
    if count > _ENTRIES_MAX:
        raise BeyondLimitsError("its tree has more values than are read")
    prefixes = [0, *cursor.numbers(max(count - 1, 0))][:count]
    suffixes = cursor.numbers(count)
    keys = []
    key = b""
    for prefix, suffix in zip(prefixes, suffixes, strict=True):
        if prefix > len(key) or prefix + suffix > limits.NAME_CHARACTERS_MAX:
            raise DamagedError("a key of its tree is damaged")
        key = key[:prefix] + cursor.take(suffix)
        keys.append(key)
    lengths = cursor.numbers(count)
    kinds = cursor.take(count)
    outside = [number for number in range(count) if kinds[number] == _OUT_OF_LINE]
    numbers, offsets = cursor.numbers(len(outside)), cursor.numbers(len(outside))
    found = []
    names = [key.decode("utf-8", "backslashreplace") for key in keys]
    for index, number, offset in zip(outside, numbers, offsets, strict=True):
        if number >= len(files):
            raise DamagedError("its tree names a file that there cannot be")
        found.append(Value(names[index], files[number], offset, lengths[index]))
    inline = (number for number in range(count) if kinds[number] != _OUT_OF_LINE)
    return tuple(found), {names[number]: cursor.take(lengths[number]) for number in inline}
