"""Long answers through a pipe: the same bytes, and the pipe is whole again after a failure."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs import native
from cxlfs.fuse.request_sizes import answer_bytes_max, pipe_bytes_max
from cxlfs.native import FaultKind
from tests.support.extents import Room, pattern, room
from tests.support.fuse_socket import FuseSocket, fuse_socket

LEAST = 64 << 10
REQUEST_BYTES_MAX = 1 << 20
LONGEST = answer_bytes_max(REQUEST_BYTES_MAX, pipe_bytes_max(REQUEST_BYTES_MAX + (2 << 12)))
"""Without CAP_SYS_RESOURCE, as in a container, pipes have 1 MiB."""
DATA = pattern(3 << 20, 1)
NOBODY = 65534
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def place() -> Iterator[Room]:
    with room(segments=2, segment_bytes=16 << 20) as made:
        yield made


def fill(fuse: FuseSocket) -> None:
    """Most of it in one piece, some of it written over."""
    fuse.content.write(0, DATA[: 2 << 20])
    fuse.content.write(2 << 20, DATA[2 << 20 :])
    fuse.content.write(1_500_000, DATA[1_500_000:1_500_100])


@pytest.fixture
def fuse(place: Room) -> Iterator[FuseSocket]:
    content = place.new_map(capacity=8 << 20)
    with fuse_socket(
        place.engine, content, request_bytes_max=REQUEST_BYTES_MAX, splice_bytes_min=LEAST
    ) as made:
        fill(made)
        yield made
    assert not made.errors


def spliced(fuse: FuseSocket) -> int:
    """The one worker counts an answer after it was given, and before it takes another request."""
    assert fuse.read(0, 1).error == 0
    return fuse.transport.statistics().spliced_reads


def check(fuse: FuseSocket, offset: int, size: int) -> None:
    answer = fuse.read(offset, size)
    assert answer.error == 0
    assert answer.data == DATA[offset : offset + size]


def test_long_answers_go_through_the_pipe(fuse: FuseSocket) -> None:
    assert LONGEST in (REQUEST_BYTES_MAX, REQUEST_BYTES_MAX // 2)
    for size in (LEAST, LEAST + 1, 200_001, LONGEST):
        for offset in (0, 1, 4095, 4096, 123_457):
            before = spliced(fuse)
            check(fuse, offset, size)
            assert spliced(fuse) == before + 1, (offset, size)


def test_short_answers_are_written(fuse: FuseSocket) -> None:
    for offset, size in ((0, 1), (5, 4096), (4096, LEAST - 1), (len(DATA) - 10, REQUEST_BYTES_MAX)):
        check(fuse, offset, size)
    assert spliced(fuse) == 0


def test_an_answer_in_several_pieces(fuse: FuseSocket) -> None:
    before = fuse.transport.statistics().read_copies
    check(fuse, 1_400_000, 200_000)
    assert fuse.transport.statistics().read_copies == before + 1
    assert spliced(fuse) == 1


@pytest.mark.parametrize("nth", [1, 2, 5])
def test_after_a_failure_the_answer_is_written(fuse: FuseSocket, nth: int) -> None:
    """The pipe was full then: what comes next is nothing of that."""
    native.set_fault(FaultKind.SPLICE, nth)
    try:
        for number in range(6):
            check(fuse, number * 1000, 100_000 + number)
        assert native.fault_count(FaultKind.SPLICE) == 6
    finally:
        native.set_fault(FaultKind.SPLICE, 0)
    assert spliced(fuse) == 5


def test_without_a_pipe_answers_are_written(place: Room) -> None:
    fuse = FuseSocket(
        place.engine,
        place.new_map(capacity=8 << 20),
        request_bytes_max=REQUEST_BYTES_MAX,
        splice_bytes_min=LEAST,
    )
    try:
        fill(fuse)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, allowed[1]))
        try:
            fuse.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
        check(fuse, 0, REQUEST_BYTES_MAX)
        assert spliced(fuse) == 0
    finally:
        fuse.close()


def test_a_pipe_that_is_too_small_takes_what_fits() -> None:
    """An ordinary user may have as much as this: the header needs a page more."""
    allowed = int(Path("/proc/sys/fs/pipe-max-size").read_text("ascii"))
    user = os.geteuid()
    if user == 0:
        os.seteuid(NOBODY)
    try:
        with (
            room(segments=2, segment_bytes=2 * allowed) as place,
            fuse_socket(
                place.engine,
                place.new_map(capacity=allowed),
                request_bytes_max=allowed,
                splice_bytes_min=LEAST,
            ) as fuse,
        ):
            data = pattern(allowed, 2)
            fuse.content.write(0, data)
            for size, goes_through in ((allowed, 0), (allowed // 2, 1)):
                assert fuse.read(0, size).data == data[:size]
                assert spliced(fuse) == goes_through
    finally:
        os.seteuid(user)


def test_without_room_for_pipes_answers_are_written(place: Room) -> None:
    """A user whose pipes have all the pages that fs.pipe-user-pages-soft grants gets tiny ones."""
    granted = int(Path("/proc/sys/fs/pipe-user-pages-soft").read_text("ascii"))
    user = os.geteuid()
    ends: list[int] = []
    if user == 0:
        os.seteuid(NOBODY)
    try:
        while (granted > 0 and not ends) or fcntl.fcntl(
            ends[-1], fcntl.F_GETPIPE_SZ
        ) > PAGE_BYTES * 2:
            ends += os.pipe()
            with contextlib.suppress(PermissionError):
                granted -= fcntl.fcntl(ends[-1], fcntl.F_SETPIPE_SZ, 1 << 20) // PAGE_BYTES
        with fuse_socket(
            place.engine,
            place.new_map(capacity=8 << 20),
            request_bytes_max=REQUEST_BYTES_MAX,
            splice_bytes_min=LEAST,
        ) as fuse:
            fill(fuse)
            check(fuse, 0, REQUEST_BYTES_MAX)
            check(fuse, 5, LEAST)
            assert spliced(fuse) == 0
    finally:
        os.seteuid(user)
        for end in ends:
            os.close(end)


def test_a_worker_closes_its_pipe(place: Room) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    content = place.new_map(capacity=8 << 20)
    for splice_bytes_min, more in ((0, 5), (LEAST, 5 + 2 * 3)):
        with fuse_socket(place.engine, content, workers=3, splice_bytes_min=splice_bytes_min):
            assert descriptors() == before + more
        assert descriptors() == before
