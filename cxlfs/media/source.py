"""Media on something that has a descriptor: the parts that DAX devices, files and block devices
have in common.

Never: decides which kind of media a source is (``open`` does).
"""

from __future__ import annotations

import contextlib
import os

from cxlfs.media.base import DirtyShutdown, Media
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
    ) -> None:
        super().__init__(handle, kind=kind, path=path, read_only=read_only)
        self.alignment_bytes = alignment_bytes
        self.persistence_domain = region.persistence_domain if region is not None else None
        self.volatile = kind == "file" and file_system_of(descriptor) in VOLATILE_FILE_SYSTEMS
        self._descriptor = descriptor
        self._region = region

    def close(self) -> None:
        """Unmap, then let go of the source and its lock. Idempotent."""
        super().close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def dirty_shutdown(self) -> DirtyShutdown:
        return self._region.dirty_shutdown() if self._region else super().dirty_shutdown()

    def describe_fault(self) -> str | None:
        with contextlib.suppress(OSError):
            size_bytes = os.lseek(self._descriptor, 0, os.SEEK_END)
            if 0 < size_bytes < self.size_bytes or (size_bytes == 0 and self.kind != "devdax"):
                return f"{self.path} shrank from {self.size_bytes} to {size_bytes} bytes"
        return None
