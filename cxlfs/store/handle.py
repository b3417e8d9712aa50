"""One open file description as the store knows it, and a write that is done in steps.

Never here: what its verbs do (``files``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.store.namespace import Inode
from cxlfs.store.version import Version


@dataclasses.dataclass(slots=True, eq=False)
class Handle:
    """One open file description. ``truncated``: it began the overwrite; ``ordinary``: see above;
    ``redirected``: a shell made it for another program, or for several; ``paid``: steps towards
    room that were made for its next lease.
    """

    id: int
    inode: Inode
    readable: bool
    writable: bool
    truncated: bool = False
    ordinary: bool = False
    redirected: bool = False
    wrote: bool = False
    killed: bool = False
    paid: int = 0


class UnfinishedError(Exception):
    """Room is being made for the rest of a write, or a second map of its file, or a copy of the
    directory that a change concerns, or a large hole, or many files are committed, or checksums
    added up, step by step: others may have their turn before the same is asked again; a write, and
    a sync, with ``done``.
    """

    def __init__(self, done: int = 0) -> None:
        super().__init__(done)
        self.done = done


def left_by_killed(inode: Inode, handle: Handle) -> bool:
    """What is not committed is a killed writer's, and ``handle`` has nothing to do with it."""
    version = inode.version
    if not isinstance(version, Version) or not version.killed or handle.wrote:
        return False
    return not handle.truncated or inode.content.size > 0
