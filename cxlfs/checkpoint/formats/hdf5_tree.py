"""The data sets of an HDF5 file, as h5py and Keras write it unless told otherwise (``libver``
earliest): groups that are B-trees of symbols, and object headers of version 1.

Source: HDF5 File Format Specification 3.0, sections III and IV.

Never here: the superblock (``hdf5``), reading data. Structures of later versions are left alone:
their data sets are not listed, which is no damage.

Invariants
- Each object and node is looked at once, so that no circle is followed; there is a limit of both.
- A structure that lacks its signature, an object that is neither a group nor a data set nor a type,
  and a data set or a chunk of one behind the end are damage.
"""

from __future__ import annotations

import dataclasses
import math

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.model import BeyondLimitsError, DamagedError, IncompleteError, Tensor
from cxlfs.checkpoint.place import Reader

_OBJECTS_MAX = 100_000
_MESSAGES_MAX = 1000
_DEPTH_MAX = 32
_SPACE, _TYPE, _LAYOUT, _CONTINUED, _SYMBOLS = 0x01, 0x03, 0x08, 0x10, 0x11
_ATTRIBUTE, _ATTRIBUTE_VERSION_MAX = 0x0C, 3
_OF_LATER_GROUPS = (0x02, 0x06, 0x0A)
_SHARED = 0x02
"""A flag: the message lies elsewhere."""
_COMPACT, _CHUNKED = 0, 2
_LAYOUT_VERSION, _LAYOUT_VERSION_MAX = 3, 5
_TYPE_VERSION_MAX = 5
_INTEGER, _FLOAT, _STRING, _ENUMERATION = 0, 1, 3, 8
_CLASSES = (
    *("int", "float", "time", "string", "bits", "opaque"),
    *("compound", "reference", "enum", "sequence", "array"),
)
_TREE_HEAD_BYTES = 8
_MESSAGE_HEAD_BYTES = 8
_ENTRY_TAIL_BYTES = 24
_HEAP_BYTES_MAX = 1 << 20
_NODE_ENTRIES_MAX = 4096
_GROUP_TREE, _CHUNK_TREE = 0, 1
_NO_FREE_BLOCK = 1
_CHUNKS_MAX = 100_000
"""Of a file that are looked for."""


@dataclasses.dataclass(slots=True)
class _Object:
    """What an object header says. ``symbols``: addresses of a group's tree and heap."""

    shape: tuple[int, ...] | None = None
    dtype: str = ""
    item_bytes: int = 0
    address: int | None = None
    size_bytes: int | None = None
    symbols: tuple[int, int] | None = None
    chunks: tuple[int, int] | None = None
    """Address of the tree of chunks, and their dimensions."""
    attributes: list[str] = dataclasses.field(default_factory=list)


class _LaterVersionError(Exception):
    """A structure that is not of version 1."""


