"""Planted bugs in transactions: what is committed together, in which order, and where it is put."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from cxlfs.format import superblock
from cxlfs.format.operations import (
    ContentOperation,
    InodeOperation,
    LinkOperation,
    MoveOperation,
    Operation,
    UnlinkOperation,
)
from cxlfs.media import SimulatedMedia
from cxlfs.store import deduplicator, files, mover, replay, rollover, versions, volume
from cxlfs.store.space import Space, State
from tests.support.mutants import Patch, during, mutant, nothing

LINE_BYTES = 64
Operations = Sequence[Operation]


# --- order of names and contents ------------------------------------------------------------


def _commit_as(patch: Patch, records_of: Callable[[Operations], Sequence[Operations]]) -> None:
    """Each transaction becomes these records."""
    original = volume.Volume.commit

    def commit(self: volume.Volume, ops: Operations, *, durable: bool = True) -> tuple[int, int]:
        told = [original(self, record, durable=durable) for record in records_of(ops)]
        return told[-1]

    patch.setattr(volume.Volume, "commit", commit)


def _apart(ops: Operations, kind: type) -> list[Operations]:
    """In two, those of a kind first, where there are both."""
    first = [op for op in ops if isinstance(op, kind)]
    rest = [op for op in ops if not isinstance(op, kind)]
    return [first, rest] if first and rest else [ops]


@mutant("one/LINE/rename", 5)
def old_name_removed_first(patch: Patch) -> None:
    """A rename takes the old name away in a record of its own: for a moment there is none."""
    _commit_as(patch, lambda ops: _apart(ops, UnlinkOperation))


@mutant("one/LINE/rename_new", 5)
def new_name_given_last(patch: Patch) -> None:
    """Names are made in a record of their own, after everything else."""
    _commit_as(patch, lambda ops: _apart(ops, LinkOperation)[::-1])


@mutant("one/LINE/overwrite", 6)
def times_committed_apart(patch: Patch) -> None:
    """Attributes go into a record of their own, before the content."""
    _commit_as(patch, lambda ops: _apart(ops, InodeOperation))


@mutant("one/LINE/append", 6)
def size_committed_apart(patch: Patch) -> None:
    """A publication adds its references first and sets the size with a second record."""

    def records_of(ops: Operations) -> list[Operations]:
        contents = [op for op in ops if isinstance(op, ContentOperation) and op.size and op.refs]
        first = [op._replace(size=op.size - 1) if op in contents else op for op in ops]
        last = [op._replace(cut=op.size, refs=b"") for op in contents]
        return [first, last] if contents else [ops]

    _commit_as(patch, records_of)


@mutant("one/LINE/overwrite", 16)
def overwriting_truncates_at_once(patch: Patch) -> None:
    """open(O_TRUNC) publishes the empty file."""
    original = files.Files.truncate_to_nothing

    def truncate(self: files.Files, inode: Any, handle: Any) -> None:
        original(self, inode, handle)
        self.versions.publish(inode, incomplete=False)

    patch.setattr(files.Files, "truncate_to_nothing", truncate)


@mutant("one/LINE/two_writers", 15)
def second_change_forgets_its_cut(patch: Patch) -> None:
    """A publication cuts the older content as if the file had been truncated."""

    def records_of(ops: Operations) -> list[Operations]:
        return [[op._replace(cut=0) if isinstance(op, ContentOperation) else op for op in ops]]

    _commit_as(patch, records_of)


@mutant("one/LINE/joined_by_another", 15)
def close_publishes_for_its_own_handle_only(patch: Patch) -> None:
    """The close of a descriptor that did not truncate leaves the overwrite of another waiting."""
    original = files.Files.flush

    def flush(self: files.Files, handle_id: int, **how: Any) -> None:
        handle = self.get(handle_id)
        version = handle.inode.version
        if isinstance(version, versions.Version) and not handle.truncated:
            others = [h for h in self._handles.values() if h.inode is handle.inode and h.truncated]
            if others:
                return
        original(self, handle_id, **how)

    patch.setattr(files.Files, "flush", flush)


@mutant("one/LINE/committing_what_is_open", 16)
def periodic_commit_publishes_overwrites(patch: Patch) -> None:
    """The periodic commit makes half an overwrite the committed content."""

    def stage(self: versions.Versions, inode: Any) -> None:
        if inode.version is not None:
            inode.version.atomic = False
            self.publish(inode, incomplete=False)

    patch.setattr(versions.Versions, "stage", stage)


# --- space ----------------------------------------------------------------------------------


@mutant("one/LINE/rollover", 12)
def metadata_space_reused_early(patch: Patch) -> None:
    """The segments of the sets in force are free before the next root is durable."""
    original = rollover.Rollovers.run

    def run(self: rollover.Rollovers, *, closing: bool = False) -> None:
        volume_ = self._volume
        volume_.space._free[:0] = volume_.current.segments + volume_.fallback.segments
        original(self, closing=closing)

    patch.setattr(rollover.Rollovers, "run", run)


@mutant("one/PAGE/space_of_a_removed_file", 12)
def dead_data_reused_early(patch: Patch) -> None:
    """A segment is taken again as soon as nothing alive refers to it, before any root says so."""
    original = Space.lease

    def lease(self: Space, *args: int, **options: int) -> tuple[int, int]:
        self.collect_dead()
        for index, state in enumerate(self.states):
            if state is State.DEAD:
                self._set(index, State.FREE)
        return original(self, *args, **options)

    patch.setattr(Space, "lease", lease)


@mutant("one/LINE/rollover", 12, 19)
def fallback_never_given_back(patch: Patch) -> None:
    """Each rollover leaks the set before the last."""
    original = Space.root_is_durable

    def root_is_durable(self: Space, released: list[int], dead: list[int]) -> None:
        del released
        original(self, [], dead)

    patch.setattr(Space, "root_is_durable", root_is_durable)


@mutant("one/LINE/files_by_turns", 12)
def leases_overlap(patch: Patch) -> None:
    """What a lease gives back is taken even if others wrote behind it."""

    def give_back(self: Space, offset: int, length: int) -> None:
        head = self._head
        if head is not None and length and offset + length <= head.position:
            head.position = self._round(offset)

    patch.setattr(Space, "give_back", give_back)


@mutant("one/LINE/clean", 11)
def moved_data_looked_for_elsewhere(patch: Patch) -> None:
    """The record of a move names a place next to the one that the data was copied to."""

    def move(*fields: Any) -> MoveOperation:
        right = MoveOperation(*fields)
        return right._replace(target_offset=max(0, right.target_offset - LINE_BYTES))

    patch.setattr(mover, "MoveOperation", move)


@mutant("one/LINE/cleaning_many", 11)
def moves_exchange_their_targets(patch: Patch) -> None:
    """A record of several moves aims two ranges of one length at each other's copies."""
    original = mover.Mover._commit

    def commit(self: mover.Mover, moves: Any, *args: Any) -> None:
        swapped = moves.copy()
        for row in range(len(moves) - 1):
            if moves["length"][row] == moves["length"][row + 1]:
                targets = moves["target_offset"][row : row + 2][::-1]
                swapped["target_offset"][row : row + 2] = targets
                break
        original(self, swapped, *args)

    patch.setattr(mover.Mover, "_commit", commit)


