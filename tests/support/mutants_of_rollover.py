"""Planted bugs in rollovers that take several steps, and in what happens between the steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from cxlfs.format import operations, segments
from cxlfs.format.journal import Journal
from cxlfs.native.extent_calls import REF_DTYPE
from cxlfs.native.snapshot import ExtentSnapshot, ReferenceSnapshot
from cxlfs.store import export, recovery, volume
from tests.support.mutants import Patch, during, mutant, nothing


def _unnamed(patch: Patch, kind: type) -> None:
    patch.setitem(export.NAMED_BY, kind, lambda _op: ())


@mutant("sliced/PAGE/rename_directory_in_use/3of16", 6, 11)
def image_of_a_later_content(patch: Patch) -> None:
    """What is published or put aside while an image is made may be in it already."""
    _unnamed(patch, operations.InodeOperation)
    _unnamed(patch, operations.ContentOperation)


@mutant("sliced/LINE/cleaning_many/15of16", 11)
def image_of_moved_references(patch: Patch) -> None:
    """References that the cleaner moves while an image is made may be in it as they are then."""
    _unnamed(patch, operations.MoveOperation)


@mutant("sliced/PAGE/remove_directory", 5, 11)
def image_without_what_lost_its_name(patch: Patch) -> None:
    """An inode that is removed while an image is made may be missing where its name is not."""
    keep = export.Export.keep

    def forgetful(self: export.Export, ops: Any) -> None:
        keep(self, [op for op in ops if not isinstance(op, operations.UnlinkOperation)])

    patch.setattr(export.Export, "keep", forgetful)


@mutant("sliced/LINE/segment_wraps_in_a_write", 11)
def image_of_longer_extents(patch: Patch) -> None:
    """An image has extents as the journal knows them when the image is done."""
    patch.setattr(ExtentSnapshot, "__init__", lambda self, engine: setattr(self, "_engine", engine))
    patch.setattr(ExtentSnapshot, "step", lambda *_: False)
    patch.setattr(ExtentSnapshot, "take", lambda self: self._engine.export_maps([])[2:])


@mutant("sliced/PAGE/rename_directory_in_use", 11)
def image_of_later_references(patch: Patch) -> None:
    """An image has the references of a large file as they are when the step comes that takes them
    down.
    """

    def begin(self: ReferenceSnapshot, content: Any) -> None:
        self.__dict__.update(_snapshot=None, content=content, size=content.size)
        self.rows = np.zeros(content.ref_count, dtype=REF_DTYPE)

    def step(self: Any, _count: int) -> bool:
        if not self.content.closed:
            found = self.content.export(0, 1 << 62)[: len(self.rows)]
            self.rows[: len(found)] = found
        return False

    patch.setattr(ReferenceSnapshot, "__init__", begin)
    patch.setattr(ReferenceSnapshot, "step", step)


@mutant("sliced/LINE/create_tiny", 11, 17)
def new_journal_not_used(patch: Patch) -> None:
    """Until its root is durable records go on in the journal before the image."""
    switch, adopt = volume.Volume.switch_journal, volume.Volume.adopt_root
    waiting: list[segments.SegmentHeader] = []

    def switch_later(self: volume.Volume, header: segments.SegmentHeader) -> None:
        before = self.journal
        switch(self, header)
        if before is not None:
            waiting.append(header)
            self.journal = before

    def adopt_and_switch(self: volume.Volume, *args: Any, **how: Any) -> None:
        adopt(self, *args, **how)
        while waiting:
            header = waiting.pop()
            self.journal = Journal(self.media, self.superblock, header, last_lsn=self.last_lsn)

    patch.setattr(volume.Volume, "switch_journal", switch_later)
    patch.setattr(volume.Volume, "adopt_root", adopt_and_switch)


@mutant("sliced/LINE/create_tiny", 11)
def later_journals_not_read(patch: Patch) -> None:
    """Recovery reads the journal that the root names, and not those behind it."""
    patch.setattr(recovery.journal_chain, "find_next", lambda *_: None)


@mutant("one/PAGE/dead_space_used_at_once", 12)
def dead_data_freed_before_its_record_is_durable(patch: Patch) -> None:
    """Without a new root a segment is free as soon as nothing refers to it in DRAM."""
    during(patch, volume.Volume, "free_dead", (volume.Volume, "fence", nothing))
