"""Unmount and wait until the daemon has closed the store, so that it is clean on return.

Never here: trio, ending a daemon by force.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from cxlfs.control import mountinfo
from cxlfs.control.client import AWAIT_CLOSE, ask, find_and_connect
from cxlfs.daemon.detach import copies_of, detach, holders_of
from cxlfs.errors import BusyError, CxlfsError, MountError

CLOSE_SECONDS_MAX = 600.0
BUSY_SECONDS_MAX = 1.0
"""So long a mount may be in use by nobody who can be named: whoever asks for its free space (df, a
monitoring agent) holds it for a moment.
"""
_BUSY_AGAIN_SECONDS = 0.05
SILENT_SECONDS_MAX = 1.0
"""A store is closed in less, but for one of 100 000 files and more. Whoever waits longer is told
what for.
"""


def unmount(
    mountpoint: str, *, lazy: bool = False, on_wait: Callable[[str], None] = lambda _: None
) -> None:
    """Unmount the store on ``mountpoint``. On return the daemon has closed it cleanly.

    ``lazy`` detaches it from the tree at once and returns; the daemon closes the store after the
    last user has left. A mount whose daemon is gone is cleared. ``on_wait``: told, once and by
    another thread, what is waited for and what to do, when closing takes more than a second.

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
            with _telling(mount, on_wait):
                _await_close(mountpoint, answer)


@contextlib.contextmanager
def _telling(mount: mountinfo.Mount, on_wait: Callable[[str], None]) -> Iterator[None]:
    timer = threading.Timer(SILENT_SECONDS_MAX, lambda: on_wait(reason_to_wait(mount)))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def reason_to_wait(mount: mountinfo.Mount) -> str:
    """Why the store of a mount that is gone here may still be open, and what to do."""
    copies = copies_of(mount.device)
    if not copies:
        return (
            f"{mount.mountpoint} is unmounted; waiting for its store to be closed (a container "
            "that is not seen from here may hold a copy of the mount until it ends)"
        )
    names = ", ".join(f"{pid} ({name})" for pid, name, _ in copies)
    pid, _, place = copies[0]
    return (
        f"{mount.mountpoint} is unmounted here; waiting for the mount namespace of process "
        f"{names}, which holds a copy: end it, or: nsenter -t {pid} -m umount {shlex.quote(place)}"
    )


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
