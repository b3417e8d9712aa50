"""Read metadata images out of their segments, and find them without a root by segment headers.

The parts of an image have one nonce, and epochs that follow each other. The image header has the
LSN, and its sections say how long the image is. Other modules apply images and decide which to use.

Invariants
- An image is returned only if all of its checksums are right.
- A length is compared with the limit of images before it is used.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError, CxlfsError, MediaError
from cxlfs.format import image, journal_chain, journal_reader, layout, segments
from cxlfs.format.roots import Root

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cxlfs.format.segments import SegmentHeader
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media


def find_root(media: Media, superblock: Superblock) -> Root | None:
    """Return a root for the newest good image and the journal that continues it.

    The root has generation 1: it is for a store with no root at all. Returns None if there is no
    good image, or if its journals do not reach the last journal of the store.
    """
    headers = segments.read_all(media, superblock)
    found = max(_images(media, superblock, headers), key=lambda item: item[1:], default=None)
    if found is None:
        return None
    root, _lsn, epoch = found
    header = journal_reader.find_successor(
        headers, after_epoch=epoch, first_lsn=root.journal_first_lsn
    )
    if header is not None:
        root = dataclasses.replace(
            root,
            flags=layout.ROOT_IN_USE,
            journal_segment=header.index,
            journal_mirror=header.partner,
            journal_epoch=header.epoch,
        )
    begins = (item.first_lsn for item in headers if item.role == layout.ROLE_JOURNAL)
    last_lsn = _last_lsn(media, superblock, headers, header, root.image_lsn)
    return root if last_lsn + 1 >= max(begins, default=0) else None


def _last_lsn(
    media: Media,
    superblock: Superblock,
    headers: list[SegmentHeader],
    header: SegmentHeader | None,
    image_lsn: int,
) -> int:
    """Return the last LSN of the journals that continue an image, beginning with ``header``."""
    lsn = image_lsn
    while header is not None:
        reader = journal_reader.SegmentReader(media, superblock, header, expected_lsn=lsn + 1)
        for _ in reader.batches():
            pass
        lsn = reader.scan.last_lsn
        header = journal_chain.find_next(media, superblock, headers, reader.scan)
    return lsn


def _images(
    media: Media, superblock: Superblock, headers: list[SegmentHeader]
) -> Iterator[tuple[Root, int, int]]:
    """Yield a root for each good image, its LSN and the epoch of its first part."""
    parts = {
        (header.nonce, header.epoch - header.first_lsn, header.first_lsn): header.index
        for header in headers
        if header.role == layout.ROLE_IMAGE
    }
    next_epoch = max((header.epoch for header in headers), default=0) + 1
    for (nonce, epoch, part), first in parts.items():
        if part:
            continue
        try:
            length = _length(media, superblock, first)
            count = -(-length // superblock.segment_payload_bytes)
            if count > layout.IMAGE_SEGMENTS_MAX:
                continue
            indexes = tuple(parts.get((nonce, epoch, number), -1) for number in range(count))
            if -1 in indexes:
                continue
            root = Root(
                generation=1,
                flags=0,
                image_bytes=length,
                image_lsn=0,
                image_header_crc=0,
                image_segments=indexes,
                journal_segment=None,
                journal_mirror=None,
                journal_epoch=0,
                journal_first_lsn=0,
                next_epoch=next_epoch,
            )
            info = _check(superblock, read_image(media, superblock, root))
        except CxlfsError:
            continue
        root = dataclasses.replace(
            root,
            image_lsn=info.lsn,
            image_header_crc=info.header_crc,
            journal_first_lsn=info.lsn + 1,
        )
        yield root, info.lsn, epoch


def _payload(superblock: Superblock, index: int) -> int:
    return superblock.segment_offset(index) + layout.SEGMENT_HEADER_BYTES


def _length(media: Media, superblock: Superblock, first: int) -> int:
    """Return the bytes of the image that begins in a segment, up to the end of its last section."""
    size = layout.IMAGE_DTYPE.itemsize
    data = media.read(_payload(superblock, first), size)
    sections = np.frombuffer(data, dtype=layout.IMAGE_DTYPE, count=1)[0]["sections"]
    ends = [int(row["offset"]) + int(row["length"]) for row in sections]
    return -(-max(size, *ends) // layout.SECTION_ALIGN) * layout.SECTION_ALIGN


def _check(superblock: Superblock, data: bytearray) -> image.ImageInfo:
    """Compare the checksums of an image. Raises CorruptionError."""
    end = layout.IMAGE_DTYPE.itemsize
    header_crc = int.from_bytes(data[end - 4 : end], "little")
    info, _ = image.check(data, uuid=superblock.uuid, header_crc=header_crc)
    return info


def read_image(media: Media, superblock: Superblock, root: Root) -> bytearray:
    """The image's bytes, out of its segments; raises CorruptionError."""
    data = bytearray(root.image_bytes)
    view, done = memoryview(data), 0
    for part, index in enumerate(root.image_segments):
        header = segments.read(media, superblock, index)
        right = (
            isinstance(header, segments.SegmentHeader)
            and header.role == layout.ROLE_IMAGE
            and header.first_lsn == part
        )
        offset = superblock.segment_offset(index)
        if not right:
            raise CorruptionError(
                f"segment {index} does not hold part {part} of the metadata image",
                structure="segment header",
                media_offset=offset,
            )
        length = min(len(data) - done, superblock.segment_payload_bytes)
        try:
            media.read_into(offset + layout.SEGMENT_HEADER_BYTES, view[done : done + length])
        except MediaError as error:
            raise CorruptionError(
                f"the metadata image cannot be read: {error.message}",
                structure="metadata image",
                media_offset=error.offset,
            ) from error
        done += length
    return data
