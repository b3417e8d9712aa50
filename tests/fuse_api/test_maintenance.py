"""What a daemon does when nobody asks for anything."""

from __future__ import annotations

import threading
import types
from collections.abc import Awaitable, Callable

import pytest
import trio

from cxlfs.daemon import populater, server
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from tests.support.stores import make_media

SECONDS_MAX = 10


def run_until(task: Callable[[], Awaitable[None]], done: threading.Event) -> None:
    """One of the daemon's tasks, until it has done enough."""

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(task)
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
    daemon = object.__new__(server._Server)
    daemon._service = types.SimpleNamespace(store=store)  # type: ignore[assignment]
    readers = types.SimpleNamespace(maintain=lambda: None)
    daemon._operations = types.SimpleNamespace(  # type: ignore[assignment]
        lock=lock, failures=None, readers=readers
    )
    run_until(daemon._maintain, done)
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
    monkeypatch.setattr(populater, "IDLE_SECONDS", 0.001)
    run_until(populater.Populater(store, lock).run, done)
    assert len(set(told)) == len(told)
    store.abandon()
    media.close()


def test_who_writes_has_the_next_room_mapped_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the window, and not only what is mapped at a time while nothing happens."""
    media = make_media(64 << 20)
    Store.format(media)
    store = Store.open(media)
    pieces, seen, done = 5 * populater._IDLE_PIECES, list[int](), threading.Event()

    def room_ahead() -> tuple[int, int] | None:
        return None if len(seen) == pieces else (4096 * len(seen), 4096)

    def populate(_media: object, offset: int, _length: int) -> int:
        seen.append(offset)
        if len(seen) == pieces:
            done.set()
        return 4096

    monkeypatch.setattr(MemoryMedia, "populate", populate)
    monkeypatch.setattr(store.volume.space, "room_ahead", room_ahead)
    monkeypatch.setattr(populater, "IDLE_SECONDS", float(SECONDS_MAX))
    mapper = populater.Populater(store, threading.Lock())
    mapper.wake()  # before anything runs: nothing to wake

    async def main() -> None:
        with trio.fail_after(SECONDS_MAX / 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mapper.run)
                while not done.is_set():
                    mapper.wake()
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()

    trio.run(main)
    assert len(seen) == len(set(seen)) == pieces
    mapper.wake()  # and after it
    store.abandon()
    media.close()


def test_a_mount_has_somebody_for_each_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance, room ahead, torn files, and word of every lease for whoever maps it."""
    begun, ended = set[str](), trio.Event()
    daemon = object.__new__(server._Server)

    async def watch_signals(task_status: trio.TaskStatus[None]) -> None:
        task_status.started()

    def begin(name: str) -> None:
        begun.add(name)
        if len(begun) == 5:
            ended.set()

    def task(name: str) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            begin(name)

        return run

    class Workers:
        transport = None

        def start(self, serve: object, on_end: Callable[[None], None]) -> None:
            assert serve.__self__._on_lease is wake  # type: ignore[attr-defined]
            begin("data")
            on_end(None)

    async def serve_requests(**_: int) -> None:
        with trio.fail_after(SECONDS_MAX):
            await ended.wait()

    def wake() -> None:
        """Somebody writes."""

    for name, value in {
        "_watch_signals": watch_signals,
        "_maintain": task("maintain"),
        "_announce": task("announce"),
        "_populater": types.SimpleNamespace(run=task("populate"), wake=wake),
        "_judging": types.SimpleNamespace(run=task("judge")),
        "_workers": Workers(),
        "_operations": types.SimpleNamespace(
            page_cache=types.SimpleNamespace(start=lambda: None, is_direct=None),
            store=None,
            direct_access=None,
            past=None,
        ),
        "_failure": None,
    }.items():
        setattr(daemon, name, value)
    monkeypatch.setattr(server.pyfuse3, "main", serve_requests)
    monkeypatch.setattr(server.pyfuse3, "terminate", lambda: None)
    trio.run(daemon._serve_mount)
    assert daemon._failure is None
    assert begun == {"announce", "data", "judge", "maintain", "populate"}
