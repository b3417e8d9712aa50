"""An open checkpoint unit while it is written.

Never here: what becomes of it (``units``), what the media say of it beyond ``record``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

from cxlfs.store.unit_record import OpenRecord
from cxlfs.store.unit_rules import Rule

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode


@dataclasses.dataclass(slots=True, eq=False)
class OpenUnit:
    """``before``: the copy of what was there, None: nothing was. ``published``: inode numbers
    of the files that were, since it began; ``spoiled``: of those that could not be finished;
    ``unclosed``, where each file is a checkpoint: of those that were published by fsync or the
    periodic commit, and may be half of a save.
    """

    inode: Inode
    rule: Rule
    before: Inode | None
    since_ns: int
    changed: float
    marked: bool = False
    kept: bool = False
    """What was written is there after a crash; the media say nothing of the unit any more."""
    replaces: bool = False
    """What was there before was removed by a user, who wants its room if there is no other."""
    place: tuple[int, bytes] | None = None
    """Directory and name of one that was removed, which can still be undone."""
    followed: bool = False
    writers: dict[Hashable, None] = dataclasses.field(default_factory=dict)
    published: set[int] = dataclasses.field(default_factory=set)
    spoiled: set[int] = dataclasses.field(default_factory=set)
    unclosed: set[int] = dataclasses.field(default_factory=set)

    @property
    def record(self) -> OpenRecord:
        before = self.before.ino if self.before is not None else 0
        return OpenRecord(self.inode.ino, before, self.since_ns)
