"""A job with a tier below: the protocol's part of it, and ranks as threads that drain and fetch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cxlfs.errors import (
    JobTierError,
    NotRestoredError,
    NotWholeError,
    TierUnavailableError,
    UsageError,
)
from cxlfs.job import (
    Checkpointer,
    Committed,
    ForkError,
    JobConfigurationError,
    Nothing,
    Restored,
    files,
    tier,
)
from cxlfs.job.protocol import (
    TIER,
    Attempt,
    Commit,
    Held,
    Inventory,
    Restoring,
    choose,
    digest_of,
    planning,
    restoring,
)
from cxlfs.job.protocol.placement import fetches
from cxlfs.job.tier import Tier
from cxlfs.tier import Bucket
from cxlfs.tier.staging import RECEIVING_NAME
from tests.support.job_histories_below import tier_histories
from tests.support.job_ranks import WORLD, Job, content, write
from tests.support.job_stores import ViolationError

COUNT = 200
OLD, NEW = Attempt(1, 10, "a"), Attempt(2, 20, "b")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path / "nodes")
    (tmp_path / "tier").mkdir()
    made.tier = f"file://{tmp_path}/tier"
    return made


def saved(job: Job, *steps: int) -> list[object]:
    def work(made: Checkpointer) -> object:
        with made:
            return job.save(made, *steps)

    return job.start(work)


def lose(job: Job, *ranks: int) -> None:
    for rank in ranks:
        shutil.rmtree(job.store(rank))


def in_tier(job: Job) -> list[str]:
    root = Path((job.tier or "").removeprefix("file://"))
    return sorted(path.name[5:17] for path in root.glob("*.cxlfs-job"))


# --- the protocol -------------------------------------------------------------------------------


def held(attempt: Attempt, rank: int) -> Held:
    return Held(attempt, rank, 2, f"m{attempt.id}{rank}")


def commit(attempt: Attempt) -> Commit:
    return Commit(attempt, digest_of([f"m{attempt.id}{rank}" for rank in range(2)]))


def whole(store: str, *attempts: Attempt) -> Inventory:
    rows = tuple(held(attempt, rank) for attempt in attempts for rank in range(2))
    return Inventory(store, rows, tuple(commit(attempt) for attempt in attempts))


def test_what_no_store_has_comes_from_the_tier() -> None:
    stores = [Inventory("s0", (held(NEW, 0), held(OLD, 0))), Inventory("s1", (held(OLD, 1),))]
    found, _ = choose(stores, can_fetch=True, below=whole(TIER, NEW))
    assert found is not None
    assert (found.attempt, found.holders) == (NEW, ("s0", TIER))
    assert fetches(found, stores) == ()
    found, _ = choose(stores, can_fetch=False, below=whole(TIER, NEW))
    assert found is not None
    assert found.holders == ("s0", TIER)


def test_stores_of_other_ranks_come_before_the_tier() -> None:
    stores = [Inventory("s0"), whole("s1", OLD)]
    found, _ = choose(stores, can_fetch=True, below=whole(TIER, OLD))
    assert found is not None
    assert found.holders == ("s1", "s1")


def test_a_tier_that_says_otherwise_is_not_mixed_in() -> None:
    """What was recorded at the commit decides; where nothing was, nobody knows."""
    other = Inventory(TIER, (Held(NEW, 0, 2, "other"), Held(NEW, 1, 2, "other")))
    stores = [whole("s0", NEW), Inventory("s1")]
    found, _ = choose(stores, can_fetch=True, below=other)
    assert found is not None
    assert (found.manifests, found.holders) == (("mb0", "mb1"), ("s0", "s0"))
    stores[0] = dataclasses.replace(stores[0], commits=())
    found, reasons = choose(stores, can_fetch=True, below=other)
    assert found is None
    assert "stores differ in the shards of rank 0" in reasons[0]


def test_histories(seed: int) -> None:
    met: collections.Counter[str] = collections.Counter()
    for _, history in tier_histories(seed, COUNT):
        met.update(history.counts)
    print(f"{COUNT} histories from {seed} on: {dict(met)}")
    for what in ("shards drained", "shards from the tier", "tiers not read"):
        assert met[what] >= COUNT // 100, what


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_a_campaign_of_histories(seed: int) -> None:
    for _ in tier_histories(seed, 30_000):
        pass


def a_tier_that_is_not_read_is_an_empty_one(patch: pytest.MonkeyPatch) -> None:
    original = Restoring._stocked

    def stocked(self: Restoring, heard: dict[int, Any], missing: tuple[int, ...]) -> Any:
        for body in heard.values():
            object.__setattr__(body, "below_reason", "")
        return original(self, heard, missing)

    patch.setattr(Restoring, "_stocked", stocked)


def the_tier_is_not_asked(patch: pytest.MonkeyPatch) -> None:
    def pick(inventories: Any, excluded: Any = (), **how: Any) -> Any:
        return planning.judge(inventories, excluded, **{**how, "below": None})

    patch.setattr(restoring, "judge", pick)


def numbers_of_the_tier_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Restoring, "everywhere", property(lambda self: self.inventories))


@pytest.mark.parametrize(
    "mistake",
    [
        a_tier_that_is_not_read_is_an_empty_one,
        the_tier_is_not_asked,
        numbers_of_the_tier_are_not_counted,
    ],
    ids=lambda mistake: mistake.__name__,
)
def test_a_planted_mistake_is_found(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(ViolationError) as caught:
        for _ in tier_histories(1, 1000):
            pass
    print(caught.value)


# --- ranks --------------------------------------------------------------------------------------


def test_what_is_committed_is_drained_and_comes_back(job: Job) -> None:
    saved(job, 10, 20)
    assert in_tier(job) == ["000000000010", "000000000020"]
    assert all(files.is_drained(path) for path in job.store(1).glob("step-*"))
    lose(job, *range(WORLD))
    found = job.start(job.load)
    assert all(isinstance(o, Restored) and o.step == 20 and o.holder == TIER for o in found)
    assert job.loaded == {rank: content(rank, 20) for rank in range(WORLD)}
    again = job.start(job.load)  # it lies in the stores now
    assert all(isinstance(o, Restored) and o.holder != TIER for o in again)


def test_one_lost_store_is_filled_from_the_tier(job: Job) -> None:
    saved(job, 10, 20)
    lose(job, 1)
    found = job.start(job.load)
    assert [isinstance(o, Restored) and o.holder == TIER for o in found] == [False, True, False]
    assert job.loaded == {rank: content(rank, 20) for rank in range(WORLD)}


def test_a_damaged_shard_comes_from_the_tier(job: Job) -> None:
    saved(job, 10)
    (shard,) = job.store(2).glob("step-*/rank-00002/deep/shard.bin")
    shard.write_bytes(b"?" + shard.read_bytes()[1:])
    found = job.start(job.load)
    assert [isinstance(o, Restored) and o.holder == TIER for o in found] == [False, False, True]
    assert job.loaded == {rank: content(rank, 10) for rank in range(WORLD)}
    assert shard.read_bytes() == content(2, 10)


def test_numbers_go_on_behind_those_of_the_tier(job: Job) -> None:
    saved(job, 10, 20)
    lose(job, *range(WORLD))
    saved(job, 30)
    numbers = [name[18:24] for name in job.attempts(0)]
    assert numbers == ["000002", "000003"]


def test_a_tier_that_fails_costs_no_checkpoint(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next call does what it is asked, and says so; what came of it is there."""
    original = Bucket.create

    def failing(self: Bucket, key: str, data: bytes) -> bool:
        if "step-000000000010" in self.url:
            raise TierUnavailableError("planted")
        return original(self, key, data)

    monkeypatch.setattr(Bucket, "create", failing)

    def work(made: Checkpointer) -> object:
        job.save(made, 10)
        made._tier.wait(20)  # type: ignore[union-attr]
        rank = made.world.rank
        with pytest.raises(JobTierError, match="planted") as caught:
            made.distributed_checkpoint(20, lambda path: write(path, rank, 20))
        made.close()
        return caught.value.outcome

    found = job.start(work)
    assert all(isinstance(o, Committed) and o.step == 20 for o in found)
    assert in_tier(job) == ["000000000020"]
    found = job.start(job.load)
    assert all(isinstance(o, Restored) and o.step == 20 for o in found)


