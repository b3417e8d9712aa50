"""Checkpoints beside training: in order, so many at most, and no failure that nobody hears of."""

from __future__ import annotations

import functools
import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cxlfs.job import (
    Aborted,
    AbortedError,
    Checkpointer,
    Committed,
    JobConfigurationError,
    NotRestoredError,
    PendingCheckpoint,
    Restored,
    UndecidedError,
    driver,
)
from cxlfs.job.pending import InOrder
from tests.support.job_ranks import SECONDS, WORLD, Job, ThreadEngine, content, write

STEPS = (10, 20, 30, 40)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def begin(made: Checkpointer, step: int, *failing: int) -> PendingCheckpoint:
    """On the ranks that are failing, saving does."""
    rank = made.world.rank

    def save(directory: Path, data: bytes) -> None:
        assert data == content(rank, step)
        write(directory, rank, step)
        if rank in failing:
            raise ValueError("no loss")

    return made.async_checkpoint(step, save, snapshot=lambda: content(rank, step))


def when_waiting(monkeypatch: pytest.MonkeyPatch, act: Callable[[InOrder, int], None]) -> None:
    """Done as soon as a rank is about to wait for what is in flight."""
    settle = InOrder.settle

    def settling(self: InOrder, in_flight_max: int, seconds: float) -> BaseException | None:
        act(self, in_flight_max)
        return settle(self, in_flight_max, seconds)

    monkeypatch.setattr(InOrder, "settle", settling)


