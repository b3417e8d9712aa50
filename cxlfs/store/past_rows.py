"""Rows of history: what a fact was before a record changed it.

Other modules keep rows and order them (``past``, ``past_order``).

Invariants
- A row says what the committed state said just before its record.
- A row that an opening has read is like one that died since.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
from typing import TYPE_CHECKING, Final

from cxlfs.format import layout, segments
from cxlfs.store.commit_numbers import COMMIT_XATTR
from cxlfs.store.namespace import FileKind, kind_of

if TYPE_CHECKING:
    from cxlfs.format.history import Texts
    from cxlfs.format.superblock import Superblock
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode

NEVER = (1 << 64) - 1
"""A record that there is not."""
SPAN_XATTR: Final = layout.XATTR_HIDDEN_PREFIX + b"span"
"""In a batch, beside the attributes of a row: ``named_lsn`` and ``ended_lsn``, as ``_SPAN``."""
_SPAN = struct.Struct("<QQ")
_ROOT_UID = 0
_ROWS_KEPT = 1024
"""So many rows that are gone, or as many as are live, are remembered."""
_ROW_BYTES, _REF_BYTES, _CHUNK_SHIFT = 900, 40, 14
"""Memory of a row, of each reference, and (4 bytes for each 64 KiB) of checksums; estimated."""


class Death(enum.IntEnum):
    """How a fact died."""

    OVERWRITTEN = 1
    CHANGED = 2
    """In place: parts of the content are also in the new one."""
    REMOVED = 3
    RENAMED_OVER = 4


LAST_NAMES: Final = (Death.REMOVED, Death.RENAMED_OVER)
"""How what lives without a name lost it."""


@dataclasses.dataclass(slots=True, eq=False)
class ArchiveSegment:
    """A segment with batches of history. ``start``: media offset of its payload, of which
    ``used_bytes`` of ``size_bytes`` hold batches with ``stored`` rows. ``live`` of ``rows`` are in
    no later batch.
    """

    index: int
    seed: int
    start: int
    size_bytes: int
    used_bytes: int = 0
    stored: int = 0
    live: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, block: Superblock, header: segments.SegmentHeader) -> ArchiveSegment:
        return cls(
            header.index,
            segments.record_seed(header.nonce, header.epoch, block.uuid),
            block.segment_offset(header.index) + layout.SEGMENT_HEADER_BYTES,
            block.segment_payload_bytes,
        )

    def add(self, row: Row) -> None:
        """A batch in it has the row."""
        row.archived = self
        self.rows.append(row)
        self.stored += 1
        self.live += 1

    def drop_one(self) -> None:
        """Of one of its rows another batch has more, or none does: its ``archived`` says so."""
        self.live -= 1
        if len(self.rows) > 2 * self.live + _ROWS_KEPT:
            self.rows = [each for each in self.rows if each.archived is self]


_DEATHS = {int(death): death for death in Death}


class Row:
    """One fact that died. Only ``content``, ``inode``, ``archived`` and the holds change."""

    __slots__ = (
        "archived",  # the segment whose batch has it
        "atime_ns",
        "birth_ns",
        "born_lsn",  # record that published the content; 0: it was made with its inode
        "born_ns",
        "content",  # FileMap of a file; None while the inode lives on without a name
        "death",
        "died_ns",
        "ended_lsn",  # record by which the content was replaced: earlier, if it was held after that
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
        "named_lsn",  # of a last name: record that gave it; NEVER: not known
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
        if self.xattrs is not None:
            self.xattrs.pop(COMMIT_XATTR, None)
        self.content = content
        self.inode = inode if content is None else None
        self.archived: ArchiveSegment | None = None
        self.is_gone = self.is_pinned = False
        self.holds = 0
        self.ended_lsn, self.named_lsn = key[0], NEVER
        self.memory_bytes = self.measure()

    @classmethod
    def from_media(cls, told: tuple[int, ...], texts: Texts, content: FileMap | None) -> Row:
        """What a batch says: the fields of HISTORY_ROW_DTYPE, all of them checked."""
        row = cls.__new__(cls)
        ended_lsn, row.died_ns, row.ino, row.parent, row.born_lsn, row.born_ns = told[:6]
        _, _, row.atime_ns, row.mtime_ns, row.birth_ns, operation, death = told[6:13]
        row.mode, row.uid, row.gid, row.rdev, row.flags = told[13:18]
        row.key, row.death = (ended_lsn, operation), _DEATHS[death]
        row.kind = kind_of(row.mode) or FileKind.FILE
        row.name, row.target = texts.name, texts.target
        xattrs = dict(texts.xattrs or ())
        row.named_lsn, row.ended_lsn = _known_lsns(xattrs.pop(SPAN_XATTR, b""), row.born_lsn)
        row.xattrs = xattrs or None
        row.content, row.inode, row.archived = content, None, None
        row.is_gone = row.is_pinned = False
        row.holds = 0
        row.memory_bytes = row.measure()
        return row

    @property
    def stored_xattrs(self) -> dict[bytes, bytes]:
        """Attributes as a batch has them."""
        span = {SPAN_XATTR: _SPAN.pack(self.named_lsn, self.ended_lsn)}
        return (self.xattrs or {}) | span

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

    def was_there(self, commit: int) -> bool:
        """It was a fact when that commit was the last one."""
        return self.born_lsn <= commit < self.ended_lsn

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


def _known_lsns(value: bytes, born_lsn: int) -> tuple[int, int]:
    """``named_lsn`` and ``ended_lsn``. A value that makes no sense counts as none: then nothing is
    known of the states that the row belongs to.
    """
    return _SPAN.unpack(value) if len(value) == _SPAN.size else (NEVER, born_lsn)


def may_see(row: Row, uid: int) -> bool:
    """True if the user owned it at its death, or is root. Its mode says nothing."""
    return uid in (_ROOT_UID, row.uid)
