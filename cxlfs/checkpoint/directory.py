"""Whether a directory can be asked for checkpoints, and what it means that it has none.

Never here: which checkpoints there are (``catalogue``).

Invariants
- Absent, unreachable, not a directory, and empty are four errors. Only the last one means that
  there was nothing yet.
- No call waits for a mount that does not answer for longer than some seconds.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from cxlfs.checkpoint.place import Place
from cxlfs.checkpoint.trackers import trackers_of
from cxlfs.control import mountinfo
from cxlfs.errors import (
    CxlfsError,
    DirectoryAbsentError,
    DirectoryUnreachableError,
    NoCheckpointError,
    NoDirectoryError,
    NoGoodCheckpointError,
    NotMountedError,
)


def require_directory(directory: str | Path) -> None:
    """Raises DirectoryAbsentError, DirectoryUnreachableError, NoDirectoryError."""
    problem = mountinfo.answer_of(str(directory))
    try:
        if problem is not None:
            raise problem
        status = os.stat(directory)  # noqa: PTH116  the path as it was given
        if stat.S_ISDIR(status.st_mode):
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
    except OSError as error:
        raise _why_not(directory, error) from error
    if not stat.S_ISDIR(status.st_mode):
        raise NoDirectoryError(f"{directory} is not a directory")


def _why_not(directory: str | Path, error: OSError) -> CxlfsError:
    if error.errno == errno.ENOTDIR:
        return NoDirectoryError(f"{directory} lies below what is not a directory")
    if error.errno in (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP):
        if os.path.islink(directory):  # noqa: PTH114  the path as it was given
            return DirectoryAbsentError(
                f"{directory} is a link to {os.readlink(directory)}, which is not there"  # noqa: PTH115
            )
        return DirectoryAbsentError(f"{directory} is not there")
    if error.errno in mountinfo.DEAD:
        return DirectoryUnreachableError(f"{directory} is on a dead mount: its daemon is gone")
    if error.errno == errno.ETIMEDOUT:
        return DirectoryUnreachableError(f"{directory} is on a mount that does not answer")
    return DirectoryUnreachableError(f"{directory} cannot be looked into: {error.strerror}")


def is_on_mount(directory: str | Path) -> bool:
    """True if it lies on a cxlfs mount. Raises OSError."""
    number = os.stat(directory).st_dev  # noqa: PTH116  the path as it was given
    device = f"{os.major(number)}:{os.minor(number)}"
    return any(
        mount.device == device and mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE
        for mount in mountinfo.read_mounts()
    )


def nothing_in(directory: str | Path, *, plain: bool = True) -> CxlfsError:
    """What it means that a directory has no checkpoint.

    ``plain``: it may be on no cxlfs mount. Raises what ``require_directory`` raises.
    """
    require_directory(directory)
    place = Place(Path(directory))
    gone = [
        t for t in trackers_of(place) if t.target and not os.path.lexists(place.path / t.target)
    ]
    if gone:
        return NoGoodCheckpointError(
            f"there is no checkpoint in {directory}, and {gone[0].name} in it names one: "
            f"{gone[0].target} is not there"
        )
    if not plain and not is_on_mount(directory):
        return NotMountedError(
            f"there is no checkpoint in {directory}, and no store is mounted there"
        )
    return NoCheckpointError(f"there is no checkpoint in {directory}")
