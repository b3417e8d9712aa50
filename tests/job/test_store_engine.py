"""Starts over a key-value store that outlives them: nothing of a former start is heard in a later
one, whoever of it comes first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from cxlfs.errors import JobEngineError
from cxlfs.job.engines import torch
from cxlfs.job.engines.torch import StoreEngine
from tests.support.job_key_value import MemoryStore, Shelf

SIZE = 3


def start(
    shelf: Shelf, *, late: int = -1, until: Callable[[], bool] = lambda: True
) -> list[StoreEngine]:
    """All ranks; ``late`` begins when ``until`` says so."""
    found: dict[int, StoreEngine] = {}

    def begin(rank: int) -> None:
        if rank == late:
            with shelf.changed:
                assert shelf.changed.wait_for(until, 60)
        found[rank] = StoreEngine(MemoryStore(shelf), rank, SIZE, "0")

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(SIZE)]


def test_all_of_a_start_agree_and_no_two_starts_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_CALL_SECONDS_MAX", 0.1)
    shelf = Shelf()
    starts = [start(shelf) for _ in range(3)]
    for engines in starts:
        assert len({engine.world().incarnation for engine in engines}) == 1
    assert len({engines[0].world().incarnation for engines in starts}) == 3


def test_what_was_said_before_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 comes last: the others have found the call of the start before, and answered it."""
    monkeypatch.setattr(torch, "_CALL_SECONDS_MAX", 0.1)
    shelf = Shelf()
    for engine in start(shelf):
        engine.say("1/vote/0", b"for it")

    def is_answered() -> bool:
        return sum(key.startswith("answer/") for key in shelf.kept) == SIZE - 1

    assert not is_answered()
    engines = start(shelf, late=0, until=is_answered)
    assert len({engine.world().incarnation for engine in engines}) == 1
    for engine in engines:
        assert engine.hear("1/vote/0", range(SIZE), 0) == {}
    for engine in engines:
        engine.say("1/vote/0", b"%d" % engine.world().rank)
    for engine in engines:
        assert engine.hear("1/vote/0", range(SIZE), 60) == {0: b"0", 1: b"1", 2: b"2"}


def test_a_rank_that_comes_anew_while_the_others_meet_is_not_taken_for_its_former_self(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has answered and died; what rank 0 says to that answer is not for the one that follows."""
    monkeypatch.setattr(torch, "_INCARNATION_SECONDS", 1.0)
    monkeypatch.setattr(torch, "_CALL_SECONDS_MAX", 0.05)
    shelf = Shelf()
    led: list[StoreEngine] = []

    def lead() -> None:
        led.append(StoreEngine(MemoryStore(shelf), 0, 2, "0"))

    thread = threading.Thread(target=lead)
    thread.start()
    with shelf.changed:
        assert shelf.changed.wait_for(lambda: "call" in shelf.kept, 60)
    call = shelf.kept["call"].decode()
    MemoryStore(shelf).set(f"answer/{call}/1", b"of one that died")
    thread.join()
    with pytest.raises(JobEngineError, match="rank 0 was not heard"):
        StoreEngine(MemoryStore(shelf), 1, 2, "0")


def test_who_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_INCARNATION_SECONDS", 0.05)
    with pytest.raises(JobEngineError, match="not heard: rank 1, 2"):
        StoreEngine(MemoryStore(Shelf()), 0, SIZE, "0")
    begun = time.monotonic()
    with pytest.raises(JobEngineError, match="rank 0 was not heard"):
        StoreEngine(MemoryStore(Shelf()), 1, SIZE, "0")
    assert time.monotonic() - begun < 60


def test_in_a_store_of_its_own_rank_0_waits_for_nobody() -> None:
    shelf = Shelf()
    first = StoreEngine(MemoryStore(shelf), 0, 2, "0", is_new=True)
    second = StoreEngine(MemoryStore(shelf), 1, 2, "0", is_new=True)
    assert first.world().incarnation == second.world().incarnation
