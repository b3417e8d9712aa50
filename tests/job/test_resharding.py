"""A job that comes back in another number of ranks: threads, an engine in memory, no framework."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import pytest

from cxlfs.errors import JobFilesError, JobMessageError
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
    lines,
    medium,
    resharding,
)
from cxlfs.job.engines.local import LocalEngine
from cxlfs.job.offers import (
    Choice,
    Offer,
    choose,
    decode_heads,
    decode_offers,
    decode_verdict,
)
from cxlfs.job.protocol import Attempt, Transfer, digest_of
from cxlfs.job.reachable import Stock, reachable
from cxlfs.job.resharding import Resharding
from tests.support import job_copy_mutants as mutants
from tests.support.job_ranks import Board, Job, boards_made, content


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    made.start(lambda each: made.save(each, 10, 20))
    return made


SHARD = "deep/shard.bin"


class Reader:
    """What each rank reads: all parts of the checkpoint, as a model that is split anew would; or
    ``some``, by what their shards begin with.
    """

    def __init__(self, job: Job, stores: Sequence[int] = (), some: bytes = b"") -> None:
        self.job = job
        self.stores = [job.root / f"node{number}" for number in stores]
        self.some = some
        self.read: dict[int, list[bytes]] = {}
        self.fails: set[tuple[int, int]] = set()

    def check(self, found: Reachable) -> set[int] | None:
        if found.missing:
            raise ValueError(f"no part of {found.missing}")
        if not self.some:
            return None
        heads = {part.rank: found.directory(part) / SHARD for part in found.parts}
        return {rank for rank, path in heads.items() if path.read_bytes().startswith(self.some)}

    def load(self, found: Reachable, rank: int) -> None:
        needs = self.check(found)
        parts = [part.rank for part in found.parts if needs is None or part.rank in needs]
        paths = [found.verified(part) for part in parts]
        if (rank, found.attempt.step) in self.fails:
            raise OSError("a wire is loose")
        self.read[rank] = [(path / SHARD).read_bytes() for path in paths]

    def __call__(self, made: Checkpointer) -> object:
        with pytest.raises(NotRestoredError, match="another number of ranks"):
            self.job.load(made)
        rank = made.world.rank
        return made.restore_resharded(
            lambda found: self.load(found, rank),
            check=self.check,
            heads=[SHARD] if self.some else (),
            stores=self.stores,
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
    stores = [medium.identity(job.root / f"node{n}") for n in range(2)]
    for each in found:
        assert isinstance(each, NotRestoredError)
        assert "rank 0: ValueError: no part of (2,)" in each.message
        assert f"that of rank 0 in {stores[0]}, that of rank 1 in {stores[1]}" in each.message
        assert "nobody reaches that of rank 2" in each.message


def test_a_rank_that_fails_is_an_error_on_all_and_no_older_step(job: Job) -> None:
    job.world = 2
    read = Reader(job, [0, 1, 2])
    read.fails = {(1, 20)}
    for each in job.start(read):
        assert isinstance(each, NotRestoredError)
        assert "rank 1: OSError: a wire is loose" in each.message


def test_a_damaged_part_is_not_read(job: Job) -> None:
    job.world = 2
    (path,) = (job.root / "node2").glob("step-*20.*/rank-00002/deep/shard.bin")
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    refused(job, Reader(job, [0, 1, 2]))


def refused(job: Job, read: Reader) -> None:
    """By all ranks, and nothing is loaded."""
    read.read.clear()
    found = job.start(read)
    assert all(isinstance(each, NotRestoredError) for each in found), found
    assert set(map(len, read.read.values())) <= {3}, "a part of it was loaded"


@pytest.mark.parametrize("lost", [1, 2])
def test_a_part_that_is_lost_is_an_error(job: Job, lost: int) -> None:
    """Whoever asks for all parts gets all, or an error: neither what is left nor an older step."""
    for number in range(lost):
        shutil.rmtree(job.root / f"node{2 - number}")
    job.world = 1
    job.seats = [0]

    def work(made: Checkpointer) -> object:
        with pytest.raises(NotRestoredError):
            job.load(made)
        return made.restore_resharded(lambda _f: None, check=lambda _f: None)

    (error,) = job.start(work)
    assert isinstance(error, NotRestoredError)
    assert "it needs the part of rank" in error.message


def test_an_attempt_that_nobody_committed_is_passed_over(job: Job) -> None:
    """Ranks 0 and 1 had voted for step 30, and rank 2 had not: it never was."""
    job.world = 3
    number = reachable([job.store(0)])[1]
    ((line,), _) = lines.lines_in(job.store(0))
    attempt = Attempt(number, 30, line.id)
    for rank in range(2):
        root = job.store(rank)
        directory = files.begin(root, attempt, rank)
        (directory / "deep").mkdir()
        (directory / "deep" / "shard.bin").write_bytes(content(rank, 30))
        manifest = files.Manifest(
            *(attempt, rank, 3, "node", "store", files.Medium(), files.measure(directory)),
            job=line.job,
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


# --- over links ---------------------------------------------------------------------------------


def grown(job: Job, *, replicas: int = 1) -> Job:
    """One more rank than had saved: on a new node, which has nothing yet."""
    if replicas > 1:
        job.replicas = replicas
        job.start(lambda made: job.save(made, 30, 40))
    job.world, job.seats = 4, list(range(4))
    return job


def newest(job: Job, part: int, store: int) -> Path:
    """The shard of a part in a store, of the newest step."""
    return max(job.store(store).glob(f"step-*/rank-{part:05d}/{SHARD}"))


def assert_loaded(job: Job, read: Reader, step: int) -> None:
    found = job.start(read)
    assert all(isinstance(each, Resharded) and each.step == step for each in found), found
    assert read.read == {rank: [content(part, step) for part in range(3)] for rank in range(4)}
    assert not list(job.root.glob(f"*/{resharding.BROUGHT_NAME}"))
    assert not job.attempts(3), "what was brought counts as a checkpoint of the store"


def test_parts_in_stores_that_only_others_reach(job: Job) -> None:
    assert_loaded(grown(job), Reader(job), 20)
    assert [len(list(job.store(rank).glob("step-*/rank-*"))) for rank in range(4)] == [2, 2, 2, 0]


def test_nothing_is_brought_that_nobody_needs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each sees by the head of a part whether it needs it."""
    boards = boards_made(monkeypatch)
    read = Reader(grown(job), some=b"rank 1 ")
    assert all(isinstance(each, Resharded) and each.step == 20 for each in job.start(read))
    assert read.read == {rank: [content(1, 20)] for rank in range(4)}
    made = sorted(name.rpartition("/")[2] for name in boards[0].switch.made)
    assert made == ["1.1.0", "1.1.0", "1.1.2", "1.1.2", "1.1.3", "1.1.3"]


