"""One worker is always left for data: upcalls wait for the others, messages for the socket."""

from __future__ import annotations

import contextlib
import errno
import struct
import threading
from collections.abc import Iterator

import pytest

from cxlfs.native import FaultKind, set_fault, transport
from tests.support.extents import Room, pattern, room
from tests.support.fuse_socket import (
    BATCH_FORGET,
    FORGET,
    HEADER,
    IN,
    REPLY,
    REQUEST_BYTES_MAX,
    SECONDS_MAX,
    TID,
    WRITE,
    WRITER,
    Answer,
    FuseSocket,
    Kept,
    fuse_socket,
    refuse,
)
from tests.support.mount import wait_until

UPCALL, FORWARDED = 9, 17
"""Opcodes of requests that become upcalls, and of those that go over the socket."""
WORKERS = 3
READS = 100
MESSAGE_BYTES = 100 << 10
MESSAGES = 40
"""More than the socket takes."""


@pytest.fixture
def place() -> Iterator[Room]:
    with room(segments=4) as made:
        yield made


@contextlib.contextmanager
def served(place: Room, *, workers: int, waiting_bytes_max: int = 16 << 20) -> Iterator[FuseSocket]:
    content = place.new_map(capacity=100_000)
    with fuse_socket(
        place.engine,
        content,
        upcalls=[UPCALL],
        workers=workers,
        waiting_bytes_max=waiting_bytes_max,
    ) as fuse:
        fuse.content.write(0, b"content")
        yield fuse
    assert not fuse.errors


class Gate:
    """Upcalls that come to it wait until it is opened."""

    def __init__(self, fuse: FuseSocket) -> None:
        self.opened = threading.Event()
        self.inside = 0
        self.most_inside = 0
        self._lock = threading.Lock()
        fuse.on_upcall = self._serve

    def _serve(self, upcall: Kept) -> transport.Answer | None:
        with self._lock:
            self.inside += 1
            self.most_inside = max(self.most_inside, self.inside)
        assert self.opened.wait(SECONDS_MAX)
        with self._lock:
            self.inside -= 1
        return refuse(upcall)


def send_and_await(fuse: FuseSocket, gate: Gate, body: bytes = b"") -> int:
    """An upcall with which a worker is away now. Of two that are sent at once either may be the
    first: two workers have read them.
    """
    before = gate.inside
    unique = fuse.send(UPCALL, body)
    wait_until(lambda: gate.inside == before + 1, "one worker is away")
    return unique


def assert_reads_go_on(fuse: FuseSocket) -> None:
    for _ in range(READS):
        assert fuse.read(0, 7).data == b"content"


def answers(fuse: FuseSocket, uniques: list[int]) -> list[Answer]:
    """Of these requests, which may be answered in any order."""
    found = [fuse.answer() for _ in uniques]
    assert sorted(answer.unique for answer in found) == sorted(uniques)
    return found


# --- upcalls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, WORKERS])
def test_reads_do_not_wait_for_upcalls(place: Room, workers: int) -> None:
    with served(place, workers=workers) as fuse:
        gate = Gate(fuse)
        uniques = [fuse.send(UPCALL, b"%d" % number) for number in range(20)]
        assert_reads_go_on(fuse)
        wait_until(
            lambda: fuse.transport.statistics().waited == 20 - (workers - 1), "all have been read"
        )
        wait_until(lambda: gate.inside == workers - 1, "all others are away")
        assert_reads_go_on(fuse)
        gate.opened.set()
        assert {answer.error for answer in answers(fuse, uniques)} == {errno.ENOSYS}
        assert gate.most_inside == workers - 1
        taken = [fuse.upcall().arguments for _ in uniques]
        assert sorted(taken) == sorted(b"%d" % number for number in range(20)), "unharmed"


def test_what_waits_is_served_in_turn(place: Room) -> None:
    with served(place, workers=2) as fuse:
        gate = Gate(fuse)
        uniques = [send_and_await(fuse, gate)]
        uniques += [fuse.send(UPCALL, b"%d" % number) for number in range(1, 50)]
        wait_until(lambda: fuse.transport.statistics().waited == 49, "all have been read")
        gate.opened.set()
        assert [answer.unique for answer in answers(fuse, uniques)] == uniques
        assert [fuse.upcall().unique for _ in uniques] == uniques
        # The last answer arrives before its worker has seen that none waits any more.
        wait_until(lambda: fuse.transport.statistics().busy_workers == 0, "it is back")
        fuse.send(UPCALL)
        assert fuse.answer().error == errno.ENOSYS
        assert fuse.transport.statistics().waited == 49, "nobody is left who would have to wait"


