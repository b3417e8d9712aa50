"""Put a mount in place whose /dev/fuse this process keeps: as root, or through fusermount3.

Never here: serving the mount, taking it away (``detach``), options for libfuse.

Protocol of fusermount3: the descriptor named by _FUSE_COMMFD is a socket over which it sends the
mounted /dev/fuse (libfuse, util/fusermount.c). As root the mount(2) options are those that the
kernel documents (Documentation/filesystems/fuse.rst).
"""

from __future__ import annotations

import array
import contextlib
import os
import shutil
import socket
import subprocess

from cxlfs.control import mountinfo
from cxlfs.daemon import linux
from cxlfs.daemon.options import MountConfig, checks_permissions, helper_options
from cxlfs.daemon.preflight import CONTAINER_STEP, FUSE_DEVICE
from cxlfs.errors import FuseUnavailableError, MountError

_HELPER_SECONDS_MAX = 60

_FLAGS = {
    "ro": linux.MS_RDONLY,
    "nosuid": linux.MS_NOSUID,
    "nodev": linux.MS_NODEV,
    "noexec": linux.MS_NOEXEC,
    "noatime": linux.MS_NOATIME,
    "dirsync": linux.MS_DIRSYNC,
}
_CLEARED_BY = {"suid": linux.MS_NOSUID, "dev": linux.MS_NODEV, "exec": linux.MS_NOEXEC}


def attach(config: MountConfig, *, read_bytes_max: int) -> int:
    """Mount on ``config.mountpoint``; returns the descriptor whose end is the end of the mount. The
    kernel will not read more than ``read_bytes_max`` with one request.

    Nobody answers yet. Raises MountError, FuseUnavailableError.
    """
    if os.geteuid() == 0:
        return _attach_as_root(config, read_bytes_max)
    return _attach_with_helper(config, read_bytes_max)


def mount_flags(config: MountConfig) -> int:
    """Those of mount(2). Later options win; nosuid and nodev unless told otherwise."""
    flags = linux.MS_NOSUID | linux.MS_NODEV
    for option in ("ro" if config.read_only else "rw", *config.kernel_options):
        flags |= _FLAGS.get(option, 0)
        flags &= ~_CLEARED_BY.get(option, 0)
    return flags


def _attach_as_root(config: MountConfig, read_bytes_max: int) -> int:
    try:
        descriptor = os.open(FUSE_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise FuseUnavailableError(f"cannot open {FUSE_DEVICE}: {error.strerror}") from error
    data = [
        f"fd={descriptor}",
        "rootmode=40000",
        f"user_id={os.getuid()}",
        f"group_id={os.getgid()}",
        f"max_read={read_bytes_max}",
    ]
    if checks_permissions(config, is_root=linux.is_root()):
        data.append("default_permissions")
    if config.allow_other:
        data.append("allow_other")
    kind, flags = mountinfo.FILE_SYSTEM_TYPE, mount_flags(config)
    try:
        linux.mount(config.source, config.mountpoint, kind, flags, ",".join(data))
    except OSError as error:
        os.close(descriptor)
        raise MountError(
            f"cannot mount on {config.mountpoint}: {error.strerror}", next_step=CONTAINER_STEP
        ) from error
    return descriptor


def _attach_with_helper(config: MountConfig, read_bytes_max: int) -> int:
    helper = shutil.which("fusermount3")
    if helper is None:
        raise FuseUnavailableError(
            "mounting as an ordinary user needs fusermount3, which is not installed"
        )
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    options = f"{helper_options(config)},max_read={read_bytes_max}"
    command = [helper, "-o", options, "--", config.mountpoint]
    with ours:
        with theirs:
            done = _run_helper(command, theirs)
        descriptor = _received(ours)
    if done.returncode == 0 and descriptor is not None:
        return descriptor
    if descriptor is not None:
        os.close(descriptor)
    reasons = done.stderr.strip().splitlines()
    reason = reasons[-1] if reasons else "fusermount3 gave no reason"
    raise MountError(
        f"cannot mount on {config.mountpoint}: {reason}",
        next_step=_next_step(reason),
    )


def _run_helper(command: list[str], channel: socket.socket) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C", "_FUSE_COMMFD": str(channel.fileno())},
            pass_fds=[channel.fileno()],
            timeout=_HELPER_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MountError("fusermount3 did not finish mounting") from error


def _received(channel: socket.socket) -> int | None:
    """The descriptor that was sent, if one was."""
    descriptors = array.array("i")
    with contextlib.suppress(OSError):
        channel.setblocking(False)  # noqa: FBT003  the helper has ended: what it sent is here
        _, ancillary, _, _ = channel.recvmsg(1, socket.CMSG_SPACE(descriptors.itemsize))
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: descriptors.itemsize])
    if not descriptors:
        return None
    os.set_inheritable(descriptors[0], False)  # noqa: FBT003  the standard library's
    return descriptors[0]


def _next_step(reason: str) -> str | None:
    if str(FUSE_DEVICE) in reason:
        return f"as root: chmod 666 {FUSE_DEVICE} (what udev does by default); or mount as root"
    return CONTAINER_STEP if "permitted" in reason else None
