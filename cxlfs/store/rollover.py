"""A rollover: from the committed state to a new image, a new journal and the root that names them.

It begins by switching to a new journal, which makes the last record before that the image's; from
there on it goes in steps, between which the store serves others.

Never here: what an image holds (``export``), what is kept free for it (``volume``).

Invariants
- Until its root is durable recovery finds the image before, its journals and the new one, which is
  linked behind them: no state in between is lost, and a rollover can be abandoned at any step.
- Headers, then image, then root are durable, each before the next one is stored. Whatever a step
  stores it fences itself: the next one may run in another thread.
- Everything that it needs is taken when it begins: it does not fail for want of room later.
- Segments that died after it began are still named by its image, and not freed by its root.
- :meth:`Rollover.step_apart` uses nothing but what belongs to the rollover, and the media.
"""

from __future__ import annotations

import enum
import logging
import threading
from typing import TYPE_CHECKING

from cxlfs.errors import MediaError, NoSpaceError, OutOfMemoryError
from cxlfs.format import layout, roots, segments
from cxlfs.store.export import Export
from cxlfs.store.rolling import JOURNAL_SEGMENTS, is_short

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cxlfs.format.image import Image
    from cxlfs.format.operations import Operation
    from cxlfs.store.volume import Volume

JOURNAL_BYTES_MAX = 64 << 20
"""What recovery replays before an image is begun, where segments are not larger: 170 000 new files
in a second; of the shortest records 350 000 (docs/scaling.md says what each kind takes)."""
JOURNALS_MIN = 4
PIECE_BYTES = 1 << 20
"""Stored and fenced in one step: less than a millisecond on persistent memory."""


log = logging.getLogger(__name__)


class _Phase(enum.Enum):
    EXPORT = enum.auto()
    STORE = enum.auto()
    ROOT = enum.auto()
    DONE = enum.auto()


