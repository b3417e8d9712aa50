"""Copies of directories: what is like something else, and how copies go away again.

Never here: the place where they lie (``unit_aside``), making copies (``unit_copying``), when
one is wanted (``units``).

Invariants
- A copy that no open unit names is garbage, whenever that is found out: after a crash, too.
- Every step of removing is one record of a bounded number of names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    SymlinkOperation,
    UnlinkOperation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_aside import ASIDE_NAME, Aside, apply_names
from cxlfs.store.unit_record import ASIDE_XATTR, BEFORE_XATTR, AsideRecord, decode_aside

if TYPE_CHECKING:
    from cxlfs.store.namespace import Namespace
    from cxlfs.store.volume import Volume

_HIDDEN = frozenset({BEFORE_XATTR, ASIDE_XATTR})
_NAMES_AT_ONCE = 256


class Copies:
    """One for each volume. ``changed``: told of each name that changes without a request for it."""

    def __init__(self, volume: Volume, aside: Aside) -> None:
        self._volume = volume
        self._namespace: Namespace = volume.namespace
        self.aside = aside
        self.changed: Callable[[int, bytes], None] = lambda _parent, _name: None
        self._garbage = aside.garbage

    # --- what went back -----------------------------------------------------------------------

    def set_aside(self, path: bytes) -> Iterator[tuple[Inode, bytes, str]]:
        """What was in the directory ``path`` and went back: directory, where it is now, why."""
        for name, inode, record in self._kept_sets():
            if os.path.dirname(record.path).rstrip(b"/") == path:  # noqa: PTH120  bytes
                yield inode, b"/" + ASIDE_NAME + b"/" + name, record.reason

    def _kept_sets(self) -> Iterator[tuple[bytes, Inode, AsideRecord]]:
        place = self.aside.directory()
        for name, ino in sorted((place.entries or {}).items()) if place is not None else ():
            inode = self._namespace.get(ino)
            value = (inode.xattrs or {}).get(ASIDE_XATTR)
            record = None if value is None else decode_aside(value)
            if record is not None and ino not in self._garbage:
                yield name, inode, record

    # --- what is like something else ------------------------------------------------------------

    def inode_like(self, source: Inode) -> Inode:
        """A new inode with the committed attributes of ``source``; nobody knows it yet."""
        made = Inode(
            self._namespace.allocate_ino(), source.mode, source.uid, source.gid, rdev=source.rdev
        )
        made.birth_ns = source.birth_ns
        take_attributes(made, source)
        return made

    def empty_like(self, source: Inode, parent: int, name: bytes) -> tuple[Inode, list[Operation]]:
        """A directory with nothing in it, and what makes it under that name."""
        made = self.inode_like(source)
        return made, self.operations_like(made, source, parent, name)

    def operations_like(
        self, made: Inode, source: Inode, parent: int, name: bytes
    ) -> list[Operation]:
        """What makes a directory, a symbolic link or a special file; in DRAM it is there now."""
        self._namespace.add(made)
        ops: list[Operation] = [made.operation()]
        if source.target:
            ops.append(SymlinkOperation(made.ino, source.target))
            self._namespace.set_target(made, source.target)
        ops += self.xattrs_like(made, source)
        ops.append(LinkOperation(parent, made.ino, name))
        return ops

    def xattrs_like(self, made: Inode, source: Inode) -> list[Operation]:
        """What gives an inode the extended attributes of another one; in DRAM it has them now."""
        ops: list[Operation] = []
        wanted = {k: v for k, v in (source.xattrs or {}).items() if k not in _HIDDEN}
        for key in set(made.xattrs or ()) - set(wanted) - _HIDDEN:
            self._namespace.remove_xattr(made, key)
            ops.append(XattrRemoveOperation(made.ino, key))
        for key, value in wanted.items():
            if (made.xattrs or {}).get(key) != value:
                self._namespace.set_xattr(made, key, value)
                ops.append(XattrSetOperation(made.ino, key, value))
        made.damaged = source.damaged
        return ops

    # --- committing ---------------------------------------------------------------------------

    def commit(self, ops: list[Operation], *, durable: bool = False) -> None:
        """One record; names and what it says of known inodes take effect in DRAM."""
        self._volume.commit(ops, durable=durable)
        self._volume.note_committed(ops)
        apply_names(self._namespace, ops)

    # --- removing -----------------------------------------------------------------------------

    def find_garbage(self) -> None:
        """Copies that a crash has left, while no unit is open."""
        place = self.aside.directory()
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
            if top.links == 0 or not self.aside.is_kept_aside(top):
                del self._garbage[ino]
                continue
            self._remove_names(top)
            return True
        return False

    def drop_oldest_set(self) -> bool:
        """Give up what was set aside first, and remove a little of it; False when nothing is."""
        kept = [(record.time_ns, inode.ino, inode) for _, inode, record in self._kept_sets()]
        if not kept:
            return False
        self.drop(min(kept)[2])
        return self.remove_some()

    def _remove_names(self, top: Inode) -> None:
        """Up to _NAMES_AT_ONCE names below ``top``, innermost first, then its own."""
        names: list[tuple[int, bytes, Inode]] = []
        emptied = self._collect(top, names)
        if emptied:
            names.append((top.parent, top.name, top))
        ops: list[Operation] = []
        told: list[tuple[int, bytes]] = []
        for parent, name, inode in names:
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

    def _collect(self, directory: Inode, names: list[tuple[int, bytes, Inode]]) -> bool:
        """True: all below the directory is in ``names``."""
        for name, ino in (directory.entries or {}).items():
            if len(names) >= _NAMES_AT_ONCE:
                return False
            child = self._namespace.get(ino)
            if child.entries is not None and not self._collect(child, names):
                return False
            names.append((directory.ino, name, child))
        return True


def take_attributes(made: Inode, source: Inode) -> None:
    """Mode, owners and times as they are committed; in DRAM only."""
    made.mode, made.uid, made.gid, made.rdev = source.mode, source.uid, source.gid, source.rdev
    clean = source.version is None
    made.atime_ns = source.atime_ns
    made.mtime_ns = source.mtime_ns if clean else source.committed_mtime_ns
    made.ctime_ns = source.ctime_ns if clean else source.committed_ctime_ns
    made.committed_mtime_ns, made.committed_ctime_ns = made.mtime_ns, made.ctime_ns
