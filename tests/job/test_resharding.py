"""A job that comes back in another number of ranks: threads, an engine in memory, no framework."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from cxlfs.errors import JobMessageError
from cxlfs.job import (
    Checkpointer,
    Committed,
    JobConfigurationError,
    NotRestoredError,
    Reachable,
    Resharded,
    Restored,
    UndecidedError,
    files,
    resharding,
)
from cxlfs.job.protocol import Attempt
from cxlfs.job.reachable import reachable
from cxlfs.job.resharding import Offer, choose
from tests.support.job_ranks import Job, content


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    made.start(lambda each: made.save(each, 10, 20))
    return made


class Reader:
    """What each rank reads: all parts of the checkpoint, as a model that is split anew would."""

    def __init__(self, job: Job, stores: Sequence[int] = ()) -> None:
        self.job = job
        self.stores = [job.root / f"node{number}" for number in stores]
        self.read: dict[int, list[bytes]] = {}
        self.fails: set[tuple[int, int]] = set()

    def check(self, found: Reachable) -> None:
        if found.missing:
            raise ValueError(f"no part of {found.missing}")

    def load(self, found: Reachable, rank: int) -> None:
        paths = [found.verified(part.rank) for part in found.parts]
        if (rank, found.attempt.step) in self.fails:
            raise OSError("a wire is loose")
        self.read[rank] = [(path / "deep" / "shard.bin").read_bytes() for path in paths]

    def __call__(self, made: Checkpointer) -> object:
        with pytest.raises(NotRestoredError, match="another number of ranks"):
            self.job.load(made)
        rank = made.world.rank
        return made.restore_resharded(
            lambda found: self.load(found, rank), check=self.check, stores=self.stores
        )


def test_fewer_ranks_read_all_parts_and_go_on(job: Job) -> None:
    job.world = 2
    read = Reader(job, [0, 1, 2])

    def work(made: Checkpointer) -> object:
        found = read(made)
        return found, made.distributed_checkpoint(30, lambda path: (path / "deep").mkdir())

    for row in job.start(work):
        assert isinstance(row, tuple)
        assert isinstance(row[0], Resharded)
        assert (row[0].step, row[0].world) == (20, 3)
        assert isinstance(row[1], Committed)
        assert row[1].attempt.number > row[0].attempt.number
    assert read.read == {rank: [content(part, 20) for part in range(3)] for rank in range(2)}
    found = job.start(lambda made: made.restore_from_checkpoint(lambda _path: None))
    assert all(isinstance(each, Restored) and each.step == 30 for each in found)


def test_who_cannot_reach_a_part_says_which_store_has_it(job: Job) -> None:
    job.world = 2
    found = job.start(Reader(job))
    stores = [(job.root / f"node{n}" / ".cxlfs-job-store").read_text() for n in range(2)]
    for each in found:
        assert isinstance(each, NotRestoredError)
        assert "rank 0: ValueError: no part of (1, 2)" in each.message
        assert f"that of rank 0 in {stores[0]}, that of rank 1 in {stores[1]}" in each.message
        assert "nobody reaches that of rank 2" in each.message


def test_a_rank_that_fails_takes_all_to_the_one_before(job: Job) -> None:
    job.world = 2
    read = Reader(job, [0, 1, 2])
    read.fails = {(1, 20)}
    found = job.start(read)
    assert all(isinstance(each, Resharded) and each.step == 10 for each in found)
    assert read.read == {rank: [content(part, 10) for part in range(3)] for rank in range(2)}
    read.fails |= {(0, 10)}
    for each in job.start(read):
        assert isinstance(each, NotRestoredError)
        assert "rank 1: OSError: a wire is loose" in each.message


def test_a_damaged_part_is_not_read(job: Job) -> None:
    job.world = 2
    (path,) = (job.root / "node2").glob("step-*20.*/rank-00002/deep/shard.bin")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    found = job.start(Reader(job, [0, 1, 2]))
    assert all(isinstance(each, Resharded) and each.step == 10 for each in found)


def test_an_attempt_that_nobody_committed_is_passed_over(job: Job) -> None:
    """Ranks 0 and 1 had voted for step 30, and rank 2 had not: it never was."""
    job.world = 3
    number = reachable([job.store(0)])[1]
    attempt = Attempt(number, 30, "00000000000000aa")
    for rank in range(2):
        root = job.store(rank)
        directory = files.begin(root, attempt, rank)
        (directory / "deep").mkdir()
        (directory / "deep" / "shard.bin").write_bytes(content(rank, 30))
        manifest = files.Manifest(
            attempt, rank, 3, "node", "store", files.Medium(), files.measure(directory)
        )
        files.seal(root, manifest)
    job.world = 2
    found = job.start(Reader(job, [0, 1, 2]))
    assert all(isinstance(each, Resharded) and each.step == 20 for each in found)


def test_the_number_goes_on_behind_every_attempt(job: Job) -> None:
    ahead = max(reachable([job.store(rank)])[1] for rank in range(3))
    assert ahead == 3
    job.world = 1
    read = Reader(job, [0, 1, 2])

    def work(made: Checkpointer) -> object:
        read(made)
        return made.distributed_checkpoint(1, lambda _path: None)

    (outcome,) = job.start(work)
    assert isinstance(outcome, Committed)
    assert outcome.attempt.number == ahead


def test_a_rank_that_is_not_heard(job: Job) -> None:
    job.world, job.seconds = 2, 1.0

    def work(made: Checkpointer) -> object:
        with pytest.raises(NotRestoredError):
            job.load(made)
        if made.world.rank == 1:
            return None
        return made.restore_resharded(lambda _f: None, check=lambda _f: None)

    found = job.start(work)[0]
    assert isinstance(found, UndecidedError)
    assert "rank 1" in found.message


def test_restoring_comes_first(job: Job) -> None:
    found = job.start(lambda m: m.restore_resharded(lambda _f: None, check=lambda _f: None))
    assert all(isinstance(each, JobConfigurationError) for each in found)


def test_parts_that_contradict_each_other_are_left_out(job: Job, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(job.store(1), other)
    (manifest,) = other.glob("step-*20.*/rank-00001/manifest.json")
    plain = files.decode_manifest(manifest.read_bytes(), other)
    manifest.write_bytes(dataclasses.replace(plain, node="elsewhere").encode())
    found, _ = reachable([job.store(rank) for rank in range(3)])
    assert [(one.attempt.step, one.is_committed, one.missing) for one in found] == [
        (20, True, ()),
        (10, True, ()),
    ]
    found, _ = reachable([*(job.store(rank) for rank in range(3)), other])
    assert [one.attempt.step for one in found] == [10]
    (job.store(1) / ".cxlfs-job-store").unlink()
    shutil.copytree(other, job.store(1), dirs_exist_ok=True)
    found, _ = reachable([job.store(rank) for rank in range(3)])
    assert [one.attempt.step for one in found] == [10], "not what was voted for"


def test_directories_that_cannot_be_read_are_left_out(job: Job, tmp_path: Path) -> None:
    nowhere, no_directory = tmp_path / "nowhere", tmp_path / "file"
    no_directory.write_text("x")
    spoiled = tmp_path / "spoiled"
    shutil.copytree(job.store(2), spoiled)
    (spoiled / ".cxlfs-job-store").write_text("not a UUID")
    roots = [nowhere, no_directory, spoiled, *(job.store(rank) for rank in range(2))]
    found, _ = reachable(roots)
    assert [(one.attempt.step, one.missing) for one in found] == [(20, (2,)), (10, (2,))]
    assert not nowhere.exists(), "nothing is made"
    (spoiled / ".cxlfs-job-store").unlink()
    found, _ = reachable(roots)
    assert [(one.attempt.step, one.missing) for one in found] == [(20, ()), (10, ())]
    assert found[0].parts[2].store == str(spoiled)


def test_the_choice_is_the_newest_that_all_can_load() -> None:
    old, new = Attempt(1, 100, "a"), Attempt(2, 50, "b")
    whole = ((0, "s"), (1, "t"))
    offers = {
        0: [Offer(old, 2, True, whole, ""), Offer(new, 2, True, whole, "")],
        1: [Offer(old, 2, True, whole, ""), Offer(new, 2, False, whole, "damaged")],
    }
    chosen, reasons = choose(offers)
    assert chosen is not None
    assert chosen.attempt == old
    assert "rank 1: damaged" in reasons[0]
    offers[1][1] = Offer(new, 2, False, (), "")
    assert choose(offers)[0] == offers[0][1]
    offers[1].pop()
    assert "rank 1: it reaches no part of it" in choose(offers)[1][0]
    assert choose({0: [], 1: []}) == (None, [])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"offers": [], "ahead": -1}',
        b'{"offers": [{}], "ahead": 1}',
        b'{"offers": ' + b"[" * 5000,
        json.dumps({"offers": [], "ahead": 1, "more": 1}).encode(),
        json.dumps(
            {
                "offers": [
                    {
                        "attempt": {"number": 1, "step": 1, "id": "a"},
                        "world": 1,
                        "is_committed": True,
                        "parts": [[1, "s", 2]],
                        "reason": "",
                    }
                ],
                "ahead": 1,
            }
        ).encode(),
    ],
)
def test_what_others_say_is_checked(body: bytes) -> None:
    with pytest.raises(JobMessageError):
        resharding._decode(body)
    with pytest.raises(JobMessageError):
        resharding._reason(body)


def test_a_closed_one_restores_nothing(job: Job) -> None:
    made = Checkpointer(job.store(0), allow_volatile=True, engine="local")
    made.close()
    with pytest.raises(JobConfigurationError):
        made.restore_resharded(lambda _f: None, check=lambda _f: None)
