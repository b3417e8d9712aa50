"""Copies of directories that share every extent with what they copy, where they are kept, and how
they go away again.

``/.cxlfs-units`` is an ordinary directory, made when it is first needed, that the root directory
does not list: it is entered by its name. Copies of what open units held before are there, and sets
that were taken back.

Never here: when a copy is made or wanted (``units``), data that is read or moved.

Invariants
- A copy has the committed content, names, modes, owners, times and extended attributes of its
  source; what is not committed is not in it. No verb changes it.
- A copy that no open unit names is garbage, whenever that is found out: after a crash, too.
- Every step of removing is one record of a bounded number of names.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from cxlfs.errors import InvariantError, invariant
from cxlfs.format import layout
from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    SymlinkOperation,
    UnlinkOperation,
    XattrSetOperation,
    encode,
)
from cxlfs.native.maps import FileMap
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_record import ASIDE_XATTR, BEFORE_XATTR, AsideRecord, decode_aside
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Namespace
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume

ASIDE_NAME: Final = b".cxlfs-units"
_HIDDEN = frozenset({BEFORE_XATTR, ASIDE_XATTR})
_NAMES_AT_ONCE = 256
_STEM_BYTES_MAX = 200


class Copies:
    """One for each volume. ``require_room`` raises NoSpaceError when metadata cannot grow.
    ``changed``: told of each name that changes without a request for it.
    """

    def __init__(
        self, volume: Volume, versions: Versions, *, require_room: Callable[[], None]
    ) -> None:
        self._volume = volume
        self._versions = versions
        self._namespace: Namespace = volume.namespace
        self._require_room = require_room
        self.changed: Callable[[int, bytes], None] = lambda _parent, _name: None
        self._garbage: dict[int, Inode] = {}

    # --- the place ----------------------------------------------------------------------------

    def directory(self) -> Inode | None:
        """Where things are kept aside, if there is such a place."""
        found = self._namespace.find(ROOT_INO, ASIDE_NAME)
        return found if found is not None and found.entries is not None else None

    def directory_or_new(self) -> tuple[Inode, list[Operation]]:
        """The same; where there is none, one that ``operations`` make."""
        found = self.directory()
        if found is not None:
            return found, []
        root = self._namespace.get(ROOT_INO)
        made = Inode(self._namespace.allocate_ino(), stat.S_IFDIR | 0o700, root.uid, root.gid)
        _set_times(made, self._volume.now())
        ops: list[Operation] = [made.operation()]
        blocking = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if blocking is not None:  # a user's file of that name makes way
            name = self.free_name(root, ASIDE_NAME, b"user")
            ops += [UnlinkOperation(ROOT_INO, ASIDE_NAME)]
            ops += [LinkOperation(ROOT_INO, blocking.ino, name)]
        ops.append(LinkOperation(ROOT_INO, made.ino, ASIDE_NAME))
        self._namespace.add(made)
        return made, ops

    def free_name(self, directory: Inode, name: bytes, kind: bytes) -> bytes:
        """A name like ``name`` that nothing in the directory has."""
        stem = name[:_STEM_BYTES_MAX] + b"." + kind
        found, number = stem, 1
        while self._namespace.find(directory.ino, found) is not None:
            number += 1
            found = b"%s-%d" % (stem, number)
        return found

    def is_kept_aside(self, inode: Inode) -> bool:
        """It is the place, or lies there."""
        place = self.directory()
        return place is not None and self._namespace.is_below(inode.ino, place.ino)

    def holds(self, ino: int) -> bool:
        """The same of an inode number, which may mean nothing."""
        inode = self._namespace.inodes.get(ino)
        return inode is not None and inode.links > 0 and self.is_kept_aside(inode)

    def set_aside(self, path: bytes) -> Iterator[tuple[Inode, bytes, str]]:
        """What was in the directory ``path`` and went back: directory, where it is now, why."""
        for name, inode, record in self._kept_sets():
            if os.path.dirname(record.path).rstrip(b"/") == path:  # noqa: PTH120  bytes
                yield inode, b"/" + ASIDE_NAME + b"/" + name, record.reason

    def _kept_sets(self) -> Iterator[tuple[bytes, Inode, AsideRecord]]:
        place = self.directory()
        for name, ino in sorted((place.entries or {}).items()) if place is not None else ():
            inode = self._namespace.get(ino)
            value = (inode.xattrs or {}).get(ASIDE_XATTR)
            record = None if value is None else decode_aside(value)
            if record is not None and ino not in self._garbage:
                yield name, inode, record

    # --- copying ------------------------------------------------------------------------------

    def make(self, source: Inode) -> Inode:
        """Copy the committed state of a directory and of all below it. In the end it is durable in
        the order of the journal, and garbage until an open unit names it.

        Raises NoSpaceError, MediaError, OutOfMemoryError; what was made so far is garbage then.
        """
        self._require_room()
        place, ops = self.directory_or_new()
        top = self._new_inode(source)
        name = self.free_name(place, source.name, b"before-%d" % source.ino)
        value = b"%d" % source.ino
        ops += self._directory_operations(top, source, place.ino, name)
        ops.append(XattrSetOperation(top.ino, BEFORE_XATTR, value))
        try:
            self.commit(ops)
        except BaseException:
            for made in (top, place):
                if made.links == 0:
                    self._namespace.withdraw(made)
            raise
        self._namespace.set_xattr(top, BEFORE_XATTR, value)
        self._garbage[top.ino] = top
        batch = _Batch(self, self._volume, self._versions)
        try:
            self._copy_below(source, top, batch)
            batch.flush()
        except BaseException:
            batch.cancel()
            raise
        del self._garbage[top.ino]
        return top

    def _copy_below(self, source: Inode, top: Inode, batch: _Batch) -> None:
        """Directories first; then files in the order of their commits, which so stays theirs."""
        files: list[tuple[Inode, Inode, bytes]] = []
        pending = [(source, top)]
        while pending:
            directory, copy = pending.pop()
            for name, ino in (directory.entries or {}).items():
                child = self._namespace.get(ino)
                if child.uncommitted:
                    continue
                if child.live is not None:
                    files.append((child, copy, name))
                    continue
                made = self._new_inode(child)
                batch.add(self._directory_operations(made, child, copy.ino, name), made)
                if child.entries is not None:
                    pending.append((child, made))
        files.sort(key=lambda item: item[0].commit_lsn)
        copied: dict[int, Inode] = {}
        for child, copy, name in files:
            if child.ino in copied:
                batch.add([LinkOperation(copy.ino, copied[child.ino].ino, name)], None)
                continue
            copied[child.ino] = self._copy_file(child, copy, name, batch)

    def _new_inode(self, source: Inode) -> Inode:
        ino = self._namespace.allocate_ino()
        made = Inode(ino, source.mode, source.uid, source.gid, rdev=source.rdev)
        made.atime_ns, made.birth_ns = source.atime_ns, source.birth_ns
        clean = source.version is None
        made.mtime_ns = source.mtime_ns if clean else source.committed_mtime_ns
        made.ctime_ns = source.ctime_ns if clean else source.committed_ctime_ns
        made.committed_mtime_ns, made.committed_ctime_ns = made.mtime_ns, made.ctime_ns
        return made

    def empty_like(self, source: Inode, parent: int, name: bytes) -> tuple[Inode, list[Operation]]:
        """A directory with nothing in it, and what makes it under that name."""
        made = self._new_inode(source)
        return made, self._directory_operations(made, source, parent, name)

    def _directory_operations(
        self, made: Inode, source: Inode, parent: int, name: bytes
    ) -> list[Operation]:
        """What makes a directory, a symbolic link or a special file; in DRAM it is there now."""
        self._namespace.add(made)
        ops: list[Operation] = [made.operation()]
        if source.target:
            ops.append(SymlinkOperation(made.ino, source.target))
            self._namespace.set_target(made, source.target)
        for key, value in self._copy_xattrs(source, made):
            ops.append(XattrSetOperation(made.ino, key, value))
        ops.append(LinkOperation(parent, made.ino, name))
        return ops

    def _copy_xattrs(self, source: Inode, made: Inode) -> list[tuple[bytes, bytes]]:
        xattrs = [item for item in (source.xattrs or {}).items() if item[0] not in _HIDDEN]
        for key, value in xattrs:
            self._namespace.set_xattr(made, key, value)
        made.damaged = source.damaged
        return xattrs

    def _copy_file(self, source: Inode, directory: Inode, name: bytes, batch: _Batch) -> Inode:
        content = source.committed_content
        if content is None:
            raise InvariantError("a committed file has a committed content")
        made = self._new_inode(source)
        made.live = FileMap(self._volume.engine, owner=made.ino)
        self._copy_xattrs(source, made)
        self._share(source, content, made.live)
        self._namespace.add_uncommitted(made)
        self._namespace.link(directory.ino, name, made.ino)
        self._versions.begin_new(made, name)
        incomplete = bool(source.flags & layout.INODE_INCOMPLETE)
        batch.add_file(made, directory, name, incomplete=incomplete)
        return made

    def _share(self, source: Inode, content: FileMap, target: FileMap) -> None:
        """Let ``target`` refer to all of a committed content."""
        size = content.size
        if size and content.share(0, size, target, 0) is None:
            # The open extent ends here; whoever writes on gets another one.
            self._versions.leases.close(source.content)
            self._versions.leases.close(content)
            shared = content.share(0, size, target, 0)
            invariant(shared == size, "only a content's own lease keeps its extents open")
        target.truncate(size)

    # --- committing ---------------------------------------------------------------------------

    def commit(self, ops: list[Operation], *, durable: bool = False) -> None:
        """One record; names and what it says of known inodes take effect in DRAM."""
        self._volume.commit(ops, durable=durable)
        self._volume.note_committed(ops)
        apply_names(self._namespace, ops)

    # --- removing -----------------------------------------------------------------------------

    def find_garbage(self) -> None:
        """Copies that a crash has left, while no unit is open."""
        place = self.directory()
        for ino in (place.entries or {}).values() if place is not None else ():
            inode = self._namespace.get(ino)
            if BEFORE_XATTR in (inode.xattrs or {}):
                self._garbage[ino] = inode

    def drop(self, copy: Inode) -> None:
        """It is not wanted any more: its names go away in steps."""
        self._garbage[copy.ino] = copy

    @property
    def is_removing(self) -> bool:
        """Garbage is left."""
        return bool(self._garbage)

    def remove_some(self) -> bool:
        """One record's worth of garbage; False when there is none. Raises MediaError."""
        for ino, top in list(self._garbage.items()):
            if top.links == 0 or not self.is_kept_aside(top):
                del self._garbage[ino]
                continue
            self._remove_names(top)
            return True
        return False

    def drop_oldest_set(self) -> bool:
        """Give up what was set aside first; False when nothing is."""
        kept = [(record.time_ns, inode.ino, inode) for _, inode, record in self._kept_sets()]
        if not kept:
            return False
        oldest = min(kept)[2]
        self.drop(oldest)
        while oldest.ino in self._garbage:
            self.remove_some()
        return True

    def _remove_names(self, top: Inode) -> None:
        """Up to _NAMES_AT_ONCE names below ``top``, innermost first, then its own."""
        names: list[tuple[int, bytes]] = []
        emptied = self._collect(top, names)
        if emptied:
            names.append((top.parent, top.name))
        ops: list[Operation] = []
        told: list[tuple[int, bytes]] = []
        for parent, name in names:
            inode = self._namespace.find(parent, name)
            if inode is None:
                raise InvariantError("a name was collected that is not there")
            if inode.pins:
                told.append((parent, name))
            if inode.uncommitted:
                self._namespace.unlink(parent, name)
                self._namespace.reap(inode.ino)
            else:
                ops.append(UnlinkOperation(parent, name))
        if ops:
            self.commit(ops)
        for parent, name in told:
            self.changed(parent, name)

    def _collect(self, directory: Inode, names: list[tuple[int, bytes]]) -> bool:
        """True: all below the directory is in ``names``."""
        for name, ino in (directory.entries or {}).items():
            if len(names) >= _NAMES_AT_ONCE:
                return False
            child = self._namespace.get(ino)
            if child.entries is not None and not self._collect(child, names):
                return False
            names.append((directory.ino, name))
        return True


