"""Make a mount read-only or writable again, and change what the kernel checks of it (nosuid, nodev,
noexec): the half of whoever asks, as mount(8) does with ``-o remount``.

Never here: what the store does about it (``remount_request``).

The order
- Read-only: the kernel refuses writers first, and says EBUSY while there are any; then the store is
  closed as at an unmount, but goes on serving reads. From then on nothing changes the source.
- Writable: the store first.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from cxlfs.control import mountinfo
from cxlfs.control.client import control_request
from cxlfs.daemon import linux
from cxlfs.daemon.attach import mount_flags
from cxlfs.daemon.detach import holders_of
from cxlfs.daemon.options import make_config
from cxlfs.errors import BusyError, MountError

REMOUNT = "remount"
_OF_THE_KERNEL = frozenset({"fd", "rootmode", "user_id", "group_id", "max_read", "blksize"})
"""What mount(8) copies from the mount table: it says how the mount was made."""


def is_remount(texts: Sequence[str]) -> bool:
    """The ``-o`` texts ask for a remount."""
    return REMOUNT in _split(texts)


def remount(mountpoint: str, texts: Sequence[str]) -> None:
    """Give the mount the options in ``texts``, as far as they can change while it is mounted.

    Raises UsageError naming one that cannot, BusyError naming who keeps it writable, MountError,
    and what closing or opening a store for writing raises.
    """
    mount = mountinfo.find_mount(mountpoint)
    if mount is None or mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        raise MountError(
            f"no cxlfs store is mounted on {mountpoint}", next_step="list mounts: cxlfs status"
        )
    if not linux.is_root():
        raise MountError(
            "only root may remount",
            next_step=f"as root: mount -o remount,... {mountpoint}; or unmount and mount again",
        )
    options = [text for text in _split(texts) if text.partition("=")[0] not in _OF_THE_KERNEL]
    options = [option for option in options if option != REMOUNT]
    config = make_config(mount.source, mount.mountpoint, options=options)
    _ask(mount, options, apply=not config.read_only)
    try:
        linux.mount(
            mount.source,
            mount.mountpoint,
            mount.file_system_type,
            linux.MS_REMOUNT | mount_flags(config),
            "",
        )
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy(mount.mountpoint) from error
        raise MountError(f"cannot remount {mountpoint}: {error.strerror}") from error
    if config.read_only:
        _ask(mount, options, apply=True)


def _split(texts: Sequence[str]) -> list[str]:
    return [option.strip() for text in texts for option in text.split(",")]


def _ask(mount: mountinfo.Mount, options: list[str], *, apply: bool) -> None:
    """Have the daemon check the options, and do its part of them."""
    for _ in control_request(mount.mountpoint, REMOUNT, {"options": options, "apply": apply}):
        pass


def _busy(mountpoint: str) -> BusyError:
    holders = holders_of(os.path.realpath(mountpoint))
    who = f" by {', '.join(holders)}" if holders else ""
    return BusyError(
        f"{mountpoint} cannot become read-only while it is in use{who}",
        next_step="close files that are open for writing, or deleted and still open; try again",
    )
