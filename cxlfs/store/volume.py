"""An open store: media, journal, space, namespace and extent engine, and the two verbs that tie
them together: commit a transaction, and roll the journal over into a new metadata image.

Never here: POSIX verbs (``names``, ``files``), recovery, choosing what to clean.

Invariants
- Operations take effect in DRAM only after their record is stored; on line and byte granularity
  only after it is durable.
- Two metadata sets are kept: the current one and the one before, whose journal ends where the
  current image begins. Losing the newest root or image in both copies loses nothing.
- After a failed write-back or a broken invariant nothing is written any more (``read_only``).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cxlfs.errors import (
    CxlfsError,
    InvariantError,
    LimitError,
    MediaError,
    NoSpaceError,
    ReadOnlyError,
    invariant,
)
from cxlfs.format import journal, layout, operations, roots, segments
from cxlfs.store import image
from cxlfs.store.health import Health
from cxlfs.store.paths import path_of
from cxlfs.store.space import Space, State

if TYPE_CHECKING:
    from cxlfs.format.operations import Operation
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media
    from cxlfs.native.extents import Engine
    from cxlfs.store.namespace import Namespace

log = logging.getLogger(__name__)

RECORD_BYTES_MAX = 1 << 20
"""A larger transaction is staged in several records: one record never fills a journal."""
_CLEANER_PART = 64
"""One in so many segments is the cleaner's, at least one: what it can empty between two rollovers.
Each of these writes an image of all metadata, so that with less room a full store of scattered
blocks writes mostly images."""
_IMAGE_SLACK_BYTES = 64 << 10
_EVENT_NAMES_MAX = 1000
"""So many names are searched for that of an event's file; else the message names its number."""


@dataclasses.dataclass(frozen=True, slots=True)
class StoreEvent:
    """Something the operator should know; ``path`` and ``media_offset`` where they are known."""

    kind: str
    message: str
    ino: int | None = None
    path: str | None = None
    media_offset: int | None = None


@dataclasses.dataclass(slots=True)
class Counters:
    """Since this opening."""

    checksum_errors: int = 0
    media_errors: int = 0
    no_space_errors: int = 0
    reverts: int = 0
    rollovers: int = 0
    cleaned_segments: int = 0
    moved_bytes: int = 0
    commits: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class MetadataSet:
    """The segments of one image and of the journals that continue it."""

    image_segments: tuple[int, ...] = ()
    journal_segments: tuple[int, ...] = ()

    @property
    def segments(self) -> tuple[int, ...]:
        return self.image_segments + self.journal_segments


@dataclasses.dataclass(frozen=True, slots=True)
class JournalEnd:
    """The journal segment that a new one continues."""

    segment: int
    epoch: int
    last_lsn: int


class Writing:
    """See :meth:`Volume.writing`; a generator would take three times as long on the hot path."""

    __slots__ = ("_volume",)

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, MediaError):
            self._volume.media_failed(error)


