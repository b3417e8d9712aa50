"""Segment headers: what a segment was taken into use for.

Never here: which segments are free (``space``), what lies behind the header.

Invariants
- The header is durable before anything else is stored into its segment.
- An epoch is never used for a second taking into use.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import MediaError
from cxlfs.format import layout
from cxlfs.format.packing import packer
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media

_SUMMED_BYTES = layout.SEGMENT_DTYPE.itemsize - 4
_HEADER = packer(layout.SEGMENT_DTYPE)
_SEED = struct.Struct("<QQ16s")
_NUMBERS = (  # in the order in which they lie there
    "role",
    "copy_number",
    "index",
    "epoch",
    "nonce",
    "predecessor",
    "predecessor_epoch",
    "predecessor_last_lsn",
    "first_lsn",
    "partner",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    role: int
    index: int
    epoch: int
    nonce: int
    copy_number: int = 0
    predecessor: int = layout.NO_SEGMENT
    predecessor_epoch: int = 0
    predecessor_last_lsn: int = 0
    first_lsn: int = 0
    partner: int = layout.NO_SEGMENT


def record_seed(nonce: int, epoch: int, uuid: bytes) -> int:
    """What the checksums of a segment's records start from: freed bytes can never pass for one."""
    return crc32c(_SEED.pack(nonce, epoch, uuid))


def encode(header: SegmentHeader, uuid: bytes) -> bytes:
    numbers = [getattr(header, name) for name in _NUMBERS]
    data = _HEADER.pack(layout.SEGMENT_MAGIC, *numbers, uuid, time.time_ns(), b"", 0)
    summed = data[:_SUMMED_BYTES]
    return summed + crc32c(summed).to_bytes(4, "little")


def decode(data: bytes, superblock: Superblock, index: int) -> SegmentHeader | str:
    """The header, or what is wrong with it."""
    if not data.startswith(layout.SEGMENT_MAGIC):  # most segments, where many are free
        return "no segment magic"
    row = np.frombuffer(data, dtype=layout.SEGMENT_DTYPE, count=1)[0]
    if int(row["crc"]) != crc32c(data[:_SUMMED_BYTES]):
        return "segment header checksum mismatch"
    if row["uuid"].tobytes() != superblock.uuid:
        return "the segment belongs to another store"
    values = dict(zip(layout.SEGMENT_DTYPE.names or (), row.item(), strict=True))
    header = SegmentHeader(**{name: values[name] for name in _NUMBERS})
    if header.index != index:
        return f"the header of segment {header.index} lies in segment {index}"
    if header.role not in layout.ROLE_NAMES:
        return f"unknown role {header.role}"
    if max(header.epoch, header.first_lsn) >= layout.NUMBER_LIMIT:
        return "a counter beyond the limit"
    journal = header.role == layout.ROLE_JOURNAL
    if journal and (header.partner >= superblock.segment_count or header.partner == index):
        return f"the journal's other copy cannot be segment {header.partner}"
    return header


def decode_named(data: bytes, superblock: Superblock) -> SegmentHeader | str:
    """Return the header in ``data`` of the segment that it names, or why it is not good."""
    if len(data) < layout.SEGMENT_DTYPE.itemsize:
        return "it is shorter than a segment header"
    index = int(np.frombuffer(data, dtype=layout.SEGMENT_DTYPE, count=1)[0]["index"])
    if index >= superblock.segment_count:
        return "no segment has that number"
    return decode(data[: layout.SEGMENT_DTYPE.itemsize], superblock, index)


def read(media: Media, superblock: Superblock, index: int) -> SegmentHeader | str:
    """The header of segment ``index``, or what is wrong with it (never used: no magic)."""
    offset = superblock.segment_offset(index)
    try:
        return decode(media.read(offset, layout.SEGMENT_DTYPE.itemsize), superblock, index)
    except MediaError as error:
        return error.message


def read_all(media: Media, superblock: Superblock) -> list[SegmentHeader]:
    """Every good header; one pass over the segment heads."""
    found = (read(media, superblock, index) for index in range(superblock.segment_count))
    return [header for header in found if isinstance(header, SegmentHeader)]


def store(media: Media, superblock: Superblock, header: SegmentHeader) -> None:
    """Store and write back; the caller fences before it stores anything behind the header."""
    offset = superblock.segment_offset(header.index)
    data = encode(header, superblock.uuid)
    media.store(offset, data)
    media.write_back(offset, len(data))
