"""Which store a directory lies in, and on what: for votes, manifests and inventories.

Never: opens a store. A mount's daemon is asked, where this user may; of other directories the type
of their file system is known.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

from cxlfs.control import mountinfo
from cxlfs.control.client import control_request
from cxlfs.durable import sync_directory
from cxlfs.errors import CxlfsError, JobFilesError
from cxlfs.job.files import Medium

IDENTITY_NAME = ".cxlfs-job-store"
_IDENTITY_BYTES = 36
_HAS_LINES = b" has lines\n"
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


def identity(root: Path) -> str:
    """Of the directory that checkpoints are saved in: a UUID in a file there, made when there is
    none, so that ranks that share it know so, and a store that was made anew is another one.

    Raises JobFilesError, OSError.
    """
    root.mkdir(parents=True, exist_ok=True)
    path = root / IDENTITY_NAME
    if not path.exists():
        beside = root / f"{IDENTITY_NAME}.{uuid.uuid4()}"
        with beside.open("x") as file:
            file.write(str(uuid.uuid4()))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # of two, whose link comes first
            os.link(beside, path)
        beside.unlink()
        sync_directory(root)
    with path.open("rb") as opened:
        data = opened.read(_IDENTITY_BYTES + len(_HAS_LINES) + 1)
    if not _HAS_LINES.startswith(data[_IDENTITY_BYTES:]):
        raise JobFilesError(f"{path}: not a UUID")
    try:
        return str(uuid.UUID(data[:_IDENTITY_BYTES].decode("ascii")))
    except ValueError:
        raise JobFilesError(f"{path}: not a UUID") from None


def mark_lines(root: Path) -> None:
    """Versions that know no lines, and would resume from what was there before them, refuse the
    directory from now on. Durable on return; the file stays the one that ranks attend. Raises
    OSError.
    """
    path = root / IDENTITY_NAME
    if path.stat().st_size < _IDENTITY_BYTES + len(_HAS_LINES):
        with path.open("r+b") as opened:
            opened.seek(_IDENTITY_BYTES)
            opened.write(_HAS_LINES)
            opened.flush()
            os.fsync(opened.fileno())


def attend(root: Path) -> int:
    """A descriptor: as long as it is open, in this process or in children that have it from here, a
    rank of the job lives on this node. Behind ``identity``. Raises OSError.
    """
    descriptor = os.open(root / IDENTITY_NAME, os.O_RDONLY | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def leave(descriptor: int) -> None:
    """What ``attend`` gave; the daemon of its mount may be gone."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def has_ranks(root: Path) -> bool:
    """Whether any does. Raises OSError."""
    descriptor = os.open(root / IDENTITY_NAME, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def medium_of(root: Path) -> tuple[Medium, bool]:
    """And whether it is gone with the power, as far as that is known."""
    mount = _mount_of(root)
    if mount is None:
        return Medium(), False
    if mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        return Medium(kind=mount.file_system_type), mount.file_system_type in _IN_MEMORY
    status: Mapping[str, object] = {}
    with contextlib.suppress(CxlfsError, OSError):  # another user's daemon tells us nothing
        for message in control_request(mount.mountpoint, "status"):
            status = message
    media = status.get("media")
    if not isinstance(media, Mapping):
        return Medium(kind=mount.file_system_type), False
    kind, write_back = (str(media.get(name, "")) for name in ("kind", "write_back"))
    return Medium(str(status.get("uuid", "")), kind, write_back), media.get("volatile") is True


def _mount_of(root: Path) -> mountinfo.Mount | None:
    """The last one made at the longest mount point above it."""
    place = root.resolve()
    above = [m for m in mountinfo.read_mounts() if place.is_relative_to(m.mountpoint)]
    longest = max((len(mount.mountpoint) for mount in above), default=0)
    found = [mount for mount in above if len(mount.mountpoint) == longest]
    return found[-1] if found else None
