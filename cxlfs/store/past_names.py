"""Names that something has lost while it lives on: renamed, or one of several links removed.

Rows of history say the same of what lost its last name (``past``).

Invariants
- Kept in memory alone, and as many as ``KEPT``: an end that is not known costs the view of the past
  a name. It never leads to another file.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode

KEPT = 1 << 16


class NameEnd(NamedTuple):
    """A name meant an inode from record ``since`` on, up to but not including record ``until``."""

    parent: int
    name: bytes
    ino: int
    since: int
    until: int


class TakenName(NamedTuple):
    """A name that a record took from an inode, by its operation of that ``number``. ``since``: the
    record by which the inode's names were linked.
    """

    parent: int
    name: bytes
    inode: Inode
    since: int
    number: int


class NameEnds:
    """The newest ends of names, by directory."""

    def __init__(self) -> None:
        self._ends: collections.deque[NameEnd] = collections.deque()
        self._by_directory: dict[int, collections.deque[NameEnd]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, end: NameEnd) -> None:
        """Add the name that ended last."""
        if end.since >= end.until:
            return
        self._ends.append(end)
        self._by_directory.setdefault(end.parent, collections.deque()).append(end)
        if len(self._ends) > KEPT:
            oldest = self._ends.popleft()
            of_directory = self._by_directory[oldest.parent]
            of_directory.popleft()
            if not of_directory:
                del self._by_directory[oldest.parent]

    def of_directory(self, ino: int) -> list[NameEnd]:
        """Ends of names in a directory, in order."""
        return list(self._by_directory.get(ino, ()))

    def forget(self, inos: set[int]) -> None:
        """Drop the names of some inodes, and of what was in directories among them."""
        kept = [end for end in self._ends if end.ino not in inos and end.parent not in inos]
        self._ends.clear()
        self._by_directory.clear()
        for end in kept:
            self.add(end)
