"""Planted bugs in history: what is restored, and when the space of a row is used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from cxlfs.store import names, past_loading, past_restore, past_space, pins, sharing, versions
from cxlfs.store.space import State
from tests.support.mutants import Anything, Patch, during, mutant, nothing


@mutant("one/LINE/restore_after_a_rollover/14of16", 16)
def restore_without_definitions(patch: Patch) -> None:
    """The record of a restore does not define the extents that the image left out."""
    during(
        patch,
        past_restore.PastVerbs,
        "restore",
        (versions, "extent_operations", lambda *_: iter(())),
    )


@mutant("one/LINE/reuse_what_history_had", 12)
def segment_used_again_under_history(patch: Patch) -> None:
    """Segments that only history refers to are free before its rows are dropped."""

    def give_back(self: past_space.PastSpace, wanted: int, until: float | None) -> bool:
        del wanted, until
        space, usage = self.volume.space, self.volume.engine.usage()
        for index in space.data_segments():
            if usage[index] == 0 and not space.is_open(index):
                space._set(index, State.DEAD)
        self.volume.free_dead()
        return True

    patch.setattr(past_space.PastSpace, "_give_back", give_back)


@mutant("one/LINE/archive_what_is_used_again/1of16", 12)
def rows_whatever_their_segments_hold_now(patch: Patch) -> None:
    """An opening believes a batch whose data segments were taken into use since."""

    def whole(_loader: object, batch: past_loading.history.Batch, _firsts: object) -> object:
        return np.ones(len(batch.rows), np.bool_)

    patch.setattr(past_loading.Loader, "_whole_rows", whole)


@mutant("one/LINE/archive_what_died/3of16", 12)
def torn_batches(patch: Patch) -> None:
    """An opening believes a batch whose checksums are wrong."""
    during(
        patch,
        past_loading.Loader,
        "_read",
        (past_loading.history, "crc32c", lambda *_: Anything()),
    )


@mutant("one/LINE/pin_what_history_has", 16)
def pin_without_definitions(patch: Patch) -> None:
    """The records of a pin do not define the extents that the image left out."""
    during(patch, pins.Pins, "_copy", (versions, "extent_operations", lambda *_: iter(())))


@mutant("one/LINE/pin_a_file_and_overwrite_it", 16)
def pin_without_bytes(patch: Patch) -> None:
    """What is pinned is empty."""
    patch.setattr(sharing.Sharing, "whole", nothing)


@mutant("one/LINE/pin_and_unpin", 12)
def unpin_before_its_record(patch: Patch) -> None:
    """What a pin held is free before the record that takes the pin away."""
    remove = pins.Pins.remove

    def wrong(self: pins.Pins, uid: int, name: bytes) -> None:
        pin = self.find(uid, name)
        for inode in self._contents(pin) if pin is not None else ():
            if inode.live is not None:
                inode.live.truncate(0)
        self._volume.engine.drop_unreferenced()
        remove(self, uid, name)

    patch.setattr(pins.Pins, "remove", wrong)


@mutant("one/LINE/pin_a_tree_and_remove_it", 16)
def pin_named_before_it_is_whole(patch: Patch) -> None:
    """A pin has its name while it is made."""
    new_top = pins.Pins._new_top

    @contextlib.contextmanager
    def named(self: pins.Pins, uid: int) -> Iterator[Any]:
        with new_top(self, uid) as top:
            with self._at_work():
                pin = pins.Pin(b"best", uid, b"/dir", 1, 0, 0, 0, 0, 0, top)
                self._namespace.set_xattr(top, pins.PIN_XATTR, pin.value)
                user = self._below(self._directory_of_place(), b"%d" % uid)
                self._names.rename(top.parent, top.name, user.ino, b"best")
            yield top

    patch.setattr(pins.Pins, "_new_top", named)
    patch.setattr(pins.Pins, "_finish", nothing)


@mutant("one/LINE/restore_a_tree", 16)
def tree_restored_by_two_records(patch: Patch) -> None:
    """A directory loses its name before the one that takes its place has it."""
    original = names.Names.rename

    def rename(self: names.Names, *place: Any, exchange: bool = False, **how: Any) -> None:
        if not exchange:
            original(self, *place, **how)
            return
        parent, name, new_parent, new_name = place
        original(self, new_parent, new_name, new_parent, b"gone")
        original(self, parent, name, new_parent, new_name)
        original(self, new_parent, b"gone", parent, name)

    patch.setattr(names.Names, "rename", rename)
