"""The second maps of files: the committed content beside a live one that differs, or is going to.

Never here: what is published or taken back (``versions``).

Invariants
- A file without a version has a second map only while it is kept here, equal to the live one.
- Few are kept, and only large ones: making one takes time in the number of its references, and
  whoever overwrites a fragmented file piece by piece, closing it each time, would make it again
  each time.
- Of a content with more than REFS_AT_ONCE references it is made in parts, before the change that
  needs it: whoever wants that change waits, and others have their turn between two parts. Nothing
  but a move (``mover``, which knows the part that there is) changes the live content until then.
  Who cannot wait makes what is left of it at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.native.extents import Counting

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode

REFS_AT_ONCE = 50_000
"""More references than that are not copied, recounted or dropped at once: 40 to 60 ns each."""
CLONE_REFS_MIN = 64
"""A map of fewer references is made in some microseconds."""
CLONES_MAX = 64


class Clones:
    """One for each volume. ``close_map``: ends a map that is not wanted."""

    def __init__(self, close_map: Callable[[FileMap | None], None]) -> None:
        self._close_map = close_map
        self._kept: dict[int, Inode] = {}
        """The oldest first."""
        self._parts: dict[int, FileMap] = {}
        """Second maps in the making, of files without one."""
        self.made = 0
        """Since the store was opened: each cost a walk over all references of a file."""

    def make(self, inode: Inode, *, comes_back: bool) -> None:
        """The live content is about to change: the committed one stays, as it is now, and counts as
        ``count_committed`` says.
        """
        self._kept.pop(inode.ino, None)
        if not inode.uncommitted and inode.committed is None:
            if inode.ino in self._parts:
                inode.committed = self._finished(inode)
            else:
                counting = _counting(inode.content, comes_back=comes_back)
                inode.committed = inode.content.clone(counting)
            self.made += 1

    def prepare(self, inode: Inode) -> bool:
        """The live content will be changed: one step towards the second map of a large one, 2 to
        3 ms; True: the next step comes first. Raises OutOfMemoryError.
        """
        if inode.version is not None or inode.uncommitted or inode.committed is not None:
            return False
        content = inode.content
        if content.ref_count <= REFS_AT_ONCE:
            return False
        part = self._parts.get(inode.ino)
        if part is None:
            part = self._parts[inode.ino] = content.begin_copy(Counting.KEPT)
        return content.copy_part(part, REFS_AT_ONCE)

    def part_of(self, ino: int) -> FileMap | None:
        """The second map in the making, if there is one."""
        return self._parts.get(ino)

    def _finished(self, inode: Inode) -> FileMap:
        part = self._parts[inode.ino]
        while inode.content.copy_part(part, REFS_AT_ONCE):
            pass
        return self._parts.pop(inode.ino)

    def keep(self, inode: Inode) -> None:
        """Nobody writes any more, and both contents are equal."""
        self._give_up_part(inode)
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
        self._give_up_part(inode)

    def _give_up_part(self, inode: Inode) -> None:
        if self._parts:
            self._close_map(self._parts.pop(inode.ino, None))

    def _close(self, inode: Inode) -> None:
        self._close_map(inode.committed)
        inode.committed = None


def count_committed(inode: Inode, *, comes_back: bool) -> None:
    """What a version will replace is room that making room can have (``room``); what may come back
    is not. Of a large one all is kept until it is replaced: less is told to be free, for as long.
    """
    if inode.committed is not None:
        inode.committed.count_as(_counting(inode.committed, comes_back=comes_back))


def _counting(content: FileMap, *, comes_back: bool) -> Counting:
    if comes_back or content.ref_count > REFS_AT_ONCE:
        return Counting.KEPT
    return Counting.REPLACED