class _Batch:
    """Operations of several files that go into one record while they fit."""

    def __init__(self, copies: Copies, volume: Volume, versions: Versions) -> None:
        self._copies = copies
        self._volume = volume
        self._versions = versions
        self._limit = volume.record_bytes_max - 1024
        self._ops: list[Operation] = []
        self._bytes = 0
        self._prepared: list[Prepared] = []
        self._made: list[Inode] = []
        self._uncommitted: list[tuple[Inode, Inode, bytes]] = []

    def add(self, ops: list[Operation], made: Inode | None) -> None:
        """Operations of a directory and the like (``made``: a new one), or of a prepared file."""
        size = len(encode(ops))
        if self._bytes + size > self._limit:
            self.flush()
        if made is not None:
            self._made.append(made)
        self._ops += ops
        self._bytes += size

    def add_file(self, made: Inode, directory: Inode, name: bytes, *, incomplete: bool) -> None:
        self._uncommitted.append((made, directory, name))
        if made.content.ref_count * layout.REF_DTYPE.itemsize > self._limit // 4:
            self.flush()
            self._versions.publish(made, incomplete=incomplete)
        else:
            prepared = self._versions.prepare(made, incomplete=incomplete, with_name=False)
            if prepared is None:
                raise InvariantError("a new file has something to publish")
            link = LinkOperation(directory.ino, made.ino, name)
            self.add([*prepared.operations, link], None)
            self._prepared.append(prepared)

    def flush(self) -> None:
        ops, self._ops, self._bytes = self._ops, [], 0
        if not ops:
            return
        self._versions.fence_data()
        lsn, time_ns = self._volume.commit(ops, durable=False)
        prepared, self._prepared = self._prepared, []
        for one in prepared:
            one.done(lsn, time_ns)
        self._volume.note_committed(ops)
        known = {(directory.ino, name) for _, directory, name in self._uncommitted}
        links: list[Operation] = [
            op for op in ops if isinstance(op, LinkOperation) and (op.parent, op.name) not in known
        ]
        apply_names(self._volume.namespace, links)
        self._made.clear()
        self._uncommitted = [item for item in self._uncommitted if item[0].uncommitted]

    def cancel(self) -> None:
        """Whatever was not committed is forgotten."""
        for prepared in self._prepared:
            prepared.cancel()
        namespace = self._volume.namespace
        for inode, directory, name in self._uncommitted:
            if inode.uncommitted:
                namespace.unlink(directory.ino, name)
                namespace.reap(inode.ino)
        for inode in self._made:
            if inode.links == 0:
                namespace.withdraw(inode)


def apply_names(namespace: Namespace, ops: list[Operation]) -> None:
    """What the operations of a stored record mean for names."""
    unlinked: list[int] = []
    for op in ops:
        if isinstance(op, UnlinkOperation):
            unlinked.append(namespace.unlink(op.parent, op.name).ino)
        elif isinstance(op, LinkOperation):
            namespace.link(op.parent, op.name, op.ino)
    for ino in unlinked:
        namespace.reap(ino)


def is_unlisted(directory: Inode, name: bytes) -> bool:
    """A name that listings leave out."""
    return directory.ino == ROOT_INO and name == ASIDE_NAME


def _set_times(inode: Inode, now: int) -> None:
    inode.atime_ns = inode.mtime_ns = inode.ctime_ns = inode.birth_ns = now
    inode.committed_mtime_ns = inode.committed_ctime_ns = now
