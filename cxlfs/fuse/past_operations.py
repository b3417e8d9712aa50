"""pyfuse3's handlers for the view of the past: arguments and results of ``past_view``.

Other modules carry requests that come without libfuse (``past_direct``).

Invariants
- A handler that is not here changes something, and is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import pyfuse3

from cxlfs.errors import NoAttributeError, ReadOnlyError
from cxlfs.fuse.attributes import entry_of
from cxlfs.fuse.past_view import PIN_XATTR, PastView

if TYPE_CHECKING:
    from cxlfs.store.namespace import Attributes

_TWO_DIRECTORIES = frozenset({"rename", "link"})
_CONTEXT_LAST = pyfuse3.RequestContext


class PastOperations:
    """Handlers by the names that pyfuse3's have."""

    def __init__(self, view: PastView, *, is_direct: Callable[[int], bool]) -> None:
        self._view = view
        self._is_direct = is_direct

    def handler(self, name: str, arguments: tuple[object, ...]) -> Callable[..., object] | None:
        """What serves a request; None: it is not about the past."""
        concerns = self._view.concerns
        first = arguments[0] if arguments else None
        if not concerns(first):
            leads_there = name == "lookup" and self._view.concerns_name(*arguments[:2])
            into = name in _TWO_DIRECTORIES and any(map(concerns, arguments))
            if not leads_there and not into:
                return None
        found: Callable[..., object] = getattr(self, name, _refuse)
        return found

    def lookup(self, parent: int, name: bytes, context: pyfuse3.RequestContext) -> object:
        return _entry(self._view.lookup(parent, name, context.uid))

    def getattr(self, inode: int, context: pyfuse3.RequestContext) -> object:
        return _entry(self._view.get_attributes(inode, context.uid))

    def readlink(self, inode: int, context: pyfuse3.RequestContext) -> bytes:
        return self._view.read_symlink(inode, context.uid)

    def access(self, inode: int, mode: int, context: pyfuse3.RequestContext) -> bool:
        self._view.get_attributes(inode, context.uid)
        if mode & os.W_OK:
            _refuse()
        return True

    def open(self, inode: int, flags: int, context: pyfuse3.RequestContext) -> pyfuse3.FileInfo:
        handle = self._view.open(inode, flags, context.uid)
        return pyfuse3.FileInfo(
            fh=pyfuse3.FileHandleT(handle), direct_io=self._is_direct(flags), keep_cache=True
        )

    def read(self, handle: int, offset: int, size: int) -> bytes | memoryview:
        return self._view.read(handle, offset, size)

    def flush(self, handle: int) -> None: ...

    def fsync(self, handle: int, datasync: bool) -> None: ...  # noqa: FBT001  pyfuse3's

    def fsyncdir(self, handle: int, datasync: bool) -> None: ...  # noqa: FBT001  pyfuse3's

    def release(self, handle: int) -> None:
        self._view.release(handle)

    def opendir(self, inode: int, context: pyfuse3.RequestContext) -> int:
        return self._view.open_directory(inode, context.uid)

    def readdir(self, handle: int, start: int, token: pyfuse3.ReaddirToken) -> None:
        for place, listed in self._view.listing(handle, start):
            entry = _entry(listed.attributes)
            if not pyfuse3.readdir_reply(token, listed.name, entry, place):
                return

    def releasedir(self, handle: int) -> None:
        self._view.release_directory(handle)

    def getxattr(self, inode: int, name: bytes, context: pyfuse3.RequestContext) -> bytes:
        return self._view.xattr(inode, name, context.uid)

    def listxattr(self, inode: int, context: pyfuse3.RequestContext) -> Sequence[bytes]:
        return self._view.list_xattrs(inode, context.uid)

    def setxattr(
        self, inode: int, name: bytes, value: bytes, context: pyfuse3.RequestContext
    ) -> None:
        if name != PIN_XATTR:
            _refuse()
        self._view.pin(inode, bytes(value), context.uid)

    def removexattr(self, inode: int, name: bytes, context: pyfuse3.RequestContext) -> None:
        if name != PIN_XATTR:
            raise NoAttributeError("no such attribute")
        self._view.unpin(inode, context.uid)


def _entry(attributes: Attributes) -> pyfuse3.EntryAttributes:
    """The kernel remembers neither name nor attributes."""
    entry = entry_of(attributes, 0)
    entry.entry_timeout = 0
    return entry


def _refuse(*_arguments: object) -> NoReturn:
    raise ReadOnlyError("the past cannot be changed")