# --- order and bound ----------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2])
def test_so_many_in_flight_and_in_order(
    job: Job, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saving goes on only when the next call has to wait for it."""
    job.in_flight = in_flight
    gates: dict[int, threading.Semaphore] = {}
    saved: dict[int, list[int]] = {rank: [] for rank in range(WORLD)}
    kept_too_long: list[int] = []

    def work(made: Checkpointer) -> object:
        job.load(made)
        rank = made.world.rank
        gates[id(made._background)] = gate = threading.Semaphore(0)
        alive: list[weakref.ref[threading.Event]] = []
        begun: list[PendingCheckpoint] = []
        changed = made._background._changed
        notify_all = changed.notify_all

        def notifying() -> None:
            kept = sum(ref() is not None for ref in alive) - made._background._in_flight
            kept_too_long.append(kept)
            notify_all()

        monkeypatch.setattr(changed, "notify_all", notifying)

        def snapshot() -> threading.Event:
            assert sum(not pending.done() for pending in begun) < in_flight
            taken = threading.Event()
            alive.append(weakref.ref(taken))
            return taken

        def save(step: int, directory: Path, _taken: threading.Event) -> None:
            assert gate.acquire(timeout=SECONDS)
            saved[rank].append(step)
            write(directory, rank, step)

        for step in STEPS:
            write_it = functools.partial(save, step)
            begun += [made.async_checkpoint(step, write_it, snapshot=snapshot)]
        made.close()
        return [pending.wait() for pending in begun]

    def open_gate(background: InOrder, in_flight_max: int) -> None:
        if gate := gates.get(id(background)):
            for _ in range(background._in_flight - in_flight_max):
                gate.release()

    when_waiting(monkeypatch, open_gate)
    rows = job.start(work)
    assert rows[0] == rows[1] == rows[2]
    for row in rows:
        assert isinstance(row, list), row
        assert [type(outcome) for outcome in row] == [Committed] * 4
        assert [outcome.step for outcome in row] == list(STEPS)
        assert [outcome.attempt.number for outcome in row] == [1, 2, 3, 4]
    assert kept_too_long == [0] * len(STEPS) * WORLD
    assert saved == {rank: list(STEPS) for rank in range(WORLD)}
    found = job.start(job.load)
    assert all(isinstance(outcome, Restored) and outcome.step == 40 for outcome in found)


def test_what_is_saved_is_the_snapshot(tmp_path: Path) -> None:
    made = Checkpointer(tmp_path, allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    weights, changed = bytearray(b"step 1"), threading.Event()

    def save(directory: Path, data: bytes) -> None:
        assert changed.wait(SECONDS)
        (directory / "weights").write_bytes(data)

    with made:
        pending = made.async_checkpoint(1, save, snapshot=lambda: bytes(weights))
        assert not pending.done()
        weights[-1:] = b"2"
        changed.set()
    assert isinstance(pending.wait(), Committed)
    seen: list[bytes] = []
    made = Checkpointer(tmp_path, allow_volatile=True)
    made.restore_from_checkpoint(lambda path: seen.append((path / "weights").read_bytes()))
    assert seen == [b"step 1"]


def test_the_engine_is_used_by_one_thread_at_a_time(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of the caller's own thread waits for what is in flight."""
    busy: dict[int, str] = {}

    def alone(name: str) -> None:
        method = getattr(ThreadEngine, name)

        def guarded(self: ThreadEngine, *args: object, **how: object) -> object:
            other = busy.setdefault(id(self), threading.current_thread().name)
            assert other == threading.current_thread().name
            try:
                return method(self, *args, **how)
            finally:
                del busy[id(self)]

        monkeypatch.setattr(ThreadEngine, name, guarded)

    for name in ("say", "hear", "forget"):
        alone(name)
    gates: dict[int, threading.Event] = {}
    when_waiting(monkeypatch, lambda own, _max: gates.setdefault(id(own), threading.Event()).set())

    def work(made: Checkpointer) -> object:
        job.load(made)
        rank = made.world.rank
        gates[id(made._background)] = gate = threading.Event()

        def save(directory: Path, _data: None) -> None:
            assert gate.wait(SECONDS)
            write(directory, rank, 10)

        pending = made.async_checkpoint(10, save, snapshot=lambda: None)
        later = made.distributed_checkpoint(20, lambda path: write(path, rank, 20))
        assert pending.done()
        begin(made, 30)
        return pending.wait(), later, job.load(made)

    for row in job.start(work):
        assert isinstance(row, tuple), row
        assert [type(outcome) for outcome in row] == [Committed, Committed, Restored]
        assert [outcome.step for outcome in row] == [10, 20, 30]


# --- failures -----------------------------------------------------------------------------------


def next_call(job: Job, made: Checkpointer, name: str) -> object:
    if name == "async":
        return begin(made, 20)
    if name == "sync":
        return made.distributed_checkpoint(20, lambda path: write(path, made.world.rank, 20))
    return job.load(made) if name == "restore" else getattr(made, name)()


@pytest.mark.parametrize("name", ["async", "sync", "restore", "wait", "close"])
def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_call(job: Job, name: str) -> None:
    def work(made: Checkpointer) -> object:
        job.load(made)
        begin(made, 10, 1)
        with pytest.raises(AbortedError, match="step 10: rank 1: ValueError: no loss"):
            next_call(job, made, name)
        if name == "close":
            with pytest.raises(JobConfigurationError):
                next_call(job, made, "async")
            return None
        row = (
            begin(made, 30).wait(),
            made.distributed_checkpoint(40, lambda path: write(path, made.world.rank, 40)),
        )
        made.close()
        return row

    for row in job.start(work):
        if name == "close":
            assert row is None
            continue
        assert isinstance(row, tuple), row
        assert [type(outcome) for outcome in row] == [Committed, Committed]
    assert all("step-000000000020" not in " ".join(job.attempts(rank)) for rank in range(WORLD))


def test_who_has_asked_hears_no_more_of_it(job: Job) -> None:
    """Rank 0 alone asks: the others raise, and it is told at once that they did not begin."""

    def work(made: Checkpointer) -> object:
        job.load(made)
        first = begin(made, 10, 1)
        if made.world.rank == 0:
            return first.wait(), begin(made, 20).wait(), begin(made, 30).wait()
        with pytest.raises(AbortedError):
            begin(made, 20)
        return begin(made, 30).wait()

    rows = job.start(work)
    assert isinstance(rows[0], tuple), rows[0]
    assert rows[0][0] == Aborted(10, ((1, "ValueError: no loss"),))
    assert isinstance(rows[0][1], Aborted)
    reason = "not begun: AbortedError: the checkpoint of step 10: rank 1: ValueError: no loss"
    assert rows[0][1].reasons == ((1, reason), (2, reason))
    assert rows[0][2] == rows[1] == rows[2]
    assert isinstance(rows[1], Committed)


def test_who_did_not_begin_has_said_why_for_all(job: Job) -> None:
    """A rank hears an error of its own: those who did not are not stopped for it as well."""

    def work(made: Checkpointer) -> object:
        job.load(made)
        if made.world.rank == 2:
            made._background.begin(PendingCheckpoint(10, 0.0), lambda: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                begin(made, 20)
        else:
            begin(made, 20)
        outcome = begin(made, 30).wait(SECONDS)
        made.close()
        return outcome

    rows = job.start(work)
    assert [type(row) for row in rows] == [Committed] * 3, rows


def test_a_snapshot_that_fails_on_one_rank_aborts_on_all(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        job.load(made)

        def snapshot() -> None:
            if made.world.rank == 2:
                raise MemoryError("no room for a copy")

        def save(directory: Path, _data: None) -> None:
            write(directory, made.world.rank, 10)

        first = made.async_checkpoint(10, save, snapshot=snapshot)
        return first.wait(), begin(made, 20).wait()

    for row in job.start(work):
        assert isinstance(row, tuple), row
        assert row[0] == Aborted(10, ((2, "MemoryError: no room for a copy"),))
        assert isinstance(row[1], Committed)


def test_a_rank_that_is_gone_is_told_by_the_next_call(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    hear = ThreadEngine.hear

    def impatient(
        self: ThreadEngine, key: str, ranks: Sequence[int], seconds: float, **how: Any
    ) -> dict[int, bytes]:
        return hear(self, key, ranks, 0.05 if "vote" in key else seconds, **how)

    monkeypatch.setattr(ThreadEngine, "hear", impatient)

    def work(made: Checkpointer) -> object:
        job.load(made)
        if made.world.rank == 1:
            return None
        begin(made, 10)
        with pytest.raises(UndecidedError, match=r"vote: not heard .* rank"):
            made.wait()
        made.close()
        return "told"

    assert job.start(work) == ["told", None, "told"]


def test_what_is_not_done_before_the_deadline_is_told(job: Job) -> None:
    """Saving hangs on rank 1: its next call raises, and so do all."""
    gate, saving = threading.Event(), threading.Event()
    late = "the checkpoint of step 10 is still in flight after 0.05 s"
    reason = f"not begun: UndecidedError: {late}"

    def work(made: Checkpointer) -> object:
        job.load(made)
        rank = made.world.rank

        def save(directory: Path, _data: None) -> None:
            if rank == 1:
                saving.set()
                assert gate.wait(SECONDS)
            write(directory, rank, 10)

        pending = made.async_checkpoint(10, save, snapshot=lambda: None)
        if rank == 1:
            assert saving.wait(SECONDS)
            with pytest.raises(UndecidedError, match="step 10 is still in flight after 0 s"):
                pending.wait(0)
            made.deadline_seconds = 0.01
            with pytest.raises(UndecidedError, match=late):
                begin(made, 20)
            made.deadline_seconds = SECONDS
            gate.set()
        else:
            assert begin(made, 20).wait() == Aborted(20, ((1, reason),))
        outcome = pending.wait(), begin(made, 30).wait()
        made.close()
        return outcome

    for row in job.start(work):
        assert isinstance(row, tuple), row
        assert [type(outcome) for outcome in row] == [Committed, Committed]


def test_a_restart_in_the_process_is_refused_on_all(job: Job) -> None:
    """An error of one rank alone: the others are not left to wait for its stock."""

    def work(made: Checkpointer) -> object:
        job.load(made)
        if made.world.rank == 1:
            made._background.begin(PendingCheckpoint(10, 0.0), lambda: 1 // 0)
        return made.restore_from_checkpoint(lambda _path: None)

    rows = job.start(work)
    assert [type(r) for r in rows] == [NotRestoredError, ZeroDivisionError, NotRestoredError]
    assert "ZeroDivisionError" in str(rows[0])


# --- the end ------------------------------------------------------------------------------------


def test_closing_waits_for_what_is_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    made = Checkpointer(tmp_path, allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)
    when_waiting(monkeypatch, lambda _own, _max: gate.set())

    def save(directory: Path, _data: None) -> None:
        assert gate.wait(SECONDS)
        write(directory, 0, 10)

    begun: list[PendingCheckpoint] = []

    def train() -> None:
        with made:
            begun.append(made.async_checkpoint(10, save, snapshot=gate.clear))
            raise KeyError("training failed")

    with pytest.raises(KeyError):
        train()
    (pending,) = begun
    assert pending.done()
    assert isinstance(pending.wait(), Committed)
    with pytest.raises(JobConfigurationError):
        made.async_checkpoint(20, save, snapshot=lambda: None)
    made.close()


def test_beside_another_error_a_failure_is_its_note(tmp_path: Path) -> None:
    made = Checkpointer(tmp_path, allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)

    def train() -> None:
        with made:
            begin(made, 10, 0)
            raise KeyError("training failed")

    with pytest.raises(KeyError) as caught:
        train()
    assert "ValueError: no loss" in caught.value.__notes__[0]


def test_one_that_is_dropped_finishes_and_tells_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.log, "disabled", True)  # a captured traceback would hold it
    gate, gone = threading.Event(), threading.Event()
    made = Checkpointer(tmp_path, allow_volatile=True)
    made.restore_from_checkpoint(lambda _path: None)

    def save(_directory: Path, _data: None) -> None:
        assert gate.wait(SECONDS)
        raise ValueError("no loss")

    pending = made.async_checkpoint(10, save, snapshot=lambda: None)
    weakref.finalize(made, gone.set)
    del made
    gc.collect()
    assert not gone.is_set()
    with caplog.at_level(logging.ERROR, "cxlfs.job.pending"):
        gate.set()
        while thread := next((t for t in threading.enumerate() if "cxlfs" in t.name), None):
            thread.join(SECONDS)
        gc.collect()
    assert gone.is_set()
    assert pending.done()
    (said,) = [text for text in caplog.messages if "nobody asked" in text]
    assert said.endswith("AbortedError: the checkpoint of step 10: rank 0: ValueError: no loss")


PROGRAM = """
import sys, threading
from cxlfs.job import Checkpointer
made = Checkpointer(sys.argv[1], allow_volatile=True, in_flight=2)
made.restore_from_checkpoint(lambda path: None)
def save(directory, data):
    threading.main_thread().join()
    (directory / "weights").write_bytes(data)
def fail(directory, data):
    raise ValueError("no loss")
made.async_checkpoint(1, save, snapshot=lambda: b"x")
made.async_checkpoint(2, fail, snapshot=lambda: None)
"""


def test_the_end_of_the_process_waits_and_loses_no_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "nobody asked how it ended: AbortedError: the checkpoint of step 2" in done.stderr
    made = Checkpointer(tmp_path, allow_volatile=True)
    found = made.restore_from_checkpoint(lambda path: (path / "weights").read_bytes())
    assert isinstance(found, Restored)
    assert found.step == 1


def test_bounds_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path, in_flight=0)
    made = Checkpointer(tmp_path, allow_volatile=True)
    with pytest.raises(JobConfigurationError):
        begin(made, 10)
    made.close()
    with pytest.raises(JobConfigurationError):
        made.restore_from_checkpoint(lambda _path: None)
