"""The operations that a journal record is made of: values, their bytes, and back.

One record is one transaction: its operations take effect together or not at all.

Never here: what an operation does to the store (``namespace``, ``replay``).

Invariants
- ``decode(encode(operations))`` gives equal operations back.
- Every encoded operation is a multiple of 8 bytes; padding is zero.
- ``decode`` trusts nothing: lengths, counts, names and types are checked before use.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cxlfs.errors import CorruptionError, InvalidArgumentError, invariant
from cxlfs.format import layout
from cxlfs.format.packing import packer

_HEADER = packer(layout.OPERATION_DTYPE)
_INODE = packer(layout.OP_INODE_DTYPE)
_NAME = packer(layout.OP_NAME_DTYPE)
_XATTR = packer(layout.OP_XATTR_DTYPE)
_EXTENT = packer(layout.OP_EXTENT_DTYPE)
_CONTENT = packer(layout.OP_CONTENT_DTYPE)
_INO = packer(layout.OP_INO_DTYPE)
_MOVE = packer(layout.OP_MOVE_DTYPE)
_HEADED_INODE = struct.Struct(_HEADER.format + _INODE.format.lstrip("<"))
_HEADED_CONTENT = struct.Struct(_HEADER.format + _CONTENT.format.lstrip("<"))
_HEADED_NAME = struct.Struct(_HEADER.format + _NAME.format.lstrip("<"))
"""Header and body in one: every save packs several of each, and half of the time is the call's."""
_REF_BYTES = layout.REF_DTYPE.itemsize
CHUNKS_MAX = 1 << 24
"""Checksums that one operation can hold."""
_SIZES = (_HEADED_INODE.size, _HEADED_CONTENT.size, _HEADED_NAME.size, _REF_BYTES)
invariant(not any(size & 7 for size in _SIZES), "bodies that need no padding")
_PADDING = [bytes(count) for count in (0, 7, 6, 5, 4, 3, 2, 1)]


class InodeOperation(NamedTuple):
    """Make an inode, or set the attributes of an existing one. ``mode`` is st_mode."""

    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    flags: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    birth_ns: int


class LinkOperation(NamedTuple):
    """``name`` in ``parent`` now means ``ino``, whatever it meant before."""

    parent: int
    ino: int
    name: bytes


class UnlinkOperation(NamedTuple):
    """``name`` in ``parent`` means nothing any more."""

    parent: int
    name: bytes


class SymlinkOperation(NamedTuple):
    ino: int
    target: bytes


class XattrSetOperation(NamedTuple):
    ino: int
    name: bytes
    value: bytes


class XattrRemoveOperation(NamedTuple):
    ino: int
    name: bytes


class ExtentOperation(NamedTuple):
    """Define an extent, or a longer state of it; ``crcs``: little-endian u32 of the chunks."""

    id: int
    media_offset: int
    length: int
    first_chunk: int
    crcs: bytes


class ContentOperation(NamedTuple):
    """Cut, apply ``refs`` (layout.REF_DTYPE bytes), set the size: committed or aside content."""

    ino: int
    aside: bool
    cut: int
    size: int
    refs: bytes


class PromoteOperation(NamedTuple):
    """The content kept aside becomes the committed one."""

    ino: int


class AsideDropOperation(NamedTuple):
    """Forget the content kept aside."""

    ino: int


class MoveOperation(NamedTuple):
    """References of ``inos`` into a range of the source extent now aim at the target extent."""

    source_id: int
    source_offset: int
    length: int
    target_id: int
    target_offset: int
    inos: tuple[int, ...]


Operation = (
    InodeOperation
    | LinkOperation
    | UnlinkOperation
    | SymlinkOperation
    | XattrSetOperation
    | XattrRemoveOperation
    | ExtentOperation
    | ContentOperation
    | PromoteOperation
    | AsideDropOperation
    | MoveOperation
)


