"""Agents of a job whose ranks save with a ``Checkpointer``: what they leave is made whole, and
drained. Ranks and agents are threads; two ranks lie on each node.
"""

from __future__ import annotations

import errno
import gc
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cxlfs.errors import JobConfigurationError, UndecidedError
from cxlfs.job import Checkpointer, Committed, Restored, copying, files, medium
from cxlfs.job.agent import Event, Pace, Settings, Tending, service, tending
from cxlfs.job.engines.local import LocalEngine
from cxlfs.job.tier import Tier
from tests.support.agents import tend
from tests.support.job_ranks import SECONDS, Job, ThreadEngine, content, on_all_ranks

NODES = 3


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path / "nodes", world=2 * NODES)
    made.seats = [rank // 2 for rank in range(made.world)]
    made.replicas = 2
    return made


def roots(job: Job) -> list[Path]:
    return [job.root / f"node{number}" for number in range(NODES)]


def save(job: Job, *steps: int) -> None:
    for row in job.start(lambda made: job.save(made, *steps)):
        assert isinstance(row, list), row
        assert all(isinstance(outcome, Committed) for outcome in row)
    gc.collect()  # the ranks are gone


def settings(job: Job, replicas: int) -> Callable[[int], Settings]:
    return lambda rank: Settings(replicas, f"node{rank}", SECONDS, job.tier)


def agents(job: Job, replicas: int = 2) -> tuple[list[list[Event]], list[Exception | None]]:
    return tend(roots(job), settings(job, replicas))


def ended(job: Job, state: str, replicas: int = 2) -> Event:
    """The last event of that state, alike on all nodes."""
    told, failed = agents(job, replicas)
    assert failed == [None] * NODES
    (event,) = {[event for event in row if event.state == state][-1] for row in told}
    return event


def held(job: Job, node: int) -> list[str]:
    return sorted(path.name[-1] for path in roots(job)[node].glob("step-*/rank-*"))


def assert_restored(job: Job, step: int) -> None:
    """From each rank's own store alone."""
    job.loaded.clear()

    def come_back(made: Checkpointer) -> object:
        outcome = job.load(made)
        made.close()
        return outcome

    for outcome in job.start(come_back):
        assert isinstance(outcome, Restored)
        assert outcome.step == step
        assert not outcome.is_fetched
    assert job.loaded == {rank: content(rank, step) for rank in range(job.world)}


@pytest.mark.parametrize("links", [1, 4])
def test_a_replaced_node_has_its_own_and_its_copies_before_the_ranks_begin(
    job: Job, monkeypatch: pytest.MonkeyPatch, links: int
) -> None:
    monkeypatch.setattr(tending, "LINKS_MAX", links)
    save(job, 10)
    before = [held(job, node) for node in range(NODES)]
    shutil.rmtree(roots(job)[1])
    event = ended(job, "tended")
    assert event.step == 10
    assert [held(job, node) for node in range(NODES)] == before
    assert_restored(job, 10)
    assert ended(job, "tended").text.endswith("copies that were made: 0")


def test_copies_are_made_of_what_had_none(job: Job) -> None:
    job.replicas = 1
    save(job, 10)
    event = ended(job, "tended")
    assert event.text.endswith("copies that were made: 6")
    for node in range(NODES):
        shutil.rmtree(roots(job)[node])
        ended(job, "tended")
        assert_restored(job, 10)
        gc.collect()


def test_nothing_is_done_while_a_rank_lives(job: Job) -> None:
    save(job, 10)
    alive = medium.attend(roots(job)[2])
    shutil.rmtree(roots(job)[1])

    def once(engine: ThreadEngine) -> None:
        work = Tending(roots(job)[engine.rank], settings(job, 2)(engine.rank), lambda _event: None)
        work.begin(engine)
        service._round(engine, work, 1, Pace(SECONDS), is_last=False)
        service._round(engine, work, 0, Pace(SECONDS), is_last=True)

    for error in on_all_ranks(NODES, "1", once).values():
        assert isinstance(error, UndecidedError)
        assert error.next_step == "wait until they have ended"
    assert held(job, 1) == []
    threading.Timer(0.2, medium.os.close, [alive]).start()
    ended(job, "tended")
    assert len(held(job, 1)) == 4


def test_a_checkpointer_is_a_rank_that_lives(tmp_path: Path) -> None:
    made = Checkpointer(tmp_path, engine=LocalEngine(), allow_volatile=True)
    assert medium.has_ranks(tmp_path)
    made.close()
    del made
    gc.collect()
    assert not medium.has_ranks(tmp_path)


def test_a_damaged_holder_is_left_out_by_all(job: Job) -> None:
    """Of three copies, the own store's is gone and the first other's damaged."""
    job.replicas = 3
    save(job, 10)
    shutil.rmtree(roots(job)[0])
    store = {medium.identity(root): root for root in roots(job)[1:]}
    first = store[min(store)]
    (path,) = first.glob("step-*/rank-00000/deep/shard.bin")
    path.write_bytes(path.read_bytes()[::-1])
    assert ended(job, "tended", replicas=3).step == 10
    assert_restored(job, 10)
    assert path.read_bytes() == content(0, 10)


def test_what_no_store_has_is_said(job: Job) -> None:
    job.replicas = 1
    save(job, 10)
    shutil.rmtree(roots(job)[1])
    event = ended(job, "not-tended", replicas=1)
    assert "no store has the shards of rank 2" in event.text
    assert event.next_step


def test_a_store_without_room_is_said(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Node 0 has no part in it."""
    save(job, 10)
    shutil.rmtree(roots(job)[2])
    real = copying._reserve

    def reserve(manifest: files.Manifest, root: Path) -> files.Manifest:
        if manifest.rank in {4, 5}:
            return real(manifest, root)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copying, "_reserve", reserve)
    assert "2 copies could not be made" in ended(job, "not-tended").text
    assert held(job, 2) == ["4", "5"]


def test_no_job_was_here_yet(job: Job) -> None:
    for root in roots(job):
        root.mkdir(parents=True)
    assert "nothing" in ended(job, "tended").text


def test_ranks_that_do_not_divide_into_the_nodes(job: Job) -> None:
    job.world = 4
    job.seats = [0, 1, 2, 2]
    save(job, 10)
    assert "4 ranks do not lie on 3 nodes" in ended(job, "not-tended").text


def test_too_few_domains_are_an_error(job: Job) -> None:
    save(job, 10)
    _, failed = tend(roots(job), lambda _rank: Settings(2, "one", SECONDS))
    assert [type(error) for error in failed] == [JobConfigurationError] * NODES


def test_what_was_committed_and_not_drained_is_drained(job: Job, tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="pip install 'cxlfs[tier]' has it")
    save(job, 10, 20)
    (tmp_path / "tier").mkdir()
    job.tier = f"file://{tmp_path}/tier"
    shutil.rmtree(roots(job)[1])
    told, failed = agents(job)
    assert failed == [None] * NODES
    drained = [[e.text for e in row if e.state == "drained"] for row in told]
    wanted = [
        [f"step {s}, rank {r}: it is in the tier" for s in (10, 20) for r in own]
        for own in ((0, 1), (2, 3), (4, 5))
    ]
    wanted[1] = wanted[1][2:]  # of what its lost store held the newest alone has come back
    assert drained == wanted
    whole = [path.name[5:17] for path in (tmp_path / "tier").glob("*.cxlfs-job")]
    assert whole == ["000000000020"]
    told, _ = agents(job)
    assert "drained" not in {event.state for row in told for event in row}
    for root in roots(job):
        shutil.rmtree(root)
    for outcome in job.start(lambda made: (job.load(made), made.close())[0]):
        assert isinstance(outcome, Restored)
        assert outcome.step == 20


def test_what_one_broke_off_is_drained_to_its_end(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shards were there, and what says that they belong together was not."""
    pytest.importorskip("obstore", reason="pip install 'cxlfs[tier]' has it")
    save(job, 10)
    (tmp_path / "tier").mkdir()
    job.tier = f"file://{tmp_path}/tier"

    def broken(*_arguments: object) -> bool:
        raise OSError(errno.EIO, "broken off")

    with monkeypatch.context() as patch:
        patch.setattr(Tier, "_complete", broken)
        assert "not-drained" in {event.state for row in agents(job)[0] for event in row}
    assert not list((tmp_path / "tier").glob("*.cxlfs-job"))
    agents(job)
    assert len(list((tmp_path / "tier").glob("*.cxlfs-job"))) == 1
