"""Planted bugs in overwrites whose version before is held: holding it, giving it up, going back."""

from __future__ import annotations

from typing import Any

from cxlfs.format.operations import (
    Operation,
    PromoteOperation,
    XattrRemoveOperation,
)
from cxlfs.store import overwrites, versions
from cxlfs.store.overwrites import Overwrites
from cxlfs.store.series import UNJUDGED_XATTR
from cxlfs.store.volume import Volume
from tests.support.mutants import Patch, mutant, nothing, on_result


@mutant("one/LINE/held_left", 7, 16)
def version_before_held_in_memory_alone(patch: Patch) -> None:
    """The record that publishes an overwrite does not say that the version before is held."""
    patch.setattr(versions, "hold_operations", lambda *_: [])


@mutant("one/LINE/held_left", 7)
def version_before_held_without_its_content(patch: Patch) -> None:
    """The record says that it is held, and not what it is."""
    on_result(patch, versions, "hold_operations", lambda ops: ops[1:])


@mutant("one/LINE/held_staged", 7)
def version_before_held_before_its_place_is_free(patch: Patch) -> None:
    """The staged content still has it when the record says so."""

    def first(ops: Any) -> list[Operation]:
        return sorted(ops, key=lambda op: isinstance(op, PromoteOperation))

    on_result(patch, versions, "_content_operations", first)


@mutant("one/LINE/held_goes_back", 5, 6)
def held_version_comes_back_in_two_records(patch: Patch) -> None:
    """The old content is the file's again in one record, and its times in another."""
    original = Volume.commit

    def two(self: Volume, ops: Any, **options: Any) -> tuple[int, int]:
        first = [op for op in ops if isinstance(op, PromoteOperation)]
        rest = [op for op in ops if op not in first]
        if first and any(isinstance(op, XattrRemoveOperation) for op in rest):
            original(self, first, **options)
            return original(self, rest, **options)
        return original(self, ops, **options)

    patch.setattr(Volume, "commit", two)


@mutant("one/LINE/held_released", 6)
def release_leaves_its_mark(patch: Patch) -> None:
    """What is kept aside is dropped, and the file still says that it is the version before."""

    def without(ops: list[Operation]) -> list[Operation]:
        return [op for op in ops if not isinstance(op, XattrRemoveOperation)]

    on_result(patch, versions, "drop_operations", without)


@mutant("one/LINE/held_saved_again", 7, 16)
def good_version_forgotten_at_the_next_save(patch: Patch) -> None:
    """A program that saves over a torn file replaces the last whole version with it."""
    patch.setattr(overwrites, "_TORN", frozenset())


@mutant("one/LINE/held_left", 10)
def opening_forgets_what_is_held(patch: Patch) -> None:
    """After a crash the version before counts as an incomplete one."""
    patch.setattr(Overwrites, "_find_left", nothing)


@mutant("one/LINE/held_changed_in_place", 6)
def change_in_place_leaves_the_mark(patch: Patch) -> None:
    """What a file is changed to in place still counts as an overwrite that may be torn."""
    patch.setattr(Overwrites, "keeps", lambda *_: True)


@mutant("one/LINE/held_new_name", 7)
def new_name_is_not_marked(patch: Patch) -> None:
    """The media do not say that a new file may be torn: a crash leaves it."""
    patch.setattr(versions, "xattr_operations", lambda _inode: [])


@mutant("one/LINE/held_new_name_stays", 7)
def new_name_judged_in_memory_alone(patch: Patch) -> None:
    """A new file is judged anew after each opening, for ever."""

    def forget(self: Overwrites) -> None:
        for inode in self._settled:
            self._volume.namespace.remove_xattr(inode, UNJUDGED_XATTR)
        self._settled.clear()

    patch.setattr(Overwrites, "_store_settled", forget)
