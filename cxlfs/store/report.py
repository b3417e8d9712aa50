"""What a store says of itself: space, statistics, the list of checkpoints.

Never here: formatting, printing, changing anything.

Invariants
- ``free_bytes`` counts everything that deleting, committing or compacting can give back, nothing
  else.
- Nothing but a list of checkpoints costs more in a larger store: counts are kept as they change.
- All numbers of one report belong to one moment.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cxlfs.store.attributes import content_state
from cxlfs.store.health import RefusedWrites, VerifyOutcome
from cxlfs.store.hidden import is_unlisted
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.paths import path_of
from cxlfs.store.volume import Volume

if TYPE_CHECKING:
    from cxlfs.store.recovery import RecoveryReport
    from cxlfs.store.units import Units
    from cxlfs.store.versions import Versions

BLOCK_BYTES = 4096
_METADATA_SETS = 3
_SET_SEGMENTS_MIN = 3
_INODES_PER_SEGMENT = 4096
_NAMED_MAX = 3
_HELD_WORDS = "the version before is kept"
_PIECES_MIN = 1024
"""Fewer are cleaned at once."""
_CLEANING_PART = 24
"""Of data in pieces of a block so much counts as used, for cleaning: where any piece is as likely
as any other to be overwritten next, a log that is filled to the part u of what it has writes about
1 / (2 (1 - u)) bytes for each, 7 at 92 % and 12 at 95 %. Who fills that, too, is not refused."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpaceReport:
    """For statfs, bytes. ``free_bytes``: what is not kept. ``available_bytes``: what one fallocate
    gets of it, less by what the ends of leases and segments may lose (at most 1 % of an ordinary
    store; writing in sequence loses nothing) and, where small files or holes lie between what is
    used, more by what compacting leaves there.
    """

    block_size: int
    total_bytes: int
    free_bytes: int
    available_bytes: int
    inode_count: int
    inodes_free: int
    name_length_max: int


@dataclasses.dataclass(frozen=True, slots=True)
class StoreStatistics:
    """Everything ``cxlfs status`` shows of an open store."""

    state: str
    reason: str | None
    uuid: bytes
    label: str
    format_version: int
    size_bytes: int
    segment_size_bytes: int
    segments_total: int
    segments_free: int
    used_bytes: int
    free_bytes: int
    reserved_bytes: int
    incomplete_bytes: int
    journal_used_bytes: int
    journal_size_bytes: int
    generation: int
    last_lsn: int
    last_commit_time_ns: int
    files: int
    directories: int
    open_files: int
    checksum_errors: int
    media_errors: int
    no_space_errors: int
    reverts: int
    rollovers: int
    cleaned_segments: int
    moved_bytes: int
    journal_bytes_written: int
    image_bytes_written: int
    maintenance_seconds_max: float
    commits: int
    bytes_written: int
    bytes_read: int
    memory_bytes: int
    recovery: RecoveryReport
    damaged_files: int
    damaged_paths: tuple[str, ...]
    last_verify: VerifyOutcome | None
    refused_writes: RefusedWrites | None


