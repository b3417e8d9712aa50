"""How many workers of a transport wait for requests: one for a client that is alone, else all; and
where the one is, and how it answers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cxlfs.native import transport
from tests.support.extents import room
from tests.support.fuse_socket import (
    IN,
    READ,
    READER,
    SECONDS_MAX,
    TID,
    WRITE,
    WRITER,
    FuseSocket,
    Kept,
    fuse_socket,
    refuse,
)
from tests.support.mount import wait_until
from tests.support.rights import CAP_SYS_NICE, drop_capability

WORKERS = 3
CALL = 9
"""Opcode of a request that becomes an upcall."""
REQUESTS_MAX = 200
LONG_BYTES = 512 << 10
PLACED = 9
ROUNDS_MAX = 20
SOON = 24
PAUSE_S = 0.00006
"""As long as processors take to wake, and shorter than a rest."""
SMALL_ANSWERS = 10
"""More than fit where they are to wait."""


@pytest.fixture(params=[0, 10_000_000, 10**12], ids=["sleeping", "polling", "polling for ever"])
def fuse(request: pytest.FixtureRequest) -> Iterator[FuseSocket]:
    with room() as place:
        content = place.new_map(capacity=200_000)
        with fuse_socket(
            place.engine,
            content,
            upcalls=[CALL],
            workers=WORKERS,
            poll_ns=request.param,
            request_bytes_max=LONG_BYTES,
        ) as made:
            made.transport.stay_with_client(stays=True)
            made.write(0, b"content")
            come_back(made)  # the last thread may start after the first request is answered
            yield made
        assert not made.errors


def active(fuse: FuseSocket) -> int:
    return fuse.transport.statistics().active_workers


def come_back(fuse: FuseSocket) -> None:
    """They were woken: now it is for the system to let them run."""
    wait_until(lambda: active(fuse) == WORKERS, "all workers are active")


def read(fuse: FuseSocket, *, pid: int = TID, size: int = 7) -> None:
    assert fuse.ask(READ, IN.pack(READER, 0, size), pid=pid).data == b"content"


def until_alone(fuse: FuseSocket, step: Callable[[], None]) -> None:
    """Some requests are enough; a machine with other work may be long in running a worker that is
    about to sleep.
    """
    until = time.monotonic() + SECONDS_MAX
    while time.monotonic() < until:
        step()
        if active(fuse) == 1:
            return
    pytest.fail(f"{active(fuse)} workers are active, not 1")


def leave_alone(fuse: FuseSocket) -> None:
    until_alone(fuse, lambda: read(fuse))
    read(fuse)  # by the worker that is left, which may have slept since before


def take_long(fuse: FuseSocket) -> None:
    """A call that ends after many other requests."""
    over = threading.Event()

    def wait(upcall: Kept) -> transport.Answer | None:
        assert over.wait(SECONDS_MAX)
        return refuse(upcall)

    fuse.on_upcall = wait
    try:
        slow = fuse.send(CALL)
        for _ in range(REQUESTS_MAX):
            read(fuse)
            assert active(fuse) > 1, "nobody waits for the next request"
    finally:
        over.set()
    assert fuse.answer().unique == slow


def test_one_worker_serves_a_thread_that_is_alone(fuse: FuseSocket) -> None:
    leave_alone(fuse)


def test_two_threads_get_all_workers(fuse: FuseSocket) -> None:
    leave_alone(fuse)
    read(fuse, pid=TID + 1)
    come_back(fuse)
    for number in range(REQUESTS_MAX):
        read(fuse, pid=TID + number % 2)
    assert active(fuse) == WORKERS
    leave_alone(fuse)


def test_a_long_request_gets_all_workers(fuse: FuseSocket) -> None:
    leave_alone(fuse)
    read(fuse, size=LONG_BYTES)
    come_back(fuse)
    for _ in range(REQUESTS_MAX):
        read(fuse, size=LONG_BYTES)
    assert active(fuse) == WORKERS
    leave_alone(fuse)
    fuse.ask(WRITE, IN.pack(WRITER, 0, LONG_BYTES))  # the size decides, not that the data lacks
    come_back(fuse)


def test_what_the_kernel_asks_by_itself_is_nobody_else(fuse: FuseSocket) -> None:
    def step() -> None:
        read(fuse)
        read(fuse, pid=0)

    until_alone(fuse, step)


def test_nobody_waits_for_a_call_that_takes_long(fuse: FuseSocket) -> None:
    leave_alone(fuse)
    take_long(fuse)


def test_nobody_waits_for_a_worker_that_is_gone(fuse: FuseSocket) -> None:
    leave_alone(fuse)

    def fail(upcall: Kept) -> transport.Answer | None:
        raise InterruptedError(upcall.opcode)

    fuse.on_upcall = fail
    fuse.send(CALL)
    for _ in range(REQUESTS_MAX):
        read(fuse)
    assert [type(error) for error in fuse.take_errors()] == [InterruptedError]


def test_they_look_again_after_a_rest(fuse: FuseSocket) -> None:
    """The resting workers sleep once nothing has happened for 1 ms: then a call that takes long."""
    leave_alone(fuse)
    time.sleep(0.01)
    take_long(fuse)


def workers_cpu_s() -> float:
    """Of all threads but this one."""
    return time.process_time() - time.thread_time()


@pytest.mark.parametrize("fuse", [10**12], indirect=True)
def test_a_worker_polls(fuse: FuseSocket) -> None:
    leave_alone(fuse)
    begin_s = workers_cpu_s()

    def polled() -> bool:
        leave_alone(fuse)  # on a busy machine they may have come back
        return workers_cpu_s() - begin_s >= 0.05

    wait_until(polled, "a worker polls")


def processors() -> dict[int, int]:
    """Where each thread of this process is, or was last."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        found[int(task.name)] = int(fields[36])
    return found


