"""Open directories, and what a listing of one returns.

Other modules change names (``names``).

Invariants
- A listing leaves out names that were removed since it began; names made since appear in the next
  one, so that a reader who renames what it finds comes to an end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import BadHandleError
from cxlfs.store.hidden import is_unlisted

if TYPE_CHECKING:
    from cxlfs.store.namespace import FileKind, Inode, Namespace


class DirectoryEntry(NamedTuple):
    """``cookie_next`` continues a listing behind this entry."""

    name: bytes
    ino: int
    kind: FileKind
    cookie_next: int


@dataclasses.dataclass(slots=True)
class _Handle:
    """``end``: the first cookie that does not belong to the listing any more; 0: none was begun."""

    inode: Inode
    end: int = 0


class Directories:
    """Those that are open; one for each store."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._open: dict[int, _Handle] = {}
        self._next = 1

    def open(self, ino: int) -> int:
        """Raises NotFoundError, NotDirectoryError."""
        inode = self._namespace.directory(ino)
        handle = self._next
        self._next += 1
        self._open[handle] = _Handle(inode)
        inode.handles += 1
        return handle

    def read(self, handle: int, cookie: int) -> Iterator[DirectoryEntry]:
        """Entries behind ``cookie``; 0 begins anew with what is there now. Raises
        BadHandleError.
        """
        opened = self._open.get(handle)
        if opened is None:
            raise BadHandleError(f"no open directory {handle}")
        names = opened.inode.ordered_names
        if cookie == 0 or opened.end == 0:
            opened.end = names.end
        for place, name in names.after(cookie, opened.end):
            inode = self._namespace.find(opened.inode.ino, name)
            if inode is not None and not is_unlisted(opened.inode, name):
                yield DirectoryEntry(name, inode.ino, inode.kind, place)

    def release(self, handle: int) -> None:
        """Raises BadHandleError."""
        listing = self._open.pop(handle, None)
        if listing is None:
            raise BadHandleError(f"no open directory {handle}")
        listing.inode.handles -= 1
        self._namespace.reap(listing.inode.ino)
