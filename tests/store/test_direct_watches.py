"""Locks of programs that store by themselves, and the watch of a slip that says that they count."""

from __future__ import annotations

import os
import random

import pytest

from cxlfs.errors import BusyError, InvalidArgumentError, MediaError
from cxlfs.store import Store
from tests.support.slips import Locks, Program
from tests.support.stores import read_file, write_file


def _close(store: Store, handle: int) -> None:
    store.flush(handle, writer_killed=False)
    store.release(handle)


def test_who_stores_where_nothing_is_locked_gets_no_more(store: Store) -> None:
    locks = Locks(store.media)
    for number, wrong in enumerate(("nothing", "no slip", "a byte less", "the slip alone")):
        attributes, handle = store.create(1, b"file %d" % number, 0o644, 1, 1, os.O_RDWR)
        [lease] = store.direct.lease(handle, 4096)
        room, slip = (lease.media_offset, lease.length_bytes), (lease.slip_offset, lease.slip_bytes)
        ranges = {
            "nothing": [],
            "no slip": [room],
            "a byte less": [(room[0], room[1] - 1), slip],
            "the slip alone": [slip],
        }[wrong]
        for offset, length in ranges:
            locks.take("program", offset, length)
        with pytest.raises(InvalidArgumentError, match="not locked"):
            store.direct.lease(handle, 4096)
        assert not store.direct.is_open(attributes.ino), wrong
        locks.drop("program")
        _close(store, handle)
        store.direct.maintain()
        assert store.direct.apart_bytes == 0


def test_what_comes_back_need_not_be_locked(store: Store) -> None:
    _, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    locks = Locks(store.media)
    [lease] = store.direct.lease(handle, 4096)
    locks.take("program", lease.slip_offset, lease.slip_bytes)
    assert store.direct.lease(handle, 4096, returned_lease_ids=[lease.lease_id])
    _close(store, handle)


def test_who_locks_late_finds_no_watch(store: Store, rng: random.Random) -> None:
    """Its slip was closed before it had locked anything: all of it is somebody else's by then."""
    attributes, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    program = Program(store, handle, Locks(store.media))
    [lease] = store.direct.lease(handle, 4096)
    store.direct.close(attributes.ino)
    assert store.direct.apart_bytes == 0
    content = rng.randbytes(100_000)
    other = write_file(store, 1, b"other", content)
    assert not program.take(lease)
    assert read_file(store, other) == content
    _close(store, handle)
    program.die()


def test_a_slip_that_its_program_has_closed_ends_with_the_next_look(
    store: Store, rng: random.Random
) -> None:
    attributes, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    ino, program = attributes.ino, Program(store, handle, Locks(store.media))
    program.ask()
    content = rng.randbytes(5000)
    assert program.write(0, content)
    program.end()
    assert not program.write(5000, b"behind the end")
    program.locks.drop(program)
    assert store.get_attributes(ino).size == 5000
    assert not store.direct.is_open(ino)
    assert store.direct.apart_bytes == 0
    program.ask()
    assert program.write(5000, b"more")
    _close(store, handle)
    assert read_file(store, ino) == content + b"more"
    program.die()


def test_a_watch_that_cannot_end_keeps_the_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    program = Program(store, handle, Locks(store.media))
    program.ask()
    program.die()

    def fails(place: int) -> None:
        raise MediaError(f"cannot unlock {place}")

    with monkeypatch.context() as patch:
        patch.setattr(store.media, "end_watch", fails)
        store.direct.close(attributes.ino)
        store.direct.maintain()
        assert store.direct.apart_bytes > 0
    store.direct.maintain()
    assert store.direct.apart_bytes == 0
    _close(store, handle)


def test_a_medium_without_watches_gives_no_room(store: Store) -> None:
    _, handle = store.create(1, b"file", 0o644, 1, 1, os.O_RDWR)
    before = store.volume.space.available_bytes
    with pytest.raises(BusyError, match="watched"):
        store.direct.lease(handle, 4096)
    assert store.volume.space.available_bytes == before
    _close(store, handle)
