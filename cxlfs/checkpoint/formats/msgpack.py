"""The items of a msgpack tree, read within limits and without building it.

Source: https://github.com/msgpack/msgpack/blob/master/spec.md. Payloads are skipped, not read.

Never here: what the tree means (``flax``).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError
from cxlfs.checkpoint.place import Reader

_WINDOW_BYTES = 4096
_DEPTH_MAX = 64
_SIZES = {
    0xC4: ("bin", 1),
    0xC5: ("bin", 2),
    0xC6: ("bin", 4),
    0xC7: ("ext", 1),
    0xC8: ("ext", 2),
    0xC9: ("ext", 4),
    0xD9: ("str", 1),
    0xDA: ("str", 2),
    0xDB: ("str", 4),
    0xDC: ("array", 2),
    0xDD: ("array", 4),
    0xDE: ("map", 2),
    0xDF: ("map", 4),
}
_FIXED = {0xCC: ">B", 0xCD: ">H", 0xCE: ">L", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h"}
_FIXED |= {0xD2: ">l", 0xD3: ">q", 0xCA: ">f", 0xCB: ">d"}
_HEAD_MAX = 9


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The first bytes of an item: what it is, how long they are, and how much follows."""

    kind: str
    head_bytes: int
    size: int = 0
    """Bytes of a payload, or items of a container."""
    value: object = None
    extension: int | None = None


def head_of(data: bytes, at: int) -> Head:
    """Raises IndexError, struct.error (more bytes are needed), DamagedError."""
    code = data[at]
    if code < 0x80 or code >= 0xE0:
        return Head("value", 1, value=code if code < 0x80 else code - 256)
    if code < 0xC0:
        kind = "map" if code < 0x90 else "array" if code < 0xA0 else "str"
        return Head(kind, 1, code & (0x1F if kind == "str" else 0x0F))
    if code in (0xC0, 0xC2, 0xC3):
        return Head("value", 1, value=None if code == 0xC0 else code == 0xC3)
    if code in _FIXED:
        width = struct.calcsize(_FIXED[code])
        return Head("value", 1 + width, value=struct.unpack_from(_FIXED[code], data, at + 1)[0])
    if 0xD4 <= code <= 0xD8:
        return Head("ext", 2, 1 << (code - 0xD4), extension=_signed(data[at + 1]))
    if code not in _SIZES:
        raise DamagedError(f"an item begins with {code:#04x}")
    kind, width = _SIZES[code]
    if at + 1 + width > len(data):
        raise IndexError("more bytes are needed")
    size = int.from_bytes(data[at + 1 : at + 1 + width], "big")
    if kind == "ext":
        return Head(kind, 2 + width, size, extension=_signed(data[at + 1 + width]))
    return Head(kind, 1 + width, size)


def _signed(code: int) -> int:
    return code - 256 if code > 127 else code


@dataclasses.dataclass(frozen=True, slots=True)
class Item:
    """A leaf of the tree: a value, or the place of a payload in the file."""

    name: str
    value: object = None
    offset: int = 0
    size_bytes: int = 0
    extension: int | None = None


class MsgpackReader:
    """Goes through one tree; ``end`` is where it ended."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._window = b""
        self._window_at = 0
        self.end = 0

    def items(self) -> Iterator[Item]:
        """Raises IncompleteError, DamagedError, BeyondLimitsError."""
        # A level: its name, how many are left, whether of a map, the key that waits.
        levels: list[tuple[str, int, bool, str | None]] = [("", 1, False, None)]
        for _ in range(limits.MSGPACK_ITEMS_MAX):
            while levels and levels[-1][1] == 0:
                levels.pop()
            if not levels:
                return
            name, left, is_map, key = levels.pop()
            head = self._head()
            if is_map and key is None:
                levels.append((name, left - 1, True, self._key(head)))
                continue
            last = key if key is not None else str(-left)
            here = ".".join(filter(None, (name, last))) if levels else ""
            levels.append((name, left - 1, is_map, None))
            if head.kind in ("map", "array"):
                if len(levels) > _DEPTH_MAX:
                    raise BeyondLimitsError("its tree is deeper than what is read")
                count = head.size * 2 if head.kind == "map" else head.size
                levels.append((here[: limits.NAME_CHARACTERS_MAX], count, head.kind == "map", None))
                continue
            yield self._leaf(head, here[: limits.NAME_CHARACTERS_MAX])
        raise BeyondLimitsError("its tree has more items than are read")

    def _head(self) -> Head:
        at = self.end - self._window_at
        if not 0 <= at <= len(self._window) - _HEAD_MAX:
            length = min(_WINDOW_BYTES, self._reader.size_bytes - self.end)
            if length <= 0:
                raise IncompleteError("it ends before its tree does")
            self._window = self._reader.read(self.end, length)
            self._window_at, at = self.end, 0
        try:
            head = head_of(self._window, at)
        except (IndexError, struct.error) as error:
            raise IncompleteError("it ends before its tree does") from error
        self.end += head.head_bytes
        return head

    def _key(self, head: Head) -> str:
        if head.kind != "str" or head.size > limits.NAME_CHARACTERS_MAX:
            raise BeyondLimitsError("a key of its tree is no name")
        return self._text(self._skip(head.size), head.size)

    def _text(self, begin: int, size: int) -> str:
        try:
            return self._reader.read(begin, size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DamagedError("a text in its tree is none") from error

    def _leaf(self, head: Head, name: str) -> Item:
        if head.kind == "value":
            return Item(name, head.value)
        begin = self._skip(head.size)
        if head.kind == "str" and head.size <= limits.TEXT_BYTES_MAX:
            return Item(name, self._text(begin, head.size))
        return Item(name, None, begin, head.size, head.extension)

    def _skip(self, size: int) -> int:
        """Where a payload begins; it must lie in the file."""
        begin = self.end
        if begin + size > self._reader.size_bytes:
            raise IncompleteError("it ends before its tree does")
        self.end += size
        return begin


def scalar_items(data: bytes, size: int) -> tuple[list[object], int]:
    """What flax packs of an array, ``[[dimension, ...], type, bytes]``: dimensions and type in one
    list, and where the bytes begin, which must end at ``size``. Raises DamagedError.
    """
    try:
        outer = head_of(data, 0)
        at = outer.head_bytes
        inner = head_of(data, at)
        at += inner.head_bytes
        if (outer.kind, outer.size, inner.kind) != ("array", 3, "array"):
            raise DamagedError("it is not an array as flax packs it")
        values: list[object] = []
        for _ in range(min(inner.size, limits.DIMENSIONS_MAX + 1)):
            head = head_of(data, at)
            at += head.head_bytes
            values.append(head.value)
        head = head_of(data, at)
        at += head.head_bytes
        values.append(data[at : at + head.size].decode("ascii", "replace"))
        at += head.size
        head = head_of(data, at)
    except (IndexError, struct.error) as error:
        raise DamagedError("its header is damaged") from error
    if head.kind != "bin" or at + head.head_bytes + head.size != size:
        raise DamagedError("its size does not fit")
    return values, at + head.head_bytes
