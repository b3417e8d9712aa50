"""Names that are known to be absent: who asks is told so, and nobody is when it is over."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator

import pytest

from cxlfs.native.transport import ABSENT_NAMES_MAX
from tests.support.extents import room
from tests.support.fuse_socket import INO, SECONDS_MAX, Answer, FuseSocket, fuse_socket

LOOKUP = 1
SECONDS = 12_345
ENTRY = struct.Struct("=QQQQII88x")
ABSENT = ENTRY.pack(0, 0, SECONDS, 0, 0, 0)
ANSWERS = 50
"""More than fit where they are to wait."""
ROUNDS = 20


@pytest.fixture
def fuse() -> Iterator[FuseSocket]:
    with (
        room() as place,
        fuse_socket(
            place.engine,
            place.new_map(),
            upcalls=[LOOKUP],
            workers=2,
            absent_seconds=SECONDS,
        ) as made,
    ):
        yield made
        assert not made.errors


def look(fuse: FuseSocket, name: bytes) -> bool:
    """True: it is absent; false: that was a call."""
    answer = fuse.ask(LOOKUP, name + b"\0")
    if fuse.no_upcall():
        assert answer == Answer(answer.unique, 0, ABSENT)
        return True
    assert fuse.upcall().arguments == name + b"\0"
    return False


def test_what_was_noted_is_absent_until_it_is_taken_back(fuse: FuseSocket) -> None:
    name = b"n" * 255
    assert not look(fuse, name)
    fuse.transport.note_absent(INO, name)
    fuse.transport.note_absent(INO + 1, b"elsewhere")
    assert look(fuse, name)
    assert look(fuse, name)
    assert not look(fuse, name[:-1])
    assert not look(fuse, name[:-1] + b"m")
    assert not look(fuse, b"elsewhere")
    fuse.transport.take_absent_back(INO, b"elsewhere")
    assert look(fuse, name)
    fuse.transport.take_absent_back(INO, name)
    assert not look(fuse, name)


def test_all_are_taken_back_at_once(fuse: FuseSocket) -> None:
    for name in (b"a", b"b", b"c"):
        fuse.transport.note_absent(INO, name)
        assert look(fuse, name)
    fuse.transport.take_all_absent_back()
    assert not any(look(fuse, name) for name in (b"a", b"b", b"c"))


def test_those_noted_last_are_known(fuse: FuseSocket) -> None:
    names = [b"%d" % number for number in range(ABSENT_NAMES_MAX + 3)]
    for name in names:
        for _ in range(2):
            fuse.transport.note_absent(INO, name)
    assert [look(fuse, name) for name in names] == [False] * 3 + [True] * ABSENT_NAMES_MAX


def test_what_is_no_name_is_a_call(fuse: FuseSocket) -> None:
    for name in (b"", b"n" * 256):
        fuse.transport.note_absent(INO, name)
        assert not look(fuse, name)
    fuse.transport.note_absent(INO, b"name")
    for body in (b"", b"name"):  # without a zero at the end
        fuse.ask(LOOKUP, body)
        assert fuse.upcall().arguments == body


@pytest.mark.parametrize(
    "take_back",
    [
        lambda fuse: fuse.transport.take_absent_back(INO, b"name"),
        lambda fuse: fuse.transport.take_all_absent_back(),
    ],
    ids=["one", "all"],
)
def test_nobody_is_told_any_more_when_it_is_taken_back(
    fuse: FuseSocket, take_back: Callable[[FuseSocket], None]
) -> None:
    fuse.block_answers()
    for _ in range(ROUNDS):
        fuse.transport.note_absent(INO, b"name")
        sent = {fuse.send(LOOKUP, b"name\0") for _ in range(ANSWERS)}
        first = fuse.answer()
        mark = next(fuse.uniques)

        def end(mark: int = mark) -> None:
            take_back(fuse)
            fuse.transport.reply(mark, b"over")

        thread = threading.Thread(target=end)
        thread.start()
        answers = [first, *(fuse.answer() for _ in range(ANSWERS))]
        thread.join(SECONDS_MAX)
        assert {answer.unique for answer in answers} == {mark, *sent}
        end_at = [answer.unique for answer in answers].index(mark)
        assert ABSENT not in [answer.data for answer in answers[end_at:]]
