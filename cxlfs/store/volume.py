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
    OutOfMemoryError,
    ReadOnlyError,
    RecordRefusedError,
    invariant,
)
from cxlfs.format import journal, layout, operations, roots, segments
from cxlfs.store.admission import Admission
from cxlfs.store.commit_times import CommitTimes
from cxlfs.store.events import Events
from cxlfs.store.health import Health
from cxlfs.store.paths import path_of
from cxlfs.store.reserve import Reserve
from cxlfs.store.rolling import JOURNAL_SEGMENTS, RollsOver, is_short
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
LAST_SEGMENTS = 2
"""Kept ready for small writes when the store is full: dozens of saves find room in it."""
_GROWTH_AHEAD = 16
"""The part of a segment by which metadata grows while as much room is made as that will take."""
_IMAGE_PART = 4
"""An image that is written to free segments takes at most a fourth of what it frees."""
_EXTENT_BYTES, _REF_BYTES = layout.IMAGE_EXTENT_DTYPE.itemsize, layout.REF_DTYPE.itemsize
_SUM_BYTES = 4
_EVENT_NAMES_MAX = 1000
"""So many names are searched for that of an event's file; else the message names its number."""


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
    journal_bytes_written: int = 0
    """Of records, in one of their two copies."""
    image_bytes_written: int = 0
    maintenance_seconds_max: float = 0.0
    """How long background work kept others from the store at most."""


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
    """The journal segment that a new one continues.

    ``header``: its header, if a continuation must be stored at ``position``, where its records end.
    """

    segment: int
    epoch: int
    last_lsn: int
    header: segments.SegmentHeader | None = None
    position: int = 0


class Writing:
    """``with volume.writing:`` A media failure inside stops all writing: it is never retried into a
    false success. Keeps nothing of its own: one serves all of a volume, one inside the other too.
    """

    __slots__ = ("_volume",)

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, MediaError):
            self._volume.media_failed(error)


