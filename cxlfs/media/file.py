"""Ordinary files and block devices: the slow but correct twin of DAX, made durable with msync.

Never: leaves a file sparse that it created: a store into a hole could fail for want of space long
after the write that caused it was answered.
"""

from __future__ import annotations

import errno
import os

from cxlfs.errors import (
    MediaError,
    MediaUnavailableError,
    NoSpaceError,
    OutOfMemoryError,
    UsageError,
)
from cxlfs.media import pages
from cxlfs.media.room import allocated_bytes, require_room
from cxlfs.media.source import SourceMedia
from cxlfs.native import Granularity, MappedRegion, MediaHandle
from cxlfs.units import format_size


class FileMedia(SourceMedia):
    """A regular file without DAX; PAGE granularity."""

    def preallocate(self) -> None:
        """Give every block of the file space below; raises NoSpaceError, MediaError."""
        # The mapping of a file on hugetlbfs has reserved its pages: they are not free any more.
        if pages.pool_of(self._descriptor) is None:
            require_room(self._descriptor, self.path, self.size_bytes)
        _allocate(self._descriptor, self.path, self.size_bytes)


def require_mappable(descriptor: int, path: str, size_bytes: int) -> None:
    """Raises MediaUnavailableError for a length that hugetlbfs cannot map."""
    pool = pages.pool_of(descriptor)
    if pool is not None:
        pool.require_whole_pages(path, size_bytes)


def open_file(descriptor: int, path: str, size_bytes: int, *, read_only: bool) -> FileMedia:
    """Map a file, and take the descriptor over; raises MediaUnavailableError, and NoSpaceError
    where mapping reserves huge pages that are not there.
    """
    pool = pages.pool_of(descriptor)
    try:
        handle, alignment_bytes = _mapped(descriptor, path, size_bytes, read_only=read_only)
    except OutOfMemoryError as error:
        if pool is None:
            raise
        raise pool.shortfall(path, size_bytes - allocated_bytes(descriptor)) from error
    return FileMedia(
        handle,
        kind="file",
        path=path,
        descriptor=descriptor,
        read_only=read_only,
        alignment_bytes=alignment_bytes,
        only_page_bytes=None if pool is None else pool.page_size_bytes,
    )


def open_block(descriptor: int, path: str, *, read_only: bool) -> SourceMedia:
    """Map a block device, and take the descriptor over; raises MediaUnavailableError."""
    size_bytes = os.lseek(descriptor, 0, os.SEEK_END)
    if size_bytes <= 0:
        raise MediaUnavailableError(
            f"{path} is a block device without a medium", next_step="attach one (lsblk shows sizes)"
        )
    handle, alignment_bytes = _mapped(descriptor, path, size_bytes, read_only=read_only)
    return SourceMedia(
        handle,
        kind="block",
        path=path,
        descriptor=descriptor,
        read_only=read_only,
        alignment_bytes=alignment_bytes,
    )


def _mapped(
    descriptor: int, path: str, size_bytes: int, *, read_only: bool
) -> tuple[MediaHandle, int]:
    """And at a multiple of how many bytes it was to be. Raises MediaUnavailableError,
    OutOfMemoryError.
    """
    alignment_bytes = pages.alignment_of(descriptor, size_bytes)
    handle = MappedRegion.map_handle(
        descriptor,
        size_bytes,
        granularity=Granularity.PAGE,
        alignment_bytes=alignment_bytes,
        read_only=read_only,
        what=path,
    )
    return handle, alignment_bytes


def grow(descriptor: int, path: str, size_bytes: int) -> None:
    """Make an empty or smaller file ``size_bytes`` long, all of it allocated.

    Raises UsageError when it is longer already, NoSpaceError naming the shortfall, MediaError;
    MediaUnavailableError for a size that no file on hugetlbfs has.
    """
    present_bytes = os.fstat(descriptor).st_size
    if present_bytes > size_bytes:
        raise UsageError(
            f"{path} is {format_size(present_bytes)} long, more than {format_size(size_bytes)}",
            next_step="leave the size out to use all of the file, or remove the file first",
        )
    require_mappable(descriptor, path, size_bytes)
    pool = pages.pool_of(descriptor)
    if pool is not None:
        pool.require(path, size_bytes - allocated_bytes(descriptor))
    else:
        require_room(descriptor, path, size_bytes)
    try:
        if present_bytes == 0:
            pages.lengthen(descriptor, size_bytes)
        _allocate(descriptor, path, size_bytes)
    except BaseException:
        os.ftruncate(descriptor, present_bytes)
        raise


def _allocate(descriptor: int, path: str, size_bytes: int) -> None:
    """posix_fallocate of the first ``size_bytes`` of a file; see ``room`` for whether it fits."""
    try:
        if os.fstat(descriptor).st_size == size_bytes:
            pages.touch_as_advised(descriptor, size_bytes)
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise MediaError(f"{path} cannot be allocated: {error.strerror}") from error
        raise _shortfall(descriptor, path, size_bytes, error) from error


def _shortfall(descriptor: int, path: str, size_bytes: int, error: OSError) -> NoSpaceError:
    """There seemed to be room, and there was not: a quota, a limit, or somebody was faster."""
    pool = pages.pool_of(descriptor)
    if pool is not None:
        return pool.shortfall(path, size_bytes - allocated_bytes(descriptor))
    system = os.fstatvfs(descriptor)
    return NoSpaceError(
        f"{path} cannot be {format_size(size_bytes)} long: "
        f"{os.strerror(error.errno or errno.ENOSPC)}",
        needed_bytes=max(size_bytes - allocated_bytes(descriptor), 0),
        available_bytes=system.f_bavail * system.f_frsize,
        next_step="choose a smaller size, or free space on that file system",
    )
