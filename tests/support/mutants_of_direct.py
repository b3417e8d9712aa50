"""Planted bugs in direct access: who may store where, until when, and what of it counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from cxlfs.native.direct import SLIP_CLOSED, SLIP_COPYING_AT, HeldContent
from cxlfs.store import direct, verified
from cxlfs.store.direct import Direct
from cxlfs.store.files import Files
from cxlfs.store.mapped import MappedFiles
from cxlfs.store.space import Space
from cxlfs.store.verified import VerifiedContents
from tests.support import slips
from tests.support.mutants import Patch, mutant, nothing, on_result
from tests.support.slips import Program

# --- who may still store ------------------------------------------------------------------------


@mutant("one/LINE/direct_survivor", 12)
def survivors_forgotten(patch: Patch) -> None:
    """The next daemon hands out segments that a program of the one before has mapped."""
    patch.setattr(Space, "_locked_segments", lambda _: set())


@mutant("one/LINE/direct_sleeper", 12)
def room_of_a_sleeper_given_away(patch: Patch) -> None:
    """What a closed slip's leases have left is handed out although a thread copies there."""
    patch.setattr(Direct, "_copies", lambda *_: False)


@mutant("one/LINE/direct_sleeper", 12)
def slip_of_a_sleeper_given_away(patch: Patch) -> None:
    """A closed slip is handed out as soon as nobody copies: who wakes up counts himself there."""

    def give_back(self: Direct, apart: Any) -> bool:
        if self._copies(apart):
            return False
        self._rooms.give_back(apart.rooms)
        return True

    patch.setattr(Direct, "_try_give_back", give_back)


@mutant("one/LINE/direct_sleeper", 12)
def copying_looked_for_elsewhere(patch: Patch) -> None:
    """The word that says who copies is read from another place."""
    patch.setattr(direct, "SLIP_COPYING_AT", SLIP_COPYING_AT + 8)


@mutant("one/LINE/direct_sleeper", 12)
def waiting_room_never_given_back(patch: Patch) -> None:
    """Room that waited for its program waits for ever."""
    patch.setattr(Direct, "maintain", lambda _: False)


@mutant("one/LINE/direct_unlocked", 12)
def more_room_beside_unlocked(patch: Patch) -> None:
    """A program gets more room although the end of what it has is not locked."""
    patch.setattr(direct, "require_locked", nothing)


@mutant("one/LINE/direct_late", 12)
def slips_watched_behind_their_end(patch: Patch) -> None:
    """Who locks room that was given away meanwhile finds the watch of its slip, and stores."""
    patch.setattr(Direct, "_end_watch", lambda *_: True)


@mutant("one/LINE/direct_ended", 15)
def slip_goes_on_that_its_program_has_closed(patch: Patch) -> None:
    """What a program says when it ends its slip is taken for one more look."""

    def absorb(self: Direct, slip: Any) -> None:
        state = self.volume.media.load_u64(slip.state_at)
        self._absorb_until(slip, state & ~SLIP_CLOSED)

    patch.setattr(Direct, "absorb", absorb)


@mutant("one/LINE/direct_mapped", 12)
def mapped_bytes_not_held(patch: Patch) -> None:
    """The extents of a mapped file go when nothing else refers to them."""
    original = MappedFiles.map

    def mapped(self: MappedFiles, *arguments: Any) -> Any:
        part = original(self, *arguments)
        self.abandon()
        return part

    patch.setattr(MappedFiles, "map", mapped)


@mutant("one/LINE/direct_watched", 15)
def watches_end_behind_the_answer(patch: Patch) -> None:
    """Who reads by himself is not told that somebody can write from now on."""
    patch.setattr(MappedFiles, "changing", nothing)


@mutant("one/LINE/direct_watched", 15)
def watched_beside_a_writer(patch: Patch) -> None:
    """A file is watched although somebody has it open for writing."""
    original = MappedFiles._hold

    def hold(self: MappedFiles, handle: Any, *, watched: bool) -> Any:
        files = self._files
        self._files = cast("Files", SimpleNamespace(writers=()))
        try:
            return original(self, handle, watched=watched)
        finally:
            self._files = files

    patch.setattr(MappedFiles, "_hold", hold)


@mutant("one/LINE/direct_watched", 12)
def watches_outlive_what_they_are_of(patch: Patch) -> None:
    """The bytes of a closed file are let go, and whoever asks is told that they are there."""
    patch.setattr(MappedFiles, "_end_watch", nothing)


@mutant("one/LINE/direct_verified", 12)
def verified_whatever_became_of_the_file(patch: Patch) -> None:
    """What was verified is remembered of a file, not of its extents."""
    patch.setattr(HeldContent, "identity", lambda _: b"the file")


