"""The state of a cxlfs store: a metadata image, and journal records applied to it.

``reader.py`` is the program that uses this module. Other modules check the structures of the media
(``reader_structures``), and find the records (``reader``).

Invariants
- Names, numbers and references are checked before they are used, and the bytes of a content before
  they are given to a caller.
- A state to which a record could not be applied is worth nothing.
"""

from __future__ import annotations

import bisect
import dataclasses
import stat
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Final

import numpy as np
import numpy.typing as npt
import reader_structures as structures
from reader_structures import DamageError, Medium, ReaderError, Superblock, crc32c, require, unpack

IMAGE_BYTES_MAX: Final = 4 << 30
"""The largest metadata image that is read; each byte of it takes up to ten of memory."""
ROOT_INO: Final = 1
TYPES: Final = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symbolic link",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}

# --- the state: inodes, names, contents, extents --------------------------------------------


@dataclasses.dataclass(slots=True)
class Version:
    """A content. ``references``: (file offset, length, extent, offset in it), sorted and apart."""

    size: int = 0
    references: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)

    def lay(self, offset: int, length: int, extent: int, inside: int) -> int:
        """Lay a reference (extent 0: a hole) over what is there; returns how much work that was."""
        old, end = self.references, offset + length
        first = bisect.bisect_right(old, offset, key=lambda reference: reference[0] + reference[1])
        last = bisect.bisect_left(old, end, lo=first, key=lambda reference: reference[0])
        parts = [(offset, length, extent, inside)] if extent and length else []
        for start, size, other, at in old[first:last]:
            if start < offset:
                parts.insert(0, (start, offset - start, other, at))
            if start + size > end:
                parts.append((end, start + size - end, other, at + end - start))
        old[first:last] = parts
        return 1 + last - first + (len(old) >> 10)

    def cut(self, size: int) -> int:
        """Take away what is behind ``size``; returns how much work that was."""
        return self.lay(size, 1 << 64, 0, 0)


@dataclasses.dataclass(slots=True)
class Inode:
    """A file, directory, link or device. ``aside``: the version kept aside; ``links``: its names.
    ``entries``, ``target``: of a directory and of a symbolic link.
    """

    ino: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    flags: int = 0
    atime_ns: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    birth_ns: int = 0
    commit_lsn: int = 0
    commit_ns: int = 0
    content: Version = dataclasses.field(default_factory=Version)
    aside: Version | None = None
    target: bytes = b""
    links: int = 0
    parent: int = 0
    entries: dict[bytes, int] = dataclasses.field(default_factory=dict)
    xattrs: dict[bytes, bytes] = dataclasses.field(default_factory=dict)

    @property
    def kind(self) -> str:
        return TYPES[stat.S_IFMT(self.mode)]

    @property
    def size(self) -> int:
        sizes = {"file": self.content.size, "directory": 4096, "symbolic link": len(self.target)}
        return sizes.get(self.kind, 0)

    def set_attributes(self, row: SimpleNamespace) -> None:
        for name in ("mode", "uid", "gid", "rdev", "flags"):
            setattr(self, name, getattr(row, name))
        for name in ("atime_ns", "mtime_ns", "ctime_ns", "birth_ns"):
            setattr(self, name, getattr(row, name))


@dataclasses.dataclass(slots=True)
class Extent:
    """A range of one segment. ``checksums``: of each chunk, little-endian."""

    media_offset: int
    length: int
    checksums: bytearray


