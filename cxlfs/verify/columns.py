"""The committed state of a store as the columns of a metadata image: what passes 7 to 9 look at.

A snapshot: a mounted store may go on changing while it is looked at.

Never here: judging.
"""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs.errors import CorruptionError, MediaError
from cxlfs.format import image, layout
from cxlfs.format.image_search import read_image
from cxlfs.format.roots import Root
from cxlfs.format.superblock import Superblock
from cxlfs.media import Media
from cxlfs.store import Store, export
from cxlfs.types import ROOT_INO

Rows: TypeAlias = npt.NDArray[np.void]


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """The sections of an image, checksums already checked, nothing else."""

    next_ino: int
    next_extent_id: int
    inodes: Rows
    names: Rows
    xattrs: Rows
    symlinks: Rows
    extents: Rows
    crcs: npt.NDArray[np.uint32]
    references: Rows
    strings: bytes

    def name_at(self, row: np.void) -> bytes:
        """The bytes of a row of ``names``; cut where the strings end."""
        start = int(row["name_offset"])
        return self.strings[start : start + int(row["name_bytes"])]

    def reference_counts(self) -> npt.NDArray[np.int64]:
        """Of the committed content and the one kept aside of each inode, in the order of
        ``references``; cut where those end: the counts are as hostile as everything else.
        """
        counts = np.stack([self.inodes["ref_count"], self.inodes["aside_ref_count"]], axis=1)
        total = len(self.references)
        bounded = np.minimum(counts.reshape(-1), np.uint64(total)).astype(np.int64)
        sums: npt.NDArray[np.int64] = np.minimum(np.cumsum(bounded), total)
        return np.diff(sums, prepend=0)

    def reference_owners(self) -> npt.NDArray[np.uint64]:
        """The inode of each reference, 0 where the counts do not say; as long as ``references``."""
        owners = np.zeros(len(self.references), dtype=np.uint64)
        found = np.repeat(np.repeat(self.inodes["ino"], 2), self.reference_counts())
        owners[: len(found)] = found
        return owners

    def path_of(self, ino: int) -> bytes | None:
        """One path that means the inode; None when there is none."""
        parts: list[bytes] = []
        current = ino
        for _ in range(len(self.names) + 1):
            if current == ROOT_INO:
                return b"/" + b"/".join(reversed(parts))
            hits = np.flatnonzero(self.names["ino"] == np.uint64(current))
            if not len(hits):
                return None
            row = self.names[hits[0]]
            parts.append(self.name_at(row))
            current = int(row["parent"])
        return None


def columns_of_store(store: Store) -> Columns:
    """What the next metadata image of an open store would say. Nothing is written."""
    volume = store.volume
    data, info = export.build(
        volume.namespace,
        volume.engine,
        uuid=volume.superblock.uuid,
        lsn=volume.last_lsn,
        next_extent_id=volume.next_extent_id,
    )
    _, sections = image.check(data, uuid=volume.superblock.uuid, header_crc=info.header_crc)
    return _columns(sections, info)


def columns_of_media(media: Media, superblock: Superblock, root: Root) -> Columns | None:
    """The image that a root names, as it lies on the media; None when its checksums are wrong."""
    try:
        data = read_image(media, superblock, root)
        info, sections = image.check(data, uuid=superblock.uuid, header_crc=root.image_header_crc)
    except (CorruptionError, MediaError):
        return None
    return _columns(sections, info)


def _columns(sections: image.Sections, info: image.ImageInfo) -> Columns:
    def rows(kind: int, dtype: np.dtype[np.void]) -> Rows:
        return np.frombuffer(sections.get(kind, b""), dtype=dtype)

    return Columns(
        next_ino=info.next_ino,
        next_extent_id=info.next_extent_id,
        inodes=rows(layout.SECTION_INODES, layout.IMAGE_INODE_DTYPE),
        names=rows(layout.SECTION_NAMES, layout.IMAGE_NAME_DTYPE),
        xattrs=rows(layout.SECTION_XATTRS, layout.IMAGE_XATTR_DTYPE),
        symlinks=rows(layout.SECTION_SYMLINKS, layout.IMAGE_XATTR_DTYPE),
        extents=rows(layout.SECTION_EXTENTS, layout.IMAGE_EXTENT_DTYPE),
        crcs=np.frombuffer(sections.get(layout.SECTION_CRCS, b""), dtype="<u4"),
        references=rows(layout.SECTION_REFS, layout.REF_DTYPE),
        strings=bytes(sections.get(layout.SECTION_STRINGS, b"")),
    )