def test_a_part_that_is_damaged_in_a_store_comes_from_another(job: Job) -> None:
    """Its own rank reads it there, and others are sent it."""
    grown(job, replicas=2)
    for part, store in ((0, 0), (2, 0)):
        path = newest(job, part, store)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert_loaded(job, Reader(job), 40)
    newest(job, 2, 2).unlink()
    refused(job, Reader(job))


def test_a_head_that_is_damaged_in_a_store_comes_from_another(job: Job) -> None:
    grown(job, replicas=2)
    newest(job, 1, 1).write_bytes(b"rank 1 is another")
    read = Reader(job, some=b"rank ")
    assert_loaded(job, read, 40)


def test_what_arrives_damaged_is_sent_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Board.__init__

    def tap(name: str, number: int, data: bytes) -> bytes:
        is_it = "/parts/0." in name and name.endswith("/2.2.3") and number == 2
        return bytes([data[0] ^ 1]) + data[1:] if is_it else data

    def tapped(self: Board, *given: object) -> None:
        begin(self, *given)  # type: ignore[arg-type]
        self.switch.tap = tap

    monkeypatch.setattr(Board, "__init__", tapped)
    assert_loaded(grown(job), Reader(job), 20)


def test_a_store_without_room_for_what_it_needs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    fallocate = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if f"node3/{resharding.BROUGHT_NAME}" in str(
            Path(f"/proc/self/fd/{descriptor}").readlink()
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    read = Reader(grown(job))
    for each in job.start(read):
        assert isinstance(each, NotRestoredError)
        assert (
            "rank 3: the part of rank 0: OSError: [Errno 28] No space left on device"
            in each.message
        )
    assert not list(job.root.glob(f"*/{resharding.BROUGHT_NAME}"))


def test_what_a_kill_has_left_of_it_goes_at_the_next_start(job: Job) -> None:
    left = job.store(1) / resharding.BROUGHT_NAME / "00007"
    left.mkdir(parents=True)
    job.start(job.load)
    assert not left.parent.exists()


@pytest.mark.parametrize("what", ["manifest", "bytes", "name"])
def test_heads_are_what_was_voted_for(job: Job, what: str) -> None:
    root = job.store(1)
    (stock, *_), _ = reachable([root])
    (part,) = stock.parts
    how = {"seconds": 1.0, "head": stock.attempt}
    made = Resharding(LocalEngine(), lambda _key, _body: {}, [job.store(0)], [SHARD], "x", **how)
    head = made._head_of(stock.attempt, part)
    choice = Choice(stock.attempt, 3, {1: part.manifest}, {0: {}})
    made._put(choice, 1, head)
    where = job.store(0) / resharding.BROUGHT_NAME / "00000" / files.attempt_name(stock.attempt)
    assert (where / "rank-00001" / SHARD).read_bytes() == content(1, 20)
    shutil.rmtree(where)
    ((name, data),) = head.files
    changed = {
        "manifest": dataclasses.replace(head, manifest=head.manifest + b" "),
        "bytes": dataclasses.replace(head, files=((name, data[:-1] + b"!"),)),
        "name": dataclasses.replace(head, files=(("../../escaped", data),)),
    }[what]
    with pytest.raises(JobFilesError):
        made._put(choice, 1, changed)
    assert not list(where.rglob("*.bin"))
    assert not list(job.root.rglob("escaped"))


# --- the choice ---------------------------------------------------------------------------------

OLD, NEW = Attempt(1, 100, "a"), Attempt(2, 50, "b")
VOTED = digest_of(["m0", "m1"])


def offer(attempt: Attempt, *parts: tuple[int, str, str], digest: str = VOTED) -> Offer:
    return Offer(attempt, (2,), (digest,) if digest else (), parts)


FIRST, SECOND = (0, "s", "m0"), (1, "t", "m1")


def test_the_choice_is_the_newest_that_was_committed() -> None:
    offers = {0: [offer(OLD, FIRST), offer(NEW, FIRST, digest="")], 1: [offer(OLD, SECOND)]}
    choice, reasons = choose(offers)
    assert choice is not None
    assert (choice.attempt, choice.missing, reasons) == (OLD, [], [])
    assert [choice.lacking(rank) for rank in range(2)] == [[1], [0]]
    offers[1].append(offer(NEW, SECOND, digest=""))
    assert chosen(offers) == NEW, "all have voted for it"
    offers[1][1] = offer(NEW)
    assert chosen(offers) == NEW, "somebody knows that it was committed"
    assert chosen(offers, {NEW}) == OLD
    assert choose(offers, {NEW, OLD}) == choose({0: [], 1: []}) == (None, [])


def chosen(offers: dict[int, list[Offer]], left_out: Collection[Attempt] = ()) -> Attempt | None:
    choice, _ = choose(offers, left_out)
    return choice and choice.attempt


def test_holders_that_failed_are_not_asked_again() -> None:
    copy = (0, "u", "m0")
    offers = {0: [offer(OLD, FIRST)], 1: [offer(OLD, SECOND, copy)], 2: [offer(OLD)]}
    choice, _ = choose(offers)
    assert choice is not None
    assert choice.transfers({2: {0, 1}, 0: {1, 0}}) == [Transfer(1, 1, 0), *both(0)]
    choice, _ = choose(offers, (), {(OLD, (0, "s"))})
    assert choice is not None
    assert choice.transfers({2: {0, 1}}) == list(both(1))
    choice, _ = choose(offers, (), {(OLD, (0, "s")), (OLD, (0, "u"))})
    assert choice is not None
    assert choice.missing == [0]
    assert "nobody reaches that of rank 0" in choice.told()


def both(source: int) -> tuple[Transfer, Transfer]:
    return Transfer(0, source, 2), Transfer(1, 1, 2)


def test_parts_that_contradict_each_other() -> None:
    """Where a manifest was written anew the recorded commit decides, if all are there."""
    another = (1, "u", "x1")
    offers = {0: [offer(OLD, FIRST, another)], 1: [offer(OLD, SECOND)]}
    choice, _ = choose(offers)
    assert choice is not None
    assert (choice.manifests, choice.lacking(0)) == ({0: "m0", 1: "m1"}, [1])
    for told in (
        [offer(OLD, FIRST, another, digest="")],
        [offer(OLD, FIRST, digest="another")],
        [Offer(OLD, (3,), (), (FIRST,))],
    ):
        choice, reasons = choose({0: told, 1: [offer(OLD, SECOND, digest="")]})
        assert choice is None
        assert len(reasons) == 1
    choice, reasons = choose({0: [offer(OLD, another)], 1: [offer(OLD, SECOND)]})
    assert choice is None
    assert "contradict" in reasons[0]


def test_directories_that_cannot_be_read_are_left_out(job: Job, tmp_path: Path) -> None:
    nowhere, no_directory = tmp_path / "nowhere", tmp_path / "file"
    no_directory.write_text("x")
    spoiled = tmp_path / "spoiled"
    shutil.copytree(job.store(2), spoiled)
    (spoiled / ".cxlfs-job-store").write_text("not a UUID")
    roots = [nowhere, no_directory, spoiled, *(job.store(rank) for rank in range(2))]
    found, _ = reachable(roots)
    assert [(one.attempt.step, ranks(one)) for one in found] == [(20, [0, 1]), (10, [0, 1])]
    assert not nowhere.exists(), "nothing is made"
    (spoiled / ".cxlfs-job-store").unlink()
    found, _ = reachable(roots)
    assert [(one.attempt.step, ranks(one)) for one in found] == [(20, [0, 1, 2]), (10, [0, 1, 2])]
    assert found[0].parts[2].store == str(spoiled)


def ranks(stock: Stock) -> list[int]:
    return [part.rank for part in stock.parts]


def body(**changes: object) -> bytes:
    """What a rank offers, changed."""
    plain = {
        "attempt": {"number": 1, "step": 1, "id": "a"},
        "worlds": [1],
        "digests": [],
        "parts": [[1, "s", "m"]],
    }
    return json.dumps({"offers": [{**plain, **changes}], "ahead": 1}).encode()


@pytest.mark.parametrize(
    ("decode", "right"),
    [
        (decode_offers, body()),
        (decode_verdict, b'{"reason": "", "bad": [[1, "s"]], "wanted": [1]}'),
        (decode_heads, b'[[1, "bQ==", [["a", ""]]]]'),
    ],
)
def test_what_others_say_is_checked(
    decode: Callable[[bytes], object], right: bytes, rng: random.Random
) -> None:
    assert decode(right)
    for data in (
        *(b"", b"7", b'{"offers": [], "ahead": -1}', b'{"offers": ' + b"[" * 5000),
        *(body(parts=[[1, "s"]]), body(parts=[[-1, "s", "m"]]), body(more=1), body(worlds="1")),
        *(b'{"reason": 1, "bad": [], "wanted": []}', b'{"reason": "", "bad": [1], "wanted": []}'),
        *(b'[[1, "bQ==", [["a", "!"]]]]', b"[[1, 2, []]]", b'[[1, "bQ=="]]'),
    ):
        with pytest.raises(JobMessageError):
            decode(data)
    for _ in range(300):
        changed = bytearray(right[: rng.randrange(1, len(right) + 1)])
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        with contextlib.suppress(JobMessageError):
            decode(bytes(changed))


def test_a_closed_one_restores_nothing(job: Job) -> None:
    made = Checkpointer(job.store(0), allow_volatile=True, engine="local")
    made.close()
    with pytest.raises(JobConfigurationError):
        made.restore_resharded(lambda _f: None, check=lambda _f: None)


# --- planted mistakes ---------------------------------------------------------------------------

MISTAKES = (
    (mutants.what_was_brought_stays, test_parts_in_stores_that_only_others_reach),
    (
        mutants.heads_are_believed,
        functools.partial(test_heads_are_what_was_voted_for, what="bytes"),
    ),
    (
        mutants.a_holder_that_failed_is_asked_again,
        test_a_part_that_is_damaged_in_a_store_comes_from_another,
    ),
    (mutants.all_that_there_is_is_sent, test_nothing_is_brought_that_nobody_needs),
    (mutants.what_comes_in_is_not_compared, test_what_arrives_damaged_is_sent_again),
    (mutants.parts_are_read_as_they_lie, test_a_damaged_part_is_not_read),
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