@mutant("one/LINE/direct_verified", 12)
def verified_in_spite_of_damage(patch: Patch) -> None:
    """What was verified is believed after damage was met."""
    patch.setattr(VerifiedContents, "_forget_where_damaged", nothing)


@mutant("one/LINE/direct_verified", 12)
def verified_for_ever(patch: Patch) -> None:
    """The time for which something counts as verified does not end."""
    patch.setattr(VerifiedContents, "_is_in_time", lambda *_: True)


@mutant("one/LINE/direct_verified", 12)
def verified_in_part(patch: Patch) -> None:
    """A content counts as verified once a piece of it was compared."""
    original = verified._Content.compared

    def compared(self: Any, *arguments: Any) -> None:
        before = self.left
        original(self, *arguments)
        self.left = 0 if self.left < before else self.left

    patch.setattr(verified._Content, "compared", compared)


@mutant("one/LINE/direct_verified", 12)
def verified_by_who_was_not_asked(patch: Patch) -> None:
    """A piece counts as compared that was not given to the program that says so."""

    def compared(self: Any, _handle_id: int, offset: int, length_bytes: int) -> None:
        assert length_bytes
        if self.given.pop(offset // self.piece_bytes, None) is not None or self.left:
            self.left -= 1

    patch.setattr(verified._Content, "compared", compared)


# --- what counts --------------------------------------------------------------------------------


@mutant("one/LINE/direct_overwrite", 16)
def published_without_what_was_appended(patch: Patch) -> None:
    """Nobody takes in what was appended before the file is published."""
    patch.setattr(Direct, "close_slip", lambda self, slip: self._end(slip))
    patch.setattr(Direct, "absorb", nothing)


@mutant("one/LINE/direct_create", 15)
def nobody_absorbs_before_looking(patch: Patch) -> None:
    """Attributes do not show what was appended."""
    patch.setattr(Direct, "absorb", nothing)


@mutant("one/LINE/direct_fsync", 15)
def slip_stays_open_behind_a_commit(patch: Patch) -> None:
    """A program goes on appending to an extent that the journal knows as it was."""

    def close_slip(self: Direct, slip: Any) -> None:
        self.absorb(slip)

    patch.setattr(Direct, "close_slip", close_slip)


@mutant("one/LINE/direct_beside_another", 15)
def second_opener_beside_a_slip(patch: Patch) -> None:
    """A lease is given although somebody else has the file open."""
    original = Direct.lease

    def lease(self: Direct, handle_id: int, wanted_bytes: int, **more: Any) -> Any:
        inode = self.files.get(handle_id).inode
        handles, inode.handles = inode.handles, 1
        try:
            return original(self, handle_id, wanted_bytes, **more)
        finally:
            inode.handles = handles

    patch.setattr(Direct, "lease", lease)


@mutant("one/LINE/direct_create", 12)
def descriptors_absorbed_again(patch: Patch) -> None:
    """How far the slip was taken in is forgotten."""
    original = Direct._absorb_until

    def absorb_until(self: Direct, slip: Any, appended: int) -> None:
        original(self, slip, appended)
        slip.absorbed = 0

    patch.setattr(Direct, "_absorb_until", absorb_until)


@mutant("one/LINE/direct_create", 9)
def checksums_lie_in_the_data(patch: Patch) -> None:
    """The place for checksums that a program is told overlaps the room for its data."""
    on_result(
        patch,
        Direct,
        "lease",
        lambda given: [each._replace(crc_offset=each.media_offset) for each in given],
    )


# --- a program's own ----------------------------------------------------------------------------


@mutant("one/LINE/direct_create", 2, 16)
def appended_before_it_is_fenced(patch: Patch) -> None:
    """A program says what it wrote before that is durable."""
    original = Program._copy

    def copy(self: Program, data: bytes, *, fence: bool) -> tuple[int, int]:
        del fence
        return original(self, data, fence=False)

    patch.setattr(Program, "_copy", copy)


@mutant("one/LINE/direct_create", 9)
def tail_summed_without_its_beginning(patch: Patch) -> None:
    """The checksum of a chunk that was begun before goes over the new bytes alone."""
    original = Program._copy

    def copy(self: Program, data: bytes, *, fence: bool) -> tuple[int, int]:
        self.tail_crc = 0
        return original(self, data, fence=fence)

    patch.setattr(Program, "_copy", copy)


@mutant("one/LINE/direct_refused", 15)
def appended_to_a_closed_slip(patch: Patch) -> None:
    """A program does not look whether its slip was closed: what it says is lost."""

    def write(self: Program, offset: int, data: bytes) -> bool:
        start, tail_crc = self.copy(data)
        patch.setattr(slips, "SLIP_CLOSED", 0)
        patch.setattr(slips, "SLIP_DESCRIPTORS", 1 << 64)
        return self.append(offset, start, len(data), tail_crc)

    patch.setattr(Program, "write", write)