class DataSets:
    """Those of the file in ``[base, base + length)``; addresses count from ``base``."""

    def __init__(self, reader: Reader, base: int, length: int, sizes: tuple[int, int]) -> None:
        """``sizes``: bytes of an address and of a length."""
        self._reader = reader
        self._base = base
        self._length = length
        self._address_bytes, self._length_bytes = sizes
        self._undefined = (1 << 8 * sizes[0]) - 1
        self._seen: set[int] = set()
        self.tensors: list[Tensor] = []
        self.attributes: list[str] = []
        """``OBJECT@NAME`` of each."""
        self.left_out = 0
        """Objects of later versions."""
        self._chunks = 0

    def walk(self, address: int, name: str = "", depth: int = 0) -> None:
        """Everything below the object at ``address``. Raises DamagedError, BeyondLimitsError."""
        if address in self._seen:
            return
        self._seen.add(address)
        if len(self._seen) > _OBJECTS_MAX or depth > _DEPTH_MAX:
            raise BeyondLimitsError("it has more objects than are looked at")
        try:
            found = self._object(address)
            self.attributes += [f"{name}@{attribute}" for attribute in found.attributes]
            if found.symbols is not None:
                tree, heap = found.symbols
                names = self._heap(heap)
                self._tree(tree, names, name, depth + 1)
            elif found.shape is not None and found.dtype:
                self._take(found, name)
        except _LaterVersionError:
            self.left_out += 1

    def _take(self, found: _Object, name: str) -> None:
        offset = size = None
        if found.address is not None and found.size_bytes is not None:
            if found.address + found.size_bytes > self._length:
                raise DamagedError(f"tensor {name} lies behind the end")
            items = math.prod(found.shape or ())
            if found.item_bytes and found.size_bytes != items * found.item_bytes:
                raise DamagedError(f"the size of tensor {name} does not fit its shape")
            offset, size = self._base + found.address, found.size_bytes
        if found.chunks is not None:
            self._chunk_tree(*found.chunks, name, 0)
        shape = found.shape or ()
        self.tensors.append(Tensor(name, found.dtype, shape, self._reader.name, offset, size))

    # --- bytes ------------------------------------------------------------------------------

    def _read(self, address: int, length: int) -> bytes:
        if address + length > self._length:
            raise DamagedError(f"its tree names byte {address}, where there is nothing")
        return self._reader.read(self._base + address, length)

    def _signed(self, address: int, length: int, signature: bytes) -> bytes:
        data = self._read(address, length)
        if data[: len(signature)] != signature:
            raise DamagedError(f"its tree is damaged at byte {address}")
        return data

    def _address(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at : at + self._address_bytes], "little")

    def _count(self, data: bytes, at: int) -> int:
        return int.from_bytes(data[at : at + self._length_bytes], "little")

    # --- groups -----------------------------------------------------------------------------

    def _heap(self, address: int) -> bytes:
        """The names of a group."""
        head = self._signed(address, 8 + 2 * self._length_bytes + self._address_bytes, b"HEAP")
        size, free = self._count(head, 8), self._count(head, 8 + self._length_bytes)
        if head[4] or (free != _NO_FREE_BLOCK and not 0 < free <= size - 2 * self._length_bytes):
            raise DamagedError(f"its tree is damaged at byte {address}")
        if size > _HEAP_BYTES_MAX:
            raise BeyondLimitsError("a group has more names than are looked at")
        return self._read(self._address(head, 8 + 2 * self._length_bytes), size)

    def _tree(self, address: int, names: bytes, name: str, depth: int) -> None:
        """A node of a group's B-tree, and what is below it."""
        if address in self._seen:
            return
        self._seen.add(address)
        head = self._signed(address, _TREE_HEAD_BYTES, b"TREE")
        level, used = head[5], int.from_bytes(head[6:8], "little")
        if head[4] != _GROUP_TREE or depth > _DEPTH_MAX or used > _NODE_ENTRIES_MAX:
            raise DamagedError(f"its tree is damaged at byte {address}")
        begin = self._behind_siblings(address)
        step = self._length_bytes + self._address_bytes
        data = self._read(begin, used * step + self._length_bytes) if used else b""
        keys = (self._count(data, at) for at in range(0, len(data), step))
        if any(key >= len(names) for key in keys):
            raise DamagedError(f"its tree is damaged at byte {address}")
        for number in range(used):
            child = self._address(data, number * step + self._length_bytes)
            if level:
                self._tree(child, names, name, depth + 1)
            else:
                self._symbols(child, names, name, depth)

    def _symbols(self, address: int, names: bytes, name: str, depth: int) -> None:
        head = self._signed(address, 8, b"SNOD")
        used = int.from_bytes(head[6:8], "little")
        if head[4] != 1 or used > _NODE_ENTRIES_MAX:
            raise DamagedError(f"its tree is damaged at byte {address}")
        step = 2 * self._address_bytes + _ENTRY_TAIL_BYTES
        data = self._read(address + 8, used * step)
        for number in range(used):
            at = number * step
            begin = self._address(data, at)
            end = names.find(b"\0", begin, begin + limits.NAME_CHARACTERS_MAX)
            if begin >= len(names) or end <= begin:
                raise DamagedError(f"a name in its tree at byte {address} is damaged")
            part = names[begin:end].decode("utf-8", "backslashreplace")
            inside = f"{name}/{part}" if name else part
            child = self._address(data, at + self._address_bytes)
            if child != self._undefined:  # a symbolic link has none
                self.walk(child, inside[: limits.NAME_CHARACTERS_MAX], depth)

    def _behind_siblings(self, address: int) -> int:
        """Where the entries of a node begin: behind the addresses of those beside it."""
        begin = address + _TREE_HEAD_BYTES
        data = self._read(begin, 2 * self._address_bytes)
        for at in (0, self._address_bytes):
            beside = self._address(data, at)
            if beside != self._undefined and not 0 < beside < self._length:
                raise DamagedError(f"its tree is damaged at byte {address}")
        return begin + 2 * self._address_bytes

    # --- chunks -----------------------------------------------------------------------------

    def _chunk_tree(self, address: int, dimensions: int, name: str, depth: int) -> None:
        """Every chunk of a data set lies in the file."""
        if address in self._seen or self._chunks > _CHUNKS_MAX:
            return
        self._seen.add(address)
        head = self._signed(address, _TREE_HEAD_BYTES, b"TREE")
        level, used = head[5], int.from_bytes(head[6:8], "little")
        if head[4] != _CHUNK_TREE or depth > _DEPTH_MAX or used > _NODE_ENTRIES_MAX:
            raise DamagedError(f"its tree is damaged at byte {address}")
        step = 8 + 8 * dimensions + self._address_bytes
        data = self._read(self._behind_siblings(address), used * step)
        self._chunks += used
        for at in range(0, len(data), step):
            child = self._address(data, at + step - self._address_bytes)
            if level:
                self._chunk_tree(child, dimensions, name, depth + 1)
                continue
            size = int.from_bytes(data[at : at + 4], "little")
            if not size or child + size > self._length:
                raise DamagedError(f"tensor {name} lies behind the end")

    # --- object headers ---------------------------------------------------------------------

    def _object(self, address: int) -> _Object:
        head = self._read(address, 16)
        if head[:4] == b"OHDR":
            raise _LaterVersionError
        if head[0] != 1:
            raise DamagedError(f"its tree is damaged at byte {address}")
        found = _Object()
        blocks = [(address + 16, int.from_bytes(head[8:12], "little"))]
        count = int.from_bytes(head[2:4], "little")
        left = min(count, _MESSAGES_MAX)
        while blocks and left > 0:
            begin, size = blocks.pop(0)
            data = self._read(begin, min(size, limits.HEADER_BYTES_MAX))
            at = 0
            while at + 8 <= len(data) and left > 0:
                kind = int.from_bytes(data[at : at + 2], "little")
                length = int.from_bytes(data[at + 2 : at + 4], "little")
                body = data[at + 8 : at + 8 + length]
                left -= 1
                if len(body) < length:
                    raise DamagedError(f"its tree is damaged at byte {begin}")
                if kind == _CONTINUED:
                    blocks.append(self._continuation(body, begin))
                else:
                    self._message(kind, body, found, is_shared=bool(data[at + 4] & _SHARED))
                at += 8 + length
            if at < len(data) and count <= _MESSAGES_MAX:
                raise DamagedError(f"its tree is damaged at byte {begin + at}")
        if found.symbols is None and not found.dtype:
            raise DamagedError(f"the object at byte {address} is of no kind")
        return found

    def _continuation(self, body: bytes, begin: int) -> tuple[int, int]:
        address, size = self._address(body, 0), self._count(body, self._address_bytes)
        if size < _MESSAGE_HEAD_BYTES:
            raise DamagedError(f"its tree is damaged at byte {begin}")
        return address, size

    def _message(self, kind: int, body: bytes, found: _Object, *, is_shared: bool) -> None:
        if kind in _OF_LATER_GROUPS:
            raise _LaterVersionError
        if kind == _SPACE and not is_shared:
            found.shape = self._shape(body)
        elif kind == _TYPE:
            found.dtype, found.item_bytes = ("shared", 0) if is_shared else _type(body)
        elif kind == _LAYOUT:
            self._layout(body, found)
        elif kind == _SYMBOLS:
            found.symbols = self._address(body, 0), self._address(body, self._address_bytes)
        elif kind == _ATTRIBUTE and not is_shared:
            found.attributes.append(_attribute_name(body))

    def _layout(self, body: bytes, found: _Object) -> None:
        if len(body) < 2 or not 1 <= body[0] <= _LAYOUT_VERSION_MAX:
            raise DamagedError("the layout of a data set is damaged")
        if body[0] != _LAYOUT_VERSION:
            return
        if body[1] > _CHUNKED:
            raise DamagedError("the layout of a data set is damaged")
        begin = 3 if body[1] == _CHUNKED else 2
        address = self._address(body, begin)
        if body[1] == _COMPACT or address == self._undefined:  # nothing was ever written to it
            return
        if body[1] == _CHUNKED:
            found.chunks = address, body[2]
        else:
            found.address = address
            found.size_bytes = self._count(body, begin + self._address_bytes)

    def _shape(self, body: bytes) -> tuple[int, ...]:
        if len(body) < 4 or body[0] not in (1, 2):
            raise DamagedError("the shape of a data set is damaged")
        rank = body[1]
        begin = 8 if body[0] == 1 else 4
        if rank > limits.DIMENSIONS_MAX or begin + rank * self._length_bytes > len(body):
            raise DamagedError("the shape of a data set is damaged")
        return tuple(
            self._count(body, begin + number * self._length_bytes) for number in range(rank)
        )


