"""HDF5 (``.h5``, ``.hdf5``): the superblock, and the data sets behind it (``hdf5_tree``).

Source: HDF5 File Format Specification 3.0, section II.A. Complete: the file ends where the
superblock says, which a writer makes true when it closes it, and it is not marked as open for
writing. Keras writes ``.weights.h5`` so.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from cxlfs.checkpoint.formats.base import is_cut
from cxlfs.checkpoint.formats.hdf5_tree import data_sets
from cxlfs.checkpoint.formats.lookup3 import lookup3
from cxlfs.checkpoint.model import (
    BeyondLimitsError,
    Contents,
    DamagedError,
    File,
    IncompleteError,
    Later,
)
from cxlfs.checkpoint.place import Reader

MAGIC = b"\x89HDF\r\n\x1a\n"
_SUFFIXES = (".h5", ".hdf5", ".keras.h5")
_FIRST_PLACE = 512
_HEAD_BYTES = 128
_OPEN_FOR_WRITING = 1
_FLAGS_MAX = 7


class Hdf5:
    kind = "hdf5"

    def recognises(self, name: str, head: bytes) -> bool:
        return head.startswith(MAGIC) or (name.endswith(_SUFFIXES) and is_cut(head[:8], MAGIC))

    def examine(self, reader: Reader) -> Contents:
        contents = Contents(files=[File(reader.name, reader.size_bytes)])
        take_hdf5(reader, 0, reader.size_bytes, contents)
        return contents


def take_hdf5(reader: Reader, base: int, length: int, contents: Contents) -> None:
    """Add the data sets of the HDF5 file in ``[base, base + length)``.

    Raises IncompleteError, DamagedError.
    """
    block = read_superblock(reader, base, length)
    if block.root is None:
        note = "its tensors are not listed: it was written with libver latest"
        contents.notes.append(note)
        contents.later.append(Later(reader.name, base, length, note))
        return
    begin = base + block.base
    try:
        found = data_sets(reader, begin, length - block.base, block.sizes, block.root)
    except BeyondLimitsError as error:
        contents.notes.append(f"its tensors are not listed: {error}")
        return
    contents.tensors += found.tensors
    contents.attributes += found.attributes
    if found.left_out:
        note = f"{found.left_out} objects of later versions are not listed"
        contents.notes.append(note)
        contents.later.append(Later(reader.name, base, length, note))


class Superblock(NamedTuple):
    """``root``: address of the root's object header, from ``base`` on; None: of a later version.
    ``sizes``: bytes of an address and of a length.
    """

    end: int
    base: int
    sizes: tuple[int, int]
    root: int | None


def read_superblock(reader: Reader, base: int, length: int) -> Superblock:
    """Of the HDF5 file in ``[base, base + length)``. Raises IncompleteError, DamagedError."""
    if not length:
        raise IncompleteError("it is empty")
    at = _find(reader, base, length)
    head = reader.read(base + at, min(_HEAD_BYTES, length - at))
    if len(head) < 48:
        raise IncompleteError("its superblock is cut")
    version = head[8]
    if version in (0, 1):
        block = _old(head, version)
    elif version in (2, 3):
        block = _new(head, version)
    else:
        raise BeyondLimitsError("its superblock is of a version that is not known")
    end = block.end + at - block.base
    if end > length:
        raise IncompleteError(f"it ends at byte {length}, {end} are needed")
    if end < length:
        raise BeyondLimitsError("it goes on behind its end: its writer may not have closed it")
    return block._replace(end=end, base=at)


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


def _old(head: bytes, version: int) -> Superblock:
    size = head[13]
    versions = head[9], head[10], head[12]  # of free space, the root's entry, shared headers
    ranks = head[16:18], head[18:20]  # of leaves and nodes of groups' trees
    flags = int.from_bytes(head[20:24], "little")
    if size not in (2, 4, 8) or head[14] not in (2, 4, 8) or any(versions) or bytes(2) in ranks:
        raise DamagedError("its superblock is damaged")
    begin = 24 + (4 if version == 1 else 0)
    fields = [head[at : at + size] for at in range(begin, begin + 6 * size, size)]
    base, extension, end, driver, _, root = (int.from_bytes(each, "little") for each in fields)
    undefined = (1 << 8 * size) - 1
    if end == undefined or extension != undefined or flags > _FLAGS_MAX:
        raise DamagedError("its superblock is damaged")
    if driver != undefined and driver >= end:
        raise DamagedError("its superblock is damaged")
    if not 0 < root < end:  # behind the link name of the root's entry
        raise IncompleteError("its root was not written")
    return Superblock(end, base, (size, head[14]), root)


def _new(head: bytes, version: int) -> Superblock:
    size = head[9]
    if size not in (2, 4, 8):
        raise DamagedError("its superblock is damaged")
    length = 12 + 4 * size
    if len(head) < length + 4:
        raise IncompleteError("its superblock is cut")
    if lookup3(head[:length]) != struct.unpack_from("<L", head, length)[0]:
        raise DamagedError("the checksum of its superblock differs")
    if version == 3 and head[11] & _OPEN_FOR_WRITING:
        raise IncompleteError("its writer did not close it")
    end = int.from_bytes(head[12 + 2 * size : 12 + 3 * size], "little")
    base = int.from_bytes(head[12 : 12 + size], "little")
    return Superblock(end, base, (size, head[10]), None)
