"""The transport with hostile requests, without memory, with many handles, and under changes."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cxlfs.errors import InvariantError, OutOfMemoryError
from cxlfs.native import FaultKind, fault_count, set_fault
from cxlfs.native.transport import UPCALL_LEASE, Answer, Port, Worker
from tests.support.extents import nothing_held, pattern, room, seeds
from tests.support.fuse_socket import (
    HEADER,
    IN,
    INO,
    READ,
    READER,
    REPLY,
    REQUEST_BYTES_MAX,
    TID,
    UNANSWERED,
    WRITE,
    WRITER,
    FuseSocket,
    Kept,
    accept,
    fuse_socket,
)

INTERESTING = (0, 1, 4, 63, 64, 4095, 4096, 65_536, REQUEST_BYTES_MAX, 2**31, 2**32 - 1)
FAR = (0, 1, 100_000, 2**40 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)

# --- hostile requests -----------------------------------------------------------------------------


def random_body(rng: random.Random, opcode: int) -> bytes:
    if rng.random() < 0.3:
        return rng.randbytes(rng.choice([0, 1, 7, 8, 39, 40, 41, 64, 5000, 100_000]))
    handle = rng.choice([READER, WRITER, 3, rng.getrandbits(64)])
    body = IN.pack(handle, rng.choice(FAR), rng.choice(INTERESTING))
    if opcode == WRITE:
        data = rng.randbytes(rng.choice([0, 1, 4096, 65_536]))
        size = len(data) if rng.random() < 0.7 else rng.choice(INTERESTING)
        body = IN.pack(handle, rng.choice(FAR), size) + data
    return body if rng.random() < 0.8 else body[: rng.randrange(len(body) + 1)]


def random_request(rng: random.Random, unique: int) -> tuple[int, bytes]:
    opcode = rng.choice([READ, WRITE, rng.randrange(64), rng.getrandbits(32)])
    body = random_body(rng, opcode)
    length = rng.choice([HEADER.size + len(body), *INTERESTING])
    pid = rng.choice([0, TID, rng.getrandbits(32)])
    return opcode, HEADER.pack(length, opcode, unique, INO, 0, 0, pid, 0) + body


def echo(fuse: FuseSocket) -> None:
    """In libfuse's place, until the transport hangs up: an answer to each request."""
    with contextlib.suppress(OSError):
        while message := fuse.served.recv(1 << 20):
            _, opcode, unique = HEADER.unpack_from(message)[:3]
            if opcode not in UNANSWERED:
                fuse.served.send(REPLY.pack(REPLY.size, -95, unique))


@pytest.mark.parametrize("seed", seeds(3), ids="CXLFS_SEED={}".format)
def test_every_request_that_wants_an_answer_gets_one(seed: int) -> None:
    rng = random.Random(seed)
    with room() as place:
        content = place.new_map(capacity=200_000)
        place.write(content, 0, pattern(100_000, seed))
        upcalls = rng.sample(range(64), 20)
        with fuse_socket(place.engine, content, upcalls=upcalls, workers=2) as fuse:
            other = threading.Thread(target=echo, args=(fuse,))
            other.start()
            for _ in range(1500):
                unique = next(fuse.uniques)
                opcode, message = random_request(rng, unique)
                fuse.kernel.send(message)
                if opcode not in UNANSWERED:
                    assert fuse.answer().unique == unique, f"opcode {opcode}"
            assert fuse.read(0, 10).unique
            fuse.transport.stop()
            assert fuse.join() == []
            fuse.served.shutdown(2)
            other.join()
        content.close()
        assert nothing_held(place.engine)


# --- ports and handles ----------------------------------------------------------------------------


def test_thousands_of_handles_are_found() -> None:
    with room() as place:
        content = place.new_map(capacity=1 << 16)
        with fuse_socket(place.engine, content) as fuse:
            fuse.write(0, b"content")
            for handle in range(100, 5100):
                fuse.transport.open_handle(handle, fuse.port, readable=handle % 2 == 0)
            with pytest.raises(InvariantError):
                fuse.transport.open_handle(4000, fuse.port, readable=True)
            for handle in range(100, 5100, 97):
                answer = fuse.read(0, 100, handle=handle)
                assert (answer.data == b"content") == (handle % 2 == 0)
            for handle in range(100, 5100):
                if handle % 3:
                    fuse.transport.close_handle(handle)
                    fuse.transport.close_handle(handle)
            fuse.transport.allow_writes(101, TID)  # nobody knows it any more
            for handle in range(100, 5100, 98):
                answer = fuse.read(0, 100, handle=handle)
                assert (answer.data == b"content") == (handle % 6 == 0)
        content.close()
        assert nothing_held(place.engine)


