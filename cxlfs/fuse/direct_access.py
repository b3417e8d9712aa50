"""Requests of programs that store file data by themselves (csrc/client/direct.h), and what the
kernel is told of files that grow without it.

They come as ioctls on an open file: the kernel says which mount, which open file and who. What they
mean for contents is the store's (``store/direct``).

The kernel takes a file's size from answers and from writes that go through it, and appends at the
size that it knows. Of a file whose data goes past it
- the attributes are not kept (0 seconds) as long as a program writes to it by itself;
- whoever opens it next is told ESTALE, once: open(2) walks the path again then, and asks for fresh
  attributes of each name (fs/namei.c, LOOKUP_REVAL), after which it is a file like any other. Not
  where the kernel has asked meanwhile;
- who appends does it where the file ends, not where the kernel believes that it does, until the
  kernel has been told attributes and then appends at the end or behind it: it knows the size. From
  there on each write goes where the kernel says, since one of io_uring or libaio can be several
  requests, which come in any order. A write with RWF_NOAPPEND (Linux 6.9) cannot be told from one
  that appends, and goes to the end as well.

Never here: the byte layout (``direct_wire``), contents, leases (the store), errno values.

Invariants
- Each of these requests is from root or from the user of this process, who may open the medium.
- Who was given room is a writer of the handle, before the answer.
- A file that somebody is about to open gets no new slip before he has, or has given up.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import (
    BadHandleError,
    BusyError,
    InvalidArgumentError,
    NotPermittedError,
    StaleError,
    UnsupportedOperationError,
)
from cxlfs.fuse import direct_wire
from cxlfs.fuse.attributes import CACHE_SECONDS
from cxlfs.fuse.direct_wire import Command

if TYPE_CHECKING:
    from cxlfs.fuse.handles import Caller, OpenFile, OpenFiles
    from cxlfs.fuse.page_cache import PageCache
    from cxlfs.fuse.processes import ProcessTable
    from cxlfs.store import Store

OPENING_SECONDS = 1.0
"""Between ESTALE and the second OPEN: two requests, which take a tenth of a millisecond."""


@dataclasses.dataclass(slots=True)
class _Grown:
    """A file that was written past the kernel since the kernel knows it. ``is_seen``: the kernel
    was told attributes since; ``told``: the thread that got ESTALE; ``opening_until``: it opens;
    ``known_from``: what appends at this offset or behind it does so where the kernel says.
    """

    is_seen: bool = False
    told: int | None = None
    opening_until: float = 0.0
    known_from: int = sys.maxsize


class DirectAccess:
    """One for each mount. The lock of the store is held by whoever calls. ``concerns_others``:
    each write through a handle must be seen.
    """

    def __init__(
        self,
        store: Store,
        files: OpenFiles,
        processes: ProcessTable,
        page_cache: PageCache,
        concerns_others: Callable[[OpenFile], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._slips = store.direct
        self._files = files
        self._processes = processes
        self._page_cache = page_cache
        self._concerns_others = concerns_others
        self._clock = clock
        self._grown: dict[int, _Grown] = {}
        self._answers: dict[int, Callable[[Caller, int, bytes | memoryview], bytes]] = {
            Command.ATTACH: self._attach,
            Command.LEASE: self._lease,
            Command.CONFIRM: self._confirm,
            Command.SETTLE: self._settle,
            Command.MAP: self._map,
            Command.UNMAP: self._unmap,
            Command.VERIFY: self._verify,
        }

    # --- requests -----------------------------------------------------------------------------

    def answer(self, command: int, handle: int, caller: Caller, data: bytes | memoryview) -> bytes:
        """As many bytes as were asked.

        Raises NotPermittedError, BadHandleError, BusyError, InvalidArgumentError,
        UnsupportedOperationError, NoSpaceError, ReadOnlyError, UnfinishedError.
        """
        if caller.uid not in (0, os.geteuid()):
            raise NotPermittedError("only who may open the medium stores data by himself")
        answer = self._answers.get(command)
        if answer is None or len(data) != direct_wire.size_of(command):
            raise InvalidArgumentError(f"request {command:#x} with {len(data)} bytes")
        self._files.get(handle)
        return answer(caller, handle, data)

    def _attach(self, _caller: Caller, _handle: int, data: bytes | memoryview) -> bytes:
        version, *_ = direct_wire.ATTACH.unpack(data)
        if version != direct_wire.VERSION:
            raise UnsupportedOperationError(f"direct access of version {version}")
        medium = self._slips.attachments.attach()
        if len(medium.path) > direct_wire.PATH_BYTES_MAX:
            raise UnsupportedOperationError("the path of the medium is too long to be told")
        return direct_wire.ATTACH.pack(
            direct_wire.VERSION,
            medium.granularity,
            medium.media_bytes,
            medium.device,
            medium.inode,
            medium.special_device,
            medium.chunk_bytes,
            direct_wire.ATTACH_SYNCHRONOUS if medium.is_synchronous else 0,
            medium.uuid,
            medium.watch,
            medium.path,
        )

    def _lease(self, caller: Caller, handle: int, data: bytes | memoryview) -> bytes:
        wanted_bytes, file_offset, _, watch, _, count_max, flags, rest, *returned = (
            direct_wire.LEASE_HEAD.unpack_from(data)
        )
        if flags & ~direct_wire.LEASE_AHEAD or rest:
            raise InvalidArgumentError(f"flags not known: {flags:#x}, {rest:#x}")
        if not 1 <= count_max <= direct_wire.LEASES_MAX:
            raise InvalidArgumentError(f"{count_max} leases at once")
        file = self._files.get(handle)
        if not file.writable:
            raise BadHandleError("not open for writing")
        if file.appends or not file.direct or self._concerns_others(file):
            raise BusyError("writes to this file are the kernel's")
        grown = self._grown.get(file.ino)
        if grown is not None and self._clock() < grown.opening_until:
            raise BusyError("somebody is about to open the file")
        leases = self._slips.lease(
            handle,
            wanted_bytes,
            file_offset=file_offset,
            count_max=count_max,
            returned_lease_ids=returned,
            watch=watch,
        )
        writer = self._processes.identify(caller.tid)
        if writer is not None:
            file.note_writer(writer, self._processes.is_alive)
        self._page_cache.written_directly(file.ino)
        self._grown[file.ino] = _Grown()
        slip = leases[0].slip_offset, leases[0].watch, leases[0].slip_bytes
        given = file.ino, file_offset, *slip, len(leases), flags, 0
        head = direct_wire.LEASE_HEAD.pack(*given, *returned)
        rows = b"".join(direct_wire.LEASE_ROW.pack(*lease[:5]) for lease in leases)
        return (head + rows).ljust(len(data), b"\0")

    def _confirm(self, _caller: Caller, handle: int, data: bytes | memoryview) -> bytes:
        self._slips.mapped.confirm(handle)
        return bytes(data)

    def _settle(self, _caller: Caller, handle: int, data: bytes | memoryview) -> bytes:
        *returned, flags, _, _, _ = direct_wire.SETTLE.unpack(data)
        if flags & ~direct_wire.SETTLE_DONE:
            raise InvalidArgumentError(f"flags not known: {flags:#x}")
        done = bool(flags & direct_wire.SETTLE_DONE)
        settled = self._slips.settle(handle, returned, done=done)
        return direct_wire.SETTLE.pack(*returned, flags, 0, *settled)

    def _map(self, _caller: Caller, handle: int, data: bytes | memoryview) -> bytes:
        offset, *_, flags, _ = direct_wire.MAP_HEAD.unpack_from(data)
        if flags & ~(direct_wire.MAP_WATCH | direct_wire.MAP_VERIFIED):
            raise InvalidArgumentError(f"flags not known: {flags:#x}")
        part = self._slips.mapped.map(
            handle,
            offset,
            direct_wire.MAP_PAYLOAD_BYTES,
            watched=bool(flags & direct_wire.MAP_WATCH),
            shared=bool(flags & direct_wire.MAP_VERIFIED),
        )
        said = direct_wire.MAP_WATCH if part.watch else 0
        said |= direct_wire.MAP_VERIFIED if part.is_verified else 0
        said |= direct_wire.MAP_SHARED if part.is_shared else 0
        head = direct_wire.MAP_HEAD.pack(
            offset,
            part.next_offset,
            part.size_bytes,
            part.row_count,
            part.crc_count,
            said,
            part.watch,
        )
        return head + part.payload.ljust(direct_wire.MAP_PAYLOAD_BYTES, b"\0")

    def _unmap(self, _caller: Caller, handle: int, _data: bytes | memoryview) -> bytes:
        self._slips.mapped.unmap(handle)
        return direct_wire.UNMAP.pack(0)

    def _verify(self, _caller: Caller, handle: int, data: bytes | memoryview) -> bytes:
        offset, length_bytes, _, _, flags = direct_wire.VERIFY.unpack(data)
        if flags & ~direct_wire.VERIFY_WRONG:
            raise InvalidArgumentError(f"flags not known: {flags:#x}")
        wrong = bool(flags & direct_wire.VERIFY_WRONG)
        piece = self._slips.mapped.verify(handle, (offset, length_bytes), wrong=wrong)
        said = direct_wire.MAP_VERIFIED if piece.done else 0
        return direct_wire.VERIFY.pack(offset, length_bytes, piece.offset, piece.length_bytes, said)

    # --- what the kernel is told of such files ------------------------------------------------

    def before_opening(self, ino: int, tid: int) -> None:
        """Somebody is about to open a file: from here on no program is alone with it. Raises
        StaleError where the kernel may not know its size: not twice, so that he who has come by no
        name (/proc/PID/fd) gets in.
        """
        grown = self._grown.get(ino)
        if grown is None:
            return
        self._slips.close(ino)
        if grown.is_seen or grown.told == tid:
            grown.opening_until = 0.0
            return
        grown.told = tid
        grown.opening_until = self._clock() + OPENING_SECONDS
        raise StaleError("the file has grown")

    def has_grown(self, ino: int) -> bool:
        """The kernel may not know the size of this file."""
        return ino in self._grown

    def told(self, ino: int) -> int:
        """How long the kernel may keep the attributes of a file that has grown; they are in its
        hands before anybody else is served.
        """
        if self._slips.is_open(ino):
            return 0
        self._grown[ino].is_seen = True
        return CACHE_SECONDS

    def cache_seconds(self, ino: int) -> int:
        """The same for an answer that comes later: what it says may be older by then, and of some
        answers the kernel believes it all the same (SETATTR, LINK).
        """
        return 0 if self._files.has_writable(ino) else CACHE_SECONDS

    def appends_at(self, handle: int, offset: int) -> int | None:
        """Where a write through a handle goes that appends, if the kernel may not know: it says at
        ``offset``.
        """
        file = self._files.get(handle)
        grown = self._grown.get(file.ino)
        if not file.appends or grown is None:
            return None
        end = self._store.get_attributes(file.ino).size
        if grown.is_seen and offset >= end:
            grown.known_from = min(grown.known_from, end)
        return end if offset < grown.known_from else None

    def forgotten(self, ino: int) -> None:
        """The kernel has dropped the inode, and what it believed of it."""
        self._grown.pop(ino, None)
