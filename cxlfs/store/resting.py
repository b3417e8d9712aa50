"""Work on files at rest, in the background: which file is next, and how much may be done now.

Other modules say which files are worth it, and work on them (``defragmenter``, ``deduplicator``).

Invariants
- A pass looks at each file that was there at its beginning, a few at a time. The next one begins
  after REST_SECONDS, if a record was stored since or a file was not at rest.
- What was looked at is remembered for each file, until the file is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace

REST_SECONDS = 10.0
BURST_SECONDS = 0.5
_INODES_AT_ONCE = 256

_Seen = TypeVar("_Seen")


def rests(inode: Inode) -> bool:
    """A committed file that nobody is changing."""
    return (
        inode.live is not None
        and inode.version is None
        and inode.links > 0
        and not inode.uncommitted
    )


class Allowance:
    """How many bytes may be read or moved now. ``bytes_left`` may be overdrawn by one step."""

    def __init__(self) -> None:
        self.bytes_left = 0.0
        self._counted_to: float | None = None

    def grow(self, now: float, bytes_per_second: float) -> bool:
        """Time has passed (``now``: monotonic seconds). True: there is some."""
        since = BURST_SECONDS if self._counted_to is None else now - self._counted_to
        self._counted_to = now
        most = bytes_per_second * BURST_SECONDS
        self.bytes_left = min(most, self.bytes_left + since * bytes_per_second)
        return self.bytes_left > 0


class FilesAtRest(Generic[_Seen]):
    """One pass after the other over all files. ``seen``: what the last look left of each.
    ``look_again``: the next pass has work even if nothing changes.
    """

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._inodes = namespace.inodes
        self._began_lsn = -1
        self.look_again = True
        self._waiting: Iterator[int] | None = None
        self._rest_until = 0.0
        self.seen: dict[int, _Seen] = {}

    @property
    def is_passing(self) -> bool:
        """There are files that this pass has not looked at."""
        return self._waiting is not None

    def next(self, now: float, is_wanted: Callable[[Inode], bool]) -> Inode | None:
        """The next file that is wanted, among a few that are looked at."""
        if now < self._rest_until:
            return None
        if self._waiting is None:
            if not self.look_again and self._namespace.lsn == self._began_lsn:
                return None
            self._began_lsn, self.look_again = self._namespace.lsn, False
            self.seen = {ino: seen for ino, seen in self.seen.items() if ino in self._inodes}
            self._waiting = iter(list(self._inodes))
        for _ in range(_INODES_AT_ONCE):
            ino = next(self._waiting, None)
            if ino is None:
                self._waiting = None
                self._rest_until = now + REST_SECONDS
                return None
            inode = self._inodes.get(ino)
            if inode is None or inode.live is None:
                continue
            if not rests(inode):
                self.look_again = True
            elif is_wanted(inode):
                return inode
        return None
