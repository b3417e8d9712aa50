"""The second maps of files: the committed content beside a live one that differs, or is going to.

Never here: what is published or taken back (``versions``).

Invariants
- A file without a version has a second map only while it is kept here, equal to the live one.
- Few are kept, and only large ones: making one takes time in the number of its references, and
  whoever overwrites a fragmented file piece by piece, closing it each time, would make it again
  each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.native.extents import Counting

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode

CLONE_REFS_MIN = 64
"""A map of fewer references is made in some microseconds."""
CLONES_MAX = 64


class Clones:
    """One for each volume. ``close_map``: ends a map that is not wanted."""

    def __init__(self, close_map: Callable[[FileMap | None], None]) -> None:
        self._close_map = close_map
        self._kept: dict[int, Inode] = {}
        """The oldest first."""
        self.made = 0
        """Since the store was opened: each cost a walk over all references of a file."""

    def make(self, inode: Inode, *, comes_back: bool) -> None:
        """The live content is about to change: the committed one stays, as it is now, and counts as
        ``count_committed`` says.
        """
        self._kept.pop(inode.ino, None)
        if not inode.uncommitted and inode.committed is None:
            inode.committed = inode.content.clone(_counting(comes_back=comes_back))
            self.made += 1

    def keep(self, inode: Inode) -> None:
        """Nobody writes any more, and both contents are equal."""
        if inode.committed is None:
            return
        if inode.committed.ref_count < CLONE_REFS_MIN:
            self._close(inode)
            return
        self._kept[inode.ino] = inode
        if len(self._kept) > CLONES_MAX:
            self._close(self._kept.pop(next(iter(self._kept))))

    def forget(self, inode: Inode) -> None:
        """The second map, if there is one, is a version's from now on, or gone."""
        self._kept.pop(inode.ino, None)

    def _close(self, inode: Inode) -> None:
        self._close_map(inode.committed)
        inode.committed = None


def count_committed(inode: Inode, *, comes_back: bool) -> None:
    """What a version will replace is room that making room can have (``room``); what may come back
    is not.
    """
    if inode.committed is not None:
        inode.committed.count_as(_counting(comes_back=comes_back))


def _counting(*, comes_back: bool) -> Counting:
    return Counting.KEPT if comes_back else Counting.REPLACED