def test_a_write_that_has_to_wait_keeps_its_bytes(place: Room) -> None:
    with served(place, workers=2) as fuse:
        gate = Gate(fuse)
        blocking = send_and_await(fuse, gate)
        data = [pattern(REQUEST_BYTES_MAX - 4096 * n, n) for n in range(5)]
        uniques = [
            fuse.send(WRITE, IN.pack(WRITER, n, len(data[n])) + data[n], pid=TID + 1)
            for n in range(5)
        ]
        assert_reads_go_on(fuse)
        gate.opened.set()
        answers(fuse, [blocking, *uniques])
        assert fuse.upcall().opcode == UPCALL
        for number in range(5):
            upcall = fuse.upcall()
            assert (upcall.unique, upcall.pid) == (uniques[number], TID + 1)
            assert upcall.arguments[IN.size :] == data[number]


def test_what_is_done_in_steps_goes_on_behind_those_that_wait(place: Room) -> None:
    """A write that makes room: its bytes and what is done of it come again, when it is its turn."""
    with served(place, workers=2) as fuse:
        opened = threading.Event()
        data = pattern(REQUEST_BYTES_MAX - 4096, 3)

        def serve(upcall: Kept) -> transport.Answer | transport.Unfinished | None:
            assert opened.wait(SECONDS_MAX)
            if upcall.opcode == WRITE and upcall.done < 8192:
                return transport.Unfinished(upcall.done + 4096)
            return refuse(upcall)

        fuse.on_upcall = serve
        write = fuse.send(WRITE, IN.pack(WRITER, 0, len(data)) + data, pid=TID + 1)
        taken = [fuse.upcall()]  # so a worker is away with it
        others = [fuse.send(UPCALL, b"%d" % number) for number in range(3)]
        wait_until(lambda: fuse.transport.statistics().waited == 3, "all have been read")
        opened.set()
        assert [answer.unique for answer in answers(fuse, [*others, write])] == [*others, write]
        taken += [fuse.upcall() for _ in range(4)]
        assert [upcall.unique for upcall in taken] == [write, *others, write]
        assert [upcall.done for upcall in taken] == [0, 0, 0, 0, 4096]
        assert taken[-1].arguments[IN.size :] == data
        assert fuse.transport.statistics().waited == 4, "the second turn was not waited for"


def test_a_lease_is_asked_for_by_another_worker(place: Room) -> None:
    with served(place, workers=2) as fuse:
        gate = Gate(fuse)
        blocking = send_and_await(fuse, gate)
        assert fuse.write(8, bytes(80_000)).error == 0, "half of the lease is used"
        assert_reads_go_on(fuse)
        assert fuse.transport.statistics().waited == 1
        gate.opened.set()
        answers(fuse, [blocking])
        assert [fuse.upcall().opcode for _ in range(2)] == [UPCALL, transport.UPCALL_LEASE]


def test_a_worker_that_is_alone_serves_everything(place: Room) -> None:
    with served(place, workers=1) as fuse:
        uniques = [fuse.send(UPCALL) for _ in range(5)]
        assert [answer.unique for answer in answers(fuse, uniques)] == uniques
        assert fuse.transport.statistics().waited == 0


def test_what_would_take_too_much_holds_up_the_last_worker(place: Room) -> None:
    """It goes with the upcall, and everything is answered all the same."""
    with served(place, workers=2, waiting_bytes_max=2 * MESSAGE_BYTES) as fuse:
        gate = Gate(fuse)
        uniques = [fuse.send(UPCALL, bytes(MESSAGE_BYTES)) for _ in range(3)]
        wait_until(lambda: gate.inside == 2, "the last worker goes, too")
        assert fuse.transport.statistics().waited == 1
        uniques += [fuse.send(UPCALL) for _ in range(5)]
        gate.opened.set()
        answers(fuse, uniques)
        assert_reads_go_on(fuse)


def test_without_memory_the_last_worker_goes(place: Room) -> None:
    with served(place, workers=2) as fuse:
        gate = Gate(fuse)
        uniques = [send_and_await(fuse, gate)]
        set_fault(FaultKind.ALLOCATE, 1)
        try:
            uniques.append(fuse.send(UPCALL))
            wait_until(lambda: gate.inside == 2, "the last worker goes, too")
        finally:
            set_fault(FaultKind.ALLOCATE, 0)
        gate.opened.set()
        answers(fuse, uniques)


