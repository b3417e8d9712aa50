"""Directories of the past: what was removed comes back, and a directory becomes what it was.

Other modules bring one version back (``past_restore``), know what a path meant at a commit
(``past_state``), and make a tree of references (``pins``).

Invariants
- A directory that is there is replaced by one record, after everything is ready. Before it, the
  directory is as it was; after it, it is as it was at the commit, whole.
- What was replaced is removed afterwards, name by name, so history has it.
- A step is short: others may have their turn between two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cxlfs.errors import BusyError, ExistsError
from cxlfs.store.namespace import FileKind
from cxlfs.store.past_rows import LAST_NAMES, Row
from cxlfs.store.unit_aside import free_name

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.past_restore import PastVerbs
    from cxlfs.store.past_state import PastState
    from cxlfs.store.pins import Pins
    from cxlfs.store.units import Units

TOGETHER_NS = 10_000_000_000
"""Deaths with longer between them were not one removal of a tree."""
BESIDE: Final = b"replaced"
"""What a directory that is being replaced is called: ``NAME.replaced``."""
_LOOKS_PER_STEP = 16


class PastTrees:
    """One for each volume."""

    def __init__(self, verbs: PastVerbs, pins: Pins, units: Units) -> None:
        self._verbs = verbs
        self._names = verbs.names
        self._namespace = verbs.volume.namespace
        self._pins = pins
        self._units = units

    def died_below(self, directory: int) -> list[Row]:
        """All rows below a directory that is there or died, in the order of death."""
        past = self._verbs.past
        found: list[Row] = []
        pending, seen = [directory], {directory}
        while pending:
            rows = past.died_in(pending.pop())
            found += rows
            for row in rows:
                if row.kind is FileKind.DIRECTORY and row.ino not in seen:
                    seen.add(row.ino)
                    pending.append(row.ino)
        return sorted(found)

    def undelete(self, top: Row, place: tuple[int, bytes] | None = None) -> Iterator[int]:
        """Undelete a directory and what died below it with it. Each step is one record, or a look
        at some directories. Yields what was made so far. What has its name again is left as it is.
        ``place``: another one for it. Raises as :meth:`PastVerbs.undelete`.
        """
        rows: dict[tuple[int, bytes], Row] = {}
        pending, looks = [top], 0
        while pending:
            for row in self._last_in(pending.pop()):
                rows[row.parent, row.name] = row
                if row.kind is FileKind.DIRECTORY:
                    pending.append(row)
            looks += 1
            if looks % _LOOKS_PER_STEP == 0:
                yield 0
        made, before = 0, top
        for row in (top, *sorted(rows.values(), reverse=True)):
            if before.died_ns - row.died_ns > TOGETHER_NS:
                break
            before = row
            with contextlib.suppress(ExistsError):
                if not row.is_gone:
                    self._verbs.undelete(row, place if row is top else None)
                    made += 1
            yield made

    def _last_in(self, directory: Row) -> list[Row]:
        """The last that each name in a directory meant, when that died."""
        died_in = self._verbs.past.died_in(directory.ino)
        rows = [row for row in died_in if row.key < directory.key]
        last = {row.name: row for row in rows if row.death in LAST_NAMES}
        return list(last.values())

    def bring_back(self, top: Row, parent: int, name: bytes) -> Iterator[int]:
        """What was removed takes the place of what has its name now. Yields as :meth:`undelete`.
        Raises as :meth:`restore`.
        """
        beside = self._beside(parent, name)
        yield from self.undelete(top, (parent, beside))
        yield from self._replace(parent, name, beside)

    def restore(self, path: bytes, state: PastState, parent: int, name: bytes) -> Iterator[int]:
        """Make a name what a directory was, with everything below it. Yields how many names were
        made so far; durable at the end.

        Raises:
            NotFoundError: the state has no such path.
            StaleError: a part of it is not known any more; nothing has changed.
            BusyError: a program writes in the directory that has the name.
            ExistsError: the name means a file.
            NoSpaceError, MediaError, ReadOnlyError.
        """
        beside = self._beside(parent, name)
        for made in self._pins.copy_to(path, state, parent, beside):
            yield made.count
        yield from self._replace(parent, name, beside)

    def _beside(self, parent: int, name: bytes) -> bytes:
        """The name that a tree gets until it is ready."""
        target = self._namespace.find(parent, name)
        if target is None:
            return name
        self._require_idle(target)
        return free_name(self._namespace, parent, name, BESIDE)

    def _require_idle(self, target: Inode) -> None:
        """Nobody writes in a directory. Units in it, or around it, whose writers have ended are
        done.
        """
        if target.entries is None:
            raise ExistsError("the name means a file", next_step="name another one with --to")
        below, top = self._namespace.is_below, target.ino
        files = self._verbs.versions.open_versions.values()
        is_written = any(below(inode.parent, top) for inode in files if inode.links)
        units = [
            unit
            for unit in self._units.open_units()
            if below(unit.inode.ino, top) or below(top, unit.inode.ino)
        ]
        if is_written or not all(map(self._units.end_abandoned, units)):
            raise BusyError(
                "a program is writing in the directory",
                next_step="wait until the program has ended, or name another with --to",
            )

    def _replace(self, parent: int, name: bytes, beside: bytes) -> Iterator[int]:
        """Two directories change places; the one that had the name is removed. Yields 0."""
        self._verbs.changed(parent, name)
        if beside == name:
            return
        target = self._namespace.find(parent, name)
        if target is not None:
            self._require_idle(target)  # others had their turn
        with self._verbs.versions.outside_units():
            self._names.rename(parent, beside, parent, name, exchange=target is not None)
        self._verbs.changed(parent, beside)
        directory = self._namespace.get(parent)
        while beside in (directory.entries or {}):
            with self._verbs.versions.outside_units():
                above, leaf, _ = self._names.remove_leaf(directory, beside)
            self._verbs.changed(above, leaf)
            yield 0
        self._verbs.volume.fence()
