"""What a daemon does when nobody asks for anything."""

from __future__ import annotations

import threading
import types

import trio

from cxlfs.daemon import server

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
