"""The removal of a directory that is an open unit, while it can be undone.

Never here: when that is over (``units``), undoing it (``unit_returns``).

Invariants
- Where the directory was is said in the record that removes it: a crash finds both or neither.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import invariant
from cxlfs.format.operations import Operation, XattrSetOperation
from cxlfs.store.unit_record import BEFORE_XATTR, encode_place

if TYPE_CHECKING:
    from cxlfs.store.namespace import Namespace
    from cxlfs.store.open_unit import OpenUnit


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
