"""What the record of a verb says of checkpoint units besides: that some begin or end, that one was
removed and can come back (``unit_hooks.Transition``).

Never here: deciding it (``units``), undoing a removal (``unit_returns``).

Invariants
- That a file stays which gets a name where each file is a checkpoint is said in the record that
  names it: what comes from elsewhere has no other name then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cxlfs.store.unit_hooks import NO_TRANSITION
from cxlfs.store.unit_rules import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cxlfs.format.operations import Operation
    from cxlfs.store.namespace import Inode
    from cxlfs.store.open_unit import OpenUnit, OpenUnits
    from cxlfs.store.unit_hooks import Named, Transition
    from cxlfs.store.unit_policies import Policies


class OpensAndEnds(Protocol):
    """Who knows the open units."""

    policies: Policies
    opened: OpenUnits

    def decide_named(self, named: Named) -> tuple[OpenUnit | None, Decision]: ...

    def operations_for(self, over: list[OpenUnit], begun: list[OpenUnit]) -> list[Operation]: ...

    def stored(
        self, ops: Sequence[Operation], over: list[OpenUnit], begun: list[OpenUnit]
    ) -> None: ...


class Removal:
    """A transition (``unit_hooks``): the unit stays open, and keeps its directory itself."""

    def __init__(
        self, opened: OpenUnits, unit: OpenUnit, place: tuple[int, bytes], ops: list[Operation]
    ) -> None:
        self.operations = ops
        self._opened = opened
        self._unit = unit
        self._place = place

    def stored(self) -> None:
        """In DRAM it is as the record says."""
        self._unit.place = self._place
        self._unit.replaces = True
        self._unit.marked = self._unit.followed = False
        self._opened.look()


class UnitTransition:
    """Units that one record ends, others that it opens or makes stay (``OpenUnit.kept``); a policy
    that it moves; units of which there is more to say (``noted``).
    """

    def __init__(
        self,
        units: OpensAndEnds,
        over: list[OpenUnit],
        begun: list[OpenUnit],
        moved: Sequence[Operation] = (),
        *,
        kept: Sequence[OpenUnit] = (),
        noted: Sequence[OpenUnit] = (),
    ) -> None:
        self._units = units
        self._over = over
        self._begun = begun
        self._kept = kept
        said = [unit for unit in noted if unit not in over and unit not in kept]
        self.operations = [*units.operations_for([*over, *kept], [*begun, *said]), *moved]

    def stored(self) -> None:
        """In DRAM it is as the record says."""
        self._units.policies.stored(self.operations)
        self._units.stored(self.operations, self._over, self._begun)
        for unit in self._kept:
            unit.kept = True


def transition_of_names(
    units: OpensAndEnds,
    names: Sequence[Named],
    replaced: Inode | None,
    noted: Sequence[OpenUnit] = (),
) -> Transition:
    """What gets a name, and what loses one to it: directories that are units are done then, a unit
    that was removed and had the name is, too, and a file may be a checkpoint.
    """
    over = [unit for unit in units.opened.values() if _is_named(unit, names, replaced)]
    kept: list[OpenUnit] = []
    for named in names if units.opened.has_each_file else ():
        unit, decision = units.decide_named(named)
        if unit is not None and unit not in over + kept:
            {Decision.DONE: over, Decision.KEEP: kept}.get(decision, []).append(unit)
    if not (over or kept or noted):
        return NO_TRANSITION
    return UnitTransition(units, over, [], kept=kept, noted=noted)


def _is_named(unit: OpenUnit, names: Sequence[Named], replaced: Inode | None) -> bool:
    """Its directory gets another name or loses it, or something gets the name of a removed one."""
    for parent, name, inode in names:
        if unit.inode is inode or unit.place == (parent, name):
            return True
    return unit.inode is replaced
