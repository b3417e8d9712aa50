"""Batches of history as bytes: what versions of files were, and where their bytes lie.

A segment of role ``history`` holds batches, one behind the other. Other modules decide what goes
into one (``store.past_archive``), and whether its data is still there (``store.past_loading``).

Invariants
- A batch says all of its rows: no other structure is needed to read them.
- Its checksums are seeded with the segment's nonce and epoch, and it names its own place. What was
  left in a segment by an earlier use never counts as a batch.
- Nothing in a batch is trusted: every number that is used as a size or a place was compared.
- Memory is proportional to the bytes of the batch.
"""

from __future__ import annotations

import dataclasses
import stat
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs.errors import CorruptionError
from cxlfs.format import layout
from cxlfs.format.operations import is_name
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.media import Media

Rows: TypeAlias = npt.NDArray[np.void]

HEADER_BYTES = layout.HISTORY_BATCH_DTYPE.itemsize
_SUMMED_BYTES = HEADER_BYTES - 4
_SECTIONS: dict[str, np.dtype[np.generic]] = {
    "row_count": layout.HISTORY_ROW_DTYPE,
    "segment_count": layout.HISTORY_SEGMENT_DTYPE,
    "extent_count": layout.IMAGE_EXTENT_DTYPE,
    "checksum_count": np.dtype("<u4"),
    "reference_count": layout.REF_DTYPE,
    "attribute_count": layout.HISTORY_ATTRIBUTE_DTYPE,
    "string_bytes": np.dtype("u1"),
}
"""In the order in which they lie there."""
_TYPES = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
_NODES = (stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR, stat.S_IFBLK)
_TYPE_BITS = 0o170000


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Rows (HISTORY_ROW_DTYPE) and what they need. Strings, attributes and references of a row
    follow those of the row before.
    """

    lsn: int
    rows: Rows
    segments: Rows
    extents: Rows
    checksums: npt.NDArray[np.uint32]
    references: Rows
    attributes: Rows
    strings: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Texts:
    """The strings of one row."""

    name: bytes
    target: bytes
    xattrs: dict[bytes, bytes] | None


def _padded(length: int) -> int:
    return -(-length // layout.SECTION_ALIGN) * layout.SECTION_ALIGN


def encode(batch: Batch, *, offset: int, seed: int) -> bytes:
    """The bytes of a batch that is to lie ``offset`` bytes into the payload of its segment."""
    sections: tuple[npt.NDArray[np.generic], ...] = (
        batch.rows,
        batch.segments,
        batch.extents,
        batch.checksums,
        batch.references,
        batch.attributes,
        np.frombuffer(batch.strings, np.uint8),
    )
    parts = [section.tobytes() for section in sections]
    payload = b"".join(part.ljust(_padded(len(part)), b"\0") for part in parts)
    head = np.zeros(1, layout.HISTORY_BATCH_DTYPE)
    head["magic"] = layout.HISTORY_MAGIC
    head["length"] = HEADER_BYTES + len(payload)
    head["offset"], head["lsn"] = offset, batch.lsn
    for name, section in zip(_SECTIONS, sections, strict=True):
        head[name] = len(section)
    head["payload_crc"] = crc32c(payload, seed)
    head["written_ns"] = time.time_ns()
    head["crc"] = crc32c(head.tobytes()[:_SUMMED_BYTES], seed)
    return head.tobytes() + payload


def scan(
    media: Media, start: int, size_bytes: int, *, seed: int
) -> Iterator[tuple[int, Batch | None]]:
    """The batches in the payload of a segment: where each one ends, and what it says; None for one
    whose bytes are damaged. Ends in front of the first place where none begins.

    Raises MediaError.
    """
    offset = 0
    while size_bytes - offset >= HEADER_BYTES:
        data = media.read(start + offset, HEADER_BYTES)
        head = np.frombuffer(data, layout.HISTORY_BATCH_DTYPE, count=1)[0]
        if head["magic"] != layout.HISTORY_MAGIC or head["offset"] != offset:
            return
        if int(head["crc"]) != crc32c(data[:_SUMMED_BYTES], seed):
            return
        lengths = [int(head[name]) * dtype.itemsize for name, dtype in _SECTIONS.items()]
        length = HEADER_BYTES + sum(map(_padded, lengths))
        if length != head["length"] or length > size_bytes - offset:
            return
        payload = media.read(start + offset + HEADER_BYTES, length - HEADER_BYTES)
        offset += length
        whole = int(head["payload_crc"]) == crc32c(payload, seed)
        yield offset, _batch(int(head["lsn"]), payload, lengths) if whole else None


def _batch(lsn: int, payload: bytes, lengths: list[int]) -> Batch:
    found, position = [], 0
    for length, dtype in zip(lengths, _SECTIONS.values(), strict=True):
        found.append(np.frombuffer(payload[position : position + length], dtype))
        position += _padded(length)
    rows, segments, extents, checksums, references, attributes, strings = found
    return Batch(lsn, rows, segments, extents, checksums, references, attributes, strings.tobytes())


# --- checking -------------------------------------------------------------------------------


def _require(condition: object, message: str) -> None:
    if not condition:
        raise CorruptionError(message, structure="history")


def check(batch: Batch) -> list[Texts]:
    """Compare all numbers of a batch but for places on the media; returns the strings of each row.

    Raises CorruptionError.
    """
    rows, refs = batch.rows, batch.references
    types = rows["mode"] & np.uint32(_TYPE_BITS)
    is_file = types == stat.S_IFREG
    limit = layout.NUMBER_LIMIT
    for field in ("ended_lsn", "commit_lsn", "ino", "parent"):
        _require(not (rows[field] >= limit).any(), "a number beyond the limit")
    _require(rows["ino"].all() and rows["parent"].all(), "a version without its inode")
    _require(np.isin(types, (*_TYPES, *_NODES)).all(), "no such file type")
    _require(np.isin(rows["death"], list(layout.DEATHS)).all(), "no such end")
    _require(not (rows["flags"] & ~np.uint32(layout.INODE_FLAGS_KNOWN)).any(), "unknown flags")
    _require(not (rows["size"] > layout.FILE_SIZE_MAX).any(), "a file larger than the limit")
    has_content = (rows["size"] > 0) | (rows["ref_count"] > 0)
    _require(not has_content[~is_file].any(), "something that is not a file has content")
    _require(not (rows["ref_count"] > len(refs)).any(), "references that are not there")
    _require(int(rows["ref_count"].sum()) == len(refs), "references of no version")
    _require(not (batch.extents["first_chunk"]).any(), "an extent without its first chunks")
    is_link = types == stat.S_IFLNK
    _require(((rows["target_bytes"] > 0) == is_link).all(), "a link without its target")
    _require(not (rows["target_bytes"] > layout.SYMLINK_BYTES_MAX).any(), "a long target")
    return _texts(batch)


def _texts(batch: Batch) -> list[Texts]:
    """The strings of each row, taken off one after the other. Raises CorruptionError."""
    strings, position = batch.strings, 0
    attributes = batch.attributes.tolist()
    total = int(batch.attributes["name_bytes"].sum(dtype=np.uint64))
    total += int(batch.attributes["value_bytes"].sum(dtype=np.uint64))
    for field in ("name_bytes", "target_bytes"):
        total += int(batch.rows[field].sum(dtype=np.uint64))
    _require(total == len(strings), "strings that do not fit")
    counts = batch.rows["attribute_count"]
    _require(int(counts.sum(dtype=np.uint64)) == len(attributes), "attributes of no version")
    found, first = [], 0
    lengths = (batch.rows["name_bytes"], batch.rows["target_bytes"], counts)
    for name_bytes, target_bytes, count in zip(*(each.tolist() for each in lengths), strict=True):
        name: bytes = strings[position : position + name_bytes]
        is_possible = 0 < name_bytes <= layout.NAME_BYTES_MAX and is_name(name)
        _require(is_possible, "an impossible name")
        position += name_bytes
        target = strings[position : position + target_bytes]
        position += target_bytes
        xattrs: dict[bytes, bytes] = {}
        for key_bytes, value_bytes in attributes[first : first + count]:
            _require(0 < key_bytes <= layout.XATTR_NAME_BYTES_MAX, "a bad attribute name")
            middle = position + key_bytes
            xattrs[strings[position:middle]] = strings[middle : middle + value_bytes]
            position = middle + value_bytes
        first += count
        found.append(Texts(name, target, xattrs or None))
    return found
