"""The place where the store keeps copies for open checkpoint units, and what went back:
``/.cxlfs-units``, a directory that no listing shows.

Other modules make copies (``unit_copying``), remove them (``unit_copies``), and decide when one is
wanted (``units``).

Invariants
- The directory of that name is the store's: it has PLACE_XATTR, which users neither see nor set.
  One that somebody else made gets another name before a unit begins.
- Users change nothing in it. They remove what went back, or move a whole set out of it. Copies for
  open units they cannot even remove.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Final

from cxlfs.errors import NotPermittedError
from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrSetOperation,
)
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.unit_record import ASIDE_XATTR, BEFORE_XATTR, PLACE_XATTR
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable

    from cxlfs.store.namespace import Namespace
    from cxlfs.store.volume import Volume

ASIDE_NAME: Final = b".cxlfs-units"
_PRIVATE = 0o700
_STEM_BYTES_MAX = 200
_MOVED_AT_ONCE = 64
_REMEMBERED_MAX = 4096
_NEXT = "; next: copy it, or move the whole set to another directory"


class Aside:
    """One for each volume."""

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self._namespace: Namespace = volume.namespace
        self.garbage: dict[int, Inode] = {}
        """What lies there and is being removed, by inode number."""
        self._moves = -1
        self._place: Inode | None = None
        self._inside: dict[int, bool] = {}
        """Whether a directory is the place or lies there; holds while no directory moves."""

    # --- the place ----------------------------------------------------------------------------

    def directory(self) -> Inode | None:
        """The place, if there is one."""
        moves = self._namespace.directory_moves
        if moves != self._moves:
            self._moves = moves
            self._place = self._find()
            self._inside.clear()
        return self._place

    def _find(self) -> Inode | None:
        found = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if found is None or found.entries is None or PLACE_XATTR not in (found.xattrs or {}):
            return None
        return found

    def is_place(self, parent: int, name: bytes) -> bool:
        """The name is the store's, whether it means something or not."""
        return name == ASIDE_NAME and parent == ROOT_INO

    def directory_or_new(self) -> tuple[Inode, list[Operation]]:
        """The same; where there is none, one that ``operations`` make."""
        found = self.directory()
        if found is not None:
            return found, []
        root = self._namespace.get(ROOT_INO)
        made = Inode(self._namespace.allocate_ino(), stat.S_IFDIR | _PRIVATE, root.uid, root.gid)
        _set_times(made, self._volume.now())
        ops: list[Operation] = [made.operation(), XattrSetOperation(made.ino, PLACE_XATTR, b"1")]
        blocking = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if blocking is not None:
            name = self.free_name(root, ASIDE_NAME, b"user")
            ops += [UnlinkOperation(ROOT_INO, ASIDE_NAME)]
            ops += [LinkOperation(ROOT_INO, blocking.ino, name)]
        ops.append(LinkOperation(ROOT_INO, made.ino, ASIDE_NAME))
        self._namespace.add(made)
        self._namespace.set_xattr(made, PLACE_XATTR, b"1")
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
        if place is None:
            return False
        ino = inode.ino if inode.entries is not None else inode.parent
        try:
            return self._inside[ino]
        except KeyError:
            if len(self._inside) >= _REMEMBERED_MAX:
                self._inside.clear()
            found = self._inside[ino] = self._namespace.is_below(ino, place.ino)
            return found

    def holds(self, ino: int) -> bool:
        """The same of an inode number, which may mean nothing."""
        inode = self._namespace.inodes.get(ino)
        return inode is not None and inode.links > 0 and self.is_kept_aside(inode)

    def take_over(self) -> None:
        """When a store is opened to be written: whatever else has the name gets another one.

        A directory of an earlier program has no mark. It is the store's if it belongs to the owner
        of the top and nobody else can enter. What the store has put into another one moves to a new
        place. Raises as ``Volume.commit``.
        """
        found = self._namespace.find(ROOT_INO, ASIDE_NAME)
        if found is None or self.directory() is not None:
            return
        root = self._namespace.get(ROOT_INO)
        if found.entries is not None and (found.uid, stat.S_IMODE(found.mode)) == (
            root.uid,
            _PRIVATE,
        ):
            self._volume.commit([XattrSetOperation(found.ino, PLACE_XATTR, b"1")])
            self._namespace.set_xattr(found, PLACE_XATTR, b"1")
            self._moves = -1
            return
        place, ops = self.directory_or_new()
        stored = [name for name, ino in (found.entries or {}).items() if self._is_stored(ino)]
        while ops or stored:
            for name in stored[:_MOVED_AT_ONCE]:
                ino = (found.entries or {})[name]
                ops += [UnlinkOperation(found.ino, name), LinkOperation(place.ino, ino, name)]
            stored = stored[_MOVED_AT_ONCE:]
            self._volume.commit(ops)
            self._volume.note_committed(ops)
            apply_names(self._namespace, ops)
            ops = []
        self._volume.event(
            "unit-place",
            "the store did not make what had the name /.cxlfs-units; it has this name now",
            ino=found.ino,
        )

    def _is_stored(self, ino: int) -> bool:
        """The store has put it there."""
        xattrs = self._namespace.get(ino).xattrs or {}
        return BEFORE_XATTR in xattrs or ASIDE_XATTR in xattrs

    # --- what users may do there ----------------------------------------------------------------

    def check_made(self, directory: Inode, name: bytes) -> None:
        """Somebody wants a new name. Raises NotPermittedError."""
        if self.is_place(directory.ino, name):
            self._refuse(directory, f"the store keeps the name {ASIDE_NAME.decode()} for itself")
        if self.is_kept_aside(directory):
            self._refuse(directory, "nothing can be put where the store keeps things aside" + _NEXT)

    def check_removed(self, directory: Inode) -> None:
        """Somebody wants to remove a name in a directory, or a directory. Raises
        NotPermittedError.
        """
        top = self._top(directory)
        if top is not None and self._is_copy(top):
            self._refuse(directory, "a checkpoint that is being written needs this copy")

    def check_moved(self, directory: Inode, inode: Inode, *, exchange: bool) -> None:
        """Somebody wants to move what has a name in ``directory``. Raises NotPermittedError."""
        if directory.ino == ROOT_INO and inode.name == ASIDE_NAME and self.directory() is inode:
            self._refuse(inode, "the store needs this directory under its name")
        if not self.is_kept_aside(directory):
            return
        is_whole = self.directory() is directory and inode.ino not in self.garbage
        if exchange or not is_whole or self._is_copy(inode):
            self._refuse(inode, "only a whole set that went back can be moved out of here" + _NEXT)

    def check_changed(self, inode: Inode) -> None:
        """Somebody wants to change a content, attributes, or the names of a file. What has other
        names, too, was not made by the store, and may be meant by those. Raises NotPermittedError.
        """
        if not inode.links or not self.is_kept_aside(inode):
            return
        top = self._top(inode)
        if inode.kind is FileKind.FILE and inode.links > 1 and top and not self._is_copy(top):
            return
        self._refuse(inode, "what the store keeps aside cannot be changed" + _NEXT)

    def guarded(self, change: Callable[[int], None]) -> Callable[[int], None]:
        """A function that makes sure of that before it calls ``change`` for an inode number."""

        def checked(ino: int) -> None:
            self.check_changed(self._namespace.get(ino))
            change(ino)

        return checked

    def _is_copy(self, top: Inode) -> bool:
        return BEFORE_XATTR in (top.xattrs or {}) and top.ino not in self.garbage

    def _top(self, inode: Inode) -> Inode | None:
        """What lies in the place itself, and is or holds the inode."""
        place = self.directory()
        if place is None or inode is place or not self._namespace.is_below(inode.ino, place.ino):
            return None
        while inode.parent != place.ino:
            inode = self._namespace.get(inode.parent)
        return inode

    def _refuse(self, inode: Inode, reason: str) -> None:
        self._volume.event("aside-refused", reason, ino=inode.ino)
        raise NotPermittedError(reason)


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


def _set_times(inode: Inode, now: int) -> None:
    inode.atime_ns = inode.mtime_ns = inode.ctime_ns = inode.birth_ns = now
    inode.committed_mtime_ns = inode.committed_ctime_ns = now
