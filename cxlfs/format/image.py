"""The metadata image as bytes: a header, and sections with a checksum each; put together, checked.

Never here: what the rows of a section say (``image_columns`` takes them apart), which state goes
into an image, where it lies on the media.

Invariants
- Nothing of a section is given to anybody before its checksum was compared.
- An image in the making is its parts: they are put one behind the other and never copied.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np

from cxlfs.errors import CorruptionError
from cxlfs.format import layout
from cxlfs.native import crc32c
from cxlfs.types import ROOT_INO

Buffer: TypeAlias = bytes | memoryview
Sections: TypeAlias = dict[int, Buffer]
"""Bytes of each section of an image."""
_SUMMED_BYTES = layout.IMAGE_DTYPE.itemsize - 4


@dataclasses.dataclass(frozen=True, slots=True)
class ImageInfo:
    """What the header says: last LSN included, counters, and checksum for the root."""

    lsn: int
    next_ino: int
    next_extent_id: int
    header_crc: int


# --- reading --------------------------------------------------------------------------------


def require(condition: object, message: str) -> None:
    """Raises CorruptionError when something in an image is not as it must be."""
    if not condition:
        raise CorruptionError(message, structure="metadata image")


def check(data: bytes | bytearray, *, uuid: bytes, header_crc: int) -> tuple[ImageInfo, Sections]:
    """Check header and sections; returns each section's bytes. Raises CorruptionError."""
    require(len(data) >= layout.IMAGE_DTYPE.itemsize, "the metadata image is cut short")
    head = np.frombuffer(data, dtype=layout.IMAGE_DTYPE, count=1)[0]
    require(head["magic"] == layout.IMAGE_MAGIC, "the metadata image has no magic")
    actual = crc32c(bytes(data[:_SUMMED_BYTES]))
    require(int(head["crc"]) == actual == header_crc, "metadata image header checksum mismatch")
    require(head["uuid"].tobytes() == uuid, "the metadata image belongs to another store")
    sections: Sections = {}
    view = memoryview(data)
    for row in head["sections"]:
        kind, offset, length, count = (
            int(row[name]) for name in ("kind", "offset", "length", "item_count")
        )
        item_bytes = layout.SECTION_ITEM_BYTES.get(kind, 0)
        require(item_bytes and kind not in sections, "unknown or doubled image section")
        require(
            offset % layout.SECTION_ALIGN == 0
            and offset + length <= len(data)
            and count * item_bytes == length,
            f"image section {kind} does not fit the image",
        )
        section = view[offset : offset + length]
        require(int(row["crc"]) == crc32c(section), f"image section {kind} checksum mismatch")
        sections[kind] = section
    info = ImageInfo(
        int(head["lsn"]), int(head["next_ino"]), int(head["next_extent_id"]), header_crc
    )
    counters = (info.lsn, info.next_ino, info.next_extent_id)
    require(max(counters) <= layout.NUMBER_LIMIT, "a counter beyond the limit")
    require(info.next_ino > ROOT_INO and info.next_extent_id > 0, "a counter begins at zero")
    return info, sections


# --- making ---------------------------------------------------------------------------------


class Image:
    """The bytes of an image, in parts; ``info`` is what its header says."""

    def __init__(self, parts: Iterable[Buffer], info: ImageInfo) -> None:
        self.info = info
        self._parts = [part for part in parts if len(part)]
        self._starts = list(itertools.accumulate((len(part) for part in self._parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, length: int) -> bytes:
        """Bytes [start, +length), cut at the end."""
        end = min(start + length, len(self))
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        while start < end:
            part, at = self._parts[first], start - self._starts[first]
            pieces.append(part[at : at + end - start])
            start += len(pieces[-1])
            first += 1
        return b"".join(pieces)


@dataclasses.dataclass(slots=True)
class Section:
    """What is known of a section so far: its parts, their bytes, and the items in them."""

    parts: list[Buffer] = dataclasses.field(default_factory=list)
    length: int = 0
    count: int = 0

    def add(self, part: Buffer, count: int) -> None:
        if len(part):
            self.parts.append(part)
            self.length += len(part)
            self.count += count

    def checksum(self) -> int:
        crc = 0
        for part in self.parts:
            crc = crc32c(part, crc)
        return crc


def assemble(sections: dict[int, Section], info: ImageInfo, *, uuid: bytes) -> Image:
    """Header and sections (all that there are); the image's ``info`` has its own checksum."""
    head = np.zeros(1, dtype=layout.IMAGE_DTYPE)
    head["magic"] = layout.IMAGE_MAGIC
    head["lsn"] = info.lsn
    head["next_ino"] = info.next_ino
    head["next_extent_id"] = info.next_extent_id
    head["uuid"] = np.void(uuid)
    head["written_ns"] = time.time_ns()
    position = layout.IMAGE_DTYPE.itemsize
    parts: list[Buffer] = []
    for index, (kind, section) in enumerate(sorted(sections.items())):
        row = (kind, section.checksum(), position, section.length, section.count)
        head["sections"][0, index] = row
        padding = -section.length % layout.SECTION_ALIGN
        parts.extend((*section.parts, bytes(padding)))
        position += section.length + padding
    head_crc = crc32c(head.tobytes()[:_SUMMED_BYTES])
    head["crc"] = head_crc
    return Image([head.tobytes(), *parts], dataclasses.replace(info, header_crc=head_crc))
