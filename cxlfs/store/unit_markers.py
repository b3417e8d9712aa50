"""Which file that is published is the marker of which open unit.

Never here: which names are markers (``unit_rules``), what becomes of a unit then (``units``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cxlfs.store.unit_archives import is_hollow
from cxlfs.store.unit_members import is_others
from cxlfs.store.unit_rules import may_be_empty

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.open_unit import OpenUnit


def is_marker_of(unit: OpenUnit, inode: Inode) -> bool:
    """One in the unit, behind another file."""
    if inode.parent != unit.inode.ino or inode.name not in unit.rule.done:
        return False
    if not _is_born_in(unit, inode):
        return False
    return bool(unit.published - {inode.ino}) and _says_something(inode, inode.name)


def named_by(
    units: Iterable[OpenUnit], inode: Inode, parent: int, name: bytes
) -> Iterator[OpenUnit]:
    """The units that have something, and that a marker in the directory ``parent`` ends."""
    found = [unit for unit in _beside(units, parent, name) if _is_born_in(unit, inode)]
    if found and _says_something(inode, name):
        yield from found


def is_emptied(units: Iterable[OpenUnit], inode: Inode) -> bool:
    """It is a marker that lies beside a unit which is being written, and was emptied for a new one
    that has not come.
    """
    if not _is_emptied(inode, inode.name):
        return False
    return any(True for _ in _beside(units, inode.parent, inode.name))


def _is_born_in(unit: OpenUnit, inode: Inode) -> bool:
    """Its content was written by the unit's user since the unit began: an old marker that is
    renamed or linked says nothing.
    """
    is_new = inode.uncommitted or inode.version is not None or inode.commit_lsn > unit.lsn
    return is_new and not is_others(inode, unit.uid)


def _beside(units: Iterable[OpenUnit], parent: int, name: bytes) -> Iterator[OpenUnit]:
    for unit in units:
        if unit.inode.parent == parent and name in unit.rule.done_beside and unit.published:
            yield unit


def _is_emptied(inode: Inode, name: bytes) -> bool:
    return inode.live is not None and inode.content.size == 0 and not may_be_empty(name)


def _says_something(inode: Inode, name: bytes) -> bool:
    if inode.live is None:
        return True
    return not _is_emptied(inode, name) and not is_hollow(inode.content)