class State:
    """What is committed: an image, then record after record."""

    def __init__(self, medium: Medium, block: Superblock) -> None:
        self.medium = medium
        self.block = block
        self.inodes: dict[int, Inode] = {}
        self.extents: dict[int, Extent] = {}
        self.last_lsn = 0

    def get(self, ino: int, kind: str | None = None) -> Inode:
        """Return an inode, of that kind if one is given. Raises DamageError."""
        inode = self.inodes.get(ino)
        require(inode is not None and kind in (None, inode.kind), f"inode {ino} is not what it was")
        return self.inodes[ino]

    def make(self, row: SimpleNamespace) -> Inode:
        require(
            0 < row.ino < structures.NUMBER_LIMIT and row.ino not in self.inodes,
            "an impossible inode",
        )
        require(stat.S_IFMT(row.mode) in TYPES, "no such type")
        inode = self.inodes[row.ino] = Inode(row.ino)
        inode.set_attributes(row)
        return inode

    def name(self, parent: int, name: bytes, ino: int) -> None:
        directory, inode = self.get(parent, "directory"), self.get(ino)
        require(0 < len(name) <= 255 and not set(name) & {0, 0x2F}, "an impossible name")
        require(name not in (b".", b"..", *directory.entries), "an impossible name, or one twice")
        require(inode.kind != "directory" or not inode.links, "a directory with two names")
        directory.entries[name] = ino
        inode.links += 1
        inode.parent = parent

    def define(self, row: SimpleNamespace, checksums: bytes) -> None:
        block, chunk = self.block, self.block.chunk_bytes
        inside = (row.media_offset - block.segment_offset(0)) % block.segment_bytes
        end = block.segment_offset(block.segment_count)
        require(block.segment_offset(0) <= row.media_offset < end, "an extent outside the segments")
        require(
            structures.SEGMENT_HEADER_BYTES <= inside <= block.segment_bytes - row.length,
            "no such place",
        )
        require(0 < row.id < structures.NUMBER_LIMIT and row.length, "an impossible extent")
        count = -(-row.length // chunk)
        require(row.first_chunk + row.crc_count == count, "an extent without all checksums")
        require(len(checksums) == 4 * row.crc_count, "checksums are missing")
        known = self.extents.setdefault(row.id, Extent(row.media_offset, 0, bytearray()))
        whole = known.length // chunk if row.length > known.length else count
        kept = known.checksums[4 * row.first_chunk : 4 * whole]
        require(row.length >= known.length and row.first_chunk <= whole, "an extent shrinks")
        require(row.media_offset == known.media_offset, "an extent has another place")
        require(checksums.startswith(kept), "an extent has other checksums")
        known.checksums[4 * row.first_chunk :] = checksums
        known.length = row.length

    def refer(self, version: Version, rows: npt.NDArray[np.void]) -> None:
        """Lay references over a version."""
        for reference in rows.tolist():
            offset, length, extent, inside = reference
            known = self.extents.get(extent)
            require(offset + length <= 1 << 63, "a reference beyond every file")
            require(extent == 0 or (known and inside + length <= known.length), "of no extent")
            self.medium.spend(version.lay(*reference))

    def chunk(self, number: int, index: int) -> bytes:
        """Return a chunk of an extent. Raises DamageError if its checksum is wrong."""
        extent, chunk = self.extents[number], self.block.chunk_bytes
        length = min(chunk, extent.length - index * chunk)
        data = self.medium.read(extent.media_offset + index * chunk, length)
        (expected,) = struct.unpack_from("<I", extent.checksums, 4 * index)
        actual = crc32c(data, crc32c(struct.pack("<QQ", number, index)))
        require(actual == expected, f"chunk {index} of extent {number} is damaged")
        return data

    def pieces(self, version: Version) -> Iterator[tuple[int, bytes | None]]:
        """Yield offset and bytes of what is not a hole, in order; None for what is damaged."""
        chunk, last, data = self.block.chunk_bytes, (0, 0), b""
        for offset, length, number, inside in version.references:
            end, position = inside + length, inside
            while position < end:
                index, start = divmod(position, chunk)
                size = min(chunk - start, end - position)
                try:
                    data = data if last == (number, index) else self.chunk(number, index)
                    last = number, index
                    yield offset + position - inside, data[start : start + size]
                except DamageError:
                    yield offset + position - inside, None
                position += size

    def read(self, version: Version) -> bytes:
        """Return a content as a whole. Raises DamageError."""
        data = bytearray(version.size)
        for offset, piece in self.pieces(version):
            require(piece is not None, f"the content is damaged at {offset}")
            data[offset : offset + len(piece or b"")] = piece or b""
        return bytes(data)

    def walk(self) -> Iterator[tuple[bytes, Inode]]:
        """Yield each path and its inode, directories before what is in them."""
        pending = [(b"/", ROOT_INO)]
        while pending:
            path, ino = pending.pop()
            inode = self.inodes[ino]
            yield path, inode
            above = path.rstrip(b"/") + b"/"
            self.medium.spend(len(inode.entries) * len(above) + 1)
            pending += [(above + name, inode.entries[name]) for name in sorted(inode.entries)[::-1]]


# --- the metadata image ---------------------------------------------------------------------


def _image_bytes(state: State, root: SimpleNamespace) -> bytes:
    block, room = state.block, state.block.segment_bytes - structures.SEGMENT_HEADER_BYTES
    if root.image_bytes > IMAGE_BYTES_MAX:
        raise ReaderError(f"the metadata image has {root.image_bytes} bytes: too many")
    parts = [
        (block.segment_offset(index), min(room, root.image_bytes - number * room))
        for number, index in enumerate(root.image_segments)
    ]
    read = state.medium.read
    return b"".join(
        read(at + structures.SEGMENT_HEADER_BYTES, max(length, 0)) for at, length in parts
    )


def _sections(data: bytes, root: SimpleNamespace) -> dict[int, npt.NDArray[np.void]]:
    """Return the items of each section. Raises DamageError."""
    head = unpack(structures.IMAGE, data)
    require(head.magic == b"cxlfs\rMI" and head.uuid == root.uuid, "no image of this store")
    require(
        head.crc == root.image_header_crc == crc32c(data[: structures.IMAGE.itemsize - 4]),
        "its checksum",
    )
    require(head.lsn == root.image_lsn, "image and root disagree")
    found: dict[int, npt.NDArray[np.void]] = {}
    for number in range(len(structures.SECTION_ITEMS)):
        row = unpack(structures.SECTION, head.sections, number * structures.SECTION.itemsize)
        require(
            row.kind in structures.SECTION_ITEMS and row.kind not in found, "an unknown section"
        )
        section = data[row.offset : row.offset + row.length]
        items = structures.SECTION_ITEMS[row.kind]
        require(row.length == len(section) == row.item_count * items.itemsize, "a cut section")
        require(crc32c(section) == row.crc, f"the checksum of section {row.kind} is wrong")
        found[row.kind] = np.frombuffer(section, dtype=items)
    return found


def _each(rows: npt.NDArray[np.void]) -> Iterator[SimpleNamespace]:
    for values in rows.tolist():
        yield SimpleNamespace(**dict(zip(rows.dtype.names or (), values, strict=True)))


def read_image(medium: Medium, block: Superblock, root: SimpleNamespace) -> State:
    """Return the state that the image of a root has. Raises DamageError."""
    state = State(medium, block)
    sections = _sections(_image_bytes(state, root), root)
    checksums, strings = (
        sections[structures.CHECKSUMS].tobytes(),
        sections[structures.STRINGS].tobytes(),
    )
    for row in _each(sections[structures.EXTENTS]):
        first = 4 * row.crc_index
        state.define(row, checksums[first : first + 4 * row.crc_count])
    taken = 0
    for row in _each(sections[structures.INODES]):
        inode = state.make(row)
        inode.commit_lsn, inode.commit_ns = row.commit_lsn, row.commit_ns
        inode.aside = Version() if row.flags & structures.INODE_ASIDE else None
        inode.flags &= ~structures.INODE_ASIDE
        counts = ((inode.content, row.size, row.ref_count),)
        asides = ((inode.aside, row.aside_size, row.aside_ref_count),) if inode.aside else ()
        for version, size, count in (*counts, *asides):
            require(inode.kind == "file" or not (size or count), "content of what is no file")
            require(size <= structures.FILE_SIZE_MAX, "a file is too large")
            rows = sections[structures.REFERENCES][taken : taken + count]
            require(len(rows) == count and rows["extent_id"].all(), "references are missing")
            state.refer(version, rows)
            version.size, taken = size, taken + count
    for row in _each(sections[structures.NAMES]):
        state.name(row.parent, strings[row.name_offset : row.name_offset + row.name_bytes], row.ino)
    for row in _each(sections[structures.XATTRS]):
        value = row.string_offset + row.name_bytes
        name = strings[row.string_offset : value]
        state.get(row.ino).xattrs[name] = strings[value : value + row.value_bytes]
    for row in _each(sections[structures.SYMLINKS]):
        target = strings[row.string_offset : row.string_offset + row.value_bytes]
        state.get(row.ino, "symbolic link").target = target
    state.get(ROOT_INO, "directory")
    reached = {inode.ino for _, inode in state.walk()}
    require(reached == state.inodes.keys(), "something is not below the root directory")
    state.last_lsn = root.image_lsn
    return state


# --- operations -----------------------------------------------------------------------------


class Operations:
    """Applies the operations of records to a state."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._record = SimpleNamespace()
        self._suspects: set[int] = set()
        """Inodes that may end the record without a name, or without a target."""
        self._moves: list[tuple[SimpleNamespace, list[int]]] = []
        """Moves that follow each other, and of which inodes."""
        self._apply: dict[int, Callable[[bytes, int], None]] = {
            1: self._inode,
            2: self._link,
            3: self._unlink,
            4: self._symlink,
            5: self._set_xattr,
            6: self._remove_xattr,
            7: self._extent,
            8: self._content,
            9: self._promote,
            10: self._drop_aside,
            11: self._move,
        }

    def apply(self, record: SimpleNamespace) -> None:
        """Apply a record. Raises DamageError, and the state is worth nothing then."""
        self._record = record
        payload, position, head_bytes = record.payload, 0, structures.OPERATION.itemsize
        for _ in range(record.operation_count):
            head = unpack(structures.OPERATION, payload, position)
            end = position + head.length
            require(head.length >= head_bytes and head.length % 8 == 0, "a bad operation")
            require(end <= len(payload) and head.type in self._apply, "an unknown operation")
            if head.type not in (1, 7, 11):
                self._follow_moves()
            self._apply[head.type](payload[position + head_bytes : end], head.flags)
            position = end
        require(position == len(payload), "operations that do not fill their record")
        self._follow_moves()
        for ino in self._suspects:
            self._end(self._state.inodes[ino])
        self._suspects.clear()
        self._state.last_lsn = record.lsn

    def _end(self, inode: Inode) -> None:
        if inode.links == 0 and inode.ino != ROOT_INO:
            require(not inode.entries, "a directory has lost its name")
            del self._state.inodes[inode.ino]
        else:
            require(inode.target or inode.kind != "symbolic link", "a link without a target")

    def _inode(self, body: bytes, _flags: int) -> None:
        row = unpack(structures.OP_INODE, body)
        require(row.flags & ~structures.INODE_INCOMPLETE == 0, "unknown flags of an inode")
        known = self._state.inodes.get(row.ino)
        if known is None:
            self._state.make(row)
            self._suspects.add(row.ino)
        else:
            require(stat.S_IFMT(known.mode) == stat.S_IFMT(row.mode), "a type that changes")
            known.set_attributes(row)

    def _named(self, body: bytes) -> tuple[Inode, bytes, int]:
        row = unpack(structures.OP_NAME, body)
        first = structures.OP_NAME.itemsize
        name = body[first : first + row.name_bytes]
        require(len(name) == row.name_bytes, "a name is cut")
        return self._state.get(row.parent, "directory"), name, row.ino

    def _link(self, body: bytes, _flags: int) -> None:
        directory, name, ino = self._named(body)
        above = directory
        while self._state.get(ino).kind == "directory" and above.ino != ROOT_INO:
            require(above.ino != ino and above.parent, "a directory below itself, or nowhere")
            self._state.medium.spend(1)
            above = self._state.get(above.parent)
        if name in directory.entries:
            self._unname(directory, name)
        self._state.name(directory.ino, name, ino)

    def _unlink(self, body: bytes, _flags: int) -> None:
        directory, name, _ = self._named(body)
        require(name in directory.entries, "no such name")
        self._unname(directory, name)

    def _unname(self, directory: Inode, name: bytes) -> None:
        inode = self._state.get(directory.entries.pop(name))
        inode.links -= 1
        self._suspects.add(inode.ino)

    def _strings(self, body: bytes, kind: str | None = None) -> tuple[Inode, bytes, bytes]:
        row = unpack(structures.OP_XATTR, body)
        name = structures.OP_XATTR.itemsize
        value = name + row.name_bytes
        end = value + row.value_bytes
        require(end <= len(body), "a string is cut")
        return self._state.get(row.ino, kind), body[name:value], body[value:end]

    def _symlink(self, body: bytes, _flags: int) -> None:
        inode, _, target = self._strings(body, "symbolic link")
        require(0 < len(target) <= 4095, "an impossible target")
        inode.target = target

    def _set_xattr(self, body: bytes, _flags: int) -> None:
        inode, name, value = self._strings(body)
        require(0 < len(name) <= 255 and 0 not in name, "an impossible attribute")
        inode.xattrs[name] = value
        if name == structures.COMMIT_XATTR and len(value) == structures.COMMIT.itemsize:
            told = unpack(structures.COMMIT, value)
            if 0 < told.lsn <= self._record.lsn:
                inode.commit_lsn, inode.commit_ns = told.lsn, told.time_ns

    def _remove_xattr(self, body: bytes, _flags: int) -> None:
        inode, name, _ = self._strings(body)
        inode.xattrs.pop(name, None)

    def _extent(self, body: bytes, _flags: int) -> None:
        row = unpack(structures.OP_EXTENT, body)
        first = structures.OP_EXTENT.itemsize
        self._state.define(row, body[first : first + 4 * row.crc_count])

    def _content(self, body: bytes, flags: int) -> None:
        row = unpack(structures.OP_CONTENT, body)
        inode = self._state.get(row.ino, "file")
        require(flags & ~structures.OP_FLAG_ASIDE == 0, "unknown flags of a content")
        if flags & structures.OP_FLAG_ASIDE:
            version = inode.aside = inode.aside or Version()
        else:
            version = inode.content
            inode.commit_lsn, inode.commit_ns = self._record.lsn, self._record.time_ns
        rows = structures.table(structures.REFERENCE, body[structures.OP_CONTENT.itemsize :])
        require(row.size <= structures.FILE_SIZE_MAX, "a file is too large")
        require(row.ref_count <= len(rows), "references are missing")
        spend = self._state.medium.spend
        spend(version.cut(row.cut))
        self._state.refer(version, rows[: row.ref_count])
        spend(version.cut(row.size))
        version.size = row.size

    def _promote(self, body: bytes, _flags: int) -> None:
        inode = self._state.get(unpack(structures.OP_INO, body).ino, "file")
        require(inode.aside is not None, "there is no version to promote")
        inode.content, inode.aside = inode.aside or Version(), None
        inode.commit_lsn, inode.commit_ns = self._record.lsn, self._record.time_ns

    def _drop_aside(self, body: bytes, _flags: int) -> None:
        self._state.get(unpack(structures.OP_INO, body).ino, "file").aside = None

    def _move(self, body: bytes, _flags: int) -> None:
        """Note a move. Moves that follow each other are applied with one look at each file."""
        move = unpack(structures.OP_MOVE, body)
        first = structures.OP_MOVE.itemsize
        inos = structures.table(structures.OP_INO, body[first:])["ino"][: move.ino_count].tolist()
        require(len(inos) == move.ino_count, "inodes of a move are missing")
        target, source = (self._state.extents.get(i) for i in (move.target_id, move.source_id))
        enough = target is not None and move.target_offset + move.length <= target.length
        require(enough or source is None, "a move to nowhere")
        if any(move.source_id == before.target_id for before, _ in self._moves):
            self._follow_moves()
        self._moves.append((move, inos))

    def _follow_moves(self) -> None:
        moves, self._moves = self._moves, []
        of_inode: dict[int, dict[int, list[SimpleNamespace]]] = {}
        for move, inos in moves:
            for ino in inos:
                of_inode.setdefault(ino, {}).setdefault(move.source_id, []).append(move)
        for ino, of_source in of_inode.items():
            inode = self._state.get(ino, "file")
            for version in (inode.content, inode.aside):
                if version is not None:
                    self._re_aim(version, of_source)

    def _re_aim(self, version: Version, of_source: dict[int, list[SimpleNamespace]]) -> None:
        """Lay what moves make of each reference over it."""
        self._state.medium.spend(len(version.references))
        found = [part for part in version.references if part[2] in of_source]
        for offset, length, extent, inside in found:
            for move in of_source[extent]:
                first = max(inside, move.source_offset)
                end = min(inside + length, move.source_offset + move.length)
                if first < end:
                    at = move.target_offset + first - move.source_offset
                    part = (offset + first - inside, end - first, move.target_id, at)
                    self._state.medium.spend(version.lay(*part))
