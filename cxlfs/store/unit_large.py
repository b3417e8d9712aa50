"""The copy of one file of very many references, in parts: each is durable aside, and one record
makes all of it the content.

Never here: which file, and what it is called (``unit_keeping``).

Invariants
- Between two parts nothing of the copy waits for a record. It is a file of no content until the
  last part, or one of its old content; whoever finds it after a crash drops it.
- A source that has another content than before is not gone on with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Versions

REFS_AT_ONCE = 10_000
"""1 µs for each: they are referred to, written to the journal, and put into the content aside."""

Share = Callable[["Inode", "FileMap", int, int], None]


class LargeCopy:
    """Of ``source``, in ``made``, which has a version. ``share``: let a content refer to a range of
    the committed one of an inode.
    """

    def __init__(self, versions: Versions, source: Inode, made: Inode, share: Share) -> None:
        self.source = source
        self.made = made
        self._versions = versions
        self._share = share
        self._offset = 0

    def step(self, content: FileMap) -> bool:
        """One part of ``content``, the committed one of the source; False: that was the last, and
        it is to be published. Raises as :meth:`Versions.stage`.
        """
        size = content.size
        length = content.reach(self._offset, size - self._offset, REFS_AT_ONCE)
        self._share(self.source, self.made.content, self._offset, length)
        self._offset += length
        if self._offset < size:
            self._versions.stage_part(self.made)
            return True
        self.made.content.truncate(size)
        return False
