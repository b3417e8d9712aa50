"""Checkpoint units: directories whose files are published together, or go back together.

Files of an open unit are published in place, as anywhere else. Before the first change of one a
copy of what was there is made (``unit_copies``; none for a new directory), and a record says that
the unit is open. A unit that is done is forgotten by one record; one that goes back changes places
with the copy by one record, and what was written stays in ``/.cxlfs-units``.

Never here: which directories are units and when one is over (``unit_rules``), ending one
(``unit_deciding``), publishing files.

Invariants
- The record that opens a unit lies before every record of a change in it, and behind all of the
  copy. So a crash finds either no change, or what undoes it.
- Nothing that was written is unlinked: a unit that goes back is renamed. Copies go away only after
  the record that makes them unwanted.
- Without open units, rules and policies nothing here costs more than one test of ``active``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError, NoSpaceError
from cxlfs.format.operations import Operation, UnlinkOperation
from cxlfs.store import unit_markers, unit_record, unit_rules
from cxlfs.store.namespace import Inode
from cxlfs.store.open_unit import OpenUnit
from cxlfs.store.paths import path_of
from cxlfs.store.unit_deciding import DecidesUnits
from cxlfs.store.unit_hooks import NO_TRANSITION, Transition
from cxlfs.store.unit_members import UNKNOWN, counterpart, is_others, path_below
from cxlfs.store.unit_report import set_problem
from cxlfs.store.unit_rules import Decision, Rule
from cxlfs.store.unit_transitions import Removal, UnitTransition, transition_of_names

if TYPE_CHECKING:
    from cxlfs.store.unit_hooks import Named


class Units(DecidesUnits):
    """One for each open store."""

    # --- finding --------------------------------------------------------------------------------

    def set_policy(self, directory: Inode, rules: tuple[Rule, ...]) -> None:
        """See :meth:`Policies.set`."""
        self.policies.set(directory, rules)
        self.active = self.policies.any_rule or self.has_open

    def problem_of(self, directory: Inode) -> str | None:
        """Why the files of a directory that nobody writes may not belong together."""
        if directory.ino in self._left:
            return "it was being written at a crash; a mount that writes takes it back"
        return set_problem(self._namespace, directory, self.policies)

    # --- changes --------------------------------------------------------------------------------

    def changing(
        self,
        directory: Inode,
        name: bytes | None = None,
        *,
        removing: bool = False,
        in_steps: bool = False,
    ) -> bool:
        """Something in a directory is about to change. True, only ``in_steps``: one step was made
        towards remembering what is there, and the next one comes before the change.

        Raises NoSpaceError (there is no room to remember it; whoever is ``removing`` goes on
        without), MediaError.
        """
        if self._goes_on(directory, name):
            return False
        return self._may_begin(directory, name, 0, removing=removing, in_steps=in_steps)

    def _may_begin(
        self,
        directory: Inode,
        name: bytes | None,
        changed: int,
        *,
        removing: bool = False,
        in_steps: bool = False,
    ) -> bool:
        """As :meth:`changing`, where no unit is open; ``changed``: the inode number of the file
        whose content changes.
        """
        found = self.places.rule_for(directory, name)
        if found is None or found[0].links == 0 or not self._acts(*found):
            return False
        if name is not None and self.is_never(*found, directory, name):
            return False
        try:
            return self._begin(*found, changed, in_steps=in_steps)
        except NoSpaceError:
            if not removing:
                raise
            self._go_on_without(found[0])
            return False

    def changing_content(self, inode: Inode, *, in_steps: bool = False) -> bool:
        """The content of a file is about to change: as :meth:`changing`."""
        directory = self._namespace.inodes.get(inode.parent)
        if not inode.links or directory is None or directory.entries is None:
            return False
        if inode.ino in self._appended and inode.ino in self.open_for_writing:
            return False
        if self._goes_on(directory, None, inode):
            return False
        return self._may_begin(directory, inode.name, inode.ino, in_steps=in_steps)

    def opening(self, inode: Inode, *, appends: bool) -> None:
        """Somebody is about to get a writable handle, or a reading one. Raises as
        :meth:`Volume.commit`.
        """
        if not self.active:
            return
        if not appends:
            if inode.ino in self._appended and inode.ino not in self.open_for_writing:
                self._appended.discard(inode.ino)
            return
        self._appended = {ino for ino in self._appended if ino in self.open_for_writing}
        self._appended.add(inode.ino)
        unit = self.places.unit_of(inode)
        if unit is not None and self.belongs(unit, inode):
            self.set_apart(unit, inode)

    def _acts(self, directory: Inode, rule: Rule) -> bool:
        """A rule that nobody asked for acts for the owner of the directory alone."""
        user = self.user()
        return rule.is_policy or user is None or user == directory.uid

    def _goes_on(
        self, directory: Inode, name: bytes | None = None, inode: Inode | None = None
    ) -> bool:
        """An open unit that the directory is, or lies in, is being written on; or somebody changes
        there what does not belong to it.
        """
        unit = self.places.unit_of(directory)
        if unit is None:
            return False
        if self.is_others(unit):
            if inode is not None and not is_others(inode, unit.uid):
                self.set_apart(unit, inode)
            return True
        if inode is not None and not self.belongs(unit, inode):
            return True
        if name is not None and self.is_never(unit.inode, unit.rule, directory, name):
            return True
        writer = self.writer()
        known = writer in unit.writers and not unit.kept  # at all changes but the first
        if not known and self._ends_before(unit, writer):
            return False
        self._touch(unit, writer)
        return True

    def _ends_before(self, unit: OpenUnit, writer: Hashable | None) -> bool:
        """Somebody else begins to write where those who wrote so far have ended well, or somebody
        goes on where each file is a checkpoint: that was one unit, and this is the next.
        """
        if not unit.kept and (writer is None or not unit.writers or writer in unit.writers):
            return False
        facts = self._facts(unit, closing=False)
        facts = dataclasses.replace(facts, followed=facts.followed or unit.kept)
        if unit_rules.decide(facts)[0] is not Decision.DONE:
            return False
        self._done(unit, durable=False, next_begins=True)
        return True

    def _touch(self, unit: OpenUnit, writer: Hashable | None) -> None:
        unit.changed = self.clock()
        if writer is not None and writer not in unit.writers:
            unit.writers[writer] = None

    def _begin(self, directory: Inode, rule: Rule, changed: int, *, in_steps: bool) -> bool:
        """Remember what is in a directory, then say that it is an open unit. True: see
        :meth:`changing`.
        """
        early = self._early(directory, changed)
        before = None
        if self._has_committed(directory) or self.policies.has_own(directory) or early:
            while self.copyings.step(directory, self.clock()):
                if in_steps:
                    return True
            before = self.copyings.take(directory, follow=rule.ends_with_each_file)
        if not self._make_way():
            self._go_on_without(directory)
            if before is not None:
                self.copies.drop(before)
            return False
        self._follow(directory.parent)
        unit = self._new(directory, rule, before)
        unit.apart = {ino for ino in early if not rule.is_policy or ino in self._appended}
        unit.early = early - unit.apart
        ops = self.operations_for([], [unit])
        try:
            self._volume.commit(ops, durable=False)
        except BaseException:
            if before is not None:
                self.copies.drop(before)
            raise
        self.stored(ops, [], [unit])
        return False

    def _early(self, directory: Inode, changed: int) -> set[int]:
        """Files below a directory that are open for writing before a unit begins with the change
        of another one.
        """
        found = set()
        for ino in self.open_for_writing.inos():
            inode = self._namespace.inodes.get(ino)
            if inode is None or not inode.links or ino == changed:
                continue
            if self._namespace.is_below(inode.parent, directory.ino):
                found.add(ino)
        return found

    def _make_way(self) -> bool:
        """For one more unit of the present user; False: there are too many of others."""
        own = self.opened.of_user(self._uid())
        if len(own) >= unit_record.UNITS_MAX or len(self.opened) >= unit_record.UNITS_OF_ALL_MAX:
            if not own:
                return False
            self.leave(own[0], f"its user has {len(own)} units open")
        return True

    def _uid(self) -> int:
        user = self.user()
        return UNKNOWN if user is None else user

    def _new(self, directory: Inode, rule: Rule, before: Inode | None) -> OpenUnit:
        now = self._volume.now()
        unit = OpenUnit(directory, rule, before, now, self.clock(), self._uid())
        self._touch(unit, self.writer())
        return unit

    def _has_committed(self, directory: Inode) -> bool:
        children = (directory.entries or {}).values()
        return any(not self._namespace.get(ino).uncommitted for ino in children)

    def _follow(self, parent: int, replaced: OpenUnit | None = None) -> None:
        """Another unit begins in the directory ``parent``: those beside it are over."""
        writer = self.writer()
        for unit in self.opened.values():
            same = writer is None or writer in unit.writers
            if unit.inode.parent == parent and same and not unit.followed and unit is not replaced:
                unit.followed = self.pending = True

    # --- verbs that are a beginning or an end themselves ---------------------------------------

    def making(self, parent: Inode, name: bytes, made: Inode) -> Transition:
        """A directory is about to be made: what its record says besides, if it is a unit."""
        if self.unit_of(parent) is not None or self.copies.aside.is_kept_aside(parent):
            return NO_TRANSITION
        if self.places.rule_for(parent, None) is not None:
            return NO_TRANSITION
        moved = self.policies.making(parent.ino, name, made)
        removed = self.opened.removed_at(parent.ino, name)
        if removed is not None and self.is_others(removed):
            removed = None
        if removed is not None and not self._ends_before(removed, self.writer()):
            self._follow(parent.ino, removed)
            begun = self._new(made, removed.rule, removed.before)
            begun.replaces = True
            return UnitTransition(self, [removed], [begun], moved)
        rule = self.policies.rule_of_new(parent, name)
        if rule is None or not self._make_way():
            return UnitTransition(self, [], [], moved) if moved else NO_TRANSITION
        self._follow(parent.ino)
        return UnitTransition(self, [], [self._new(made, rule, None)], moved)

    def removing(self, directory: Inode) -> Transition:
        """A directory is about to be removed. Where it is a unit before which something was, that
        can come back until its writers make the name anew, or are over with it.
        """
        self.policies.removing(directory)
        unit = self.opened.get(directory.ino)
        writer = self.writer()
        if unit is None or unit.before is None or self.is_others(unit):
            return self.naming((), directory)
        if self._ends_before(unit, writer):
            return self.naming((), directory)
        self._touch(unit, writer)
        place = directory.parent, directory.name
        return Removal(self._namespace, self.opened, unit, place)

    def naming(self, names: Sequence[Named], replaced: Inode | None = None) -> Transition:
        """See ``unit_transitions``."""
        if not self.opened:
            return NO_TRANSITION
        return transition_of_names(self, names, replaced, self._note_moves(names))

    def _note_moves(self, names: Sequence[Named]) -> list[OpenUnit]:
        """Units into which something is moved from elsewhere, or in which a log gets another name;
        they know of it now.
        """
        noted = []
        for parent, _, inode in names:
            unit = self.places.unit_of(self._namespace.get(parent))
            if unit is None or unit.kept or inode is unit.inode or inode.uncommitted:
                continue
            if self.places.unit_of(inode) is not unit:
                unit.moved[inode.ino] = inode.parent, inode.name
            elif self.belongs(unit, inode) or inode.ino in unit.apart:
                continue
            else:
                unit.apart.add(inode.ino)
            if unit_record.fits(unit.record):
                noted.append(unit)
            else:
                self.leave(unit, "too much was moved into it")
        return noted

    def unlinking(self, directory: Inode, name: bytes) -> Sequence[Operation]:
        """A name is about to be removed: the same name in the copy, where what it means does not
        belong to the unit, so that it does not come back.
        """
        unit = self.places.unit_of(directory)
        child = self._namespace.find(directory.ino, name)
        if unit is None or unit.before is None or unit.place is not None or child is None:
            return ()
        if self.belongs(unit, child) and not self.is_others(unit):
            return ()
        path = path_below(self._namespace, unit.inode, directory)
        copy = None if path is None else counterpart(self._namespace, unit.before, path)
        copied = None if copy is None else self._namespace.find(copy.ino, name)
        if copy is None or copied is None or copied.entries is not None or copied.uncommitted:
            return ()
        return (UnlinkOperation(copy.ino, name),)

    def publishing(self, inode: Inode, parent: int, name: bytes) -> None:
        """A file of that name is about to be published: a marker that lies beside units names them,
        so they are done first. A crash in between leaves the marker as it was.
        """
        if not self.opened.beside:
            return
        for unit in list(unit_markers.named_by(self.opened.beside, inode, parent, name)):
            facts = dataclasses.replace(self._facts(unit, closing=False), marked=True)
            if unit_rules.decide(facts)[0] is Decision.DONE:
                self._done(unit, durable=False)

    def is_emptied_marker(self, inode: Inode) -> bool:
        """A marker beside open units that was emptied and not written: none of what was saved."""
        return unit_markers.is_emptied(self.opened.beside, inode)

    def published(self, inode: Inode, *, incomplete: bool) -> None:
        """A file's content was published."""
        self._seen(inode, self.writer(), incomplete=incomplete)

    def linked(self, inode: Inode) -> None:
        """A file got the name that it has last, with a content that is published; who gave it one
        is known since :meth:`changing`.
        """
        if inode.live is not None and not inode.uncommitted:
            self._seen(inode, None, incomplete=False)
            self.closed(inode)

    def closed(self, inode: Inode) -> None:
        """A file was closed by a writer that lives, or renamed."""
        unit = self._member_of(inode) if self.opened.has_each_file else None
        if unit is not None and unit.each_file and inode.ino in unit.published:
            unit.unclosed.discard(inode.ino)
            unit.marked |= unit.rule.ends_with(inode.name)
            self.pending |= unit.marked

    def _member_of(self, inode: Inode) -> OpenUnit | None:
        """The unit that a file lies in and belongs to."""
        unit = self.places.unit_of(inode)
        return unit if unit is not None and self.belongs(unit, inode) else None

    def _seen(self, inode: Inode, writer: Hashable | None, *, incomplete: bool) -> None:
        unit = self._member_of(inode)
        if unit is not None:
            self._touch(unit, writer)
            if unit.each_file:
                unit.unclosed.add(inode.ino)
            if not incomplete:
                unit.spoiled.discard(inode.ino)
                unit.marked = unit.marked or unit_markers.is_marker_of(unit, inode)
                unit.published.add(inode.ino)
            self.pending = self.pending or unit.marked
        elif not incomplete and self.opened.beside:
            for unit in unit_markers.named_by(self.opened.beside, inode, inode.parent, inode.name):
                unit.marked = self.pending = True

    def spoil(self, inode: Inode, *, reverted: bool = False) -> None:
        """A file could not be finished (``reverted``: what was committed is there again)."""
        unit = self._member_of(inode)
        if unit is not None:
            whole = reverted and unit.each_file and inode.ino not in unit.published
            unit.spoiled |= set() if whole else {inode.ino}

    def drop_removed(self) -> bool:
        """What a user has removed cannot come back any more, the oldest first; False when nothing
        can. Raises as :meth:`Volume.commit`.
        """
        can = [u for u in self.opened.values() if (u.replaces or u.kept) and u.before is not None]
        if not can:
            return False
        unit = min(can, key=lambda unit: unit.since_ns)
        if unit.place is not None or unit.kept:
            self._done(unit, durable=False)
            return True
        self.unprotected += 1
        self._volume.event(
            "unprotected",
            "there is no room to keep what was removed until its successor is written",
            ino=unit.inode.ino,
        )
        begun = dataclasses.replace(unit, before=None, replaces=False)
        ops = self.operations_for([unit], [begun])
        self._volume.commit(ops, durable=False)
        self.stored(ops, [unit], [begun])
        return True

    # --- life -----------------------------------------------------------------------------------

    def recover(self) -> list[bytes]:
        """Roll back every unit that the last mount left open.

        Each takes one record, which is durable on return. In a read-only store the units stay open.
        Returns the paths of their directories.
        """
        records = self.returns.left_open()
        paths = [path_of(self._namespace, record.ino) for record in records]
        found = sorted(path for path in paths if path is not None)
        if self._volume.read_only:
            self._left = {record.ino for record in records}
            return found
        try:
            self.copies.aside.take_over()
            self.returns.all_back(records, lambda ops: self.stored(ops, [], []))
            self.active = self.policies.any_rule
            self.copies.find_garbage()
        except NoSpaceError as error:
            reason = "there is no room to take an unfinished checkpoint back"
            self._volume.stop_writing(f"{reason}: {error.message}")
        return found

    def maintain(self) -> bool:
        """Decide what has become of open units, and remove a little of what nobody wants; True when
        there is more to do soon. Raises as :meth:`Volume.commit`.
        """
        worked = bool(self.opened) and self.settle()
        self.copyings.drop_idle(self.clock())
        return self.copies.remove_some() or worked

    def finish(self) -> None:
        """The store is about to be closed. What fails is left for the next opening."""
        try:
            self.settle(closing=True)
            self.copyings.drop_all()
            while self.copies.remove_some():
                pass
        except CxlfsError as error:
            self._volume.event("not-published", error.message)