@pytest.mark.parametrize("fuse", [10**12], indirect=True)
def test_the_worker_goes_where_its_client_is(fuse: FuseSocket) -> None:
    """Of several workers that would poll it is the one that serves."""
    own, before = threading.get_native_id(), os.sched_getaffinity(0)
    others = {task for task in processors() if task != own}
    allowed = {task: os.sched_getaffinity(task) for task in others}
    try:
        for processor in sorted(before) * 2:
            os.sched_setaffinity(0, {processor})

            slept = beside = 0
            for _ in range(PLACED):
                until_alone(fuse, lambda: read(fuse, pid=own))
                for _ in range(REQUESTS_MAX):
                    read(fuse, pid=own)
                begin_s = workers_cpu_s()
                time.sleep(0.02)
                # There it does not poll; elsewhere it does, for ever.
                slept += workers_cpu_s() - begin_s < 0.005
                now = processors()  # a thread of whoever runs the tests may have ended
                beside += processor in [now[task] for task in others & now.keys()]
            assert slept > PLACED // 2
            assert beside  # until the system has moved it away, for what else there is to do
            left = others & processors().keys()
            assert all(os.sched_getaffinity(task) == allowed[task] for task in left)
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("fuse", [10**12], indirect=True)
def test_a_worker_that_need_not_stay_looks_from_where_it_is(fuse: FuseSocket) -> None:
    """It polls beside its client, wherever that is; until it is to stay again, and sleeps there."""
    own = threading.get_native_id()

    def polls() -> bool:
        until_alone(fuse, lambda: read(fuse, pid=own))
        for _ in range(REQUESTS_MAX):
            read(fuse, pid=own)
        begin_s = workers_cpu_s()
        time.sleep(0.02)
        return workers_cpu_s() - begin_s >= 0.005

    fuse.transport.stay_with_client(stays=False)
    assert [polls() for _ in range(PLACED)].count(True) > PLACED // 2
    fuse.transport.stay_with_client(stays=True)
    assert [polls() for _ in range(PLACED)].count(False) > PLACED // 2


@pytest.mark.parametrize("fuse", [0], indirect=True)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="no second processor to go to")
def test_a_worker_that_keeps_away_leaves_its_client_s_processor(fuse: FuseSocket) -> None:
    own, before = threading.get_native_id(), os.sched_getaffinity(0)
    others = {task for task in processors() if task != own}
    try:
        os.sched_setaffinity(0, {min(before)})
        fuse.transport.stay_with_client(stays=True)
        apart = 0
        for _ in range(PLACED):
            until_alone(fuse, lambda: read(fuse, pid=own))
            fuse.transport.stay_with_client(stays=True)
            for _ in range(REQUESTS_MAX):
                read(fuse, pid=own)
            begun = {task: slices(task) for task in others}
            for _ in range(SOON):
                read(fuse, pid=own)
            worker = max(others, key=lambda task: slices(task) - begun[task])
            was_beside = processors()[worker] == min(before)
            fuse.transport.stay_with_client(stays=False)
            for _ in range(2):
                read(fuse, pid=own)
            apart += was_beside and processors()[worker] != min(before)
        assert apart > 1  # until the system brings it back, on a busy machine
    finally:
        os.sched_setaffinity(0, before)