def test_what_was_not_drained_is_drained_after_a_restart(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tier, "drain", lambda *_: (_ for _ in ()).throw(OSError("planted")))

        def work(made: Checkpointer) -> object:
            job.save(made, 10)
            with pytest.raises(JobTierError):
                made.close()
            return None

        job.start(work)
    assert in_tier(job) == []

    def resume(made: Checkpointer) -> None:
        job.load(made)
        made.close()

    job.start(resume)
    assert in_tier(job) == ["000000000010"]


def test_a_tier_that_cannot_be_read(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the stores have is loaded; if they lack it, that is an error and no first start."""
    saved(job, 10)

    def failing(_self: Bucket) -> object:
        raise TierUnavailableError("planted")

    monkeypatch.setattr(Bucket, "objects_here", failing)

    def resume(made: Checkpointer) -> object:
        found = job.load(made)
        with pytest.raises(JobTierError):  # what it had could not be seen: it is drained again
            made.close()
        return found

    found = job.start(resume)
    assert all(isinstance(o, Restored) and o.step == 10 for o in found)
    lose(job, *range(WORLD))
    found = job.start(job.load)
    assert all(isinstance(o, NotRestoredError) and "planted" in str(o) for o in found)


def test_a_fetch_that_broke_off_leaves_nothing_for_good(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(job, 10)
    lose(job, 0)
    original = Bucket.pieces

    def cut(self: Bucket, key: str, size_bytes: int) -> Iterator[bytes]:
        return iter([b"cut"]) if key.endswith("shard.bin") else original(self, key, size_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "pieces", cut)
        found = job.start(job.load)
    assert all(isinstance(o, NotWholeError) for o in found)
    (place,) = job.store(0).glob("step-*/.cxlfs-receiving")
    saved(job, 20, 30, 40)
    assert not place.exists()
    assert not [name for name in job.attempts(0) if name.startswith("step-000000000010.")]
    assert files._RECEIVING_NAME == RECEIVING_NAME


def test_a_first_start(job: Job) -> None:
    assert job.start(job.load) == [Nothing()] * WORLD


def test_every_and_keep(job: Job) -> None:
    """Alike on all ranks; the last object of older ones goes first, and all of them in the end."""
    job.tier_every, job.tier_keep = 2, 2
    for step in (10, 20, 30, 40, 50, 60):
        saved(job, step)
    assert in_tier(job) == ["000000000040", "000000000060"]
    root = Path((job.tier or "").removeprefix("file://"))
    files = [
        path for path in root.rglob("*") if path.is_file() and "step-000000000020" in str(path)
    ]
    assert files == []


def test_what_was_half_removed_counts_no_more(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A removal that was refused, and a job that keeps more from then on: what was begun to be
    removed is none of what it keeps.
    """
    job.tier_keep = 1
    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "remove", refuse)
        for step in (10, 20):
            job.start(lambda made, step=step: save_and_pass_over(job, made, step))  # type: ignore[misc]
    assert [name for name in in_tier(job) if name] == ["000000000010", "000000000020"]
    below = Tier(job.tier or "", job.store(0), 0, every=1, keep=10)
    assert [commit.attempt.step for commit in below.stock().commits] == [20]
    job.tier_keep = 10
    saved(job, 30)
    assert in_tier(job) == ["000000000020", "000000000030"]
    assert [commit.attempt.step for commit in below.stock().commits] == [20, 30]
    root = Path((job.tier or "").removeprefix("file://"))
    left = {path for path in root.rglob("*") if path.is_file() and "000010." in str(path)}
    assert {path.parent.name for path in left} <= {".cxlfs-probe"}, "what it may not delete either"


