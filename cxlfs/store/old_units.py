"""Stores of earlier programs: checkpoint units that are open there are taken back, once.

Such a program copied a directory before it changed it. The copies, and what went back, lie in
``/.cxlfs-units``. When the store is opened to be written, each open unit gives its name to its copy
and is an ordinary directory in there. The place itself is one from then on, too. Copies that nobody
wants any more are removed.

Never here: units of this program (``units``).

Invariants
- One record for each unit. A crash finds it before or behind that.
- Nothing is unlinked: what was written, and what others have put beside it, is moved.
"""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Final

from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrRemoveOperation,
)
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import Inode
from cxlfs.store.paths import path_of
from cxlfs.store.unit_aside import apply_attributes, apply_names, free_name
from cxlfs.store.unit_record import ATTRIBUTE_BYTES_MAX, PLACE_XATTR, UNIT_PREFIX
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Namespace
    from cxlfs.store.unit_policies import Policies
    from cxlfs.store.volume import Volume

PLACE_NAME: Final = b".cxlfs-units"
UNITS_XATTR: Final = HIDDEN_PREFIX + b"units"
BEFORE_XATTR: Final = HIDDEN_PREFIX + b"before"
_PRIVATE = stat.S_IFDIR | 0o700
_FIELDS = 5
"""Of a unit's attribute; this program writes seven."""


def convert(volume: Volume, policies: Policies) -> tuple[list[bytes], list[Inode]]:
    """Take back what is open. Returns the paths of that, and copies that nobody wants. Raises as
    ``Volume.commit``.
    """
    namespace = volume.namespace
    root = namespace.get(ROOT_INO)
    found = _open_units(root.xattrs or {})
    paths: list[bytes] = []
    for ino, before in found.items():
        path = path_of(namespace, ino)
        ops = _back(volume, policies, ino, before)
        _store(volume, [*ops, *_without(root, ino)])
        policies.stored(ops)
        if path is not None and ops:
            paths.append(path)
            message = "what was there before is back: an earlier program was writing it at a crash"
            volume.event("unit-back", message, ino=ino)
    place = namespace.find(ROOT_INO, PLACE_NAME)
    left: list[Inode] = []
    if place is not None and PLACE_XATTR in (place.xattrs or {}):
        left = [namespace.get(ino) for ino in (place.entries or {}).values()]
        left = [inode for inode in left if _is_copy(inode)]
        _store(volume, [XattrRemoveOperation(place.ino, PLACE_XATTR)])
    if UNITS_XATTR in (root.xattrs or {}):
        _store(volume, [XattrRemoveOperation(ROOT_INO, UNITS_XATTR)])
    return paths, left


def _open_units(xattrs: dict[bytes, bytes]) -> dict[int, int]:
    """By the inode number of each directory that of its copy, 0: there is none."""
    found: dict[int, int] = {}
    for name, value in xattrs.items():
        fields = _numbers(value)
        digits = name.removeprefix(UNIT_PREFIX)
        if digits != name and digits.isdigit() and len(fields) == _FIELDS:
            found[int(digits)] = _number(fields[0])
    for item in _numbers(xattrs.get(UNITS_XATTR, b"")):
        if isinstance(item, list) and len(item) >= 2:
            found.setdefault(_number(item[0]), _number(item[1]))
    found.pop(0, None)
    return found


def _without(root: Inode, ino: int) -> list[Operation]:
    name = UNIT_PREFIX + b"%d" % ino
    return [XattrRemoveOperation(ROOT_INO, name)] if name in (root.xattrs or {}) else []


def _back(volume: Volume, policies: Policies, ino: int, before: int) -> list[Operation]:
    """What gives its name to the copy."""
    namespace = volume.namespace
    written = namespace.inodes.get(ino)
    copy = namespace.inodes.get(before)
    if copy is not None and (copy.entries is None or not copy.links or not _is_copy(copy)):
        copy = None
    is_there = written is not None and written.entries is not None and written.links > 0
    if not is_there or written is None or ino == ROOT_INO:
        return _put_back(namespace, copy)
    if before and copy is None:
        return []
    parent, name = written.parent, written.name
    place = _place(volume)
    ops: list[Operation] = [UnlinkOperation(parent, name)]
    ops.append(LinkOperation(place, ino, free_name(namespace, place, name, b"incomplete")))
    if copy is not None:
        ops.append(UnlinkOperation(copy.parent, copy.name))
        ops.append(LinkOperation(parent, copy.ino, name))
        ops.append(XattrRemoveOperation(copy.ino, BEFORE_XATTR))
    return [*ops, *policies.moved(ino, copy)]


def _is_copy(inode: Inode) -> bool:
    return BEFORE_XATTR in (inode.xattrs or {})


def _put_back(namespace: Namespace, copy: Inode | None) -> list[Operation]:
    """A directory that was removed has its name again, where nothing else has."""
    if copy is None:
        return []
    fields = _numbers((copy.xattrs or {}).get(BEFORE_XATTR, b""))
    if len(fields) != 2 or not isinstance(fields[1], str) or not fields[1]:
        return []
    parent, name = namespace.inodes.get(_number(fields[0])), os.fsencode(fields[1])
    if parent is None or parent.entries is None or not parent.links or b"/" in name:
        return []
    if name in parent.entries or name in {b".", b".."}:
        return []
    return [
        UnlinkOperation(copy.parent, copy.name),
        LinkOperation(parent.ino, copy.ino, name),
        XattrRemoveOperation(copy.ino, BEFORE_XATTR),
    ]


def _place(volume: Volume) -> int:
    """Where what was written goes; made if it is not there."""
    namespace = volume.namespace
    found = namespace.find(ROOT_INO, PLACE_NAME)
    if found is not None and found.entries is not None:
        return found.ino
    root = namespace.get(ROOT_INO)
    made = Inode(namespace.allocate_ino(), _PRIVATE, root.uid, root.gid)
    now = volume.now()
    made.atime_ns = made.mtime_ns = made.ctime_ns = made.birth_ns = now
    made.committed_mtime_ns = made.committed_ctime_ns = now
    name = PLACE_NAME if found is None else free_name(namespace, ROOT_INO, PLACE_NAME, b"store")
    namespace.add(made)
    _store(volume, [made.operation(), LinkOperation(ROOT_INO, made.ino, name)])
    return made.ino


def _store(volume: Volume, ops: list[Operation]) -> None:
    """One record, applied."""
    if not ops:
        return
    namespace = volume.namespace
    volume.commit(ops)
    volume.note_committed(ops)
    apply_names(namespace, ops)
    apply_attributes(namespace, ops)


def _numbers(value: bytes) -> list[object]:
    """The list that a value holds; empty: it makes no sense."""
    try:
        found = json.loads(value) if 0 < len(value) <= ATTRIBUTE_BYTES_MAX else None
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) else []


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0
