"""Unmount and wait until the daemon has closed the store, so that it is clean on return.

Never here: trio, ending a daemon by force.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterable

from cxlfs.control import mountinfo
from cxlfs.control.client import AWAIT_CLOSE, ask, find_and_connect
from cxlfs.daemon.detach import detach, holders_of
from cxlfs.errors import BusyError, CxlfsError, MountError

CLOSE_SECONDS_MAX = 600.0
BUSY_SECONDS_MAX = 1.0
"""So long a mount may be in use by nobody who can be named: whoever asks for its free space (df, a
monitoring agent) holds it for a moment.
"""
_BUSY_AGAIN_SECONDS = 0.05


def unmount(mountpoint: str, *, lazy: bool = False) -> None:
    """Unmount the store on ``mountpoint``. On return the daemon has closed it cleanly.

    ``lazy`` detaches it from the tree at once and returns; the daemon closes the store after the
    last user has left. A mount whose daemon is gone is cleared.

    Raises MountError (not mounted, not ours, closing failed), BusyError naming who holds it.
    """
    mount = mountinfo.find_mount(mountpoint)
    if mount is None:
        raise MountError(
            f"{mountpoint} is not a mount point", next_step="list mounts: findmnt -t fuse.cxlfs"
        )
    if mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        raise MountError(
            f"{mountpoint} holds {mount.source} ({mount.file_system_type}), not a cxlfs store",
            next_step=f"umount {mountpoint}",
        )
    # The caller's own directory may lie in the mount and would keep it busy.
    with contextlib.suppress(OSError):
        if _is_below(os.getcwd(), mount.mountpoint):  # noqa: PTH109
            os.chdir("/")
    channel = _connect(mountpoint)
    if channel is None:
        detach(mount.mountpoint, lazy=mountinfo.is_dead(mount.mountpoint) or lazy)
        return
    answer = ask(channel, AWAIT_CLOSE, {}, seconds_max=CLOSE_SECONDS_MAX)
    with channel, contextlib.closing(answer):
        next(answer, None)  # "waiting": from here on the daemon will tell us
        _detach(mount.mountpoint, lazy=lazy)
        if not lazy:
            _await_close(mountpoint, answer)


def _detach(mountpoint: str, *, lazy: bool) -> None:
    """Raises as detach does; BusyError only when somebody goes on using the mount."""
    deadline = time.monotonic() + BUSY_SECONDS_MAX
    while True:
        try:
            detach(mountpoint, lazy=lazy)
        except BusyError:
            if holders_of(mountpoint) or time.monotonic() >= deadline:
                raise
            time.sleep(_BUSY_AGAIN_SECONDS)
        else:
            return


def _connect(mountpoint: str) -> socket.socket | None:
    """A connection to the daemon; None when it is gone, or is not ours to talk to."""
    try:
        return find_and_connect(mountpoint)[0]
    except CxlfsError:
        return None


def _await_close(mountpoint: str, answer: Iterable[dict[str, object]]) -> None:
    try:
        for _ in answer:
            pass
    except BusyError:
        raise
    except CxlfsError as error:
        raise MountError(
            f"{mountpoint} is unmounted, but its store was not closed cleanly: {error.message}",
            next_step="the next mount recovers it; then run cxlfs verify",
        ) from error


def _is_below(path: str, mountpoint: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")
