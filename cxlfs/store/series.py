"""Files of one series: names in one directory that differ in numbers alone, as ``step-10.pt`` and
``step-20.pt``. The file of the series before says what a new file should be.

Here too: the attribute that says on the media that a new file is not judged yet.

Never here: judging, or what becomes of a file (``overwrites``).

Invariants
- A file before belongs to the same user, nobody is writing it, and nothing is known to be wrong
  with it.
- A search looks at a bounded number of names, the newest first. What is remembered is a hint: it is
  checked each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cxlfs.format import layout
from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.store.unit_rules import series_of

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace

UNJUDGED_XATTR: Final = XATTR_HIDDEN_PREFIX + b"unjudged"
"""On a new file of a series: it may be torn. The value is :data:`UNJUDGED`."""
UNJUDGED: Final = b"1"
_NAMES_MAX = 256
"""Of a directory, that are looked at."""
_SERIES_MAX = 1024
"""That are remembered."""


class Series:
    """One for each volume."""

    def __init__(self, namespace: Namespace, is_torn: Callable[[Inode], bool]) -> None:
        self._namespace = namespace
        self._is_torn = is_torn
        self._last: dict[tuple[int, bytes], int] = {}
        """The last file of a series, by directory and what its names have in common."""

    def before(self, inode: Inode) -> Inode | None:
        """Another file of the series of a file that is older, the newest that is found."""
        series = series_of(inode.name)
        directory = self._namespace.inodes.get(inode.parent)
        if series is None or directory is None or directory.entries is None:
            return None
        last = self._last.get((inode.parent, series), 0)
        names = itertools.islice(reversed(directory.entries.items()), _NAMES_MAX)
        near = (ino for name, ino in names if series_of(name) == series)
        others = map(self._namespace.inodes.get, itertools.chain([last], near))
        return next((o for o in others if o is not None and self._fits(o, inode, series)), None)

    def _fits(self, other: Inode, inode: Inode, series: bytes) -> bool:
        if other is inode or other.live is None or other.version is not None or other.damaged:
            return False
        if other.parent != inode.parent or other.uid != inode.uid or other.links != 1:
            return False
        if not inode.uncommitted and other.commit_lsn >= inode.commit_lsn:
            return False
        if other.uncommitted or other.flags & layout.INODE_INCOMPLETE or not other.live.size:
            return False
        return series_of(other.name) == series and not self._is_torn(other)

    def made(self, inode: Inode) -> None:
        """A new file was made: what comes next is compared with it."""
        series = series_of(inode.name)
        if series is not None:
            self._last.pop((inode.parent, series), None)
            self._last[inode.parent, series] = inode.ino
            while len(self._last) > _SERIES_MAX:
                del self._last[next(iter(self._last))]


def is_unjudged(inode: Inode) -> bool:
    return inode.xattrs is not None and UNJUDGED_XATTR in inode.xattrs
