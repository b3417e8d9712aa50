"""How what a checkpoint unit has kept goes away again, when it is not wanted any more.

Never here: keeping (``unit_keeping``), bringing back (``unit_returns``).

Invariants
- What no open unit names is garbage, whenever that is found out: after a crash, too.
- Every step is one record of a bounded number of names.
- What a user had removed is in history then, if it is not there already.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

from cxlfs.format.operations import Operation, UnlinkOperation
from cxlfs.store.held import last_of
from cxlfs.store.past_rows import Death

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

_NAMES_AT_ONCE = 256

Name = tuple[int, bytes, "Inode"]
"""Directory and name, and what that means."""


class Garbage:
    """One for each volume."""

    def __init__(self, volume: Volume, versions: Versions, aside: Aside) -> None:
        self._volume = volume
        self._namespace: Namespace = volume.namespace
        self._versions = versions
        self._aside = aside
        self._tops: dict[int, Inode] = {}

    def find(self) -> None:
        """What a crash has left in the place."""
        place = self._aside.directory()
        for ino in (place.entries or {}).values() if place is not None else ():
            self._tops[ino] = self._namespace.get(ino)

    def drop(self, top: Inode) -> None:
        """It is not wanted any more: its names go away in steps."""
        self._tops[top.ino] = top

    @property
    def is_removing(self) -> bool:
        return bool(self._tops)

    def remove_some(self) -> bool:
        """One record's worth; False when there is none. Raises as ``Volume.commit``."""
        for ino, top in list(self._tops.items()):
            if top.links == 0:
                del self._tops[ino]
                continue
            names: list[Name] = []
            if self._collect(top, names):
                names.append((top.parent, top.name, top))
            self._remove(names)
            return True
        return False

    def _collect(self, directory: Inode, names: list[Name]) -> bool:
        """Innermost first. True: all below the directory is in ``names``."""
        for name, ino in (directory.entries or {}).items():
            if len(names) >= _NAMES_AT_ONCE:
                return False
            child = self._namespace.get(ino)
            if child.entries is not None and not self._collect(child, names):
                return False
            names.append((directory.ino, name, child))
        return True

    def _remove(self, names: list[Name]) -> None:
        ops: list[Operation] = []
        ended: collections.Counter[int] = collections.Counter()
        for parent, name, inode in names:
            if inode.uncommitted:
                self._namespace.unlink(parent, name)
                self._namespace.reap(inode.ino)
                continue
            links = inode.links - ended[inode.ino]
            ops += [*last_of(inode.ino, links, inode.held), UnlinkOperation(parent, name)]
            ended[inode.ino] += 1
        if not ops:
            return
        lsn, time_ns = self._volume.commit(ops, durable=False)
        for number, op in enumerate(ops):
            if isinstance(op, UnlinkOperation):
                self._died(op.parent, op.name, (lsn, number), time_ns)

    def _died(self, parent: int, name: bytes, key: tuple[int, int], time_ns: int) -> None:
        """A record took a name that was kept."""
        inode, (lsn, number) = self._namespace.unlink(parent, name), key
        if not inode.links:
            if inode.aside is not None:
                self._versions.end_aside(inode, (lsn, number - 1), time_ns)
            if not self._versions.past.has_unnamed(inode):
                self._versions.past.died(inode, parent, name, key, time_ns, Death.REMOVED)
        self._namespace.reap(inode.ino)
