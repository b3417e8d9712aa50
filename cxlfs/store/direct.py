"""Direct access: room on the medium that a program stores file data into by itself, and what of it
becomes content.

A *slip* is a piece of leased room that the program and this process both have mapped. The program
fills its leases front to back, and appends a descriptor to the slip for each write that is durable
already. Whoever is about to look at the file *absorbs* these first: they become live content as if
they had come by WRITE. Whoever wants the content to stand still *closes* the slip: what was
appended before counts, what comes later is refused by the word that both share.

Never here: the kernel's requests (``fuse``), who may ask, how descriptors are checked (the engine),
what publishes a file (``versions``).

Invariants
- A file has a slip only while its handle is the only open one; any other opener closes it first.
- Nothing of a lease is handed out again while somebody may store into it: not before its slip is
  closed and nobody is copying, or its lock is gone (``media/locks``). Until then it is kept apart.
- What a program appends is checked in full, is of its own leases, and concerns its own file alone:
  a wrong descriptor is a failed write of that file, and ends its slip.
- The slip itself stays apart until its program has said that it is done, or its lock is gone: it
  may count itself there at any time, before it looks whether the slip is closed.
- Each slip has a watch (``media/locks``), which ends before anybody looks whether its room is still
  locked: who locks room first, and finds the watch after that, has been seen, or will be.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cxlfs.errors import (
    BadHandleError,
    BusyError,
    CxlfsError,
    InvalidArgumentError,
    MediaError,
)
from cxlfs.format import layout
from cxlfs.native.direct import (
    SLIP_ABSORBED_AT,
    SLIP_BYTES,
    SLIP_CLOSED,
    SLIP_COPYING_AT,
    SLIP_STATE_AT,
)
from cxlfs.store.attachment import Attachments
from cxlfs.store.direct_room import Places, Room, Rooms
from cxlfs.store.handle import Handle, UnfinishedError
from cxlfs.store.mapped import MappedFiles, require_locked
from cxlfs.store.verified import VerifiedContents
from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    from cxlfs.store.files import Files
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

LEASE_BYTES_MIN = 256 * KIB
"""Less is not worth two requests: such a write goes through the kernel."""
GRANT_BYTES_MAX = 128 * MIB
"""Of all leases that one request gets: two requests cost as much as copying some 4 MiB."""
LEASES_MAX = 64
"""Of one file at a time: one for each thread that writes to it, and those that follow."""
REFERENCES_MIN = 4096
BLOCK_BYTES = 4096
"""A file may have so many references, and two for each block: a descriptor can make one of a byte,
where a write through the kernel carries its whole block along."""
_SLIP_HEAD_BYTES = 4096
_SLIP_BYTES_SMALL = 8 * KIB
"""In the small geometry of tests: room for 64 descriptors, without a second round."""


class Lease(NamedTuple):
    """Room for one writer: data from ``media_offset`` on; checksums. See csrc/client."""

    lease_id: int
    media_offset: int
    capacity_bytes: int
    crc_offset: int
    length_bytes: int
    slip_offset: int
    slip_bytes: int
    watch: int


class Settled(NamedTuple):
    absorbed: int
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DirectState:
    """What programs do by themselves just now, and have done since the store was opened.

    ``files`` and ``mapped_files``: open ones; ``verified_contents``: those that who maps them need
    not verify, for ``verified_for_s`` seconds; ``apart_bytes``: room that was taken back while
    somebody can still store into it; ``segments_held``: those that a program from before can.
    """

    files: int
    mapped_files: int
    verified_contents: int
    verified_for_s: int
    apart_bytes: int
    segments_held: int
    leases: int
    writes: int
    bytes_written: int


@dataclasses.dataclass(slots=True, eq=False)
class _Apart:
    """Room of a closed slip, ``leases`` and its own, that waits until nobody can store into it.
    ``watch``: 0 once it has ended; ``done``: its program has said that it is.
    """

    handle_id: int
    leases: list[Room]
    slip: Room
    watch: int
    done: bool = False

    @property
    def rooms(self) -> list[Room]:
        return [*self.leases, self.slip]


class _Slip:
    """One file that a program writes to by itself."""

    def __init__(
        self, direct: Direct, handle: Handle, room: Room, watch: int, places: Places
    ) -> None:
        self.direct = direct
        self.handle = handle
        self.room = room
        self.watch = watch
        self.state_at = room.media_offset + SLIP_STATE_AT
        self.leases: dict[int, Room] = {}
        self.unseen: list[int] = []
        """Leases of which nobody has looked yet whether they are locked."""
        self.places = places
        self.absorbed = 0

    def absorb(self) -> None:
        """What was appended is content. Raises nothing: see :meth:`Direct.absorb`."""
        self.direct.absorb(self)

    def close(self) -> None:
        """The program must ask again before it stores anything more."""
        self.direct.close_slip(self)


class Direct:
    """One for each store."""

    def __init__(self, volume: Volume, versions: Versions, files: Files) -> None:
        self.volume = volume
        self.versions = versions
        self.files = files
        self._slips: dict[int, _Slip] = {}
        self._apart: list[_Apart] = []
        self.attachments = Attachments(volume)
        self.verified = VerifiedContents(volume.health)
        self.mapped = MappedFiles(volume.media, files, self.verified)
        files.on_release = self._released
        files.before_change = self.mapped.changing
        payload_bytes = volume.superblock.segment_payload_bytes
        self._rooms = Rooms(volume)
        self._slip_bytes = SLIP_BYTES if payload_bytes >= 8 * SLIP_BYTES else _SLIP_BYTES_SMALL
        self._lease_bytes_min = min(LEASE_BYTES_MIN, payload_bytes // 8)
        self.leases_given = 0
        self.descriptors = 0
        self.absorbed_bytes = 0

    # --- saying -------------------------------------------------------------------------------

    def is_open(self, ino: int) -> bool:
        """A program writes to this file by itself."""
        return ino in self._slips

    def close(self, ino: int) -> None:
        """Take in what was appended, and make the program ask again."""
        slip = self._slips.get(ino)
        if slip is not None:
            slip.close()

    @property
    def apart_bytes(self) -> int:
        """Room that was taken back, and that somebody may still store into."""
        return sum(room.length_bytes for apart in self._apart for room in apart.rooms)

    def describe(self) -> DirectState:
        return DirectState(
            files=len(self._slips),
            mapped_files=self.mapped.count,
            verified_contents=self.verified.count,
            verified_for_s=int(self.verified.for_seconds),
            apart_bytes=self.apart_bytes,
            segments_held=self.volume.space.held_count,
            leases=self.leases_given,
            writes=self.descriptors,
            bytes_written=self.absorbed_bytes,
        )

    # --- giving room ----------------------------------------------------------------------------

    def lease(
        self,
        handle_id: int,
        wanted_bytes: int,
        *,
        file_offset: int = 0,
        count_max: int = 1,
        returned_lease_ids: Sequence[int] = (),
        watch: int | None = None,
    ) -> list[Lease]:
        """Room for what is about to be written through the handle, from ``file_offset`` on, with
        which its change begins: one lease at least, and more until they have ``wanted_bytes``, to
        be filled in this order. Nobody stores there before all of it, and the slip, is locked, and
        the watch was found after that. ``returned_lease_ids``: nobody stores into these any more.
        ``watch``: that of the slip that the program has, 0: none. Any other one is closed: it is of
        another process that shares the open file, and two may not append to one.

        Raises BadHandleError, BusyError (the file has another opener, or a write to it failed),
        NoSpaceError (a write through the kernel makes room, or says how much is missing),
        ReadOnlyError, UnfinishedError (asked again, it goes on), InvalidArgumentError (what was
        given before is not locked; the slip is closed).
        """
        handle = self.files.get(handle_id)
        inode = handle.inode
        if not handle.writable:
            raise BadHandleError("not open for writing")
        self.volume.require_writable()
        if inode.handles != 1:
            raise BusyError("somebody else has the file open")
        slip = self._slips.get(inode.ino)
        if slip is not None and watch not in (None, slip.watch):
            slip.close()
        if self.versions.prepare_change(inode.ino):
            raise UnfinishedError
        self.files.begin_change(handle)
        if not self.files.may_write_alone(handle_id):
            raise BusyError("a write to the file has failed")
        slip = self._slips.get(inode.ino)
        if slip is None:
            slip = self._open_slip(handle)
        else:
            self._return(slip, returned_lease_ids)
            self._require_locked(slip)
        count_max = min(count_max, LEASES_MAX - len(slip.leases))
        if count_max <= 0:
            raise BusyError(f"{LEASES_MAX} leases of the file are in use")
        rooms = self._rooms.take_some(
            self._lease_bytes_min,
            min(wanted_bytes, GRANT_BYTES_MAX),
            kept_bytes=self.versions.promises.bytes_open(inode),
            count_max=count_max,
            file_offset=file_offset,
            places=slip.places,
        )
        slip.leases.update((room.lease_id, room) for room in rooms)
        slip.unseen = [room.lease_id for room in rooms]
        self.leases_given += len(rooms)
        return [
            Lease(
                room.lease_id,
                room.media_offset,
                room.data.capacity_bytes,
                room.data.crc_offset,
                room.length_bytes,
                slip.room.media_offset,
                slip.room.length_bytes,
                slip.watch,
            )
            for room in rooms
        ]

    def _return(self, slip: _Slip, lease_ids: Sequence[int]) -> None:
        """What was appended to these is absorbed already."""
        rooms = [room for each in lease_ids if (room := slip.leases.pop(each, None)) is not None]
        self._rooms.give_back(rooms)
        slip.places.give_back_slots(rooms)

    def _open_slip(self, handle: Handle) -> _Slip:
        inode = handle.inode
        self.versions.leases.close(inode.content)  # what was given ahead of writes by the kernel
        kept_bytes = self.versions.promises.bytes_open(inode)
        slot_bytes = self._rooms.slot_bytes
        room_bytes = self._slip_bytes + LEASES_MAX * slot_bytes
        room = self._rooms.take(room_bytes, room_bytes, kept_bytes=kept_bytes)
        watch = self.volume.media.begin_watch()
        if watch is None:
            self._rooms.give_back([room])
            raise BusyError("no other process would see that the slip is watched")
        self.volume.media.store(room.media_offset, bytes(_SLIP_HEAD_BYTES))
        places = Places(room.media_offset + self._slip_bytes, slot_bytes, LEASES_MAX)
        slip = _Slip(self, handle, room, watch, places)
        self._slips[inode.ino] = slip
        inode.direct = slip
        if inode.port is not None:
            inode.port.ask(True)  # noqa: FBT003  nothing else can be meant
        return slip

    def _require_locked(self, slip: _Slip) -> None:
        """Of what was given last, but for what came back: a program that stores where nothing says
        so gets no more. Raises InvalidArgumentError; the slip is closed.
        """
        rooms = [slip.leases[each] for each in slip.unseen if each in slip.leases]
        slip.unseen = []
        places = [(room.media_offset, room.length_bytes) for room in (slip.room, *rooms)]
        try:
            require_locked(self.volume.media, places)
        except InvalidArgumentError:
            slip.close()
            raise

    # --- taking in ------------------------------------------------------------------------------

    def settle(
        self, handle_id: int, returned_lease_ids: Sequence[int] = (), *, done: bool = False
    ) -> Settled:
        """What was appended is content when this returns. ``returned_lease_ids``: nobody stores
        into these any more; ``done``: nor into any other. Raises BadHandleError.
        """
        handle = self.files.get(handle_id)  # which absorbs
        inode = handle.inode
        slip = self._slips.get(inode.ino)
        absorbed = 0
        if slip is not None:
            absorbed = slip.absorbed
            self._return(slip, returned_lease_ids)
            if done:
                slip.close()
                absorbed = slip.absorbed
        if done:
            for apart in [each for each in self._apart if each.handle_id == handle_id]:
                apart.done = True
                self._give_back_or_keep(apart)
        return Settled(absorbed, inode.content.size)

    def absorb(self, slip: _Slip) -> None:
        """Take in what was appended so far. What is wrong with it counts as a failed write, which
        the program's close will tell, and ends the slip.
        """
        try:
            state = self.volume.media.load_u64(slip.state_at)
            if state & SLIP_CLOSED:  # by its program, which is done
                self.close_slip(slip)
                return
            self._absorb_until(slip, state)
        except CxlfsError as error:
            self._spoiled(slip, error)
            return
        content = slip.handle.inode.content
        if content.ref_count > REFERENCES_MIN + 2 * (content.size // BLOCK_BYTES):
            self.close_slip(slip)  # what is written in shreds goes through the kernel

    def _absorb_until(self, slip: _Slip, appended: int) -> None:
        if appended == slip.absorbed:
            return
        inode = slip.handle.inode
        result = inode.content.absorb(
            slip.room.media_offset,
            slip.absorbed,
            appended,
            [room.data for room in slip.leases.values()],
            file_bytes_max=layout.FILE_SIZE_MAX,
        )
        slip.absorbed += result.count
        if result.count:
            self.descriptors += result.count
            self.absorbed_bytes += result.bytes
            slip.handle.wrote = True
            inode.mtime_ns = inode.ctime_ns = self.volume.now()
            self.volume.media.store_u64(slip.room.media_offset + SLIP_ABSORBED_AT, slip.absorbed)
        if result.error is not None and result.refused:
            raise InvalidArgumentError(f"a program's word of what it wrote: {result.error}")
        if result.error is not None:  # memory was short, or the media failed: once more, or raise
            self._absorb_until(slip, appended)

    def _spoiled(self, slip: _Slip, error: CxlfsError) -> None:
        inode = slip.handle.inode
        self._end(slip)
        with contextlib.suppress(CxlfsError):
            # A word of which nobody knows what it says of the file: all of it is in doubt.
            self.files.change_failed(slip.handle, 0, max(inode.content.size, 1), error)
        self.volume.event("direct-write", error.message, ino=inode.ino)

    # --- taking back ------------------------------------------------------------------------------

    def close_slip(self, slip: _Slip) -> None:
        """What was appended before this counts; nothing comes after it."""
        try:
            before = self.volume.media.or_u64(slip.state_at, SLIP_CLOSED)
            self._absorb_until(slip, before & ~SLIP_CLOSED)
        except CxlfsError as error:
            self._spoiled(slip, error)
        else:
            self._end(slip)

    def _end(self, slip: _Slip) -> None:
        """Give back what nobody stores into; the rest waits."""
        inode = slip.handle.inode
        if self._slips.get(inode.ino) is not slip:
            return
        del self._slips[inode.ino]
        inode.direct = None
        if inode.port is not None:
            inode.port.ask(False)  # noqa: FBT003
        with contextlib.suppress(MediaError):
            self.volume.media.or_u64(slip.state_at, SLIP_CLOSED)
        self._rooms.drop_offcut(slip.places)
        apart = _Apart(slip.handle.id, [*slip.leases.values()], slip.room, slip.watch)
        self._apart.append(apart)
        self._give_back_or_keep(apart)
        kept = (self._rooms.keep(room) for room in apart.leases)
        apart.leases = [room for room in kept if room is not None]

    def _give_back_or_keep(self, apart: _Apart) -> None:
        if self._try_give_back(apart):
            self._apart.remove(apart)

    def _try_give_back(self, apart: _Apart) -> bool:
        """Leases, once nobody copies there, or nobody can; then the slip, where the program may
        count itself at any time: once it has said that it is done, or cannot. True: that was all.
        """
        if apart.watch and not self._end_watch(apart):
            return False
        if apart.leases and (apart.done or not self._copies(apart) or not self._is_locked(apart)):
            self._rooms.give_back(apart.leases)
            apart.leases = []
        if apart.leases or not (apart.done or not self._is_locked(apart)):
            return False
        self._rooms.give_back([apart.slip])
        return True

    def _end_watch(self, apart: _Apart) -> bool:
        """From here on nobody begins to store there. False: it may be found still."""
        with contextlib.suppress(MediaError):
            self.volume.media.end_watch(apart.watch)
            apart.watch = 0
        return apart.watch == 0

    def _copies(self, apart: _Apart) -> bool:
        try:
            return self.volume.media.load_u64(apart.slip.media_offset + SLIP_COPYING_AT) != 0
        except MediaError:
            return True

    def _is_locked(self, apart: _Apart) -> bool:
        places = ((room.media_offset, room.length_bytes) for room in apart.rooms)
        return any(self.volume.media.locked_ranges(at, at + size) for at, size in places)

    def close_all(self) -> None:
        """Room is needed: whoever writes on asks for some again."""
        for slip in list(self._slips.values()):
            slip.close()
        self.maintain()

    def maintain(self) -> bool:
        """Look again at what waits; True: some room came back."""
        waiting_bytes = self.apart_bytes
        for apart in list(self._apart):
            self._give_back_or_keep(apart)
        came_back = self.volume.space.release_held() | self.mapped.maintain()
        return came_back or self.apart_bytes < waiting_bytes

    def _released(self, handle: Handle) -> None:
        """The handle's last descriptor is gone."""
        slip = self._slips.get(handle.inode.ino)
        if slip is not None and slip.handle is handle:
            slip.close()
        for apart in [each for each in self._apart if each.handle_id == handle.id]:
            self._give_back_or_keep(apart)
        self.mapped.unmap(handle.id)

    def abandon(self) -> None:
        """Before the engine is closed: nothing of this process refers to its extents."""
        self.mapped.abandon()
        self.attachments.abandon()
        watches = [slip.watch for slip in self._slips.values()]
        for watch in (*watches, *(apart.watch for apart in self._apart if apart.watch)):
            with contextlib.suppress(MediaError):  # it ends with this process's descriptor
                self.volume.media.end_watch(watch)
        for slip in self._slips.values():
            slip.handle.inode.direct = None
        self._slips.clear()
        self._apart.clear()
