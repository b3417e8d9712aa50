"""Checkpoint units: directories whose files are published together, or go back together.

Files of an open unit are published in place, as anywhere else. A record says that the unit is open,
and from then on each record that changes something in it keeps what was there (``unit_keeping``). A
unit that is done is forgotten by one record. One that goes back (``unit_returns``) leaves what was
written to history.

Never here: which directories are units and when one is over (``unit_rules``), ending one
(``unit_deciding``), publishing files.

Invariants
- The record that opens a unit lies before every record of a change in it.
- Nothing is copied when a unit begins, and nothing that happens after its end takes it back.
- Without open units, rules and policies nothing here costs more than one test of ``active``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError, NoSpaceError
from cxlfs.format.operations import Operation, XattrRemoveOperation
from cxlfs.store import old_units, unit_markers, unit_record, unit_rules
from cxlfs.store.namespace import Inode
from cxlfs.store.open_unit import OpenUnit
from cxlfs.store.paths import path_of
from cxlfs.store.unit_changes import ChangesInUnits
from cxlfs.store.unit_hooks import NO_TRANSITION, Transition
from cxlfs.store.unit_members import UNKNOWN, is_others, name_at_top
from cxlfs.store.unit_record import unit_xattr
from cxlfs.store.unit_report import set_problem
from cxlfs.store.unit_rules import Decision, Rule
from cxlfs.store.unit_transitions import Removal, UnitTransition, transition_of_names
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.unit_hooks import Named


class Units(ChangesInUnits):
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
        given: Inode | None = None,
    ) -> None:
        """Something in a directory is about to change; ``given``: a file gets that name. Raises
        NoSpaceError (whoever is ``removing`` goes on without), MediaError.
        """
        if not self._goes_on(directory, name):
            changed = 0 if given is None or given.entries is not None else given.ino
            self._may_begin(directory, name, changed, removing=removing)

    def _may_begin(
        self, directory: Inode, name: bytes | None, changed: int, *, removing: bool = False
    ) -> None:
        """As :meth:`changing`, where no unit is open; ``changed``: the inode number of the file
        whose content changes.
        """
        found = self.places.rule_for(directory, name)
        if found is None or found[0].links == 0 or not self._acts(*found):
            return
        if name is not None and self.is_never(*found, directory, name):
            return
        if not self._begins(*found, directory, name):
            return
        try:
            self._begin(*found, changed)
        except NoSpaceError:
            if not removing:
                raise
            self._go_on_without(found[0])

    def changing_content(self, inode: Inode, *, in_steps: bool = False) -> bool:
        """The content of a file is about to change. True, only ``in_steps``: a part of it was kept,
        and the next part comes before the change. Raises as :meth:`changing`.
        """
        directory = self._namespace.inodes.get(inode.parent)
        if not inode.links or directory is None or directory.entries is None:
            return False
        if inode.ino in self._appended and inode.ino in self.open_for_writing:
            return False
        if not self._goes_on(directory, None, inode):
            self._may_begin(directory, inode.name, inode.ino)
        unit = self.keeper_of(inode)
        while unit is not None and self.kept.keep_part(unit, inode):
            if in_steps:
                return True
        return False

    def opening(self, inode: Inode, *, appends: bool) -> None:
        """Somebody is about to get a writable handle, or a reading one. Raises as
        :meth:`Volume.commit`.
        """
        if not self.active:
            return
        if not appends:
            if inode.ino in self._appended and inode.ino not in self.open_for_writing:
                self._appended.discard(inode.ino)
            self._open_apart(inode)
            return
        self._appended = {ino for ino in self._appended if ino in self.open_for_writing}
        self._appended.add(inode.ino)
        unit = self.places.unit_of(inode)
        if unit is not None and self.belongs(unit, inode):
            unit.appended.add(inode.ino)
            self.set_apart(unit, inode)

    def _open_apart(self, inode: Inode) -> None:
        """A program that copies files makes one in a unit: it is not a part of it."""
        unit = self.places.unit_of(inode) if self.opened else None
        if unit is None or unit.kept or self.writer() in unit.writers or self.is_others(unit):
            return
        if inode.uncommitted and self._copies(unit.rule) and self.belongs(unit, inode):
            self.set_apart(unit, inode)

    def _copies(self, rule: Rule) -> bool:
        """A program that copies what others have saved makes the present change: what it writes is
        finished when it says so.
        """
        writer = self.writer()
        return not rule.is_policy and writer is not None and self.copies_files(writer)

    def _begins(self, top: Inode, rule: Rule, directory: Inode, name: bytes | None) -> bool:
        """A change that no open unit knows begins one: of something that is there, or of the first
        thing in a directory. What is put beside a finished set is no part of it. Where only files
        show what a directory is, the first one shows no set: the parts of a download, or of a
        conversion by many jobs, come one by one. Who has finished such sets begins the next.
        """
        if rule.is_policy:
            return True
        if self._copies(rule):
            return False
        at_top = name_at_top(self._namespace, top, directory, name)
        found = None if at_top is None else self._namespace.find(top.ino, at_top)
        if found is not None and not found.uncommitted:
            return True
        if self._holds_something(top, rule):
            return False
        return not rule.files or self._is_saver(self.writer(), rule, top)

    def _holds_something(self, top: Inode, rule: Rule) -> bool:
        """A file or directory that may belong to a set was published in it."""
        for name, ino in (top.entries or {}).items():
            inode = self._namespace.get(ino)
            is_directory = inode.entries is not None
            is_log = inode.ino in self._appended or self.is_never(
                top, rule, top, name, is_directory=is_directory
            )
            if not (inode.uncommitted or is_log or is_others(inode, self._uid())):
                return True
        return False

    def _is_saver(self, writer: Hashable | None, rule: Rule, top: Inode) -> bool:
        """It has finished such sets beside this directory."""
        above = self._namespace.inodes.get(top.parent)
        return above is None or self.savers.is_one(writer, rule, above)

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
                self.set_apart(unit, inode, foreign=True)
            return True
        if inode is not None and not self.belongs(unit, inode):
            return True
        if name is not None and self.is_never(unit.inode, unit.rule, directory, name):
            return True
        if unit.is_guess and not self._confirms(unit, directory, name):
            return False
        writer = self.writer()
        known = writer in unit.writers and not unit.kept  # at all changes but the first
        if not known and self._ends_before(unit, writer):
            return False
        if known or not self._copies(unit.rule):
            self._touch(unit, writer)
        elif inode is not None:
            self.set_apart(unit, inode)
        return True

    def _confirms(self, unit: OpenUnit, directory: Inode, name: bytes | None) -> bool:
        """The first thing in a directory that was taken for a set shows that it is one. If not, it
        is none: it is forgotten.
        """
        is_one = directory is unit.inode and name is not None and unit.rule.knows(name)
        if is_one:
            unit.is_guess = False
        else:
            self._done(unit, durable=False)
        return is_one

    def unlinking(self, directory: Inode, name: bytes) -> None:
        """A file is about to be removed. A saver that begins to remove what it has saved, to save
        again, has finished that: if nobody else wrote in the unit, each file was made in it and
        written once, and nothing was removed since the first of them. Raises as
        :meth:`Volume.commit`.
        """
        unit = self.places.unit_of(directory)
        if unit is None or not unit.rule.temporary or unit.rewritten:
            return
        inode = self._namespace.find(directory.ino, name)
        if inode is None or inode.ino not in unit.published:
            return
        if unit_rules.matches(name, unit.rule.temporary):
            return
        alone = unit.writers.keys() == {self.writer()}
        is_whole = alone and not (unit.spoiled or unit.kept)
        if is_whole and not self._is_busy(unit, None):
            self._done(unit)
        else:
            unit.rewritten = True

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
        self._done(unit, durable=False)
        return True

    def _touch(self, unit: OpenUnit, writer: Hashable | None) -> None:
        unit.changed = self.clock()
        if writer is not None and writer not in unit.writers:
            self.savers.note(writer)
            unit.writers[writer] = self.copies_files(writer)

    def _begin(self, directory: Inode, rule: Rule, changed: int) -> None:
        """Say that a directory is an open unit. Raises as :meth:`Volume.commit`."""
        early = self._early(directory, changed)
        if not self._make_way():
            self._go_on_without(directory)
            return
        self._follow(directory.parent)
        has_more = early or self.policies.has_own(directory) or self._has_committed(directory)
        unit = self._new(directory, rule, self._namespace.next_ino if has_more else directory.ino)
        unit.apart = {ino for ino in early if not rule.is_policy or ino in self._appended}
        unit.early = early - unit.apart
        unit.fresh = {ino for ino in unit.early if self._namespace.get(ino).uncommitted}
        if changed in self.open_for_writing and self._namespace.get(changed).uncommitted:
            unit.fresh.add(changed)  # by its writer, under another name
        ops = self.operations_for([], [unit])
        self._volume.commit(ops, durable=False)
        self.stored(ops, [], [unit])

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

    def _new(self, directory: Inode, rule: Rule, first_ino: int) -> OpenUnit:
        now = self._volume.now()
        unit = OpenUnit(directory, rule, first_ino, now, self.clock(), uid=self._uid())
        unit.began_ino = self._namespace.next_ino
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
            above = unit.inode.parent if unit.place is None else unit.place[0]
            if above == parent and same and not unit.followed and unit is not replaced:
                unit.followed = self.pending = True

    # --- verbs that are a beginning or an end themselves ---------------------------------------

    def making(self, parent: Inode, name: bytes, made: Inode) -> Transition:
        """A directory is about to be made: what its record says besides, if it is a unit."""
        if self.unit_of(parent) is not None:
            return NO_TRANSITION
        if self.places.rule_for(parent, None) is not None:
            return NO_TRANSITION
        moved = self.policies.making(parent.ino, name, made)
        removed = self.opened.removed_at(parent.ino, name)
        if removed is not None and self.is_others(removed):
            removed = None
        if removed is not None and not self._ends_before(removed, self.writer()):
            self._follow(parent.ino, removed)
            begun = removed.made_anew(made, self._volume.now(), self.clock())
            self._touch(begun, self.writer())
            return UnitTransition(self, [removed], [begun], moved)
        rule = self.policies.rule_of_new(parent, name)
        is_guess = rule is None
        if rule is None:
            rule = self._guessed(parent, name)
        elif self._copies(rule):
            rule = None
        if rule is None or not self._make_way():
            return UnitTransition(self, [], [], moved) if moved else NO_TRANSITION
        self._follow(parent.ino)
        begun = self._new(made, rule, made.ino)
        begun.is_guess = is_guess
        return UnitTransition(self, [], [begun], moved)

    def _guessed(self, parent: Inode, name: bytes) -> Rule | None:
        """The rule of sets beside a new directory, of the same name but for its numbers, if who
        makes it has finished such.
        """
        rule = self.policies.rule_beside(parent, name)
        is_saver = rule is not None and self.savers.is_one(self.writer(), rule, parent)
        return rule if is_saver else None

    def removing(self, directory: Inode) -> Transition:
        """A directory is about to be removed. Where it is a unit before which something was, that
        can come back until its writers make the name anew, or are over with it.
        """
        self.policies.removing(directory)
        unit = self.opened.get(directory.ino)
        writer = self.writer()
        can_come_back = unit is not None and not (unit.is_new and unit.kept_in is None)
        if unit is None or unit.kept or not can_come_back or self.is_others(unit):
            return self.naming((), directory)
        if self._ends_before(unit, writer):
            return self.naming((), directory)
        self._touch(unit, writer)
        place = directory.parent, directory.name
        ops = [] if unit.is_new else self.keep_name(unit, *place, directory)
        if not (ops or unit.is_new):
            return self.naming((), directory)
        return Removal(self.opened, unit, place, ops)

    def naming(self, names: Sequence[Named], replaced: Inode | None = None) -> Transition:
        """See ``unit_transitions``."""
        if not self.opened:
            return NO_TRANSITION
        return transition_of_names(self, names, replaced, self._note_logs(names))

    def _note_logs(self, names: Sequence[Named]) -> list[OpenUnit]:
        """Units in which something gets another name that does not belong to them: they know of it
        now.
        """
        noted = []
        for parent, _, inode in names:
            unit = self.places.unit_of(self._namespace.get(parent))
            if unit is None or unit.kept or inode is unit.inode or inode.uncommitted:
                continue
            if self.places.unit_of(inode) is not unit or inode.ino in unit.apart:
                continue
            if not self.belongs(unit, inode):
                unit.apart.add(inode.ino)
                if unit_record.fits(unit.record):
                    noted.append(unit)
                else:
                    self.leave(unit, "too many files in it are logs, or belong to others")
        return noted

    def publishing(self, inode: Inode, parent: int, name: bytes) -> None:
        """A file of that name is about to be published: a marker that lies beside units names them,
        so they are done first. A crash in between leaves the marker as it was.
        """
        if not self.opened.beside:
            return
        for unit in list(self._named_by(inode, parent, name)):
            facts = dataclasses.replace(self._facts(unit, closing=False), marked=True)
            if unit_rules.decide(facts)[0] is Decision.DONE:
                unit.marked = True
                self._done(unit, durable=False)

    def _named_by(self, inode: Inode, parent: int, name: bytes) -> Iterator[OpenUnit]:
        beside = self.opened.beside
        return unit_markers.named_by(beside, inode, parent, name, self._names_in(parent))

    def _names_in(self, parent: int) -> Container[bytes]:
        directory = self._namespace.inodes.get(parent)
        return (directory.entries if directory is not None else None) or ()

    def is_unwritten_marker(self, inode: Inode) -> bool:
        """A marker beside open units that was emptied and not written, or not all of it: none of
        what was saved.
        """
        if not self.opened.beside:
            return False
        names = self._names_in(inode.parent)
        return unit_markers.is_unwritten(self.opened.beside, inode, names)

    def published(
        self, inode: Inode, *, incomplete: bool, moves: bool = False, whole: bool = True
    ) -> None:
        """A file's content was published. ``moves``: and it loses the name that it has; ``whole``:
        nothing of the content before is in it.
        """
        writer = self.writer()
        unit = self._seen(inode, writer, incomplete=incomplete, moves=moves)
        if unit is not None and inode.ino < unit.first_ino and inode.ino not in unit.fresh:
            unit.rewritten = unit.rewritten or not unit.rule.may_be_rewritten(inode.name)
            unit.edited |= not whole
        if unit is None and self.opened:
            self.made_by.note(inode.ino, writer)

    def linked(self, inode: Inode) -> None:
        """A file got the name that it has last, with a content that is published; who gave it one
        is known since :meth:`changing`.
        """
        if inode.live is not None and not inode.uncommitted:
            self._seen(inode, None, incomplete=False, is_content=False)
            self.closed(inode)

    def closed(self, inode: Inode) -> None:
        """A file was closed by a writer that lives, or renamed."""
        opened, name = self.opened, inode.name
        if name in unit_rules.FILE_MARKERS:
            self._note_saver(inode)
        is_known = opened.has_each_file or name in opened.markers
        if not is_known and not (opened.needs and unit_rules.matches(name, opened.needs)):
            return
        unit = self._member_of(inode)
        if unit is None or inode.ino not in unit.published:
            return
        unit.unclosed.discard(inode.ino)
        if unit.each_file:
            unit.marked |= unit.rule.ends_with(inode.name)
        else:
            self._look_for_end(unit, inode)
        self.pending |= unit.marked

    def _note_saver(self, inode: Inode) -> None:
        """What comes last in a set was closed, or got its name: whoever did that is a saver, if it
        was the first set, too, which no open unit knows. Raises as :meth:`Volume.commit`.
        """
        directory = self._namespace.inodes.get(inode.parent)
        writer = self.writer()
        if directory is None or writer is None or self.places.unit_of(directory) is not None:
            return
        rule = unit_rules.rule_of_contents(directory.entries or {})
        above = self._namespace.inodes.get(directory.parent)
        if rule is None or above is None or inode.name not in rule.done:
            return
        if not (self._acts(directory, rule) and unit_markers.says_something(inode, inode.name)):
            return
        ops = self.savers.finished([writer], rule, above)
        if ops:
            self._volume.commit(ops, durable=False)
            self.stored(ops, [], [])

    def _look_for_end(self, unit: OpenUnit, inode: Inode) -> None:
        """A published file may be what comes last in a unit."""
        if unit.marked:
            return
        if unit.rule.needs:
            unit.marked = self.lacks.has_all_of_others(unit, inode)
        else:
            unit.marked = unit_markers.is_marker_of(unit, inode)

    def _member_of(self, inode: Inode) -> OpenUnit | None:
        """The unit that a file lies in and belongs to. One without a name is a part of nothing."""
        if inode.links == inode.kept_links:  # not by is_removed: it is asked at every change
            return None
        unit = self.places.unit_of(inode)
        return unit if unit is not None and self.belongs(unit, inode) else None

    def _seen(
        self,
        inode: Inode,
        writer: Hashable | None,
        *,
        incomplete: bool,
        moves: bool = False,
        is_content: bool = True,
    ) -> OpenUnit | None:
        """A file of a unit, perhaps, has another content, or (``is_content`` False) name."""
        unit = member = self._member_of(inode)
        if unit is not None:
            self._touch(unit, writer)
            if unit.each_file:
                unit.unclosed.add(inode.ino)
            if not incomplete:
                unit.spoiled.discard(inode.ino)
                if is_content and inode.ino in unit.published:
                    unit.rewritten = unit.rewritten or not unit.rule.may_be_rewritten(inode.name)
                unit.published.add(inode.ino)
                if not moves and inode.ino not in self.open_for_writing:  # else more of it may come
                    self._look_for_end(unit, inode)
            self.pending = self.pending or unit.marked
        elif not (incomplete or moves) and self.opened.beside:
            for unit in self._named_by(inode, inode.parent, inode.name):
                unit.marked = self.pending = True
        return member

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
        can = [u for u in self.opened.values() if (u.replaces or u.kept) and u.kept_in is not None]
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
        begun = dataclasses.replace(
            *(unit,),
            kept_in=None,
            contents=set(),
            kept_names={},
            stand_ins={},
            came={},
            regions={},
            went={},
            replaces=False,
        )
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
            old, copies = old_units.convert(self._volume, self.policies)
            found += old
            for record in records:
                ops: list[Operation] = [XattrRemoveOperation(ROOT_INO, unit_xattr(record.ino))]
                self.returns.back(record, ops, "it was being written at a crash", self._told)
            self.active = self.policies.any_rule
            self.garbage.find()
            for copy in copies:
                self.garbage.drop(copy)
        except NoSpaceError as error:
            reason = "there is no room to take an unfinished checkpoint back"
            self._volume.stop_writing(f"{reason}: {error.message}")
        return sorted(found)

    def _told(self, ops: list[Operation]) -> None:
        self.stored(ops, [], [])

    def maintain(self) -> bool:
        """Decide what has become of open units, and remove a little of what nobody wants; True when
        there is more to do soon. Raises as :meth:`Volume.commit`.
        """
        worked = bool(self.opened) and self.settle()
        return self.garbage.remove_some() or worked

    def finish(self) -> None:
        """The store is about to be closed. What fails is left for the next opening."""
        try:
            self.settle(closing=True)
            while self.garbage.remove_some():
                pass
        except CxlfsError as error:
            self._volume.event("not-published", error.message)
