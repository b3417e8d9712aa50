"""Names: making, removing, linking and renaming them.

Never here: file data, lookup counts, permission checks (the kernel makes them).

Invariants
- Every verb is one record, built from checked arguments before anything changes, and applied in
  DRAM after it was stored.
- rename and link publish the content of the file they name in the same record.
- A file that was only created is known to the living alone until its content is published.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from cxlfs.errors import (
    ExistsError,
    InvalidArgumentError,
    IsDirectoryError,
    NameTooLongError,
    NoSpaceError,
    NotDirectoryError,
    NotEmptyError,
    NotFoundError,
    NotPermittedError,
    TooManyLinksError,
)
from cxlfs.format import layout
from cxlfs.format.operations import (
    AsideDropOperation,
    InodeOperation,
    LinkOperation,
    Operation,
    SymlinkOperation,
    UnlinkOperation,
    XattrRemoveOperation,
    encode,
)
from cxlfs.native.maps import FileMap
from cxlfs.store.held import last_of
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.past_names import TakenName
from cxlfs.store.past_rows import Death
from cxlfs.store.series import UNJUDGED_XATTR
from cxlfs.store.unit_hooks import NO_TRANSITION
from cxlfs.store.versions import xattr_operations
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable

    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.unit_hooks import Transition
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume


_DOTS = (b".", b"..")


class Names:
    """The verbs over names; ``reclaim`` makes room for metadata, and tells whether it could."""

    def __init__(
        self, volume: Volume, versions: Versions, aside: Aside, *, reclaim: Callable[[int], bool]
    ) -> None:
        self.volume = volume
        self.versions = versions
        self.namespace = volume.namespace
        self._aside = aside
        self._reclaim = reclaim
        self.check_place: Callable[[int, bytes], None] = lambda _parent, _name: None
        """Called with a directory and a name that is to change. Raises NotPermittedError."""

    # --- checks -----------------------------------------------------------------------------

    def _parent(self, ino: int, name: bytes) -> Inode:
        if len(name) > layout.NAME_BYTES_MAX:
            raise NameTooLongError(f"a name has at most {layout.NAME_BYTES_MAX} bytes")
        if not name or b"/" in name or b"\0" in name:
            raise InvalidArgumentError("not a name")
        directory = self.namespace.directory(ino)
        if directory.is_removed and ino != ROOT_INO:
            raise NotFoundError("the directory was removed")
        self.check_place(ino, name)
        return directory

    def _new_name(self, ino: int, name: bytes) -> Inode:
        """A directory in which ``name`` can be made; room for more metadata is ensured."""
        self.volume.require_writable()
        directory = self._parent(ino, name)
        self._aside.check_made(directory, name)
        if name in _DOTS or self.namespace.find(ino, name) is not None:
            raise ExistsError("the name exists")
        self.require_metadata_room()
        return directory

    def require_metadata_room(self) -> None:
        """The next image may be larger than this one; raises NoSpaceError."""
        volume = self.volume
        if not volume.metadata_room() and not self._reclaim(0):
            volume.counters.no_space_errors += 1
            volume.health.refuse(0)
            raise NoSpaceError("the metadata of this store has no room to grow")

    def find(self, parent: int, name: bytes) -> Inode:
        if len(name) > layout.NAME_BYTES_MAX:
            raise NameTooLongError(f"a name has at most {layout.NAME_BYTES_MAX} bytes")
        inode = self.namespace.find(parent, name)
        if inode is None:
            raise NotFoundError("no such name")
        return inode

    def _changing(
        self,
        directory: Inode,
        name: bytes,
        *,
        removing: bool = False,
        given: Inode | None = None,
    ) -> None:
        """Checkpoint units hear of it first."""
        units = self.versions.units
        if units.active:
            units.changing(directory, name, removing=removing, given=given)

    def _dying(self, directory: Inode, name: bytes, inode: Inode | None) -> list[Operation]:
        """What a checkpoint unit keeps of a name that is about to be taken from ``inode``: behind
        the operation that takes it.
        """
        if inode is None or not self.versions.units.active:
            return []
        return self.versions.units.dying(directory, name, inode)

    def _moving(
        self, inode: Inode, directory: Inode, name: bytes, target: Inode, new_name: bytes
    ) -> list[Operation]:
        """What checkpoint units keep of a name that moves: behind the operation that takes it, in
        front of the one that gives it.
        """
        if not self.versions.units.active:
            return []
        return self.versions.units.moving(inode, directory, name, target, new_name)

    def _units_making(self, directory: Inode, name: bytes, inode: Inode) -> Transition:
        if inode.entries is None or not self.versions.units.active:
            return NO_TRANSITION
        return self.versions.units.making(directory, name, inode)

    # --- committing -------------------------------------------------------------------------

    def _touched(self, directory: Inode, now: int) -> InodeOperation:
        return directory.operation(mtime_ns=now, ctime_ns=now)

    def _commit(self, ops: list[Operation], prepared: Prepared | None = None) -> None:
        """Write the record (durable when it publishes content), then apply names and times."""
        first, death = 0, Death.REMOVED
        if prepared is not None:
            first = len(prepared.operations)
            lsn, time_ns = self.versions.commit(prepared, [*prepared.operations, *ops])
        else:
            lsn, time_ns = self.volume.commit(ops, durable=False)
            self.volume.note_committed(ops)
        with self.volume.applying:
            self._apply(ops, first, death, (lsn, time_ns))

    def _apply(
        self, ops: list[Operation], first: int, death: Death, committed: tuple[int, int]
    ) -> None:
        """``first``: the number of the first operation in its record; ``committed``: the record's
        LSN and time.
        """
        lsn, time_ns = committed
        taken: list[TakenName] = []
        since = self.namespace.named_since
        for number, op in enumerate(ops, first):
            if type(op) is InodeOperation:
                self._set_live(op)
            elif type(op) is UnlinkOperation:
                inode = self.namespace.unlink(op.parent, op.name)
                taken.append(TakenName(op.parent, op.name, inode, since(inode), number))
            elif type(op) is LinkOperation:
                replaced = self.namespace.link(op.parent, op.name, op.ino)
                death = Death.RENAMED_OVER
                if replaced is not None:
                    name = TakenName(op.parent, op.name, replaced, since(replaced), number)
                    taken.append(name)
            elif type(op) is AsideDropOperation:
                held = self.namespace.get(op.ino)
                self.versions.end_aside(held, (lsn, number), time_ns)
        self.versions.past.names_taken(taken, lsn, time_ns, death)
        for each in taken:
            self.namespace.reap(each.inode.ino)

    def _set_live(self, op: InodeOperation) -> None:
        inode = self.namespace.get(op.ino)
        inode.mode, inode.uid, inode.gid = op.mode, op.uid, op.gid
        inode.ctime_ns = op.ctime_ns
        inode.atime_ns = op.atime_ns
        if inode.version is None:
            inode.mtime_ns = op.mtime_ns

    # --- making -----------------------------------------------------------------------------

    def _new_inode(self, directory: Inode, mode: int, uid: int, gid: int, rdev: int) -> Inode:
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        inode = Inode(self.namespace.allocate_ino(), mode, uid, gid, rdev=rdev)
        now = self.volume.now()
        inode.atime_ns = inode.mtime_ns = inode.ctime_ns = inode.birth_ns = now
        inode.committed_mtime_ns = inode.committed_ctime_ns = now
        if inode.kind is FileKind.FILE:
            inode.live = FileMap(self.volume.engine, owner=inode.ino)
        return inode

    def create(
        self, parent: int, name: bytes, mode: int, uid: int, gid: int, *, appends: bool = False
    ) -> Inode:
        """A regular file, not committed until its content is published. ``appends``: it is a log,
        and belongs to no checkpoint unit. Raises ExistsError, ...
        """
        directory = self._new_name(parent, name)
        if not appends:
            self._changing(directory, name)
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        inode = self._new_inode(directory, mode, uid, gid, 0)
        encode([inode.operation()])  # what no record can say later is refused at once
        self.namespace.add_uncommitted(inode)
        self.namespace.link(parent, name, inode.ino)
        directory.mtime_ns = directory.ctime_ns = inode.birth_ns
        self.versions.begin_new(inode, name)
        return inode

    def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        *,
        rdev: int,
        target: bytes,
        dress: Callable[[Inode], None] = lambda _inode: None,
    ) -> Inode:
        """A directory, special file, symbolic link, or empty file; committed on return. ``dress``
        sets more of its attributes before they are.
        """
        directory = self._new_name(parent, name)
        if stat.S_ISDIR(mode) and directory.nlink >= layout.LINK_COUNT_MAX:
            raise TooManyLinksError("too many subdirectories")
        if stat.S_ISLNK(mode) and not 0 < len(target) <= layout.SYMLINK_BYTES_MAX:
            raise NameTooLongError("the target is empty or too long")
        self._changing(directory, name)
        inode = self._new_inode(directory, mode, uid, gid, rdev)
        now = inode.birth_ns
        dress(inode)
        transition = self._units_making(directory, name, inode)
        ops: list[Operation] = [
            inode.operation(),
            LinkOperation(parent, inode.ino, name),
            self._touched(directory, now),
            *transition.operations,
            *xattr_operations(inode),
        ]
        if stat.S_ISLNK(mode):
            ops.insert(1, SymlinkOperation(inode.ino, target))
        self.namespace.add(inode)
        try:
            self._commit(ops)
        except BaseException:
            self.namespace.withdraw(inode)
            for given in list(inode.xattrs or ()):
                self.namespace.remove_xattr(inode, given)
            if inode.live is not None:
                inode.live.close()
            raise
        transition.stored()
        if target:
            self.namespace.set_target(inode, target)
        return inode

    # --- removing ---------------------------------------------------------------------------

    def unlink(self, parent: int, name: bytes) -> Inode:
        """Raises NotFoundError, IsDirectoryError, ReadOnlyError; works on a full store."""
        self.volume.require_writable()
        directory = self._parent(parent, name)
        inode = self.find(parent, name)
        if inode.entries is not None:
            raise IsDirectoryError("a directory")
        if self.versions.units.active:
            self.versions.units.unlinking(directory, name)
        self._changing(directory, name, removing=True)
        now = self.volume.now()
        if inode.uncommitted:
            self.namespace.unlink(parent, name)
            directory.mtime_ns = directory.ctime_ns = now
            inode.ctime_ns = now
            self.namespace.reap(inode.ino)
            self._give_room_back(inode)
            return inode
        kept = self._dying(directory, name, inode)
        ops = [] if kept else last_of(inode.ino, inode.links, inode.held)
        ops += [UnlinkOperation(parent, name), *kept, self._touched(directory, now)]
        if inode.links > 1:
            ops.append(inode.operation(ctime_ns=now))
        self._commit(ops)
        if not kept:  # else it may come back as it was
            inode.ctime_ns = now
        self._give_room_back(inode)
        return inode

    def take_away(self, inode: Inode) -> None:
        """End the only name of a new file that is torn: history has it, and says that it is
        incomplete. Durable when it returns. Raises as :meth:`Volume.commit`.
        """
        now, flags = self.volume.now(), inode.flags | layout.INODE_INCOMPLETE
        directory = self.namespace.get(inode.parent)
        ops: list[Operation] = [
            XattrRemoveOperation(inode.ino, UNJUDGED_XATTR),
            inode.operation(flags=flags, ctime_ns=now),
            *last_of(inode.ino, inode.links, inode.held),
            UnlinkOperation(inode.parent, inode.name),
            self._touched(directory, now),
        ]
        lsn, time_ns = self.volume.commit(ops)
        self.volume.note_committed(ops)
        with self.volume.applying:
            self.namespace.remove_xattr(inode, UNJUDGED_XATTR)
            inode.flags = flags
            self._apply(ops, 0, Death.REMOVED, (lsn, time_ns))
        self._give_room_back(inode)

    def _give_room_back(self, inode: Inode) -> None:
        """What an open file without a name was given and has not used: thousands of them may be
        kept open, with a byte in each, and what they hold cannot be moved.
        """
        if inode.links == 0 and inode.live is not None:
            self.versions.leases.close(inode.live)

    def remove_directory(self, parent: int, name: bytes) -> Inode:
        """Raises NotFoundError, NotDirectoryError, NotEmptyError, InvalidArgumentError."""
        self.volume.require_writable()
        directory = self._parent(parent, name)
        if name == b".":
            raise InvalidArgumentError("cannot remove .")
        if name == b"..":
            raise NotEmptyError("not empty")
        inode = self.find(parent, name)
        if inode.entries is None:
            raise NotDirectoryError("not a directory")
        if inode.entries:
            raise NotEmptyError("the directory is not empty")
        self._changing(directory, name, removing=True)
        kept = self._dying(directory, name, inode)
        transition = self.versions.units.removing(inode)
        touched = self._touched(directory, self.volume.now())
        unlink = UnlinkOperation(parent, name)
        self._commit([unlink, *kept, touched, *transition.operations])
        transition.stored()
        return inode

    def remove_leaf(self, directory: Inode, name: bytes) -> tuple[int, bytes, Inode]:
        """Remove one name: ``name``, or the first leaf below it. Return the directory that it was
        in, the name, and what it meant. Raises as :meth:`unlink`.
        """
        inode = self.namespace.get((directory.entries or {})[name])
        while inode.entries:
            directory, name = inode, next(iter(inode.entries))
            inode = self.namespace.get(inode.entries[name])
        remove = self.unlink if inode.entries is None else self.remove_directory
        remove(directory.ino, name)
        return directory.ino, name, inode

    # --- linking and renaming ---------------------------------------------------------------

    def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        """Another name for a file; publishes its content. Durable when it returns."""
        inode = self.namespace.get(ino)
        if inode.entries is not None:
            raise NotPermittedError("directories have one name")
        directory = self._new_name(new_parent, new_name)
        if inode.links >= layout.LINK_COUNT_MAX:
            raise TooManyLinksError("too many names")
        if inode.is_removed:
            raise NotFoundError("the file was removed")
        self._changing(directory, new_name)
        self.versions.units.publishing(inode, new_parent, new_name)
        given: list[Operation] = []
        if self.versions.units.active:
            given = self.versions.units.linking(inode, directory, new_name)
        prepared = self._prepare(inode)
        now = self.volume.now()
        ops: list[Operation] = [
            *given,
            LinkOperation(new_parent, ino, new_name),
            self._attributes(inode, prepared, ctime_ns=now),
            self._touched(directory, now),
        ]
        transition = self.versions.units.naming([(new_parent, new_name, inode)])
        self._commit([*ops, *transition.operations], prepared)
        transition.stored()
        self.versions.units.linked(inode)
        self.volume.fence()
        return inode

    def _prepare(
        self, inode: Inode, *, with_name: bool = True, replaces: bool = False
    ) -> Prepared | None:
        """Publication of the content as part of another verb; raises a failed write's error. What
        has lost pages stays incomplete, and ``replaces`` nothing.
        """
        if inode.live is None:
            return None
        if not replaces and self.versions.shared_maps.is_spoiled(inode):
            return None
        error = self.versions.error_of(inode)
        if error is not None:
            raise error
        return self.versions.prepare(inode, incomplete=False, with_name=with_name)

    def _attributes(self, inode: Inode, prepared: Prepared | None, *, ctime_ns: int) -> Operation:
        """The inode with a new ctime; as published if its content is being published."""
        if prepared is None:
            return inode.operation(ctime_ns=ctime_ns)
        flags = inode.flags & ~layout.INODE_INCOMPLETE
        return inode.operation(flags=flags, mtime_ns=inode.mtime_ns, ctime_ns=ctime_ns)

    def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        *,
        exchange: bool = False,
        no_replace: bool = False,
    ) -> None:
        """One record: after any crash the old state or the new one. Durable when it returns."""
        self.volume.require_writable()
        source_directory = self._parent(parent, name)
        target_directory = self._parent(new_parent, new_name)
        if name in _DOTS or new_name in _DOTS:
            raise InvalidArgumentError("cannot rename . or ..")
        inode = self.find(parent, name)
        target = self.namespace.find(new_parent, new_name)
        if no_replace and target is not None:
            raise ExistsError("the new name exists")
        if exchange and target is None:
            raise NotFoundError("the new name does not exist")
        if inode is target:
            return
        self._aside.check_made(target_directory, new_name)
        self._check_rename(inode, target, source_directory, target_directory, exchange=exchange)
        if len(new_name) > len(name):
            self.require_metadata_room()
        self._changing(source_directory, name, removing=True)
        self._changing(target_directory, new_name, given=inode)
        self.versions.units.publishing(inode, new_parent, new_name)
        if exchange and target is not None:
            self._exchange(source_directory, name, inode, target_directory, new_name, target)
        else:
            self._replace(source_directory, name, inode, target_directory, new_name, target)
            self.versions.units.linked(inode)
        self.volume.fence()

    def _replace(
        self,
        source_directory: Inode,
        name: bytes,
        inode: Inode,
        target_directory: Inode,
        new_name: bytes,
        target: Inode | None,
    ) -> None:
        """The name moves; what the new name meant before loses it."""
        kept = self._dying(target_directory, new_name, target)
        place = source_directory, name, target_directory, new_name
        moved = self._moving(inode, *place)
        prepared = self._prepare(inode, with_name=False, replaces=target is not None)
        now = self.volume.now()
        ops: list[Operation] = []
        if not inode.uncommitted:
            ops.append(UnlinkOperation(source_directory.ino, name))
        if target is not None and not target.uncommitted:
            ops += [] if kept else last_of(target.ino, target.links, target.held)
            ops += [UnlinkOperation(target_directory.ino, new_name), *kept]
            if target.links > 1:
                ops.append(target.operation(ctime_ns=now))
        ops += moved
        ops.append(LinkOperation(target_directory.ino, inode.ino, new_name))
        ops.append(self._attributes(inode, prepared, ctime_ns=now))
        ops.append(self._touched(source_directory, now))
        if target_directory is not source_directory:
            ops.append(self._touched(target_directory, now))
        named = (target_directory.ino, new_name, inode)
        transition = self.versions.units.naming([named], target)
        ops += transition.operations
        self._commit_rename(ops, prepared, inode, (source_directory.ino, name))
        transition.stored()
        if target is not None:
            if not kept:
                target.ctime_ns = now
            self._give_room_back(target)

    def _commit_rename(
        self,
        ops: list[Operation],
        prepared: Prepared | None,
        inode: Inode,
        old_name: tuple[int, bytes],
    ) -> None:
        """As _commit; a file that was uncommitted has an old name that only the living know."""
        was_uncommitted = inode.uncommitted
        self._commit(ops, prepared)
        if was_uncommitted:
            self.namespace.unlink(*old_name)

    def _check_rename(
        self,
        inode: Inode,
        target: Inode | None,
        source_directory: Inode,
        target_directory: Inode,
        *,
        exchange: bool,
    ) -> None:
        below = self.namespace.is_below
        if inode.entries is not None and below(target_directory.ino, inode.ino):
            raise InvalidArgumentError("a directory cannot be moved below itself")
        if target is None:
            return
        if target.entries is not None and below(source_directory.ino, target.ino):
            if exchange:
                raise InvalidArgumentError("a directory cannot be moved below itself")
            raise NotEmptyError("the directory is not empty")
        if exchange:
            return
        if inode.entries is None and target.entries is not None:
            raise IsDirectoryError("the new name is a directory")
        if inode.entries is not None and target.entries is None:
            raise NotDirectoryError("the new name is not a directory")
        if target.entries:
            raise NotEmptyError("the directory is not empty")

    def _exchange(
        self,
        directory: Inode,
        name: bytes,
        inode: Inode,
        new_directory: Inode,
        new_name: bytes,
        target: Inode,
    ) -> None:
        for moved in (inode, target):
            if moved.live is not None:
                error = self.versions.error_of(moved)
                if error is not None:
                    raise error
                self.versions.publish(moved, incomplete=False)
        kept = self._moving(inode, directory, name, new_directory, new_name)
        kept += self._moving(target, new_directory, new_name, directory, name)
        now = self.volume.now()
        ops: list[Operation] = [
            UnlinkOperation(directory.ino, name),
            UnlinkOperation(new_directory.ino, new_name),
            *kept,
            LinkOperation(directory.ino, target.ino, name),
            LinkOperation(new_directory.ino, inode.ino, new_name),
            inode.operation(ctime_ns=now),
            target.operation(ctime_ns=now),
            self._touched(directory, now),
        ]
        if new_directory is not directory:
            ops.append(self._touched(new_directory, now))
        named = (new_directory.ino, new_name, inode), (directory.ino, name, target)
        transition = self.versions.units.naming(named)
        self._commit([*ops, *transition.operations])
        transition.stored()
        for moved in (inode, target):
            self.versions.units.linked(moved)


def root_attributes(uid: int, gid: int, now: int) -> Inode:
    """The root directory of a new store: rwxr-xr-x, owned by who makes it."""
    root = Inode(ROOT_INO, stat.S_IFDIR | 0o755, uid, gid)
    root.atime_ns = root.mtime_ns = root.ctime_ns = root.birth_ns = now
    root.committed_mtime_ns = root.committed_ctime_ns = now
    root.links, root.parent = 1, ROOT_INO
    return root