def test_a_content_is_replaced_under_its_readers() -> None:
    """Every answer is of one of the contents; the old ones end with their last reader."""
    with room(segments=200) as place:
        contents = []
        for number in range(8):
            content = place.new_map(number, capacity=1 << 16)
            place.write(content, 0, bytes([number + 1]) * 50_000)
            contents.append(content)
        with fuse_socket(place.engine, contents[0], workers=2) as fuse:
            seen: set[int] = set()

            done = threading.Event()

            def swap() -> None:
                for i in itertools.takewhile(lambda _: not done.is_set(), itertools.count()):
                    fuse.port.stop()
                    fuse.port.set_content(contents[i % 8])
                for i in range(1, 8):
                    fuse.port.set_content(contents[i])
                    contents[i - 1].close()

            swapper = threading.Thread(target=swap)
            swapper.start()
            for _ in range(500):
                data = fuse.read(10, 40_000).data
                assert len(data) == 40_000
                assert len(set(data)) == 1
                seen.add(data[0])
            done.set()
            swapper.join()
            assert len(seen) > 1
            assert fuse.read(0, 10).data == bytes([8]) * 10
            assert fuse.no_upcall()
        contents[7].close()
        assert nothing_held(place.engine)


def test_nothing_is_written_between_a_stop_and_a_permission() -> None:
    """A stop returns when the writes under way have ended: what comes then is an upcall, and finds
    the content as the stop left it.
    """
    with room(segments=300) as place:
        content = place.new_map(capacity=place.segment_bytes - 4096)
        with fuse_socket(place.engine, content, workers=2) as fuse:
            changed: list[int] = []
            left_by_stop = [-1]
            asked = threading.Event()

            def finish(upcall: Kept) -> Answer:
                now = place.engine.statistics().bytes_written
                changed.append(now - left_by_stop[0] - upcall.done)
                asked.set()
                return accept(upcall)

            def push() -> None:
                while not done.is_set():
                    fuse.write(0, bytes(100_000))

            fuse.on_upcall = finish
            done = threading.Event()
            pusher = threading.Thread(target=push)
            pusher.start()
            for _ in range(150):
                content.close_leases()
                content.attach_lease(place.open_extent(place.segment_bytes - 4096))
                place.free += [s for s in place.engine.dead_segments() if s != place.segment]
                asked.clear()
                fuse.port.stop()
                left_by_stop[0] = place.engine.statistics().bytes_written
                asked.clear()
                assert asked.wait(30)
                fuse.transport.allow_writes(WRITER, TID)
            done.set()
            pusher.join()
            while not fuse.no_upcall():
                assert fuse.upcall().opcode in (WRITE, UPCALL_LEASE)
            assert len(changed) >= 150
        content.close()


# --- no memory ------------------------------------------------------------------------------------


def fail_each_allocation(attempt: Callable[[], Any]) -> int:
    """Make the first, second, ... allocation of ``attempt`` fail, until it needs no more."""
    for nth in range(1, 100):
        set_fault(FaultKind.ALLOCATE, nth)
        try:
            attempt()
        except (OutOfMemoryError, InvariantError):
            pass
        else:
            if fault_count(FaultKind.ALLOCATE) < nth:
                set_fault(FaultKind.ALLOCATE, 0)
                return nth - 1
        set_fault(FaultKind.ALLOCATE, 0)
    raise AssertionError("it never succeeds")


def test_a_transport_is_made_or_not() -> None:
    with room() as place:
        content = place.new_map(capacity=1 << 16)

        def attempt() -> None:
            made = FuseSocket(place.engine, content)
            try:
                made.start()
            finally:
                set_fault(FaultKind.ALLOCATE, 0)
                made.close()

        for nth in range(1, 12):
            set_fault(FaultKind.ALLOCATE, nth)
            with contextlib.suppress(OutOfMemoryError, InvariantError):
                attempt()
        set_fault(FaultKind.ALLOCATE, 0)
        attempt()
        content.close()
        assert nothing_held(place.engine)


def test_a_port_a_worker_or_a_handle_is_made_or_not() -> None:
    with room() as place:
        content = place.new_map(capacity=1 << 16)
        with fuse_socket(place.engine, content) as fuse:
            assert fail_each_allocation(lambda: Port(9, content).close()) == 1
            assert fail_each_allocation(lambda: Worker(fuse.transport)) == 2
            for handle in range(1000, 1062):
                fuse.transport.open_handle(handle, fuse.port, readable=True)
            set_fault(FaultKind.ALLOCATE, 1)
            with pytest.raises(OutOfMemoryError):
                fuse.transport.open_handle(1062, fuse.port, readable=True)
            set_fault(FaultKind.ALLOCATE, 2)
            fuse.transport.open_handle(1062, fuse.port, readable=True)
            assert fault_count(FaultKind.ALLOCATE) == 2, "the table did not grow"
            set_fault(FaultKind.ALLOCATE, 0)
            fuse.transport.open_handle(1063, fuse.port, readable=True)
            assert all(not fuse.read(0, 1, handle=h).error for h in range(1000, 1064))
        content.close()
        assert nothing_held(place.engine)


def test_a_write_without_memory_is_a_call() -> None:
    with room() as place:
        content = place.new_map(capacity=200_000)
        place.write(content, 0, pattern(50_000, 1))
        with fuse_socket(place.engine, content) as fuse:
            for nth in range(1, 8):
                data = pattern(100, nth)
                set_fault(FaultKind.ALLOCATE, nth)
                answer = fuse.write(nth * 5000, data)
                set_fault(FaultKind.ALLOCATE, 0)
                if answer.error:
                    assert fuse.upcall().done == 0
                    assert fuse.write(nth * 5000, data).error == 0
                assert fuse.read(nth * 5000, 100).data == data
            assert fuse.no_upcall()
        content.close()
        assert nothing_held(place.engine)
