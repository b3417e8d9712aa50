"""Planted bugs in checkpoint units: how they open, end and go back."""

from __future__ import annotations

from typing import Any

import pytest

from cxlfs.format import operations
from cxlfs.store import unit_keeping, unit_returns, units
from cxlfs.store.unit_record import UNIT_PREFIX
from tests.support.mutants import Patch, mutant, nothing


def _is_entry(op: Any) -> bool:
    says = operations.XattrSetOperation, operations.XattrRemoveOperation
    return isinstance(op, says) and op.name.startswith(UNIT_PREFIX)


@mutant("one/LINE/unit_of_a_new_directory", 16)
def unit_that_no_record_opens(patch: Patch) -> None:
    """That a unit is open is known to the living alone."""
    original = units.Units.operations_for
    patch.setattr(units.Units, "operations_for", lambda self, over, _: original(self, over, []))


@mutant("one/LINE/unit_changed_in_place", 16)
def unit_opened_behind_the_change(patch: Patch) -> None:
    """A change of content opens the unit only when it is published."""
    published = units.Units.published

    def late(self: units.Units, inode: Any, **told: bool) -> None:
        units.Units.changing(self, self._namespace.get(inode.parent), inode.name)
        published(self, inode, **told)

    patch.setattr(units.Units, "changing_content", nothing)
    patch.setattr(units.Units, "published", late)


@mutant("one/PAGE/unit_overwritten", 7)
def removed_name_not_kept(patch: Patch) -> None:
    """What comes back lacks a file."""
    patch.setattr(unit_keeping.Keeping, "keep_name", lambda *_, **__: [])


@mutant("one/LINE/unit_overwritten", 7, 6)
def kept_with_times_of_its_own(patch: Patch) -> None:
    """What comes back looks as if it had been written just now."""
    original = unit_keeping._take_attributes

    def stamped(made: Any, source: Any) -> None:
        original(made, source)
        made.mtime_ns = made.committed_mtime_ns = source.birth_ns + 10**15

    patch.setattr(unit_keeping, "_take_attributes", stamped)


@mutant("one/LINE/unit_overwritten", 12)
def kept_content_removed_while_it_is_wanted(patch: Patch) -> None:
    """What a unit keeps counts as garbage from the beginning."""
    original = units.Units.keeping

    def keeping(self: units.Units, inode: Any) -> Any:
        kept = original(self, inode)
        for unit in self.opened.values():
            if unit.kept_in is not None:
                self.garbage.drop(unit.kept_in)
        return kept

    patch.setattr(units.Units, "keeping", keeping)


@mutant("one/LINE/unit_changed_in_place", 7)
def content_kept_behind_its_change(patch: Patch) -> None:
    """In a record of its own."""
    done = unit_keeping.KeptContent.done
    init = unit_keeping.KeptContent.__init__

    def begin(self: unit_keeping.KeptContent, *args: Any) -> None:
        init(self, *args)
        self._keeping._late, self.operations = self.operations, []  # type: ignore[attr-defined]

    def late(self: unit_keeping.KeptContent) -> None:
        self.operations = self._keeping._late  # type: ignore[attr-defined]
        self._keeping._volume.commit(self.operations)
        done(self)

    patch.setattr(unit_keeping.KeptContent, "__init__", begin)
    patch.setattr(unit_keeping.KeptContent, "done", late)


@mutant("one/LINE/unit_changed_in_place", 7)
def content_not_kept(patch: Patch) -> None:
    """What is written in place stays when the rest goes back."""
    patch.setattr(units.Units, "keeping", nothing)


@mutant("one/LINE/unit_kept_in_steps", 7)
def half_a_content_counts_as_kept(patch: Patch) -> None:
    """A content that takes several records to keep has its name from the first one on."""
    patch.setattr(unit_keeping, "PART", b"")
    patch.setattr(unit_keeping, "apply_names", nothing)

    def publish(self: unit_keeping.Keeping, copy: Any, *_: object) -> None:
        self._versions.publish(copy, incomplete=False)

    patch.setattr(unit_keeping.Keeping, "_publish", publish)


