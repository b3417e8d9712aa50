"""Hostile images: small stores, damaged at random, mostly with the checksums made right again so
that deep code is reached.

A seed and an index always give the same image, but for the order of the checksums in its metadata
image, which is the engine's.

Never here: trying them (``hostile``).
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cxlfs.format import layout, operations, roots, segments
from cxlfs.format.superblock import Superblock
from cxlfs.media import MemoryMedia
from tests.support.corrupt import (
    IMAGE_BYTES,
    Anatomy,
    frozen,
    populated_media,
    raw_record,
    seal,
    seal_record,
    seal_superblock,
)
from tests.support.fuzz_operations import OperationMaker, some_number
from tests.support.stores import format_small

Rng = random.Random
_HEADER = layout.SEGMENT_HEADER_BYTES


# --- images to begin with -------------------------------------------------------------------


class Part(NamedTuple):
    """Where a structure lies, and what it is made of."""

    dtype: np.dtype[np.void]
    offset: int
    count: int


@dataclasses.dataclass(frozen=True)
class Base:
    """A good image, and where everything in it is."""

    data: bytes
    block: Superblock
    anatomy: Anatomy
    image_parts: tuple[Part, ...]
    records: tuple[tuple[int, int], ...]
    """(offset, length) in the primary copy."""
    journal: segments.SegmentHeader | None
    mirror_shift: int
    journal_end: int
    next_lsn: int


@functools.cache
def bases() -> tuple[Base, ...]:
    """A closed store, one with a journal, and an empty one."""
    empty = MemoryMedia(IMAGE_BYTES)
    with frozen(2):
        format_small(empty)
    media = (populated_media(closed=True), populated_media(closed=False), empty)
    return tuple(_base(each) for each in media)


_SECTION_DTYPES = {
    layout.SECTION_INODES: layout.IMAGE_INODE_DTYPE,
    layout.SECTION_NAMES: layout.IMAGE_NAME_DTYPE,
    layout.SECTION_XATTRS: layout.IMAGE_XATTR_DTYPE,
    layout.SECTION_SYMLINKS: layout.IMAGE_XATTR_DTYPE,
    layout.SECTION_EXTENTS: layout.IMAGE_EXTENT_DTYPE,
    layout.SECTION_REFS: layout.REF_DTYPE,
}


def _base(media: MemoryMedia) -> Base:
    anatomy = Anatomy(media)
    parts = []
    for piece in anatomy.image_pieces(anatomy.newest)[1:]:
        dtype = _SECTION_DTYPES.get(piece.index)
        if dtype is not None:
            parts.append(Part(dtype, piece.offset, piece.length // dtype.itemsize))
    found = anatomy.records(anatomy.newest)
    primary = [region for region in found if region.copy == 0]
    journal, shift, end, lsn = None, 0, 0, 0
    if anatomy.newest.journal_segment is not None:
        journal = anatomy.header(anatomy.newest.journal_segment)
        block = anatomy.block
        shift = block.segment_offset(journal.partner) - block.segment_offset(journal.index)
        end = primary[-1].offset + primary[-1].length
        lsn = primary[-1].index + 1
    return Base(
        bytes(media.unguarded_memory()),
        anatomy.block,
        anatomy,
        tuple(parts),
        tuple((region.offset, region.length) for region in primary),
        journal,
        shift,
        end,
        lsn,
    )


# --- numbers that break things --------------------------------------------------------------


def mutate_row(rng: Rng, data: bytes, dtype: np.dtype[np.void]) -> tuple[bytes, str]:
    """One field of a structure changed; nested and repeated fields are entered."""
    fields = dtype.fields
    if fields is None:
        return _mutate_plain(rng, data, dtype)
    name = rng.choice([n for n in fields if n not in ("crc", "magic")] or list(fields))
    inner, offset = fields[name][:2]
    changed, text = _mutate_plain(rng, data[offset : offset + inner.itemsize], inner)
    return data[:offset] + changed + data[offset + inner.itemsize :], f"{name}{text}"


def _mutate_plain(rng: Rng, data: bytes, dtype: np.dtype[np.void]) -> tuple[bytes, str]:
    if dtype.subdtype is not None:
        inner = dtype.subdtype[0]
        number = rng.randrange(dtype.itemsize // inner.itemsize)
        if rng.random() < 0.7:
            number = min(number, rng.randrange(8))
        start = number * inner.itemsize
        changed, text = mutate_row(rng, data[start : start + inner.itemsize], inner)
        return data[:start] + changed + data[start + inner.itemsize :], f"[{number}].{text}"
    if dtype.kind in "iu":
        bits = dtype.itemsize * 8
        value = some_number(rng, bits, int.from_bytes(data, "little"))
        return value.to_bytes(dtype.itemsize, "little"), f" = {value:#x}"
    changed = bytearray(data)
    changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed), " flipped"


# --- mutations ------------------------------------------------------------------------------


class Editor:
    """An image being damaged; ``notes`` says how."""

    def __init__(self, rng: Rng, base: Base) -> None:
        self.rng = rng
        self.base = base
        self.data = bytearray(base.data)
        self.notes: list[str] = []

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])

    def write(self, offset: int, data: bytes) -> None:
        end = min(offset + len(data), len(self.data))
        self.data[offset:end] = data[: end - offset]

    def mutate(self, offset: int, dtype: np.dtype[np.void]) -> bytes:
        """Change a field in place; returns the whole structure."""
        changed, text = mutate_row(self.rng, self.read(offset, dtype.itemsize), dtype)
        self.notes.append(f"{offset:#x}: {text}")
        self.write(offset, changed)
        return changed

    # --- without checksums ------------------------------------------------------------------

    def flip_bits(self) -> None:
        for _ in range(self.rng.choice((1, 1, 2, 8, 64))):
            place = self._place()
            self.data[place] ^= 1 << self.rng.randrange(8)
        self.notes.append("bits flipped")

    def _place(self) -> int:
        """Anywhere, but mostly where something is."""
        if self.rng.random() < 0.3:
            return self.rng.randrange(len(self.data))
        segment = self.base.block.segment_offset(self.rng.randrange(self.base.block.segment_count))
        near = self.rng.choice((0, self.base.block.unit_bytes, segment, segment + _HEADER))
        return min(near + self.rng.randrange(2048), len(self.data) - 1)

    def overwrite(self) -> None:
        place = self._place() & ~63
        length = self.rng.choice((8, 64, 64, 512, 4096, 65536))
        fill = self.rng.choice((bytes(length), b"\xff" * length, self.rng.randbytes(length)))
        self.write(place, fill)
        self.notes.append(f"{length} bytes overwritten at {place:#x}")

    def copy_elsewhere(self) -> None:
        """Lines, slots, headers or whole segments in each other's place."""
        block = self.base.block
        size = self.rng.choice((64, 128, 512, 4096, block.segment_size_bytes))
        if size == block.segment_size_bytes:
            places = [block.segment_offset(i) for i in range(block.segment_count)]
        else:
            places = [self._place() // size * size for _ in range(2)]
        source, target = self.rng.choice(places), self.rng.choice(places)
        self.write(target, self.read(source, size))
        self.notes.append(f"{size} bytes copied from {source:#x} to {target:#x}")

    # --- with checksums ---------------------------------------------------------------------

    def superblock(self) -> None:
        """One changed copy, in one place or in all."""
        block = self.base.block
        changed = seal_superblock(self.mutate(0, layout.SUPERBLOCK_DTYPE))
        numbers = range(4) if self.rng.random() < 0.7 else self.rng.sample(range(4), 2)
        for number in numbers:
            self.write(block.copy_offsets[number], changed[:-4] + number.to_bytes(4, "little"))

    def root(self) -> None:
        slots = [slot for slot in self.base.anatomy.slots if slot.root is not None]
        newest = self.base.anatomy.newest
        if self.rng.random() < 0.7:
            slots = [s for s in slots if s.root and s.root.generation == newest.generation]
        chosen = self.rng.choice(slots)
        changed = seal(self.mutate(chosen.media_offset, layout.ROOT_DTYPE))
        both = self.rng.random() < 0.8
        for slot in self.base.anatomy.slots:
            if slot is chosen or (both and slot.slot == chosen.slot):
                self.write(slot.media_offset, changed)

    def segment_header(self) -> None:
        named = self.base.anatomy.newest.segments
        index = self.rng.choice(named)
        if self.rng.random() < 0.3:
            index = self.rng.randrange(self.base.block.segment_count)
        offset = self.base.block.segment_offset(index)
        self.write(offset, seal(self.mutate(offset, layout.SEGMENT_DTYPE)))

    def image_row(self) -> None:
        """Up to three fields of the newest image."""
        if not self.base.image_parts:
            return
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            part = self.rng.choice(self.base.image_parts)
            offset = part.offset + self.rng.randrange(part.count) * part.dtype.itemsize
            if self.rng.random() < 0.2:  # one row in another's place
                other = part.offset + self.rng.randrange(part.count) * part.dtype.itemsize
                self.write(offset, self.read(other, part.dtype.itemsize))
                self.notes.append(f"{offset:#x}: row doubled")
            else:
                self.mutate(offset, part.dtype)
        self._seal_image()

    def image_strings(self) -> None:
        for piece in self.base.anatomy.image_pieces(self.base.anatomy.newest):
            if piece.index in (layout.SECTION_STRINGS, layout.SECTION_CRCS):
                for _ in range(4):
                    place = piece.offset + self.rng.randrange(piece.length)
                    self.data[place] = self.rng.choice((0, 0x2F, 0x2E, self.rng.randrange(256)))
        self.notes.append("strings or checksums of the image changed")
        self._seal_image()

    def image_header(self) -> None:
        self.mutate(self._image_start(), layout.IMAGE_DTYPE)
        self._seal_image()

    def _image_start(self) -> int:
        root = self.base.anatomy.newest
        return self.base.block.segment_offset(root.image_segments[0]) + _HEADER

    def _seal_image(self) -> None:
        from cxlfs.native import crc32c

        start, size = self._image_start(), layout.IMAGE_DTYPE.itemsize
        head = np.frombuffer(self.read(start, size), dtype=layout.IMAGE_DTYPE).copy()
        for row in head[0]["sections"]:
            offset, length = int(row["offset"]), int(row["length"])
            if offset + length <= self.base.block.segment_payload_bytes:
                row["crc"] = crc32c(self.read(start + offset, length))
        sealed = seal(head.tobytes())
        self.write(start, sealed)
        newest = self.base.anatomy.newest
        for slot in self.base.anatomy.slots:
            if slot.root is not None and slot.root.image_segments == newest.image_segments:
                crc = int.from_bytes(sealed[-4:], "little")
                changed = dataclasses.replace(slot.root, image_header_crc=crc)
                self.write(slot.media_offset, roots.encode(changed, self.base.block.uuid))

    # --- the journal ------------------------------------------------------------------------

    def record_header(self) -> None:
        if not self.base.records or self.base.journal is None:
            return
        offset, length = self.rng.choice(self.base.records)
        self.mutate(offset, layout.RECORD_DTYPE)
        self._seal_record(offset, length)

    def record_payload(self) -> None:
        """Bytes of the operations, mostly of their fixed parts."""
        if not self.base.records or self.base.journal is None:
            return
        offset, length = self.rng.choice(self.base.records)
        for _ in range(self.rng.choice((1, 1, 2, 5))):
            word = offset + 64 + self.rng.randrange(max((length - 64) // 8, 1)) * 8
            value = some_number(self.rng, 64, int.from_bytes(self.read(word, 8), "little"))
            self.write(word, value.to_bytes(8, "little"))
        self.notes.append(f"payload of the record at {offset:#x} changed")
        self._seal_record(offset, length)

    def _seal_record(self, offset: int, length: int) -> None:
        journal = self.base.journal
        if journal is None:
            return
        sealed = seal_record(self.read(offset, length), journal, self.base.block)
        self.write(offset, sealed)
        if self.rng.random() < 0.8:
            self.write(offset + self.base.mirror_shift, sealed)

    def append_records(self) -> None:
        """Records of made-up operations behind the last one."""
        base, journal = self.base, self.base.journal
        if journal is None:
            return
        position, lsn = base.journal_end, base.next_lsn
        maker = OperationMaker(self.rng, base.block)
        for _ in range(self.rng.choice((1, 2, 4))):
            ops = maker.transaction()
            payload = operations.encode(ops)
            count = len(ops) if self.rng.random() < 0.95 else self.rng.randrange(65536)
            fenced = lsn - 1 if self.rng.random() < 0.9 else self.rng.randrange(lsn + 3)
            record = raw_record(journal, base.block, lsn, payload, count, fenced_lsn=fenced)
            self.write(position, record)
            self.write(position + base.mirror_shift, record)
            position += len(record)
            lsn += 1
            self.notes.append("; ".join(repr(op)[:200] for op in ops))

    # --- size -------------------------------------------------------------------------------

    def resize(self) -> None:
        """Cut, or longer than the store."""
        if self.rng.random() < 0.7:
            size = self.rng.choice((1, 511, 512, 4096, 16384, 65536, len(self.data) - 1))
            if self.rng.random() < 0.5:
                size = self.rng.randrange(len(self.data))
            del self.data[max(size, 1) :]
        else:
            self.data.extend(bytes(self.rng.randrange(1, 1 << 20)))
        self.notes.append(f"{len(self.data)} bytes long")


_MUTATIONS: tuple[tuple[int, Callable[[Editor], None]], ...] = (
    (4, Editor.flip_bits),
    (4, Editor.overwrite),
    (5, Editor.copy_elsewhere),
    (6, Editor.superblock),
    (12, Editor.root),
    (6, Editor.segment_header),
    (24, Editor.image_row),
    (4, Editor.image_strings),
    (8, Editor.image_header),
    (6, Editor.record_header),
    (14, Editor.record_payload),
    (20, Editor.append_records),
    (2, Editor.resize),
)


def make_image(seed: int, index: int) -> tuple[bytes, list[str]]:
    """The image of (seed, index), and what was done to it."""
    rng = Rng(f"{seed} {index}")
    kinds = [mutation for _, mutation in _MUTATIONS]
    weights = [weight for weight, _ in _MUTATIONS]
    if rng.random() < 0.01:
        return rng.randbytes(rng.choice((0, 1, 4096, 65536, 300_000))), ["random bytes"]
    base = rng.choices(bases(), (3, 5, 1))[0]
    editor = Editor(rng, base)
    chosen = rng.choices(kinds, weights, k=rng.choice((1, 1, 1, 2, 3)))
    for mutation in sorted(chosen, key=lambda each: each is Editor.resize):  # the size last
        mutation(editor)
    return bytes(editor.data), editor.notes