def test_both_ways_are_tried_on_who_is_alone(fuse: FuseSocket) -> None:
    fuse.transport.stay_with_client(stays=None)

    def step() -> None:
        for _ in range(REQUESTS_MAX):
            read(fuse)

    def tried() -> bool:
        step()
        return fuse.transport.statistics().trials > 0

    wait_until(tried, "a trial has ended")


def slices(task: int) -> int:
    """How often a thread of this process got a processor; 0: it has ended."""
    try:
        text = Path(f"/proc/self/task/{task}/schedstat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.split()[2])


@pytest.mark.parametrize("fuse", [0], indirect=True)
def test_the_worker_follows_soon_where_requests_come_late(fuse: FuseSocket) -> None:
    """Else it would look after 128 of them where its client is. A processor that others use as
    well is none to follow to: so this is tried until it is quiet for a moment.
    """
    before = os.sched_getaffinity(0)
    try:
        assert any(follows_mostly(fuse, sorted(before)) for _ in range(ROUNDS_MAX))
    finally:
        os.sched_setaffinity(0, before)


def follows_mostly(fuse: FuseSocket, processors_of_client: list[int]) -> bool:
    """True if the worker is mostly where its client is, soon after that was put elsewhere. One that
    stays where it is has been left behind each time.
    """
    own = threading.get_native_id()
    others = [task for task in processors() if task != own]
    followed = 0
    for trial in range(PLACED):
        until_alone(fuse, lambda: read(fuse, pid=own))
        for _ in range(REQUESTS_MAX):
            read(fuse, pid=own)
        processor = processors_of_client[trial % len(processors_of_client)]
        os.sched_setaffinity(0, {processor})
        served = {task: slices(task) for task in others}
        for _ in range(SOON):
            until = time.perf_counter() + PAUSE_S
            while time.perf_counter() < until:
                pass
            read(fuse, pid=own)
        worker = max(others, key=lambda task: slices(task) - served[task])
        followed += processors()[worker] == processor
    return followed > PLACED // 2


@pytest.mark.parametrize("fuse", [0, 10_000_000], indirect=True)
def test_a_worker_that_waits_in_vain_sleeps(fuse: FuseSocket) -> None:
    leave_alone(fuse)
    begin_s = workers_cpu_s()
    time.sleep(0.3)
    assert workers_cpu_s() - begin_s < 0.1


def all_are_ordinary() -> bool:
    """No thread of this process is in the background, where others have the processor first."""
    tasks = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    return all(os.sched_getscheduler(task) == os.SCHED_OTHER for task in tasks)


def call_alone(fuse: FuseSocket) -> None:
    """Calls by this thread, whose answers may be given in the background (places.c)."""
    own = threading.get_native_id()
    until_alone(fuse, lambda: fuse.ask(CALL, pid=own))
    for _ in range(REQUESTS_MAX):
        fuse.ask(CALL, pid=own)


def test_who_answers_in_the_background_comes_back(fuse: FuseSocket) -> None:
    call_alone(fuse)
    wait_until(all_are_ordinary, "all are back")


def test_an_answer_that_takes_long_does_not_stay_in_the_background(fuse: FuseSocket) -> None:
    """Nobody takes answers: the one that gives them waits, and others see that it comes back."""
    fuse.block_answers()
    for _ in range(3):
        call_alone(fuse)
        sent = [fuse.send(CALL, pid=threading.get_native_id()) for _ in range(2 * SMALL_ANSWERS)]
        wait_until(all_are_ordinary, "all are back")
        assert {fuse.answer().unique for _ in sent} == set(sent)


def test_who_may_not_come_back_stays() -> None:
    """In a thread without CAP_SYS_NICE, whose workers have its rights."""
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            drop_capability(CAP_SYS_NICE)
            with room() as place:
                content = place.new_map(capacity=200_000)
                with fuse_socket(place.engine, content, upcalls=[CALL], workers=WORKERS) as made:
                    made.transport.stay_with_client(stays=True)
                    come_back(made)
                    call_alone(made)
                    wait_until(all_are_ordinary, "none has gone")
        except BaseException as failure:  # noqa: BLE001  raised below
            failures.append(failure)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure
