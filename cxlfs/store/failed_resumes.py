"""How often a program that had opened a file failed: kept with the file, void when it is replaced.

In an extended attribute under the hidden prefix (see ``health``), so that a program of any version
reads the store. Read by name as ``user.cxlfs.failed_resumes``.

Never here: when a program counts as failed (``fuse.readers``).

Invariants
- The count belongs to one content: it says which commit it is of, and counts as 0 behind another.
- What is read from the media is not trusted: an attribute that makes no sense counts as none.
- What cannot be written, because the store is read-only or full, is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cxlfs.errors import NoSpaceError
from cxlfs.format.operations import XattrSetOperation
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import FileKind, Inode

if TYPE_CHECKING:
    from cxlfs.store.volume import Volume

FAILED_RESUMES_XATTR = HIDDEN_PREFIX + b"failed-resumes"
COUNT_MAX = 1_000_000
_AT_ONCE = 64
_VALUE_BYTES_MAX = 64


def count_failed_resumes(volume: Volume, inos: Sequence[int]) -> None:
    """One more for each of these that is still there, and committed. Raises MediaError."""
    if volume.read_only:
        return
    inodes = [volume.namespace.inodes[ino] for ino in inos if ino in volume.namespace.inodes]
    counted = [i for i in inodes if i.kind is FileKind.FILE and i.links and not i.uncommitted]
    for start in range(0, len(counted), _AT_ONCE):
        if not volume.metadata_room():
            return
        values = {
            inode: b"%d %d" % (min(failed_resumes(inode) + 1, COUNT_MAX), inode.commit_lsn)
            for inode in counted[start : start + _AT_ONCE]
        }
        try:
            volume.commit(
                [XattrSetOperation(i.ino, FAILED_RESUMES_XATTR, v) for i, v in values.items()]
            )
        except NoSpaceError:
            return
        for inode, value in values.items():
            volume.namespace.set_xattr(inode, FAILED_RESUMES_XATTR, value)


def failed_resumes(inode: Inode) -> int:
    """Of the content that the file has now."""
    value = (inode.xattrs or {}).get(FAILED_RESUMES_XATTR, b"")
    words = value.split(b" ") if len(value) <= _VALUE_BYTES_MAX else []
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return 0
    count, commit = map(int, words)
    return min(count, COUNT_MAX) if commit == inode.commit_lsn else 0
