"""What a daemon does when nobody asks for anything."""

from __future__ import annotations

import threading
import types

import pytest
import trio

from cxlfs.daemon import server
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from tests.support.stores import make_media

SECONDS_MAX = 30


def run_until(store: object, lock: threading.Lock, done: threading.Event) -> None:
    """The daemon's loop over a store, until that has seen enough."""
    daemon = object.__new__(server._Server)
    daemon._service = types.SimpleNamespace(store=store)  # type: ignore[assignment]
    daemon._operations = types.SimpleNamespace(lock=lock, failures=None)  # type: ignore[assignment]

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon._maintain)
            assert await trio.to_thread.run_sync(done.wait, SECONDS_MAX)
            nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_step_is_one_turn_with_the_lock_and_the_rest_is_done_without_it() -> None:
    lock, done, calls = threading.Lock(), threading.Event(), list[str]()

    def maintain(_now: float, *, apart: bool) -> bool:
        assert apart
        assert lock.locked()
        calls.append("with")
        return True

    def maintain_apart() -> bool:
        assert not lock.locked()
        calls.append("without")
        if len(calls) == 20:
            done.set()
        return True

    counters = types.SimpleNamespace(maintenance_seconds_max=0.0)
    volume = types.SimpleNamespace(counters=counters)
    store = types.SimpleNamespace(maintain=maintain, maintain_apart=maintain_apart, volume=volume)
    run_until(store, lock, done)
    assert calls[:20] == ["with", "without"] * 10
    assert counters.maintenance_seconds_max > 0


def test_idle_room_is_mapped_ahead_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it once, by whoever has time: the lock is free while pages are zeroed."""
    media = make_media(64 << 20)
    Store.format(media)
    store = Store.open(media)
    free_bytes = store.volume.space.free_count * store.superblock.segment_size_bytes
    lock, told, done = threading.Lock(), list[tuple[int, int]](), threading.Event()

    def populate(_media: object, offset: int, length: int) -> int:
        assert not lock.locked()
        told.append((offset, length))
        if sum(length for _, length in told) == free_bytes:
            done.set()
        return length

    monkeypatch.setattr(MemoryMedia, "populates", True)
    monkeypatch.setattr(MemoryMedia, "populate", populate)
    monkeypatch.setattr(server, "MAINTENANCE_SECONDS", 0.001)
    run_until(store, lock, done)
    assert len(set(told)) == len(told)
    store.abandon()
    media.close()
