"""What the kernel holds: how often it looked up each inode, and which files it has open, for whom.

Never here: what an inode or a handle means (the store).

Invariants
- An inode is pinned in the store exactly while its lookup count is above zero.
- A lookup count is raised before the reply that tells the kernel, and only FORGET lowers it.
- Unmounting may leave counts above zero: ``forget_all`` takes them back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

from cxlfs.errors import BadHandleError, InvariantError
from cxlfs.fuse.processes import Process

_WRITERS_MIN = 16


class Pins(Protocol):
    def pin(self, ino: int) -> None: ...
    def unpin(self, ino: int) -> None: ...


class LookupCounts:
    """The kernel's references to inodes; the root is not counted, it never goes away."""

    def __init__(self, store: Pins) -> None:
        self._store = store
        self._counts: dict[int, int] = {}

    def __getitem__(self, ino: int) -> int:
        return self._counts.get(ino, 0)

    def __len__(self) -> int:
        return len(self._counts)

    def remember(self, ino: int) -> None:
        """One more reply has told the kernel of ``ino``."""
        count = self._counts.get(ino, 0)
        if count == 0:
            self._store.pin(ino)
        self._counts[ino] = count + 1

    def forget(self, ino: int, lookups: int) -> bool:
        """The kernel gave back that many references; True when it knows the inode no more.

        The kernel also forgets the root, at unmount, which was never looked up.
        """
        count = self._counts.get(ino, 0)
        if count == 0:
            return False
        if not 0 < lookups <= count:
            raise InvariantError(f"inode {ino}: {lookups} lookups forgotten of {count}")
        if lookups < count:
            self._counts[ino] = count - lookups
            return False
        del self._counts[ino]
        self._store.unpin(ino)
        return True

    def forget_all(self) -> None:
        """The connection is gone, and with it every reference."""
        while self._counts:
            ino, _ = self._counts.popitem()
            self._store.unpin(ino)


class Caller(NamedTuple):
    """Who asks; ``tid``: a thread, 0 when not known."""

    uid: int
    gid: int
    tid: int


class Opened(NamedTuple):
    """What the kernel is told of an open file; see ``page_cache``."""

    handle: int
    direct: bool
    keep_cache: bool
    writable: bool


@dataclasses.dataclass(slots=True)
class OpenFile:
    """One open file description of the kernel."""

    ino: int
    writable: bool
    direct: bool
    """The kernel's page cache is bypassed."""
    appends: bool
    """Opened with O_APPEND."""
    opener: Process | None
    """Of writable ones: who decides, by being killed or not, whether a new version is published."""
    may_keep_set_id: bool
    """The opener was root, whose writes leave the set-ID bits alone."""
    uid: int
    """The opener's user, who makes all changes through it."""
    gid: int
    """The opener's group."""
    writers: set[Process] = dataclasses.field(default_factory=set)
    """Who is known to have written through it, beside the opener. Of those that have ended since,
    and cannot close it any more, at most as many as of the others, and ``_WRITERS_MIN``.
    """
    writers_kept: int = _WRITERS_MIN

    def note_writer(self, writer: Process, is_alive: Callable[[Process], bool]) -> None:
        """One look at each every time that their number has doubled."""
        self.writers.add(writer)
        if len(self.writers) > self.writers_kept:
            self.writers = {process for process in self.writers if is_alive(process)}
            self.writers_kept = max(_WRITERS_MIN, 2 * len(self.writers))


class OpenFiles:
    """Open files by handle, and how many of them there are per inode."""

    def __init__(self) -> None:
        self._files: dict[int, OpenFile] = {}
        self._cached: dict[int, int] = {}
        self._writable: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, handle: object) -> bool:
        return handle in self._files

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def get(self, handle: int) -> OpenFile:
        """Raises BadHandleError."""
        file = self._files.get(handle)
        if file is None:
            raise BadHandleError(f"no open file {handle}")
        return file

    def add(self, handle: int, file: OpenFile) -> None:
        if handle in self._files:
            raise InvariantError(f"handle {handle} given out twice")
        self._files[handle] = file
        if not file.direct:
            self._cached[file.ino] = self._cached.get(file.ino, 0) + 1
        if file.writable:
            self._writable[file.ino] = self._writable.get(file.ino, 0) + 1

    def remove(self, handle: int) -> OpenFile:
        """Raises BadHandleError."""
        file = self.get(handle)
        del self._files[handle]
        if not file.direct:
            _decrement(self._cached, file.ino)
        if file.writable:
            _decrement(self._writable, file.ino)
        return file

    def has_cached(self, ino: int) -> bool:
        """Somebody may be reading or mapping ``ino`` through the page cache."""
        return ino in self._cached

    def has_writable(self, ino: int) -> bool:
        return ino in self._writable


def _decrement(counts: dict[int, int], ino: int) -> None:
    counts[ino] -= 1
    if counts[ino] == 0:
        del counts[ino]