def _wrap(kind: int, body: bytes, flags: int = 0) -> bytes:
    padding = _PADDING[len(body) & 7]
    return _HEADER.pack(kind, flags, 8 + len(body) + len(padding)) + body + padding


def _encode_inode(op: InodeOperation) -> bytes:
    (ino, mode, uid, gid, rdev, flags, atime, mtime, ctime, birth) = op
    return _HEADED_INODE.pack(
        *(layout.OP_INODE, 0, _HEADED_INODE.size),
        *(ino, mode, uid, gid, rdev, flags, 0, atime, mtime, ctime, birth),
    )


def _encode_link(op: LinkOperation) -> bytes:
    parent, ino, name = op
    return _encode_name(layout.OP_LINK, parent, ino, name)


def _encode_unlink(op: UnlinkOperation) -> bytes:
    parent, name = op
    return _encode_name(layout.OP_UNLINK, parent, 0, name)


def _encode_name(kind: int, parent: int, ino: int, name: bytes) -> bytes:
    length = len(name)
    padding = _PADDING[length & 7]
    head = _HEADED_NAME.pack(
        kind, 0, _HEADED_NAME.size + length + len(padding), parent, ino, length, 0
    )
    return head + name + padding


def _encode_symlink(op: SymlinkOperation) -> bytes:
    return _wrap(layout.OP_SYMLINK, _XATTR.pack(op.ino, 0, len(op.target)) + op.target)


def _encode_xattr_set(op: XattrSetOperation) -> bytes:
    body = _XATTR.pack(op.ino, len(op.name), len(op.value)) + op.name + op.value
    return _wrap(layout.OP_XATTR_SET, body)


def _encode_xattr_remove(op: XattrRemoveOperation) -> bytes:
    return _wrap(layout.OP_XATTR_REMOVE, _XATTR.pack(op.ino, len(op.name), 0) + op.name)


def _encode_extent(op: ExtentOperation) -> bytes:
    count = len(op.crcs) // 4
    body = _EXTENT.pack(op.id, op.media_offset, op.length, op.first_chunk, count) + op.crcs
    return _wrap(layout.OP_EXTENT, body)


def _encode_content(op: ContentOperation) -> bytes:
    ino, aside, cut, size, refs = op
    length = len(refs)
    flags = layout.OP_FLAG_ASIDE if aside else 0
    head = _HEADED_CONTENT.size + length
    count = length // _REF_BYTES
    return _HEADED_CONTENT.pack(layout.OP_CONTENT, flags, head, ino, cut, size, count) + refs


def _encode_promote(op: PromoteOperation) -> bytes:
    return _wrap(layout.OP_PROMOTE, _INO.pack(op.ino))


def _encode_aside_drop(op: AsideDropOperation) -> bytes:
    return _wrap(layout.OP_ASIDE_DROP, _INO.pack(op.ino))


def _encode_move(op: MoveOperation) -> bytes:
    body = _MOVE.pack(*op[:5], len(op.inos)) + b"".join(_INO.pack(ino) for ino in op.inos)
    return _wrap(layout.OP_MOVE, body)


_ENCODERS: dict[type, Callable[..., bytes]] = {
    InodeOperation: _encode_inode,
    LinkOperation: _encode_link,
    UnlinkOperation: _encode_unlink,
    SymlinkOperation: _encode_symlink,
    XattrSetOperation: _encode_xattr_set,
    XattrRemoveOperation: _encode_xattr_remove,
    ExtentOperation: _encode_extent,
    ContentOperation: _encode_content,
    PromoteOperation: _encode_promote,
    AsideDropOperation: _encode_aside_drop,
    MoveOperation: _encode_move,
}


def encode(operations: Sequence[Operation]) -> bytes:
    """The payload of a record. At most 65535 operations.

    Raises InvalidArgumentError: a value does not fit its field.
    """
    invariant(len(operations) < 1 << 16, "too many operations in one record")
    try:
        return b"".join([_ENCODERS[type(op)](op) for op in operations])
    except (struct.error, OverflowError) as error:
        raise InvalidArgumentError(f"no record can say this: {error}") from error


