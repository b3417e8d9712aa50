"""Files that this process stores into by itself, and content that it looks at in place: the Python
face of ``csrc/client/client.h``.

Never: opens or closes the descriptors that it is given; needs NumPy.

Invariants
- What fails here fails as it would with the descriptor itself: OSError.
- Memory of a mapped content stays as long as anything refers to it, also behind its close().
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from cxlfs._native import ffi, lib

if TYPE_CHECKING:
    from typing_extensions import Buffer


class ClientCounts(NamedTuple):
    """Of this process, since it began: see ``cxl_client_counts``."""

    direct_bytes: int
    fuse_bytes: int
    leases: int
    settles: int
    mapped_bytes: int
    copied_bytes: int
    read_bytes: int
    refused: int
    last_errno: int
    media: int


def counts() -> ClientCounts:
    """What went directly, and what did not."""
    out = ffi.new("cxl_client_counts *")
    lib.cxl_client_statistics(out)
    return ClientCounts(*(int(getattr(out, name)) for name in ClientCounts._fields))


def forget() -> None:
    """Let go of media of which no file is in use just now."""
    lib.cxl_client_forget()


def _require(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def lent(view: memoryview) -> memoryview:
    """The same memory, without the word that it may not be written to: for interfaces that take no
    other, and read it only.
    """
    return memoryview(ffi.buffer(ffi.from_buffer(view)))


class DirectFile:
    """A descriptor through which this process stores file data by itself. Threads may share it."""

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: open for writing, and open until this is closed. Raises OSError where it
        must go through the kernel: no file of a mount, not this user, the medium is out of sight.
        """
        out = ffi.new("cxl_direct_file **")
        _require(lib.cxl_direct_open(descriptor, out))
        self._handle: Any = out[0]

    def write(self, data: Buffer, offset: int) -> int:
        """Content of the file at ``offset`` once it is settled: bytes taken, from the first one on.
        0: these must go through the kernel. Raises OSError. The GIL is not held.
        """
        source = ffi.from_buffer(data)
        taken = lib.cxl_direct_pwrite(self._handle, source, len(source), offset)
        del source  # see MappedRegion._read_into
        return 0 if taken == -errno.EAGAIN else _require(int(taken))

    def settle(self) -> None:
        """What was taken is content for whoever looks. Raises OSError."""
        _require(lib.cxl_direct_settle(self._handle))

    def close(self) -> None:
        """Settle, and give all room back; no other call may be under way. Raises OSError, and is
        closed all the same. Idempotent.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            _require(lib.cxl_direct_close(handle))


class DirectReader:
    """A descriptor through which this process reads a file out of the medium. Threads may share it,
    but for its end.
    """

    def __init__(self, descriptor: int) -> None:
        """``descriptor``: open for reading alone, and nothing is mapped with it. Raises OSError:
        where it must be read through the kernel; EBUSY: for now, it is open for writing.
        """
        out = ffi.new("cxl_reader **")
        _require(lib.cxl_reader_open(descriptor, out))
        self._handle: Any = out[0]
        self.size_bytes = int(lib.cxl_reader_size(self._handle))

    def holds(self) -> bool:
        """The file is what it was, and can be read."""
        return bool(lib.cxl_reader_holds(self._handle))

    def read_into(self, buffer: Buffer, offset: int) -> int | None:
        """Bytes read, verified; fewer than there is room for at the end of the file alone. None:
        this is to be read through the kernel; see :meth:`holds`. The GIL is not held.
        """
        target = ffi.from_buffer(buffer, require_writable=True)
        length = min(len(target), self.size_bytes - offset)
        if length <= 0:
            return None
        result = int(lib.cxl_reader_copy_one(self._handle, target, length, offset))
        del target  # see MappedRegion._read_into
        return length if result == 0 else None

    def close(self, descriptor: int = -1) -> None:
        """``descriptor``: one that stays open. No other call may be under way. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.cxl_reader_close(handle, descriptor)


class MappedContent:
    """The content of a file as it was at one moment, as memory."""

    def __init__(
        self,
        descriptor: int,
        *,
        verified: bool,
        done: Callable[[], None],
        private: bool = False,
    ) -> None:
        """``descriptor``: open for reading; nothing else may be mapped with it. ``done`` is called
        when the memory is gone: it may be closed then, and not before. ``private``: the memory may
        be written to, and the file stays as it is. Raises OSError (then
        ``done`` is not called); EIO: it is damaged.
        """
        out = ffi.new("cxl_mapped **")
        flags = lib.CXL_MAPPED_VERIFY if verified else 0
        flags |= lib.CXL_MAPPED_PRIVATE if private else 0
        self._private = private
        _require(lib.cxl_mapped_open(descriptor, flags, out))
        handle = out[0]
        if private and (code := lib.cxl_mapped_permit_writes(handle)) != 0:
            lib.cxl_mapped_close(handle)
            _require(code)

        def gone(_pointer: object) -> None:
            lib.cxl_mapped_close(handle)
            done()

        self._handle: Any = ffi.gc(handle, gone)
        self.size_bytes = int(lib.cxl_mapped_size(handle))
        self.copied_bytes = int(lib.cxl_mapped_copied(handle))

    def memory(self) -> memoryview:
        """All of it. Of bytes that were not verified nothing is promised."""
        if self.size_bytes == 0:
            return memoryview(b"")
        base = ffi.cast("char *", lib.cxl_mapped_base(self._handle))
        keeper = self._handle
        # Whoever has the buffer has the pointer, and with it what ends the mapping.
        pointer = ffi.gc(base, lambda _: _keep(keeper))
        view = memoryview(ffi.buffer(pointer, self.size_bytes))
        return view if self._private else view.toreadonly()

    def verify(self, offset: int, length: int) -> None:
        """Compare all chunks that lie in a part of the range, each once. Raises OSError: EIO names
        the damaged bytes; ERANGE.
        """
        bad_offset, bad_length = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        result = lib.cxl_mapped_verify(self._handle, offset, length, bad_offset, bad_length)
        if result == -errno.EIO:
            end = bad_offset[0] + bad_length[0]
            raise OSError(errno.EIO, f"damaged: bytes {bad_offset[0]} to {end}")
        _require(result)

    def close(self) -> None:
        """Refer to it no more; views of the memory go on. Idempotent."""
        self._handle = None


def _keep(_handle: object) -> None:
    """Called with the last view: until then its closure kept the mapping."""
