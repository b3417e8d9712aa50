"""Files of one series: names in one directory that differ in numbers alone, as ``step-10.pt`` and
``step-20.pt``. The file of the series before says what a new file should be.

Here too: the attribute that says on the media that a new file is not judged yet.

Never here: judging, or what becomes of a file (``overwrites``).

Invariants
- Parts of one set, as ``model-00001-of-00008``, are no series: no part wins over another.
- A file before belongs to the same user, nobody is writing it, and nothing is known to be wrong
  with it.
- A search looks at a bounded number of names, the newest first. What is remembered is a hint: it is
  checked each time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cxlfs.format import layout
from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.store.unit_rules import known_file, series_of

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace

UNJUDGED_XATTR: Final = XATTR_HIDDEN_PREFIX + b"unjudged"
"""On a new file of a series: it may be torn. The value is :data:`UNJUDGED`."""
UNJUDGED: Final = b"1"
_NAMES_MAX, _NAMES_MAX_ONCE = 256, 4096
"""Of a directory, that are looked at: by whoever makes a file, and once after a crash."""
_SERIES_MAX = 1024
"""That are remembered."""
_PART: Final = re.compile(rb"[0-9]-?of-?[0-9]")
_LAST_MAX = 4
"""Names of each."""


class Series:
    """One for each volume."""

    def __init__(self, namespace: Namespace, is_torn: Callable[[Inode], bool]) -> None:
        self._namespace = namespace
        self._is_torn = is_torn
        self._last: dict[tuple[int, bytes], list[bytes]] = {}
        """The last names of a series, the newest first, by directory and what they have in common.
        """

    def before(self, inode: Inode, *, after_crash: bool = False) -> Inode | None:
        """Another file of the series of a file that is older, the newest that is found. After a
        crash nothing is remembered, and the search is longer.
        """
        series = None if _is_part(inode.name) else series_of(inode.name)
        directory = self._namespace.inodes.get(inode.parent)
        if series is None or directory is None or directory.entries is None:
            return None
        last = self._last.get((inode.parent, series), [])
        names_max = _NAMES_MAX_ONCE if after_crash else _NAMES_MAX
        names = itertools.islice(reversed(directory.entries), names_max)
        near = (name for name in names if series_of(name) == series)
        for name in itertools.chain(last, near):
            other = self._namespace.inodes.get(directory.entries.get(name, 0))
            if other is not None and self._fits(other, inode):
                return other
        return None

    def _fits(self, other: Inode, inode: Inode) -> bool:
        if other is inode or other.live is None or other.version is not None or other.damaged:
            return False
        if other.uid != inode.uid:
            return False
        if not inode.uncommitted and other.commit_lsn >= inode.commit_lsn:
            return False
        if other.uncommitted or other.flags & layout.INODE_INCOMPLETE or not other.live.size:
            return False
        return not self._is_torn(other)

    def made(self, inode: Inode) -> None:
        """A new file was made: what comes next is compared with it."""
        series = series_of(inode.name)
        if series is None:
            return
        known = self._last.pop((inode.parent, series), [])
        names = [inode.name, *(name for name in known if name != inode.name)]
        self._last[inode.parent, series] = names[:_LAST_MAX]
        while len(self._last) > _SERIES_MAX:
            del self._last[next(iter(self._last))]

    def ended(self, parent: int, name: bytes) -> None:
        """A torn file has lost its name."""
        known = self._last.get((parent, series_of(name) or b""), [])
        if name in known:
            known.remove(name)


def _is_part(name: bytes) -> bool:
    return _PART.search(name) is not None or known_file(name) is not None


def is_unjudged(inode: Inode) -> bool:
    return inode.xattrs is not None and UNJUDGED_XATTR in inode.xattrs
