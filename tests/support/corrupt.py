"""Damage on purpose: small stores with a bit of everything, where their structures lie, and damage
with the checksums made right again, so that what lies behind them is reached.

Never here: judging what the damage does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import time
from collections.abc import Iterator
from typing import Self
from unittest import mock

import numpy as np

from cxlfs.format import (
    journal,
    journal_chain,
    journal_reader,
    layout,
    operations,
    roots,
    segments,
    superblock,
)
from cxlfs.format.journal_reader import SegmentScan
from cxlfs.format.roots import Root
from cxlfs.format.segments import SegmentHeader
from cxlfs.format.superblock import Superblock
from cxlfs.media import MemoryMedia
from cxlfs.native import crc32c
from cxlfs.store import Store
from tests.support.stores import format_small, write_file

IMAGE_BYTES = 24 * (64 << 10) + 4 * layout.UNIT_BYTES_TEST
_RECORD_BYTES = layout.RECORD_DTYPE.itemsize


# --- a store with a bit of everything -------------------------------------------------------


@contextlib.contextmanager
def frozen(seed: int) -> Iterator[random.Random]:
    """Same times and same random numbers at every run: a store made in here is always the same."""
    rng = random.Random(seed)
    times = itertools.count(1_700_000_000_000_000_000, 1_000_000)
    with (
        mock.patch.object(os, "urandom", rng.randbytes),
        mock.patch.object(time, "time_ns", times.__next__),
    ):
        yield rng


def populated_media(
    *, closed: bool, chained: bool = False, size_bytes: int = IMAGE_BYTES, seed: int = 1
) -> MemoryMedia:
    """Files, directories, links, attributes, a version kept aside, holes, several metadata images;
    closed, or dropped as by a kill with records in the journal; ``chained``: in three journals, of
    which the root names the first.
    """
    with frozen(seed) as rng:
        return _populated_media(rng, size_bytes, closed=closed, chained=chained)


def _populated_media(
    rng: random.Random, size_bytes: int, *, closed: bool, chained: bool
) -> MemoryMedia:
    media = MemoryMedia(size_bytes)
    format_small(media)
    store = Store.open(media)
    _first_life(store, rng)
    store.close()
    store = Store.open(media)
    _second_life(store, rng)
    if closed:
        store.close()
        return media
    store.volume.rollover()
    _last_records(store, rng)
    for number in range(2 if chained else 0):
        store.volume.continue_journal()
        for name in (b"one", b"two", b"three"):
            write_file(store, 1, b"chained-%s-%d" % (name, number), rng.randbytes(300))
    store.abandon()
    return media


def _first_life(store: Store, rng: random.Random) -> None:
    deep = store.make_directory(1, b"checkpoints", 0o755, 1, 2).ino
    deep = store.make_directory(deep, b"step-1", 0o700, 1, 2).ino
    write_file(store, deep, b"model", rng.randbytes(20_000))
    write_file(store, deep, b"small", rng.randbytes(100))
    write_file(store, 1, b"empty", b"")
    store.make_symlink(1, b"latest", b"checkpoints/step-1", 1, 2)
    store.make_node(1, b"fifo", 0o010600, 0, 1, 2)
    store.set_xattr(deep, b"user.step", b"1")


def _second_life(store: Store, rng: random.Random) -> None:
    deep = store.make_directory(1, b"runs", 0o755, 1, 2).ino
    ino = write_file(store, deep, b"state", rng.randbytes(9_000))
    store.link(ino, 1, b"state-link")
    store.set_xattr(ino, b"user.note", b"x" * 200)
    _sparse(store, deep, rng)
    _overwrite_killed(store, ino, rng)
    write_file(store, 1, b"gone", rng.randbytes(500))
    store.unlink(1, b"gone")
    store.rename(1, b"empty", deep, b"renamed")


def _sparse(store: Store, parent: int, rng: random.Random) -> None:
    _, handle = store.create(parent, b"sparse", 0o600, 1, 2, os.O_RDWR)
    store.write(handle, 50_000, rng.randbytes(3_000))
    store.flush(handle, writer_killed=False)
    store.write(handle, 53_000, rng.randbytes(200))
    store.flush(handle, writer_killed=False)
    store.release(handle)


def _overwrite_killed(store: Store, ino: int, rng: random.Random) -> None:
    """Leaves a version kept aside."""
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, rng.randbytes(6_000))
    store.flush(handle, writer_killed=True)
    store.release(handle)


def _last_records(store: Store, rng: random.Random) -> None:
    for number in range(4):
        write_file(store, 1, b"late-%d" % number, rng.randbytes(700 * number))
    store.set_xattr(1, b"user.late", b"yes")
    store.rename(1, b"late-0", 1, b"late-zero")


# --- where things lie -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Region:
    """A structure on the media. ``index``: segment, slot or LSN."""

    name: str
    offset: int
    length: int
    index: int = 0
    copy: int = 0

    @property
    def bits(self) -> range:
        """Bit numbers of the media."""
        return range(self.offset * 8, (self.offset + self.length) * 8)


class Anatomy:
    """Where the structures of a good store lie."""

    def __init__(self, media: MemoryMedia) -> None:
        self.media = media
        self.block, _ = superblock.choose(media)
        self.slots = roots.read_slots(media, self.block)
        found = roots.candidates(self.slots)
        self.newest = found[0]
        self.fallback = next(
            (r for r in found if r.image_segments != self.newest.image_segments), None
        )

    def superblocks(self) -> list[Region]:
        size = layout.SUPERBLOCK_DTYPE.itemsize
        places = enumerate(self.block.copy_offsets)
        return [Region("superblock", offset, size, copy=number) for number, offset in places]

    def roots(self) -> list[Region]:
        """Slots that hold a root."""
        size = layout.ROOT_DTYPE.itemsize
        return [Region("root", s.media_offset, size, s.slot, s.ring) for s in self.slots if s.root]

    def segment_headers(self) -> list[Region]:
        """Of segments that are in use: metadata of the newest root and the fallback, and data."""
        with_data = {self.segment_of(int(row["media_offset"])) for row in self.extents()}
        named = set(self.newest.segments) | set(self.fallback.segments if self.fallback else ())
        for root in (self.newest, self.fallback):
            for scan in self.journals(root):
                named |= {scan.header.index, scan.header.partner}
        size = layout.SEGMENT_DTYPE.itemsize
        return [
            Region("segment header", self.block.segment_offset(index), size, index)
            for index in sorted(with_data | named)
        ]

    def segment_of(self, media_offset: int) -> int:
        return (media_offset - self.block.first_segment_offset) // self.block.segment_size_bytes

    def header(self, index: int) -> SegmentHeader:
        header = segments.read(self.media, self.block, index)
        assert isinstance(header, SegmentHeader)
        return header

    def journals(self, root: Root | None) -> list[SegmentScan]:
        """The chain of a root: of the fallback those in front of the newest image."""
        if root is None or root.journal_segment is None or root.journal_mirror is None:
            return []
        scans: list[SegmentScan] = []
        header: SegmentHeader | None = self.header(root.journal_segment)
        headers = segments.read_all(self.media, self.block)
        while header is not None:
            if root is not self.newest and header.first_lsn > self.newest.image_lsn:
                break
            scans.append(self._read(header)[1])
            header = journal_chain.find_next(self.media, self.block, headers, scans[-1])
        return scans

    def _read(self, header: SegmentHeader) -> tuple[list[journal_reader.Record], SegmentScan]:
        reader = journal_reader.SegmentReader(
            self.media, self.block, header, expected_lsn=header.first_lsn
        )
        return list(reader), reader.scan

    def _shift(self, header: SegmentHeader) -> int:
        """From the primary copy of a journal to the mirror."""
        return self.block.segment_offset(header.partner) - self.block.segment_offset(header.index)

    def records(self, root: Root) -> list[Region]:
        """Every record of a root's journals, in both copies, primary first."""
        found: list[Region] = []
        for scan in self.journals(root):
            for record in self._read(scan.header)[0]:
                for copy in (0, 1):
                    offset = record.media_offset + copy * self._shift(scan.header)
                    found.append(Region("record", offset, record.length, record.lsn, copy))
        return found

    def continuations(self, root: Root | None) -> list[Region]:
        """What leads from each of a root's journals to the next one, in both copies."""
        return [
            Region(
                "continuation",
                self.block.segment_offset(scan.header.index)
                + scan.end
                + copy * self._shift(scan.header),
                journal.CONTINUATION_BYTES,
                scan.last_lsn + 1,
                copy,
            )
            for scan in self.journals(root)
            if scan.continuations
            for copy in (0, 1)
        ]

    def image_pieces(self, root: Root) -> list[Region]:
        """The bytes of an image that a checksum covers."""
        start = self.block.segment_offset(root.image_segments[0]) + layout.SEGMENT_HEADER_BYTES
        size = layout.IMAGE_DTYPE.itemsize
        head = np.frombuffer(self.media.read(start, size), dtype=layout.IMAGE_DTYPE)[0]
        pieces = [Region("image", start, size)]
        assert len(root.image_segments) == 1, "small images lie in one segment"
        pieces.extend(
            Region("image", start + int(row["offset"]), int(row["length"]), int(row["kind"]))
            for row in head["sections"]
            if row["length"]
        )
        return pieces

    def metadata(self) -> list[Region]:
        """All of it: what both roots need."""
        found = [*self.superblocks(), *self.roots(), *self.segment_headers()]
        for root in (self.newest, self.fallback):
            if root is not None:
                found.extend(self.records(root))
                found.extend(self.continuations(root))
                found.extend(self.image_pieces(root))
        return found

    def extents(self) -> np.ndarray[tuple[int], np.dtype[np.void]]:
        """What the store knows of its extents."""
        from cxlfs.store import StoreOptions

        store = Store.open(self.media, StoreOptions(read_only=True))
        try:
            return store.volume.engine.list()
        finally:
            store.close()