@mutant("one/LINE/cleaning_many", 11, 14)
def moved_reference_lost(patch: Patch) -> None:
    """Replay follows the moves of a record in the order of files, but for the last one, whose
    range it makes a hole.
    """
    original = replay.Replayer._re_aim

    def re_aim(self: replay.Replayer, contents: Any, moves: Any) -> None:
        original(self, contents, moves)
        content, last = contents[0], moves[-1]
        rows = content.export(0, content.size)
        lost = rows[rows["extent_id"] == last["target_id"]][-1:].copy()
        lost["extent_id"] = 0
        content.replay(content.size, lost.tobytes(), content.size)

    patch.setattr(replay.Replayer, "_re_aim", re_aim)


@mutant("one/PAGE/clean", 8, 16)
def moved_data_not_fenced_on_pages(patch: Patch) -> None:
    """On page media the record of a move may be durable before the data that it moved."""
    during(patch, mover.Mover, "_commit", (versions.Versions, "fence_data", nothing))


@mutant("one/LINE/keeping_the_same_bytes_once", 16)
def bytes_taken_for_the_same(patch: Patch) -> None:
    """What a few samples say is not compared."""
    patch.setattr(
        deduplicator, "_equal_blocks", lambda ours, _: np.ones(-(-len(ours) // 4096), np.bool_)
    )


@mutant("one/LINE/gathering_a_file_in_pieces", 8, 16)
def gathered_data_copied_after_its_record(patch: Patch) -> None:
    """A file is committed in its new place before its data is there."""
    original = mover.Mover.move

    def move(self: mover.Mover, chosen: Any, owners: Any, lease: Any) -> int:
        engine, copy = self.volume.engine, type(self.volume.engine).copy_ranges
        place = [0, 0]

        def remember(size: int) -> tuple[int, int]:
            place[:] = lease(size)
            return place[0], place[1]

        def copy_and_hide(ranges: Any, target_id: int) -> Any:
            moves = copy(engine, ranges, target_id)
            data = self.volume.media.read(place[0], place[1])
            self.volume.media.copy(place[0], bytes(place[1]))
            self.volume.media.fence()
            hidden.append((place[0], data))
            return moves

        hidden: list[tuple[int, bytes]] = []
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(type(engine), "copy_ranges", lambda _, *args: copy_and_hide(*args))
            moved = original(self, chosen, owners, remember)
        for offset, data in hidden:
            self.volume.media.copy(offset, data)
            self.volume.media.fence()
        return moved

    patch.setattr(mover.Mover, "move", move)


# --- mkfs -----------------------------------------------------------------------------------


@mutant("mkfs/LINE/empty", 18)
def mkfs_not_fenced(patch: Patch) -> None:
    """Mkfs returns before its superblocks are durable."""
    during(patch, superblock, "write", (SimulatedMedia, "fence", nothing))


@mutant("mkfs/LINE/over", 18)
def mkfs_keeps_old_superblocks(patch: Patch) -> None:
    """Mkfs over an old store writes its root while the old superblocks stand."""
    patch.setattr(superblock, "erase", nothing)