def _type(body: bytes) -> tuple[str, int]:
    """Name and size of an item."""
    if len(body) < 8 or not 1 <= body[0] >> 4 <= _TYPE_VERSION_MAX:
        raise DamagedError("the type of a data set is damaged")
    kind = body[0] & 0x0F
    size = int.from_bytes(body[4:8], "little")
    order = ">" if body[1] & 1 else "<"
    if kind == _INTEGER:
        return f"{order}{'i' if body[1] & 8 else 'u'}{size}", size
    if kind == _FLOAT:
        return f"{order}f{size}", size
    if kind == _STRING:
        return f"S{size}", size
    if kind == _ENUMERATION and size == 1:
        return "bool", size
    return (_CLASSES[kind] if kind < len(_CLASSES) else "other"), size


def _attribute_name(body: bytes) -> str:
    """Section IV.A.2.m."""
    if len(body) < 8 or not 1 <= body[0] <= _ATTRIBUTE_VERSION_MAX:
        raise DamagedError("an attribute is damaged")
    begin = 9 if body[0] == _ATTRIBUTE_VERSION_MAX else 8
    size = int.from_bytes(body[2:4], "little")
    if not size or begin + size > len(body):
        raise DamagedError("an attribute is damaged")
    return body[begin : begin + size].rstrip(b"\0").decode("utf-8", "replace")


def data_sets(
    reader: Reader, base: int, length: int, sizes: tuple[int, int], root: int
) -> DataSets:
    """Those below the group whose object header lies at ``root``. Raises ProblemError."""
    found = DataSets(reader, base, length, sizes)
    try:
        found.walk(root)
    except IncompleteError as error:
        raise DamagedError(f"its tree is damaged: {error}") from error
    return found