# --- damage ---------------------------------------------------------------------------------


class Damage:
    """Changes to a media that can be taken back: ``with Damage(media) as damage: ...``."""

    def __init__(self, media: MemoryMedia) -> None:
        self._memory = media.unguarded_memory()
        self._before: list[tuple[int, bytes]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for offset, data in reversed(self._before):
            self._memory[offset : offset + len(data)] = data
        self._before.clear()

    def write(self, offset: int, data: bytes) -> None:
        self._before.append((offset, bytes(self._memory[offset : offset + len(data)])))
        self._memory[offset : offset + len(data)] = data

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._memory[offset : offset + length])

    def flip(self, bit: int) -> None:
        """Bit number of the whole media."""
        byte, position = divmod(bit, 8)
        self.write(byte, bytes([self._memory[byte] ^ 1 << position]))

    def zero(self, offset: int, length: int) -> None:
        self.write(offset, bytes(length))

    def swap(self, first: int, second: int, length: int) -> None:
        one, other = self.read(first, length), self.read(second, length)
        self.write(first, other)
        self.write(second, one)


# --- checksums made right again -------------------------------------------------------------


def seal(data: bytes, seed: int = 0) -> bytes:
    """The structure with its last four bytes as the checksum over those before."""
    return data[:-4] + crc32c(data[:-4], seed).to_bytes(4, "little")


