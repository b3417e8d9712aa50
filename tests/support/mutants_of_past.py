"""Planted bugs in history: what is restored, and when the space of a row is used again."""

from __future__ import annotations

import numpy as np

from cxlfs.store import past_loading, past_restore, past_space, versions
from cxlfs.store.space import State
from tests.support.mutants import Anything, Patch, during, mutant


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