@mutant("one/LINE/unit_renamed_within", 7)
def given_name_forgotten(patch: Patch) -> None:
    """What was renamed in a unit has both names when it has gone back."""
    patch.setattr(unit_keeping.Keeping, "give_name", lambda *_: [])


@mutant("one/LINE/unit_renamed_within", 7)
def moved_directory_kept_nowhere(patch: Patch) -> None:
    """A directory that was renamed and then removed does not come back."""
    patch.setattr(unit_keeping.Keeping, "keep_moved", lambda *_: [])


@mutant("one/LINE/unit_back_with_several_writers", 5)
def forgotten_before_it_is_back(patch: Patch) -> None:
    """That the unit is over is said first, and what was there comes back behind it."""
    original = unit_returns._WayBack.go

    def first(self: unit_returns._WayBack, without: list[Any], stored: Any) -> Any:
        self._volume.commit([op for op in without if _is_entry(op)])
        return original(self, [], lambda _: stored(without))

    patch.setattr(unit_returns._WayBack, "go", first)


@mutant("one/PAGE/unit_overwritten", 10, 11)
def recovery_takes_nothing_back(patch: Patch) -> None:
    """What is open after a crash stays as it was written."""
    patch.setattr(units.Units, "recover", lambda _self: [])


@mutant("one/LINE/unit_marker_first/9of16", 16)
def marker_alone_ends_a_unit(patch: Patch) -> None:
    """A marker counts although nothing was published before it."""
    original = units.Units._seen

    def eager(self: units.Units, inode: Any, *others: Any, **options: Any) -> Any:
        for unit in self.opened.values():
            unit.published.add(0)
        return original(self, inode, *others, **options)

    patch.setattr(units.Units, "_seen", eager)


@mutant("one/LINE/unit_marker_before_a_file_is_closed", 16)
def marker_ends_a_unit_that_is_being_written(patch: Patch) -> None:
    """A marker counts although another file of the unit is not published yet."""
    patch.setattr(units.Units, "_is_busy", lambda *_: False)


@mutant("one/LINE/unit_marker_beside/6of16", 6, 16)
def marker_beside_comes_first(patch: Patch) -> None:
    """A marker names a unit that is not done yet."""
    patch.setattr(units.Units, "publishing", nothing)


@mutant("one/LINE/unit_on_a_full_store", 16)
def failed_write_forgotten(patch: Patch) -> None:
    """A unit with a file that could not be finished is done after a while."""
    patch.setattr(units.Units, "spoil", nothing)


@mutant("one/LINE/unit_renamed", 5, 6)
def rename_and_end_in_two_records(patch: Patch) -> None:
    """The directory has its new name before its unit is over."""
    original = units.UnitTransition.stored

    def late(self: units.UnitTransition) -> None:
        ops, self._ops = self._ops, []  # type: ignore[attr-defined]
        self._units._volume.commit(ops)
        self.operations = ops
        original(self)

    def init(
        self: units.UnitTransition,
        owner: units.Units,
        over: list[Any],
        begun: list[Any],
        moved: tuple[Any, ...] = (),
        *,
        kept: tuple[Any, ...] = (),
        noted: tuple[Any, ...] = (),
    ) -> None:
        self._units, self._over, self._begun, self._kept = owner, over, begun, kept
        said = [unit for unit in noted if unit not in [*over, *kept]]
        ops = owner.operations_for([*over, *kept], [*begun, *said])
        self._ops = [*ops, *moved]  # type: ignore[attr-defined]
        self.operations = []

    patch.setattr(units.UnitTransition, "__init__", init)
    patch.setattr(units.UnitTransition, "stored", late)


@mutant("one/LINE/unit_removed_and_made_again/15of16", 16)
def removal_ends_a_unit(patch: Patch) -> None:
    """What was removed is forgotten before its name is made again."""
    patch.setattr(units.Units, "removing", lambda self, directory: self.naming((), directory))


