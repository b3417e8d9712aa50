"""A binary file of which the bytes go directly from the program's memory into the store, and from
there into it.

Never here: commits but those of close(2) and fsync(2); text; buffering of what is read.

Invariants
- What was written is read by the same object, and told by ``tell``, ``seek`` and ``truncate``, at
  once; others see it from ``flush`` on, as with any buffered file.
- A piece that cannot go directly goes through the kernel, behind all that was written before.
- What is discarded was never published, where the file system can do that.
- A forked child has what the parent had written before the fork, and nothing that waited. It reads
  through the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import threading
from typing import TYPE_CHECKING

from cxlfs.client.gathering import Gathering
from cxlfs.native.client import LibraryFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, StrOrBytesPath, WriteableBuffer

_log = logging.getLogger("cxlfs.client")
_told: set[int] = set()
"""Mounts of which the log has said why they are written to through the kernel."""

_READ_FROM_BYTES = 4 << 10
"""Shorter reads are the kernel's."""

_KINDS = {
    "r": 0,
    "w": os.O_CREAT | os.O_TRUNC,
    "x": os.O_CREAT | os.O_EXCL,
    "a": os.O_CREAT | os.O_APPEND,
}


def _flags_of(mode: str) -> int:
    kind = mode.replace("b", "", 1).replace("+", "", 1)
    if kind not in _KINDS or "b" not in mode:
        raise ValueError(f"mode {mode!r}: one of r, w, x and a, with b, and + or not")
    access = os.O_RDWR if "+" in mode else os.O_RDONLY if kind == "r" else os.O_WRONLY
    return access | _KINDS[kind] | os.O_CLOEXEC


def open(path: StrOrBytesPath, mode: str = "rb") -> File:  # noqa: A001  see cxlfs.client
    """A file as the built-in open gives it in binary modes, small writes gathered.

    On a mounted store bytes go directly where that can be; elsewhere it is a plain file. Raises
    OSError as open(2), ValueError for a mode.
    """
    return File(path, mode)


