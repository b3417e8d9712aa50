"""Bringing history back: one row, as a new name or a new content of a file.

Other modules bring directories back (``past_trees``), keep rows (``past``) and decide who may ask
(``past_rows.may_see``).

Invariants
- A restore takes references, never bytes. It is one record, or (a content that one record cannot
  hold) several that are staged aside and one that promotes them.
- The record of a restore defines again every extent that only history referred to: replay may have
  dropped it, and an image has left it out. The delta says so by itself (csrc/extents/coverage.c).
- The row stays: what was restored is live beside it.
- A row that is being restored is pinned: making room for it does not give it back.
"""

from __future__ import annotations

import contextlib
import logging
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from cxlfs.errors import BusyError, ExistsError, InvariantError, NotFoundError
from cxlfs.format.operations import InodeOperation, XattrRemoveOperation, XattrSetOperation
from cxlfs.native.maps import FileMap
from cxlfs.store.namespace import FileKind
from cxlfs.store.past_rows import LAST_NAMES, Row

if TYPE_CHECKING:
    from cxlfs.format.operations import Operation
    from cxlfs.store.names import Names
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume


class PastVerbs:
    """The verbs over history; one for each volume."""

    def __init__(self, volume: Volume, versions: Versions, names: Names) -> None:
        self.volume = volume
        self.versions = versions
        self.names = names
        self.past = versions.past
        self.changed: Callable[[int, bytes], None] = lambda _parent, _name: None
        """Called with a directory and a name that means something without a request for it."""
        self.is_telling: Callable[[], bool] = lambda: False
        """Somebody is yet to be told of names that changed."""
        self._reborn: dict[int, int] = {}
        """Directories that were made anew: the inode number before, and now."""

    # --- one row ----------------------------------------------------------------------------

    def restore(self, row: Row, parent: int, name: bytes) -> Inode:
        """Make what a row says a new file, directory, link or special file of that name. If the
        name means a file, its content becomes a new committed content of that file, whose owner
        stays and whose mode becomes the stricter one. Durable on return.

        Raises NotFoundError (the row is gone), ExistsError, BusyError (the file is being written),
        NoSpaceError, MediaError, ReadOnlyError.
        """
        self.volume.require_writable()
        if row.is_gone:
            raise NotFoundError("that version was given back")
        with self._pinned(row), self.versions.outside_units():
            target = self.volume.namespace.find(parent, name)
            if target is None:
                inode = self._make(row, parent, name)
                self.changed(parent, name)
            elif target.kind is FileKind.FILE and row.kind is FileKind.FILE:
                inode = self._replace(row, target)
            else:
                raise ExistsError("the name means something else")
        self.volume.fence()
        return inode

    def undelete(self, row: Row, place: tuple[int, bytes] | None = None) -> Inode:
        """Restore what lost its last name under that name, or another ``place``. Directories of its
        path that are gone are made anew from their rows. Raises as :meth:`restore`, and
        NotFoundError if one has none.
        """
        if row.death not in LAST_NAMES:
            raise ExistsError("only its content was replaced")
        parent, name = place or (self._directory(row.parent), row.name)
        if self.volume.namespace.find(parent, name) is not None:
            raise ExistsError("the name exists")
        inode = self.restore(row, parent, name)
        if inode.entries is not None:
            self._reborn[row.ino] = inode.ino
        return inode

    def forget(self, rows: Iterable[Row]) -> None:
        """Drop rows at once, held or not; no batch on the media has them when this returns.

        Durable. Raises MediaError.
        """
        forgotten = list(rows)
        self.past.archive.erase(forgotten)
        for row in forgotten:
            self.past.forget(row)

    @contextlib.contextmanager
    def _pinned(self, row: Row) -> Iterator[None]:
        was_pinned = row.is_pinned
        self.past.hold(row, pinned=True)
        try:
            yield
        finally:
            row.is_pinned = was_pinned
            self.past.release(row)

    def _directory(self, ino: int) -> int:
        """A directory that was there, or the one that took its place."""
        ino = self._reborn.get(ino, ino)
        inode = self.volume.namespace.inodes.get(ino)
        if inode is not None and inode.entries is not None and inode.links:
            return ino
        rows = [row for row in self.past.of_inode(ino) if row.kind is FileKind.DIRECTORY]
        if not rows:
            raise NotFoundError("the directory is gone, and history has no row of it")
        parent = self._directory(rows[-1].parent)
        found = self.volume.namespace.find(parent, rows[-1].name)
        if found is None:
            return self.undelete(rows[-1]).ino
        if found.entries is None:
            raise ExistsError("the name of the directory means something else")
        return found.ino

    def _dress(self, row: Row, inode: Inode) -> None:
        """Attributes as they were."""
        inode.mode, inode.uid, inode.gid = row.mode, row.uid, row.gid
        inode.atime_ns, inode.birth_ns = row.atime_ns, row.birth_ns
        inode.mtime_ns = inode.committed_mtime_ns = row.mtime_ns
        for name, value in (row.xattrs or {}).items():
            self.volume.namespace.set_xattr(inode, name, value)

    def _make(self, row: Row, parent: int, name: bytes) -> Inode:
        if row.kind is not FileKind.FILE:
            return self.names.make(
                parent,
                name,
                row.mode,
                row.uid,
                row.gid,
                rdev=row.rdev,
                target=row.target,
                dress=lambda inode: self._dress(row, inode),
            )
        inode = self.names.create(parent, name, row.mode, row.uid, row.gid)
        try:
            self._dress(row, inode)
            self._share(row, inode.content)
            self.versions.publish(inode, incomplete=row.is_incomplete)
        except BaseException:
            if inode.uncommitted or not inode.commit_lsn:
                self.names.unlink(parent, name)
            raise
        self.versions.finish(inode)
        return inode

    def _replace(self, row: Row, target: Inode) -> Inode:
        if target.version is not None or target.uncommitted:
            raise BusyError(
                "the file is being written",
                next_step="wait until the program has closed it, or name another with --to",
            )
        fresh = FileMap(self.volume.engine, owner=target.ino)
        try:
            self._share(row, fresh)
            self.versions.begin_empty(target, atomic=True, now=time.monotonic())
        except BaseException:
            fresh.close()
            raise
        empty = target.content
        target.replace_live(fresh)
        self.versions.close_map(empty)
        try:
            prepared = self._prepare(target, incomplete=row.is_incomplete)
            mode = stat.S_IFMT(target.mode) | (stat.S_IMODE(target.mode) & stat.S_IMODE(row.mode))
            ops = [self._as_it_was(op, row, mode) for op in prepared.operations]
            changes = _xattr_changes(row, target)
            self.versions.commit(prepared, [*ops, *changes])
        except BaseException:
            target.content.truncate(0)  # nothing of it is kept aside
            if not self.volume.read_only:
                self.versions.revert(target, "it could not be restored")
            raise
        self._follow(target, row, mode, changes)
        self.versions.finish(target)
        message = "an earlier version is the content: a user asked for it"
        self.volume.event("restored", message, ino=target.ino, level=logging.INFO)
        return target

    def _prepare(self, target: Inode, *, incomplete: bool) -> Prepared:
        prepared = self.versions.prepare(target, incomplete=incomplete)
        if prepared is None:
            raise InvariantError("a new content is to be published")
        return prepared

    def _as_it_was(self, op: Operation, row: Row, mode: int) -> Operation:
        if type(op) is InodeOperation:
            return op._replace(mode=mode, mtime_ns=row.mtime_ns, ctime_ns=self.volume.now())
        return op

    def _follow(self, target: Inode, row: Row, mode: int, changes: list[Operation]) -> None:
        target.mode = mode
        target.mtime_ns = row.mtime_ns
        target.ctime_ns = target.committed_ctime_ns
        for op in changes:
            if type(op) is XattrSetOperation:
                self.volume.namespace.set_xattr(target, op.name, op.value)
            elif type(op) is XattrRemoveOperation:
                self.volume.namespace.remove_xattr(target, op.name)

    def _share(self, row: Row, content: FileMap) -> None:
        """The references of a row, once more. Raises NoSpaceError: metadata has no room."""
        source = row.data
        if source is None:
            raise NotFoundError("that version was given back")
        self.versions.sharing.whole(source, content)
        self.names.require_metadata_room()


def _xattr_changes(row: Row, target: Inode) -> list[Operation]:
    """Attributes that were others, or were not there."""
    wanted, present = row.xattrs or {}, target.xattrs or {}
    changes: list[Operation] = [
        XattrSetOperation(target.ino, name, value)
        for name, value in wanted.items()
        if present.get(name) != value
    ]
    changes += [XattrRemoveOperation(target.ino, name) for name in present if name not in wanted]
    return changes
