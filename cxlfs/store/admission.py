"""Admission of records to the journal: a record is stored only if replay can apply it.

``Volume.commit`` asks here before it stores a record, so a defect can make the store refuse one
change, but never a store that cannot be opened again. The rules are in ``record_rules``. Other
modules apply the record, and the engine answers for extents and references.

Invariants
- What counts is the committed state, with the operations of the record before this one: inodes that
  no record knows, and names of those, are not there.
- Nothing changes but what this object notes, and that is empty between two records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cxlfs.errors import CorruptionError, InvalidArgumentError, NamespaceError, RecordRefusedError
from cxlfs.format import layout
from cxlfs.format import operations as records
from cxlfs.store.record_rules import RecordRules

if TYPE_CHECKING:
    from cxlfs.format.operations import Operation
    from cxlfs.store.namespace import Inode, Namespace


class Admission(RecordRules):
    """One for each volume."""

    __slots__ = ("_asides", "_checks", "_inodes", "_links", "_made", "_names")

    def __init__(self, namespace: Namespace) -> None:
        super().__init__()
        self._inodes = namespace.inodes
        self._made: dict[int, int] = {}
        """Mode of each inode that the record has made."""
        self._links: dict[int, tuple[int, int]] = {}
        """Of each inode that gained or lost a name: its names, and the directory of the last."""
        self._names: dict[tuple[int, bytes], int] = {}
        """What each name means that the record has changed; 0: nothing."""
        self._asides: dict[int, bool] = {}
        """Whether each file has a version kept aside, if the record has changed that."""
        self._checks: dict[type, Callable[..., object]] = {
            records.InodeOperation: self._check_inode,
            records.LinkOperation: self._check_link,
            records.UnlinkOperation: self._check_unlink,
            records.SymlinkOperation: self._check_symlink,
            records.XattrSetOperation: self._check_xattr_set,
            records.XattrRemoveOperation: self._check_xattr_remove,
            records.ExtentOperation: _accept,
            records.ContentOperation: self._check_content,
            records.PromoteOperation: self._check_promote,
            records.AsideDropOperation: self._check_aside_drop,
            records.MoveOperation: self._check_move,
        }

    def check(self, ops: Sequence[Operation]) -> None:
        """Check that a record of ``ops`` applies to the committed state.

        Raises:
            RecordRefusedError: It does not.
        """
        checks = self._checks
        try:
            for op in ops:
                checks[type(op)](op)
            if self._links or self._made:
                self._check_end()
        except (NamespaceError, CorruptionError) as error:
            raise RecordRefusedError(
                f"a change is refused that contradicts the state of the store: {error.message}"
            ) from error
        finally:
            if self._made or self._links or self._asides:
                self._made.clear()
                self._links.clear()
                self._names.clear()
                self._asides.clear()
                self._links_made.clear()

    # --- the state ----------------------------------------------------------------------------

    def _committed(self, ino: int) -> Inode | None:
        """Return an inode if the journal knows it."""
        inode = self._inodes.get(ino)
        return None if inode is None or inode.uncommitted or not inode.links else inode

    def mode_of(self, ino: int) -> int | None:
        inode = self._committed(ino)
        return self._made.get(ino) if inode is None else inode.mode

    def _names_of(self, ino: int) -> tuple[int, int]:
        """Return how many names an inode has, and the directory of the last one."""
        found = self._links.get(ino)
        if found is None:
            inode = self._committed(ino)
            found = (0, 0) if inode is None else (inode.links, inode.parent)
        return found

    def links_of(self, ino: int) -> int:
        return self._names_of(ino)[0]

    def parent_of(self, ino: int) -> int:
        return self._names_of(ino)[1]

    def meaning_of(self, parent: int, name: bytes) -> int:
        if self._names:
            changed = self._names.get((parent, name))
            if changed is not None:
                return changed
        directory = self._inodes.get(parent)
        if directory is None or directory.entries is None:
            return 0
        ino = directory.entries.get(name)
        return 0 if ino is None or self._committed(ino) is None else ino

    def has_names(self, ino: int) -> bool:
        directory = self._inodes.get(ino)
        names = () if directory is None or directory.entries is None else directory.entries
        if any(self.meaning_of(ino, name) for name in names):
            return True
        return any(parent == ino and meant for (parent, _), meant in self._names.items())

    def has_aside(self, ino: int) -> bool:
        changed = self._asides.get(ino)
        if changed is None:
            inode = self._committed(ino)
            return inode is not None and inode.aside is not None
        return changed

    # --- one operation ------------------------------------------------------------------------

    def _check_inode(self, op: records.InodeOperation) -> None:
        ino = op.ino
        if self.inode(ino, op.mode):
            self._made[ino] = op.mode
        if not 0 < ino < layout.NUMBER_LIMIT or op.flags & ~layout.INODE_FLAGS_KNOWN:
            raise InvalidArgumentError("an inode has an impossible number or flags")

    def _check_link(self, op: records.LinkOperation) -> None:
        parent, ino, name = op
        self.link(parent, ino)
        if not 0 < len(name) <= layout.NAME_BYTES_MAX or not records.is_name(name):
            raise InvalidArgumentError("not a name")
        replaced = self.meaning_of(parent, name)
        if replaced:
            self._unname(replaced)
        self._names[parent, name] = ino
        self._links[ino] = (self._names_of(ino)[0] + 1, parent)

    def _check_unlink(self, op: records.UnlinkOperation) -> None:
        parent, name = op
        self._unname(self.unlink(parent, name))
        self._names[parent, name] = 0

    def _unname(self, ino: int) -> None:
        links, parent = self._names_of(ino)
        self._links[ino] = (links - 1, parent)

    def _check_symlink(self, op: records.SymlinkOperation) -> None:
        self.target(op.ino)
        if not 0 < len(op.target) <= layout.SYMLINK_BYTES_MAX:
            raise InvalidArgumentError("a symbolic link has an impossible target")

    def _check_xattr_set(self, op: records.XattrSetOperation) -> None:
        self.attribute(op.ino)
        if not 0 < len(op.name) <= layout.XATTR_NAME_BYTES_MAX or b"\0" in op.name:
            raise InvalidArgumentError("an extended attribute has an impossible name")

    def _check_xattr_remove(self, op: records.XattrRemoveOperation) -> None:
        self.attribute(op.ino)

    def _check_content(self, op: records.ContentOperation) -> None:
        self.content(op.ino)
        if op.size > layout.FILE_SIZE_MAX:
            raise InvalidArgumentError("a file is larger than the limit")
        if op.aside:
            self._asides[op.ino] = True

    def _check_promote(self, op: records.PromoteOperation) -> None:
        self.promote(op.ino)
        self._asides[op.ino] = False

    def _check_aside_drop(self, op: records.AsideDropOperation) -> None:
        self.content(op.ino)
        self._asides[op.ino] = False

    def _check_move(self, op: records.MoveOperation) -> None:
        for ino in op.inos:
            self.content(ino)

    # --- the record as a whole ----------------------------------------------------------------

    def _check_end(self) -> None:
        self.end()
        for ino, (links, _) in self._links.items():
            if not links:
                self.nameless(ino)
        for ino in self._made:
            if ino not in self._links:
                raise InvalidArgumentError("a new inode has no name")


def _accept(_op: records.ExtentOperation) -> None:
    """The engine defined the extent, and knows what it defined."""
