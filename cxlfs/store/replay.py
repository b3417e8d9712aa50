"""Applying journal records to a namespace and an extent engine during recovery.

Never here: reading the journal, writing anything.

Invariants
- Deterministic: the same records over the same image give the same state; no clock, no randomness.
- Nothing in a record is trusted: what does not fit the state raises CorruptionError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs import operations
from cxlfs.errors import CorruptionError, InvalidArgumentError, NamespaceError
from cxlfs.namespace import FileKind, Inode, Namespace
from cxlfs.native.maps import FileMap

if TYPE_CHECKING:
    from cxlfs.journal_reader import Record
    from cxlfs.native.extents import Engine


class Replayer:
    """Applies records one after the other; ``next_extent_id`` follows what they define."""

    def __init__(self, namespace: Namespace, engine: Engine, *, next_extent_id: int) -> None:
        self.namespace = namespace
        self.engine = engine
        self.next_extent_id = next_extent_id
        self.last_time_ns = 0
        self._lsn = self._time_ns = 0
        self._apply: dict[type, Callable[..., None]] = {
            operations.InodeOperation: self._inode,
            operations.LinkOperation: self._link,
            operations.UnlinkOperation: self._unlink,
            operations.SymlinkOperation: self._symlink,
            operations.XattrSetOperation: self._xattr_set,
            operations.XattrRemoveOperation: self._xattr_remove,
            operations.ExtentOperation: self._extent,
            operations.ContentOperation: self._content,
            operations.PromoteOperation: self._promote,
            operations.AsideDropOperation: self._aside_drop,
            operations.MoveOperation: self._move,
        }

    def apply(self, record: Record) -> None:
        """Apply one record. Raises CorruptionError when it contradicts the state."""
        self._lsn, self._time_ns = record.lsn, record.time_ns
        self.last_time_ns = record.time_ns
        ops = operations.decode(record.payload, record.operation_count, record.media_offset)
        handlers = self._apply
        try:
            for op in ops:
                handlers[type(op)](op)
            if self.namespace.orphan_count():
                self.namespace.reap()
        except (NamespaceError, InvalidArgumentError, CorruptionError) as error:
            raise CorruptionError(
                f"journal record {record.lsn} contradicts the state: {error.message}",
                structure="journal record",
                media_offset=record.media_offset,
            ) from error

    def _inode(self, op: operations.InodeOperation) -> None:
        inode = self.namespace.inodes.get(op.ino)
        if inode is None:
            inode = Inode(op.ino, op.mode, op.uid, op.gid, rdev=op.rdev, flags=op.flags)
            if inode.kind is FileKind.FILE:
                inode.live = FileMap(self.engine, owner=op.ino)
            self.namespace.add(inode)
        elif (inode.mode ^ op.mode) & 0o170000:
            raise InvalidArgumentError("an inode cannot change its type")
        inode.mode, inode.uid, inode.gid = op.mode, op.uid, op.gid
        inode.rdev, inode.flags = op.rdev, op.flags
        inode.atime_ns, inode.birth_ns = op.atime_ns, op.birth_ns
        inode.mtime_ns = inode.committed_mtime_ns = op.mtime_ns
        inode.ctime_ns = inode.committed_ctime_ns = op.ctime_ns

    def _link(self, op: operations.LinkOperation) -> None:
        inode = self.namespace.get(op.ino)
        if inode.entries is not None and (
            inode.links or self.namespace.is_below(op.parent, op.ino)
        ):
            raise InvalidArgumentError("a directory has one name and cannot lie below itself")
        self.namespace.link(op.parent, op.name, op.ino)

    def _unlink(self, op: operations.UnlinkOperation) -> None:
        self.namespace.unlink(op.parent, op.name)

    def _symlink(self, op: operations.SymlinkOperation) -> None:
        inode = self.namespace.get(op.ino)
        if inode.kind is not FileKind.SYMLINK:
            raise InvalidArgumentError("not a symbolic link")
        self.namespace.set_target(inode, op.target)

    def _xattr_set(self, op: operations.XattrSetOperation) -> None:
        self.namespace.set_xattr(self.namespace.get(op.ino), op.name, op.value)

    def _xattr_remove(self, op: operations.XattrRemoveOperation) -> None:
        self.namespace.remove_xattr(self.namespace.get(op.ino), op.name)

    def _extent(self, op: operations.ExtentOperation) -> None:
        self.engine.define_one(op.id, op.media_offset, op.length, op.first_chunk, op.crcs)
        self.next_extent_id = max(self.next_extent_id, op.id + 1)

    def _content(self, op: operations.ContentOperation) -> None:
        inode = self._file(op.ino)
        if op.aside:
            if inode.aside is None:
                inode.aside = FileMap(self.engine, owner=op.ino)
            target = inode.aside
        else:
            target = inode.content
            inode.commit_lsn, inode.commit_ns = self._lsn, self._time_ns
        target.replay(op.cut, op.refs, op.size)

    def _promote(self, op: operations.PromoteOperation) -> None:
        inode = self._file(op.ino)
        if inode.aside is None:
            raise InvalidArgumentError("there is no version to promote")
        inode.content.close()
        inode.live, inode.aside = inode.aside, None
        inode.commit_lsn, inode.commit_ns = self._lsn, self._time_ns

    def _aside_drop(self, op: operations.AsideDropOperation) -> None:
        inode = self._file(op.ino)
        if inode.aside is not None:
            inode.aside.close()
            inode.aside = None

    def _move(self, op: operations.MoveOperation) -> None:
        for ino in op.inos:
            inode = self._file(ino)
            for content in (inode.live, inode.aside):
                if content is not None:
                    content.move(
                        op.source_id, op.source_offset, op.length, op.target_id, op.target_offset
                    )

    def _file(self, ino: int) -> Inode:
        inode = self.namespace.get(ino)
        if inode.live is None:
            raise InvalidArgumentError("not a file")
        return inode