class _MalformedError(Exception):
    """A body that does not fit its operation; decode() turns it into CorruptionError."""


def is_name(name: bytes) -> bool:
    """Whether that can be a name in a directory, but for its length."""
    return not (b"/" in name or b"\0" in name or name in (b".", b".."))


def _name(data: bytes, start: int, length: int, end: int) -> bytes:
    name = data[start : start + length]
    if not 0 < length <= layout.NAME_BYTES_MAX or start + length > end:
        raise _MalformedError("name length")
    if not is_name(name):
        raise _MalformedError("name")
    return name


# A decoder gets the payload, where the body begins and ends in it, and the flags. A named tuple is
# made with tuple.__new__, which costs a third of calling its class: replay lives on this.
_new = tuple.__new__


def _decode_inode(data: bytes, start: int, _end: int, _flags: int) -> Operation:
    values = _INODE.unpack_from(data, start)
    if not 0 < values[0] < layout.NUMBER_LIMIT or values[5] & ~layout.INODE_FLAGS_KNOWN:
        raise _MalformedError("inode number or flags")
    return _new(InodeOperation, values[:6] + values[7:])


def _decode_link(data: bytes, start: int, end: int, _flags: int) -> Operation:
    parent, ino, length, _ = _NAME.unpack_from(data, start)
    return _new(LinkOperation, (parent, ino, _name(data, start + _NAME.size, length, end)))


def _decode_unlink(data: bytes, start: int, end: int, _flags: int) -> Operation:
    parent, _ino, length, _ = _NAME.unpack_from(data, start)
    return UnlinkOperation(parent, _name(data, start + _NAME.size, length, end))


def _strings(data: bytes, start: int, end: int) -> tuple[int, bytes, bytes]:
    ino, name_bytes, value_bytes = _XATTR.unpack_from(data, start)
    first = start + _XATTR.size
    middle = first + name_bytes
    if middle + value_bytes > end:
        raise _MalformedError("string length")
    return ino, data[first:middle], data[middle : middle + value_bytes]


def _decode_symlink(data: bytes, start: int, end: int, _flags: int) -> Operation:
    ino, _name_part, target = _strings(data, start, end)
    if not 0 < len(target) <= layout.SYMLINK_BYTES_MAX:
        raise _MalformedError("symlink length")
    return SymlinkOperation(ino, target)


def _decode_xattr_set(data: bytes, start: int, end: int, _flags: int) -> Operation:
    ino, name, value = _strings(data, start, end)
    if not 0 < len(name) <= layout.XATTR_NAME_BYTES_MAX or b"\0" in name:
        raise _MalformedError("xattr name")
    return XattrSetOperation(ino, name, value)


def _decode_xattr_remove(data: bytes, start: int, end: int, _flags: int) -> Operation:
    ino, name, _value = _strings(data, start, end)
    return XattrRemoveOperation(ino, name)


def _decode_extent(data: bytes, start: int, end: int, _flags: int) -> Operation:
    extent_id, media_offset, length, first_chunk, count = _EXTENT.unpack_from(data, start)
    first = start + _EXTENT.size
    last = first + 4 * count
    if count > CHUNKS_MAX or last > end:
        raise _MalformedError("checksum count")
    if extent_id >= layout.NUMBER_LIMIT:
        raise _MalformedError("extent number")
    return _new(ExtentOperation, (extent_id, media_offset, length, first_chunk, data[first:last]))


def _decode_content(data: bytes, start: int, end: int, flags: int) -> Operation:
    ino, cut, size, count = _CONTENT.unpack_from(data, start)
    first = start + _CONTENT.size
    last = first + _REF_BYTES * count
    if count > len(data) or last > end:
        raise _MalformedError("reference count")
    if size > layout.FILE_SIZE_MAX:
        raise _MalformedError("file size")
    aside = bool(flags & layout.OP_FLAG_ASIDE)
    return _new(ContentOperation, (ino, aside, cut, size, data[first:last]))


