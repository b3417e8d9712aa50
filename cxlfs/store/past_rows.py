"""Rows of history: what a fact was before a record changed it.

Other modules keep rows and order them (``past``, ``past_order``).

Invariants
- A row says what the committed state said just before its record.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from cxlfs.format import layout

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode

_ROOT_UID = 0
_ROW_BYTES, _REF_BYTES, _CHUNK_SHIFT = 900, 40, 14
"""Memory of a row, of each reference, and (4 bytes for each 64 KiB) of checksums; estimated."""


class Death(enum.IntEnum):
    """How a fact died."""

    OVERWRITTEN = 1
    CHANGED = 2
    """In place: parts of the content are also in the new one."""
    REMOVED = 3
    RENAMED_OVER = 4


class Row:
    """One fact that died. Nothing but ``content``, ``inode`` and the holds changes."""

    __slots__ = (
        "atime_ns",
        "birth_ns",
        "born_lsn",  # record that published the content; 0: it was made with its inode
        "born_ns",
        "content",  # FileMap of a file; None while the inode lives on without a name
        "death",
        "died_ns",
        "flags",
        "gid",
        "holds",
        "ino",
        "inode",  # whose last name went, as long as the kernel knows it or it is open
        "is_gone",  # given back or forgotten
        "is_pinned",
        "key",
        "kind",
        "memory_bytes",  # as measured when its content came
        "mode",
        "mtime_ns",
        "name",
        "parent",
        "rdev",
        "target",
        "uid",
        "xattrs",
    )

    def __init__(  # noqa: PLR0917 - by position: half the time
        self,
        key: tuple[int, int],
        died_ns: int,
        death: Death,
        inode: Inode,
        parent: int,
        name: bytes,
        content: FileMap | None,
    ) -> None:
        self.key = key
        self.died_ns = died_ns
        self.death = death
        self.ino = inode.ino
        self.parent = parent
        self.name = name
        self.kind = inode.kind
        self.mode = inode.mode
        self.uid = inode.uid
        self.gid = inode.gid
        self.rdev = inode.rdev
        self.flags = inode.flags
        self.atime_ns = inode.atime_ns
        self.mtime_ns = inode.committed_mtime_ns
        self.birth_ns = inode.birth_ns
        self.born_lsn = inode.commit_lsn
        self.born_ns = inode.commit_ns
        self.target = inode.target
        self.xattrs = dict(inode.xattrs) if inode.xattrs else None
        self.content = content
        self.inode = inode if content is None else None
        self.is_gone = self.is_pinned = False
        self.holds = 0
        self.memory_bytes = self.measure()

    @property
    def died_lsn(self) -> int:
        return self.key[0]

    @property
    def is_held(self) -> bool:
        return self.holds > 0

    @property
    def is_incomplete(self) -> bool:
        """Its writer had not closed it, or was killed."""
        return bool(self.flags & layout.INODE_INCOMPLETE)

    @property
    def size(self) -> int:
        found = self.data
        return len(self.target) if found is None else found.size

    @property
    def data(self) -> FileMap | None:
        """The content of a file, wherever it is now."""
        if self.content is None and self.inode is not None:
            return self.inode.committed or self.inode.live
        return self.content

    def measure(self) -> int:
        """Bytes of memory now, estimated."""
        taken = _ROW_BYTES + len(self.name) + len(self.target)
        for name, value in (self.xattrs or {}).items():
            taken += len(name) + len(value)
        if self.content is not None:
            taken += _REF_BYTES * self.content.ref_count + (self.content.size >> _CHUNK_SHIFT)
        return taken

    def __lt__(self, other: Row) -> bool:
        return self.key < other.key


def may_see(row: Row, uid: int) -> bool:
    """True if the user owned it at its death, or is root. Its mode says nothing."""
    return uid in (_ROOT_UID, row.uid)
