"""Which file that is published is the marker of which open unit.

Never here: which names are markers (``unit_rules``), what becomes of a unit then (``units``).
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from cxlfs.store.unit_archives import is_hollow
from cxlfs.store.unit_cuts import is_beginning_of, is_cut
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
    return bool(unit.published - {inode.ino}) and says_something(inode, inode.name)


def named_by(
    units: Iterable[OpenUnit],
    inode: Inode,
    parent: int,
    name: bytes,
    siblings: Container[bytes],
) -> Iterator[OpenUnit]:
    """The units that have something, and that a marker in the directory ``parent`` ends, which has
    the names ``siblings``.
    """
    found = [unit for unit in _beside(units, parent, name) if _is_born_in(unit, inode)]
    if found and says_something(inode, name):
        yield from (unit for unit in found if not _names_half(unit, inode, siblings))


def is_unwritten(units: Iterable[OpenUnit], inode: Inode, siblings: Container[bytes]) -> bool:
    """It is a marker that lies beside a unit which is being written, and a new one was begun in it
    that has not come, or not all of it.
    """
    found = list(_beside(units, inode.parent, inode.name))
    if _is_emptied(inode, inode.name):
        return bool(found)
    return any(_names_half(unit, inode, siblings) for unit in found)


def _names_half(unit: OpenUnit, inode: Inode, siblings: Container[bytes]) -> bool:
    """It has the beginning of the unit's name."""
    return inode.live is not None and is_beginning_of(inode.content, unit.inode.name, siblings)


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


def says_something(inode: Inode, name: bytes) -> bool:
    """What comes last in a set is not empty, and not cut by its own bytes."""
    if inode.live is None:
        return True
    if _is_emptied(inode, name):
        return False
    return not (is_hollow(inode.content) or is_cut(inode.content))