@mutant("one/LINE/unit_removed_and_replaced/8of16", 16)
def replaced_removal_kept(patch: Patch) -> None:
    """What has the name of a removed unit ends the removal in a record before its own."""
    naming = units.Units.naming

    def early(self: units.Units, names: Any, *replaced: Any) -> Any:
        for parent, name, _ in names:
            removed = self.opened.removed_at(parent, name)
            if removed is not None:
                self._done(removed)
        return naming(self, names, *replaced)

    patch.setattr(units.Units, "naming", early)


@mutant("one/LINE/unit_removed_and_followed/12of16", 16)
def removal_stands_whoever_goes_on(patch: Patch) -> None:
    """A unit that was removed is forgotten when anybody begins another one beside it."""
    original = units.Units._follow

    def follow(self: units.Units, *others: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "writer", lambda: None)
            original(self, *others)

    patch.setattr(units.Units, "_follow", follow)


@mutant("one/LINE/unit_removed_and_followed/8of16", 16)
def removal_stands_wherever_its_remover_goes_on(patch: Patch) -> None:
    """A unit that was removed is forgotten when its remover begins another one anywhere."""

    def follow(self: units.Units, _parent: int, replaced: Any = None) -> None:
        for unit in self.opened.values():
            if self.writer() in unit.writers and unit is not replaced:
                unit.followed = self.pending = True

    patch.setattr(units.Units, "_follow", follow)


@mutant("one/PAGE/unit_removed_and_followed/14of16", 12)
def removed_content_dropped_before_its_record(patch: Patch) -> None:
    """When the next unit is begun what was removed counts as garbage; that its removal stands is
    said later.
    """
    original = units.Units._follow

    def follow(self: units.Units, *others: Any) -> None:
        original(self, *others)
        for unit in self.opened.values():
            if unit.followed and unit.place is not None and unit.kept_in is not None:
                self.garbage.drop(unit.kept_in)

    patch.setattr(units.Units, "_follow", follow)


@mutant("one/LINE/unit_of_files_renamed_over_and_in/15of16", 5)
def file_lost_on_its_way_into_a_unit(patch: Patch) -> None:
    """That a file stays which was renamed into a directory of checkpoints is said in a record
    behind that of the rename: a crash in between finds it nowhere.
    """
    patch.setattr(units.Units, "decide_named", lambda *_: (None, None))


@mutant("one/LINE/unit_of_files_of_several_writers/15of16", 16)
def closed_beside_one_that_is_being_written(patch: Patch) -> None:
    """Where each file is a checkpoint what one has closed stays while another is being written."""
    patch.setattr(units.Units, "_is_busy", lambda *_: False)


@mutant("one/LINE/unit_of_files_killed_between_any_two/12of16", 16)
def closed_file_goes_back_with_its_writer(patch: Patch) -> None:
    """Where each file is a checkpoint that it was closed is known to the living alone."""

    def keep(_self: units.Units, unit: Any) -> None:
        unit.kept = True

    patch.setattr(units.Units, "_keep", keep)


@mutant("one/LINE/unit_removed_on_a_full_store/0of16", 12, 16)
def room_of_a_removed_unit_taken_without_a_record(patch: Patch) -> None:
    """Where a write needs the room of what was removed, that it does not come back is known to the
    living alone.
    """

    def drop_removed(self: units.Units) -> bool:
        for unit in [unit for unit in self.opened.values() if unit.place is not None]:
            self.stored([], [unit], [])
            return True
        return False

    patch.setattr(units.Units, "drop_removed", drop_removed)


@mutant("one/LINE/unit_of_files_of_several_writers/15of16", 16)
def synced_half_stays_with_what_is_closed(patch: Patch) -> None:
    """Where each file is a checkpoint one that is synced counts as closed."""
    original = units.Units._facts

    def facts(self: units.Units, unit: Any, **options: Any) -> Any:
        unit.unclosed.clear()
        return original(self, unit, **options)

    patch.setattr(units.Units, "_facts", facts)


@mutant("one/LINE/unit_of_files_of_several_writers", 16)
def kill_in_one_file_spoils_the_others(patch: Patch) -> None:
    """Where each file is a checkpoint one that was reverted takes back what others have closed."""
    original = units.Units.spoil
    patch.setattr(units.Units, "spoil", lambda self, inode, **_: original(self, inode))