class Volume:
    """See the module. ``root`` is the newest durable root; ``journal`` None while not writing."""

    def __init__(
        self,
        media: Media,
        superblock: Superblock,
        engine: Engine,
        namespace: Namespace,
        root: roots.Root,
        *,
        next_extent_id: int,
        next_epoch: int,
        last_lsn: int,
    ) -> None:
        self.media = media
        self.superblock = superblock
        self.engine = engine
        self.namespace = namespace
        self.root = root
        self.nonce = int.from_bytes(os.urandom(8), "little")
        self.space = Space(
            media,
            superblock,
            engine,
            next_epoch=next_epoch,
            nonce=self.nonce,
            writing=self.writing,
        )
        self.next_extent_id = next_extent_id
        self.last_lsn = last_lsn
        self.last_commit_ns = 0
        self.journal: journal.Journal | None = None
        self.journal_end: JournalEnd | None = None
        self.current = MetadataSet(root.image_segments)
        self.fallback = MetadataSet()
        self.read_only_reason: str | None = None
        self.needs_check: str | None = None
        self.counters = Counters()
        self.health = Health(self)
        self.on_event: Callable[[StoreEvent], None] | None = None
        self.root_flags = layout.ROOT_IN_USE
        self.dirty_shutdown = (False, 0, 0)
        self._last_now = 0

    # --- state ------------------------------------------------------------------------------

    @property
    def read_only(self) -> bool:
        return self.read_only_reason is not None

    def event(
        self,
        kind: str,
        message: str,
        *,
        ino: int | None = None,
        media_offset: int | None = None,
        level: int = logging.WARNING,
    ) -> None:
        """Log it, and tell whoever listens."""
        path = None
        if ino is not None:
            found = path_of(self.namespace, ino, names_max=_EVENT_NAMES_MAX)
            path = os.fsdecode(found) if found is not None else None
        place = "" if path is None else f" ({path})"
        log.log(level, "%s: %s%s", kind, message, place)
        if self.on_event is not None:
            self.on_event(StoreEvent(kind, message, ino, path, media_offset))

    def stop_writing(self, reason: str) -> None:
        """From now on every change is refused; reads go on."""
        if self.read_only_reason is None:
            self.read_only_reason = reason
            for inode in self.namespace.inodes.values():
                inode.stop_writes()
            self.event("read-only", reason, level=logging.ERROR)

    def media_failed(self, error: MediaError) -> None:
        """Count it, and write nothing any more."""
        self.counters.media_errors += 1
        self.stop_writing(f"the media failed: {error.message}")

    def require_writable(self) -> None:
        if self.read_only_reason is not None:
            raise ReadOnlyError(f"the store is read-only: {self.read_only_reason}")

    def watch(self, error: CxlfsError) -> None:
        """Outside :meth:`writing`: a failed copy concerns its range, a failed fence everything."""
        if isinstance(error, MediaError) and error.not_durable:
            self.stop_writing(f"the media failed: {error.message}")

    def writing(self) -> Writing:
        """A media failure inside stops all writing: it is never retried into a false success."""
        return Writing(self)

    # --- transactions -----------------------------------------------------------------------

    @property
    def record_bytes_max(self) -> int:
        return min(RECORD_BYTES_MAX, self.superblock.segment_payload_bytes // 4)

    def commit(self, ops: Sequence[Operation], *, durable: bool = True) -> tuple[int, int]:
        """Write one record; returns its LSN and time. The caller applies the operations then.

        ``durable`` False: on page media the record is ordered but not durable yet. Raises
        ReadOnlyError, NoSpaceError (nothing written), MediaError (writing stops).
        """
        self.require_writable()
        payload = operations.encode(ops)
        needed = journal.record_bytes(payload)
        if needed > self.superblock.segment_payload_bytes // 2:
            raise LimitError("the transaction is larger than the journal of this store can take")
        if needed > self._open_journal().free_bytes:
            self.rollover()
        end = self._open_journal()
        with self.writing():
            lsn, time_ns = end.append(payload, len(ops))
            if durable or end.must_fence_each:
                end.fence()
        self.last_lsn = lsn
        self.last_commit_ns = time_ns
        self.counters.commits += 1
        return lsn, time_ns

    def note_committed(self, ops: Sequence[Operation]) -> None:
        """Their record is stored: images have these times from now on."""
        for op in ops:
            if isinstance(op, operations.InodeOperation):
                inode = self.namespace.get(op.ino)
                inode.committed_mtime_ns = op.mtime_ns
                inode.committed_ctime_ns = op.ctime_ns

    def now(self) -> int:
        """Now in ns since the epoch, larger than any time told before: names keep their order. A
        clock that is set back by more than CLOCK_BACK_NS is followed.
        """
        now = time.time_ns()
        behind = self._last_now - now
        self._last_now = self._last_now + 1 if 0 <= behind <= journal.CLOCK_BACK_NS else now
        return self._last_now

    def fence(self) -> None:
        """Make everything committed so far durable."""
        if self.journal is not None and self.journal.fenced_lsn < self.last_lsn:
            self.require_writable()
            with self.writing():
                self.journal.fence()

    def _open_journal(self) -> journal.Journal:
        if self.journal is None:
            raise InvariantError("a writable store has a journal")
        return self.journal

    def allocate_extent_id(self) -> int:
        extent_id = self.next_extent_id
        self.next_extent_id += 1
        return extent_id

    # --- metadata sets ----------------------------------------------------------------------

    def image_bytes_estimate(self) -> int:
        """Upper bound of the next image, bytes."""
        stats = self.engine.statistics()
        return (
            self.namespace.image_bytes_estimate()
            + stats.extents * layout.IMAGE_EXTENT_DTYPE.itemsize
            + stats.crcs * 4
            + stats.refs * layout.REF_DTYPE.itemsize
        )

    def metadata_set_segments(self, growth_bytes: int = 0) -> int:
        """Upper bound of the segments of the next metadata set: image and both journal copies."""
        estimate = self.image_bytes_estimate() + growth_bytes
        estimate += estimate // 8 + _IMAGE_SLACK_BYTES // (
            1 if self.superblock.unit_bytes == layout.UNIT_BYTES else 64
        )
        return -(-estimate // self.superblock.segment_payload_bytes) + 2

    @property
    def cleaner_segments(self) -> int:
        """So many of the reserve are for moved data."""
        return max(1, self.superblock.segment_count // _CLEANER_PART)

    def refresh_reserve(self, growth_bytes: int = 0) -> int:
        """Recompute how many segments must stay free: the next metadata set (with an image that has
        grown so much), what the two sets after it need beyond what they release, and the cleaner's.
        """
        wanted = self.metadata_set_segments(growth_bytes)
        kept = (self.current, self.fallback)
        growth = sum(max(0, wanted - len(each.segments)) for each in kept)
        self.space.reserve = wanted + growth + self.cleaner_segments
        return self.space.reserve

    @property
    def metadata_has_shrunk(self) -> bool:
        """A rollover would give segments back: a set is larger than the next one."""
        wanted = self.metadata_set_segments()
        return any(len(kept.segments) > wanted for kept in (self.current, self.fallback))

    def metadata_room(self) -> bool:
        """There is room for a larger image than now."""
        return self.space.free_count >= self.refresh_reserve()

    def rollover(self) -> None:
        """Write the committed state as a new image, begin a new journal, write a root.

        Durable when it returns. Frees dead segments. Raises NoSpaceError, MediaError.
        """
        self._write_set(closing=False)

    def close_cleanly(self) -> None:
        """The last rollover: no journal, and a root that is not in use."""
        self.health.finish()
        self._write_set(closing=True)
        self.journal = None

    def _write_set(self, *, closing: bool) -> None:
        self.require_writable()
        log.debug("rolling over to generation %d", self.root.generation + 1)
        self.space.collect_dead()
        data, info = image.build(
            self.namespace,
            self.engine,
            uuid=self.superblock.uuid,
            lsn=self.last_lsn,
            next_extent_id=self.next_extent_id,
        )
        payload = self.superblock.segment_payload_bytes
        count = -(-len(data) // payload)
        if count > layout.IMAGE_SEGMENTS_MAX:
            raise NoSpaceError("the metadata of this store is larger than an image can be")
        taken, pair = self._take_set(count, closing=closing)
        with self.writing():
            self._store_image_headers(taken)
            header = None if pair is None else self._store_journal_headers(pair)
            self.media.fence()
            for part, index in enumerate(taken):
                offset = self.superblock.segment_offset(index) + layout.SEGMENT_HEADER_BYTES
                self.media.copy(offset, data[part * payload : (part + 1) * payload])
            self.media.fence()
            root = self._next_root(
                image_bytes=len(data), info=info, image_segments=tuple(taken), header=header
            )
            roots.write(self.media, self.superblock, root)
        released = self.fallback
        self.fallback = self.current
        self.current = MetadataSet(tuple(taken), pair or ())
        self._switch(root, header, released=list(released.segments))
        self.counters.rollovers += 1

    def _take_set(self, count: int, *, closing: bool) -> tuple[list[int], tuple[int, int] | None]:
        """Segments for an image and a journal; raises NoSpaceError.

        A store without room for them gives up its fallback before it stops working.
        """
        if self.space.free_count < count + (0 if closing else 2):
            self.space.give_up(list(self.fallback.segments))
            self.fallback = MetadataSet()
        taken: list[int] = []
        try:
            taken.extend(self.space.take(State.IMAGE) for _ in range(count))
            return taken, None if closing else self.space.take_pair(State.JOURNAL)
        except NoSpaceError:
            self.space.give_up(taken)
            raise

    def begin_journal(self) -> None:
        """After a clean close: a journal and an in-use root over the same image. Durable."""
        _, pair = self._take_set(0, closing=False)
        if pair is None:
            raise InvariantError("a journal has two copies")
        with self.writing():
            header = self._store_journal_headers(pair)
            self.media.fence()
            known, count, device_hash = self.dirty_shutdown
            root = dataclasses.replace(
                self.root,
                generation=self.root.generation + 1,
                flags=self.root_flags,
                journal_segment=header.index,
                journal_mirror=header.partner,
                journal_epoch=header.epoch,
                journal_first_lsn=header.first_lsn,
                next_epoch=self.space.next_epoch,
                dirty_shutdown_known=int(known),
                dirty_shutdown_count=count,
                device_hash=device_hash,
            )
            roots.write(self.media, self.superblock, root)
        self.current = MetadataSet(self.root.image_segments, pair)
        self._switch(root, header, released=[])

    def _store_image_headers(self, indexes: list[int]) -> None:
        for part, index in enumerate(indexes):
            header = segments.SegmentHeader(
                role=layout.ROLE_IMAGE,
                index=index,
                epoch=self.space.new_epoch(),
                nonce=self.nonce,
                first_lsn=part,
            )
            segments.store(self.media, self.superblock, header)

    def _store_journal_headers(self, pair: tuple[int, int]) -> segments.SegmentHeader:
        end = self.journal_end
        if self.journal is not None:
            end = JournalEnd(
                self.journal.header.index, self.journal.header.epoch, self.journal.last_lsn
            )
        epoch = self.space.new_epoch()
        headers = [
            segments.SegmentHeader(
                role=layout.ROLE_JOURNAL,
                index=pair[copy_number],
                partner=pair[1 - copy_number],
                copy_number=copy_number,
                epoch=epoch,
                nonce=self.nonce,
                first_lsn=self.last_lsn + 1,
                predecessor=layout.NO_SEGMENT if end is None else end.segment,
                predecessor_epoch=0 if end is None else end.epoch,
                predecessor_last_lsn=0 if end is None else end.last_lsn,
            )
            for copy_number in (0, 1)
        ]
        for header in headers:
            segments.store(self.media, self.superblock, header)
        return headers[0]

    def _next_root(
        self,
        *,
        image_bytes: int,
        info: image.ImageInfo,
        image_segments: tuple[int, ...],
        header: segments.SegmentHeader | None,
    ) -> roots.Root:
        known, count, device_hash = self.dirty_shutdown
        return roots.Root(
            generation=self.root.generation + 1,
            flags=0 if header is None else self.root_flags,
            image_bytes=image_bytes,
            image_lsn=info.lsn,
            image_header_crc=info.header_crc,
            image_segments=image_segments,
            journal_segment=None if header is None else header.index,
            journal_mirror=None if header is None else header.partner,
            journal_epoch=0 if header is None else header.epoch,
            journal_first_lsn=self.last_lsn + 1,
            next_epoch=self.space.next_epoch,
            dirty_shutdown_known=int(known),
            dirty_shutdown_count=count,
            device_hash=device_hash,
        )

    def _switch(
        self, root: roots.Root, header: segments.SegmentHeader | None, *, released: list[int]
    ) -> None:
        invariant(root.generation > self.root.generation, "a root generation was used twice")
        self.root = root
        if header is not None:
            self.journal = journal.Journal(
                self.media, self.superblock, header, last_lsn=self.last_lsn
            )
        log.debug("generation %d is durable", root.generation)
        self.space.root_is_durable(released)
        self.refresh_reserve()
