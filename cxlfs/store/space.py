"""Segments: which are free, which hold what, and room for file data in them.

Never here: what is alive inside a data segment (the engine counts that), journal or image content.

Invariants
- A segment is in exactly one state. FREE -> DATA | JOURNAL | IMAGE | HISTORY; DATA -> DEAD when
  nothing in it is referenced; DEAD and given-up metadata segments -> FREE only in
  :meth:`root_is_durable`, when a root that does not name them is durable in both rings; HISTORY ->
  FREE at any time.
- A segment that is taken into use gets an epoch that no segment had before.
- Data may take a free segment only while ``reserve`` others stay free: room for the next metadata
  set (image and both journal copies) and one segment for the cleaner.
- Data is handed out front to back; what a lease gives back was never published and is handed out
  again, at once if nothing came after it, else as a remnant.
- A segment header is durable before the segment is used.
- Where a program had a lock when the store was opened it may still store, for whoever gave it room
  before: such a segment is not handed out while there is one (``held_count``), whatever its state.
"""

from __future__ import annotations

import bisect
import collections
import enum
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from cxlfs.errors import NoSpaceError, invariant
from cxlfs.format import layout, segments
from cxlfs.store.past_hooks import NO_HISTORY
from cxlfs.store.remnants import Head, Remnants
from cxlfs.units import KIB, MIB, format_size

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media
    from cxlfs.native.extents import Engine
    from cxlfs.store.past_hooks import History


class State(enum.IntEnum):
    FREE = 0
    DATA = 1
    DEAD = 2
    JOURNAL = 3
    IMAGE = 4
    HISTORY = 5


LEASE_BYTES_LEAST = 8 * KIB
"""What is left of a segment is used down to this: a 4 KiB file block and its padding always fit."""
LEASE_BYTES_MIN = 64 * KIB
LEASE_BYTES_MAX = 16 * MIB
"""A file that keeps growing gets leases that double up to this: one reference per lease, and what a
dying writer leaves unused is a quarter of a large segment. Half of it cost two writers a sixteenth
of their rate."""
_AHEAD_BYTES = 256 * MIB
_AHEAD_BYTES_AT_ONCE = 8 * MIB
_ALIGN = 4096
_ALIGN_SMALL = 64
_YOUNG_SEGMENTS = 4
"""Remnants of the newest segments are used at once; those of older ones only when room is scarce,
because what is written at different times is mostly deleted at different times."""
_BEGUN_SEGMENTS = 2
"""The one that data goes to, and the one that the cleaner moves to."""


