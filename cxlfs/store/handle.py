"""One open file description as the store knows it, and a write that is done in steps.

Never here: what its verbs do (``files``).
"""

from __future__ import annotations

import dataclasses

from cxlfs.errors import NotPermittedError
from cxlfs.format import layout
from cxlfs.store.namespace import Inode
from cxlfs.store.version import Version


@dataclasses.dataclass(slots=True)
class Effort:
    """What the steps towards room for one request have come to. ``best_bytes``: the most room that
    there was, and ``moved_bytes`` what the cleaner had moved by then; ``stalled``: steps in a row
    that were no use, below 0 where some may free nothing.
    """

    best_bytes: int
    moved_bytes: int
    stalled: int


@dataclasses.dataclass(slots=True, eq=False)
class Handle:
    """One open file description. ``truncated``: it began the overwrite; ``ordinary``: see above;
    ``redirected``: a shell made it for another program, or for several; ``paid``: steps towards
    room that were made for its next lease; ``effort``: those of a fallocate that goes on;
    ``version``: the last one that it wrote to, or may without the store seeing it; ``one_change``:
    whether what it changes in place is atomic, None: nobody has asked.
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
    effort: Effort | None = None
    version: Version | None = None
    one_change: bool | None = None


class UnfinishedError(Exception):
    """Room is being made for the rest of a write or for fallocate, or a second map of its file, or
    a content that a checkpoint unit keeps, or a large hole, or many files are committed, or
    checksums added up, step by step: others may have their turn before the same is asked again; a
    write, and a sync, with ``done``. Or what the kernel is about to say comes first.
    """

    def __init__(self, done: int = 0) -> None:
        super().__init__(done)
        self.done = done


def is_atomic(inode: Inode) -> bool:
    """It is being overwritten, and what is committed comes back unless that is finished."""
    return isinstance(inode.version, Version) and inode.version.atomic


def give_up(inode: Inode) -> None:
    """What is being written is not to be published, whatever is written to it: its close says
    EPERM, and an overwrite brings the old content back. A file that begins anew (O_TRUNC) is
    another attempt; one that is changed in place is left as it is.
    """
    version = inode.version
    if isinstance(version, Version) and (version.atomic or inode.uncommitted):
        inode.stop_writes()
        version.fail(0, layout.FILE_SIZE_MAX, NotPermittedError("its program has given it up"))


def is_changing(handle: Handle) -> bool:
    """It has written what is not committed. Its last close may lie behind it: RELEASE comes when
    the kernel finds the time, and others have opened the file by then.
    """
    return handle.wrote and handle.version is not None and handle.version is handle.inode.version


def left_by_killed(inode: Inode, handle: Handle) -> bool:
    """What is not committed is a killed writer's, and ``handle`` has nothing to do with it."""
    version = inode.version
    if not isinstance(version, Version) or not version.killed or is_changing(handle):
        return False
    return not handle.truncated or inode.content.size > 0
