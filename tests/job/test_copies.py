"""Copies in the stores of other ranks: made before the vote, used when a store is gone or damaged,
made again, given back. Ranks are threads; real processes are in ``tests/frameworks/test_job.py``.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cxlfs.errors import JobLinkError
from cxlfs.job import (
    Aborted,
    Checkpointer,
    Committed,
    JobConfigurationError,
    Nothing,
    NotRestoredError,
    NotWholeError,
    Restored,
    UndecidedError,
    copying,
    files,
    incoming,
    lines,
    medium,
    pieces,
)
from cxlfs.job.protocol import Decision
from tests.support import job_copy_mutants as mutants
from tests.support.job_links import QueueLink
from tests.support.job_ranks import (
    SECONDS,
    WORLD,
    Board,
    Job,
    ThreadEngine,
    boards_made,
    content,
    write,
)

Damage = Callable[[Path], object]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = Job(tmp_path)
    found.replicas = 2
    return found


def held(job: Job, rank: int, step: int = 0) -> list[str]:
    """Whose shards a rank's store has, of a step or of all."""
    pattern = f"step-{step:012d}*" if step else "step-*"
    return sorted(path.name for path in job.store(rank).glob(f"{pattern}/rank-*"))


RING = {0: ["rank-00000", "rank-00002"], 1: ["rank-00000", "rank-00001"]}
"""What the first two of three stores hold, of two replicas."""


def restored(job: Job, step: int) -> list[Restored]:
    """By all ranks, each its own; and what is filled again beside training has been."""

    def come_back(made: Checkpointer) -> object:
        outcome = job.load(made)
        made.close()
        return outcome

    job.loaded.clear()
    found = [outcome for outcome in job.start(come_back) if isinstance(outcome, Restored)]
    assert [outcome.step for outcome in found] == [step] * job.world
    assert job.loaded == {rank: content(rank, step) for rank in range(job.world)}
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def shard(job: Job, store: int, rank: int) -> Path:
    (path,) = job.store(store).glob(f"step-*/rank-{rank:05d}/deep/shard.bin")
    return path


# --- saving -------------------------------------------------------------------------------------


def test_copies_lie_in_other_stores_and_go_with_the_step(job: Job) -> None:
    stores: dict[int, str] = {}

    def work(made: Checkpointer) -> object:
        stores[made.world.rank] = made.store
        return job.save(made, 10, 20, 30)

    rows = job.start(work)
    for rank, row in enumerate(rows):
        assert isinstance(row, list), row
        assert all(isinstance(outcome, Committed) and outcome.is_cleaned for outcome in row)
        assert row[0].copies == (stores[(rank + 1) % WORLD],)
    for rank in range(WORLD):
        assert [name[5:17] for name in job.attempts(rank)] == ["000000000020", "000000000030"]
        for step in (20, 30):
            assert held(job, rank, step) == [
                f"rank-{whose:05d}" for whose in sorted((rank, (rank - 1) % WORLD))
            ]
        data = [path.read_bytes() for path in job.store(rank).glob("step-*30.*/rank-*/deep/*")]
        assert sorted(data) == sorted(content(whose, 30) for whose in (rank, (rank - 1) % WORLD))
    assert restored(job, 30)


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_any_files_in_pieces_of_any_size(
    job: Job, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Empty ones, in a row and at the end; ones that end where a piece does, and many in one."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", piece)
    sizes = {"a": 0, "b/c": 3, "b/d": 0, "b/e/f": 11, "g": 4096 if piece > 1 else 64, "z": 0}

    def save(directory: Path) -> None:
        for name, size in sizes.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(os.urandom(size))

    def work(made: Checkpointer) -> object:
        made.restore_from_checkpoint(lambda _path: None)
        return made.distributed_checkpoint(10, save)

    assert all(isinstance(row, Committed) for row in job.start(work))
    for rank in range(WORLD):
        (own,) = job.store(rank).glob(f"step-*/rank-{rank:05d}")
        (copy,) = job.store((rank + 1) % WORLD).glob(f"step-*/rank-{rank:05d}")
        for name in (*sizes, "manifest.json"):
            assert (own / name).read_bytes() == (copy / name).read_bytes()


