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
        owner = self.opened.strays.get(inode.ino) if inode.entries is not None else None
        if owner is not None:
            return [] if self.is_others(owner) else self._keep_stray(owner, inode)
        unit = self._unit_in(directory)
        if unit is not None and unit.published and inode.entries is None:
            unit.rewritten = unit.rewritten or not unit.rule.may_be_rewritten(name)
        if unit is None or not self._is_old_member(unit, directory, name, inode):
            return []
        return self.keep_name(unit, directory.ino, name, inode)

    def _keep_stray(self, unit: OpenUnit, directory: Inode) -> list[Operation]:
        ops = self.kept.keep_moved(unit, directory)
        self._strays_changed()
        return ops

    def _first_of(self, unit: OpenUnit, inode: Inode, directory: Inode) -> int:
        """For something in a directory: a directory may have brought its own."""
        return self.kept.first_of(unit, directory if inode.entries is None else inode)

    def _strays_changed(self) -> None:
        self.opened.look_for_strays()
        self.places.units_changed()

    def _is_old_member(self, unit: OpenUnit, directory: Inode, name: bytes, inode: Inode) -> bool:
        """The name meant that when the unit began, and belongs to it."""
        if not unit.has_old(inode, self._first_of(unit, inode, directory)):
            return False
        if is_others(inode, unit.uid) or inode.ino in unit.stand_ins:
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
        if left is None and entered is None:
            return []
        place = directory, name
        if inode.entries is not None:
            return self._moving_directory(inode, place, (target, new_name), left, entered)
        if left is entered and left is not None:
            if left.made_alone(inode):
                return []
            return self._moving_within(left, inode, place, target, new_name)
        ops: list[Operation] = []
        origin = None
        if left is not None:
            origin = self.kept.origin_of(left, inode)
            ops += self._leaving(left, inode, place)
        if entered is None or self._is_made_by_writers(entered, inode, target):
            return ops
        if entered.went.get(inode.ino) != inode.commit_lsn:  # else it comes back
            ops += self.kept.keep_origin(entered, *(origin or (directory.ino, name)), inode)
        return [*ops, *self.kept.give_name(entered, target.ino, new_name, inode)]

    def _moving_within(
        self,
        unit: OpenUnit,
        inode: Inode,
        place: tuple[Inode, bytes],
        target: Inode,
        new_name: bytes,
    ) -> list[Operation]:
        """A file stays in its unit. One that was made in it needs nothing, but where it would pass
        for what was there.
        """
        directory, name = place
        ops: list[Operation] = []
        if self._is_old_member(unit, directory, name, inode):
            ops += self.kept.keep_name(unit, directory.ino, name, inode)
        elif not (
            self.kept.is_given(unit, directory.ino, name, inode)
            or (not is_others(inode, unit.uid) and self._would_pass(unit, inode, directory, target))
        ):
            return []
        return [*ops, *self.kept.give_name(unit, target.ino, new_name, inode)]

    def _would_pass(self, unit: OpenUnit, inode: Inode, directory: Inode, target: Inode) -> bool:
        """Something that was made in the unit goes where its number is one of those that were
        there.
        """
        if unit.has_old(inode, self._first_of(unit, inode, directory)):
            return False
        return inode.ino < self.kept.first_of(unit, target)

    def _leaving(self, unit: OpenUnit, inode: Inode, place: tuple[Inode, bytes]) -> list[Operation]:
        """A file moves out: what it was stays. What came from elsewhere is not wanted there."""
        directory, name = place
        if not self._is_old_member(unit, directory, name, inode):
            ops = self.kept.leave_given(unit, inode)
            if ops:
                unit.went[inode.ino] = inode.commit_lsn
            return [*ops, *self.kept.release(unit, inode)]
        if inode.live is None:
            return self.kept.keep_name(unit, directory.ino, name, inode)
        self.kept.keep_copy(unit, directory.ino, name, inode)
        unit.went[inode.ino] = inode.commit_lsn
        return []

    def _moving_directory(
        self,
        inode: Inode,
        place: tuple[Inode, bytes],
        to: tuple[Inode, bytes],
        left: OpenUnit | None,
        entered: OpenUnit | None,
    ) -> list[Operation]:
        """A directory that was in a unit belongs to that until its end. One that came from
        elsewhere does until it goes there.
        """
        directory, name = place
        ops: list[Operation] = []
        if left is not None and self._is_old_member(left, directory, name, inode):
            first_ino = self.kept.first_of(left, directory)
            self.kept.keep_directory(left, directory.ino, name, inode, first_ino)
        elif entered is None:
            for unit in self.opened.values():
                ops += self.kept.release(unit, inode)
        if entered is not None and entered is not left and inode.ino not in entered.stand_ins:
            origin = None if left is None else self.kept.origin_of(left, inode)
            at = origin or (directory.ino, name)
            self.kept.keep_directory(entered, *at, inode, None)
        elif entered is not None and self._would_pass(entered, inode, directory, to[0]):
            self.kept.give_made(entered, to[0].ino, to[1], inode)
        self._strays_changed()
        return ops

    def _is_made_by_writers(self, unit: OpenUnit, inode: Inode, target: Inode) -> bool:
        """A file that comes from elsewhere is a part of the save: one of those who write it has
        made the file since the unit began.
        """
        first_ino = max(unit.began_ino, self.kept.first_of(unit, target))
        if inode.ino < first_ino or inode.ino in unit.came:
            return False
        return self.made_by.of(inode.ino) in unit.writers

    def linking(self, inode: Inode, directory: Inode, name: bytes) -> list[Operation]:
        """The same of a file that gets one more name, and may lose the one that it had first."""
        unit = self._unit_entered(directory, inode)
        if unit is None or inode.uncommitted:
            return []
        above = self._namespace.inodes.get(inode.parent)
        if above is None or self._is_made_by_writers(unit, inode, directory):
            return []
        is_from_here = self.places.unit_of(inode) is unit
        is_made = is_from_here and not unit.has_old(inode, self.kept.first_of(unit, above))
        if is_made and not self._would_pass(unit, inode, above, directory):
            return []
        ops: list[Operation] = []
        has_name = (above.entries or {}).get(inode.name) == inode.ino
        if has_name and not is_from_here:
            ops += self.kept.keep_origin(unit, inode.parent, inode.name, inode)
        return [*ops, *self.kept.give_name(unit, directory.ino, name, inode)]

    # --- contents -----------------------------------------------------------------------------

    def keeper_of(self, inode: Inode) -> OpenUnit | None:
        """The unit that wants the committed content of a file back, if it goes back."""
        unit = self.places.unit_of(inode)
        if unit is None and (inode.links > 1 or inode.kept_links):
            unit = self._unit_of_a_name(inode)
        if unit is None or unit.kept or inode.ino in unit.contents:
            return None
        if inode.live is None or not self.belongs(unit, inode):
            return None
        first_ino = unit.first_ino
        if unit.regions and inode.parent in self._namespace.inodes:
            first_ino = self.kept.first_of(unit, self._namespace.inodes[inode.parent])
        return unit if unit.has_old(inode, first_ino) else None

    def _unit_of_a_name(self, inode: Inode) -> OpenUnit | None:
        """The unit that a file of several names has one in, or had."""
        for unit in self.opened.values():
            if unit.linked is None:
                found = self._namespace.walk(unit.inode.ino)
                unit.linked = {each.ino for each in found if each.links > 1 and each.live}
            if inode.ino in unit.linked or inode.ino in unit.kept_names:
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
