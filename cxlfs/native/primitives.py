"""Checksum, mapped regions, recorder and fault switches: the first half of ``csrc/cxlfs.h``.

Never: opens files, looks at sysfs, keeps state of its own beside the C handle.

Invariants
- Every offset is in bytes from the start of the region. A range that leaves the region is a
  :class:`MediaError`, found before anything is allocated or touched: offsets may come from a
  hostile image.
- A region that was closed raises :class:`InvariantError` on every use.
"""

from __future__ import annotations

import enum
import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NewType, TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs._native import ffi, lib
from cxlfs.errors import (
    InvariantError,
    MediaError,
    MediaUnavailableError,
    NotPersistentError,
    OutOfMemoryError,
    ReadOnlyError,
    UsageError,
    invariant,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Source: TypeAlias = "ReadableBuffer | npt.NDArray[Any]"
"""Contiguous bytes to read from. (For Python 3.11 numpy does not say that arrays are buffers.)"""
Target: TypeAlias = "WriteableBuffer | npt.NDArray[Any]"
"""Contiguous bytes to fill."""

MediaHandle = NewType("MediaHandle", object)
"""A ``cxl_media *``: what C calls a media."""

OVERRIDES = ("CXLFS_WRITE_BACK", "CXLFS_CRC32C", "CXLFS_COPY")

# A failure shows again in routines() and when a region is made, where it can be reported.
_dispatch_result: int = lib.cxl_dispatch_init()


class Granularity(enum.IntEnum):
    """What must be done until a store survives a power cut."""

    BYTE = lib.CXL_GRANULARITY_BYTE
    """A fence: the caches are inside the persistence domain (eADR)."""
    LINE = lib.CXL_GRANULARITY_LINE
    """Write back each cache line, then a fence (DAX)."""
    PAGE = lib.CXL_GRANULARITY_PAGE
    """msync (an ordinary file or block device); pages may also become durable early."""


class EventKind(enum.IntEnum):
    """Kinds of entries in the recorder's log."""

    STORE = lib.CXL_EVENT_STORE
    COPY = lib.CXL_EVENT_COPY
    WRITE_BACK = lib.CXL_EVENT_WRITE_BACK
    FENCE = lib.CXL_EVENT_FENCE
    MARK = lib.CXL_EVENT_MARK


class FaultKind(enum.IntEnum):
    """Calls that a test can make fail."""

    ALLOCATE = lib.CXL_FAULT_ALLOCATE
    WRITE_BACK = lib.CXL_FAULT_WRITE_BACK
    COPY = lib.CXL_FAULT_COPY
    MSYNC = lib.CXL_FAULT_MSYNC
    MAP = lib.CXL_FAULT_MAP
    FENCE = lib.CXL_FAULT_FENCE
    SPLICE = lib.CXL_FAULT_SPLICE
    DECAY = lib.CXL_FAULT_DECAY


@dataclass(frozen=True, slots=True)
class Routines:
    """Names of the routines chosen for this CPU, as ``cxlfs status`` prints them."""

    write_back: str
    fence: str
    crc32c: str
    copy: str


def _require_dispatch() -> None:
    if _dispatch_result != 0:
        settings = " ".join(
            f"{name}={os.environ[name]}" for name in OVERRIDES if name in os.environ
        )
        raise UsageError(
            f"this CPU has no routine of that name: {settings}",
            next_step=f"unset {', '.join(OVERRIDES)}",
        )


_new_uncleared = ffi.new_allocator(should_clear_after_alloc=False)
_store = lib.cxl_media_store
_write_back = lib.cxl_media_write_back
_fence = lib.cxl_media_fence


def routines() -> Routines:
    """What was chosen; raises UsageError when an override names what this CPU lacks."""
    _require_dispatch()
    return Routines(
        write_back=ffi.string(lib.cxl_dispatch_write_back()).decode(),
        fence=ffi.string(lib.cxl_dispatch_fence()).decode(),
        crc32c=ffi.string(lib.cxl_dispatch_crc32c()).decode(),
        copy=ffi.string(lib.cxl_dispatch_copy()).decode(),
    )


def crc32c(data: Source, seed: int = 0) -> int:
    """CRC32C (Castagnoli, RFC 3720) of ``data``, continuing from ``seed``."""
    if type(data) is bytes:
        return int(lib.cxl_crc32c(seed, data, len(data)))
    source = ffi.from_buffer(data)
    return int(lib.cxl_crc32c(seed, source, len(source)))


def crc32c_each(
    data: Source,
    offsets: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.uint64],
    seed: int = 0,
) -> npt.NDArray[np.uint32]:
    """CRC32C of each range of ``data``, each continuing from ``seed``.

    Raises InvariantError unless every range lies in ``data``.
    """
    source = ffi.from_buffer(data)
    size = np.uint64(len(source))
    invariant(len(lengths) == len(offsets), "as many lengths as offsets")
    invariant(bool((lengths <= size).all()), "ranges are not longer than the data")
    invariant(bool((offsets <= size - lengths).all()), "ranges lie in the data")
    out = np.empty(len(offsets), dtype=np.uint32)
    lib.cxl_crc32c_each(
        seed,
        source,
        ffi.from_buffer("uint64_t[]", np.ascontiguousarray(offsets, dtype=np.uint64)),
        ffi.from_buffer("uint64_t[]", np.ascontiguousarray(lengths, dtype=np.uint64)),
        len(offsets),
        ffi.from_buffer("uint32_t[]", out),
    )
    return out


