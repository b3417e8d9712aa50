"""Changes in open checkpoint units: what each verb's record keeps of what was there.

Other modules say when a unit begins (``units``) and ends (``unit_deciding``), and where what is
kept lies (``unit_keeping``).

Invariants
- What belongs to a unit and was committed when it began is kept when it loses a name or its
  content. What others change is not, and stays as they make it.
- A file that leaves its unit leaves its content there: it is finished where it goes, and the set is
  complete when it goes back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import NoSpaceError
from cxlfs.store.unit_deciding import DecidesUnits
from cxlfs.store.unit_members import is_others

if TYPE_CHECKING:
    from cxlfs.format.operations import Operation
    from cxlfs.store.namespace import Inode
    from cxlfs.store.open_unit import OpenUnit
    from cxlfs.store.unit_keeping import KeptContent


class ChangesInUnits(DecidesUnits):
    """What every change in a unit asks for. All methods raise as ``Volume.commit``."""

    def _unit_in(self, directory: Inode) -> OpenUnit | None:
        """The unit that a change of names in a directory belongs to."""
        unit = self.places.unit_of(directory) if self.opened else None
        return None if unit is None or unit.kept or self.is_others(unit) else unit

    def _unit_entered(self, target: Inode, inode: Inode) -> OpenUnit | None:
        """The unit that something gets a name in, whoever gives it. What belongs to others stays
        there in any case; what does not would lose its name when the unit goes back.
        """
        unit = self.places.unit_of(target) if self.opened else None
        if unit is None or unit.kept or is_others(inode, unit.uid):
            return None
        return unit

    # --- names --------------------------------------------------------------------------------

    def dying(self, directory: Inode, name: bytes, inode: Inode) -> list[Operation]:
        """A name is about to be taken from what it means: what keeps it, in the same record and
        behind that.
        """
        unit = self._unit_in(directory)
        if unit is None:
            return []
        if inode.entries is not None and self.kept.is_given(unit, directory.ino, name, inode):
            return self.kept.keep_moved(unit, inode)
        if not self._is_old_member(unit, directory, name, inode):
            return []
        return self.keep_name(unit, directory.ino, name, inode)

    def _is_old_member(self, unit: OpenUnit, directory: Inode, name: bytes, inode: Inode) -> bool:
        """The name meant that when the unit began, and belongs to it."""
        if not unit.has_old(inode) or is_others(inode, unit.uid):
            return False
        if inode.ino in self._appended or inode.ino in unit.appended:
            return False
        is_directory = inode.entries is not None
        if self.is_never(unit.inode, unit.rule, directory, name, is_directory=is_directory):
            return False
        return not self.kept.is_given(unit, directory.ino, name, inode)

    def keep_name(self, unit: OpenUnit, parent: int, name: bytes, inode: Inode) -> list[Operation]:
        """Without room for that, nothing is kept any more: whoever removes something goes on."""
        try:
            return self.kept.keep_name(unit, parent, name, inode)
        except NoSpaceError:
            self.leave(unit, "there is no room to keep what is removed")
            return []

    def moving(
        self, inode: Inode, directory: Inode, name: bytes, target: Inode, new_name: bytes
    ) -> list[Operation]:
        """A name is about to move: what keeps the old one and says that the new one was given, in
        the same record, behind the operation that takes the first and in front of the other's.
        """
        if not self.opened or inode.uncommitted or inode.ino in self.opened:
            return []
        left = self._unit_in(directory)
        entered = left if target is directory else self._unit_entered(target, inode)
        was_old = left is not None and self._is_old_member(left, directory, name, inode)
        if left is not None and left is not entered and was_old and inode.live is not None:
            self.kept.keep_copy(left, directory.ino, name, inode)
        if entered is None or (entered is left and not entered.has_old(inode)):
            return []
        ops: list[Operation] = []
        if entered is not left or was_old:
            ops += self.kept.keep_name(entered, directory.ino, name, inode, moves=True)
        return [*ops, *self.kept.give_name(entered, target.ino, new_name, inode)]

    def linking(self, inode: Inode, directory: Inode, name: bytes) -> list[Operation]:
        """The same of a file that gets one more name, and may lose the one that it had first."""
        unit = self._unit_entered(directory, inode)
        if unit is None or inode.uncommitted:
            return []
        is_from_here = self.places.unit_of(inode) is unit
        if is_from_here and not unit.has_old(inode):
            return []
        ops: list[Operation] = []
        above = self._namespace.inodes.get(inode.parent)
        has_name = above is not None and (above.entries or {}).get(inode.name) == inode.ino
        if has_name and not is_from_here:
            ops += self.kept.keep_name(unit, inode.parent, inode.name, inode)
        return [*ops, *self.kept.give_name(unit, directory.ino, name, inode)]

    # --- contents -----------------------------------------------------------------------------

    def keeper_of(self, inode: Inode) -> OpenUnit | None:
        """The unit that wants the committed content of a file back, if it goes back."""
        unit = self.places.unit_of(inode)
        if unit is None and (inode.links > 1 or inode.kept_links):
            unit = self._unit_of_a_name(inode)
        if unit is None or unit.kept or inode.ino in unit.contents:
            return None
        if not self.belongs(unit, inode):
            return None
        return unit if unit.has_old(inode) and inode.live is not None else None

    def _unit_of_a_name(self, inode: Inode) -> OpenUnit | None:
        """The unit that a file of several names has one in, or had."""
        for unit in self.opened.values():
            if unit.linked is None:
                found = self._namespace.walk(unit.inode.ino)
                unit.linked = {each.ino for each in found if each.links > 1 and each.live}
            if inode.ino in unit.linked or inode.ino in unit.kept_inos:
                return unit
        return None

    def keeping(self, inode: Inode) -> KeptContent | None:
        """A file's content is about to be published: what keeps the one before, in the same
        record.
        """
        unit = self.keeper_of(inode) if self.opened else None
        if unit is not None and self.is_others(unit):
            self.set_apart(unit, inode, foreign=True)
            return None
        return None if unit is None else self.kept.keep_content(unit, inode)
