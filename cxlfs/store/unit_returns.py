"""The way back of a checkpoint unit: what was there before is there again, in one record.

Never here: when a unit goes back (``units``), making copies (``unit_copies``).

Invariants
- One record of a bounded number of operations; before it and behind it recovery finds one of the
  two states.
- What was written is renamed, never unlinked. What was removed has its name again only where
  nothing else has it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.store import unit_record
from cxlfs.store.paths import path_of
from cxlfs.store.unit_aside import ASIDE_NAME, apply_names
from cxlfs.store.unit_carrying import Carrying
from cxlfs.store.unit_copies import Copies
from cxlfs.store.unit_record import (
    ASIDE_XATTR,
    BEFORE_XATTR,
    UNITS_XATTR,
    AsideRecord,
    OpenRecord,
)
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.unit_policies import Policies
    from cxlfs.store.volume import Volume


class Returns:
    """One for each open store."""

    def __init__(self, volume: Volume, copies: Copies, policies: Policies) -> None:
        self._volume = volume
        self._namespace = volume.namespace
        self._copies = copies
        self._policies = policies

    def left_open(self) -> list[OpenRecord]:
        """What the media say was open."""
        xattrs = self._namespace.get(ROOT_INO).xattrs or {}
        said = [unit_record.decode_unit(name, value) for name, value in xattrs.items()]
        found = {record.ino: record for record in said if record is not None}
        for record in unit_record.decode_units(xattrs.get(UNITS_XATTR, b"")):
            found.setdefault(record.ino, record)
        return list(found.values())

    def all_back(
        self, records: list[OpenRecord], stored: Callable[[list[Operation]], None]
    ) -> None:
        """After a crash, one record each; ``stored`` is told of it. Raises as Volume.commit."""
        for record in records:
            without = self._without(record)
            if self.can_go_back(record):
                self.back(record, without, "it was being written at a crash")
            else:
                self._volume.commit(without)
                self._tell_left(record)
            stored(without)

    def _without(self, record: OpenRecord) -> list[Operation]:
        """What forgets a unit, in a store of an earlier program, too."""
        xattrs = self._namespace.get(ROOT_INO).xattrs or {}
        ops: list[Operation] = []
        own = unit_record.unit_xattr(record.ino)
        if own in xattrs:
            ops.append(XattrRemoveOperation(ROOT_INO, own))
        together = unit_record.decode_units(xattrs.get(UNITS_XATTR, b""))
        rest = [other for other in together if other.ino != record.ino]
        if len(rest) < len(together):
            value = unit_record.encode_units(rest)
            ops.append(XattrSetOperation(ROOT_INO, UNITS_XATTR, value))
        return ops

    def _tell_left(self, record: OpenRecord) -> None:
        """It stays as a crash has left it."""
        if record.before and self._policies.is_directory(record.ino):
            message = "what was there before is not where the store kept it: the rest stays"
            self._volume.event("unprotected", message, ino=record.ino)

    def back(self, record: OpenRecord, without: list[Operation], reason: str) -> None:
        """``without``: operations that forget the unit. :meth:`can_go_back` was true."""
        before = self.copy_of(record)
        place = self._place_of(record) if self._is_removed(record) else None
        if place is not None and before is not None:
            self._put_back(record.ino, before, place, without, reason)
        else:
            self.take_back(record, before, without, reason)

    def _is_removed(self, record: OpenRecord) -> bool:
        inode = self._namespace.inodes.get(record.ino)
        return inode is None or (inode.entries is not None and inode.links == 0)

    def _place_of(self, record: OpenRecord) -> tuple[int, bytes] | None:
        """Where the removed directory was; None: that is not known, or nothing can go there."""
        before = self.copy_of(record)
        if before is None or before.entries is None:
            return None
        place = unit_record.decode_place((before.xattrs or {}).get(BEFORE_XATTR, b""))
        if place is None or not self._policies.is_directory(place[0]):
            return None
        if self._copies.aside.is_kept_aside(self._namespace.get(place[0])):
            return None
        return place if self._namespace.find(*place) is None else None

    def _put_back(
        self,
        ino: int,
        before: Inode,
        place: tuple[int, bytes],
        without: list[Operation],
        reason: str,
    ) -> None:
        parent, name = place
        now = self._volume.now()
        directory = self._namespace.get(parent)
        ops: list[Operation] = [
            UnlinkOperation(before.parent, before.name),
            LinkOperation(parent, before.ino, name),
            XattrRemoveOperation(before.ino, BEFORE_XATTR),
            directory.operation(mtime_ns=now, ctime_ns=now),
            *self._policies.moved(ino, before),
        ]
        self._commit_back([*ops, *without], None, before, b"")
        directory.mtime_ns = directory.ctime_ns = now
        self._copies.changed(parent, name)
        self._volume.counters.reverts += 1
        self._volume.event("unit-back", f"what was removed is back: {reason}", ino=before.ino)

    def take_back(
        self, record: OpenRecord, before: Inode | None, without: list[Operation], reason: str
    ) -> None:
        """The directory goes aside; what does not belong to the unit stays."""
        inode = self._namespace.get(record.ino)
        carrying = Carrying(self._volume, self._copies, inode, record, self._done_of(inode))
        is_new = before is None
        before = carrying.carry(before)
        if is_new and before is not None:  # which a record of the unit's own has told
            without = [*without, XattrRemoveOperation(ROOT_INO, unit_record.unit_xattr(inode.ino))]
        parent, name = inode.parent, inode.name
        path = path_of(self._namespace, inode.ino) or name
        place, ops = self._copies.aside.directory_or_new()
        now = self._volume.now()
        kept_name = self._copies.aside.free_name(place, name, b"incomplete-%d" % (now // 10**9))
        told = unit_record.encode_aside(AsideRecord(path, now, reason))
        ops.append(UnlinkOperation(parent, name))
        if before is not None:
            ops.append(UnlinkOperation(place.ino, before.name))
            ops.append(LinkOperation(parent, before.ino, name))
            ops.append(XattrRemoveOperation(before.ino, BEFORE_XATTR))
        elif self._policies.has_own(inode):
            before, made = self._copies.empty_like(inode, parent, name)
            ops += made
        ops.append(LinkOperation(place.ino, inode.ino, kept_name))
        ops.append(XattrSetOperation(inode.ino, ASIDE_XATTR, told))
        directory = self._namespace.get(parent)
        ops.append(directory.operation(mtime_ns=now, ctime_ns=now))
        ops += self._policies.moved(inode.ino, before)
        self._commit_back([*ops, *without], inode, before, told)
        directory.mtime_ns = directory.ctime_ns = now
        self._copies.changed(parent, name)
        self._copies.changed(place.ino, kept_name)
        self._volume.counters.reverts += 1
        where = f"/{os.fsdecode(ASIDE_NAME)}/{os.fsdecode(kept_name)}"
        message = f"what was there before is back: {reason}; what was written is in {where}"
        if carrying.count:
            message += f"; {carrying.count} names stay that do not belong to it"
        self._volume.event("unit-back", message, ino=inode.ino)

    def _commit_back(
        self, ops: list[Operation], inode: Inode | None, before: Inode | None, told: bytes
    ) -> None:
        self._volume.commit(ops)
        with self._volume.applying:
            self._volume.note_committed(ops)
            apply_names(self._namespace, ops)
            if inode is not None:
                self._namespace.set_xattr(inode, ASIDE_XATTR, told)
            self._policies.stored(ops)
            if before is not None:
                self._namespace.remove_xattr(before, BEFORE_XATTR)

    def _done_of(self, directory: Inode) -> tuple[bytes, ...]:
        rule = self._policies.rule_of(directory)
        return rule.done if rule is not None else ()

    def copy_of(self, record: OpenRecord) -> Inode | None:
        """The copy that a record names, if it is one and is where copies are."""
        before = self._namespace.inodes.get(record.before)
        place = self._copies.aside.directory()
        if before is None or not before.links or place is None:
            return None
        return before if (place.entries or {}).get(before.name) == before.ino else None

    def can_go_back(self, record: OpenRecord) -> bool:
        """Its directory is there, and so is what it was before."""
        if self._is_removed(record):
            return self._place_of(record) is not None
        if not self._policies.is_directory(record.ino) or record.ino == ROOT_INO:
            return False
        if self._copies.aside.is_kept_aside(self._namespace.get(record.ino)):
            return False
        before = self.copy_of(record)
        if before is None:
            return record.before == 0
        return before.entries is not None and BEFORE_XATTR in (before.xattrs or {})
