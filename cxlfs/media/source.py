"""Media on something that has a descriptor: the parts that DAX devices, files and block devices
have in common.

Never: decides which kind of media a source is (``open`` does).
"""

from __future__ import annotations

import contextlib
import os
import secrets

from cxlfs.errors import MediaError
from cxlfs.media import locks
from cxlfs.media.base import DirtyShutdown, Identity, Media
from cxlfs.media.pages import SMALL_PAGE_BYTES, MappedPages
from cxlfs.media.room import VOLATILE_FILE_SYSTEMS, file_system_of
from cxlfs.media.sysfs import Region
from cxlfs.native import MediaHandle


class SourceMedia(Media):
    """Owns ``descriptor``, and with it the lock on the source, until :meth:`close`."""

    def __init__(
        self,
        handle: MediaHandle,
        *,
        kind: str,
        path: str,
        descriptor: int,
        read_only: bool,
        region: Region | None = None,
        alignment_bytes: int = 4096,
        only_page_bytes: int | None = None,
    ) -> None:
        """``only_page_bytes``: the size of every page of the mapping, where the source has no
        other.
        """
        super().__init__(handle, kind=kind, path=path, read_only=read_only)
        self.alignment_bytes = alignment_bytes
        self.persistence_domain = region.persistence_domain if region is not None else None
        self.volatile = kind == "file" and file_system_of(descriptor) in VOLATILE_FILE_SYSTEMS
        self._descriptor = descriptor
        self._region = region
        self._only_page_bytes = only_page_bytes

    def close(self) -> None:
        """Unmap, then let go of the source and its lock. Idempotent."""
        super().close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def identity(self) -> Identity:
        """By the name that the source has now."""
        status = os.fstat(self._descriptor)
        path = os.readlink(f"/proc/self/fd/{self._descriptor}")  # noqa: PTH115  no link of ours
        return Identity(path, status.st_dev, status.st_ino, status.st_rdev, self.kind == "fsdax")

    def locked_ranges(self, start: int = 0, end: int | None = None) -> locks.Ranges:
        """A system that knows no such locks has none."""
        with contextlib.suppress(OSError):
            return locks.locked_ranges(
                self._descriptor, start, self.size_bytes if end is None else end
            )
        return []

    def begin_watch(self) -> int | None:
        """By a number that no daemon has given, nor will: readers of one that is dead still ask."""
        watch = secrets.randbelow(locks.WATCHES)
        try:
            locks.lock_watch(self._descriptor, watch)
        except OSError:
            return None
        return locks.WATCHES_FROM + watch

    def end_watch(self, place: int) -> None:
        try:
            locks.unlock_watch(self._descriptor, place - locks.WATCHES_FROM)
        except OSError as error:
            raise MediaError(f"cannot unlock {place} of {self.path}: {error.strerror}") from error

    def dirty_shutdown(self) -> DirtyShutdown:
        return self._region.dirty_shutdown() if self._region else super().dirty_shutdown()

    def mapped_pages(self) -> MappedPages:
        size_bytes = self._only_page_bytes
        if size_bytes is None:
            return super().mapped_pages()
        return MappedPages(size_bytes, float(size_bytes > SMALL_PAGE_BYTES))

    def describe_fault(self) -> str | None:
        with contextlib.suppress(OSError):
            size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
            if 0 < size_bytes < self.size_bytes or (size_bytes == 0 and self.kind != "devdax"):
                return f"{self.path} shrank from {self.size_bytes} to {size_bytes} bytes"
        return None
