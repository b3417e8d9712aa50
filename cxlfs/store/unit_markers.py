"""Which file that is published is the marker of which open unit.

Never here: which names are markers (``unit_rules``), what becomes of a unit then (``units``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cxlfs.store.unit_archives import is_hollow
from cxlfs.store.unit_rules import may_be_empty

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.open_unit import OpenUnit


def is_marker_of(unit: OpenUnit, inode: Inode) -> bool:
    """One in the unit, behind another file."""
    if inode.parent != unit.inode.ino or inode.name not in unit.rule.done:
        return False
    return bool(unit.published - {inode.ino}) and _says_something(inode, inode.name)


def named_by(
    units: Iterable[OpenUnit], inode: Inode, parent: int, name: bytes
) -> Iterator[OpenUnit]:
    """The units that have something, and that a marker in the directory ``parent`` ends."""
    found = list(_beside(units, parent, name))
    if found and _says_something(inode, name):
        yield from found


def is_emptied(units: Iterable[OpenUnit], inode: Inode) -> bool:
    """It is a marker that lies beside a unit which is being written, and was emptied for a new one
    that has not come.
    """
    if not _is_emptied(inode, inode.name):
        return False
    return any(True for _ in _beside(units, inode.parent, inode.name))


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
