"""What SOURCE|MOUNTPOINT means: a running daemon to ask, or media to open.

Never here: what is asked; opening (``source``), so that verbs which only talk to a daemon start
without what maps media. A mount point is not touched while its daemon answers, and never for longer
than some seconds: a daemon that hangs must not hang the command line.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from cxlfs.control import mountinfo
from cxlfs.control.client import find_and_connect
from cxlfs.control.discovery import Registration
from cxlfs.control.unreachable import why_unreachable
from cxlfs.errors import (
    BusyError,
    CorruptionError,
    CxlfsError,
    MediaError,
    MediaUnavailableError,
    MountError,
    NoDaemonError,
    NotACxlfsError,
    NotPersistentError,
    UnsupportedFormatError,
    UsageError,
)

_NAME_SECONDS_MAX, _NAME_SECONDS = 5.0, 0.005
OPEN_EXIT_CODES = tuple(
    error.exit_code
    for error in (
        NotACxlfsError,
        BusyError,
        UnsupportedFormatError,
        MediaError,
        NotPersistentError,
        MediaUnavailableError,
        CorruptionError,
        MountError,
    )
)
"""What reaching a store, mounted or not, can end with."""


def served_by(path: str) -> Registration | None:
    """The daemon that serves this mount point, or this source; None: nobody does.

    Raises MountError for a mount point whose daemon is gone or belongs to someone else, and
    MediaUnavailableError for a directory on which no store is mounted.
    """
    mount = mountinfo.find_mount(path)
    if mount is not None and mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        mount = None
    try:
        channel, registration = find_and_connect(path)
    except NoDaemonError as error:
        if mount is not None:
            raise why_unreachable(path, mount) from error
        _refuse_directory(path)
        return None
    channel.close()
    return registration


def _refuse_directory(path: str) -> None:
    inside = _mount_around(path)
    if inside is not None:
        below = os.path.relpath(path, inside.mountpoint)
        raise MediaUnavailableError(
            f"{path} lies inside the store mounted on {inside.mountpoint}",
            next_step=f"name the mount point; for a part of it: cxlfs list {inside.mountpoint} "
            f"/{below}",
        )
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(path).st_mode):  # noqa: PTH116
            raise MediaUnavailableError(
                f"{path} is a directory, and no store is mounted there",
                next_step="name the SOURCE of the store, or mount it first",
            )


def _mount_around(path: str) -> mountinfo.Mount | None:
    """The mount of ours that ``path`` lies in."""
    mounts = {mount.mountpoint: mount for mount in mountinfo.read_mounts()}
    around = [str(directory) for directory in Path(os.path.abspath(path)).parents]  # noqa: PTH100
    mount = next((mounts[directory] for directory in around if directory in mounts), None)
    return mount if mount and mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE else None


@contextlib.contextmanager
def naming_the_mount(source: str) -> Iterator[None]:
    """A BusyError from inside tells where the source is mounted, if it is."""
    try:
        yield
    except BusyError as error:
        try:
            channel, registration = find_and_connect(source)
        except CxlfsError:
            raise error from None
        channel.close()
        raise BusyError(
            f"{source} is mounted on {registration.mountpoint} (process {registration.pid})",
            next_step=f"unmount it first: cxlfs umount {registration.mountpoint}",
        ) from error


def mounted_place(path: str) -> tuple[str, str]:
    """The mount of ours that ``path`` lies in, and where in it; it need not be there.

    Symbolic links are followed. Raises UsageError.
    """
    real = Path(os.path.realpath(path))
    mounts = {mount.mountpoint: mount for mount in mountinfo.read_mounts()}
    around = next((str(d) for d in (real, *real.parents) if str(d) in mounts), None)
    if around is None or mounts[around].file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        raise UsageError(
            f"{path} does not lie in a mounted store",
            next_step="mount the store first, and name something in it",
        )
    inside = str(real.relative_to(around))
    return around, "/" if inside == "." else f"/{inside}"


def only_mount(path: str | None) -> str:
    """The mount of ours that ``path`` lies in; without one the only mount that there is.

    Raises UsageError.
    """
    if path is not None:
        return mounted_place(path)[0]
    of_ours = {
        mount.mountpoint
        for mount in mountinfo.read_mounts()
        if mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE
    }
    if len(of_ours) != 1:
        said = f"{len(of_ours)} stores are mounted" if of_ours else "no store is mounted"
        raise UsageError(said, next_step="name the mount point")
    return of_ours.pop()


def wait_for_name(path: str) -> None:
    """The daemon has made a name: wait until the kernel has forgotten that there was none."""
    deadline = time.monotonic() + _NAME_SECONDS_MAX
    while not os.path.lexists(path) and time.monotonic() < deadline:
        time.sleep(_NAME_SECONDS)
