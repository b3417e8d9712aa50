"""A program that stores file data by itself on a real mount: the whole protocol of
csrc/client/direct.h in Python, one step at a time, so that tests can stop between any two.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
from collections.abc import Sequence

from cxlfs.fuse import direct_wire
from cxlfs.fuse.direct_wire import Command, size_of
from cxlfs.native import crc32c
from cxlfs.native.direct import (
    LOCK_GAP_BYTES,
    ROW_BYTES,
    SLIP_ABSORBED_AT,
    SLIP_CLOSED,
    SLIP_COPYING_AT,
    SLIP_DESCRIPTOR_BYTES,
    SLIP_DESCRIPTORS,
    SLIP_DESCRIPTORS_AT,
)
from cxlfs.store.direct import Lease
from tests.support.direct_format import Row, by_chunks, chunk_seed, descriptor, rows_of

FLOCK = struct.Struct("hhqqi4x")
MARKS_FROM = 1 << 62
_SEQUENTIAL = 5

_atomic = ctypes.CDLL("libatomic.so.1")
_exchange, _add = _atomic.__atomic_compare_exchange_8, _atomic.__atomic_fetch_add_8
_exchange.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int, ctypes.c_int)
_exchange.restype = ctypes.c_bool
_add.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int)
_add.restype = ctypes.c_uint64


def ask(descriptor: int, command: int, request: bytes) -> bytes:
    """One request, filled up with zeros. Raises OSError."""
    data = bytearray(request.ljust(size_of(command), b"\0"))
    fcntl.ioctl(descriptor, command, data, True)
    return bytes(data)


def lease_request(
    wanted_bytes: int,
    file_offset: int = 0,
    *,
    count: int = 1,
    flags: int = 0,
    returned: Sequence[int] = (),
    watch: int = 0,
) -> bytes:
    """LEASE."""
    none = [0] * (direct_wire.LEASES_MAX - len(returned))
    head = wanted_bytes, file_offset, 0, watch, 0, count, flags, 0
    return direct_wire.LEASE_HEAD.pack(*head, *returned, *none)


def settle_request(*returned: int, flags: int = 0) -> bytes:
    """SETTLE of these leases."""
    none = [0] * (direct_wire.LEASES_MAX - len(returned))
    return direct_wire.SETTLE.pack(*returned, *none, flags, 0, 0, 0)


def leases_of(answer: bytes | memoryview) -> list[Lease]:
    """What LEASE was answered."""
    _, _, slip_offset, watch, slip_bytes, count, *_ = direct_wire.LEASE_HEAD.unpack_from(answer)
    head, row = direct_wire.LEASE_HEAD.size, direct_wire.LEASE_ROW
    rows = (row.unpack_from(answer, head + i * row.size) for i in range(count))
    return [Lease(*each, slip_offset, slip_bytes, watch) for each in rows]


def spans(rows: list[tuple[Row, list[int]]]) -> list[tuple[int, int]]:
    """What is locked of these: those with little between them as one."""
    joined: list[tuple[int, int]] = []
    starts = [(row.extent_media_offset + row.extent_offset, row.length_bytes) for row, _ in rows]
    for start, length in sorted(starts):
        end = start + length
        if joined and start - joined[-1][1] <= LOCK_GAP_BYTES:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


class Medium:
    """The medium of a mount, mapped by this process: ATTACH through any open file."""

    def __init__(self, descriptor: int) -> None:
        answer = ask(descriptor, Command.ATTACH, struct.pack("<I", direct_wire.VERSION))
        (
            self.version,
            self.granularity,
            self.size_bytes,
            *self.identity,
            self.chunk_bytes,
            self.flags,
            self.uuid,
            self.watch,
            path,
        ) = direct_wire.ATTACH.unpack(answer)
        self.path = path.rstrip(b"\0")
        self.descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(self.descriptor)
        assert [status.st_dev, status.st_ino, status.st_rdev] == self.identity
        self.bytes = mmap.mmap(self.descriptor, self.size_bytes)
        self._begin: ctypes.c_char | None = ctypes.c_char.from_buffer(self.bytes)
        self._base = ctypes.addressof(self._begin)
        self.lock(MARKS_FROM + os.getpid(), 1)

    def close(self) -> None:
        """With the mapping go all locks. Nothing of it may be used any more."""
        self._begin = None
        self.bytes.close()
        os.close(self.descriptor)

    def lock(self, offset: int, length: int) -> None:
        """Raises OSError."""
        question = FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, offset, length, 0)
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, question)

    def unlock(self, offset: int, length: int) -> None:
        question = FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, offset, length, 0)
        fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, question)

    def sees(self, watch: int) -> bool:
        """The daemon that has told of it still has it locked."""
        question = FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, watch, 1, 0)
        answer = fcntl.fcntl(self.descriptor, fcntl.F_OFD_GETLK, question)
        return bool(FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def word(self, offset: int) -> int:
        return int.from_bytes(self.bytes[offset : offset + 8], "little")

    def exchange(self, offset: int, before: int, after: int) -> bool:
        """Compare-and-swap of a word."""
        expected = ctypes.c_uint64(before)
        place = self._base + offset
        order = _SEQUENTIAL
        return bool(_exchange(place, ctypes.addressof(expected), after, order, order))

    def add(self, offset: int, change: int) -> None:
        _add(self._base + offset, change & (1 << 64) - 1, _SEQUENTIAL)


class DirectFile:
    """One writer, with one lease at a time, of one open file. The descriptor stays the caller's."""

    def __init__(self, descriptor: int, medium: Medium | None = None) -> None:
        self.descriptor = descriptor
        self.medium = medium if medium is not None else Medium(descriptor)
        self.lease: Lease | None = None
        self.length = 0
        """Bytes of the lease that are filled."""
        self._tail_crc = 0

    # --- room ---------------------------------------------------------------------------------

    def request_lease(self, wanted_bytes: int = 1 << 20, file_offset: int = 0) -> Lease:
        """LEASE alone. Raises OSError."""
        watch = self.lease.watch if self.lease is not None else 0
        request = lease_request(wanted_bytes, file_offset, watch=watch)
        [lease] = leases_of(ask(self.descriptor, Command.LEASE, request))
        return lease

    def lock(self, lease: Lease) -> bool:
        """Both locks; False: the slip is closed, and all of it may be somebody else's."""
        self.medium.lock(lease.media_offset, lease.length_bytes)
        self.medium.lock(lease.slip_offset, lease.slip_bytes)
        if self.medium.sees(lease.watch):
            return True
        self.medium.unlock(lease.media_offset, lease.length_bytes)
        self.medium.unlock(lease.slip_offset, lease.slip_bytes)
        return False

    def begin(self, wanted_bytes: int = 1 << 20) -> Lease:
        """LEASE, both locks, the watch. Raises OSError."""
        lease = self.request_lease(wanted_bytes)
        if not self.lock(lease):
            raise OSError(errno.ESTALE, "the slip was closed in between")
        self.lease, self.length, self._tail_crc = lease, 0, 0
        return lease

    @property
    def held(self) -> Lease:
        assert self.lease is not None
        return self.lease

    @property
    def is_closed(self) -> bool:
        return bool(self.medium.word(self.held.slip_offset) & SLIP_CLOSED)

    # --- a write, by its steps ----------------------------------------------------------------

    def count_copying(self, change: int) -> None:
        self.medium.add(self.held.slip_offset + SLIP_COPYING_AT, change)

    def store(self, data: bytes) -> tuple[int, int]:
        """Bytes behind those of the lease, with their checksums: where they begin in it, and the
        checksum of the last chunk as far as it goes.
        """
        lease, start = self.held, self.length
        assert start + len(data) <= lease.capacity_bytes
        for chunk, inside, piece in by_chunks(start, data, self.medium.chunk_bytes):
            seed = chunk_seed(lease.lease_id, chunk) if inside == 0 else self._tail_crc
            at = lease.media_offset + chunk * self.medium.chunk_bytes + inside
            self.medium.bytes[at : at + len(piece)] = piece
            self._tail_crc = crc32c(piece, seed)
            if inside + len(piece) == self.medium.chunk_bytes:
                at = lease.crc_offset + 4 * chunk
                self.medium.bytes[at : at + 4] = struct.pack("<I", self._tail_crc)
        self.length = start + len(data)
        return start, self._tail_crc if self.length % self.medium.chunk_bytes else 0

    def append(self, file_offset: int, start: int, length: int, tail_crc: int) -> bool:
        """One descriptor; False: the slip is closed."""
        slip = self.held.slip_offset
        while True:
            state = self.medium.word(slip)
            if state & SLIP_CLOSED:
                return False
            if state - self.medium.word(slip + SLIP_ABSORBED_AT) >= SLIP_DESCRIPTORS:
                self.settle()
                continue
            at = slip + SLIP_DESCRIPTORS_AT + state % SLIP_DESCRIPTORS * SLIP_DESCRIPTOR_BYTES
            row = descriptor(state, self.held.lease_id, file_offset, start, length, tail_crc)
            self.medium.bytes[at : at + len(row)] = row
            if self.medium.exchange(slip, state, state + 1):
                return True

    def write(self, file_offset: int, data: bytes) -> bool:
        """All steps, in the lease that is there; False: nothing of it counts."""
        self.count_copying(1)
        try:
            if self.is_closed:
                return False
            return self.append(file_offset, *self._stored(data))
        finally:
            self.count_copying(-1)

    def _stored(self, data: bytes) -> tuple[int, int, int]:
        start, tail_crc = self.store(data)
        return start, len(data), tail_crc

    def write_all(self, file_offset: int, data: bytes) -> None:
        """With as many leases as it takes."""
        done = 0
        while done < len(data):
            if self.lease is None or self.is_closed or self.length == self.held.capacity_bytes:
                if self.lease is not None and not self.is_closed:
                    self.settle(returned=self.held.lease_id)
                self.begin(len(data) - done)
            piece = data[done : done + self.held.capacity_bytes - self.length]
            if self.write(file_offset + done, piece):
                done += len(piece)

    def settle(self, *, returned: int = 0, done: bool = False) -> tuple[int, int]:
        """SETTLE: descriptors done, bytes of the file."""
        request = settle_request(returned, flags=direct_wire.SETTLE_DONE if done else 0)
        answer = ask(self.descriptor, Command.SETTLE, request)
        *_, absorbed, size_bytes = direct_wire.SETTLE.unpack(answer)
        if done:
            self.lease = None
        return absorbed, size_bytes

    # --- reading in place ---------------------------------------------------------------------

    def map(self) -> tuple[list[tuple[Row, list[int]]], int]:
        """Every row with its checksums, and the size of the file; locked and confirmed."""
        rows: list[tuple[Row, list[int]]] = []
        offset, size_bytes = 0, 1
        while offset < size_bytes:
            answer = ask(self.descriptor, Command.MAP, struct.pack("<Q", offset))
            _, offset, size_bytes, row_count, crc_count, _, watch = (
                direct_wire.MAP_HEAD.unpack_from(answer)
            )
            assert watch == 0, "it was not asked for"
            payload = answer[direct_wire.MAP_HEAD.size :]
            crcs = list(struct.unpack_from(f"<{crc_count}I", payload, row_count * ROW_BYTES))
            for row in rows_of(payload, row_count):
                rows.append((row, crcs[: row.crc_count]))
                del crcs[: row.crc_count]
            assert not crcs
        for start, end in spans(rows):
            self.medium.lock(start, end - start)
        ask(self.descriptor, Command.CONFIRM, b"")
        return rows, size_bytes

    def read_in_place(self) -> bytes:
        """The content, as MAP says where it lies, checked; it is unmapped afterwards."""
        rows, size_bytes = self.map()
        content = bytearray(size_bytes)
        for row, crcs in rows:
            self._check(row, crcs)
            at = row.extent_media_offset + row.extent_offset
            content[row.file_offset : row.file_offset + row.length_bytes] = self.medium.bytes[
                at : at + row.length_bytes
            ]
        self.unmap(rows)
        return bytes(content)

    def _check(self, row: Row, crcs: list[int]) -> None:
        for number, expected in enumerate(crcs, row.first_chunk):
            begin = number * self.medium.chunk_bytes
            end = min(begin + self.medium.chunk_bytes, row.extent_length)
            at = row.extent_media_offset
            seed = chunk_seed(row.extent_id, number)
            assert crc32c(self.medium.bytes[at + begin : at + end], seed) == expected

    def unmap(self, rows: list[tuple[Row, list[int]]]) -> None:
        for start, end in spans(rows):
            self.medium.unlock(start, end - start)
        ask(self.descriptor, Command.UNMAP, b"")