def set_fault(kind: FaultKind, nth: int) -> None:
    """Tests only: the ``nth`` call of ``kind`` from now on fails, once; 0 switches it off."""
    if lib.cxl_fault_set(kind, nth) != 0:
        raise InvariantError(f"no fault switch of kind {kind}")


def fault_count(kind: FaultKind) -> int:
    """Calls of ``kind`` since its switch was set to something other than 0."""
    return int(lib.cxl_fault_count(kind))


def _raise_mapping_error(code: int, what: str) -> None:
    if code == -errno.EOPNOTSUPP:
        raise NotPersistentError(f"{what} cannot be made durable line by line")
    if code == -errno.ENOMEM:
        raise OutOfMemoryError(f"no address space or memory to map {what}")
    raise MediaUnavailableError(f"{what} cannot be mapped: {os.strerror(-code)}")


class MappedRegion:
    """A mapping, and what C offers on it. Not promised: that a store stays volatile until it is
    written back. It may become durable earlier, in any order, each aligned 8-byte word on its own.
    """

    def __init__(self, handle: MediaHandle, *, read_only: bool = False) -> None:
        """Takes over ``handle`` (a ``cxl_media *``); use :meth:`map` or :meth:`anonymous`."""
        self._handle: Any = ffi.gc(handle, lib.cxl_media_close)
        self.read_only = read_only
        self.size_bytes = int(lib.cxl_media_size(handle))
        self.granularity = Granularity(lib.cxl_media_granularity(handle))

    # ------------------------------------------------------------------------------------ life

    @staticmethod
    def map_handle(
        descriptor: int,
        size_bytes: int,
        *,
        granularity: Granularity,
        alignment_bytes: int = 1,
        read_only: bool = False,
        synchronous: bool = False,
        what: str = "the source",
    ) -> MediaHandle:
        """Map ``descriptor`` shared, at a multiple of ``alignment_bytes`` (a power of two) where
        the address space has room for that; ``synchronous`` asks for MAP_SYNC.

        Raises NotPersistentError when MAP_SYNC (or LINE, on this CPU) is not to be had,
        MediaUnavailableError, OutOfMemoryError, UsageError for a wrong override.
        """
        _require_dispatch()
        out = ffi.new("cxl_media **")
        flags = (lib.CXL_MAP_READ_ONLY if read_only else 0) | (
            lib.CXL_MAP_SYNC if synchronous else 0
        )
        code = lib.cxl_media_map(descriptor, size_bytes, alignment_bytes, flags, granularity, out)
        if code != 0:
            _raise_mapping_error(code, what)
        return MediaHandle(out[0])

    @staticmethod
    def anonymous_handle(size_bytes: int, *, granularity: Granularity) -> MediaHandle:
        """Zeroed memory that behaves at ``granularity``; raises as :meth:`map_handle`."""
        _require_dispatch()
        out = ffi.new("cxl_media **")
        code = lib.cxl_media_anonymous(size_bytes, granularity, out)
        if code != 0:
            _raise_mapping_error(code, f"anonymous memory of {size_bytes} bytes")
        return MediaHandle(out[0])

    @property
    def handle(self) -> Any:
        """The ``cxl_media *``; whoever keeps it in C must be gone before :meth:`close`."""
        handle = self._handle
        if handle is None:
            raise InvariantError("the media is closed")
        return handle

    def close(self) -> None:
        """Unmap. What was not written back and fenced may be lost. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            ffi.release(handle)

    # ----------------------------------------------------------------------------------- loads

    def read(self, offset: int, length: int) -> bytes:
        """Guarded copy of a range; raises MediaError where it cannot be read."""
        self._check_range(offset, length)
        buffer = _new_uncleared("char[]", length)
        self._read_into(offset, buffer)
        return bytes(ffi.buffer(buffer, length))

    def read_into(self, offset: int, target: Target) -> None:
        """As :meth:`read`, filling ``target``, whose content after an error is undefined."""
        self._read_into(offset, ffi.from_buffer(target, require_writable=True))

    def read_into_crc32c(self, offset: int, target: Target, seed: int = 0) -> int:
        """As :meth:`read_into`, and the CRC32C of what was read from the same pass."""
        buffer = ffi.from_buffer(target, require_writable=True)
        length = len(buffer)
        self._check_range(offset, length)
        crc, fault = ffi.new("uint32_t *", seed), ffi.new("uint64_t *", offset)
        code = lib.cxl_media_read_crc(self.handle, offset, buffer, length, crc, fault)
        del buffer  # see _read_into
        if code != 0:
            self._raise_error(code, "read", offset, length, fault_offset=fault[0])
        return int(crc[0])

    def _read_into(self, offset: int, buffer: Any) -> None:
        length = len(buffer)
        self._check_range(offset, length)
        fault = ffi.new("uint64_t *", offset)
        code = lib.cxl_media_read(self.handle, offset, buffer, length, fault)
        # CPython 3.11 crashes when its collector finds a buffer that cffi holds in a traceback.
        del buffer
        if code != 0:
            self._raise_error(code, "read", offset, length, fault_offset=fault[0])

    def crc32c(self, offset: int, length: int, seed: int = 0) -> int:
        """Guarded CRC32C of a range in place; raises MediaError where it cannot be read."""
        self._check_range(offset, length)
        crc, fault = ffi.new("uint32_t *", seed), ffi.new("uint64_t *", offset)
        code = lib.cxl_media_crc(self.handle, offset, length, crc, fault)
        if code != 0:
            self._raise_error(code, "read", offset, length, fault_offset=fault[0])
        return int(crc[0])

    def load_u64(self, offset: int) -> int:
        """One 8-byte word at a multiple of 8 that another process may change: never torn, and what
        was stored there before it is seen after this. Raises as :meth:`read`.
        """
        self._check_range(offset, 8)
        value = ffi.new("uint64_t *")
        code = lib.cxl_media_load_u64(self.handle, offset, value)
        if code != 0:
            self._raise_error(code, "read", offset, 8)
        return int(value[0])

    # ---------------------------------------------------------------------------------- stores

    def store(self, offset: int, data: Source) -> None:
        """Ordinary stores, durable only once written back and fenced.

        Raises MediaError, ReadOnlyError; after a MediaError the range may be partly stored.
        """
        source = data if type(data) is bytes else ffi.from_buffer(data)
        length = len(source)
        if offset < 0:
            self._check_range(offset, length)
        code = _store(self._handle or self.handle, offset, source, length)
        del source  # see _read_into
        if code != 0:
            self._raise_error(code, "written", offset, length)

    def copy(self, offset: int, data: Source) -> None:
        """Stores past the cache, ragged ends written back: durable after :meth:`fence`.

        Raises as :meth:`store`.
        """
        source = data if type(data) is bytes else ffi.from_buffer(data)
        length = len(source)
        self._check_range(offset, length)
        code = lib.cxl_media_copy(self.handle, offset, source, length)
        del source  # see _read_into
        if code != 0:
            self._raise_error(code, "written", offset, length)

    def copy_crc32c(self, offset: int, data: Source, seed: int = 0) -> int:
        """As :meth:`copy`, and the CRC32C of ``data`` from the same pass."""
        source = data if type(data) is bytes else ffi.from_buffer(data)
        length = len(source)
        self._check_range(offset, length)
        crc = ffi.new("uint32_t *", seed)
        code = lib.cxl_media_copy_crc(self.handle, offset, source, length, crc)
        del source  # see _read_into
        if code != 0:
            self._raise_error(code, "written", offset, length)
        return int(crc[0])

    def store_u64(self, offset: int, value: int) -> None:
        """One 8-byte little-endian word at a multiple of 8, never torn; raises as :meth:`store`."""
        self._check_range(offset, 8)
        code = lib.cxl_media_store_u64(self.handle, offset, value)
        if code != 0:
            self._raise_error(code, "written", offset, 8)

    def or_u64(self, offset: int, bits: int) -> int:
        """Set ``bits`` of a word as one step for everybody who has the media mapped: the value
        before. Durable only once written back and fenced. Raises as :meth:`store`.
        """
        self._check_range(offset, 8)
        before = ffi.new("uint64_t *")
        code = lib.cxl_media_or_u64(self.handle, offset, bits, before)
        if code != 0:
            self._raise_error(code, "written", offset, 8)
        return int(before[0])

    # ------------------------------------------------------------------------------ durability

    @property
    def populates(self) -> bool:
        """:meth:`populate` does something here."""
        return bool(lib.cxl_media_populates(self.handle))

    def populate(self, offset: int, length: int) -> int:
        """Map the pages of a range for writing ahead of the writer: bytes for which that was done,
        none where it would cost more than memory. No byte changes; the GIL is not held.
        """
        done = int(lib.cxl_media_populate(self.handle, offset, length))
        if done < 0:
            raise InvariantError(f"a range beyond the media: {offset} + {length}")
        return done

    def write_back(self, offset: int, length: int) -> None:
        """Begin to make a range durable; :meth:`fence` completes it. Raises as :meth:`store`."""
        if offset < 0 or length < 0:
            self._check_range(offset, length)
        code = _write_back(self._handle or self.handle, offset, length)
        if code != 0:
            self._raise_error(code, "written back", offset, length, not_durable=True)

    def fence(self) -> None:
        """Complete what this thread wrote back or copied (PAGE: what any thread did).

        Raises MediaError when it failed; for PAGE then at every later call too, because the kernel
        reports a lost page once and forgets it.
        """
        code = _fence(self._handle or self.handle)
        if code != 0:
            self._raise_error(code, "made durable", 0, self.size_bytes, not_durable=True)

    def persist(self, offset: int, length: int) -> None:
        """:meth:`write_back` and :meth:`fence`."""
        self.write_back(offset, length)
        self.fence()

    # -------------------------------------------------------------------------------- recorder

    def record(self, *, on: bool) -> None:
        """Start with an empty log, or stop and keep it."""
        lib.cxl_media_record(self.handle, int(on))

    def record_mark(self, tag: int) -> None:
        """Put a MARK with ``tag`` (64 bits) into the log; without effect while not recording."""
        if lib.cxl_media_record_mark(self.handle, tag) != 0:
            raise OutOfMemoryError("no memory for the recorder's log")

    def recorded(self) -> bytes:
        """The log so far: ``cxl_event`` entries, each with its payload padded to 8 bytes."""
        log, length = ffi.new("const void **"), ffi.new("uint64_t *")
        lib.cxl_media_record_view(self.handle, log, length)
        return bytes(ffi.buffer(log[0], length[0])) if length[0] else b""

    def unguarded_memory(self) -> memoryview:
        """The mapping itself, past guard and recorder: for simulated media only. Writable unless
        the mapping is not; void after :meth:`close`.
        """
        return memoryview(ffi.buffer(lib.cxl_media_base(self.handle), self.size_bytes))

    # ---------------------------------------------------------------------------------- errors

    def describe_fault(self) -> str | None:
        """Why the last access may have failed, when the source itself can tell."""
        return None

    def _check_range(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size_bytes:
            raise MediaError(
                f"bytes {offset} to {offset + length} lie outside the media "
                f"of {self.size_bytes} bytes",
                offset=offset,
                length=length,
            )

    def _raise_error(
        self,
        code: int,
        verb: str,
        offset: int,
        length: int,
        *,
        fault_offset: int | None = None,
        not_durable: bool = False,
    ) -> None:
        """The error of a failed call; with ``fault_offset`` it names the byte that faulted."""
        if code == -errno.ERANGE:
            self._check_range(offset, length)
        if code == -errno.EROFS:
            raise ReadOnlyError("the media is mapped read-only")
        if code == -errno.ENOMEM:
            raise OutOfMemoryError("no memory for the recorder's log")
        if code == -errno.EINVAL:
            raise InvariantError(f"offset {offset} of a word is not a multiple of 8")
        text = f"{length} bytes at media offset {offset} could not be {verb}"
        if fault_offset is not None:
            text += f" (fault at {fault_offset})"
            offset, length = fault_offset, offset + length - fault_offset
        reason = self.describe_fault()
        raise MediaError(
            f"{text}: {reason}" if reason else text,
            offset=offset,
            length=length,
            not_durable=not_durable,
        )
