"""The structures of the cxlfs media format: checked bytes in, numbers out.

``reader.py`` is the program that uses this module. Both are written from format.md, which explains
every structure, and need Python 3.11 and NumPy, and nothing of cxlfs. Other modules of the reader
say what the numbers mean together.

Invariants
- A structure is trusted after its checksum was compared, and a number after it was compared with
  what it points into.
- Nothing is ever written to the medium.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import struct
from types import SimpleNamespace
from typing import BinaryIO, Final, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

WORK_MAX: Final = 1 << 30
"""Steps that a store may cost besides reading its content: a hostile one could ask for years."""


class ReaderError(Exception):
    """The store cannot be read."""


class DamageError(ReaderError):
    """One structure cannot be used; there may be another one in its place."""


def require(condition: object, message: str) -> None:
    """Raise DamageError if something is not as it must be."""
    if not condition:
        raise DamageError(message)


# --- constants and structures, as format.md has them ----------------------------------------

UNITS_BYTES: Final = (2 << 20, 16 << 10)
SLOT_BYTES: Final = 4096
SEGMENT_HEADER_BYTES: Final = 4096
RECORD_ALIGN: Final = 64
RECORD_MAGIC: Final = 0x524A5843
RECORD_TRANSACTION, RECORD_CONTINUATION = 1, 2
NO_SEGMENT: Final = (1 << 64) - 1
NUMBER_LIMIT: Final = 1 << 62
FILE_SIZE_MAX: Final = 1 << 56
ROLE_JOURNAL: Final = 2
ROOT_IN_USE: Final = 1
OP_FLAG_ASIDE: Final = 1
INODE_INCOMPLETE, INODE_ASIDE = 1, 2


def _structure(*fields: str) -> np.dtype[np.void]:
    """Return the layout of ``name:type`` fields; numbers are little-endian, nothing is padded."""
    pairs = (field.split(":") for line in fields for field in line.split())
    return np.dtype([(name, kind if kind[0] in "SV(" else "<" + kind) for name, kind in pairs])


SUPERBLOCK: Final = _structure(
    "magic:S8 format_version:u4 structure_bytes:u4 compat:u8 read_only_compat:u8 incompat:u8",
    "uuid:V16 label:V64 created_ns:i8 size_bytes:u8 segment_size_bytes:u8",
    "first_segment_offset:u8 segment_count:u8 unit_bytes:u4 chunk_bytes:u4 ring_slots:u4",
    "device_count:u4 devices:V256 reserved:V72 crc:u4 copy_number:u4",
)
ROOT: Final = _structure(
    "magic:S8 generation:u8 uuid:V16 flags:u4 image_segment_count:u4 image_bytes:u8 image_lsn:u8",
    "image_header_crc:u4 dirty_shutdown_known:u4 journal_segment:u8 journal_mirror:u8",
    "journal_epoch:u8 journal_first_lsn:u8 next_epoch:u8 dirty_shutdown_count:u8 device_hash:u8",
    "written_ns:i8 reserved:V380 image_segments:(384,)<u4 crc:u4",
)
SEGMENT: Final = _structure(
    "magic:S8 role:u4 copy_number:u4 index:u8 epoch:u8 nonce:u8 predecessor:u8",
    "predecessor_epoch:u8 predecessor_last_lsn:u8 first_lsn:u8 partner:u8 uuid:V16 written_ns:i8",
    "reserved:V20 crc:u4",
)
RECORD: Final = _structure(
    "magic:u4 type:u2 operation_count:u2 length:u4 payload_bytes:u4 lsn:u8 epoch:u8 fenced_lsn:u8",
    "time_ns:i8 payload_crc:u4 reserved:u4 reserved_2:u4 crc:u4",
)
OPERATION: Final = _structure("type:u2 flags:u2 length:u4")
_ATTRIBUTES: Final = (
    "ino:u8 mode:u4 uid:u4 gid:u4 rdev:u4 flags:u4 reserved:u4",
    "atime_ns:i8 mtime_ns:i8 ctime_ns:i8 birth_ns:i8",
)
OP_INODE: Final = _structure(*_ATTRIBUTES)
OP_NAME: Final = _structure("parent:u8 ino:u8 name_bytes:u4 reserved:u4")
OP_XATTR: Final = _structure("ino:u8 name_bytes:u4 value_bytes:u4")
OP_EXTENT: Final = _structure("id:u8 media_offset:u8 length:u8 first_chunk:u4 crc_count:u4")
OP_CONTENT: Final = _structure("ino:u8 cut:u8 size:u8 ref_count:u8")
REFERENCE: Final = _structure("file_offset:u8 length:u8 extent_id:u8 extent_offset:u8")
OP_INO: Final = _structure("ino:u8")
COMMIT_XATTR: Final = b"trusted.cxlfs.commit"
COMMIT: Final = _structure("lsn:u8 time_ns:i8")
OP_MOVE: Final = _structure(
    "source_id:u8 source_offset:u8 length:u8 target_id:u8 target_offset:u8 ino_count:u8"
)
IMAGE: Final = _structure(
    "magic:S8 lsn:u8 next_ino:u8 next_extent_id:u8 uuid:V16 written_ns:i8 sections:V256",
    "reserved:V196 crc:u4",
)
SECTION: Final = _structure("kind:u4 crc:u4 offset:u8 length:u8 item_count:u8")
IMAGE_INODE: Final = _structure(
    *(part.replace("reserved:u4", "named_lsn:u4") for part in _ATTRIBUTES),
    "commit_lsn:u8 commit_ns:i8 size:u8 ref_count:u8 aside_size:u8 aside_ref_count:u8",
)
IMAGE_NAME: Final = _structure("parent:u8 ino:u8 name_offset:u8 name_bytes:u4 reserved:u4")
IMAGE_XATTR: Final = _structure("ino:u8 string_offset:u8 name_bytes:u4 value_bytes:u4")
IMAGE_EXTENT: Final = _structure(
    "id:u8 media_offset:u8 length:u8 crc_index:u8 first_chunk:u4 crc_count:u4"
)
INODES, NAMES, XATTRS, SYMLINKS, EXTENTS, CHECKSUMS, REFERENCES, STRINGS = range(1, 9)
SECTION_ITEMS: Final = {
    INODES: IMAGE_INODE,
    NAMES: IMAGE_NAME,
    XATTRS: IMAGE_XATTR,
    SYMLINKS: IMAGE_XATTR,
    EXTENTS: IMAGE_EXTENT,
    CHECKSUMS: np.dtype("<u4"),
    REFERENCES: REFERENCE,
    STRINGS: np.dtype("u1"),
}


def unpack(layout: np.dtype[np.void], data: bytes, offset: int = 0) -> SimpleNamespace:
    """Return the fields of one structure. Raises DamageError if the data end too early."""
    require(0 <= offset <= len(data) - layout.itemsize, "a structure is cut short")
    row = np.frombuffer(data, dtype=layout, count=1, offset=offset)[0]
    return SimpleNamespace(**{name: row[name].tolist() for name in layout.names or ()})


def table(layout: np.dtype[np.void], data: bytes) -> npt.NDArray[np.void]:
    """Return as many structures of one kind as the data have."""
    return np.frombuffer(data, dtype=layout, count=len(data) // layout.itemsize)


# --- checksums ------------------------------------------------------------------------------

Words: TypeAlias = npt.NDArray[np.uint32]
_ROW_BYTES: Final = 64


@functools.cache
def _byte_table() -> Words:
    """Return the checksum's state after each byte, from state 0."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0x82F63B78), table >> 1)
    return table


