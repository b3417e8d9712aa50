"""A program that stores file data by itself beside a store in the same process, stage by stage, so
that tests can stop it between any two; and the kernel's word for what it has locked.

Its stores are done in a thread of its own: a fence of the store's thread does not cover them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cxlfs.media import Media
from cxlfs.native import Granularity
from cxlfs.native.direct import (
    SLIP_ABSORBED_AT,
    SLIP_CLOSED,
    SLIP_COPYING_AT,
    SLIP_DESCRIPTOR_BYTES,
    SLIP_DESCRIPTORS,
    SLIP_DESCRIPTORS_AT,
)
from cxlfs.store import Store
from cxlfs.store.direct import Lease
from tests.support.direct_format import by_chunks, chunk_seed, descriptor

T = TypeVar("T")


class Watches:
    """Files that are watched, in the place of the kernel's locks, for one medium."""

    def __init__(self, media: Media) -> None:
        self.held: set[int] = set()
        self._next = 1 << 61
        media.begin_watch = self._begin  # type: ignore[method-assign]
        media.end_watch = self.held.discard  # type: ignore[method-assign]

    def _begin(self) -> int:
        self._next += 1
        self.held.add(self._next)
        return self._next


class Locks:
    """Locked ranges by owner, and watches, in the place of the kernel's, for one medium."""

    def __init__(self, media: Media) -> None:
        self.of: dict[object, list[tuple[int, int]]] = {}
        self.watches = Watches(media)
        media.locked_ranges = self.locked_ranges  # type: ignore[method-assign]

    def take(self, owner: object, offset: int, length: int) -> None:
        self.of.setdefault(owner, []).append((offset, offset + length))

    def drop(self, owner: object) -> None:
        """Its last mapping is gone."""
        self.of.pop(owner, None)

    def locked_ranges(self, start: int = 0, end: int | None = None) -> list[tuple[int, int]]:
        """As ``Media.locked_ranges``."""
        stop = (1 << 62) if end is None else end
        joined: list[tuple[int, int]] = []
        for low, high in sorted(r for ranges in self.of.values() for r in ranges):
            first, last = max(low, start), min(high, stop)
            if first >= last:
                continue
            if joined and first <= joined[-1][1]:
                joined[-1] = joined[-1][0], max(last, joined[-1][1])
            else:
                joined.append((first, last))
        return joined


class Program:
    """One writer of one open file. Its files are written front to back or anywhere."""

    def __init__(self, store: Store, handle: int, locks: Locks) -> None:
        self.store = store
        self.media = store.media
        self.chunk_bytes = store.superblock.chunk_bytes
        self.handle = handle
        self.locks = locks
        self.lease: Lease | None = None
        self.length = 0
        """Bytes of the lease's extent so far."""
        self.tail_crc = 0
        self._thread = ThreadPoolExecutor(1)

    def apart(self, action: Callable[[], T]) -> T:
        """In this program's own thread."""
        return self._thread.submit(action).result()

    # --- room -----------------------------------------------------------------------------------

    def ask(self, wanted_bytes: int = 4096) -> Lease:
        """LEASE, the lock, the watch. Raises as ``Direct.lease``."""
        [lease] = self.store.direct.lease(self.handle, wanted_bytes)
        taken = self.take(lease)
        assert taken, "nobody has closed the slip in between"
        return lease

    def take(self, lease: Lease) -> bool:
        """The lock, the watch, and what is written next goes there; False: it may be gone."""
        before = list(self.locks.of.get(self, ()))
        self.locks.take(self, lease.media_offset, lease.length_bytes)
        self.locks.take(self, lease.slip_offset, lease.slip_bytes)
        if lease.watch not in self.locks.watches.held:
            self.locks.of[self] = before
            return False
        self.lease, self.length = lease, 0
        return True

    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    def word(self, at: int) -> int:
        return self.media.load_u64(self.held().slip_offset + at)

    def count_copying(self, change: int) -> None:
        at = self.held().slip_offset + SLIP_COPYING_AT
        self.media.store_u64(at, self.media.load_u64(at) + change)

    # --- a write in stages ------------------------------------------------------------------------

    def copy(self, data: bytes, *, fence: bool = True) -> tuple[int, int]:
        """Bytes behind the end of the lease, durable unless ``fence`` is left out; where they begin
        in the extent, and the checksum of the last chunk as far as it goes.
        """
        return self.apart(lambda: self._copy(data, fence=fence))

    def _copy(self, data: bytes, *, fence: bool) -> tuple[int, int]:
        lease = self.held()
        start = self.length
        assert start + len(data) <= lease.capacity_bytes
        crc = self.tail_crc
        for chunk, inside, piece in by_chunks(start, data, self.chunk_bytes):
            seed = chunk_seed(lease.lease_id, chunk) if inside == 0 else crc
            at = lease.media_offset + chunk * self.chunk_bytes + inside
            crc = self.media.copy_crc32c(at, piece, seed)
            if inside + len(piece) == self.chunk_bytes:
                self.media.store(lease.crc_offset + chunk * 4, struct.pack("<I", crc))
        if fence and self.media.granularity is not Granularity.PAGE:
            self.media.fence()
        self.length, self.tail_crc = start + len(data), crc
        return start, 0 if self.length % self.chunk_bytes == 0 else crc

    def append(self, offset: int, start: int, length: int, tail_crc: int) -> bool:
        """Say it; False: the slip is closed."""
        return self.apart(lambda: self._append(offset, start, length, tail_crc))

    def _append(self, offset: int, start: int, length: int, tail_crc: int) -> bool:
        lease = self.held()
        state = self.word(0)
        if state & SLIP_CLOSED or state - self.word(SLIP_ABSORBED_AT) >= SLIP_DESCRIPTORS:
            return False
        at = (
            lease.slip_offset
            + SLIP_DESCRIPTORS_AT
            + state % SLIP_DESCRIPTORS * SLIP_DESCRIPTOR_BYTES
        )
        row = descriptor(state, lease.lease_id, offset, start, length, tail_crc)
        self.media.store(at, row)
        self.media.store_u64(lease.slip_offset, state + 1)
        return True

    def write(self, offset: int, data: bytes) -> bool:
        """All stages; False: the slip is closed, and nothing of it counts."""
        if self.word(0) & SLIP_CLOSED:
            return False
        self.count_copying(1)
        start, tail_crc = self.copy(data)
        appended = self.append(offset, start, len(data), tail_crc)
        self.count_copying(-1)
        return appended

    def end(self) -> None:
        """It has nothing more to append."""
        self.media.or_u64(self.held().slip_offset, SLIP_CLOSED)

    def die(self) -> None:
        """SIGKILL: its mappings are gone, and with them its locks."""
        self.locks.drop(self)
        self._thread.shutdown()