class File(io.RawIOBase):
    """Threads may share it: ``write_at`` runs beside itself, everything else takes turns."""

    def __init__(
        self, path: StrOrBytesPath, mode: str = "rb", made: LibraryFile | None = None
    ) -> None:
        """``made``: the file itself, open already."""
        self._file: LibraryFile | None = None
        flags = _flags_of(mode)
        self._lock = threading.RLock()
        self._waiting = Gathering()
        self._position = 0
        self._appends = bool(flags & os.O_APPEND)
        self._access = flags & os.O_ACCMODE
        self._replaces = made is not None
        self._file = made or _opened(path, flags)
        self._descriptor = self._file.descriptor()
        self._process = os.getpid()
        self.name = path
        self.mode = mode
        self.why_not: str | None = None
        """Why nothing is written directly; None: it may be."""
        if self._access == os.O_RDONLY:
            self.why_not = "it is not open for writing"
        elif (refused := self._file.why_not()) is not None:
            self.why_not = refused[0]
            self._tell(refused[1])

    def _tell(self, error: int) -> None:
        """Once of each mount."""
        mount = os.fstat(self._descriptor).st_dev
        if error not in {errno.ENOTTY, errno.EINVAL} and mount not in _told:
            _told.add(mount)
            _log.info("%s is written through the kernel: %s", self.name, self.why_not)

    @property
    def direct(self) -> bool:
        """Bytes may go directly. How many did: ``cxlfs.client.counts``."""
        return self.why_not is None

    # --- writing --------------------------------------------------------------------------------

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it, at the current position. Raises OSError; then a part may be there."""
        view = _bytes_of(data)
        with self._lock:
            self._require(writing=True)
            if self._appends:
                self._position = os.fstat(self._descriptor).st_size
            if not self._waiting.accepts(view, self._position):
                self._store_waiting()
            if self._waiting.accepts(view, self._position):
                self._waiting.put(view, self._position)
                if self._waiting.is_full or self._appends:
                    self._store_waiting()
            else:
                self._open().write_at(view, self._position)
            self._position += len(view)
        return len(view)

    def write_at(self, data: ReadableBuffer, offset: int) -> int:
        """All of it, at ``offset``; the position stays. Several threads store at the same time."""
        if self._waiting or self._file is None or self._access == os.O_RDONLY:
            with self._lock:
                self._require(writing=True)
                self._store_waiting()
        if type(data) is not memoryview or not data.c_contiguous:  # 0.4 µs, of 27 for 1 MiB
            data = _bytes_of(data)
        return self._open().write_at(data, offset)

    def _store_waiting(self) -> None:
        if self._waiting:
            offset, data = self._waiting.take()
            if os.getpid() == self._process:
                self._open().write_at(data, offset)

    def flush(self) -> None:
        """What was written is there for whoever looks. No commit: that is fsync or close."""
        if self.closed or self._file is None or self._access == os.O_RDONLY:
            return
        with self._lock:
            self._store_waiting()
            self._file.flush()

    def truncate(self, size: int | None = None, /) -> int:
        """As ftruncate; None: to the current position."""
        with self._lock:
            self._require(writing=True)
            self._store_waiting()
            size = self._position if size is None else size
            self._open().truncate(size)
            return size

    # --- reading --------------------------------------------------------------------------------

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        with self._lock:
            self._require(writing=False)
            self._store_waiting()
            count = self._open().read_at(buffer, self._position)
            self._position += count
            return count

    def readall(self) -> bytes:
        """From the current position to the end."""
        with self._lock:
            self._require(writing=False)
            self._store_waiting()
            rest = os.fstat(self._descriptor).st_size - self._position
            pieces = []
            while piece := self.read(max(rest + 1, _READ_FROM_BYTES)):
                pieces.append(piece)
                rest -= len(piece)
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    # --- place ----------------------------------------------------------------------------------

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        with self._lock:
            self._require()
            if whence == os.SEEK_SET:
                place = offset
            elif whence == os.SEEK_CUR:
                place = self._position + offset
            elif whence == os.SEEK_END:
                self.flush()
                place = os.fstat(self._descriptor).st_size + offset
            else:
                raise ValueError(f"whence {whence}: 0, 1 or 2")
            if place < 0:
                raise OSError(errno.EINVAL, f"seek to {place}")
            self._position = place
            return place

    def tell(self) -> int:
        self._require()
        return self._position

    def seekable(self) -> bool:
        self._require()
        return True

    def readable(self) -> bool:
        self._require()
        return self._access != os.O_WRONLY

    def writable(self) -> bool:
        self._require()
        return self._access != os.O_RDONLY

    def fileno(self) -> int:
        """The descriptor, at the current position, all that was written before in the file."""
        with self._lock:
            self._require()
            self.flush()
            os.lseek(self._descriptor, self._position, os.SEEK_SET)
            return self._descriptor

    # --- end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """The end of the descriptor, which commits. Raises OSError with what became of what was
        written, closed all the same. Idempotent.
        """
        if self.closed or self._file is None:
            super().close()
            return
        with self._lock, contextlib.ExitStack() as steps:
            steps.callback(self._is_closed)
            steps.callback(self._file.close)
            if self._access != os.O_RDONLY:
                self._store_rest()

    def _store_rest(self) -> None:
        """What still waits; where that fails, a file that is replaced is not."""
        try:
            self._store_waiting()
        except OSError:
            if self._replaces:
                with contextlib.suppress(OSError):
                    self._open().revert()
            raise

    def discard(self) -> None:
        """The end without what was written: on a mounted store a file that was overwritten has its
        old content again. What another file system has lost is not there again: there it is empty,
        as a file that was made anew is. For modes w and x. Idempotent; raises UnsupportedOperation.
        """
        if "w" not in self.mode and "x" not in self.mode:
            raise io.UnsupportedOperation("it is no overwrite")
        with self._lock:
            if self.closed or self._file is None:
                return
            self._waiting.take()
            with contextlib.suppress(OSError):
                self._file.revert()
            with contextlib.suppress(OSError):
                self.close()

    def _is_closed(self) -> None:
        self._file = None
        super().close()

    def _open(self) -> LibraryFile:
        if self.closed or self._file is None:
            raise ValueError("I/O operation on closed file")
        return self._file

    def _require(self, *, writing: bool | None = None) -> None:
        self._open()
        if writing is True and self._access == os.O_RDONLY:
            raise io.UnsupportedOperation("not open for writing")
        if writing is False and self._access == os.O_WRONLY:
            raise io.UnsupportedOperation("not open for reading")
        if writing and os.getpid() != self._process:
            self._waiting.take()  # the parent writes it
            self._process = os.getpid()


def _opened(path: StrOrBytesPath, flags: int) -> LibraryFile:
    descriptor = os.open(path, flags, 0o666)
    try:
        return LibraryFile.of(descriptor, flags)
    except OSError:
        os.close(descriptor)
        raise


def _bytes_of(data: ReadableBuffer) -> memoryview:
    """The same memory as bytes; a copy where it is not in one piece."""
    view = memoryview(data)
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    return view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