class Applying:
    """``with volume.applying:`` A record is stored, and what it says is done in memory. A failure
    in between stops all writing: memory is not what the media say any more. One serves all.
    """

    __slots__ = ("_volume",)

    def __init__(self, volume: Volume) -> None:
        self._volume = volume

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._volume.stop_writing(f"a record that is stored could not be applied: {error!r}")


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
        rollovers: Callable[[Volume], RollsOver],
    ) -> None:
        self.media = media
        self.writing = Writing(self)
        self.applying = Applying(self)
        self.superblock = superblock
        self._payload_bytes = superblock.segment_payload_bytes
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
        self.commit_times = CommitTimes()
        namespace.opened(last_lsn)
        self.journal: journal.Journal | None = None
        self.journal_end: JournalEnd | None = None
        self.current = MetadataSet(root.image_segments)
        self.fallback = MetadataSet()
        self._reserve = Reserve(superblock)
        self.rollovers = rollovers(self)
        self.read_only_reason: str | None = None
        self.needs_check: str | None = None
        self.counters = Counters()
        self.health = Health(self)
        self.events = Events(lambda ino: path_of(namespace, ino, names_max=_EVENT_NAMES_MAX))
        self.root_flags = layout.ROOT_IN_USE
        self.dirty_shutdown = (False, 0, 0)
        self._last_now = 0
        self._admission = Admission(namespace)

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
        """Log it and tell whoever listens; see ``events``."""
        self.events.tell(kind, message, ino=ino, media_offset=media_offset, level=level)

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

    def require_counts(self) -> None:
        """What is used was counted in full since the store was opened. Raises OutOfMemoryError."""
        if self.engine.statistics().uncounted_extents:
            raise OutOfMemoryError("memory was too short to count what is used")

    def watch(self, error: CxlfsError) -> None:
        """Outside ``writing``: a failed copy concerns its range, a failed fence everything."""
        if isinstance(error, MediaError) and error.not_durable:
            self.stop_writing(f"the media failed: {error.message}")

    # --- transactions -----------------------------------------------------------------------

    @property
    def record_bytes_max(self) -> int:
        return min(RECORD_BYTES_MAX, self.superblock.segment_payload_bytes // 4)

    def commit(self, ops: Sequence[Operation], *, durable: bool = True) -> tuple[int, int]:
        """Write one record; returns its LSN and time. The caller applies the operations then.

        ``durable`` False: on page media the record is ordered but not durable yet. Raises
        ReadOnlyError, NoSpaceError, RecordRefusedError (nothing written), MediaError (writing
        stops).
        """
        self.require_writable()
        self._admit(ops)
        payload = operations.encode(ops)
        needed = journal.record_bytes(payload)
        if needed > self._payload_bytes // 2:
            raise LimitError("the transaction is larger than the journal of this store can take")
        if needed > (end := self._open_journal()).free_bytes:
            self.rollovers.make_journal_room()
            end = self._open_journal()
        if self.rollovers.running is not None:
            self.rollovers.keep(ops)
        with self.writing:
            lsn, time_ns = end.append(payload, len(ops))
            if durable or end.must_fence_each:
                end.fence()
        self.last_lsn = self.namespace.lsn = lsn
        self.last_commit_ns = time_ns
        self.commit_times.add(lsn, time_ns)
        self.counters.commits += 1
        self.counters.journal_bytes_written += needed
        return lsn, time_ns

    def _admit(self, ops: Sequence[Operation]) -> None:
        """Check that replay can apply a record. Raises RecordRefusedError."""
        try:
            self._admission.check(ops)
        except RecordRefusedError as error:
            self.event("record-refused", error.message, level=logging.ERROR)
            raise

    def note_committed(self, ops: Sequence[Operation]) -> None:
        """Their record is stored: images have these times from now on."""
        for op in ops:
            if type(op) is operations.InodeOperation:
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
            with self.writing:
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
        contents_bytes = self.engine.table_bytes(_EXTENT_BYTES, _REF_BYTES, _SUM_BYTES)
        return self.namespace.image_bytes_estimate() + contents_bytes

    def metadata_set_segments(self) -> int:
        """Upper bound of the segments of the next metadata set: image and both journal copies."""
        return self._reserve.set_segments(self.image_bytes_estimate())

    def refresh_reserve(self, growth_bytes: int = 0) -> int:
        """Recompute how many segments must stay free, when metadata has grown so much."""
        now = self.image_bytes_estimate()
        wanted = self._reserve.set_segments(now + growth_bytes)
        self.space.reserve = self._reserve_segments(now, wanted)
        return self.space.reserve

    def _reserve_segments(self, image_bytes: int, wanted: int) -> int:
        running = self.rollovers.running
        return self._reserve.segments(image_bytes, wanted, self.current, self.fallback, running)

    @property
    def is_nearly_used_up(self) -> bool:
        """Whoever takes room makes some for others (``Cleaner.pay``): it is scarce, or would be
        with a segment more of metadata, for which the reserve grows by several.
        """
        now = self.image_bytes_estimate()
        wanted = self._reserve.set_segments(now)
        ahead = self._reserve.set_segments(now + self._payload_bytes // _GROWTH_AHEAD)
        self.space.reserve = reserve = self._reserve_segments(now, wanted)
        if ahead != wanted:
            reserve = max(reserve, self._reserve_segments(now, ahead))
        return self.space.reachable_count - reserve < LAST_SEGMENTS

    @property
    def metadata_has_shrunk(self) -> bool:
        """A rollover would give segments back: a set is larger than the next one would be, with a
        journal that was continued once.
        """
        wanted = self.metadata_set_segments() + JOURNAL_SEGMENTS
        larger = any(len(kept.segments) > wanted for kept in (self.current, self.fallback))
        return larger and self.rollovers.running is None

    def metadata_room(self) -> bool:
        """There is room for a larger image than now."""
        return self.space.has_free(self.refresh_reserve())

    def release_dead(self) -> bool:
        """Segments in which nothing is alive are free again; False when there are none.

        With a new root, while its image is short and takes little against what it frees; else by
        :meth:`free_dead`. Raises MediaError.
        """
        dead = self.space.collect_dead()
        if not dead:
            return False
        image_bytes = self.image_bytes_estimate()
        freed_bytes = dead * self.superblock.segment_payload_bytes
        if is_short(image_bytes) and image_bytes * _IMAGE_PART <= freed_bytes:
            try:
                self.rollover()
            except NoSpaceError:
                self.free_dead()
        else:
            self.free_dead()
        return True

    def free_dead(self) -> None:
        """Segments in which nothing is alive are free as soon as every record so far is durable.

        Without a new root: see the crash argument. Raises MediaError.
        """
        self.space.collect_dead()
        self.fence()
        self.space.free_dead()

    # --- rolling over -----------------------------------------------------------------------

    def rollover(self) -> None:
        """Write the committed state as a new image, begin a new journal, write a root; all at once.

        Durable when it returns. Frees dead segments. Raises NoSpaceError, MediaError.
        """
        self.rollovers.run()

    def close_cleanly(self) -> None:
        """The last rollover: no journal, and a root that is not in use."""
        self.health.finish()
        self.rollovers.run(closing=True)
        self.journal = None

    def take_set(self, count: int, *, closing: bool) -> tuple[list[int], tuple[int, int] | None]:
        """Segments for an image and a journal; raises NoSpaceError.

        A store without room for them gives up its fallback before it stops working.
        """
        if not self.space.has_free(count + (0 if closing else 2)):
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
        _, pair = self.take_set(0, closing=False)
        if pair is None:
            raise InvariantError("a journal has two copies")
        with self.writing:
            header = self.store_journal_headers(pair)
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
        self.root = root
        self.switch_journal(header)
        self.space.root_is_durable([], [])
        self.refresh_reserve()

    def continue_journal(self) -> None:
        """Another journal behind the one there is, under the same root and image. Durable.

        Raises NoSpaceError (nothing has changed), MediaError.
        """
        pair = self.space.take_pair(State.JOURNAL)
        with self.writing:
            header = self.store_journal_headers(pair)
            self.media.fence()
        self.switch_journal(header)
        self.refresh_reserve()

    def store_journal_headers(self, pair: tuple[int, int]) -> segments.SegmentHeader:
        """Store the headers of the next journal, and the continuation that leads to it.

        Returns the header of the primary copy. The caller fences.
        """
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
        if self.journal is not None:
            self.journal.end(headers[0])
        elif end is not None and end.header is not None:
            journal.store_continuation(
                *(self.media, self.superblock, end.header, headers[0]),
                position=end.position,
                fenced_lsn=end.last_lsn,
            )
        return headers[0]

    def switch_journal(self, header: segments.SegmentHeader) -> None:
        """Its headers, and every record so far, are durable: from here on records go there."""
        self.journal = journal.Journal(self.media, self.superblock, header, last_lsn=self.last_lsn)
        journals = (*self.current.journal_segments, header.index, header.partner)
        self.current = dataclasses.replace(self.current, journal_segments=journals)

    def adopt_root(self, root: roots.Root, *, journals_before: int, dead: list[int]) -> None:
        """A rollover's root is durable: the set before is the fallback, the one before that and the
        segments that were ``dead`` when it began are free.
        """
        invariant(root.generation > self.root.generation, "a root generation was used twice")
        journals = self.current.journal_segments
        released = self.fallback
        self.fallback = MetadataSet(self.current.image_segments, journals[:journals_before])
        self.current = MetadataSet(root.image_segments, journals[journals_before:])
        self.root = root
        self.counters.rollovers += 1
        log.debug("generation %d is durable", root.generation)
        self.space.root_is_durable(list(released.segments), dead)
        self.refresh_reserve()
