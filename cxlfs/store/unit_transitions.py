"""What the record of a verb says of checkpoint units besides: that some begin or end, that one was
removed and can come back (``unit_hooks.Transition``).

Never here: deciding it (``units``), undoing a removal (``unit_returns``).

Invariants
- Where a removed directory was is said in the record that removes it: a crash finds both or
  neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cxlfs.errors import invariant
from cxlfs.format.operations import Operation, XattrSetOperation
from cxlfs.store.unit_record import BEFORE_XATTR, encode_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cxlfs.store.namespace import Namespace
    from cxlfs.store.open_unit import OpenUnit
    from cxlfs.store.unit_policies import Policies


class OpensAndEnds(Protocol):
    """Who knows the open units."""

    policies: Policies

    def operations_for(self, over: list[OpenUnit], begun: list[OpenUnit]) -> list[Operation]: ...

    def stored(
        self, ops: Sequence[Operation], over: list[OpenUnit], begun: list[OpenUnit]
    ) -> None: ...


class Removal:
    """A transition (``unit_hooks``): the unit stays open, without a directory."""

    def __init__(self, namespace: Namespace, unit: OpenUnit, place: tuple[int, bytes]) -> None:
        invariant(unit.before is not None, "what was not there cannot come back")
        self._namespace = namespace
        self._unit = unit
        self._place = place
        self._value = encode_place(*place)
        ino = unit.record.before
        self.operations: list[Operation] = [XattrSetOperation(ino, BEFORE_XATTR, self._value)]

    def stored(self) -> None:
        """In DRAM it is as the record says."""
        before = self._namespace.get(self._unit.record.before)
        self._namespace.set_xattr(before, BEFORE_XATTR, self._value)
        self._unit.place = self._place
        self._unit.replaces = True
        self._unit.marked = self._unit.followed = False


class UnitTransition:
    """Units that one record ends, and others that it opens; a policy that it moves."""

    def __init__(
        self,
        units: OpensAndEnds,
        over: list[OpenUnit],
        begun: list[OpenUnit],
        moved: Sequence[Operation] = (),
    ) -> None:
        self._units = units
        self._over = over
        self._begun = begun
        self.operations = [*units.operations_for(over, begun), *moved]

    def stored(self) -> None:
        """In DRAM it is as the record says."""
        self._units.policies.stored(self.operations)
        self._units.stored(self.operations, self._over, self._begun)