class Space:
    """Owner of all segment states. ``next_epoch`` and ``nonce`` mark what is taken into use.
    ``writing``: surrounds what must stop all writing when the media fail.
    """

    def __init__(
        self,
        media: Media,
        superblock: Superblock,
        engine: Engine,
        *,
        next_epoch: int,
        nonce: int,
        writing: AbstractContextManager[None],
    ) -> None:
        self.media = media
        self.writing = writing
        self.superblock = superblock
        self._payload_bytes = superblock.segment_payload_bytes
        self.engine = engine
        self.next_epoch = next_epoch
        self.nonce = nonce
        self.states = [State.FREE] * superblock.segment_count
        self.reserve = 0
        self._held: set[int] = set()
        """Segments with locked ranges."""
        self._told_ahead: dict[int, int] = {}
        """Bytes of each segment that :meth:`room_ahead` has told."""
        self.born = [0] * superblock.segment_count
        """The epoch of the youngest data in each data segment: moved data keeps its age. 0: it lay
        there before the store was opened."""
        self.epochs = [0] * superblock.segment_count
        """Of each data segment, as its header says; 0: it is not known."""
        self._free = list(range(superblock.segment_count))
        """Sorted: the lowest is taken first, so that a store which is overwritten again and again
        stays on pages that are mapped (a first touch of 4 KiB of tmpfs costs 1 to 2 µs)."""
        self.leases_given = 0
        """How often data got room."""
        self.releases = 0
        """How often segments that were dead or given up became free."""
        self._data: set[int] = set()
        self._dead: set[int] = set()
        self.history: History = NO_HISTORY
        self._head: Head | None = None
        self._cleaner_head: Head | None = None
        self._young: collections.deque[int] = collections.deque(maxlen=_YOUNG_SEGMENTS)
        self._remnants = Remnants(
            least_bytes=LEASE_BYTES_LEAST,
            segment_of=lambda offset: (
                (offset - superblock.first_segment_offset) // superblock.segment_size_bytes
            ),
        )
        test = superblock.unit_bytes == layout.UNIT_BYTES_TEST
        self.align_bytes = _ALIGN_SMALL if test else _ALIGN

    # --- opening ----------------------------------------------------------------------------

    def adopt(self, states: dict[int, State]) -> None:
        """After replay: these segments are in use, all others are free."""
        self.states = [states.get(i, State.FREE) for i in range(len(self.states))]
        self._held = self._locked_segments()
        self._free = [
            i for i, s in enumerate(self.states) if s is State.FREE and i not in self._held
        ]
        self._data = {i for i, s in enumerate(self.states) if s is State.DATA}
        self._dead = {i for i, s in enumerate(self.states) if s is State.DEAD}

    def _locked_segments(self) -> set[int]:
        block = self.superblock
        first, size = block.first_segment_offset, block.segment_size_bytes
        end = first + size * len(self.states)
        return {
            index
            for start, stop in self.media.locked_ranges(first, end)
            for index in range((start - first) // size, (stop - first + size - 1) // size)
        }

    @property
    def held_count(self) -> int:
        """Segments that a program from before may still store into."""
        return len(self._held)

    def release_held(self) -> bool:
        """Look again which segments are held; True: one more can be handed out."""
        if not self._held:
            return False
        locked = self._locked_segments()
        free_before = len(self._free)
        for index in self._held - locked:
            self._held.discard(index)
            if self.states[index] is State.FREE:
                bisect.insort(self._free, index)
        return len(self._free) > free_before

    def leasable_in(self, index: int) -> int:
        """Bytes that leases can hand out of a segment that is not open."""
        return self._remnants.bytes_in(index)

    def close_segment(self, index: int) -> None:
        """No more data goes into what is left of it."""
        self._remnants.drop(index)

    # --- counting ---------------------------------------------------------------------------

    @property
    def is_scarce(self) -> bool:
        """Less than a quarter of the segments is free: what is left is used, wherever it lies."""
        return self.reachable_count <= self.reserve + len(self.states) // 4

    @property
    def free_count(self) -> int:
        """Those that can be handed out."""
        return len(self._free)

    @property
    def reachable_count(self) -> int:
        """The same, with those that history gives back when they are needed."""
        return len(self._free) + self.history.segments

    def has_free(self, wanted: int) -> bool:
        """So many segments are free, after history was given back where it must be."""
        return len(self._free) >= wanted or (
            self.history.make_free(wanted) and len(self._free) >= wanted
        )

    @property
    def held_free_count(self) -> int:
        """Those that nothing is in, and that cannot be handed out yet."""
        return sum(self.states[index] is State.FREE for index in self._held)

    @property
    def dead_count(self) -> int:
        return len(self._dead)

    def dead_segments(self) -> list[int]:
        """As :meth:`collect_dead` found them."""
        return [index for index, state in enumerate(self.states) if state is State.DEAD]

    def data_segments(self) -> list[int]:
        return sorted(self._data)

    def is_open(self, index: int) -> bool:
        """Data is being written into it."""
        return any(h is not None and h.index == index for h in (self._head, self._cleaner_head))

    def _set(self, index: int, state: State) -> None:
        self._data.discard(index)
        self._dead.discard(index)
        if state is State.DATA:
            self._data.add(index)
        elif state is State.DEAD:
            self._dead.add(index)
            self._remnants.drop(index)
        elif state is State.FREE and index not in self._held:
            bisect.insort(self._free, index)
        self.states[index] = state

    # --- taking -----------------------------------------------------------------------------

    def take(self, state: State) -> int:
        """A free segment for metadata or the cleaner, from the reserve if need be."""
        if not self.has_free(1):
            raise NoSpaceError("no free segment is left for metadata")
        index = self._free.pop(0)
        self._set(index, state)
        return index

    def take_pair(self, state: State) -> tuple[int, int]:
        """Two segments as far apart as the free ones allow: copies should not share a fault."""
        if not self.has_free(2):
            raise NoSpaceError("no free segments are left for the journal")
        first, second = self._free.pop(0), self._free.pop()
        self._set(first, state)
        self._set(second, state)
        return first, second

    def give_up(self, indexes: list[int]) -> None:
        """Metadata segments that no root names any more, and that were never named by one."""
        for index in indexes:
            invariant(self.states[index] is not State.FREE, "a free segment was given up")
            self._set(index, State.FREE)

    def new_epoch(self) -> int:
        epoch = self.next_epoch
        self.next_epoch += 1
        return epoch

    def _open_head(self, *, privileged: bool) -> Head:
        if not privileged and not self.has_free(self.reserve + 1):
            raise NoSpaceError("every segment is in use")
        index = self.take(State.DATA)
        header = segments.SegmentHeader(
            role=layout.ROLE_DATA, index=index, epoch=self.new_epoch(), nonce=self.nonce
        )
        with self.writing:
            segments.store(self.media, self.superblock, header)
            self.media.fence()
        self.epochs[index] = header.epoch
        self.born[index] = 0 if privileged else header.epoch
        start = self.superblock.segment_offset(index)
        return Head(
            index, start + layout.SEGMENT_HEADER_BYTES, start + self.superblock.segment_size_bytes
        )

    # --- leases -----------------------------------------------------------------------------

    @property
    def available_bytes(self) -> int:
        """What leases can hand out without rolling over or cleaning, short ends left out."""
        head = self._head
        rest = 0 if head is None else max(0, head.end - head.position - LEASE_BYTES_LEAST)
        whole = self._payload_bytes - LEASE_BYTES_LEAST
        free = max(0, self.reachable_count - self.reserve) * whole
        return free + rest + self._remnants.total_bytes

    @property
    def room_bytes(self) -> int:
        """All that is free, dead, or left of segments: what compacting adds to."""
        segments_bytes = (self.free_count + self.dead_count) * self._payload_bytes
        return segments_bytes + self._remnants.total_bytes + self.cleaner_room_bytes

    def leasable_bytes(self, room_bytes: int) -> int:
        """What leases hand out of so much room at least: each segment may lose its end."""
        segments_max = room_bytes // self._payload_bytes + _BEGUN_SEGMENTS
        return room_bytes - segments_max * LEASE_BYTES_LEAST

    def lease(
        self,
        needed_bytes: int,
        wanted_bytes: int,
        *,
        kept_bytes: int = 0,
        bytes_max: int = LEASE_BYTES_MAX,
        in_order: bool = False,
    ) -> tuple[int, int]:
        """Room for file data: (media offset, length), ``bytes_max`` at most. At least
        ``needed_bytes`` or LEASE_BYTES_LEAST, whichever is less, at most what one segment has left;
        ``kept_bytes`` stay available to others; ``in_order``: of :meth:`next_piece`, if there is
        one. Raises NoSpaceError when only what is kept and the reserve are left.
        """
        least = min(self._round(needed_bytes), LEASE_BYTES_LEAST)
        if kept_bytes:
            spare_bytes = (self.available_bytes - kept_bytes) // self.align_bytes * self.align_bytes
            if spare_bytes < least:
                raise NoSpaceError("what is left is allocated to other files")
            wanted_bytes = min(wanted_bytes, spare_bytes)
        bytes_max = min(bytes_max, self._payload_bytes)
        wanted_bytes = self._round(max(least, min(wanted_bytes, bytes_max)))
        remnant = None if in_order else self._take_remnant(wanted_bytes)
        given = remnant or self._lease_in_order(wanted_bytes, least)
        self.leases_given += 1
        return given

    def next_piece(self, least_bytes: int) -> tuple[int, int]:
        """Media offset and length of what is next in order, and long enough; no length: nothing."""
        head = self._head
        if head is not None and head.end - head.position >= least_bytes:
            return head.position, head.end - head.position
        if not self.has_free(self.reserve + 1):
            return 0, 0
        start = self.superblock.segment_offset(self._free[0]) + layout.SEGMENT_HEADER_BYTES
        return start, self._payload_bytes

    def _lease_in_order(self, wanted_bytes: int, least: int) -> tuple[int, int]:
        """Behind what was handed out last; what is left anywhere when there is no segment."""
        head = self._head
        if head is None or head.end - head.position < least:
            self._close_head(head)
            self._head = None
            if not self.has_free(self.reserve + 1):
                return self._take_last_remnant(wanted_bytes)
            self._head = head = self._open_head(privileged=False)
            self._young.append(head.index)
        return self._cut(head, wanted_bytes)

    def _take_remnant(self, wanted_bytes: int) -> tuple[int, int] | None:
        """From a young segment while room is plenty, from any that has enough when it is not."""
        remnants = self._remnants
        if not remnants:
            return None
        # What a file begins with may be less than it wants: most are small, and what they leave of
        # their first piece would otherwise be too short for the first piece of the next one.
        least_bytes = LEASE_BYTES_LEAST if wanted_bytes <= LEASE_BYTES_MIN else wanted_bytes
        for index in self._young:
            longest_bytes = remnants.longest_in(index)
            if longest_bytes >= least_bytes:
                taken = remnants.take_in(index, min(wanted_bytes, longest_bytes))
                return None if taken is None else self._noted(taken)
        if not self.is_scarce or remnants.longest_bytes < least_bytes:
            return None
        return self._noted(remnants.take(wanted_bytes))

    def _take_last_remnant(self, wanted_bytes: int) -> tuple[int, int]:
        """The longest there is; raises NoSpaceError."""
        if not self._remnants:
            raise NoSpaceError("every segment is in use")
        return self._noted(self._remnants.take(wanted_bytes))

    def _noted(self, taken: tuple[int, int]) -> tuple[int, int]:
        """A segment in which room was handed out is not empty any more, whatever was said."""
        index = self._remnants.segment_of(taken[0])
        self.born[index] = self.next_epoch
        for head in (self._head, self._cleaner_head):
            if head is not None and head.index == index:
                head.empty = False
        return taken

    @property
    def cleaner_room_bytes(self) -> int:
        """What a lease of the cleaner gets without another segment."""
        head = self._cleaner_head
        room = 0 if head is None else head.end - head.position
        return room if room >= self.align_bytes else 0

    def cleaner_lease(self, needed_bytes: int, *, born: int) -> tuple[int, int]:
        """The same for moved data, which may use the reserve and is as old as ``born``."""
        head = self._cleaner_head
        if head is None or head.end - head.position < self.align_bytes:
            self._close_head(head)
            self._cleaner_head = None
            self._cleaner_head = head = self._open_head(privileged=True)
        self.born[head.index] = max(self.born[head.index], born)
        return self._cut(head, needed_bytes)

    @property
    def lease_bytes_max(self) -> int:
        return min(LEASE_BYTES_MAX, self._payload_bytes)

    def _round(self, size_bytes: int) -> int:
        return -(-size_bytes // self.align_bytes) * self.align_bytes

    def _cut(self, head: Head, size_bytes: int) -> tuple[int, int]:
        length = min(self._round(size_bytes), head.end - head.position)
        offset = head.position
        head.position += length
        head.empty = False
        return offset, length

    def give_back(self, offset: int, length: int) -> None:
        """The unused end of a lease, of which nothing was published: it is handed out again."""
        start, end = self._round(offset), offset + length
        if start >= end or self.states[self._remnants.segment_of(start)] is not State.DATA:
            return
        for head in (self._head, self._cleaner_head):
            if head is not None and end == head.position:
                head.position = start
                before = self._remnants.take_before(start)
                if before is not None:
                    head.position = before
                return
        self._remnants.add(start, end - start)

    def _close_head(self, head: Head | None) -> None:
        """Its segment becomes an ordinary one."""
        if head is None:
            return
        if head.empty:
            self._set(head.index, State.DEAD)
        elif head.position < head.end:
            self._remnants.add(head.position, head.end - head.position)

    def close_cleaner_head(self) -> None:
        """The cleaner's segment becomes an ordinary one."""
        self._close_head(self._cleaner_head)
        self._cleaner_head = None

    def give_cleaner_room(self) -> bool:
        """What is left of the cleaner's segment goes to data, where another is ready for it; False:
        there is nothing, or it is needed.
        """
        if self.cleaner_room_bytes < LEASE_BYTES_LEAST or self.free_count < self.reserve:
            return False
        self.close_cleaner_head()
        return True

    def room_ahead(self) -> tuple[int, int] | None:
        """Media offset and length, up to 8 MiB, of what data will soon go to; each is told once."""
        size = self.superblock.segment_size_bytes
        indexes = self._ahead() if self.media.populates else []
        begin = length = 0
        for index in indexes:
            told = self._told_ahead.get(index, 0)
            start = self.superblock.segment_offset(index) + told
            if length == _AHEAD_BYTES_AT_ONCE or (length and start != begin + length):
                break
            if told < size:
                piece = min(_AHEAD_BYTES_AT_ONCE - length, size - told)
                self._told_ahead[index] = told + piece
                begin = begin or start
                length += piece
        return (begin, length) if length else None

    def _ahead(self) -> list[int]:
        """The segments that data will go to first."""
        indexes = self._free[: max(1, _AHEAD_BYTES // self.superblock.segment_size_bytes)]
        if self._head is not None:
            indexes.insert(0, self._head.index)
        return indexes

    @property
    def has_room_ahead(self) -> bool:
        """Whether :meth:`room_ahead` would tell some."""
        size, told = self.superblock.segment_size_bytes, self._told_ahead
        return self.media.populates and any(told.get(index, 0) < size for index in self._ahead())

    # --- freeing ----------------------------------------------------------------------------

    def collect_dead(self) -> int:
        """Ask the engine which segments lost their last extent; returns how many are dead."""
        for index in self.engine.dead_segments():
            heads = (self._head, self._cleaner_head)
            head = next((h for h in heads if h and h.index == index), None)
            if head is not None:
                head.empty = True
            elif self.states[index] is State.DATA:
                self._set(index, State.DEAD)
        return self.dead_count

    def root_is_durable(self, released: list[int], dead: list[int]) -> None:
        """A root is durable in both rings that names neither ``dead`` nor ``released`` segments."""
        self.releases += 1
        for index in (*released, *(index for index in dead if self.states[index] is State.DEAD)):
            self._set(index, State.FREE)

    def free_dead(self) -> None:
        """Every record is durable after which nothing refers to the dead segments."""
        self.root_is_durable([], self.dead_segments())

    # --- saying -----------------------------------------------------------------------------

    def shortfall(self, needed_bytes: int, kept_bytes: int = 0) -> NoSpaceError:
        """The error for so many bytes that find no room beside what is kept for others."""
        whole = max(0, self.reachable_count - self.reserve) * self._payload_bytes
        available = max(0, whole - kept_bytes)
        return NoSpaceError(
            f"no room for {format_size(needed_bytes)}: {format_size(available)} can be written",
            needed_bytes=needed_bytes,
            available_bytes=available,
        )
