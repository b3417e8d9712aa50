"""Checkpoint units that are open: what is known of them, and the two ends that each may have.

Other modules say when one begins (``units``), what the facts mean (``unit_rules``), how what was
there before comes back (``unit_returns``), and who is alive (``ending_of``).

Invariants
- A unit is over by one record: it is forgotten, or it goes back in the same record.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from cxlfs.format.operations import Operation, XattrRemoveOperation, XattrSetOperation
from cxlfs.store import unit_rules
from cxlfs.store.open_unit import OpenUnit, OpenUnits
from cxlfs.store.open_writers import Publishers, Writers
from cxlfs.store.unit_garbage import Garbage
from cxlfs.store.unit_keeping import Keeping
from cxlfs.store.unit_lacks import Lacks
from cxlfs.store.unit_members import UNKNOWN, never_belongs, path_below
from cxlfs.store.unit_places import Places
from cxlfs.store.unit_policies import Policies
from cxlfs.store.unit_record import UNIT_PREFIX, encode_unit, fits, unit_xattr
from cxlfs.store.unit_returns import Returns
from cxlfs.store.unit_rules import Decision, Ending, Facts, Rule, UnitsMode
from cxlfs.store.unit_savers import SAVERS_XATTR, Savers
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.unit_hooks import Named
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume


class DecidesUnits:
    """``writer``: a token of who is making the present request, None: not known; ``ending_of``:
    what became of whom a token stands for.
    """

    def __init__(
        self,
        volume: Volume,
        versions: Versions,
        aside: Aside,
        *,
        mode: UnitsMode = UnitsMode.POLICY,
        require_room: Callable[[], None],
    ) -> None:
        self._volume = volume
        self._versions = versions
        self._namespace = volume.namespace
        self.aside = aside
        self.garbage = Garbage(volume, versions, aside)
        self.kept = Keeping(volume, versions, aside, require_room)
        self.writer: Callable[[], Hashable | None] = lambda: None
        self.ending_of: Callable[[Hashable], Ending] = lambda _writer: Ending.ALIVE
        self.copies_files: Callable[[Hashable], bool] = lambda _writer: False
        """Whom a token stands for copies files of others, as ``cp`` does."""
        self.torn: Callable[[], Iterable[Inode]] = tuple
        """Files that are torn by their own bytes, and not decided."""
        self.user: Callable[[], int | None] = lambda: None
        """Who is making the present request; None: not known."""
        self.open_for_writing = Writers()
        """Of the store's files."""
        self._appended: set[int] = set()
        """Of those that are written on at their end, as logs are, and belong to no unit."""
        self.made_by = Publishers()
        """Of files outside of units, while some are open."""
        self.clock: Callable[[], float] = time.monotonic
        self.opened = OpenUnits()
        self._killed: set[Hashable] = set()
        self.savers = Savers()
        self._left: set[int] = set()
        """Directories that a crash has left open in a store that cannot be written."""
        self.policies = Policies(volume, mode)
        self.places = Places(self._namespace, self.policies, aside, self.opened)
        self.returns = Returns(volume, versions, aside, self.policies)
        self.returns.goes_back = self._goes_back
        self._closing = False
        self.lacks = Lacks(self._namespace, self.policies, self.belongs)
        self.active = self.policies.any_rule
        """Changes of names and contents concern this object."""
        self.pending = False
        """A marker was published: whether that ends a unit is to be looked at."""
        self.unprotected = 0
        """Changes that went on without a unit since the store was opened."""

    # --- what is open ----------------------------------------------------------------------------

    @property
    def has_open(self) -> bool:
        return bool(self.opened)

    def open_units(self) -> list[OpenUnit]:
        return list(self.opened.values())

    def unit_of(self, inode: Inode) -> OpenUnit | None:
        """The open unit that the inode, a directory or what is in one, is or lies in."""
        return self.places.unit_of(inode)

    def _go_on_without(self, directory: Inode) -> None:
        self.unprotected += 1
        self._volume.event(
            "unprotected",
            "there is no room to remember what was in it: the change is made all the same",
            ino=directory.ino,
        )

    def operations_for(self, over: list[OpenUnit], begun: list[OpenUnit]) -> list[Operation]:
        """What says that some units are over and others open."""
        named = {unit.inode.ino for unit in begun}
        gone = [u.inode.ino for u in over if not u.kept and u.inode.ino not in named]
        ops: list[Operation] = [XattrRemoveOperation(ROOT_INO, unit_xattr(ino)) for ino in gone]
        for unit in begun:
            value = encode_unit(unit.record)
            ops.append(XattrSetOperation(ROOT_INO, unit_xattr(unit.inode.ino), value))
        return ops

    def stored(self, ops: Sequence[Operation], over: list[OpenUnit], begun: list[OpenUnit]) -> None:
        """The record of those operations is."""
        root = self._namespace.get(ROOT_INO)
        for op in ops:
            if isinstance(op, XattrSetOperation) and op.name == SAVERS_XATTR:
                self._namespace.set_xattr(self._namespace.get(op.ino), op.name, op.value)
            if isinstance(op, XattrSetOperation) and op.name.startswith(UNIT_PREFIX):
                self._namespace.set_xattr(root, op.name, op.value)
            elif isinstance(op, XattrRemoveOperation) and op.name.startswith(UNIT_PREFIX):
                self._namespace.remove_xattr(root, op.name)
        for unit in over:
            self.opened.pop(unit.inode.ino, None)
            if unit.kept_in is not None and all(unit.kept_in is not b.kept_in for b in begun):
                self.garbage.drop(unit.kept_in)
        for unit in begun:
            self.opened[unit.inode.ino] = unit
            unit.lsn = unit.lsn or self._volume.last_lsn
        self.opened.look()
        self.places.units_changed()

    # --- deciding -------------------------------------------------------------------------------

    def settle_pending(self) -> None:
        """What a verb has left to be looked at. Raises as :meth:`settle`."""
        if self.pending:
            self.settle()

    def settle(self, *, closing: bool = False) -> bool:
        """Decide about every open unit; True when something was decided. Raises as
        :meth:`Volume.commit`.
        """
        self.pending, self._closing = False, closing
        worked = False
        for unit in list(self.opened.values()):
            decision, reason = unit_rules.decide(self._facts(unit, closing=closing))
            if decision is Decision.DONE:
                self._done(unit)
            elif decision is Decision.BACK:
                self._back(unit, reason)
            elif decision is Decision.KEEP and not unit.kept:
                self._keep(unit)
            worked = worked or decision in {Decision.DONE, Decision.BACK}
        if not self.opened:
            self._killed.clear()
            self.made_by.clear()
        return worked

    def _goes_back(self, ino: int) -> bool:
        """An open unit goes back when it is looked at now; before there are any, each one does."""
        unit = self.opened.get(ino)
        if unit is None:
            return True
        facts = self._facts(unit, closing=self._closing)
        return unit_rules.decide(facts)[0] is Decision.BACK

    def _facts(self, unit: OpenUnit, *, closing: bool, but: Inode | None = None) -> Facts:
        unit.spoiled = {ino for ino in unit.spoiled if self._is_below(ino, unit)}
        spoiled = unit.spoiled - {but.ino if but is not None else 0}
        endings = frozenset(self._ending_of(writer) for writer in unit.writers)
        is_over = bool(endings) and Ending.ALIVE not in endings
        is_quiet = self.clock() - unit.changed >= unit.rule.quiet_seconds
        return Facts(
            expects_marker=unit.rule.expects_marker and unit.place is None,
            each_file=unit.each_file,
            marked=unit.marked and not unit.unclosed,
            busy=self._is_busy(unit, but),
            spoiled=bool(spoiled),
            followed=unit.followed,
            quiet=is_quiet and (is_over or not self._will_be_marked(unit)),
            closing=closing,
            removed=unit.place is not None,
            lacks=self._lacking(unit) if is_over else "",
            endings=endings,
        )

    def _lacking(self, unit: OpenUnit) -> str:
        """What is missing in it although its writers are gone: a handler of signals that exits with
        0 ended them, or a program that goes on after an exception.
        """
        if unit.place is not None or unit.marked or unit.each_file:
            return ""
        if unit.is_new and not unit.replaces and self._would_mark(unit):
            return "the marker that they write"
        for inode in self.torn():
            if self.unit_of(inode) is unit and self.belongs(unit, inode):
                return f"the rest of {os.fsdecode(inode.name)}"
        return self.lacks.of(unit)

    def _would_mark(self, unit: OpenUnit) -> bool:
        """Whoever wrote it ends such units by a marker. Where only files show what a directory is,
        jobs of one program may make one part each: a process has to have done so itself.
        """
        if unit.rule.directories:
            return self._is_of_saver(unit)
        return any(self.savers.is_same_process(who, unit.rule) for who in unit.writers)

    def _is_of_saver(self, unit: OpenUnit) -> bool:
        """One of its writers has finished such units beside it."""
        above = self._namespace.inodes.get(unit.inode.parent)
        return above is not None and any(
            self.savers.is_one(writer, unit.rule, above) for writer in unit.writers
        )

    def _will_be_marked(self, unit: OpenUnit) -> bool:
        """A saver that waits in mid-save goes on with it, however long that takes."""
        rule = unit.rule
        if not rule.expects_marker or unit.place is not None or not self._is_of_saver(unit):
            return False
        names = (
            self._namespace.get(ino).name for ino in unit.published if self._is_below(ino, unit)
        )
        return any(unit.is_new or unit_rules.matches(name, rule.files) for name in names)

    def _ending_of(self, writer: Hashable) -> Ending:
        ending = self.ending_of(writer)
        if ending in {Ending.UNKNOWN, Ending.BADLY} and writer in self._killed:
            return Ending.KILLED
        return ending

    def _is_below(self, ino: int, unit: OpenUnit) -> bool:
        inode = self._namespace.inodes.get(ino)
        return inode is not None and inode.links > 0 and self.unit_of(inode) is unit

    def _is_busy(self, unit: OpenUnit, but: Inode | None) -> bool:
        """Something that belongs to it waits for its publication."""
        early = unit.early if unit.marked else ()
        return any(
            inode.links > 0
            and inode is not but
            and inode.ino not in early
            and self.unit_of(inode) is unit
            and self.belongs(unit, inode)
            for inode in self._versions.open_versions.values()
        )

    # --- what belongs to a unit -----------------------------------------------------------------

    def is_others(self, unit: OpenUnit) -> bool:
        """The present request is by another user than the one whose changes belong to it."""
        user = self.user()
        return user is not None and unit.uid not in {UNKNOWN, user}

    def belongs(self, unit: OpenUnit, inode: Inode) -> bool:
        """A file below its directory is a part of it."""
        if inode.ino in unit.apart or inode.ino in unit.foreign:
            return False
        if unit.uid not in {UNKNOWN, inode.uid}:
            return False
        is_directory = inode.entries is not None
        if inode.parent == unit.inode.ino:
            return not never_belongs((inode.name,), is_directory, unit.rule.done)
        directory = self._namespace.inodes.get(inode.parent)
        return directory is None or not self.is_never(
            unit.inode, unit.rule, directory, inode.name, is_directory=is_directory
        )

    def is_never(
        self, top: Inode, rule: Rule, directory: Inode, name: bytes, *, is_directory: bool = False
    ) -> bool:
        """The names that lead from the top of a unit to a name say that it never belongs to it."""
        path = () if directory is top else path_below(self._namespace, top, directory)
        if path is None:
            return False
        return never_belongs((*path, name), is_directory, rule.done)

    def set_apart(self, unit: OpenUnit, inode: Inode, *, foreign: bool = False) -> None:
        """A file does not belong to it from now on; ``foreign``: another user has changed it.
        Raises as :meth:`Volume.commit`.
        """
        if inode.ino in unit.apart or inode.ino in unit.foreign:
            return
        (unit.foreign if foreign else unit.apart).add(inode.ino)
        unit.spoiled.discard(inode.ino)
        if unit.kept:
            return
        if not fits(unit.record):
            self.leave(unit, "too many files in it belong to others, or are logs")
            return
        ops = self.operations_for([], [unit])
        self._volume.commit(ops, durable=False)
        self.stored(ops, [], [])

    def leave(self, unit: OpenUnit, reason: str) -> None:
        """What is there stays as it was written, whatever happens. Raises as
        :meth:`Volume.commit`.
        """
        self.unprotected += 1
        message = f"{reason}: what is written in it stays"
        self._volume.event("unprotected", message, ino=unit.inode.ino)
        self._done(unit, durable=False)

    def decide_named(self, named: Named) -> tuple[OpenUnit | None, Decision]:
        """Where each file is a checkpoint: the unit, and what the name means for it."""
        parent, name, inode = named
        unit = self.places.unit_of(self._namespace.get(parent))
        if unit is None or unit.kept or inode.live is None or not unit.each_file:
            return None, Decision.WAIT
        facts = self._facts(unit, closing=False, but=inode)
        marked = unit.unclosed <= {inode.ino} and (unit.marked or unit.rule.ends_with(name))
        return unit, unit_rules.decide(dataclasses.replace(facts, marked=marked))[0]

    def killed(self, writer: Hashable) -> None:
        """A process that is being killed has closed a file."""
        if self.opened.has_writer(writer):
            self._killed.add(writer)

    def end_abandoned(self, unit: OpenUnit) -> bool:
        """Its writers have ended, so it is done as it is. False: somebody still writes in it.
        Raises as :meth:`Volume.commit`.
        """
        endings = {self._ending_of(writer) for writer in unit.writers}
        if Ending.ALIVE in endings or self._is_busy(unit, None):
            return False
        self._done(unit, durable=False)
        return True

    # --- the two ends ---------------------------------------------------------------------------

    def _done(self, unit: OpenUnit, *, durable: bool = True) -> None:
        """One record: it is an ordinary directory."""
        ops = self.operations_for([unit], [])
        above = self._namespace.inodes.get(unit.inode.parent)
        if unit.marked and not unit.each_file and above is not None:
            ops += self.savers.finished(unit.writers, unit.rule, above)
        if ops:  # else the media do not name it any more
            self._volume.commit(ops, durable=durable)
        self._appended |= {ino for ino in unit.early if ino in self.open_for_writing}
        self.stored(ops, [unit], [])

    def _keep(self, unit: OpenUnit) -> None:
        """One record: no crash takes it back. Durable when it returns."""
        ops = self.operations_for([unit], [])
        self._volume.commit(ops)
        self.stored(ops, [], [])
        unit.kept = True

    def _back(self, unit: OpenUnit, reason: str) -> None:
        """What was there before is there again. Durable when it returns."""
        if unit.kept:  # the media name it no more: a crash on the way goes on with it
            unit.kept = False
            again = self.operations_for([], [unit])
            self._volume.commit(again, durable=False)
            self.stored(again, [], [])
        ops = self.operations_for([unit], [])
        kept = self.returns.back(
            unit.record, ops, reason, lambda told: self.stored(told, [unit], [])
        )
        if kept is not None:
            self.garbage.drop(kept)
