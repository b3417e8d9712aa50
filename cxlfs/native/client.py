"""Files that this process stores into by itself, and content that it looks at in place: the Python
face of ``csrc/client/client.h`` and ``csrc/library/cxlfs_client.h``.

Never: opens or closes the descriptors that it is given, but those that it says so of; needs NumPy.

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
    verified_bytes: int
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


class LibraryFile:
    """A file as programs in C have it (``csrc/library``): directly where that can be, else through
    the kernel. Threads may share it, but for its end.
    """

    def __init__(self, handle: Any) -> None:
        """Raises OSError where the call that gave it failed."""
        if handle == ffi.NULL:
            _require(-ffi.errno)
        self._handle = handle

    @classmethod
    def of(cls, descriptor: int, flags: int) -> LibraryFile:
        """``descriptor``, opened with ``flags``, is closed with it. Raises OSError: it is not."""
        return cls(lib.cxlfs_fdopen(descriptor, flags))

    @classmethod
    def replacing(cls, path: bytes) -> LibraryFile:
        """A file that :meth:`revert` brings back, or removes, as it does when its end fails."""
        if b"\0" in path:
            raise ValueError("embedded null byte")
        return cls(lib.cxlfs_replace(path, 0o666))

    def why_not(self) -> tuple[str, int] | None:
        """Why nothing is written directly, and the errno of it; None: it may be."""
        number = ffi.new("int *")
        reason = lib.cxlfs_why_not(self._handle, number)
        return None if reason == ffi.NULL else (ffi.string(reason).decode(), int(number[0]))

    def descriptor(self) -> int:
        return int(self._done(lib.cxlfs_fileno(self._handle)))

    def write_at(self, data: Buffer, offset: int) -> int:
        """All of it: how many bytes these are. Raises OSError; then a part may be there. The GIL is
        not held.
        """
        source = ffi.from_buffer(data)
        taken: int = lib.cxlfs_pwrite(self._handle, source, len(source), offset)
        del source  # see MappedRegion._read_into
        return taken if taken >= 0 else _require(-ffi.errno)

    def read_at(self, buffer: Buffer, offset: int) -> int:
        """Bytes read; fewer than there is room for at the end of the file alone. Raises OSError.
        The GIL is not held.
        """
        target = ffi.from_buffer(buffer, require_writable=True)
        count = lib.cxlfs_pread(self._handle, target, len(target), offset)
        del target  # see MappedRegion._read_into
        return int(self._done(count))

    def truncate(self, size: int) -> None:
        self._done(lib.cxlfs_truncate(self._handle, size))

    def flush(self) -> None:
        """What was written is content for whoever looks. Raises OSError."""
        self._done(lib.cxlfs_flush(self._handle))

    def revert(self) -> None:
        """Give up what was written, for files that are overwritten. Raises OSError."""
        self._done(lib.cxlfs_revert(self._handle))

    def close(self) -> None:
        """No other call may be under way. Raises OSError, and is closed all the same."""
        handle, self._handle = self._handle, None
        self._done(lib.cxlfs_close(handle))

    def _done(self, result: int) -> int:
        return result if result >= 0 else _require(-ffi.errno)


class StoredContent:
    """The content of a file as it was at one moment, where this process has mapped the medium
    already: piece by piece.
    """

    def __init__(self, descriptor: int, *, done: Callable[[], None]) -> None:
        """``descriptor``: open for reading; nothing else may be mapped with it. ``done`` is called
        when nobody refers to this any more: it may be closed then, and not before. Raises OSError
        (then ``done`` is not called).
        """
        out = ffi.new("cxl_mapped **")
        _require(lib.cxl_mapped_open(descriptor, lib.CXL_MAPPED_COMPARE, out))
        handle = out[0]

        def gone(_pointer: object) -> None:
            lib.cxl_mapped_close(handle)
            done()

        self._handle: Any = ffi.gc(handle, gone)
        self.size_bytes = int(lib.cxl_mapped_size(handle))

    def verify(self, offset: int, length: int) -> None:
        """Compare all chunks that lie in a part of the range, each once, whatever others have
        verified. Raises OSError: EIO names the damaged bytes; ERANGE; ENXIO in a forked child.
        """
        bad_offset, bad_length = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        result = lib.cxl_mapped_verify(self._handle, offset, length, bad_offset, bad_length)
        _require_right(result, bad_offset, bad_length)

    def pieces(self, offset: int, length: int) -> list[memoryview] | None:
        """The bytes as they lie, one piece behind the other; nothing was verified. None: some lie
        nowhere. Of a forked child's memory they are no part.
        """
        found, end, run = [], offset + length, ffi.new("uint64_t *")
        while offset < end:
            place = lib.cxl_mapped_lies(self._handle, offset, run)
            if place == ffi.NULL:
                return None
            keeper, size = self._handle, min(int(run[0]), end - offset)
            # Whoever has the buffer has the pointer, and with it what holds the bytes there.
            pointer = ffi.gc(ffi.cast("char *", place), lambda _, kept=keeper: _keep(kept))
            found.append(memoryview(ffi.buffer(pointer, size)).toreadonly())
            offset += size
        return found


def _require_right(result: int, bad_offset: Any, bad_length: Any) -> None:
    if result == -errno.EIO:
        end = bad_offset[0] + bad_length[0]
        raise OSError(errno.EIO, f"damaged: bytes {bad_offset[0]} to {end}")
    _require(result)


class MappedContent:
    """The content of a file as it was at one moment, as memory."""

    def __init__(
        self,
        descriptor: int,
        *,
        verified: bool,
        alone: bool = False,
        done: Callable[[], None],
        private: bool = False,
    ) -> None:
        """``descriptor``: open for reading; nothing else may be mapped with it. ``done`` is called
        when the memory is gone: it may be closed then, and not before. ``private``: the memory may
        be written to, and the file stays as it is. ``alone``: nothing that
        others have verified counts. Raises OSError (then ``done`` is not called); EIO: it is
        damaged.
        """
        out = ffi.new("cxl_mapped **")
        flags = lib.CXL_MAPPED_PRIVATE if private else 0
        flags |= lib.CXL_MAPPED_ALONE if alone else 0
        self._private = private
        _require(lib.cxl_mapped_open(descriptor, flags, out))
        handle = out[0]
        # While there are no pages: of 2 GiB in those of 4 KiB it takes 12 ms.
        code = int(lib.cxl_mapped_permit_writes(handle)) if private else 0
        if code == 0 and verified:
            code = int(lib.cxl_mapped_verify_all(handle, ffi.NULL, ffi.NULL))
        if code != 0:
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
        """Compare all chunks that lie in a part of the range, each once; all of it by several
        threads, together with whoever maps the same. Raises OSError: EIO names the damaged bytes;
        ERANGE.
        """
        bad_offset, bad_length = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        is_whole = 0 < length == self.size_bytes
        is_verified = bool(lib.cxl_mapped_is_verified(self._handle))
        if is_whole and not is_verified:
            result = lib.cxl_mapped_verify_all(self._handle, bad_offset, bad_length)
        else:
            result = lib.cxl_mapped_verify(self._handle, offset, length, bad_offset, bad_length)
        if is_whole and is_verified and self._private:
            lib.cxl_mapped_touch(self._handle)
        _require_right(result, bad_offset, bad_length)

    def close(self) -> None:
        """Refer to it no more; views of the memory go on. Idempotent."""
        self._handle = None


def _keep(_handle: object) -> None:
    """Called with the last view: until then its closure kept the mapping."""
