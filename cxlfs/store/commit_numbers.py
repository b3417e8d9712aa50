"""The commit that a content belongs to, where it is not the one of the record that published it.

A content that comes back (``unit_returns``) is published anew, and is no newer than it was. An
extended attribute under the hidden prefix says so in the same record, behind the content. Applying
the record gives the file that number and time. The next content takes the attribute away.

Invariants
- A value that makes no sense, or names a later commit than the record's own, counts as none.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from cxlfs.format.layout import XATTR_HIDDEN_PREFIX
from cxlfs.format.operations import Operation, XattrRemoveOperation, XattrSetOperation

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode

COMMIT_XATTR: Final = XATTR_HIDDEN_PREFIX + b"commit"
_VALUE = struct.Struct("<Qq")
"""Commit number; time of that commit, ns."""


def commit_operation(ino: int, source: Inode) -> XattrSetOperation:
    """The content of ``ino`` belongs to the commit of the content of ``source``."""
    return XattrSetOperation(ino, COMMIT_XATTR, _VALUE.pack(source.commit_lsn, source.commit_ns))


def decode_commit(value: bytes, record_lsn: int) -> tuple[int, int] | None:
    """Number and time."""
    if len(value) != _VALUE.size:
        return None
    lsn, time_ns = _VALUE.unpack(value)
    return (lsn, time_ns) if 0 < lsn <= record_lsn else None


def removal(inode: Inode) -> list[Operation]:
    """What the record of another content says besides."""
    if inode.xattrs is None or COMMIT_XATTR not in inode.xattrs:
        return []
    return [XattrRemoveOperation(inode.ino, COMMIT_XATTR)]