def seal_superblock(data: bytes) -> bytes:
    """The same, with the copy number behind the checksum."""
    return seal(data[:-4]) + data[-4:]


def seal_record(data: bytes, header: SegmentHeader, block: Superblock) -> bytes:
    """Header and padded payload of one record; ``header`` that of its segment."""
    seed = segments.record_seed(header.nonce, header.epoch, block.uuid)
    row = np.frombuffer(data[:_RECORD_BYTES], dtype=layout.RECORD_DTYPE).copy()
    row["payload_crc"] = crc32c(data[_RECORD_BYTES:], seed)
    return seal(row.tobytes(), seed) + data[_RECORD_BYTES:]


def make_record(
    header: SegmentHeader,
    block: Superblock,
    lsn: int,
    ops: list[operations.Operation],
    *,
    fenced_lsn: int | None = None,
) -> bytes:
    """A valid record."""
    payload = operations.encode(ops)
    return raw_record(header, block, lsn, payload, len(ops), fenced_lsn=fenced_lsn)


def raw_record(
    header: SegmentHeader,
    block: Superblock,
    lsn: int,
    payload: bytes,
    count: int,
    *,
    fenced_lsn: int | None = None,
) -> bytes:
    """A record with right checksums and any payload."""
    padded = payload.ljust(-(-len(payload) // 64) * 64, b"\0")
    row = np.zeros(1, dtype=layout.RECORD_DTYPE)
    row["magic"] = layout.RECORD_MAGIC
    row["type"] = layout.RECORD_TRANSACTION
    row["operation_count"] = count
    row["length"] = _RECORD_BYTES + len(padded)
    row["payload_bytes"] = len(payload)
    row["lsn"] = lsn
    row["epoch"] = header.epoch
    row["fenced_lsn"] = lsn - 1 if fenced_lsn is None else fenced_lsn
    row["time_ns"] = 1
    return seal_record(row.tobytes() + padded, header, block)


def seal_image(damage: Damage, anatomy: Anatomy, root: Root) -> None:
    """The image of ``root`` was changed: checksums of sections and header, and in the root."""
    start = anatomy.block.segment_offset(root.image_segments[0]) + layout.SEGMENT_HEADER_BYTES
    size = layout.IMAGE_DTYPE.itemsize
    head = np.frombuffer(damage.read(start, size), dtype=layout.IMAGE_DTYPE).copy()
    room = anatomy.block.segment_payload_bytes
    for row in head[0]["sections"]:
        offset, length = int(row["offset"]), int(row["length"])
        if offset + length <= room:
            row["crc"] = crc32c(damage.read(start + offset, length))
    sealed = seal(head.tobytes())
    damage.write(start, sealed)
    header_crc = int.from_bytes(sealed[-4:], "little")
    for slot in anatomy.slots:
        if slot.root is not None and slot.root.image_segments == root.image_segments:
            changed = dataclasses.replace(slot.root, image_header_crc=header_crc)
            damage.write(slot.media_offset, roots.encode(changed, anatomy.block.uuid))


def section_rows(anatomy: Anatomy, root: Root, kind: int) -> Iterator[tuple[int, np.void]]:
    """Media offset and content of each row of a section."""
    dtype = {
        layout.SECTION_INODES: layout.IMAGE_INODE_DTYPE,
        layout.SECTION_NAMES: layout.IMAGE_NAME_DTYPE,
        layout.SECTION_XATTRS: layout.IMAGE_XATTR_DTYPE,
        layout.SECTION_SYMLINKS: layout.IMAGE_XATTR_DTYPE,
        layout.SECTION_EXTENTS: layout.IMAGE_EXTENT_DTYPE,
        layout.SECTION_REFS: layout.REF_DTYPE,
    }[kind]
    for piece in anatomy.image_pieces(root):
        if piece.index == kind:
            rows = np.frombuffer(anatomy.media.read(piece.offset, piece.length), dtype=dtype)
            for number, row in enumerate(rows):
                yield piece.offset + number * dtype.itemsize, row
