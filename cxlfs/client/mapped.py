"""The content of a file as memory: pages of the store itself where they can be had.

Never here: writing; a byte of ``read`` and of slices that was not verified, unless asked for.

Invariants
- On a mounted store it is the content of the moment of ``map``, whatever becomes of the file.
- Memory stays as long as anybody refers to it, also behind ``close``.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import mmap
import os
from typing import TYPE_CHECKING, Self

from cxlfs.native.client import MappedContent, StoredContent

if TYPE_CHECKING:
    from types import TracebackType

    from _typeshed import StrOrBytesPath


_log = logging.getLogger("cxlfs.client")
_told: set[int] = set()
"""Mounts of which the log has said that they have no private pages."""


class Verify(enum.Enum):
    """When bytes are compared with their checksums. Where programs have verified all of the same
    content lately (mount option ``verified_for``) they are not compared again, but with ``ALWAYS``.
    """

    FIRST_USE = "first use"
    """In ``read``, slices and ``verify``, each chunk once; not by looking at ``view``."""
    ALL = "all"
    """All, before ``map`` returns."""
    ALWAYS = "always"
    """All, before ``map`` returns, whatever others have verified."""
    NO = "no"
    """When ``verify`` is called."""


def map(  # noqa: A001
    path: StrOrBytesPath, verify: Verify | str = Verify.FIRST_USE, *, private: bool = False
) -> MappedFile:
    """The content of a file, to be read; ``private``: and to be written to, which changes this
    memory alone, and no file. Raises OSError: as open(2), and EIO for damage.

    Where the store's own pages cannot be had it is mapped as any file is: then the mount verifies.
    """
    return MappedFile(path, Verify(verify), private=private)


class MappedFile:
    """What ``map`` gives. ``len`` is its size in bytes, a slice of it a view of verified memory."""

    def __init__(self, path: StrOrBytesPath, verify: Verify, *, private: bool = False) -> None:
        self.path = path
        self.why_not: str | None = None
        """Why it is mapped as any file is; None: it is not."""
        self._verifies = verify is Verify.FIRST_USE
        self._content: MappedContent | None = None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._content = MappedContent(
                descriptor,
                verified=verify in {Verify.ALL, Verify.ALWAYS},
                alone=verify is Verify.ALWAYS,
                done=lambda: _close(descriptor),
                private=private,
            )
            self._view: memoryview | None = self._content.memory()
        except OSError as error:
            with contextlib.ExitStack() as steps:
                steps.callback(_close, descriptor)
                if error.errno == errno.EIO:
                    raise OSError(errno.EIO, error.strerror, os.fspath(path)) from error
                self.why_not = _why_not(error, descriptor, private=private)
                self._view = _mapped_by_kernel(descriptor, private=private)
        self._size_bytes = len(self.view)

    @property
    def direct(self) -> bool:
        """It is memory of the store."""
        return self.why_not is None

    @property
    def copied_bytes(self) -> int:
        """Of it, as copies: they do not lie page by page on the medium."""
        return 0 if self._content is None else self._content.copied_bytes

    @property
    def view(self) -> memoryview:
        """All of it, as it is: see :class:`Verify`."""
        if self._view is None:
            raise ValueError("it is closed")
        return self._view

    def __len__(self) -> int:
        return self._size_bytes

    def __getitem__(self, part: slice) -> memoryview:
        start, end, step = part.indices(self._size_bytes)
        if step != 1:
            raise ValueError("a slice in steps of 1")
        return self.read(start, max(end - start, 0))

    def read(self, offset: int, length: int) -> memoryview:
        """A view of a range, cut at the end of the file, verified unless :attr:`Verify.NO`. Raises
        OSError: EIO for damage.
        """
        if offset < 0 or length < 0:
            raise ValueError(f"range {offset} + {length}")
        length = min(length, max(len(self.view) - offset, 0))
        if self._verifies and length:
            self.verify(offset, length)
        return self.view[offset : offset + length]

    def verify(self, offset: int = 0, length: int | None = None) -> None:
        """Compare a range with its checksums, each chunk once; all of it by several threads, and
        together with other processes that map it just now. Raises OSError: EIO names the file and
        the bytes, ERANGE where it leaves the file.
        """
        size = len(self.view)  # who keeps the error keeps this frame, and not the memory with it
        length = size - offset if length is None else length
        if not 0 <= offset <= offset + length <= size:
            raise OSError(errno.ERANGE, f"range {offset} + {length} of {size} bytes")
        if self._content is not None:
            try:
                self._content.verify(offset, length)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error

    def close(self) -> None:
        """Refer to it no more; views go on. Idempotent."""
        self._view = None
        if self._content is not None:
            self._content.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class StoredFile:
    """The content of a file piece by piece, as it lies on the medium, which this process has mapped
    once for all files: that spares mapping each. It is held there until nobody refers to this, or
    to a piece of it. Not for a forked child.
    """

    def __init__(self, path: StrOrBytesPath) -> None:
        """Raises OSError: also where the medium is not to be had, and a mount has to verify."""
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._content = StoredContent(descriptor, done=lambda: _close(descriptor))
        except OSError:
            _close(descriptor)
            raise

    def __len__(self) -> int:
        return self._content.size_bytes

    def pieces(self, offset: int, length: int) -> list[memoryview] | None:
        """The bytes, unverified. None: some lie nowhere, as in a hole, or behind the end."""
        return self._content.pieces(offset, length)

    def verify(self, offset: int, length: int) -> None:
        """As that of :class:`MappedFile`."""
        try:
            self._content.verify(offset, length)
        except OSError as error:
            raise OSError(error.errno, error.strerror, os.fspath(self.path)) from error


def _why_not(error: OSError, descriptor: int, *, private: bool) -> str:
    """Why the kernel has to map it; the log says so of pages that may be written to, once for each
    mount.
    """
    if not private or error.errno != errno.EINVAL:
        return error.strerror or "unknown"
    why = "the medium has no private pages"
    mount = os.fstat(descriptor).st_dev
    if mount not in _told:
        _told.add(mount)
        _log.info("what is mapped to be written to goes through the kernel: %s", why)
    return why


def _close(descriptor: int) -> None:
    """Of a file that was only read: a daemon that is gone takes nothing along."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _mapped_by_kernel(descriptor: int, *, private: bool) -> memoryview:
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == 0:
        return memoryview(b"")
    access = mmap.ACCESS_COPY if private else mmap.ACCESS_READ
    return memoryview(mmap.mmap(descriptor, size_bytes, access=access))
