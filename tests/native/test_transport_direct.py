"""What the transport does for programs that store file data by themselves: their requests become
calls, whole, and no read or write of their file goes past the store.
"""

from __future__ import annotations

import errno
import random
import struct
import threading
from collections.abc import Iterator

import pytest

from cxlfs.fuse.direct_wire import Command, size_of
from cxlfs.native import transport
from tests.support.extents import Room, pattern, room
from tests.support.fuse_socket import (
    READ,
    READER,
    SECONDS_MAX,
    TID,
    WRITE,
    FuseSocket,
    Kept,
    fuse_socket,
)

IOCTL = 39
IOCTL_IN = struct.Struct("=QIIQII")
DIRECTORY = 1 << 4
TCGETS, FIONREAD, FS_IOC_GETFLAGS, BLKGETSIZE64 = 0x5401, 0x541B, 0x80086601, 0x80081272


@pytest.fixture
def place() -> Iterator[Room]:
    with room() as made:
        yield made


@pytest.fixture
def fuse(place: Room) -> Iterator[FuseSocket]:
    with fuse_socket(place.engine, place.new_map(capacity=200_000), upcalls=[IOCTL]) as made:
        yield made
    assert not made.errors


def ioctl(command: int, data: bytes = b"", *, flags: int = 0) -> bytes:
    return IOCTL_IN.pack(READER, flags, command, 0x7FFF_0000, len(data), len(data)) + data


# --- requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", Command)
def test_a_request_becomes_a_call_whole(
    fuse: FuseSocket, command: Command, rng: random.Random
) -> None:
    data = rng.randbytes(size_of(command))
    fuse.on_upcall = lambda kept: transport.Answer(
        kept.unique, 0, kept.arguments[IOCTL_IN.size :][::-1]
    )
    assert fuse.ask(IOCTL, ioctl(command, data)).data == data[::-1]
    kept = fuse.upcall()
    assert (kept.opcode, kept.arguments) == (IOCTL, ioctl(command, data))
    assert fuse.transport.statistics().forwarded == 0


def test_requests_that_wait_for_a_worker_come_whole(place: Room, rng: random.Random) -> None:
    """Two workers, of which one is busy with a call: all others wait, with all their bytes."""
    sent = [rng.randbytes(size_of(Command.MAP)) for _ in range(20)]
    begun, go_on = threading.Event(), threading.Event()

    def echo(kept: Kept) -> transport.Answer:
        begun.set()
        assert go_on.wait(SECONDS_MAX)
        return transport.Answer(kept.unique, 0, kept.arguments[IOCTL_IN.size :])

    with fuse_socket(place.engine, place.new_map(), upcalls=[IOCTL], workers=2) as fuse:
        fuse.on_upcall = echo
        uniques = {fuse.send(IOCTL, ioctl(Command.MAP, sent[0])): sent[0]}
        assert begun.wait(SECONDS_MAX)
        uniques |= {fuse.send(IOCTL, ioctl(Command.MAP, data)): data for data in sent[1:]}
        go_on.set()
        answers = [fuse.answer() for _ in sent]
        assert {answer.unique: answer.data for answer in answers} == uniques


@pytest.mark.parametrize(
    "body",
    [
        ioctl(TCGETS),
        ioctl(FIONREAD),
        ioctl(FS_IOC_GETFLAGS, bytes(8)),
        ioctl(BLKGETSIZE64, bytes(8)),
        ioctl(Command.LEASE + (1 << 16), bytes(73)),  # another size
        ioctl(Command.UNMAP + 1, bytes(8)),  # another number
        ioctl(Command.ATTACH, bytes(2048), flags=DIRECTORY),
        ioctl(Command.UNMAP)[: IOCTL_IN.size - 1],
        b"",
    ],
    ids=["tcgets", "fionread", "flags", "blocks", "size", "number", "directory", "short", "empty"],
)
def test_other_requests_are_refused_at_once(fuse: FuseSocket, body: bytes) -> None:
    assert fuse.ask(IOCTL, body).error == errno.ENOTTY
    assert fuse.no_upcall()
    assert fuse.transport.statistics().forwarded == 0


def test_who_wants_none_of_them_has_them_passed_on(place: Room) -> None:
    with fuse_socket(place.engine, place.new_map()) as fuse:
        fuse.send(IOCTL, ioctl(TCGETS))
        assert fuse.served.recv(1 << 20).endswith(ioctl(TCGETS))


# --- a port that asks -----------------------------------------------------------------------------


def test_a_port_that_asks_makes_calls_of_reads_and_writes(fuse: FuseSocket) -> None:
    data = pattern(5000, 1)
    assert fuse.write(0, data).error == 0
    fuse.port.ask(True)
    assert fuse.read(0, 100).error == errno.ENOSYS
    assert fuse.upcall().opcode == READ
    assert fuse.write(0, b"other").error == errno.ENOSYS
    kept = fuse.upcall()
    assert (kept.opcode, kept.done) == (WRITE, 0)
    fuse.port.ask(False)
    assert fuse.read(0, 5000).data == data
    assert fuse.write(0, b"other").error == 0, "it may still write"
    assert fuse.no_upcall()


def test_a_permission_given_meanwhile_holds_afterwards(fuse: FuseSocket) -> None:
    fuse.port.ask(True)
    fuse.port.stop()
    fuse.transport.allow_writes(2, TID)
    assert fuse.write(0, b"one").error == errno.ENOSYS
    assert fuse.upcall().opcode == WRITE
    fuse.port.ask(False)
    assert fuse.write(0, b"one").error == 0
    assert fuse.no_upcall()


def test_a_permission_taken_meanwhile_is_gone_afterwards(fuse: FuseSocket) -> None:
    fuse.port.ask(True)
    fuse.port.stop()
    fuse.port.ask(False)
    assert fuse.write(0, b"one").error == errno.ENOSYS
    assert fuse.upcall().opcode == WRITE
    assert fuse.read(0, 10) == (4, 0, b"")


def test_ports_that_ask_now_and_then_lose_no_answer(place: Room) -> None:
    content = place.new_map(capacity=1 << 17)
    data = pattern(100_000, 2)
    place.write(content, 0, data)
    with fuse_socket(place.engine, content, workers=2) as fuse:

        def read(kept: Kept) -> transport.Answer:
            _, offset, size = struct.unpack("=QQI20x", kept.arguments)
            return transport.Answer(kept.unique, 0, data[offset : offset + size])

        fuse.on_upcall = read
        stop = threading.Event()

        def switch() -> None:
            asks = False
            while not stop.is_set():
                asks = not asks
                fuse.port.ask(asks)

        thread = threading.Thread(target=switch)
        thread.start()
        for number in range(2000):
            offset = number * 37 % 90_000
            assert fuse.read(offset, 1000).data == data[offset : offset + 1000]
        stop.set()
        thread.join(SECONDS_MAX)
        counts = fuse.transport.statistics()
        assert counts.reads + counts.upcalls == 2000