def test_upcalls_that_wait_are_served_before_the_end(place: Room) -> None:
    with served(place, workers=2) as fuse:
        gate = Gate(fuse)
        uniques = [fuse.send(UPCALL) for _ in range(6)]
        wait_until(lambda: fuse.transport.statistics().waited == 5, "all have been read")
        stopping = threading.Thread(target=fuse.transport.stop)
        stopping.start()
        gate.opened.set()
        stopping.join(SECONDS_MAX)
        assert fuse.join() == []
        answers(fuse, uniques)  # of all; what two workers serve in turn may pass each other


def test_upcalls_of_a_worker_that_is_gone_do_not_stop_the_others(place: Room) -> None:
    with served(place, workers=WORKERS) as fuse:

        def fail(upcall: Kept) -> transport.Answer | None:
            raise InterruptedError(upcall.opcode)

        fuse.on_upcall = fail
        fuse.send(UPCALL)
        wait_until(lambda: len(fuse.errors) == 1, "one worker is gone")
        fuse.take_errors()
        fuse.on_upcall = refuse
        answers(fuse, [fuse.send(UPCALL) for _ in range(5)])
        assert_reads_go_on(fuse)


# --- the socket -----------------------------------------------------------------------------------


def messages(fuse: FuseSocket, count: int) -> list[tuple[int, bytes]]:
    """Number and body of what arrives at the other end."""
    found = []
    for _ in range(count):
        message = fuse.served.recv(1 << 20)
        found.append((HEADER.unpack_from(message)[2], message[HEADER.size :]))
    return found


@pytest.mark.parametrize("workers", [1, WORKERS])
def test_a_full_socket_keeps_nobody_waiting(place: Room, workers: int) -> None:
    with served(place, workers=workers) as fuse:
        sent = []
        for number in range(MESSAGES):
            body = struct.pack("=Q", number) * (MESSAGE_BYTES // 8)
            sent.append((fuse.send(FORWARDED, body), body))
            assert_reads_go_on(fuse)
        assert fuse.transport.statistics().waited > 0
        found = messages(fuse, MESSAGES)
        assert sorted(found) == sent, "whole"
        assert workers > 1 or found == sent, "in the order in which they came"
        sent = [(fuse.send(FORWARDED, b"later"), b"later")]
        assert messages(fuse, 1) == sent
        for unique, _ in sent:
            fuse.served.send(REPLY.pack(REPLY.size, 0, unique))
            assert fuse.answer() == (unique, 0, b"")


def test_answers_come_back_while_messages_wait(place: Room) -> None:
    with served(place, workers=2) as fuse:
        sent = {fuse.send(FORWARDED, bytes(MESSAGE_BYTES)) for _ in range(MESSAGES)}
        while sent:
            unique = messages(fuse, 1)[0][0]
            sent.remove(unique)
            fuse.served.send(REPLY.pack(REPLY.size, 0, unique))
            assert fuse.answer() == (unique, 0, b"")


def test_messages_that_wait_fail_when_the_other_end_goes(place: Room) -> None:
    with served(place, workers=1) as fuse:
        sent = [fuse.send(FORWARDED, bytes(MESSAGE_BYTES)) for _ in range(MESSAGES)]
        assert_reads_go_on(fuse)
        waited = fuse.transport.statistics().waited
        fuse.send(FORGET, struct.pack("=Q", 1))
        fuse.send(BATCH_FORGET, struct.pack("=I4xQQ", 1, 5, 6))
        assert_reads_go_on(fuse)
        fuse.served.close()
        assert {answer.error for answer in answers(fuse, sent[-waited:])} == {errno.EIO}
        assert fuse.ask(FORWARDED).error == errno.EIO
        assert_reads_go_on(fuse)


def test_messages_that_wait_fail_at_the_end(place: Room) -> None:
    with served(place, workers=1) as fuse:
        sent = [fuse.send(FORWARDED, bytes(MESSAGE_BYTES)) for _ in range(MESSAGES)]
        assert_reads_go_on(fuse)
        waited = fuse.transport.statistics().waited
        fuse.transport.stop()
        assert fuse.join() == []
        assert {answer.error for answer in answers(fuse, sent[-waited:])} == {errno.EIO}


def test_messages_beyond_the_bound_hold_up_one_worker(place: Room) -> None:
    with served(place, workers=2, waiting_bytes_max=2 * MESSAGE_BYTES) as fuse:
        sent: list[int] = []

        def send() -> None:
            sent.extend(fuse.send(FORWARDED, bytes(MESSAGE_BYTES)) for _ in range(MESSAGES))

        sender = threading.Thread(target=send)
        sender.start()
        found = sorted(unique for unique, _ in messages(fuse, MESSAGES))
        sender.join(SECONDS_MAX)
        assert found == sent
        assert_reads_go_on(fuse)
