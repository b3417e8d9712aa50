"""What goes on is told once and counted; what changes the store is told each time."""

from __future__ import annotations

import logging
import os

import pytest

from cxlfs.errors import CorruptionError, NoSpaceError
from cxlfs.store import Store
from cxlfs.store.events import EPISODES_MAX, QUIET_SECONDS, REPEAT_SECONDS, Events, StoreEvent
from tests.support.clock import Clock
from tests.support.shop import Shop, close, create, fill, open_for_overwrite
from tests.support.stores import write_file


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[StoreEvent]:
    return []


@pytest.fixture
def events(clock: Clock, told: list[StoreEvent]) -> Events:
    made = Events(lambda ino: b"/f%d" % ino if ino < 1000 else None, clock=clock)
    made.listener = told.append
    return made


def refuse(events: Events, ino: int, message: str = "no room") -> None:
    events.tell("no-space", message, ino=ino, media_offset=None, level=logging.WARNING)


def test_an_episode_is_two_lines(events: Events, clock: Clock, told: list[StoreEvent]) -> None:
    for number in range(6000):
        refuse(events, 7, f"no room for {number}")
        clock.now += 0.01
        events.maintain()
    assert [(e.kind, e.message, e.path) for e in told] == [("no-space", "no room for 0", "/f7")]
    clock.now += QUIET_SECONDS + 1
    events.maintain()
    events.maintain()
    assert told[1:] == [
        StoreEvent("no-space", "5999 more in 60 s, the last one: no room for 5999", 7, "/f7")
    ]
    refuse(events, 7)
    assert [e.message for e in told[2:]] == ["no room"], "a new episode"
    clock.now += QUIET_SECONDS + 1
    refuse(events, 7)
    assert [e.message for e in told[2:]] == ["no room", "no room"], "and another one"


def test_what_goes_on_for_ever_is_told_now_and_then(
    events: Events, clock: Clock, told: list[StoreEvent]
) -> None:
    for _ in range(int(3.5 * REPEAT_SECONDS)):
        refuse(events, 7)
        clock.now += 1
        events.maintain()
    assert len(told) == 4
    events.end_all()
    assert len(told) == 5
    assert sum(int(e.message.split()[0]) for e in told[1:]) + 1 == int(3.5 * REPEAT_SECONDS)


def test_files_and_places_are_told_apart(events: Events, told: list[StoreEvent]) -> None:
    for _ in range(10):
        for ino in (1, 2):
            refuse(events, ino)
            for offset in (4096, 8192):
                events.tell(
                    "checksum-error", "bad", ino=ino, media_offset=offset, level=logging.WARNING
                )
    assert len(told) == len(set(told)) == 6


def test_many_files_are_counted_together(
    events: Events, clock: Clock, told: list[StoreEvent]
) -> None:
    for ino in range(100_000):
        refuse(events, ino)
    assert len(told) == EPISODES_MAX + 1
    assert len({e.path for e in told}) == EPISODES_MAX + 1, "the last one names no file"
    clock.now += QUIET_SECONDS + 1
    events.maintain()
    assert len(told) == EPISODES_MAX + 2
    assert told[-1].message.startswith(f"{100_000 - EPISODES_MAX - 1} more")


def test_what_listeners_act_on_is_told_each_time(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"old")
    for _ in range(5):
        close(store, open_for_overwrite(store, b"a", b"new"), killed=True)
    assert [e.kind for e in shop.events] == ["reverted"] * 5


def test_a_full_store_says_so_once(
    shop: Shop, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    fill(store)
    shop.events.clear()
    caplog.clear()
    ino, handle = create(store, b"f")
    for _ in range(500):
        with pytest.raises(NoSpaceError):
            store.write(handle, 0, bytes(100_000))
    assert [(e.kind, e.ino, e.path) for e in shop.events] == [("no-space", ino, "/f")]
    assert len(caplog.records) == 1
    assert store.statistics().no_space_errors >= 500
    store.set_attributes(ino, size=0, handle=handle)
    close(store, handle)
    store = shop.reopen(store, clean=True)
    assert shop.events[1].message.startswith("499 more")


def test_damage_that_is_read_again_and_again(shop: Shop, store: Store) -> None:
    shop.damaged = True
    ino = write_file(store, 1, b"f", bytes(20_000))
    infos = store.volume.engine.list()
    store.media.store(int(infos["media_offset"][0]) + 5000, b"\x01")
    handle = store.open_file(ino, os.O_RDONLY)
    for _ in range(50):
        with pytest.raises(CorruptionError):
            store.read(handle, 0, 20_000)
    assert [e.kind for e in shop.events] == ["checksum-error"]
    assert store.statistics().checksum_errors == 50


def test_the_name_of_a_file_is_not_searched_for_long(shop: Shop, store: Store) -> None:
    """One whose last name is gone, and that has another among very many."""
    write_file(store, 1, b"first", b"x")
    for number in range(2000):
        store.make_node(1, b"%d" % number, 0o010644, 0, 0, 0)
    far = store.make_directory(1, b"far", 0o755, 0, 0).ino
    ino = store.lookup(1, b"first").ino
    store.rename(1, b"first", far, b"other")
    store.link(ino, far, b"last")
    store.unlink(far, b"last")
    store.link(ino, 1, b"again")
    store.unlink(1, b"again")
    assert store.path_of(ino) == b"/far/other"
    store.volume.event("not-published", "for a test", ino=ino)
    assert shop.events[-1].path is None
