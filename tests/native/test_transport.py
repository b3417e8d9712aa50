"""The transport over a socket pair: READ and WRITE served or handed over, requests passed on."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import threading
from collections.abc import Iterator

import pytest

from cxlfs.errors import InvariantError
from cxlfs.native.transport import UPCALL_LEASE, Port, Worker
from tests.support.extents import Room, pattern, room
from tests.support.fuse_socket import (
    BATCH_FORGET,
    FILE_BYTES_MAX,
    FORGET,
    HEADER,
    IN,
    INIT,
    INTERRUPT,
    NOTIFY_REPLY,
    READ,
    READDIR,
    READER,
    REPLY,
    REQUEST_BYTES_MAX,
    SECONDS_MAX,
    TID,
    WRITE,
    WRITER,
    FuseSocket,
    accept,
    fuse_socket,
)

GETATTR, STATFS = 3, 17


def written(size: int) -> bytes:
    return struct.pack("=II", size, 0)


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


@pytest.fixture
def fuse(place: Room) -> Iterator[FuseSocket]:
    content = place.new_map(capacity=200_000)
    with fuse_socket(place.engine, content) as made:
        yield made
    assert not made.errors


# --- WRITE ----------------------------------------------------------------------------------------


def test_an_allowed_writer_needs_no_call(fuse: FuseSocket) -> None:
    data = pattern(70_000, 1)
    assert fuse.write(100, data) == (2, 0, written(len(data)))
    assert fuse.write(70_100, b"more").data == written(4)
    assert fuse.content.read(0, 1 << 20) == bytes(100) + data + b"more"
    assert fuse.no_upcall()
    counts = fuse.transport.statistics()
    assert (counts.writes, counts.write_bytes, counts.upcalls) == (2, 70_004, 0)


@pytest.mark.parametrize(("handle", "pid"), [(WRITER, TID + 1), (WRITER, 0), (99, TID)])
def test_who_is_not_known_makes_a_call(fuse: FuseSocket, handle: int, pid: int) -> None:
    assert fuse.write(5, b"data", handle=handle, pid=pid).error == errno.ENOSYS
    upcall = fuse.upcall()
    assert upcall[0] == WRITE
    assert upcall.arguments == IN.pack(handle, 5, 4) + b"data"
    assert (upcall.pid, upcall.done) == (pid, 0)
    assert fuse.content.size == 0


def test_a_permission_ends_when_the_port_is_stopped(fuse: FuseSocket) -> None:
    fuse.write(0, b"one")
    fuse.port.stop()
    assert fuse.write(0, b"two").error == errno.ENOSYS
    assert fuse.upcall().done == 0
    assert fuse.content.read(0, 3) == b"one"
    fuse.transport.allow_writes(WRITER, TID)
    assert fuse.write(0, b"two").error == 0
    assert fuse.no_upcall()


def test_each_of_many_threads_is_remembered_but_the_first(fuse: FuseSocket) -> None:
    for pid in range(TID, TID + 9):
        fuse.transport.allow_writes(WRITER, pid)
    assert [fuse.write(0, b"x", pid=pid).error for pid in range(TID, TID + 9)] == [
        errno.ENOSYS,
        *[0] * 8,
    ]


def test_a_used_up_lease_makes_a_call_with_what_is_done(place: Room) -> None:
    content = place.new_map(capacity=16_384)
    data = pattern(40_000, 2)
    with fuse_socket(place.engine, content) as fuse:
        fuse.on_upcall = accept
        assert fuse.write(0, data).data == written(16_384)
        upcall = fuse.upcall()
        assert (upcall.opcode, upcall.done) == (WRITE, 16_384)
        assert upcall.arguments[IN.size :] == data
        assert content.read(0, 1 << 20) == data[:16_384]


def test_the_next_lease_takes_over_in_mid_write(place: Room) -> None:
    content = place.new_map(capacity=16_384)
    content.attach_lease(place.open_extent(65_536))
    data = pattern(40_000, 3)
    with fuse_socket(place.engine, content) as fuse:
        assert fuse.write(0, data).data == written(len(data))
        assert fuse.no_upcall() or fuse.upcall().opcode == UPCALL_LEASE
        assert content.read(0, 1 << 20) == data


def test_a_lease_is_asked_for_in_time(fuse: FuseSocket) -> None:
    fuse.write(0, bytes(90_000))
    assert fuse.no_upcall()
    fuse.write(0, bytes(20_000))
    assert fuse.upcall().opcode == UPCALL_LEASE


def test_no_file_grows_beyond_its_limit(fuse: FuseSocket) -> None:
    fuse.write(0, b"x")
    for offset, size in ((FILE_BYTES_MAX, 1), (FILE_BYTES_MAX - 3, 4), (2**64 - 2, 4)):
        assert fuse.write(offset, bytes(size)).error == errno.ENOSYS
        assert fuse.upcall().done == 0
    assert fuse.content.size == 1


def test_a_write_that_contradicts_itself_is_a_call(fuse: FuseSocket) -> None:
    for size in (0, 3, 5, 2**32 - 1):
        assert fuse.ask(WRITE, IN.pack(WRITER, 0, size) + b"data").error == errno.ENOSYS
        assert fuse.upcall().opcode == WRITE
    assert fuse.ask(WRITE, IN.pack(WRITER, 0, 0)).error == errno.ENOSYS
    assert fuse.content.size == 0


def test_the_time_of_the_last_write_is_told_once(fuse: FuseSocket) -> None:
    assert fuse.port.written() == 0
    fuse.write(0, b"one")
    first = fuse.port.written()
    assert first > 1_600_000_000 * 10**9
    assert fuse.port.written() == 0
    fuse.write(0, b"two")
    assert fuse.port.stop() >= first
    assert fuse.port.stop() == 0


# --- READ -----------------------------------------------------------------------------------------


def test_reads_of_one_piece_several_pieces_and_holes(fuse: FuseSocket) -> None:
    parts = [pattern(50_000, 4), pattern(10_000, 5)]
    fuse.write(0, parts[0])
    fuse.write(20_000, parts[1])
    fuse.write(70_000, b"end")
    expected = bytearray(70_003)
    expected[:50_000] = parts[0]
    expected[20_000:30_000] = parts[1]
    expected[70_000:] = b"end"
    before = fuse.transport.statistics().read_copies
    assert fuse.read(21_000, 3000).data == expected[21_000:24_000]
    assert fuse.transport.statistics().read_copies == before
    for offset, size in ((0, 70_003), (19_999, 10_002), (45_000, 25_002), (60_000, 100)):
        assert fuse.read(offset, size).data == expected[offset : offset + size]
    assert fuse.transport.statistics().read_copies == before + 4
    assert fuse.no_upcall()


def test_reads_at_and_behind_the_end_of_file(fuse: FuseSocket) -> None:
    fuse.write(0, b"content")
    assert fuse.read(3, 100) == (4, 0, b"tent")
    assert fuse.read(7, 100).data == b""
    assert fuse.read(2**63, 100).data == b""
    assert fuse.read(2**64 - 1, 100).data == b""
    assert fuse.read(0, 0).data == b""
    assert fuse.no_upcall()


@pytest.mark.parametrize("handle", [WRITER, 99, 2**64 - 1])
def test_who_may_not_read_makes_a_call(fuse: FuseSocket, handle: int) -> None:
    assert fuse.read(0, 10, handle=handle).error == errno.ENOSYS
    assert fuse.upcall().opcode == READ


def test_a_read_that_is_too_large_or_too_short_is_a_call(fuse: FuseSocket) -> None:
    fuse.write(0, b"content")
    assert fuse.read(0, REQUEST_BYTES_MAX + 1).error == errno.ENOSYS
    assert fuse.read(0, 2**32 - 1).error == errno.ENOSYS
    assert fuse.ask(READ, IN.pack(READER, 0, 5)[:-1]).error == errno.ENOSYS
    assert fuse.ask(READ).error == errno.ENOSYS
    assert [fuse.upcall().opcode for _ in range(4)] == [READ] * 4


@pytest.mark.parametrize("verify", [True, False])
def test_damage_is_never_delivered_where_it_is_looked_for(place: Room, verify: bool) -> None:
    content = place.new_map(capacity=200_000)
    data = pattern(150_000, 6)
    place.write(content, 0, data)
    where = int(place.engine.list()["media_offset"][0]) + 70_000
    place.flip(where, 3)
    with fuse_socket(place.engine, content, verify=verify) as fuse:
        answer = fuse.read(66_000, 10_000)
        if verify:
            assert answer.error == errno.ENOSYS
            assert fuse.upcall().opcode == READ
            assert fuse.read(0, 1 << 16).data == data[: 1 << 16], "another chunk"
        else:
            assert len(answer.data) == 10_000


# --- what is passed on ----------------------------------------------------------------------------


def test_chosen_opcodes_become_calls_and_others_are_passed_on(place: Room) -> None:
    content = place.new_map()
    with fuse_socket(place.engine, content, upcalls=[GETATTR, FORGET]) as fuse:
        assert fuse.ask(GETATTR, b"arguments").error == errno.ENOSYS
        assert fuse.upcall().arguments == b"arguments"
        unique = fuse.send(STATFS, b"arguments")
        message = fuse.served.recv(1 << 20)
        assert HEADER.unpack_from(message)[:3] == (len(message), STATFS, unique)
        assert message[HEADER.size :] == b"arguments"
        fuse.served.send(REPLY.pack(REPLY.size + 4, 0, unique) + b"data")
        assert fuse.answer() == (unique, 0, b"data")
        fuse.served.send(REPLY.pack(REPLY.size + 6, 3, 0) + b"notice")
        assert fuse.answer() == (0, -3, b"notice")
        assert fuse.transport.statistics().forwarded == 1


INIT_IN = struct.Struct("=IIIII44x")
INIT_OUT = struct.Struct("=IIIIHHIIHHII24x")
MAX_PAGES, INIT_EXT, PARALLEL_DIROPS, OTHER_FLAG = 1 << 22, 1 << 30, 1 << 18, 1 << 5
ALLOW_MMAP = 1 << 4


@pytest.mark.parametrize("extended", [True, False])
def test_init_tells_the_kernel_more_than_libfuse_can(fuse: FuseSocket, extended: bool) -> None:
    offered = MAX_PAGES | PARALLEL_DIROPS | (1 << 3) | (INIT_EXT if extended else 0)
    unique = fuse.send(INIT, INIT_IN.pack(7, 38, 1 << 17, offered, ALLOW_MMAP | 1))
    fuse.served.recv(1 << 20)
    body = INIT_OUT.pack(7, 38, 1 << 17, OTHER_FLAG, 12, 9, 4096, 1, 0, 0, 0, 0)
    fuse.served.send(REPLY.pack(REPLY.size + len(body), 0, unique) + body)
    answer = INIT_OUT.unpack(fuse.answer().data)
    flags = OTHER_FLAG | MAX_PAGES | PARALLEL_DIROPS | (INIT_EXT if extended else 0)
    flags2 = ALLOW_MMAP if extended else 0
    pages = REQUEST_BYTES_MAX // 4096
    assert answer == (7, 38, 1 << 17, flags, 12, 9, REQUEST_BYTES_MAX, 1, pages, 0, flags2, 0)
    assert fuse.transport.statistics().direct_mapping == extended


def test_an_old_kernels_init_is_left_alone(fuse: FuseSocket) -> None:
    unique = fuse.send(INIT, struct.pack("=IIII", 7, 12, 0, 0))
    fuse.served.recv(1 << 20)
    fuse.served.send(REPLY.pack(REPLY.size + 24, 0, unique) + bytes(24))
    assert fuse.answer() == (unique, 0, bytes(24))


def test_a_listing_fits_the_socket(fuse: FuseSocket) -> None:
    for asked, granted in ((4096, 4096), (1 << 20, 128 << 10)):
        fuse.send(READDIR, IN.pack(3, 5, asked))
        message = fuse.served.recv(1 << 20)
        assert IN.unpack_from(message, HEADER.size) == (3, 5, granted)


def test_forgotten_inodes_are_passed_on_in_portions(fuse: FuseSocket) -> None:
    pairs = [(ino, ino % 7 + 1) for ino in range(8000)]
    body = b"".join(struct.pack("=QQ", *pair) for pair in pairs)
    fuse.send(BATCH_FORGET, struct.pack("=I4x", len(pairs)) + body)
    found: list[tuple[int, int]] = []
    while len(found) < len(pairs):
        message = fuse.served.recv(1 << 20)
        assert HEADER.unpack_from(message)[:2] == (len(message), BATCH_FORGET)
        (count,) = struct.unpack_from("=I4x", message, HEADER.size)
        rest = message[HEADER.size + 8 :]
        assert len(rest) == count * 16
        found += struct.iter_unpack("=QQ", rest)
    assert found == pairs


def test_short_and_boastful_forgets_say_what_they_have(fuse: FuseSocket) -> None:
    fuse.send(BATCH_FORGET, b"\xff\xff\xff\xff")
    fuse.send(BATCH_FORGET, b"")
    fuse.send(BATCH_FORGET, struct.pack("=I4xQQ", 2**32 - 1, 5, 6))
    message = fuse.served.recv(1 << 20)
    assert message[HEADER.size :] == struct.pack("=I4xQQ", 1, 5, 6)


def test_interruptions_are_dropped_and_what_is_too_large_is_refused(fuse: FuseSocket) -> None:
    fuse.send(INTERRUPT, struct.pack("=Q", 2))
    fuse.send(NOTIFY_REPLY, bytes(40))
    assert fuse.ask(STATFS, bytes((128 << 10) + 1)).error == errno.E2BIG
    assert fuse.transport.statistics().forwarded == 0
    unique = fuse.send(STATFS, bytes(128 << 10))
    assert HEADER.unpack_from(fuse.served.recv(1 << 20))[2] == unique


def test_nothing_waits_for_ever_when_the_other_end_is_gone(fuse: FuseSocket) -> None:
    fuse.served.close()
    assert fuse.ask(STATFS).error == errno.EIO
    fuse.send(FORGET, struct.pack("=Q", 1))  # has no answer, also not this one
    assert fuse.write(0, b"data").error == 0
    assert fuse.read(0, 4).data == b"data"


def test_an_end_that_talks_nonsense_is_left(fuse: FuseSocket) -> None:
    fuse.served.send(b"nonsense")
    assert fuse.served.recv(100) == b""
    assert fuse.ask(STATFS).error == errno.EIO
    assert fuse.read(0, 4).data == b""


# --- the end --------------------------------------------------------------------------------------


def test_stop_ends_workers_that_wait(place: Room) -> None:
    content = place.new_map(capacity=1 << 17)
    with fuse_socket(place.engine, content, workers=3) as fuse:
        assert fuse.write(0, b"data").error == 0
        fuse.transport.stop()
        assert fuse.join() == []
        fuse.send(READ, IN.pack(READER, 0, 4))
        assert fuse._fuse.recv(1 << 20, 0)[HEADER.size :] == IN.pack(READER, 0, 4)
        fuse.transport.stop()


class _Filter(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.POINTER(_Filter)))


READ_CALL = {"x86_64": 0, "aarch64": 63}


def fail_reads_of(descriptor: int, number: int) -> None:
    """In this thread, for good: read(2) of the descriptor fails. See seccomp(2)."""
    load, equal, end = 0x20, 0x15, 0x06
    number_at, first_argument_at = 0, 16
    allow, fail = 0x7FFF0000, 0x00050000 | number
    filters = (_Filter * 6)(
        _Filter(load, 0, 0, number_at),
        _Filter(equal, 0, 2, READ_CALL[os.uname().machine]),
        _Filter(load, 0, 0, first_argument_at),
        _Filter(equal, 1, 0, descriptor),
        _Filter(end, 0, 0, allow),
        _Filter(end, 0, 0, fail),
    )
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    program = _Program(len(filters), filters)
    done = libc.prctl(set_seccomp, filter_mode, ctypes.byref(program), 0, 0)
    assert done == 0, os.strerror(ctypes.get_errno())


@pytest.mark.skipif(os.uname().machine not in READ_CALL, reason="number of read(2) not known")
@pytest.mark.parametrize("number", [errno.ENODEV, errno.ECONNABORTED])
def test_a_mount_that_goes_while_a_request_is_read_is_no_error(place: Room, number: int) -> None:
    """ECONNABORTED comes where the kernel was copying the request: many files closed at the end."""
    found: list[object] = []
    with fuse_socket(place.engine, place.new_map(), workers=0) as fuse:

        def serve() -> None:
            fail_reads_of(fuse._fuse.fileno(), number)
            found.append(Worker(fuse.transport).serve())

        thread = threading.Thread(target=serve)
        thread.start()
        thread.join(SECONDS_MAX)
    assert found == [None]


def test_a_broken_connection_is_an_error(place: Room) -> None:
    content = place.new_map()
    with fuse_socket(place.engine, content) as fuse:
        fuse.kernel.close()
        (error,) = fuse.join()
        assert isinstance(error, OSError)


def test_a_message_that_is_no_request_is_an_error(fuse: FuseSocket) -> None:
    fuse.kernel.send(b"x" * (HEADER.size - 1))
    (error,) = fuse.join()
    assert isinstance(error, OSError)
    fuse.errors.clear()


def test_what_was_closed_is_not_used(place: Room) -> None:
    content = place.new_map()
    made = FuseSocket(place.engine, content)
    made.start()
    made.close()
    made.close()
    for use in (made.transport.start, made.transport.statistics, made.port.stop):
        with pytest.raises(InvariantError):
            use()
    port = Port(1, content)
    place.engine.close()
    with pytest.raises(InvariantError):
        port.written()
    with pytest.raises(InvariantError):
        port.close()
