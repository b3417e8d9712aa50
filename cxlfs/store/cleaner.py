"""Getting space back by compacting half-dead segments.

Never here: what can be had without moving data (``room``), how data is moved (``mover``), deciding
that a write fails (``files``).

Invariants
- Work is done in short steps: a verb of ``mover``, or a rollover, and never more than one of them
  before others may have their turn.
- The cleaner takes at most CLEANER_SEGMENTS out of the reserve before some are given back.
- A segment that is being written to, or that is damaged, is left as it is.
- What ended contents referred to is dropped before anything is moved: it would look alive.

Which segments are compacted, and when, follows Rosenblum and Ousterhout, "The Design and
Implementation of a Log-Structured File System" (ACM TOCS 10(1), 1992), section 3: emptier and
older segments first, with moved data kept apart from new data. Cleaning begins late, and takes
fuller segments only as room gets scarcer: what is about to die is not moved. What was emptied is
given back when the room is used up, all at once, because a metadata image may have to be written
for it.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import CorruptionError, MediaError, NoSpaceError
from cxlfs.native.extents import SPAN_DTYPE
from cxlfs.store.mover import Mover
from cxlfs.store.reserve import CLEANER_SEGMENTS
from cxlfs.store.space import State
from cxlfs.store.version import Version
from cxlfs.store.volume import LAST_SEGMENTS
from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    from cxlfs.native.extents import LiveRanges, Rows
    from cxlfs.store.past_space import PastSpace
    from cxlfs.store.room import Room
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

BACKGROUND_USED_MAX = 0.5
"""While room is not scarce only segments that are at most half alive are worth moving."""
AHEAD_USED_MAX = 0.97
"""So that a write need not fail soon fuller ones are;"""
FOREGROUND_USED_MAX = 0.99
"""and one that would fail is worth almost any move."""
_LOW = 4
"""Less than this part of the segments can be had: the cleaner begins."""
_SCARCE = 16
"""Less than this part: it takes fuller and fuller segments, at none the fullest."""
_VICTIMS_MAX = 8
"""Compacted together: their data is sorted by file, over so many segments,"""
_WINDOW_BYTES = 16 * MIB
"""but over so much of the media at most: every step finds anew what is alive there, in 1 to 2 ms
for 4 KiB pieces."""
_WINDOW_BYTES_MIN = 256 * KIB
_VISITS_MAX = 32768
"""A step that looked at more references, because its bytes have many each, is followed by smaller
ones: a look takes some 0.5 µs."""
_DYING = 0.5
"""A segment with more than this part of its data about to be replaced is left alone."""


class Cleaner:
    """One for each volume. ``unmovable``: segments with damage, left where they are."""

    def __init__(self, volume: Volume, versions: Versions, room: Room, history: PastSpace) -> None:
        self.volume = volume
        self.versions = versions
        self.room = room
        self.history = history
        room.give_up_held = history.give_up_held
        self.mover = Mover(volume, versions)
        self.unmovable: set[int] = set()
        self._running = False
        self._exhausted: tuple[object, ...] | None = None
        """The state in which no more room could be had."""
        self._victims: dict[int, int] = {}
        """Segments that are being emptied, each with the age of its data: another one's data may be
        there at the next step.
        """
        self._position = 0
        """So many bytes of the victims, one behind the other, nothing refers to any more."""
        self._window_bytes = _WINDOW_BYTES
        self._emptied = False
        """Something was, and is not free yet."""
        self._effort = (0, 0, 0)
        """Leases given, the most room since the last of them, and bytes moved when that was."""
        self._borrowed = -1
        """After dead segments were freed so many times the cleaner took a segment of what was less
        than the reserve.
        """

    # --- verbs ------------------------------------------------------------------------------

    def reclaim(self, needed_bytes: int) -> bool:
        """One step towards more room, for file data or (0) for metadata, which would fail without;
        False when no more can be had.
        """
        if self._running or self.volume.read_only:
            return False
        if self.room.drop_discarded():
            if needed_bytes:
                return True
            self.room.drop_all_discarded()
        if self._state(needed_bytes) == self._exhausted:
            return False  # nothing has changed since all of it was tried
        self._running = True
        try:
            if self._reclaim(needed_bytes):
                return True
        except NoSpaceError:
            pass
        finally:
            self._running = False
        self._exhausted = self._state(needed_bytes)
        return False

    def pay(self) -> bool:
        """One step for a write that is about to take of the last room, so that a small one of
        somebody else need not move segments for itself; False when it is not needed, or no use.
        Nothing is given up for it. Raises MediaError.
        """
        space = self.volume.space
        if self._running or self.volume.read_only or not self.volume.is_nearly_used_up:
            return False
        if self.room.drop_discarded():
            return True
        self._running = True
        try:
            if space.collect_dead() and self._free_dead():
                return True
            return self.compact(AHEAD_USED_MAX, for_data=True)
        except NoSpaceError:
            return False
        finally:
            self._running = False

    def _state(self, needed_bytes: int) -> tuple[object, ...]:
        """What making room depends on, in a fixed number of counters."""
        engine = self.volume.engine.statistics()
        return (
            needed_bytes > 0,
            self.volume.last_lsn,
            self.volume.space.available_bytes,
            self.volume.space.free_count,
            self.versions.leases.count,
            engine.bytes_written,
            engine.extents,
            engine.refs,
            engine.kept_bytes,
        )

    def step(self) -> bool:
        """One short piece of background work; True when there is more."""
        if self._running or self.volume.read_only:
            return False
        if self.room.drop_discarded():
            return True
        self._running = True
        try:
            return self.history.step() or self._step()
        except NoSpaceError:
            return False
        finally:
            self._running = False

    def _reclaim(self, needed_bytes: int) -> bool:
        """What was emptied is free first; then the segments that are being emptied are."""
        for_data = needed_bytes > 0
        if for_data and self._is_in_vain():
            return False
        goes_on = self._victims and not self.volume.space.collect_dead()
        if goes_on and self.compact(FOREGROUND_USED_MAX, for_data=for_data):
            return True
        return (
            self.room.make(needed_bytes)
            or self.compact(FOREGROUND_USED_MAX, for_data=for_data)
            or (for_data and self._give_own_room())
            or self.room.make_of_removed()
        )

    def _is_in_vain(self) -> bool:
        """All data was moved once, and there is no more room than before. Pieces of some bytes end
        like that: what is moved in one step begins at a new block, so that what they leave comes
        back, and so would they for ever.
        """
        space = self.volume.space
        leases, room_bytes, moved_bytes = self._effort
        now_bytes = self.volume.counters.moved_bytes
        if leases != space.leases_given or space.room_bytes > room_bytes:
            self._effort = (space.leases_given, space.room_bytes, now_bytes)
            return False
        data_bytes = len(space.data_segments()) * self.volume.superblock.segment_payload_bytes
        return now_bytes - moved_bytes > data_bytes

    def _give_own_room(self) -> bool:
        """Dead room of less than a segment in all: it has come together behind what was moved."""
        self.volume.refresh_reserve()
        return self.volume.space.give_cleaner_room()

    def _step(self) -> bool:
        space = self.volume.space
        reserve = self.volume.refresh_reserve()
        low = max(reserve + 1, len(space.states) // _LOW)
        if space.reachable_count >= low:
            return False
        dead = space.collect_dead()
        spare = space.reachable_count - reserve
        if dead and spare <= dead // _LOW:
            return self._free_dead()
        scarce = len(space.states) / _SCARCE
        ease = min(1.0, max(0.0, (spare + dead) / scarce))
        used_max = ease * BACKGROUND_USED_MAX + (1 - ease) * AHEAD_USED_MAX
        if spare + dead < low and self.compact(used_max, background=True):
            return True
        if dead * _LOW >= low or (dead and self._emptied):
            return self._free_dead()
        return False

    def _free_dead(self) -> bool:
        """True when that made room."""
        free_before = self.volume.space.free_count
        self._emptied = False
        self.room.free_dead()
        return self.volume.space.free_count > free_before

    def _may_move(self) -> bool:
        """The cleaner has room, or may take a segment: its own one of the reserve, and below that
        one until something is given back, or where that ends what it began, if a rollover that
        gives up the fallback is possible then.
        """
        space, volume = self.volume.space, self.volume
        if space.cleaner_room_bytes > 0 or space.free_count > self._least_free():
            return True
        usable = space.free_count + len(volume.fallback.segments)
        return (
            space.free_count > 0
            and usable > volume.metadata_set_segments()
            and (self._borrowed != space.releases or self._ends_with_one())
        )

    def _ends_with_one(self) -> bool:
        """What is alive in the victims fits into one segment: one at least is given back for it."""
        usage = self.volume.engine.usage()
        alive = sum(int(usage[index]) for index in self._still_victims())
        return 0 < alive <= self.volume.superblock.segment_payload_bytes

    def _least_free(self) -> int:
        """What must stay free when the cleaner's own segment is used up."""
        return self.volume.refresh_reserve() - CLEANER_SEGMENTS

    # --- compacting -------------------------------------------------------------------------

    def compact(self, used_max: float, *, background: bool = False, for_data: bool = False) -> bool:
        """One step: move some of what is alive out of segments that are at most so much alive.
        ``for_data``: where room in segments is as good as free ones. False when there are none, or
        no room for it. Raises NoSpaceError, MediaError.
        """
        left_alone: set[int] = set()
        while self._may_move():
            victims = self._still_victims()
            victims = victims or self._choose(used_max, left_alone, for_data=for_data)
            if not victims:
                return False
            indexes, spans = self._window(victims)
            found = self._look(spans)
            stay = found.busy
            if background:
                stay = stay | self._dying(found, len(indexes))
            if stay.any():
                self._leave([indexes[i] for i in np.flatnonzero(stay)], left_alone)
            elif not len(found.ranges):
                self._end_window(spans)
            elif self._move(found, spans, left_alone):
                return True
        return False

    def _look(self, spans: Rows) -> LiveRanges:
        """What is alive in a window; the next one is as large as is looked at in some ms."""
        found = self.volume.engine.live_ranges(spans)
        if found.visited > _VISITS_MAX:
            smaller = self._window_bytes * _VISITS_MAX // found.visited
            self._window_bytes = max(_WINDOW_BYTES_MIN, smaller)
        elif 0 < found.visited < _VISITS_MAX // 4:
            self._window_bytes = min(_WINDOW_BYTES, 2 * self._window_bytes)
        return found

    def _still_victims(self) -> list[int]:
        """Those of the last step that are neither dead nor in use again; by place."""
        space = self.volume.space
        for index, born in list(self._victims.items()):
            if space.states[index] is not State.DATA or space.born[index] != born:
                self._forget_victim(index)
        return list(self._victims)

    def _forget_victim(self, index: int) -> None:
        del self._victims[index]
        self._position = 0

    def _window(self, victims: list[int]) -> tuple[list[int], Rows]:
        """What the next step looks at: segments, and the span of each."""
        block = self.volume.superblock
        size = block.segment_size_bytes
        rows = []
        for number, index in enumerate(victims):
            start = max(0, self._position - number * size)
            end = min(size, self._position + self._window_bytes - number * size)
            if start < end:
                rows.append((index, block.segment_offset(index) + start, end - start))
        spans = np.zeros(len(rows), dtype=SPAN_DTYPE)
        spans["media_offset"] = [offset for _, offset, _ in rows]
        spans["length"] = [length for _, _, length in rows]
        return [index for index, _, _ in rows], spans

    def _end_window(self, spans: Rows) -> None:
        """Nothing in it is referred to any more."""
        self._position += int(spans["length"].sum())
        if self._position == len(self._victims) * self.volume.superblock.segment_size_bytes:
            self._end_victims()

    def _move(self, found: LiveRanges, spans: Rows, left_alone: set[int]) -> bool:
        """One step of the victims; False when something turned out damaged."""
        chosen = self.mover.choose(found.ranges)
        born = max(self._victims.values())

        def lease(needed_bytes: int) -> tuple[int, int]:
            space = self.volume.space
            if space.cleaner_room_bytes == 0 and space.free_count <= self._least_free():
                self._borrowed = self.volume.space.releases
            return space.cleaner_lease(needed_bytes, born=born)

        try:
            self.mover.move(chosen, found.owners, lease)
        except (CorruptionError, MediaError) as error:
            self.volume.watch(error)
            if self.volume.read_only:
                raise
            self._leave_damaged(error, left_alone)
            return False
        is_all = len(chosen) == len(found.ranges)
        if is_all and not len(self.volume.engine.live_ranges(spans).ranges):
            self._end_window(spans)
        return True

    def _end_victims(self) -> None:
        """Nothing in them is referred to any more."""
        for index in self._victims:
            log.debug("segment %d is empty", index)
            self.versions.past.forget_in(index)
        self.volume.counters.cleaned_segments += len(self._victims)
        self._victims, self._position = {}, 0
        self._emptied = True

    def _leave(self, segments: list[int], left_alone: set[int]) -> None:
        for index in segments:
            log.debug("segment %d is left as it is", index)
            if index in self._victims:
                self._forget_victim(index)
        left_alone.update(segments)

    def _leave_damaged(self, error: CorruptionError | MediaError, left_alone: set[int]) -> None:
        """A victim with damage stays where it is. Where moved data cannot be put nothing is put."""
        place = error.media_offset if isinstance(error, CorruptionError) else error.offset
        block = self.volume.superblock
        index = (int(place or 0) - block.first_segment_offset) // block.segment_size_bytes
        if index in self._victims:
            self.unmovable.add(index)
            self._leave([index], left_alone)
            message = f"segment {index} is not compacted: {error.message}"
        else:
            self.volume.space.close_cleaner_head()
            self._leave(list(self._victims), left_alone)
            message = f"segment {index} does not take what is moved: {error.message}"
        self.volume.health.met()
        self.volume.event("damage", message, media_offset=place)

    # --- choosing ---------------------------------------------------------------------------

    def _choose(self, used_max: float, left_alone: set[int], *, for_data: bool) -> list[int]:
        """New victims, by place: as many as there is room for what is alive in them, without what
        writes may take meanwhile; one at least.
        """
        space = self.volume.space
        payload = self.volume.superblock.segment_payload_bytes
        room = max(0, space.free_count - self._least_free() - LAST_SEGMENTS) * payload
        room += space.cleaner_room_bytes
        victims: dict[int, int] = {}
        for index, used in self.candidates(used_max, for_data=for_data):
            if index in left_alone:
                continue
            if victims and (used > room or len(victims) == _VICTIMS_MAX):
                break
            log.debug("compacting segment %d: %d bytes are alive", index, used)
            victims[index] = space.born[index]
            space.close_segment(index)
            room -= used
        self._victims, self._position = dict(sorted(victims.items())), 0
        return list(self._victims)

    def candidates(self, used_max: float, *, for_data: bool = False) -> list[tuple[int, int]]:
        """Segments that are at most so much alive, with the bytes alive in each, in the order of
        (room gained)² · √(age of what stays alive). The least alive first alone would move hot data
        again and again; cost-benefit, room · age / cost (Rosenblum and Ousterhout, section 3.5),
        moves twice as much where every block is as likely to die as any other, on a nearly full
        store: 24 against 10 bytes for each at 94 % (least alive 9), and where nine tenths of writes
        go to a tenth of the blocks 16 against 8 (least alive 10); simulated, 480 segments of 255.
        """
        usage = self.volume.engine.usage()
        space = self.volume.space
        payload = self.volume.superblock.segment_payload_bytes
        found = []
        for index, state in enumerate(space.states):
            used = int(usage[index])
            taken = used + space.leasable_in(index) if for_data else used
            if (
                state is not State.DATA
                or not 0 < used <= taken <= used_max * payload
                or index in self.unmovable
                or space.is_open(index)
            ):
                continue
            part = taken / payload
            age = space.next_epoch - space.born[index]
            found.append(((1 - part) ** 2 * math.sqrt(age), index, used))
        return [(index, used) for _, index, used in sorted(found, key=lambda item: -item[0])]

    def _dying(self, found: LiveRanges, victims: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Of which victims most is the committed content of files that are being overwritten."""
        replaced = [
            inode.ino
            for inode in self.versions.open_versions.values()
            if isinstance(inode.version, Version)
            and inode.version.atomic
            and inode.committed is not None
        ]
        if not replaced:
            return np.zeros(victims, dtype=np.bool_)
        ranges = found.ranges
        alone = ranges["owner_count"] == 1
        dying = alone & np.isin(ranges["owner"], np.array(replaced, dtype=np.uint64))
        alive = np.bincount(ranges["span"].astype(np.int64), ranges["length"], victims)
        soon = np.bincount(ranges["span"][dying].astype(np.int64), ranges["length"][dying], victims)
        return np.asarray(soon > _DYING * alive)
