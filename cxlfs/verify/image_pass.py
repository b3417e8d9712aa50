"""Pass 5: the metadata images of the newest and of the fallback root, checksum by checksum.

Never here: what the image says (passes 7 to 9 look at that).

Invariants
- An image is summed where it lies, piece by piece: memory does not grow with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from cxlfs.errors import MediaError
from cxlfs.format import layout
from cxlfs.format.roots import Root
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media
from cxlfs.native import crc32c
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import ERROR, WARNING, Finding, make

PIECE_BYTES = 8 << 20
_HEADER_BYTES = layout.IMAGE_DTYPE.itemsize
_SECTION_NAMES = {
    layout.SECTION_INODES: "inodes",
    layout.SECTION_NAMES: "names",
    layout.SECTION_XATTRS: "xattrs",
    layout.SECTION_SYMLINKS: "symlinks",
    layout.SECTION_EXTENTS: "extents",
    layout.SECTION_CRCS: "checksums",
    layout.SECTION_REFS: "references",
    layout.SECTION_STRINGS: "strings",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Damage:
    """What is wrong with an image, and where."""

    message: str
    media_offset: int
    expected: int | None = None
    actual: int | None = None


def check_images(context: Context) -> Steps:
    """The newest image, then the one behind it while it is kept."""
    if context.live:
        context.read_roots()
    block, newest = context.superblock, context.newest
    if block is None or newest is None:
        return
    yield from _check_image(context, block, newest, "image-damaged")
    fallback = context.fallback
    if fallback is not None and not context.is_superseded(newest) and context.keeps_fallback():
        yield from _check_image(context, block, fallback, "image-fallback-damaged")


def _check_image(context: Context, block: Superblock, root: Root, kind: str) -> Steps:
    newest = context.newest
    done = 0
    for item in sum_image(context.media, block, root):
        if newest is not None and context.is_superseded(newest):
            return  # its segments may hold something else by now
        if isinstance(item, int):
            done += item
            yield Amount(min(done, root.image_bytes), root.image_bytes, "bytes")
            context.require_open()
        else:
            yield _finding(context, root, kind, item)
    yield Amount(root.image_bytes, root.image_bytes, "bytes")


def _finding(context: Context, root: Root, kind: str, damage: Damage) -> Finding:
    severity = WARNING
    if kind == "image-damaged":
        store = context.store()
        survives = store is not None and (context.live or store.recovery.lost is None)
        severity = WARNING if survives else ERROR
    return make(
        kind,
        f"image of root {root.generation}: {damage.message}",
        severity=severity,
        media_offset=damage.media_offset,
        expected=damage.expected,
        actual=damage.actual,
    )


def sum_image(media: Media, block: Superblock, root: Root) -> Iterator[int | Damage]:
    """Bytes that were summed, and what is wrong, in the order of the image. Segment headers are not
    looked at (pass 3 does).
    """
    stream = _Stream(media, block, root)
    start = stream.media_offset(0)
    try:
        data = stream.read(0, min(_HEADER_BYTES, root.image_bytes))
    except MediaError as error:
        yield Damage(error.message, start)
        return
    if len(data) < _HEADER_BYTES:
        yield Damage("it is shorter than its header", start)
        return
    head = np.frombuffer(data, dtype=layout.IMAGE_DTYPE, count=1)[0]
    problem = _header_problem(head, data, block, root)
    if problem is not None:
        yield problem if problem.media_offset else dataclasses.replace(problem, media_offset=start)
        return
    yield _HEADER_BYTES
    for row in head["sections"]:
        yield from _sum_section(stream, row)


def _header_problem(head: np.void, data: bytes, block: Superblock, root: Root) -> Damage | None:
    if head["magic"] != layout.IMAGE_MAGIC:
        return Damage("no image magic", 0)
    expected, actual = int(head["crc"]), crc32c(data[:-4])
    if expected != actual:
        return Damage("header checksum mismatch", 0, expected, actual)
    if actual != root.image_header_crc:
        return Damage("it is not the image that the root names", 0, root.image_header_crc, actual)
    if head["uuid"].tobytes() != block.uuid:
        return Damage("it belongs to another store", 0)
    if int(head["lsn"]) != root.image_lsn:
        return Damage(f"it reaches record {int(head['lsn'])}, the root says {root.image_lsn}", 0)
    kinds = sorted(int(kind) for kind in head["sections"]["kind"])
    if kinds != sorted(layout.SECTION_ITEM_BYTES):
        return Damage("a section is missing or appears twice", 0)
    return None


def _sum_section(stream: _Stream, row: np.void) -> Iterator[int | Damage]:
    kind, offset, length, count = (
        int(row[name]) for name in ("kind", "offset", "length", "item_count")
    )
    name = _SECTION_NAMES[kind]
    fits = (
        offset % layout.SECTION_ALIGN == 0
        and offset + length <= stream.size
        and count * layout.SECTION_ITEM_BYTES[kind] == length
    )
    if not fits:
        yield Damage(f"section {name} does not fit the image", stream.media_offset(0))
        return
    crc = 0
    position = offset
    while position < offset + length:
        piece = stream.piece_bytes(position, offset + length - position)
        try:
            crc = stream.media.crc32c(stream.media_offset(position), piece, crc)
        except MediaError as error:
            place = stream.media_offset(position) if error.offset is None else error.offset
            yield Damage(f"section {name}: {error.message}", place)
            return
        position += piece
        yield piece
    if crc != int(row["crc"]):
        place = stream.media_offset(min(offset, stream.size - 1))
        yield Damage(f"section {name}: checksum mismatch", place, int(row["crc"]), crc)


class _Stream:
    """The image as one run of bytes over the payloads of its segments."""

    def __init__(self, media: Media, block: Superblock, root: Root) -> None:
        self.media = media
        self.size = root.image_bytes
        self._payload = block.segment_payload_bytes
        self._starts = [
            block.segment_offset(index) + layout.SEGMENT_HEADER_BYTES
            for index in root.image_segments
        ]

    def media_offset(self, position: int) -> int:
        part, inside = divmod(position, self._payload)
        return self._starts[part] + inside

    def piece_bytes(self, position: int, wanted: int) -> int:
        """How much of the stream from ``position`` on lies in one piece, at most PIECE_BYTES."""
        return min(wanted, self._payload - position % self._payload, PIECE_BYTES)

    def read(self, position: int, length: int) -> bytes:
        """Within the first segment (whose payload is larger than a header)."""
        return self.media.read(self.media_offset(position), length)
