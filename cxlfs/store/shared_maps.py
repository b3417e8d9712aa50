"""Files that programs fill through shared mappings: when they are published, and lost pages.

The kernel writes mapped pages back when it likes, often after the close of the last descriptor. The
close of a new content that has holes and is still mapped therefore publishes nothing. If a page
cannot be stored then, only the kernel hears of it, and of the programs only one that calls msync.
So the loss belongs to the file.

Other modules find out who maps a file (``fuse.mappings``) and publish (``versions``).

Invariants
- An unfinished content is published as complete when nothing of it is missing, at fsync, rename and
  link, or when the last writer is gone. Until then an overwrite goes back if its writer is killed,
  and what is published of anything else is incomplete.
- A content that has lost a page is never published over a committed one. fsync and close report the
  error until the content begins anew or is cut before the page: writing the page again does not
  help, as the kernel may have read the rest of it from the store meanwhile.
- A new file that has lost a page ends before it and is incomplete. Neither that nor a file that was
  to grow replaces another file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import CxlfsError
from cxlfs.format import layout
from cxlfs.store.clones import count_committed
from cxlfs.store.version import Version

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode


class LostPages(NamedTuple):
    """``start``: the file offset of the first byte that is lost."""

    start: int
    error: CxlfsError


class SharedMaps:
    """One for each volume."""

    def __init__(self) -> None:
        self._unfinished: dict[int, bool] = {}
        """Of each inode number, whether the file was whole and grows."""
        self._lost: dict[int, LostPages] = {}
        self._come: set[int] = set()
        """Inode numbers of files of which mapped pages came since the last publication."""
        self.is_used = False
        """Some file was one of these since the store was opened."""

    # --- closing ----------------------------------------------------------------------------

    def is_unfinished(self, ino: int) -> bool:
        """True if a close of the file has published nothing, as it was mapped and had holes."""
        return ino in self._unfinished

    def grows(self, ino: int) -> bool:
        """True if it is such a file, and was whole before."""
        return self._unfinished.get(ino, False)

    def is_filled(self, inode: Inode) -> bool:
        """True if a file that was whole is changed through a mapping: publishing a part of that
        would make it the version that comes back.
        """
        return self.grows(inode.ino) or (inode.ino in self._come and not inode.uncommitted)

    def is_finished(self, inode: Inode) -> bool:
        """True if such a file has no holes any more, and its writer was not killed."""
        if inode.ino not in self._unfinished or _has_holes(inode):
            return False
        return isinstance(inode.version, Version) and not inode.version.killed

    def defers(self, inode: Inode, is_mapped: Callable[[], bool] | None) -> bool:
        """Decide at a close: True if it publishes nothing.

        Args:
            is_mapped: whether the process that closes still maps the file, shared. Asked only for
                a new content with holes, or new holes. It may raise UnfinishedError.
        """
        if not _has_holes(inode):
            return False
        if inode.ino in self._unfinished:
            return True
        version = inode.version
        if not isinstance(version, Version) or is_mapped is None:
            return False
        begins_anew = _begins_anew(inode, version)
        if not (begins_anew or _has_new_holes(inode)) or not is_mapped():
            return False
        self._unfinished[inode.ino] = not begins_anew
        self.is_used = True
        if inode.held is not None:
            version.atomic = True  # it goes on with the overwrite that is held
            count_committed(inode, comes_back=True)
        return True

    def published(self, inode: Inode) -> None:
        """The content is committed, or the committed one is back."""
        self._come.discard(inode.ino)
        if not inode.flags & layout.INODE_INCOMPLETE:
            self._unfinished.pop(inode.ino, None)

    def forget(self, inode: Inode) -> None:
        """The content begins anew, or the file is gone."""
        self._unfinished.pop(inode.ino, None)
        self._come.discard(inode.ino)
        self.forget_lost(inode)

    # --- lost pages -------------------------------------------------------------------------

    def come(self, inode: Inode) -> None:
        """The kernel stores pages of a mapping."""
        self._come.add(inode.ino)

    def lose(self, inode: Inode, start: int, error: CxlfsError) -> None:
        """The kernel could not store pages from ``start`` on, and has dropped them."""
        self.is_used = True
        known = self._lost.get(inode.ino)
        if known is None or start < known.start:
            self._lost[inode.ino] = LostPages(start, error.with_traceback(None))
        if isinstance(inode.version, Version):
            inode.version.has_lost_pages = True

    def cut(self, inode: Inode, size: int) -> None:
        """The file ends at ``size`` now."""
        lost = self._lost.get(inode.ino)
        if lost is not None and size <= lost.start:
            self.forget_lost(inode)

    def forget_lost(self, inode: Inode) -> None:
        """Nothing of the content is missing."""
        if self._lost.pop(inode.ino, None) is not None and isinstance(inode.version, Version):
            inode.version.has_lost_pages = False

    def lost_of(self, ino: int) -> LostPages | None:
        """Return what the file has lost, because of which it must not be published."""
        return self._lost.get(ino)

    def is_spoiled(self, inode: Inode) -> bool:
        """True if a file is not what its program has made, which may not know: it lost a page."""
        return inode.ino in self._lost and inode.version is None


def _missing_bytes(content: FileMap) -> int:
    return content.size - content.allocated


def _has_holes(inode: Inode) -> bool:
    return _missing_bytes(inode.content) > 0


def _begins_anew(inode: Inode, version: Version) -> bool:
    """The content is not a change in place of one that is whole."""
    if version.whole or inode.uncommitted or inode.flags & layout.INODE_INCOMPLETE:
        return True
    return inode.held is not None and not inode.held.is_decided


def _has_new_holes(inode: Inode) -> bool:
    """The content has holes that the committed one does not have."""
    before = inode.committed
    return before is not None and _missing_bytes(inode.content) > _missing_bytes(before)
