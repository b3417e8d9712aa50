"""The frame of a superblock: what every version of the format keeps in the same place, so that a
later version is told from a damaged one.

Never here: what else a superblock of this version says (``superblock``), choosing among copies.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np

from cxlfs.errors import CorruptionError, NotACxlfsError, UnsupportedFormatError
from cxlfs.format import layout
from cxlfs.native import crc32c

if TYPE_CHECKING:
    from cxlfs.media import Media

COPY_NUMBER_BYTES: Final = 4
TAIL_BYTES: Final = 8
"""Checksum and copy number: the end of the structure in every version."""
_BYTES = layout.SUPERBLOCK_DTYPE.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What stands in the same place in the superblock of every version: its first 56 bytes. Behind
    ``structure_bytes`` (512 to 4096, a multiple of 8) it ends with a checksum over all bytes before
    that, and the copy number.
    """

    format_version: int
    structure_bytes: int
    compat: int
    read_only_compat: int
    incompat: int
    uuid: bytes

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """Larger: later. Features are only ever added to a store."""
        return self.format_version, self.incompat, self.read_only_compat, self.compat


def read_frame(data: bytes) -> Frame:
    """The frame of one copy, whose checksum is checked, whatever version it has.

    Raises NotACxlfsError (no magic), CorruptionError (size, checksum).
    """
    row = np.frombuffer(data, dtype=layout.SUPERBLOCK_DTYPE, count=1)[0]
    if row["magic"] != layout.SUPERBLOCK_MAGIC:
        raise NotACxlfsError("no cxlfs superblock here")
    size = _structure_bytes(data)
    expected = int.from_bytes(data[size - TAIL_BYTES : size - COPY_NUMBER_BYTES], "little")
    actual = crc32c(data[: size - TAIL_BYTES])
    if len(data) < size or expected != actual:
        raise CorruptionError(
            "superblock checksum mismatch",
            structure="superblock",
            expected=expected,
            actual=actual,
        )
    frame = Frame(
        **{
            name: int(row[name])
            for name in (
                *("format_version", "structure_bytes"),
                *("compat", "read_only_compat", "incompat"),
            )
        },
        uuid=row["uuid"].tobytes(),
    )
    if frame.structure_bytes != size:
        raise CorruptionError(
            f"the superblock says that it has {frame.structure_bytes} bytes, not {size}",
            structure="superblock",
        )
    return frame


def _structure_bytes(data: bytes) -> int:
    """How long the structure is: as it says when it is of a later version and can be so long."""
    row = np.frombuffer(data, dtype=layout.SUPERBLOCK_DTYPE, count=1)[0]
    size = int(row["structure_bytes"])
    later = int(row["format_version"]) > layout.FORMAT_VERSION
    possible = _BYTES <= size <= layout.SLOT_BYTES and size % TAIL_BYTES == 0
    return size if later and possible else _BYTES


def read_bytes(media: Media, offset: int) -> bytes:
    """The bytes of the copy at ``offset``, as many as its version has. Raises MediaError."""
    data = media.read(offset, _BYTES)
    if data.startswith(layout.SUPERBLOCK_MAGIC):
        size = min(_structure_bytes(data), media.size_bytes - offset)
        if size > _BYTES:
            return media.read(offset, size)
    return data


def unsupported(frame: Frame) -> UnsupportedFormatError:
    if frame.format_version > layout.FORMAT_VERSION:
        return UnsupportedFormatError(
            f"the store has format version {frame.format_version}, and this program knows versions "
            f"up to {layout.FORMAT_VERSION}"
        )
    unknown = frame.incompat & ~layout.KNOWN_INCOMPAT
    return UnsupportedFormatError(f"the store needs features this program lacks ({unknown:#x})")


def claimed_version(data: bytes) -> int:
    """The version that a copy says it has, whether or not it is right."""
    row = np.frombuffer(data, dtype=layout.SUPERBLOCK_DTYPE, count=1)[0]
    return int(row["format_version"])
