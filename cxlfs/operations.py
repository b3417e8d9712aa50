"""The operations that a journal record is made of: values, their bytes, and back.

One record is one transaction: its operations take effect together or not at all.

Never here: what an operation does to the store (``namespace``, ``replay``).

Invariants
- ``decode(encode(operations))`` gives equal operations back.
- Every encoded operation is a multiple of 8 bytes; padding is zero.
- ``decode`` trusts nothing: lengths, counts, names and types are checked before use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from cxlfs import layout
from cxlfs.errors import CorruptionError, invariant

_HEADER = layout.packer(layout.OPERATION_DTYPE)
_INODE = layout.packer(layout.OP_INODE_DTYPE)
_NAME = layout.packer(layout.OP_NAME_DTYPE)
_XATTR = layout.packer(layout.OP_XATTR_DTYPE)
_EXTENT = layout.packer(layout.OP_EXTENT_DTYPE)
_CONTENT = layout.packer(layout.OP_CONTENT_DTYPE)
_INO = layout.packer(layout.OP_INO_DTYPE)
_MOVE = layout.packer(layout.OP_MOVE_DTYPE)
_REF_BYTES = layout.REF_DTYPE.itemsize
_CHUNKS_MAX = 1 << 24
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
    return _wrap(
        layout.OP_INODE,
        _INODE.pack(ino, mode, uid, gid, rdev, flags, 0, atime, mtime, ctime, birth),
    )


def _encode_link(op: LinkOperation) -> bytes:
    return _wrap(layout.OP_LINK, _NAME.pack(op.parent, op.ino, len(op.name), 0) + op.name)


def _encode_unlink(op: UnlinkOperation) -> bytes:
    return _wrap(layout.OP_UNLINK, _NAME.pack(op.parent, 0, len(op.name), 0) + op.name)


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
    body = _CONTENT.pack(op.ino, op.cut, op.size, len(op.refs) // _REF_BYTES) + op.refs
    return _wrap(layout.OP_CONTENT, body, layout.OP_FLAG_ASIDE if op.aside else 0)


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
    """The payload of a record. At most 65535 operations."""
    invariant(len(operations) < 1 << 16, "too many operations in one record")
    return b"".join([_ENCODERS[type(op)](op) for op in operations])


class _MalformedError(Exception):
    """A body that does not fit its operation; decode() turns it into CorruptionError."""


def _name(data: bytes, start: int, length: int) -> bytes:
    name = data[start : start + length]
    if not 0 < length <= layout.NAME_BYTES_MAX or len(name) != length:
        raise _MalformedError("name length")
    if b"/" in name or b"\0" in name or name in (b".", b".."):
        raise _MalformedError("name")
    return name


def _decode_inode(data: bytes, _flags: int) -> Operation:
    ino, mode, uid, gid, rdev, flags, _, atime, mtime, ctime, birth = _INODE.unpack_from(data)
    if ino == 0 or flags & ~layout.INODE_FLAGS_KNOWN:
        raise _MalformedError("inode flags")
    return InodeOperation(ino, mode, uid, gid, rdev, flags, atime, mtime, ctime, birth)


def _decode_link(data: bytes, _flags: int) -> Operation:
    parent, ino, length, _ = _NAME.unpack_from(data)
    return LinkOperation(parent, ino, _name(data, _NAME.size, length))


def _decode_unlink(data: bytes, _flags: int) -> Operation:
    parent, _ino, length, _ = _NAME.unpack_from(data)
    return UnlinkOperation(parent, _name(data, _NAME.size, length))


def _strings(data: bytes) -> tuple[int, bytes, bytes]:
    ino, name_bytes, value_bytes = _XATTR.unpack_from(data)
    end = _XATTR.size + name_bytes
    if end + value_bytes > len(data):
        raise _MalformedError("string length")
    return ino, data[_XATTR.size : end], data[end : end + value_bytes]


def _decode_symlink(data: bytes, _flags: int) -> Operation:
    ino, _name_part, target = _strings(data)
    if not 0 < len(target) <= layout.SYMLINK_BYTES_MAX:
        raise _MalformedError("symlink length")
    return SymlinkOperation(ino, target)


def _decode_xattr_set(data: bytes, _flags: int) -> Operation:
    ino, name, value = _strings(data)
    if not 0 < len(name) <= layout.XATTR_NAME_BYTES_MAX or b"\0" in name:
        raise _MalformedError("xattr name")
    return XattrSetOperation(ino, name, value)


def _decode_xattr_remove(data: bytes, _flags: int) -> Operation:
    ino, name, _value = _strings(data)
    return XattrRemoveOperation(ino, name)


def _decode_extent(data: bytes, _flags: int) -> Operation:
    extent_id, media_offset, length, first_chunk, count = _EXTENT.unpack_from(data)
    end = _EXTENT.size + 4 * count
    if count > _CHUNKS_MAX or end > len(data):
        raise _MalformedError("checksum count")
    return ExtentOperation(extent_id, media_offset, length, first_chunk, data[_EXTENT.size : end])


def _decode_content(data: bytes, flags: int) -> Operation:
    ino, cut, size, count = _CONTENT.unpack_from(data)
    end = _CONTENT.size + _REF_BYTES * count
    if count > len(data) or end > len(data):
        raise _MalformedError("reference count")
    if size > layout.FILE_SIZE_MAX:
        raise _MalformedError("file size")
    aside = bool(flags & layout.OP_FLAG_ASIDE)
    return ContentOperation(ino, aside, cut, size, data[_CONTENT.size : end])


def _decode_promote(data: bytes, _flags: int) -> Operation:
    return PromoteOperation(*_INO.unpack_from(data))


def _decode_aside_drop(data: bytes, _flags: int) -> Operation:
    return AsideDropOperation(*_INO.unpack_from(data))


def _decode_move(data: bytes, _flags: int) -> Operation:
    *numbers, count = _MOVE.unpack_from(data)
    if count > len(data) or _MOVE.size + 8 * count > len(data):
        raise _MalformedError("inode count")
    inos = tuple(_INO.unpack_from(data, _MOVE.size + 8 * i)[0] for i in range(count))
    return MoveOperation(*numbers, inos)


_DECODERS: dict[int, tuple[int, Callable[[bytes, int], Operation]]] = {
    layout.OP_INODE: (_INODE.size, _decode_inode),
    layout.OP_LINK: (_NAME.size, _decode_link),
    layout.OP_UNLINK: (_NAME.size, _decode_unlink),
    layout.OP_SYMLINK: (_XATTR.size, _decode_symlink),
    layout.OP_XATTR_SET: (_XATTR.size, _decode_xattr_set),
    layout.OP_XATTR_REMOVE: (_XATTR.size, _decode_xattr_remove),
    layout.OP_EXTENT: (_EXTENT.size, _decode_extent),
    layout.OP_CONTENT: (_CONTENT.size, _decode_content),
    layout.OP_PROMOTE: (_INO.size, _decode_promote),
    layout.OP_ASIDE_DROP: (_INO.size, _decode_aside_drop),
    layout.OP_MOVE: (_MOVE.size, _decode_move),
}


def decode(payload: bytes, count: int, media_offset: int) -> list[Operation]:
    """The operations of a record's payload; raises CorruptionError naming ``media_offset``."""
    result: list[Operation] = []
    position = 0
    end = len(payload)
    for _ in range(count):
        if position + 8 > end:
            break
        kind, flags, length = _HEADER.unpack_from(payload, position)
        decoder = _DECODERS.get(kind)
        if decoder is None or length & 7 or length < 8 + decoder[0] or position + length > end:
            break
        try:
            result.append(decoder[1](payload[position + 8 : position + length], flags))
        except _MalformedError as error:
            raise CorruptionError(
                f"malformed journal operation: {error}",
                structure="journal record",
                media_offset=media_offset,
            ) from error
        position += length
    if len(result) != count or position != end:
        raise CorruptionError(
            "malformed journal record: its operations do not fill it",
            structure="journal record",
            media_offset=media_offset,
        )
    return result