def test_what_may_not_be_removed_is_drained_all_the_same(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.tier_keep = 1
    saved(job, 10)
    monkeypatch.setattr(Bucket, "remove", refuse)

    def work(made: Checkpointer) -> str:
        try:
            job.save(made, 20)
            made.wait()
        except JobTierError as error:
            return str(error)
        return ""

    rows = [str(row) for row in job.start(work)]
    assert any("is drained, and older ones were not removed" in row for row in rows), rows
    assert not any("was not drained" in row for row in rows)


def refuse(_self: Bucket, _key: str) -> None:
    raise TierUnavailableError("it may not delete")


def save_and_pass_over(job: Job, made: Checkpointer, step: int) -> None:
    with contextlib.suppress(JobTierError):
        job.save(made, step)
        made.wait()


def test_what_was_drained_before_there_were_lines_goes_in_its_turn(job: Job) -> None:
    """More of it than a restore looks at; and none of it is ever a question."""
    tier_place = Tier(job.tier or "", job.store(0), 0, every=1, keep=None)
    for number in range(1, 12):
        attempt = Attempt(number, number, f"{number:016x}")
        for rank in range(WORLD):
            path = files.begin(job.store(rank), attempt, rank)
            write(path, rank, number)
            measured = files.measure(path)
            shards = files.Manifest(attempt, rank, WORLD, "n", "s", files.Medium(), measured)
            files.seal(job.store(rank), shards)
            drained = Tier(job.tier or "", job.store(rank), rank, every=1, keep=None)
            drained.begin(attempt, WORLD)
            drained.wait(60)
    assert len(tier_place.stock().commits) == 8
    lose(job, *range(WORLD))
    job.tier_keep = 3
    for step in (20, 30, 40, 50):
        rows = saved(job, step)
        assert all(isinstance(row, list) for row in rows), rows
    assert job.loaded == {rank: content(rank, 40) for rank in range(WORLD)}
    assert in_tier(job) == ["000000000030", "000000000040", "000000000050"]


def test_a_place_of_another_job_is_refused(job: Job, tmp_path: Path) -> None:
    saved(job, 10)
    other = Job(tmp_path / "other", job.world)
    other.start(lambda made: other.save(made, 1))
    other.tier = job.tier
    for error in other.start(other.load):
        assert isinstance(error, NotRestoredError)
        assert "several jobs" in error.message
        assert "the tier" in error.message


def test_old_stores_that_return_beside_what_went_on_from_the_tier(job: Job) -> None:
    """The job goes on from what was drained, elsewhere; then an old store is back."""
    job.tier_every = 2
    saved(job, 10, 20, 30)
    job.seats = [rank + 10 for rank in range(WORLD)]
    saved(job, 1000)
    assert job.loaded[0] == content(0, 20)
    job.seats = [10, 11, 2]
    for error in job.start(job.load):
        assert isinstance(error, ForkError), error
        assert "step 1000" in error.message
        assert "step 30" in error.message
    assert any("000000001000" in name for name in job.attempts(0)), "nothing is removed"
    job.seats = [10, 11, 12]
    found = job.start(job.load)
    assert all(isinstance(each, Restored) and each.step == 1000 for each in found)


def test_too_slow_a_tier_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "WAITING_MAX", 0)

    def work(made: Checkpointer) -> object:
        with pytest.raises(JobTierError, match="is not drained") as caught:
            job.save(made, 10)
        return caught.value.outcome

    assert all(isinstance(o, Committed) for o in job.start(work))


def test_what_is_on_its_way_stays_in_the_store(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeping one, the attempt before is not given back while it is drained."""
    held_up: list[str] = []

    def holds(_self: tier.Tier, attempt: Attempt) -> bool:
        held_up.append(attempt.id)
        return True

    monkeypatch.setattr(tier.Tier, "holds", holds)
    job.tier_every = 1000
    saved(job, 10, 20, 30, 40)
    assert held_up
    assert len(job.attempts(0)) == 4
    monkeypatch.undo()
    saved(job, 50)
    assert len(job.attempts(0)) == 2


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, engine="local", tier="nonsense", allow_volatile=True)
    with pytest.raises(JobConfigurationError):
        Checkpointer(tmp_path, engine="local", tier=f"file://{tmp_path}", tier_every=0)
