"""Everything that can be known to stand in the way of a mount before it is tried, each as one
error with its next step; and the removal of a dead mount that a killed daemon left.

Never here: opening the source, mounting.

Invariant: a mount of someone else, or one that answers, is never removed.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from pathlib import Path

from cxlfs.control import mountinfo
from cxlfs.daemon.detach import detach
from cxlfs.daemon.options import MountConfig
from cxlfs.errors import BusyError, FuseUnavailableError, MountError

log = logging.getLogger(__name__)

FUSE_DEVICE = Path("/dev/fuse")
CONTAINER_STEP = "a container needs --device /dev/fuse --cap-add SYS_ADMIN"
FUSE_CONF = Path("/etc/fuse.conf")
_LAYERS_MAX = 16


def prepare(config: MountConfig) -> None:
    """Check the machine and the mount point, and clear a dead mount of ours.

    Raises FuseUnavailableError, MountError, BusyError.
    """
    check_fuse()
    check_allow_other(config)
    clear_dead_mounts(config.mountpoint)
    check_mountpoint(config.mountpoint)


def check_fuse(device: Path = FUSE_DEVICE) -> None:
    """Raises FuseUnavailableError when this process has no way to mount."""
    if not device.exists():
        raise FuseUnavailableError(
            f"there is no {device}",
            next_step=f"load the kernel module (modprobe fuse); {CONTAINER_STEP}",
        )
    if os.geteuid() == 0:
        _check_device_opens(device)
        return
    helper = shutil.which("fusermount3")
    if helper is None:
        raise FuseUnavailableError(
            "mounting as an ordinary user needs fusermount3, which is not installed",
            next_step="install the Debian package fuse3, or mount as root",
        )
    if not Path(helper).stat().st_mode & stat.S_ISUID:
        raise FuseUnavailableError(
            f"{helper} is not set-user-ID root, so it cannot mount for an ordinary user",
            next_step=f"as root: chmod u+s {helper}; or mount as root",
        )
    if not os.access(device, os.R_OK | os.W_OK, effective_ids=True):  # the helper opens it as us
        raise FuseUnavailableError(
            f"this user may not open {device}",
            next_step=f"as root: chmod 666 {device} (what udev does by default); or mount as root",
        )


def _check_device_opens(device: Path) -> None:
    try:
        os.close(os.open(device, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        missing = error.errno in (errno.ENODEV, errno.ENXIO)
        raise FuseUnavailableError(
            f"cannot open {device}: {error.strerror}",
            next_step="load the kernel module: modprobe fuse" if missing else CONTAINER_STEP,
        ) from error


def check_allow_other(config: MountConfig, fuse_conf: Path = FUSE_CONF) -> None:
    """allow_other is root's to give: raises FuseUnavailableError where it was not given."""
    if not config.allow_other or os.geteuid() == 0:
        return
    try:
        lines = fuse_conf.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    if "user_allow_other" not in (line.strip() for line in lines):
        raise FuseUnavailableError(
            f"allow_other is not permitted to ordinary users: {fuse_conf} lacks user_allow_other",
            next_step=f"as root: echo user_allow_other >> {fuse_conf}; "
            "or mount without allow_other",
        )


def clear_dead_mounts(mountpoint: str) -> None:
    """Detach mounts of this file system whose daemon is gone; raises BusyError for a living mount.

    A mount of another kind on the same point counts as living.
    """
    for _ in range(_LAYERS_MAX):
        mount = mountinfo.find_mount(mountpoint)
        if mount is None:
            return
        ours = mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE
        if not (ours and mountinfo.is_dead(mount.mountpoint)):
            raise BusyError(
                f"{mountpoint} is in use: {mount.source} ({mount.file_system_type}) is mounted "
                "there",
                next_step=f"use another directory, or run: {_unmount_command(mount)}",
            )
        log.info("clearing the dead mount of %s on %s", mount.source, mount.mountpoint)
        detach(mount.mountpoint, lazy=True)
    raise BusyError(f"{mountpoint} carries too many dead mounts", next_step="umount -l it by hand")


def _unmount_command(mount: mountinfo.Mount) -> str:
    ours = mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE
    return f"{'cxlfs ' if ours else ''}umount {mount.mountpoint}"


def check_mountpoint(mountpoint: str) -> None:
    """Raises MountError unless it is a directory that this user may mount on."""
    path = Path(mountpoint)
    try:
        status = path.stat()
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise MountError(
                f"the mount point {mountpoint} does not exist",
                next_step=f"make it: mkdir -p {mountpoint}",
            ) from error
        raise MountError(f"cannot use {mountpoint}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise MountError(
            f"the mount point {mountpoint} is not a directory", next_step="name a directory"
        )
    if os.geteuid() != 0 and not os.access(path, os.W_OK):
        raise MountError(
            f"no permission to mount on {mountpoint}: an ordinary user must be able to write there",
            next_step=f"use a directory of yours, or as root: chown {os.geteuid()} {mountpoint}",
        )
