"""Planted bugs in what reads the media: recovery, replay, choosing and checking; and in reads."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any

from cxlfs.errors import NameTooLongError
from cxlfs.format import frame, image, journal, journal_reader, layout, roots, segments, superblock
from cxlfs.native.maps import FileMap
from cxlfs.store import names, recovery, replay, volume
from cxlfs.store.namespace import Namespace
from tests.support.mutants import Anything, Patch, during, mutant, nothing, on_result

Batch = journal_reader.RecordBatch


def _none_at_once(reader: Any, position: int, _lsn: int) -> Batch:
    """All records go through the checks of a single one."""
    return reader._batch(bytearray(), [], position)  # type: ignore[no-any-return]


def _compare_of_records(patch: Patch, *, header: bool) -> None:
    """The checksum of their header alone, which is the first that is asked for, or of the rest."""
    original = journal_reader.SegmentReader._record_at
    crc = journal_reader.crc32c

    def record_at(self: Any, *args: Any) -> Any:
        is_compared = itertools.chain([header], itertools.repeat(not header))

        def crc_or_anything(data: Any, seed: int = 0) -> Any:
            return crc(data, seed) if next(is_compared) else Anything()

        journal_reader.crc32c = crc_or_anything
        try:
            return original(self, *args)
        finally:
            journal_reader.crc32c = crc

    patch.setattr(journal_reader.SegmentReader, "_undamaged", _none_at_once)
    patch.setattr(journal_reader.SegmentReader, "_record_at", record_at)


# --- checks that are not made ---------------------------------------------------------------


@mutant("one/LINE/rename_over", 9, 11)
def record_checksums_not_compared(patch: Patch) -> None:
    """Recovery takes any bytes with the right magic, number and epoch for a record."""
    patch.setattr(journal_reader, "crc32c", lambda *_: Anything())
    patch.setattr(journal_reader, "crc32c_each", lambda *_: Anything())
    patch.setattr(journal_reader.SegmentReader, "_undamaged", _none_at_once)


@mutant("one/LINE/rename_over", 9, 11)
def payload_checksum_not_compared(patch: Patch) -> None:
    """Only the header of a record is checked."""
    _compare_of_records(patch, header=True)


@mutant("one/LINE/rollovers_around_the_ring", 9, 11)
def header_checksum_not_compared(patch: Patch) -> None:
    """Only the payload of a record is checked."""
    _compare_of_records(patch, header=False)


@mutant("one/LINE/rollovers_around_the_ring/10of16", 9, 11)
def checksum_covers_less_than_the_record(patch: Patch) -> None:
    """The checksum of a payload leaves out its last 64 bytes, in writer and reader."""
    from cxlfs.format import journal

    crc, each = journal.crc32c, journal_reader.crc32c_each

    def short(data: bytes, seed: int = 0) -> int:
        return crc(data[:-64] if len(data) > 64 else data, seed)

    def short_each(data: bytes, offsets: Any, lengths: Any, seed: int = 0) -> Any:
        return each(data, offsets, lengths - 64 * (lengths > 64), seed)

    patch.setattr(journal, "crc32c", short)
    patch.setattr(journal_reader, "crc32c", short)
    patch.setattr(journal_reader, "crc32c_each", short_each)


@mutant("one/LINE/rollover", 7, 9)
def root_checksum_not_compared(patch: Patch) -> None:
    """A torn root is a root."""
    during(patch, roots, "decode", (roots, "crc32c", lambda *_: Anything()))
    patch.setattr(roots, "_contradiction", nothing)


@mutant("one/LINE/rollovers_around_the_ring", 3, 7)
def oldest_root_preferred(patch: Patch) -> None:
    """Of the roots in the rings the one with the lowest generation is believed."""
    on_result(patch, roots, "candidates", lambda found: found[::-1])


@mutant("one/LINE/rollover", 7)
def ring_not_completed(patch: Patch) -> None:
    """A ring that a crash left without the newest root never gets it."""
    patch.setattr(roots, "complete", nothing)


@mutant("one/LINE/rollover", 7)
def ring_completed_with_an_older_root(patch: Patch) -> None:
    """The ring that lacks the newest root gets its predecessor, under the newest generation."""
    original = roots.complete

    def complete(media: Any, block: Any, states: Any, root: roots.Root) -> None:
        older = [r for r in roots.candidates(states) if r.generation < root.generation]
        if older:
            root = dataclasses.replace(older[0], generation=root.generation)
        original(media, block, states, root)

    patch.setattr(roots, "complete", complete)


@mutant("damage/LINE/primary", 7, 11)
def mirror_ignored(patch: Patch) -> None:
    """The second copy of the journal is never looked at."""
    original = journal_reader.SegmentReader._record_at

    def record_at(self: Any, number: int, *rest: Any) -> Any:
        return original(self, number, *rest) if number == 0 else None

    patch.setattr(journal_reader.SegmentReader, "_record_at", record_at)


@mutant("damage/LINE/both", 11)
def damage_taken_for_a_torn_end(patch: Patch) -> None:
    """A journal that breaks off in its middle is cut there without a word."""
    patch.setattr(journal_reader.SegmentReader, "_look_ahead", nothing)


@mutant("damage/LINE/chain", 7, 11)
def journals_end_without_a_continuation(patch: Patch) -> None:
    """Nothing but its own headers leads to a journal that no root names."""
    patch.setattr(journal, "store_continuation", nothing)


@mutant("damage/LINE/chain", 7, 11)
def continuations_not_read(patch: Patch) -> None:
    """A journal whose headers are damaged is not looked for in the one before it."""
    patch.setattr(journal_reader.SegmentReader, "_find_continuation", nothing)


@mutant("damage/LINE/superblock", 9, 18)
def first_superblock_believed(patch: Patch) -> None:
    """Superblock checksums are not compared."""
    during(patch, superblock, "read_copies", (frame, "crc32c", lambda *_: Anything()))


@mutant("damage/LINE/image", 9)
def image_checksums_not_compared(patch: Patch) -> None:
    """A damaged metadata image is loaded."""
    during(patch, image, "check", (image, "crc32c", lambda *_: Anything()))


@mutant("damage/LINE/data", 9)
def reads_not_verified(patch: Patch) -> None:
    """Checksums of file data are not compared."""
    original = FileMap.read

    def read(self: FileMap, offset: int, length: int, *, verify: bool = True) -> Any:
        del verify
        return original(self, offset, length, verify=False)

    patch.setattr(FileMap, "read", read)


@mutant("damage/LINE/stale", 11, 13)
def stale_epoch_accepted(patch: Patch) -> None:
    """Records and headers of an earlier use of the segment pass for those of this one."""
    original = journal_reader.read_header

    def read_header(media: Any, block: Any, primary: int, mirror: int, epoch: int) -> Any:
        found = segments.read(media, block, primary)
        if isinstance(found, segments.SegmentHeader) and found.role == layout.ROLE_JOURNAL:
            return dataclasses.replace(found, index=primary, partner=mirror, copy_number=0)
        return original(media, block, primary, mirror, epoch)

    patch.setattr(journal_reader, "read_header", read_header)


# --- replay ---------------------------------------------------------------------------------


@mutant("one/LINE/change_mode", 11)
def last_record_dropped(patch: Patch) -> None:
    """Recovery stops one record early."""
    original = journal_reader.SegmentReader.batches

    def batches(self: Any) -> Any:
        *found, last = [*original(self), None]
        if found:
            last = found.pop()
            parts = (last.starts, last.rows, last.media_offsets, last.copy_numbers)
            found.append(Batch(last.data, *(part[:-1] for part in parts)))
            self.scan.last_lsn -= 1
        yield from (batch for batch in found if len(batch))

    patch.setattr(journal_reader.SegmentReader, "batches", batches)


@mutant("one/LINE/rename", 14)
def record_applied_twice(patch: Patch) -> None:
    """Replay is not idempotent, and applies what it has read once more."""
    original = replay.Replayer.apply

    def apply(self: replay.Replayer, batch: Batch) -> None:
        original(self, batch)
        original(self, batch)

    patch.setattr(replay.Replayer, "apply", apply)


@mutant("one/LINE/create_tiny", 14)
def replay_stamps_the_present_time(patch: Patch) -> None:
    """Times after a recovery are those of the recovery."""
    original = replay.Replayer._set_attributes

    def set_attributes(self: replay.Replayer, rows: list[tuple[int, ...]]) -> None:
        original(self, [(*row[:9], time.time_ns(), *row[10:]) for row in rows])

    patch.setattr(replay.Replayer, "_set_attributes", set_attributes)


@mutant("one/LINE/append", 13)
def appends_go_to_another_inode(patch: Patch) -> None:
    """Replay gives new inodes the next free number instead of their own."""
    original = replay.Replayer._inode

    def inode(self: replay.Replayer, ino: int, mode: int, row: int) -> None:
        known = ino in self.namespace.inodes
        original(self, ino if known else self.namespace.next_ino + 1, mode, row)

    patch.setattr(replay.Replayer, "_inode", inode)


@mutant("one/LINE/create_tiny", 10, 13)
def inode_numbers_begin_again(patch: Patch) -> None:
    """What replay made does not count: the next new inode gets a number in use."""

    def add(self: Namespace, inode: Any) -> None:
        self.inodes[inode.ino] = inode

    during(patch, replay.Replayer, "apply", (Namespace, "add", add))


@mutant("one/LINE/create_tiny", 10, 13)
def extent_numbers_begin_again(patch: Patch) -> None:
    """Replay forgets which extent numbers it has seen."""
    original = replay.Replayer.apply

    def apply(self: replay.Replayer, batch: Batch) -> None:
        before = self.next_extent_id
        original(self, batch)
        self.next_extent_id = before

    patch.setattr(replay.Replayer, "apply", apply)


@mutant("one/LINE/overwrite_killed", 6, 10)
def version_kept_aside_becomes_the_content(patch: Patch) -> None:
    """Replay takes what was kept aside for the content."""
    original = replay.Replayer._content

    def content(self: replay.Replayer, ino: int, *, aside: bool) -> None:
        del aside
        original(self, ino, aside=False)

    patch.setattr(replay.Replayer, "_content", content)


@mutant("one/LINE/change_mode", 10)
def times_used_before_they_are_set(patch: Patch) -> None:
    """The image is written from committed times that recovery has not filled in."""
    original = replay.Replayer._set_attributes

    def set_attributes(self: replay.Replayer, rows: list[tuple[int, ...]]) -> None:
        original(self, rows)
        for ino, *_ in rows:
            self.namespace.inodes[ino].committed_ctime_ns = 0

    patch.setattr(replay.Replayer, "_set_attributes", set_attributes)


# --- taking over ----------------------------------------------------------------------------


@mutant("kill/LINE/append/7of16", 2, 17)
def accepted_records_not_made_durable(patch: Patch) -> None:
    """Recovery builds on records that are readable and not durable, and rolls over without them."""

    def take_over(volume_: volume.Volume, state: Any, report: Any, slots: Any) -> None:
        del report
        roots.complete(volume_.media, volume_.superblock, slots, volume_.root)
        volume_.refresh_reserve()
        header = state.chain[-1] if state.chain else None
        if header is None:
            volume_.rollover()
            return
        from cxlfs.format.journal import Journal

        journal = Journal(volume_.media, volume_.superblock, header, last_lsn=volume_.last_lsn)
        journal._position = state.scans[-1].end
        volume_.journal = journal

    patch.setattr(recovery, "_take_over", take_over)


@mutant("kill/LINE/rollovers_around_the_ring", 3, 17)
def accepted_root_not_made_durable(patch: Patch) -> None:
    """Recovery builds on a root that a killed daemon stored and did not fence."""
    original = roots.complete

    def complete(media: Any, block: Any, states: Any, root: roots.Root) -> None:
        original(media, block, [s for s in states if s.root != root], root)

    patch.setattr(roots, "complete", complete)


@mutant("recovery/LINE/append", 14)
def recovery_empties_the_old_journal(patch: Patch) -> None:
    """Before the new root is durable recovery clears the journal that it has read."""
    original = recovery._take_over

    def take_over(volume_: volume.Volume, state: Any, report: Any, slots: Any) -> None:
        for header in state.chain:
            for index in (header.index, header.partner):
                offset = volume_.superblock.segment_offset(index) + layout.SEGMENT_HEADER_BYTES
                volume_.media.store(offset, bytes(4096))
                volume_.media.write_back(offset, 4096)
        volume_.media.fence()
        original(volume_, state, report, slots)

    patch.setattr(recovery, "_take_over", take_over)


@mutant("one/LINE/change_mode", 12, 19)
def recovery_leaks_a_segment(patch: Patch) -> None:
    """Each recovery leaves one segment in use that nothing names."""
    original = recovery._adopt_history

    def adopt(volume_: volume.Volume, *asked: Any, **options: Any) -> Any:
        found = original(volume_, *asked, **options)
        volume_.space.take(recovery.State.DATA)
        return found

    patch.setattr(recovery, "_adopt_history", adopt)


@mutant("one/LINE/create_long_name", 19)
def long_names_cannot_be_removed(patch: Patch) -> None:
    """Names of full length can be made and not unlinked."""
    original = names.Names.unlink

    def unlink(self: names.Names, parent: int, name: bytes) -> Any:
        if len(name) >= layout.NAME_BYTES_MAX:
            raise NameTooLongError("planted")
        return original(self, parent, name)

    patch.setattr(names.Names, "unlink", unlink)


@mutant("one/LINE/create_empty", 19)
def recovered_store_refuses_to_write(patch: Patch) -> None:
    """After a crash with a torn record the store stays read-only."""
    original = recovery._take_over

    def take_over(volume_: volume.Volume, state: Any, report: Any, slots: Any) -> None:
        original(volume_, state, report, slots)
        for scan in state.scans:
            place = volume_.superblock.segment_offset(scan.header.index) + scan.end
            if any(volume_.media.read(place, 64)):
                volume_.read_only_reason = "planted"

    patch.setattr(recovery, "_take_over", take_over)