class Rollover:
    """See the module. Making one begins it: raises NoSpaceError (nothing has changed), MediaError,
    OutOfMemoryError. ``closing``: no journal, and a root that is not in use.
    """

    def __init__(self, volume: Volume, *, closing: bool = False) -> None:
        self._volume = volume
        self._closing = closing
        self._apart = threading.Lock()
        """Held while an image is put together and stored, without the lock of the store."""
        self._phase = _Phase.EXPORT
        self._image: Image | None = None
        self._stored = 0
        self._error: MediaError | None = None
        self._journals_before = len(volume.current.journal_segments)
        volume.space.collect_dead()
        self.dead = volume.space.dead_segments()
        payload = volume.superblock.segment_payload_bytes
        count = -(-volume.image_bytes_estimate() // payload)
        self._taken, pair = volume.take_set(min(count, layout.IMAGE_SEGMENTS_MAX), closing=closing)
        self._header: segments.SegmentHeader | None = None
        with volume.writing:
            self._store_headers()
            if pair is not None:
                self._header = volume.store_journal_headers(pair)
            volume.media.fence()
        self._last_lsn = volume.last_lsn
        if self._header is not None:
            volume.switch_journal(self._header)
        self._export = Export(
            volume.namespace,
            volume.engine,
            uuid=volume.superblock.uuid,
            lsn=volume.last_lsn,
            next_extent_id=volume.next_extent_id,
        )

    @property
    def is_done(self) -> bool:
        return self._phase is _Phase.DONE

    @property
    def longest_slice(self) -> int:
        """Inodes or names that were looked at in one step, at most."""
        return self._export.longest_slice

    @property
    def image_segments(self) -> int:
        """Segments that were taken for the image."""
        return len(self._taken)

    @property
    def journals_before(self) -> int:
        """How many of the current set's journal segments lie before the image."""
        return self._journals_before

    def keep(self, ops: Sequence[Operation]) -> None:
        """A record of ``ops`` is about to be stored. Raises OutOfMemoryError."""
        if self._phase is _Phase.EXPORT:
            self._export.keep(ops)

    def step(self, *, apart: bool = False) -> bool:
        """One short step; False once the root is durable. ``apart``: what :meth:`step_apart` can do
        is left to it. Raises MediaError, NoSpaceError (the image does not fit what was taken for
        it), OutOfMemoryError.
        """
        if self._phase is _Phase.EXPORT:
            if not self._export.step():
                self._phase = _Phase.STORE
        elif self._phase is _Phase.STORE:
            if not apart or self._error is not None:
                self._step_store()
        elif self._phase is _Phase.ROOT:
            self._write_root()
        return self._phase is not _Phase.DONE

    def step_apart(self) -> bool:
        """What needs no lock of the store: put the image together, store and fence a piece of it.
        False when there is nothing of that kind to do. Raises nothing: the next step does.
        """
        with self._apart:
            if self._phase is not _Phase.STORE or self._error is not None:
                return False
            try:
                self._store_piece()
            except MediaError as error:
                self._error = error
            return True

    def finish(self) -> None:
        """All steps that are left. Raises as :meth:`step`."""
        while self.step():
            pass

    def abandon(self) -> None:
        """Give up the image; the journals stay, behind the image before."""
        with self._apart:
            if self._phase is _Phase.EXPORT:
                self._export.cancel()
            if self._phase is not _Phase.DONE:
                self._volume.space.give_up(self._taken)
            self._phase = _Phase.DONE

    # --- storing ----------------------------------------------------------------------------

    def _store_headers(self) -> None:
        volume = self._volume
        for part, index in enumerate(self._taken):
            header = segments.SegmentHeader(
                role=layout.ROLE_IMAGE,
                index=index,
                epoch=volume.space.new_epoch(),
                nonce=volume.nonce,
                first_lsn=part,
            )
            segments.store(volume.media, volume.superblock, header)

    def _step_store(self) -> None:
        with self._apart, self._volume.writing:
            if self._error is not None:
                raise self._error
            if self._phase is _Phase.STORE:
                self._store_piece()
        image = self._image
        room = len(self._taken) * self._volume.superblock.segment_payload_bytes
        if image is not None and len(image) > room:
            raise NoSpaceError("the metadata of this store is larger than an image can be")

    def _store_piece(self) -> None:
        """Durable when it returns."""
        if self._image is None:
            self._image = self._export.assemble()
        payload = self._volume.superblock.segment_payload_bytes
        if len(self._image) > len(self._taken) * payload:
            return
        part, inside = divmod(self._stored, payload)
        data = self._image.read(self._stored, min(PIECE_BYTES, payload - inside))
        offset = self._volume.superblock.segment_offset(self._taken[part])
        self._volume.media.copy(offset + layout.SEGMENT_HEADER_BYTES + inside, data)
        self._volume.media.fence()
        self._stored += len(data)
        if self._stored == len(self._image):
            self._phase = _Phase.ROOT

    def _write_root(self) -> None:
        volume, image, header = self._volume, self._image, self._header
        if image is None:
            raise NoSpaceError("there is no image to name")
        used = -(-len(image) // volume.superblock.segment_payload_bytes)
        known, count, device_hash = volume.dirty_shutdown
        root = roots.Root(
            generation=volume.root.generation + 1,
            flags=0 if header is None else volume.root_flags,
            image_bytes=len(image),
            image_lsn=image.info.lsn,
            image_header_crc=image.info.header_crc,
            image_segments=tuple(self._taken[:used]),
            journal_segment=None if header is None else header.index,
            journal_mirror=None if header is None else header.partner,
            journal_epoch=0 if header is None else header.epoch,
            journal_first_lsn=self._last_lsn + 1,
            next_epoch=volume.space.next_epoch,
            dirty_shutdown_known=int(known),
            dirty_shutdown_count=count,
            device_hash=device_hash,
        )
        with volume.writing:
            roots.write(volume.media, volume.superblock, root)
        self._phase = _Phase.DONE
        volume.space.give_up(self._taken[used:])
        volume.counters.image_bytes_written += len(image)
        volume.adopt_root(root, journals_before=self._journals_before, dead=self.dead)


class Rollovers:
    """The rollovers of one volume, one at a time, and when they happen.

    ``due``: the next :meth:`step` begins one.
    """

    def __init__(self, volume: Volume) -> None:
        self._volume = volume
        self.running: Rollover | None = None
        self.due = False

    def run(self, *, closing: bool = False) -> None:
        """All of it at once. Durable when it returns. Raises NoSpaceError, MediaError."""
        self._begin(closing=closing)
        self.finish()

    def begin(self) -> None:
        """For now a new journal only; what is left is done by :meth:`step`.

        Raises NoSpaceError (nothing has changed), MediaError.
        """
        self._begin(closing=False)

    def _begin(self, *, closing: bool) -> None:
        volume = self._volume
        volume.require_writable()
        self.abandon()
        log.debug("rolling over to generation %d", volume.root.generation + 1)
        self.due = False
        self.running = Rollover(volume, closing=closing)
        volume.refresh_reserve()

    def step(self, *, apart: bool = False) -> bool:
        """One short step of what is under way, or due; False when nothing is. ``apart``: see
        :meth:`Rollover.step`. Raises MediaError, NoSpaceError, OutOfMemoryError: the rollover is
        given up then, and the journal goes on behind the image before.
        """
        if self._volume.read_only:
            self.abandon()
        elif self.running is None and self.due:
            self.begin()
        elif self.running is not None:
            try:
                if not self.running.step(apart=apart):
                    self.running = None
            except BaseException:
                self.abandon()
                raise
            return True
        return self.running is not None

    def step_apart(self) -> bool:
        """See :meth:`Rollover.step_apart`; not under the lock of the store."""
        running = self.running
        return running is not None and running.step_apart()

    def finish(self) -> None:
        """What is under way, to its end. Raises as :meth:`step`."""
        while self.running is not None:
            self.step()

    def abandon(self) -> None:
        """Forget what is under way; its journal stays."""
        running, self.running = self.running, None
        if running is not None:
            running.abandon()
            self._volume.refresh_reserve()

    def keep(self, ops: Sequence[Operation]) -> None:
        """A record of ``ops`` is about to be stored: the image under way is of the state before it.
        Without memory for that there is no image for now; the record counts more.
        """
        try:
            if self.running is not None:
                self.running.keep(ops)
        except OutOfMemoryError as error:
            log.warning("the image that was being made is given up: %s", error.message)
            self.abandon()

    # --- when -------------------------------------------------------------------------------

    def make_journal_room(self) -> None:
        """The journal's segment is full: continue it in another one, or roll over.

        Raises NoSpaceError, MediaError.
        """
        volume = self._volume
        if self.running is not None:
            if self._may_continue(self.running):
                volume.continue_journal()
                return
            self.finish()
        if self._may_wait():
            volume.continue_journal()
            return
        try:
            if is_short(volume.image_bytes_estimate()):
                self.run()
            else:
                self.begin()
        except NoSpaceError as error:
            log.warning("no new image, the journal is continued: %s", error.message)
            volume.continue_journal()

    def _may_continue(self, running: Rollover) -> bool:
        """While an image is being made: nobody waits for it, unless nobody makes it."""
        volume = self._volume
        since = len(volume.current.journal_segments) - running.journals_before
        limit = max(JOURNAL_BYTES_MAX // volume.superblock.segment_payload_bytes, JOURNALS_MIN)
        kept = volume.refresh_reserve()
        if since <= JOURNAL_SEGMENTS:
            kept -= JOURNAL_SEGMENTS  # kept for this
        room = volume.space.free_count - JOURNAL_SEGMENTS >= kept
        return room and since < limit * JOURNAL_SEGMENTS

    def _may_wait(self) -> bool:
        """A new image is not worth it yet: it is more than twice as long as the journal, which is
        read in a part of the time that the image takes; and there is plenty of room.
        """
        volume = self._volume
        payload = volume.superblock.segment_payload_bytes
        journals = len(volume.current.journal_segments) // JOURNAL_SEGMENTS
        worth = min(volume.image_bytes_estimate() // 2, JOURNAL_BYTES_MAX)
        plenty = volume.refresh_reserve() + len(volume.space.states) // 4 + JOURNAL_SEGMENTS
        return (journals + 1) * payload <= worth and volume.space.reachable_count >= plenty
