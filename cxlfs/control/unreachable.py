"""Why nobody can be asked about a mount.

Never here: asking a daemon (``client``).
"""

from __future__ import annotations

import errno
import os
import pwd

from cxlfs.control import discovery, mountinfo
from cxlfs.errors import MountError


def why_unreachable(path: str, mount: mountinfo.Mount) -> MountError:
    """Why nobody could be asked about a mount: its daemon is gone, or does not talk to us.

    The kernel keeps other users out of a mount (EACCES) before it asks the daemon, so this is the
    one place where the mount itself is asked, for some seconds at most.
    """
    answer = mountinfo.answer_of(mount.mountpoint)
    if answer is not None and answer.errno in mountinfo.DEAD:
        return MountError(
            f"{path} is a dead mount: its daemon is gone",
            next_step=f"mount it again: cxlfs mount {mount.source} {mount.mountpoint}",
        )
    if answer is not None and answer.errno == errno.ETIMEDOUT:
        return MountError(
            f"{path} is mounted, but its daemon does not answer",
            next_step="look at its log and at what it waits for; "
            f"ending it leaves a dead mount that cxlfs mount clears: {mount.source}",
        )
    if os.geteuid() not in (0, mount.user_id):
        owner = _user_name(mount.user_id)
        who = "root" if mount.user_id == 0 else f"root or {owner}"
        return MountError(
            f"{path} is a live mount of {owner}: its daemon answers {who} only",
            next_step=f"run the command as {who} (sudo)",
        )
    return MountError(
        f"{path} is mounted and answers, but its daemon is not registered where this command looks",
        next_step=f"set {discovery.ENVIRONMENT_OVERRIDE} as it was set for the mount",
    )


def _user_name(uid: int | None) -> str:
    if uid is None:
        return "another user"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"
