"""HDF5 (``.h5``, ``.hdf5``): how long the file should be, as its superblock says.

Source: HDF5 File Format Specification 3.0, section II.A. Complete: the file ends where the
superblock says, which a writer makes true when it closes it, it is not marked as open for writing,
and HDF5's own library can list what it holds (``hdf5_apart``). Keras writes ``.weights.h5`` so.

Never here: the tree behind the superblock, checksums: the library knows them.
"""

from __future__ import annotations

from cxlfs.checkpoint.formats.base import is_cut
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    Hdf5Part,
    IncompleteError,
)
from cxlfs.checkpoint.place import Reader

MAGIC = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".h5", ".hdf5", ".keras.h5")
_FIRST_PLACE = 512
_HEAD_BYTES = 128
_OPEN_FOR_WRITING = 1
_SUPERBLOCK_BYTES_MIN = 48


class Hdf5:
    kind = "hdf5"

    def recognises(self, name: str, head: bytes) -> bool:
        return head.startswith(MAGIC) or (name.endswith(_SUFFIXES) and is_cut(head[:8], MAGIC))

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        take_hdf5(reader, 0, reader.size_bytes, contents)
        return contents


def take_hdf5(reader: Reader, base: int, length: int, contents: Contents) -> None:
    """Add the HDF5 file in ``[base, base + length)``. Raises ProblemError."""
    if not length:
        raise IncompleteError("it is empty")
    at = _find(reader, base, length)
    head = reader.read(base + at, min(_HEAD_BYTES, length - at))
    if len(head) < _SUPERBLOCK_BYTES_MIN:
        raise IncompleteError("its superblock is cut")
    end = _end(head) + at
    if end > length:
        raise IncompleteError(f"it ends at byte {length}, {end} are needed")
    if end < length:
        raise BeyondLimitsError("it goes on behind its end: its writer may not have closed it")
    contents.hdf5.append(Hdf5Part(reader.name, base, length))


def _find(reader: Reader, base: int, length: int) -> int:
    """At byte 0, or behind a block of the user's: 512, 1024, 2048, ..."""
    at = 0
    while at + len(MAGIC) <= length:
        if reader.read(base + at, len(MAGIC)) == MAGIC:
            return at
        at = at * 2 or _FIRST_PLACE
    if is_cut(reader.read(base, min(length, len(MAGIC))), MAGIC):
        raise IncompleteError("its superblock was not written")
    raise DamagedError("it has no superblock")


def _end(head: bytes) -> int:
    """Where the file ends, counted from its superblock."""
    version = head[8]
    if version not in (0, 1, 2, 3):
        raise BeyondLimitsError("its superblock is of a version that is not known")
    is_old = version < 2
    size = head[13 if is_old else 9]
    if size not in (2, 4, 8):
        raise DamagedError("its superblock is damaged")
    begin = (24, 28, 12, 12)[version]
    base, _, end, last = (
        int.from_bytes(head[at : at + size], "little")
        for at in range(begin, begin + 4 * size, size)
    )
    root = int.from_bytes(head[begin + 5 * size : begin + 6 * size], "little") if is_old else last
    if version == 3 and head[11] & _OPEN_FOR_WRITING:
        raise IncompleteError("its writer did not close it")
    if not root or end == (1 << 8 * size) - 1:
        raise IncompleteError("its root was not written")
    return end - base