def test_who_cannot_save_is_heard_before_copies_are_made(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others do not wait for its shards, and no byte is moved."""
    boards = boards_made(monkeypatch)

    def work(made: Checkpointer) -> object:
        job.load(made)

        def save(directory: Path) -> None:
            write(directory, made.world.rank, 10)
            if made.world.rank == 1:
                raise ValueError("no loss")

        return made.distributed_checkpoint(10, save)

    assert job.start(work) == [Aborted(10, ((1, "ValueError: no loss"),))] * WORLD
    assert [board.switch.made for board in boards] == [[]]
    assert not any(job.attempts(rank) for rank in range(WORLD))


def failing_once(job: Job, boards: list[Board], change: Callable[[bytes], bytes]) -> list[object]:
    """Saves two steps; a piece of rank 0's shards, of the first, is changed on its way."""

    def tap(name: str, number: int, data: bytes) -> bytes:
        is_it = name.endswith("/copies/0.0.1") and name.startswith("2/") and number == 2
        return change(data) if is_it else data

    def work(made: Checkpointer) -> object:
        boards[-1].switch.tap = tap
        return job.save(made, 10, 20)

    return job.start(work)


@pytest.mark.parametrize("how", ["died", "bytes"])
def test_a_copy_that_does_not_arrive_is_a_vote_against(
    job: Job, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """And leaves nothing behind; the next step is as if nothing had been."""
    boards = boards_made(monkeypatch)

    def change(data: bytes) -> bytes:
        if how == "died":
            raise JobLinkError("rank 1: connection closed")
        return bytes([data[0] ^ 1]) + data[1:]

    reasons = {
        "died": (
            "JobLinkError: copying to rank 1: rank 1: connection closed",
            "JobLinkError: keeping a copy of rank 0: rank 0: connection closed",
        ),
        "bytes": (
            "JobLinkError: copying to rank 1: refused: JobFilesError: ",
            "JobLinkError: keeping a copy of rank 0: JobFilesError: ",
        ),
    }[how]
    for row in failing_once(job, boards, change):
        assert isinstance(row, list), row
        assert isinstance(row[0], Aborted)
        assert [rank for rank, _ in row[0].reasons] == [0, 1]
        for (_, found), wanted in zip(row[0].reasons, reasons, strict=True):
            assert found.startswith(wanted)
        assert isinstance(row[1], Committed)
        assert row[1].is_cleaned
    for rank in range(WORLD):
        assert [name[5:17] for name in job.attempts(rank)] == ["000000000020"]
    restored(job, 20)


def test_a_full_store_refuses_before_bytes_are_moved(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    boards = boards_made(monkeypatch)
    fallocate = os.posix_fallocate
    sent: list[str] = []

    def full(descriptor: int, offset: int, size: int) -> None:
        if job.store(1).name in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)

    def tap(name: str, _number: int, data: bytes) -> bytes:
        if name.endswith("0.0.1"):
            sent.append(name)
        return data

    def work(made: Checkpointer) -> object:
        boards[-1].switch.tap = tap
        return job.save(made, 10)

    for row in job.start(work):
        assert isinstance(row, list), row
        assert isinstance(row[0], Aborted)
        assert "refused: OSError: [Errno 28] No space left on device" in row[0].reasons[0][1]
        assert [rank for rank, _ in row[0].reasons] == [0, 1]
    assert len(sent) == 3  # what is to come, the manifest, the refusal
    assert not any(job.attempts(rank) for rank in range(WORLD))


def test_a_peer_that_says_nothing_is_a_vote_against_at_the_deadline(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stuck, and its connection stays: it goes on when rank 0 has given up."""
    given_up = threading.Event()
    receive, close, link = copying.receive, QueueLink.close, ThreadEngine.link

    def stuck(link: QueueLink, root: Path, wanted: copying.Wanted) -> None:
        assert wanted.rank != 0 or given_up.wait(SECONDS)
        receive(link, root, wanted)

    def closing(self: QueueLink, *, is_done: bool) -> None:
        close(self, is_done=is_done)
        if self.name.endswith("0.0.1"):
            given_up.set()

    def soon(self: ThreadEngine, other: int, name: str, seconds: float) -> QueueLink:
        return link(self, other, name, 0.1 if name.endswith("0.0.1") else seconds)

    monkeypatch.setattr(ThreadEngine, "link", soon)
    monkeypatch.setattr(copying, "receive", stuck)
    monkeypatch.setattr(QueueLink, "close", closing)

    for row in job.start(lambda made: job.save(made, 10)):
        assert isinstance(row, list), row
        assert isinstance(row[0], Aborted)
        assert row[0].reasons[0] == (
            0,
            "JobLinkError: copying to rank 1: rank 1: timed out",
        )


@pytest.mark.parametrize("at", [0, 40_000, len(content(0, 10)) - 1])
def test_what_a_store_writes_wrong_is_found_before_the_vote(
    job: Job, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """It came in right, and is not what lies there: in whichever stretch of a file."""
    pwrite = os.pwrite
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4096)
    monkeypatch.setattr(incoming, "STRETCH_BYTES", 10_000)

    def wrong(descriptor: int, data: memoryview, offset: int) -> int:
        changed = bytearray(data)
        if 0 <= at - offset < len(data):
            changed[at - offset] ^= 1
        return pwrite(descriptor, changed, offset)

    monkeypatch.setattr(os, "pwrite", wrong)
    for row in job.start(lambda made: job.save(made, 10)):
        assert isinstance(row, list), row
        assert isinstance(row[0], Aborted), row
        assert "read back, it is not what its manifest says" in row[0].reasons[0][1]
    assert not any(job.attempts(rank) for rank in range(WORLD))


# --- coming back --------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", range(WORLD))
def test_a_lost_store_is_filled_again(job: Job, lost: int) -> None:
    job.start(lambda made: job.save(made, 10, 20))
    shutil.rmtree(job.store(lost))
    found = restored(job, 20)
    assert [outcome.is_fetched for outcome in found] == [rank == lost for rank in range(WORLD)]
    assert found[lost].holder == found[(lost + 1) % WORLD].holder
    for rank in range(WORLD):
        assert held(job, rank, 20) == [
            f"rank-{whose:05d}" for whose in sorted((rank, (rank - 1) % WORLD))
        ]
    shutil.rmtree(job.store((lost + 1) % WORLD))
    restored(job, 20)


def test_more_stores_lost_than_copies_is_an_error(job: Job) -> None:
    job.start(lambda made: job.save(made, 10))
    for rank in (0, 1):
        shutil.rmtree(job.store(rank))
    rows = job.start(job.load)
    assert all(isinstance(row, NotWholeError) for row in rows)
    assert "no store has the shards of rank 0" in str(rows[0])


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_shard_comes_from_the_copy(job: Job, damage: Damage) -> None:
    """And is whole again in its place."""
    job.start(lambda made: job.save(made, 10, 20))
    for rank in range(WORLD):
        damage(next(job.store(rank).glob(f"step-*20.*/rank-{rank:05d}/deep/shard.bin")))
    assert all(outcome.is_fetched for outcome in restored(job, 20))
    assert not any(outcome.is_fetched for outcome in restored(job, 20))


def test_a_damaged_copy_is_found_when_it_is_needed(job: Job) -> None:
    job.start(lambda made: job.save(made, 10, 20))
    flip(next(job.store(1).glob("step-*20.*/rank-00000/deep/shard.bin")))
    assert not any(outcome.is_fetched for outcome in restored(job, 20))
    shutil.rmtree(job.store(0))
    for error in job.start(job.load):
        assert isinstance(error, NotWholeError)
        assert f"rank 0 can load its shards from none of {identity(job, 1)}" in error.message


def test_too_few_stores_are_a_question_where_that_is_asked_for(job: Job) -> None:
    """Two of three stores are absent: what is there can be loaded, and may not be the newest."""
    job.replicas = 3
    job.start(lambda made: job.save(made, 10))
    for rank in (0, 1):
        shutil.rmtree(job.store(rank))
    job.unheard = "stop"
    for error in job.start(job.load):
        assert isinstance(error, UndecidedError), error
        assert "too few stores were heard" in error.message
    question = lines.question_in(job.store(2))
    assert question is not None
    lines.decide(job.store(2), Decision(question.heads[0], question.heads))
    rows = job.start(lambda made: job.save(made, 20))
    assert all(isinstance(row, list) for row in rows), rows
    assert job.loaded == {rank: content(rank, 10) for rank in range(WORLD)}
    (record,) = [x for x in lines.lines_in(job.store(0))[0] if x.parent is not None]
    assert record.is_provisional
    found = job.start(job.load)
    assert all(isinstance(each, Restored) and each.step == 20 for each in found), found


def test_a_start_that_may_pass_over_something_says_so(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    job.replicas = 3
    job.start(lambda made: job.save(made, 10))
    absent = identity(job, 0)
    for rank in (0, 1):
        shutil.rmtree(job.store(rank))
    found = job.start(job.load)
    assert all(isinstance(each, Restored) and each.step == 10 for each in found), found
    assert absent in caplog.text
    assert "may have newer checkpoints" in caplog.text


@pytest.mark.parametrize("failures", [1, 99])
def test_a_link_that_fails_is_no_damage(
    job: Job, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """It is tried once more; then the start is an error, and the next one has the same step."""
    job.start(lambda made: job.save(made, 10, 20))
    shutil.rmtree(job.store(0))
    link, failed = ThreadEngine.link, list[str]()

    def flaky(self: ThreadEngine, other: int, name: str, seconds: float) -> Any:
        if "/fetch/" in name and self.rank == 0 and len(failed) < failures:
            failed.append(name)
            raise JobLinkError(f"rank {other}: timed out")
        return link(self, other, name, seconds)

    job.seconds = 5.0
    with monkeypatch.context() as patch:
        patch.setattr(ThreadEngine, "link", flaky)
        found = job.start(job.load)
    if failures > 1:
        assert all(isinstance(error, NotWholeError) for error in found), found
        assert "timed out" in str(found[0])
        job.seconds = SECONDS
        found = job.start(job.load)
    assert all(isinstance(each, Restored) and each.step == 20 for each in found), found
    assert all("step-000000000020" in " ".join(job.attempts(rank)) for rank in range(WORLD))


def test_a_damaged_copy_is_passed_over_and_made_again(job: Job) -> None:
    """Three replicas: the own store is gone, the first copy damaged, the second is good."""
    job.replicas = 3
    job.start(lambda made: job.save(made, 10))
    shutil.rmtree(job.store(0))
    first, second = sorted((1, 2), key=lambda rank: identity(job, rank))
    flip(shard(job, first, 0))
    found = restored(job, 10)
    assert found[0].is_fetched
    assert found[0].holder == identity(job, second)
    assert shard(job, first, 0).read_bytes() == content(0, 10)
    assert [held(job, rank) for rank in range(WORLD)] == [held(job, 1)] * WORLD


def identity(job: Job, rank: int) -> str:
    return medium.identity(job.store(rank))


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_damaged_manifest_that_still_reads_as_one(job: Job, is_recorded: bool) -> None:
    """In every store that of its own rank: it is its holder's loss alone, and nobody's vote."""
    job.start(lambda made: job.save(made, 10, 20))
    for rank in range(WORLD):
        (attempt,) = job.store(rank).glob("step-*20.*")
        path = attempt / f"rank-{rank:05d}" / "manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"size_bytes": 7', b'"size_bytes": 8'))
        for commit in attempt.glob("commit-*") if not is_recorded else ():
            commit.unlink()
    assert all(outcome.is_fetched for outcome in restored(job, 20))
    assert not any(outcome.is_fetched for outcome in restored(job, 20))


def test_a_manifest_that_was_written_anew(job: Job) -> None:
    """Whole in itself: what was recorded at the commit says that nobody voted for it."""
    job.start(lambda made: job.save(made, 10, 20))
    for store, rank in ((0, 0), (2, 1)):
        (path,) = job.store(store).glob(f"step-*20.*/rank-{rank:05d}/manifest.json")
        manifest = files.decode_manifest(path.read_bytes(), path)
        path.write_bytes(dataclasses.replace(manifest, node="another").encode())
    assert [outcome.is_fetched for outcome in restored(job, 20)] == [True, False, False]
    shutil.rmtree(job.store(1))
    assert [outcome.is_fetched for outcome in restored(job, 20)] == [False, True, False]


def test_copies_stay_with_their_step_where_ranks_change_nodes(job: Job) -> None:
    job.start(lambda made: job.save(made, 10))
    job.seats = [2, 0, 1]
    restored(job, 10)
    rows = job.start(lambda made: job.save(made, 20, 30))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in rows)
    for rank in range(WORLD):
        assert len(held(job, rank)) == 4
        assert not list(job.store(rank).rglob("*.tmp"))


def test_ranks_of_a_node_copy_to_another_node(job: Job) -> None:
    job.world, job.seats = 4, [0, 0, 1, 1]
    job.start(lambda made: job.save(made, 10))
    assert held(job, 0) == held(job, 2) == [f"rank-0000{rank}" for rank in range(4)]
    shutil.rmtree(job.store(2))
    found = restored(job, 10)
    assert [outcome.is_fetched for outcome in found] == [False, False, True, True]
    assert held(job, 2) == held(job, 0)
    rows = job.start(lambda made: job.save(made, 20, 30))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in rows)
    for seat in (0, 2):
        assert len(held(job, seat)) == 8


def test_what_kills_left_of_a_copy_goes(job: Job) -> None:
    job.start(lambda made: job.save(made, 10))
    (attempt,) = job.store(1).glob("step-*")
    for name in ("rank-00000.tmp", "rank-00000.replaced.tmp"):
        (attempt / name).mkdir()
        (attempt / name / "half").touch()
    shutil.rmtree(attempt / "rank-00000")
    restored(job, 10)
    assert held(job, 1) == RING[1]
    (attempt / "rank-00000.replaced.tmp").mkdir()
    rows = job.start(lambda made: job.save(made, 20, 30))
    assert all(isinstance(row, list) and row[-1].is_cleaned for row in rows)
    assert len(job.attempts(1)) == 2


# --- domains ------------------------------------------------------------------------------------


def test_domains_that_are_too_few_are_refused_on_all_ranks(job: Job) -> None:
    job.domains = ["rack"] * WORLD
    for row in job.start(job.load):
        assert isinstance(row, JobConfigurationError)
        assert "2 replicas lie in 2 failure domains, and there are 1: rack" in str(row)
        assert "CXLFS_DOMAIN" in str(row.next_step)
    job.domains = ["rack", "rack", "other"]
    assert job.start(job.load) == [Nothing()] * WORLD
    job.start(lambda made: job.save(made, 10))
    assert held(job, 2) == [f"rank-0000{rank}" for rank in range(WORLD)]
    assert sorted(itertools.chain(held(job, 0), held(job, 1))) == [
        "rank-00000",
        "rank-00001",
        "rank-00002",
    ]


def test_ranks_that_differ_in_replicas_do_not_start(job: Job) -> None:
    def work(made: Checkpointer) -> object:
        if made.world.rank == 1:
            made.copies.replicas = 1
        return job.save(made, 10)

    for error in job.start(work):
        assert isinstance(error, NotRestoredError), error
        assert "replicas or placement are others" in error.message
    assert files.take_stock(job.store(0), "")[0].held == ()


# --- planted mistakes ---------------------------------------------------------------------------

BYTES = functools.partial(test_a_copy_that_does_not_arrive_is_a_vote_against, how="bytes")
WRONG = functools.partial(test_what_a_store_writes_wrong_is_found_before_the_vote, at=0)
LOST = functools.partial(test_a_lost_store_is_filled_again, lost=1)
UNRECORDED = functools.partial(test_a_damaged_manifest_that_still_reads_as_one, is_recorded=False)
FLIPPED = functools.partial(test_a_damaged_shard_comes_from_the_copy, damage=flip)
MISTAKES: tuple[tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]], ...] = (
    (mutants.what_comes_in_is_not_compared, BYTES),
    (mutants.what_comes_in_is_not_compared, test_a_damaged_copy_is_found_when_it_is_needed),
    (
        mutants.what_was_written_is_not_read_back,
        WRONG,
    ),
    (mutants.the_last_of_a_file_alone_is_read_back, WRONG),
    (mutants.it_is_reported_before_it_is_there, BYTES),
    (mutants.room_is_not_reserved, test_a_full_store_refuses_before_bytes_are_moved),
    (mutants.domains_are_not_looked_at, test_domains_that_are_too_few_are_refused_on_all_ranks),
    (mutants.the_next_rank_keeps_it, test_ranks_of_a_node_copy_to_another_node),
    (mutants.a_new_node_is_not_filled, LOST),
    (mutants.a_copy_that_failed_counts_as_there, test_a_damaged_copy_is_passed_over_and_made_again),
    (mutants.copies_are_never_given_back, test_copies_lie_in_other_stores_and_go_with_the_step),
    (mutants.an_abort_leaves_copies_behind, test_a_full_store_refuses_before_bytes_are_moved),
    (mutants.what_is_damaged_stays_in_its_place, FLIPPED),
    (mutants.a_manifest_that_reads_as_one_is_believed, UNRECORDED),
    (mutants.of_manifests_that_differ_none_is_taken, test_a_manifest_that_was_written_anew),
    (mutants.a_copy_by_its_name_is_taken_for_one, test_a_manifest_that_was_written_anew),
)


@pytest.mark.parametrize(
    ("mistake", "test"), MISTAKES, ids=lambda one: getattr(one, "__name__", "")
)
def test_a_planted_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None],
    test: Callable[..., None],
    job: Job,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutants.assert_found(mistake, test, job, monkeypatch)
