"""Opening a source: what it is, whether it can hold a store, who else uses it.

Never: guesses. What is neither persistent memory nor a file or block device is refused with one
clear error; a source that exists is never cut or replaced.

Invariants
- A file created here is removed again when anything fails before it is returned.
- The descriptor is closed on every failure.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cxlfs.errors import BusyError, CxlfsError, MediaUnavailableError, UsageError
from cxlfs.media import dax, file
from cxlfs.media.base import Media
from cxlfs.media.lock import PROC, lock_source
from cxlfs.media.sysfs import SYSFS

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
}


@dataclass(frozen=True, slots=True)
class _Request:
    path: str
    read_only: bool
    create_size_bytes: int | None
    exclusive: bool
    sysfs: Path
    proc: Path


def open_media(
    source: str | Path,
    *,
    read_only: bool = False,
    create_size_bytes: int | None = None,
    exclusive: bool = True,
    sysfs: Path = SYSFS,
    proc: Path = PROC,
) -> Media:
    """Map ``source``: a persistent /dev/daxX.Y, a file (DAX or ordinary) or a block device.

    With ``create_size_bytes`` a missing, empty or smaller file is made that long, all of it
    allocated. ``exclusive`` takes a lock (a shared one for ``read_only``) that ends with
    :meth:`Media.close`. ``sysfs`` and ``proc`` are the places to look at, for tests.

    Raises MediaUnavailableError, NotPersistentError, BusyError (naming the owner), NoSpaceError,
    UsageError, MediaError, OutOfMemoryError.
    """
    if create_size_bytes is not None and (read_only or create_size_bytes <= 0):
        raise UsageError("a file can only be created writable, with a size above 0")
    request = _Request(str(source), read_only, create_size_bytes, exclusive, sysfs, proc)
    descriptor, created = _open_descriptor(request)
    try:
        return _map(descriptor, request)
    except BaseException:
        os.close(descriptor)
        if created:
            with contextlib.suppress(OSError):
                Path(request.path).unlink()
        raise


def _open_descriptor(request: _Request) -> tuple[int, bool]:
    """The descriptor, and whether the file is new."""
    try:
        mode = Path(request.path).stat().st_mode
    except FileNotFoundError:
        if request.create_size_bytes is None:
            raise MediaUnavailableError(
                f"{request.path} does not exist",
                next_step="check the path; cxlfs mkfs with a size creates a file",
            ) from None
        return _create(request.path), True
    except (OSError, ValueError) as error:
        raise MediaUnavailableError(f"{request.path!r}: {_reason(error)}") from error
    _refuse_kind(request.path, mode)
    flags = os.O_RDONLY if request.read_only else os.O_RDWR
    if stat.S_ISBLK(mode) and request.exclusive and not request.read_only:
        flags |= os.O_EXCL  # for a block device: fails while it is mounted
    try:
        descriptor = os.open(request.path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise _open_error(request, error) from error
    if stat.S_IFMT(os.fstat(descriptor).st_mode) != stat.S_IFMT(mode):
        os.close(descriptor)
        raise MediaUnavailableError(f"{request.path} was replaced while it was opened")
    return descriptor, False


def _create(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o600)
    except (OSError, ValueError) as error:
        raise MediaUnavailableError(f"{path} cannot be created: {_reason(error)}") from error


def _refuse_kind(path: str, mode: int) -> None:
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise MediaUnavailableError(
            f"{path} is {kind}; a store needs a DAX device, a file or a block device",
            next_step="name a file in it, like DIRECTORY/store.img"
            if stat.S_ISDIR(mode)
            else "name another source",
        )


def _open_error(request: _Request, error: OSError) -> CxlfsError:
    path = request.path
    if error.errno in (errno.EBUSY, errno.ETXTBSY):
        return BusyError(
            f"{path} is in use: mounted as something else, or held by another program",
            next_step=f"see who has it: findmnt -S {path}, lsof {path}",
        )
    writable_missing = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
    if writable_missing and not request.read_only and os.access(path, os.R_OK, effective_ids=True):
        return MediaUnavailableError(
            f"{path} may only be read: {_reason(error)}",
            next_step="get permission to write it, or open the store read-only (-o ro)",
        )
    if error.errno == errno.ENXIO:
        return dax.without_driver(path, request.sysfs)
    return MediaUnavailableError(f"{path} cannot be opened: {_reason(error)}")


def _reason(error: OSError | ValueError) -> str:
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def _map(descriptor: int, request: _Request) -> Media:
    path, read_only, wanted_bytes = request.path, request.read_only, request.create_size_bytes
    if request.exclusive:
        lock_source(descriptor, path, shared=read_only, proc=request.proc)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        if stat.S_ISBLK(mode):
            media: Media = file.open_block(descriptor, path, read_only=read_only)
        else:
            media = dax.open_device(
                descriptor,
                path,
                read_only=read_only,
                sysfs=request.sysfs,
                proc=request.proc if request.exclusive else None,
            )
        _refuse_size(media, wanted_bytes)
        return media
    if wanted_bytes is not None:
        file.grow(descriptor, path, wanted_bytes)
    size_bytes = os.fstat(descriptor).st_size
    if size_bytes == 0:
        raise MediaUnavailableError(
            f"{path} is empty", next_step="give it a size: cxlfs mkfs --size SIZE"
        )
    file.require_mappable(descriptor, path, size_bytes)
    return dax.open_dax_file(
        descriptor, path, size_bytes, read_only=read_only, sysfs=request.sysfs
    ) or file.open_file(descriptor, path, size_bytes, read_only=read_only)


def _refuse_size(media: Media, wanted_bytes: int | None) -> None:
    if wanted_bytes is not None and wanted_bytes != media.size_bytes:
        raise UsageError(
            f"{media.path} is a device of {media.size_bytes} bytes; a size is for files",
            next_step="leave the size out",
        )
