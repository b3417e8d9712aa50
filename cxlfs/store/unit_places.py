"""Which open unit a directory lies in, and which rule it lies under: found once, then remembered.

A save asks several times for each file, and each answer takes a walk to the root directory, with
patterns to compare on the way: 10 to 25 µs.

Never here: what follows from it (``units``).

Invariants
- What is remembered holds while no directory got or lost a name, no policy changed, and no unit
  began or ended. Names of files change nothing: what shows a unit by a file's name is not
  remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.store import unit_rules
from cxlfs.store.unit_rules import UnitsMode

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.open_unit import OpenUnit, OpenUnits
    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.unit_policies import Policies
    from cxlfs.store.unit_rules import Rule

REMEMBERED_MAX = 4096
"""Directories."""


class Places:
    """One for each open store."""

    def __init__(
        self,
        namespace: Namespace,
        policies: Policies,
        aside: Aside,
        open_units: OpenUnits,
    ) -> None:
        self._namespace = namespace
        self._policies = policies
        self._aside = aside
        self._open = open_units
        self._moves = self._changes = -1
        self._units: dict[int, OpenUnit | None] = {}
        self._rules: dict[int, tuple[bool, tuple[Inode, Rule] | None]] = {}
        self.searches = 0
        """Walks that were made since the store was opened."""

    def units_changed(self) -> None:
        """Units began or ended, or a directory belongs to another one."""
        self._units.clear()

    def _refresh(self) -> None:
        """Forget what may not hold any more."""
        moves, changes = self._namespace.directory_moves, self._policies.changes
        if moves != self._moves or changes != self._changes:
            self._moves, self._changes = moves, changes
            self._units.clear()
            self._rules.clear()

    def unit_of(self, inode: Inode) -> OpenUnit | None:
        """The open unit that the inode, a directory or what is in one, is or lies in. A directory
        that was moved out belongs to its unit all the same.
        """
        if not self._open:
            return None
        self._refresh()
        ino = inode.ino if inode.entries is not None else inode.parent
        try:
            return self._units[ino]
        except KeyError:
            return self._search_unit(ino)

    def _search_unit(self, ino: int) -> OpenUnit | None:
        self._count()
        directory = self._namespace.inodes.get(ino)
        above = self._policies.above(directory) if directory is not None else ()
        units, strays = self._open, self._open.strays
        owners = (units.get(inode.ino) or strays.get(inode.ino) for inode in above)
        found = self._units[ino] = next(filter(None, owners), None)
        return found

    def _count(self) -> None:
        """One more search, which will be remembered."""
        self.searches += 1
        if len(self._units) + len(self._rules) >= REMEMBERED_MAX:
            self._units.clear()
            self._rules.clear()

    def rule_for(self, directory: Inode, name: bytes | None) -> tuple[Inode, Rule] | None:
        """The unit that a change of ``name`` in ``directory`` concerns: the outermost directory of
        a rule, else the one that the name itself shows to be one.
        """
        self._refresh()
        is_aside, found = self._rules.get(directory.ino) or self._search_rule(directory)
        by_name = self._policies.mode is UnitsMode.AUTO and name is not None
        if found is None and by_name and not is_aside and self._policies.above(directory):
            rule = unit_rules.rule_of_file(name or b"", directory.entries or ())
            return None if rule is None else (directory, rule)
        return found

    def _search_rule(self, directory: Inode) -> tuple[bool, tuple[Inode, Rule] | None]:
        """Whether the directory is kept aside, or arriving, where no rule holds; which one does."""
        self._count()
        is_aside = self._aside.holds(directory.ino) or self._policies.is_arriving(directory)
        found = None if is_aside else self._policies.outermost(directory)
        self._rules[directory.ino] = is_aside, found
        return is_aside, found
