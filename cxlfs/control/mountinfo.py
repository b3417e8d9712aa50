"""What is mounted where, read from /proc/self/mountinfo without touching any file system.

Never here: mounting, unmounting, trio. A daemon that hangs or has died must not hang whoever asks,
so paths are resolved without a look at the mount point itself as long as that is possible.

Source of the format: proc(5), section /proc/pid/mountinfo.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import re
import threading
from pathlib import Path

FILE_SYSTEM_TYPE = "fuse.cxlfs"
MOUNTINFO = Path("/proc/self/mountinfo")
ANSWER_SECONDS_MAX = 5.0
DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What every system call on a mount says whose daemon is gone. Others are no sign of that: EACCES
is what the kernel says to users that may not enter.
"""

_OCTAL = re.compile(rb"\\([0-3][0-7]{2})")
_FIELDS_BEFORE_OPTIONAL = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of mountinfo. ``device``: major:minor; ``options``: those of the file system."""

    device: str
    mountpoint: str
    file_system_type: str
    source: str
    options: tuple[str, ...]

    @property
    def user_id(self) -> int | None:
        """The user whose daemon serves a FUSE mount; None for other file systems."""
        for option in self.options:
            key, _, value = option.partition("=")
            if key == "user_id" and value.isdigit():
                return int(value)
        return None


def read_mounts(mountinfo: Path = MOUNTINFO) -> list[Mount]:
    """All mounts of this process's namespace, in mount order; other lines are left out."""
    found = []
    for line in mountinfo.read_bytes().splitlines():
        fields = line.split(b" ")
        with contextlib.suppress(ValueError, IndexError):
            separator = fields.index(b"-", _FIELDS_BEFORE_OPTIONAL)
            kind, source, options = fields[separator + 1 : separator + 4]
            found.append(
                Mount(
                    device=fields[2].decode("ascii"),
                    mountpoint=_unescape(fields[4]),
                    file_system_type=_unescape(kind),
                    source=_unescape(source),
                    options=tuple(_unescape(options).split(",")),
                )
            )
    return found


def find_mount(path: str, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The topmost mount whose mount point is ``path``, as given or with symbolic links resolved."""
    mounts = {mount.mountpoint: mount for mount in read_mounts(mountinfo)}
    absolute = os.path.abspath(path)  # noqa: PTH100  Path.absolute keeps ".."
    if absolute in mounts:
        return mounts[absolute]
    parent = os.path.realpath(os.path.dirname(absolute))  # noqa: PTH120
    beside = os.path.join(parent, os.path.basename(absolute))  # noqa: PTH118, PTH119
    if beside in mounts:
        return mounts[beside]
    return mounts.get(os.path.realpath(absolute))


def answer_of(mountpoint: str, *, seconds: float = ANSWER_SECONDS_MAX) -> OSError | None:
    """None when the file system answers, else why not: ENOTCONN when its daemon is gone.

    statfs is asked because stat is answered from cached attributes long after the daemon died.
    A daemon that does not answer in time is reported as ETIMEDOUT. Not for the daemon itself: see
    ``daemon/linux.answer_apart``.
    """
    result: list[OSError | None] = []

    def ask() -> None:
        try:
            os.statvfs(mountpoint)
        except OSError as error:
            result.append(error)
        else:
            result.append(None)

    asker = threading.Thread(target=ask, name="statvfs", daemon=True)
    asker.start()
    asker.join(seconds)
    if not result:
        return OSError(errno.ETIMEDOUT, "no answer", mountpoint)
    return result[0]


def is_dead(mountpoint: str) -> bool:
    """The mount is there and its daemon is not."""
    error = answer_of(mountpoint)
    return error is not None and error.errno in DEAD


def _unescape(field: bytes) -> str:
    return os.fsdecode(_OCTAL.sub(lambda match: bytes([int(match[1], 8)]), field))
