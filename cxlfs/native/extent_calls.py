"""What the Python faces of the extent map share: layouts of C structs, scratch memory, errors.

Never: imported outside ``cxlfs.native``.

Invariants
- The dtypes are the images of the C structs of the same name.
- Scratch memory belongs to one thread, and to one call at a time.
"""

from __future__ import annotations

import errno
import struct
import threading
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs._native import ffi, lib
from cxlfs.errors import (
    CorruptionError,
    CxlfsError,
    DataFault,
    FileTooLargeError,
    InvariantError,
    MediaError,
    OutOfMemoryError,
    ReadOnlyError,
)

Rows: TypeAlias = npt.NDArray[np.void]

REF_DTYPE = np.dtype(
    [("file_offset", "u8"), ("length", "u8"), ("extent_id", "u8"), ("extent_offset", "u8")]
)
"""``cxl_ref``: file bytes that lie in an extent; extent 0 is a hole."""

EXTENT_INFO = struct.Struct("=QQQQII")
"""One row of EXTENT_INFO_DTYPE: id, media offset, length, index of the first checksum, first chunk,
number of checksums."""
EXTENT_INFO_DTYPE = np.dtype(
    [
        ("id", "u8"),
        ("media_offset", "u8"),
        ("length", "u8"),
        ("crc_index", "u8"),
        ("first_chunk", "u4"),
        ("crc_count", "u4"),
    ]
)
"""``cxl_extent_info``: an extent, and where its checksums stand in the array that comes along."""

LIVE_RANGE_DTYPE = np.dtype(
    [
        ("extent_id", "u8"),
        ("extent_offset", "u8"),
        ("length", "u8"),
        ("owner", "u8"),
        ("file_offset", "u8"),
        ("first_owner", "u8"),
        ("owner_count", "u8"),
        ("span", "u8"),
    ]
)
"""``cxl_live_range``: extent bytes that maps refer to, and where one of their owners has them."""

MOVE_DTYPE = np.dtype(
    [
        ("source_id", "u8"),
        ("source_offset", "u8"),
        ("length", "u8"),
        ("target_id", "u8"),
        ("target_offset", "u8"),
    ]
)
"""``cxl_move``: what was copied where."""

SPAN_DTYPE = np.dtype([("media_offset", "u8"), ("length", "u8")])
"""``cxl_span``: a part of the media."""

CHANGE_DTYPE = np.dtype(
    [
        ("cut", "u8"),
        ("size", "u8"),
        ("refs_offset", "u8"),
        ("ref_count", "u8"),
        ("definitions", "u8"),
    ]
)
"""``cxl_change``: how a content changes, behind so many definitions of extents."""

CRC_DTYPE = np.dtype("u4")


NOT_DURABLE = -errno.EREMOTEIO
"""What C says instead of -EIO when a fence failed."""


class Engine(Protocol):
    """What a content, or what is held of one, needs of the engine (``extents``)."""

    closed: bool

    @property
    def handle(self) -> Any:
        """The ``cxl_engine *``; raises InvariantError when it is closed."""
        ...


class Scratch(threading.local):
    """Out parameters of the hot calls, for each thread."""

    def __init__(self) -> None:
        self.fault = ffi.new("cxl_fault *")
        self.needed = ffi.new("uint64_t *")
        self.address = ffi.new("const void **")
        self.info = ffi.new("cxl_extent_info *")
        self.bad = ffi.new("uint64_t *")
        self.map = ffi.new("cxl_map **")
        self.refs = ffi.new("cxl_ref **")
        self.statistics = ffi.new("cxl_engine_stats *")
        count = len(ffi.typeof("cxl_engine_stats").fields)
        self.statistics_fields = (ffi.cast("uint64_t *", self.statistics), count)
        """To take each by its name took three times as long."""
        self.delta = ffi.new("cxl_delta **")
        self.room = (self.bad, self.needed)
        self.write = (self.needed, self.fault)
        self.peek = (self.address, self.fault)


scratch = Scratch()


def fault_of(fault: Any) -> DataFault:
    return DataFault(
        file_offset=fault.file_offset,
        length=fault.length,
        extent_id=fault.extent_id,
        chunk=fault.chunk,
        media_offset=fault.media_offset,
        expected=fault.expected,
        actual=fault.actual,
    )


def failure(code: int, what: str) -> CxlfsError | InvariantError:
    """The error for a code that means the same in every call."""
    if code == -errno.ENOMEM:
        return OutOfMemoryError(f"no memory to {what}")
    if code == -errno.EROFS:
        return ReadOnlyError("the media is mapped read-only")
    if code == -errno.EFBIG:
        return FileTooLargeError("beyond the largest file offset")
    return InvariantError(f"cannot {what}: error {-code}")


def data_failure(code: int, verb: str, fault: Any) -> CxlfsError | InvariantError:
    """The error for file data that could not be read or written."""
    if code != -errno.EIO:
        return failure(code, "access file data")
    found = fault_of(fault)
    error: CorruptionError | MediaError
    if fault.error == -errno.EBADMSG:
        error = CorruptionError(
            f"file data at offset {found.file_offset} fails its check: chunk {found.chunk} "
            f"of extent {found.extent_id}, media offset {found.media_offset}",
            structure="file data",
            media_offset=found.media_offset,
            expected=found.expected,
            actual=found.actual,
        )
    else:
        error = MediaError(
            f"file data at offset {found.file_offset} could not be {verb} "
            f"at media offset {found.media_offset}",
            offset=found.media_offset,
            length=found.length,
            not_durable=fault.error == NOT_DURABLE,
        )
    error.fault = found
    return error


def bad_input(code: int, structure: str, index: int) -> CxlfsError | InvariantError:
    """The error for what came from a media image and contradicts itself, or what is known."""
    if code != -errno.EINVAL:
        return failure(code, f"keep a {structure}")
    return CorruptionError(f"{structure} {index} is not possible here", structure=structure)


def copy_bytes(pointer: Any, count: int, dtype: np.dtype[Any]) -> bytes:
    """As :func:`copy_array`, for what is small: an array takes longer to make than to use."""
    return bytes(ffi.buffer(pointer, count * dtype.itemsize)) if count else b""


def take_array(pointer: Any, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Copy an array that C allocated, and free it."""
    try:
        return np.frombuffer(ffi.buffer(pointer, count * dtype.itemsize), dtype).copy()
    finally:
        lib.cxl_free(pointer)


def copy_array(pointer: Any, count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return np.frombuffer(ffi.buffer(pointer, count * dtype.itemsize), dtype).copy()