@functools.cache
def _bytes_table() -> list[int]:
    return [int(value) for value in _byte_table()]


@functools.cache
def _pair_table() -> Words:
    """Return the state after each pair of bytes, as a little-endian number, from state 0."""
    pairs, table = np.arange(1 << 16, dtype=np.uint32), _byte_table()
    first = table[pairs & 0xFF]
    found: Words = table[(first ^ (pairs >> 8)) & 0xFF] ^ (first >> 8)
    return found


@functools.cache
def _shift_tables(doublings: int) -> Words:
    """Return what ``_ROW_BYTES << doublings`` zero bytes make of each byte of a state."""
    if doublings:
        half = _shift_tables(doublings - 1)
        return _shifted(half, half)
    bits = np.array([[0], [8], [16], [24]], dtype=np.uint32)
    states: Words = np.arange(256, dtype=np.uint32) << bits
    for _ in range(_ROW_BYTES):
        states = _byte_table()[states & 0xFF] ^ (states >> 8)
    return states


def _shifted(tables: Words, states: Words) -> Words:
    low = tables[0][states & 0xFF] ^ tables[1][(states >> 8) & 0xFF]
    found: Words = low ^ tables[2][(states >> 16) & 0xFF] ^ tables[3][states >> 24]
    return found


def crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC32C of ``data``, continued from ``crc``.

    A long text is cut into rows, whose states are found side by side and then put together.
    """
    state = crc ^ 0xFFFFFFFF
    if len(data) < 8 * _ROW_BYTES:
        table = _bytes_table()
        for byte in data:
            state = table[(state ^ byte) & 0xFF] ^ (state >> 8)
        return state ^ 0xFFFFFFFF
    rows = 1 << (-(-len(data) // _ROW_BYTES) - 1).bit_length()
    padded = np.zeros(rows * _ROW_BYTES, dtype=np.uint8)  # zeros in front change no state of 0
    padded[-len(data) :] = np.frombuffer(data, dtype=np.uint8)
    start = len(padded) - len(data)
    padded[start : start + 4] ^= np.frombuffer(struct.pack("<I", state), dtype=np.uint8)
    states = np.zeros(rows, dtype=np.uint32)
    for column in np.ascontiguousarray(padded.view("<u2").reshape(rows, -1).T):
        states = _pair_table()[(states ^ column) & 0xFFFF] ^ (states >> 16)
    doublings = 0
    while len(states) > 1:
        states = _shifted(_shift_tables(doublings), states[0::2]) ^ states[1::2]
        doublings += 1
    return int(states[0]) ^ 0xFFFFFFFF


# --- the medium and the superblock ----------------------------------------------------------


class Medium:
    """The bytes of a store. What cannot be read stands as zeros: no checksum is right there."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.size_bytes = stream.seek(0, os.SEEK_END)
        self._work = 0

    def spend(self, steps: int) -> None:
        """Count work that a hostile store could make endless. Raises ReaderError."""
        self._work += steps
        if self._work > WORK_MAX:
            raise ReaderError("the metadata ask for more work than any honest store does")

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes. Raises DamageError if they are not all inside the medium."""
        require(0 <= offset <= self.size_bytes - length, "an offset is outside the medium")
        try:
            self._stream.seek(offset)
            data = self._stream.read(length)
        except OSError:
            if length <= 4096:
                return bytes(length)
            half = length // 2
            return self.read(offset, half) + self.read(offset + half, length - half)
        return data.ljust(length, b"\0")


@dataclasses.dataclass(frozen=True, slots=True)
class Superblock:
    """What a store is and where its parts are."""

    uuid: bytes
    label: str
    size_bytes: int
    unit_bytes: int
    segment_bytes: int
    segment_count: int
    chunk_bytes: int
    ring_slots: int

    @property
    def copy_offsets(self) -> tuple[int, ...]:
        return copy_offsets(self.size_bytes, self.unit_bytes)

    def segment_offset(self, index: int) -> int:
        return 2 * self.unit_bytes + index * self.segment_bytes


_Copy: TypeAlias = tuple[bytes, tuple[int, ...], Superblock | None]
"""Identity, rank (version and features, later ones are larger), and the rest if it is known."""


def copy_offsets(size_bytes: int, unit_bytes: int) -> tuple[int, ...]:
    """Return where the four copies of a superblock are."""
    return 0, unit_bytes, size_bytes - 2 * unit_bytes, size_bytes - unit_bytes


def _read_copy(medium: Medium, offset: int) -> _Copy:
    found = unpack(SUPERBLOCK, medium.read(offset, SUPERBLOCK.itemsize))
    require(found.magic == b"cxlfs\rSB", "no superblock")
    size, unit, segment = found.structure_bytes, found.unit_bytes, found.segment_size_bytes
    require(SUPERBLOCK.itemsize <= size <= SLOT_BYTES and size % 8 == 0, "its size is wrong")
    data = medium.read(offset, size)
    require(crc32c(data[:-8]) == struct.unpack_from("<I", data, size - 8)[0], "its checksum")
    rank = (found.format_version, found.incompat, found.read_only_compat, found.compat)
    if rank[:2] != (1, 0):
        return found.uuid, rank, None
    least = 2 << 20 if unit == UNITS_BYTES[0] else 64 << 10
    end = found.first_segment_offset + found.segment_count * segment
    slots, chunk = found.ring_slots, found.chunk_bytes
    require(size == SUPERBLOCK.itemsize and found.device_count == 1, "not one device")
    require(unit in UNITS_BYTES and found.size_bytes % unit == 0, "its unit is wrong")
    require(found.size_bytes <= medium.size_bytes, "the store is larger than the medium")
    require(least <= segment <= 64 << 20 and segment & (segment - 1) == 0, "its segment size")
    require(found.first_segment_offset == 2 * unit and found.segment_count >= 16, "its segments")
    require(end <= found.size_bytes - 2 * unit, "its segments do not fit")
    require(2 <= slots <= 8 and (slots + 1) * SLOT_BYTES <= unit, "its rings are wrong")
    require(4096 <= chunk <= 1 << 20 and chunk & (chunk - 1) == 0, "its chunks are wrong")
    require(offset in copy_offsets(found.size_bytes, unit), "a copy where none belongs")
    label = found.label.rstrip(b"\0").decode(errors="replace")
    geometry = (found.size_bytes, unit, segment, found.segment_count, chunk, slots)
    return found.uuid, rank, Superblock(found.uuid, label, *geometry)


def read_superblock(medium: Medium) -> Superblock:
    """Return what the copies agree on. Raises ReaderError."""
    sizes = [(medium.size_bytes // unit * unit, unit) for unit in UNITS_BYTES]
    offsets = [offset for size in sizes for offset in copy_offsets(*size)]
    copies: dict[int, _Copy] = {}
    for offset in offsets:  # grows by what the copies found say
        with contextlib.suppress(DamageError):
            if offset not in copies:
                block = (copies.setdefault(offset, _read_copy(medium, offset)))[2]
                offsets.extend(block.copy_offsets if block is not None else ())
    if not copies:
        raise ReaderError("no superblock is good: this is no cxlfs store, or a damaged one")
    uuid = _most_frequent([copy[0] for copy in copies.values()])
    ranks = [rank for owner, rank, _ in copies.values() if owner == uuid]
    agreed = [rank for rank in ranks if ranks.count(rank) >= 2]
    rank = max(agreed) if agreed else min(ranks)
    block = _most_frequent([copy[2] for copy in copies.values() if copy[:2] == (uuid, rank)])
    if block is None:
        raise ReaderError(f"the store has version {rank[0]}, features {rank[1]:#x}: not known here")
    return block


_Vote = TypeVar("_Vote")


def _most_frequent(votes: list[_Vote]) -> _Vote:
    (best, count), *others = collections.Counter(votes).most_common()
    if others and others[0][1] == count:
        raise ReaderError("the superblock copies contradict each other")
    return best


# --- roots and segment headers --------------------------------------------------------------


def _decode_root(data: bytes, block: Superblock, slot: int) -> SimpleNamespace:
    root = unpack(ROOT, data)
    require(root.magic == b"cxlfs\rRT" and root.crc == crc32c(data[:-4]), "its checksum")
    require(root.uuid == block.uuid and root.generation % block.ring_slots == slot, "misplaced")
    counters = (root.generation, root.image_lsn, root.journal_epoch, root.next_epoch)
    require(max(counters) < NUMBER_LIMIT, "a counter is too large")
    require(root.image_segment_count <= len(root.image_segments), "too many segments")
    root.image_segments = root.image_segments[: root.image_segment_count]
    journal = [i for i in (root.journal_segment, root.journal_mirror) if i != NO_SEGMENT]
    named = [*root.image_segments, *journal]
    require(len(set(named)) == len(named) and len(journal) in (0, 2), "a segment named twice")
    require(max(named, default=0) < block.segment_count, "no such segment")
    room = root.image_segment_count * (block.segment_bytes - SEGMENT_HEADER_BYTES)
    require(0 < root.image_bytes <= room, "the image does not fit")
    return root


def read_roots(medium: Medium, block: Superblock) -> tuple[list[SimpleNamespace], bool]:
    """Return the good roots, newest first, and whether a newer one may be lost."""
    found: dict[int, SimpleNamespace] = {}
    damaged: tuple[set[int], set[int]] = (set(), set())
    for ring, start in enumerate(block.copy_offsets[1:3]):
        for slot in range(block.ring_slots):
            data = medium.read(start + (1 + slot) * SLOT_BYTES, ROOT.itemsize)
            try:
                if any(data):
                    root = _decode_root(data, block, slot)
                    found[root.generation] = root
            except DamageError:
                damaged[ring].add(slot)
    return [found[number] for number in sorted(found, reverse=True)], bool(damaged[0] & damaged[1])


def decode_header(data: bytes, block: Superblock, index: int | None = None) -> SimpleNamespace:
    """Return a segment header, of segment ``index`` or of any. Raises DamageError."""
    header = unpack(SEGMENT, data)
    summed = data[: SEGMENT.itemsize - 4]
    require(header.magic == b"cxlfs\rSG" and header.crc == crc32c(summed), "its checksum")
    require(header.uuid == block.uuid and index in (None, header.index), "misplaced")
    require(max(header.epoch, header.first_lsn) < NUMBER_LIMIT, "a counter is too large")
    require(header.index < block.segment_count, "no such segment")
    if header.role == ROLE_JOURNAL:
        require(header.partner < block.segment_count, "no such copy")
        require(header.partner != header.index and header.copy_number in (0, 1), "half a journal")
    return header


def read_journal_headers(medium: Medium, block: Superblock) -> list[SimpleNamespace]:
    """Return each good header of a journal, as the primary copy has it."""
    found = []
    for index in range(block.segment_count):
        data = medium.read(block.segment_offset(index), SEGMENT.itemsize)
        with contextlib.suppress(DamageError):
            header = decode_header(data, block, index)
            if header.role == ROLE_JOURNAL:
                if header.copy_number:
                    header.index, header.partner = header.partner, header.index
                found.append(header)
    return found
