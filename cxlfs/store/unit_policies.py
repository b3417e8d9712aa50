"""Which directories of a store are checkpoint units: what users said, and well-known names.

Never here: what follows from it (``units``), the rules themselves (``unit_rules``).

Invariants
- The nearest policy at or above a directory decides, then the table of well-known names (where that
  is in use). Of directories in each other that have a rule the outermost is the unit.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from cxlfs.errors import LimitError
from cxlfs.format.operations import XattrSetOperation
from cxlfs.store import unit_record, unit_rules
from cxlfs.store.unit_record import POLICIES_XATTR
from cxlfs.store.unit_rules import Rule, UnitsMode
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cxlfs.format.operations import Operation
    from cxlfs.store.namespace import Inode
    from cxlfs.store.volume import Volume

_DEPTH_MAX = 64
SIBLINGS_MAX = 64


class Policies:
    """One for each open store."""

    def __init__(self, volume: Volume, mode: UnitsMode) -> None:
        self._volume = volume
        self._namespace = volume.namespace
        self._mode = mode
        xattrs = self._namespace.get(ROOT_INO).xattrs or {}
        self._policies = unit_record.decode_policies(xattrs.get(POLICIES_XATTR, b""))
        self.changes = 0
        """Of policies, since the store was opened."""
        self._removed: dict[tuple[int, bytes], int] = {}
        """Where directories were that had a policy: what is made there has it."""

    @property
    def mode(self) -> UnitsMode:
        """Whether well-known names count."""
        return self._mode

    @mode.setter
    def mode(self, mode: UnitsMode) -> None:
        self._mode = mode
        self.changes += 1

    @property
    def any_rule(self) -> bool:
        """Some directory may be a unit."""
        wanted = self.mode is UnitsMode.AUTO or bool(self.all())
        return self.mode is not UnitsMode.OFF and wanted

    def is_directory(self, ino: int) -> bool:
        inode = self._namespace.inodes.get(ino)
        return inode is not None and inode.entries is not None and not inode.is_removed

    def all(self) -> dict[int, tuple[Rule, ...]]:
        """Inode number of each directory that has a policy: its rules."""
        return {ino: rules for ino, rules in self._policies.items() if self.is_directory(ino)}

    def set(self, directory: Inode, rules: tuple[Rule, ...]) -> None:
        """What holds at and below a directory from now on; no rules: what holds above it. Durable
        when it returns. Raises LimitError, ReadOnlyError, NoSpaceError.
        """
        own = {directory.ino: rules}
        known = (self._policies, self.all())  # a removed directory's gives way to others
        values = (_fitting({**others, **own}) for others in known)
        value = next((value for value in values if value is not None), None)
        if value is None:
            raise LimitError("there are too many policies in this store")
        ops = [XattrSetOperation(ROOT_INO, POLICIES_XATTR, value)]
        self._volume.commit(ops)
        self.stored(ops)

    def has_own(self, directory: Inode) -> bool:
        return directory.ino in self._policies

    def moved(self, ino: int, other: Inode | None) -> list[Operation]:
        """What says that ``other`` takes the place of a directory, and has its policy."""
        if other is None or ino not in self._policies:
            return []
        policies = {other.ino if i == ino else i: p for i, p in self._policies.items()}
        value = _fitting(policies)
        return [] if value is None else [XattrSetOperation(ROOT_INO, POLICIES_XATTR, value)]

    def removing(self, directory: Inode) -> None:
        """Its policy is that of the next directory which is made under its name."""
        if directory.ino in self._policies:
            self._removed[directory.parent, directory.name] = directory.ino

    def making(self, parent: int, name: bytes, made: Inode) -> list[Operation]:
        """What says that a directory has the policy of the one that had its name."""
        ino = self._removed.get((parent, name), 0)
        return [] if self.is_directory(ino) else self.moved(ino, made)

    def stored(self, ops: Sequence[Operation]) -> None:
        """The record of those operations is."""
        root = self._namespace.get(ROOT_INO)
        for op in ops:
            if isinstance(op, XattrSetOperation) and op.name == POLICIES_XATTR:
                self._namespace.set_xattr(root, op.name, op.value)
                self._policies = unit_record.decode_policies(op.value)
                self.changes += 1
                kept = {at: ino for at, ino in self._removed.items() if ino in self._policies}
                self._removed = kept

    # --- finding --------------------------------------------------------------------------------

    def above(self, inode: Inode) -> list[Inode]:
        """The inode and the directories above it, without the root directory."""
        found: list[Inode] = []
        current: Inode | None = inode
        while current is not None and current.ino != ROOT_INO and len(found) < _DEPTH_MAX:
            found.append(current)
            current = self._namespace.inodes.get(current.parent)
        return found

    def is_arriving(self, directory: Inode) -> bool:
        """It lies where a checkpoint from elsewhere waits for its name: it is whole with that, and
        what came of one that broke off is wanted for the next try.
        """
        return any(each.name == unit_rules.RECEIVING_NAME for each in self.above(directory))

    def outermost(self, directory: Inode) -> tuple[Inode, Rule] | None:
        """The outermost directory at or above this one that has a rule, and that rule."""
        for candidate in reversed(self.above(directory)):
            rule = self.rule_of(candidate)
            if rule is not None:
                return candidate, rule
        return None

    def rule_of(self, directory: Inode) -> Rule | None:
        """Of a directory as such, whatever lies above it."""
        own = self._policies.get(directory.ino, ())
        itself = next((rule for rule in own if unit_rules.ITSELF in rule.directories), None)
        parent = self._namespace.inodes.get(directory.parent, directory)
        return itself if itself is not None else self.rule_of_new(parent, directory.name)

    def rule_of_new(self, parent: Inode, name: bytes) -> Rule | None:
        """Of a directory of this name in ``parent``."""
        if name == unit_rules.RECEIVING_NAME or self.is_arriving(parent):
            return None
        for above in [*self.above(parent), self._namespace.get(ROOT_INO)]:
            rules = self._policies.get(above.ino)
            if rules is not None:
                rule = unit_rules.rule_of_directory(name, rules)
                if rule is not None:
                    return rule
                break
        if self.mode is UnitsMode.AUTO:
            return unit_rules.known_directory(name)
        return None

    def rule_beside(self, parent: Inode, name: bytes) -> Rule | None:
        """The rule by which another directory in ``parent`` is finished that has the same name but
        for its numbers. One of the last SIBLINGS_MAX names.
        """
        if self.mode is UnitsMode.OFF or self.is_arriving(parent):
            return None
        for sibling, entries in self._siblings(parent, name):
            rule = self.rule_of_new(parent, sibling)
            if rule is None and self.mode is UnitsMode.AUTO:
                rule = unit_rules.rule_of_contents(entries)
            if rule is not None and not entries.keys().isdisjoint(rule.done):
                return rule
        return None

    def needed_beside(self, parent: Inode, name: bytes, rule: Rule) -> list[frozenset[bytes]]:
        """Which of the names that a rule ``needs`` there are in each directory that lies in
        ``parent``, has the same name but for its numbers, and any of them.
        """
        if not rule.needs:
            return []
        found = (
            frozenset(each for each in entries if unit_rules.matches(each, rule.needs))
            for sibling, entries in self._siblings(parent, name)
            if self.rule_of_new(parent, sibling) == rule
        )
        return [names for names in found if names]

    def _siblings(self, parent: Inode, name: bytes) -> Iterator[tuple[bytes, dict[bytes, int]]]:
        """Directories that hold something, of the series of ``name``, the newest names first."""
        series = unit_rules.series_of(name)
        if series is None:
            return
        newest = itertools.islice(reversed((parent.entries or {}).items()), SIBLINGS_MAX)
        for sibling, ino in newest:
            entries = self._namespace.get(ino).entries
            if entries and sibling != name and unit_rules.series_of(sibling) == series:
                yield sibling, entries


def _fitting(policies: dict[int, tuple[Rule, ...]]) -> bytes | None:
    """What the media say of them; None: they are too many."""
    policies = {ino: rules for ino, rules in policies.items() if rules}
    value = unit_record.encode_policies(policies)
    fits = len(value) <= unit_record.ATTRIBUTE_BYTES_MAX
    return value if fits and len(policies) <= unit_record.POLICIES_MAX else None