@dataclasses.dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint: a file, or a directory with all that lies below it.

    ``being_written``: it, or something below it, is open for writing or not committed yet.
    ``state``: complete, incomplete, damaged; ``kept_aside``: an overwrite that was not published,
    beside the complete version of the same path. ``reason``: why a directory of complete files, or
    a file that was closed, is incomplete.
    """

    path: bytes
    kind: str
    size_bytes: int
    files: int
    commit_lsn: int
    commit_time_ns: int
    state: str
    kept_aside: bool = False
    being_written: bool = False
    reason: str | None = None


class Reporter:
    """Reads a volume."""

    def __init__(
        self, volume: Volume, versions: Versions, recovery: RecoveryReport, units: Units
    ) -> None:
        self.volume = volume
        self._units = units
        self.versions = versions
        self.recovery = recovery

    def space(self) -> SpaceReport:
        """What is free counts all that making room gives (``room``, ``cleaner``)."""
        volume = self.volume
        payload = volume.superblock.segment_payload_bytes
        count = volume.superblock.segment_count
        total = (count - _METADATA_SETS * _SET_SEGMENTS_MIN - 1) * payload
        promises = self.versions.promises
        promised = promises.bytes_open()
        engine = volume.engine.statistics()
        used = engine.kept_bytes + engine.held_bytes + promised
        pieces = engine.refs - engine.past_refs - engine.maps + self.versions.past.content_count
        used += self._kept_for_cleaning(pieces, engine.kept_bytes)
        overhead = _METADATA_SETS * volume.metadata_set_segments() + 1
        free = max(0, min((count - overhead) * payload - used, total))
        inodes = len(volume.namespace.inodes)
        inodes_free = free // payload * _INODES_PER_SEGMENT + _INODES_PER_SEGMENT
        available = promises.largest_bytes(volume.space.leasable_bytes(free + promised) - promised)
        return SpaceReport(
            block_size=BLOCK_BYTES,
            total_bytes=total,
            free_bytes=free,
            available_bytes=available,
            inode_count=inodes + inodes_free,
            inodes_free=inodes_free,
            name_length_max=255,
        )

    @staticmethod
    def _kept_for_cleaning(pieces: int, kept_bytes: int) -> int:
        """Nothing where at most half of the data is in pieces of a block, see _CLEANING_PART.
        ``pieces``: references of files beyond the first of each.
        """
        in_pieces = min(max(0, pieces - _PIECES_MIN) * BLOCK_BYTES, kept_bytes)
        return max(0, 2 * in_pieces - kept_bytes) // _CLEANING_PART

    def statistics(self, open_files: int) -> StoreStatistics:
        volume = self.volume
        space = self.space()
        engine = volume.engine.statistics()
        counters = volume.counters
        payload = volume.superblock.segment_payload_bytes
        state, reason = "ONLINE", None
        if volume.needs_check is not None:
            state, reason = "NEEDS-CHECK", volume.needs_check
        elif (remembered := self._remembered()) is not None:
            state, reason = "NEEDS-CHECK", remembered
        if volume.read_only:
            state = "READ-ONLY" if reason is None else state
            reason = reason or volume.read_only_reason
        kinds = volume.namespace.kind_counts
        return StoreStatistics(
            state=state,
            reason=reason,
            uuid=volume.superblock.uuid,
            label=volume.superblock.label,
            format_version=volume.superblock.format_version,
            size_bytes=volume.superblock.size_bytes,
            segment_size_bytes=volume.superblock.segment_size_bytes,
            segments_total=volume.superblock.segment_count,
            segments_free=volume.space.free_count,
            used_bytes=space.total_bytes - space.free_bytes,
            free_bytes=space.free_bytes,
            reserved_bytes=volume.space.reserve * payload,
            incomplete_bytes=engine.aside_bytes,
            journal_used_bytes=0 if volume.journal is None else volume.journal.used_bytes,
            journal_size_bytes=payload if volume.journal is None else volume.journal.size_bytes,
            generation=volume.root.generation,
            last_lsn=volume.last_lsn,
            last_commit_time_ns=volume.last_commit_ns,
            files=kinds[FileKind.FILE],
            directories=kinds[FileKind.DIRECTORY],
            open_files=open_files,
            checksum_errors=counters.checksum_errors,
            media_errors=counters.media_errors,
            no_space_errors=counters.no_space_errors,
            reverts=counters.reverts,
            rollovers=counters.rollovers,
            cleaned_segments=counters.cleaned_segments,
            moved_bytes=counters.moved_bytes,
            journal_bytes_written=counters.journal_bytes_written,
            image_bytes_written=counters.image_bytes_written,
            maintenance_seconds_max=counters.maintenance_seconds_max,
            commits=counters.commits,
            bytes_written=engine.bytes_written,
            bytes_read=engine.bytes_read,
            memory_bytes=engine.memory,
            recovery=self.recovery,
            damaged_files=volume.health.damaged_count,
            damaged_paths=self._damaged_paths(),
            last_verify=volume.health.last_verify,
            refused_writes=volume.health.refused_still(space.free_bytes),
        )

    def _remembered(self) -> str | None:
        """What is known to be wrong since a read or a verify found it."""
        health = self.volume.health
        reasons = []
        count, named = health.damaged_count, ", ".join(self._damaged_paths())
        if count == 1:
            reasons.append(f"the data of a file is damaged: {named}")
        elif count:
            more = ", ..." if count > _NAMED_MAX else ""
            reasons.append(f"the data of {count} files is damaged: {named}{more}")
        verified = health.last_verify
        if verified is not None and verified.structure_findings:
            reasons.append(f"the last verify found: {', '.join(verified.kinds)}")
        return "; ".join(reasons) or None

    def _damaged_paths(self) -> tuple[str, ...]:
        first = itertools.islice(self.volume.health.damaged(), _NAMED_MAX)
        paths = (path_of(self.volume.namespace, ino) for ino in first)
        return tuple("a file without a name" if p is None else os.fsdecode(p) for p in paths)

    # --- checkpoints ------------------------------------------------------------------------

    def checkpoints(
        self, inode: Inode, path: bytes, writers: set[int]
    ) -> Iterator[CheckpointEntry]:
        """The file itself, or what lies in the directory: one entry for each name. ``writers``:
        inode numbers of the files that are open for writing.
        """
        namespace = self.volume.namespace
        if inode.entries is None:
            yield from self._file_entries(inode, path, writers)
            return
        base = path.rstrip(b"/")
        for name in sorted(inode.entries):
            if is_unlisted(inode, name):
                continue
            child = namespace.inodes[inode.entries[name]]
            child_path = base + b"/" + name
            if child.entries is None:
                yield from self._file_entries(child, child_path, writers)
            else:
                yield self._directory_entry(child, child_path, writers)

    def _file_entries(
        self, inode: Inode, path: bytes, writers: set[int]
    ) -> Iterator[CheckpointEntry]:
        if inode.live is None:
            return
        size = inode.live.size
        state = content_state(inode)
        held = inode.held
        yield CheckpointEntry(
            path,
            "file",
            size,
            1,
            inode.commit_lsn,
            inode.commit_ns,
            state,
            being_written=_is_being_written(inode, writers),
            reason=f"{held.reason}; {_HELD_WORDS}" if held is not None and held.reason else None,
        )
        if inode.aside is not None and held is None:
            size = inode.aside.size
            yield CheckpointEntry(path, "file", size, 1, 0, 0, "incomplete", kept_aside=True)

    def _directory_entry(self, inode: Inode, path: bytes, writers: set[int]) -> CheckpointEntry:
        size = files = lsn = time_ns = 0
        unit = self._units.unit_of(inode)
        being_written = unit is not None and not unit.kept
        states: set[str] = set()
        for child in self.volume.namespace.walk(inode.ino):
            if child.live is not None:
                files += 1
                size += child.live.size
                states.add(content_state(child))
                being_written = being_written or _is_being_written(child, writers)
                if child.commit_lsn > lsn:
                    lsn, time_ns = child.commit_lsn, child.commit_ns
        order = ("damaged", "incomplete", "complete")
        state = next((s for s in order if s in states), "complete")
        reason = None
        if state == "complete" and not being_written:
            reason = self._units.problem_of(inode)
            state = state if reason is None else "incomplete"
        return CheckpointEntry(
            *(path, "directory", size, files, lsn, time_ns, state),
            being_written=being_written,
            reason=reason,
        )


def _is_being_written(inode: Inode, writers: set[int]) -> bool:
    return inode.version is not None or inode.ino in writers
