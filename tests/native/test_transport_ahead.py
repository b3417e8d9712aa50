"""What is verified ahead of sequential reads: used once, soon, and never for other bytes."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator

import pytest

from cxlfs.native.transport import Port
from tests.support.extents import Room, pattern, room
from tests.support.fuse_socket import INO, READER, FuseSocket, fuse_socket
from tests.support.mount import wait_until

STEP = 512 << 10
"""The least that is verified ahead."""
STEPS = 16
DATA = pattern(STEPS * STEP, 1)
OTHER = 3
AGE_MAX_S = 0.1
ROWS_MAX = 100


@pytest.fixture
def place() -> Iterator[Room]:
    with room(segments=3, segment_bytes=16 << 20) as made:
        yield made


@contextlib.contextmanager
def served(place: Room, *, workers: int = 2, verify: bool = True) -> Iterator[FuseSocket]:
    content = place.new_map(capacity=len(DATA))
    content.write(0, DATA)
    with fuse_socket(
        place.engine,
        content,
        workers=workers,
        verify=verify,
        request_bytes_max=2 * STEP,
        splice_bytes_min=STEP // 4,
    ) as fuse:
        wait_until(lambda: fuse.transport.statistics().active_workers == workers, "all have begun")
        yield fuse
    assert not fuse.errors


@pytest.fixture
def fuse(place: Room) -> Iterator[FuseSocket]:
    with served(place) as made:
        yield made


def used(fuse: FuseSocket) -> int:
    return fuse.transport.statistics().ahead_bytes


def wait_for_workers(fuse: FuseSocket) -> None:
    wait_until(lambda: fuse.transport.statistics().busy_workers == 0, "the workers wait")


def read(fuse: FuseSocket, *steps: int, handle: int = READER) -> None:
    """One after the other; what follows each is verified when it returns."""
    for step in steps:
        answer = fuse.read(step * STEP, STEP, handle=handle)
        assert answer.data == DATA[step * STEP : (step + 1) * STEP]
        wait_for_workers(fuse)


def read_row(fuse: FuseSocket) -> set[int]:
    """All steps. Those that were read before what was verified ahead of them, by the step before,
    can have been too old: each has used all of that.
    """
    in_time = set()
    earlier = float("-inf")
    for step in range(STEPS):
        before, begin = used(fuse), time.monotonic()
        read(fuse, step)
        if time.monotonic() - earlier < AGE_MAX_S:
            assert used(fuse) - before == STEP
            in_time.add(step)
        earlier = begin
    return in_time


def read_rows(fuse: FuseSocket, wanted: set[int], *, in_one: bool = False) -> None:
    """Rows, until those steps were in time: a busy machine may let any two reads wait. ``in_one``:
    all of them in the last row.
    """
    seen: set[int] = set()
    for _ in range(ROWS_MAX):
        seen = read_row(fuse) | (set() if in_one else seen)
        if wanted <= seen:
            return
    pytest.fail(f"this machine never had time for two reads in a row before {wanted - seen}")


def is_refused(fuse: FuseSocket, step: int, *, handle: int = READER) -> bool:
    """The control plane has to say what is wrong with it."""
    return fuse.read(step * STEP, STEP, handle=handle).error == errno.ENOSYS


def flip(place: Room, offset: int) -> None:
    """In the extent that came last."""
    newest = place.engine.list()
    newest = newest[newest["id"] == place.next_id - 1]
    place.flip(int(newest["media_offset"][0]) + offset, 3)


def test_a_row_of_reads_is_verified_ahead(fuse: FuseSocket) -> None:
    read_rows(fuse, set(range(1, STEPS)))
    assert used(fuse) % STEP == 0


def test_a_read_takes_what_is_verified_by_then(fuse: FuseSocket) -> None:
    """How much that is is for the system to say."""
    for _ in range(100):
        for step in range(STEPS):
            assert fuse.read(step * STEP, STEP).data == DATA[step * STEP : (step + 1) * STEP]
    assert used(fuse) <= 100 * (STEPS - 1) * STEP


@pytest.mark.parametrize("offset", [0, 1, STEP // 2 - 1, STEP // 2, STEP - 1])
def test_damage_is_found_ahead_or_when_it_is_wanted(
    place: Room, fuse: FuseSocket, offset: int
) -> None:
    flip(place, 2 * STEP + offset)
    read(fuse, 0, 1)
    assert is_refused(fuse, 2)
    assert is_refused(fuse, 2)


def test_what_was_verified_serves_one_answer(place: Room, fuse: FuseSocket) -> None:
    read_rows(fuse, {STEPS - 1}, in_one=True)
    flip(place, (STEPS - 1) * STEP)
    assert is_refused(fuse, STEPS - 1)


def test_what_was_verified_is_forgotten(place: Room, fuse: FuseSocket) -> None:
    read(fuse, 0, 1)
    time.sleep(AGE_MAX_S * 1.5)
    flip(place, 2 * STEP)
    assert is_refused(fuse, 2)


def test_new_bytes_at_the_same_place_are_verified(place: Room, fuse: FuseSocket) -> None:
    read(fuse, 0, 1)
    fuse.content.close_lease()
    fuse.content.attach_lease(place.open_extent(len(DATA)))
    assert fuse.content.write(0, DATA)[0] == len(DATA)
    flip(place, 2 * STEP)
    assert is_refused(fuse, 2)


def test_each_handle_has_its_own(place: Room, fuse: FuseSocket) -> None:
    with contextlib.ExitStack() as undo:
        port = Port(INO, fuse.content)
        undo.callback(port.close)
        fuse.transport.open_handle(OTHER, port, readable=True)
        undo.callback(fuse.transport.close_handle, OTHER)
        read(fuse, 0, 1)
        flip(place, 2 * STEP)
        assert is_refused(fuse, 2, handle=OTHER)


@pytest.mark.parametrize(("workers", "verify"), [(1, True), (2, False)])
def test_nothing_is_verified_ahead(place: Room, workers: int, verify: bool) -> None:
    """Where nobody would take requests meanwhile, or nothing is verified."""
    with served(place, workers=workers, verify=verify) as fuse:
        read(fuse, *range(STEPS))
        assert used(fuse) == 0


def test_other_reads_verify_nothing_ahead(fuse: FuseSocket) -> None:
    read(fuse, *range(0, STEPS, 2), *range(STEPS - 1, -1, -1), *[5] * 5)
    assert used(fuse) == 0


def test_short_reads_verify_nothing_ahead(fuse: FuseSocket) -> None:
    for offset in range(0, 8 * STEP, STEP - 1):
        assert fuse.read(offset, STEP - 1).data == DATA[offset : offset + STEP - 1]
        wait_for_workers(fuse)
    assert used(fuse) == 0