def _decode_promote(data: bytes, start: int, _end: int, _flags: int) -> Operation:
    return PromoteOperation(*_INO.unpack_from(data, start))


def _decode_aside_drop(data: bytes, start: int, _end: int, _flags: int) -> Operation:
    return AsideDropOperation(*_INO.unpack_from(data, start))


def _decode_move(data: bytes, start: int, end: int, _flags: int) -> Operation:
    source_id, source_offset, length, target_id, target_offset, count = _MOVE.unpack_from(
        data, start
    )
    first = start + _MOVE.size
    if count > len(data) or first + 8 * count > end:
        raise _MalformedError("inode count")
    inos = tuple(_INO.unpack_from(data, first + 8 * i)[0] for i in range(count))
    return MoveOperation(source_id, source_offset, length, target_id, target_offset, inos)


_DECODERS: dict[int, tuple[int, Callable[[bytes, int, int, int], Operation]]] = {
    layout.OP_INODE: (8 + _INODE.size, _decode_inode),
    layout.OP_LINK: (8 + _NAME.size, _decode_link),
    layout.OP_UNLINK: (8 + _NAME.size, _decode_unlink),
    layout.OP_SYMLINK: (8 + _XATTR.size, _decode_symlink),
    layout.OP_XATTR_SET: (8 + _XATTR.size, _decode_xattr_set),
    layout.OP_XATTR_REMOVE: (8 + _XATTR.size, _decode_xattr_remove),
    layout.OP_EXTENT: (8 + _EXTENT.size, _decode_extent),
    layout.OP_CONTENT: (8 + _CONTENT.size, _decode_content),
    layout.OP_PROMOTE: (8 + _INO.size, _decode_promote),
    layout.OP_ASIDE_DROP: (8 + _INO.size, _decode_aside_drop),
    layout.OP_MOVE: (8 + _MOVE.size, _decode_move),
}


_FLAGS_KNOWN = {kind: layout.OP_FLAGS_KNOWN.get(kind, 0) for kind in _DECODERS}
LEAST_BYTES = {kind: least for kind, (least, _decoder) in _DECODERS.items()}
"""Bytes of header and body of each kind of operation, without what follows them."""


def _require_known(kind: int, flags: int) -> None:
    if flags & ~_FLAGS_KNOWN[kind]:
        raise _MalformedError(f"unknown flags {flags:#x} of type {kind}")


def decode_one(data: bytes, kind: int, flags: int) -> Operation:
    """One operation of a known kind, header and body, of LEAST_BYTES or more.

    Raises CorruptionError.
    """
    try:
        _require_known(kind, flags)
        return _DECODERS[kind][1](data, _HEADER.size, len(data), flags)
    except _MalformedError as error:
        raise CorruptionError(
            f"malformed journal operation: {error}", structure="journal record"
        ) from error


def _malformed(what: str, media_offset: int) -> CorruptionError:
    message = f"malformed journal operation: {what}"
    return CorruptionError(message, structure="journal record", media_offset=media_offset)


def decode(payload: bytes, count: int, media_offset: int) -> list[Operation]:
    """The operations of a record's payload; raises CorruptionError naming ``media_offset``."""
    result: list[Operation] = []
    position = 0
    size = len(payload)
    header, decoders = _HEADER.unpack_from, _DECODERS
    try:
        for _ in range(count):
            kind, flags, length = header(payload, position)
            least, decoder = decoders[kind]
            end = position + length
            if length & 7 or length < least or end > size:
                break
            if flags:
                _require_known(kind, flags)
            result.append(decoder(payload, position + 8, end, flags))
            position = end
    except KeyError as error:
        raise _malformed(f"unknown type {error}", media_offset) from error
    except (_MalformedError, struct.error) as error:
        raise _malformed(str(error), media_offset) from error
    if len(result) != count or position != size:
        raise CorruptionError(
            "malformed journal record: its operations do not fill it",
            structure="journal record",
            media_offset=media_offset,
        )
    return result
