"""Names that renames took away: who makes one anew, as the next save does, is told that there is
none by the data plane, and nobody here hears of it.

Never here: what the kernel remembers of names (it is told as long, and as ever).

Invariants
- A name that means something is none of these: it is taken back before it does.
- There are none while a checkpoint unit is open, a directory that has gone back is told of, or a
  first visitor is there: then each question for a name matters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.native.transport import ABSENT_NAMES_MAX

if TYPE_CHECKING:
    from cxlfs.fuse.data_plane import DataPlane
    from cxlfs.fuse.returned import Returned
    from cxlfs.store import Store


class Absences:
    """One for each mount. The lock of the store is held by whoever calls."""

    def __init__(self, store: Store, data_plane: DataPlane, returned: Returned) -> None:
        self._store = store
        self._data_plane = data_plane
        self._returned = returned
        self._noted: dict[tuple[int, bytes], None] = {}
        """The oldest first."""
        store.namespace.on_name = self._named
        store.units.opened.on_change = self.forget_all

    def renamed(self, parent: int, name: bytes) -> None:
        """A rename has taken this name away, if nothing has it by now."""
        store = self._store
        if store.units.opened or self._returned.tells:
            return
        if store.namespace.find(parent, name) is not None:
            return
        if len(self._noted) >= ABSENT_NAMES_MAX:
            self._named(*next(iter(self._noted)))
        self._noted[parent, name] = None
        self._data_plane.note_absent(parent, name)

    def _named(self, parent: int, name: bytes) -> None:
        """A name is about to mean something."""
        if (parent, name) in self._noted:
            del self._noted[parent, name]
            self._data_plane.take_absent_back(parent, name)

    def forget_all(self) -> None:
        """Each name is asked for from here on."""
        if self._noted:
            self._noted.clear()
            self._data_plane.take_all_absent_back()
