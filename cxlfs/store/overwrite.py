"""A file that may be torn, while it is not decided what becomes of it.

Other modules decide (``overwrites``).
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Hashable
from typing import TYPE_CHECKING

from cxlfs.format.operations import (
    Operation,
    PromoteOperation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.store.held import HELD_XATTR, Held, aside_content
from cxlfs.units import printable

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode


class Evidence(enum.Enum):
    """What the bytes say of new content, compared with the version before."""

    NONE = "none"
    """It is whole."""
    UNKNOWN = "unknown"
    """Nobody knows its format."""
    WEAK = "weak"
    """It is whole by itself, and lacks names that the version before had."""
    STRONG = "strong"
    """By its own format it is cut, empty, incomplete or damaged, or it is the beginning of such a
    save."""


@dataclasses.dataclass(slots=True, eq=False)
class Overwrite:
    """A file that was overwritten, or is new, while it is not decided what becomes of it.

    ``held``: the version before; None: it is new. ``place``: directory, name and owner then.
    ``writers``: tokens of who wrote it. ``closed``: the monotonic time of its last publication.
    ``evidence``: None until the judge has answered. ``crashed``: nobody knows its writers, and all
    of them are gone. ``wanted``: a reader has opened it. ``ended``: when somebody first saw that
    its writers are gone. ``before``: of a new file, the one of its series that it is compared with.
    ``reason``: why a new file is torn.
    """

    inode: Inode
    held: Held | None
    closed: float
    place: tuple[int, bytes, int]
    before: Inode | None = None
    reason: str = ""
    writers: set[Hashable] = dataclasses.field(default_factory=set)
    evidence: Evidence | None = None
    crashed: bool = False
    wanted: bool = False
    ended: float | None = None


def has_its_name(overwrite: Overwrite) -> bool:
    """A new file that was renamed, or got another name, is what somebody wants."""
    inode = overwrite.inode
    if overwrite.held is not None:
        return True
    return inode.links == 1 and overwrite.place == (inode.parent, inode.name, inode.uid)


def told(verb: str, overwrite: Overwrite) -> str:
    if overwrite.held is not None:
        return f"it {verb} incomplete: {overwrite.reason}; the version before is kept"
    before = overwrite.before
    other = "" if before is None else f"; {printable(os.fsdecode(before.name))} is complete"
    return f"it {verb} incomplete: {overwrite.reason}{other}"


def exchange_operations(
    inode: Inode, before: FileMap, held: Held | None, times: tuple[int, int], *, keeps: bool
) -> list[Operation]:
    """What the record of an exchange says; ``before``: the content that is kept aside then, if it
    ``keeps`` it; ``times``: mtime and ctime.
    """
    attributes = inode.operation(mtime_ns=times[0], ctime_ns=times[1])
    ops: list[Operation] = [attributes, PromoteOperation(inode.ino)]
    if keeps:
        ops.append(aside_content(inode.ino, before))
    if held is not None:
        ops.append(XattrSetOperation(inode.ino, HELD_XATTR, held.value))
    else:
        ops.append(XattrRemoveOperation(inode.ino, HELD_XATTR))
    return ops
