"""Copies over NIXL, between real processes of one machine, without a GPU or a fabric."""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlfs.errors import JobEngineError
from cxlfs.job.engines import torch as engine
from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [
    pytest.mark.frameworks("torch", "nixl"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
pytest.importorskip("nixl", reason="nixl is not installed")

BEGIN = """
import hashlib, os, shutil, signal, sys, time
os.environ["CXLFS_LINKS"] = "nixl"
import torch
import torch.distributed as dist
from cxlfs.errors import JobEngineError, JobLinkError
from cxlfs.job import Checkpointer, Restored
from cxlfs.job.engines import engine_named, nixl
from tests.support.torch_ranks import say, start

STORES = sys.argv[1:]
SIZES = [1, 4096, 70_000, nixl.SLOT_BYTES, nixl.SLOT_BYTES + 1, 0, 33 << 20, 7]

def content(size, rank):
    seed = hashlib.sha256(f"{size} {rank}".encode()).digest()
    return (seed * (size // 32 + 1))[:size]

def link(seconds=60):
    made = engine_named("torch")
    return made.link(1 - dist.get_rank(), "link", seconds)
"""


def test_pieces_of_any_size_both_ways(tmp_path: Path) -> None:
    program = """
def task():
    rank, made = dist.get_rank(), link()
    for turn in range(2):
        sent = [made.send(memoryview(content(size, rank))) for size in SIZES]
        into = [bytearray(size) for size in SIZES]
        for came in [made.receive(each) for each in into]:
            came.wait()
        for one in sent:
            one.wait()
        assert [bytes(each) for each in into] == [content(size, 1 - rank) for size in SIZES]
    made.close(is_done=True)
    say(f"rank {rank} is done")
assert start(2, task)
"""
    told = run_program(BEGIN + program, tmp_path)
    assert all(f"rank {rank} is done" in told for rank in range(2))


def test_an_end_that_gives_up_and_one_that_is_silent(tmp_path: Path) -> None:
    program = """
def gives_up():
    made = link()
    if dist.get_rank() == 0:
        made.send(b"first").wait()
        made.close(is_done=False)
    else:
        into = bytearray(5)
        made.receive(into).wait()
        assert into == b"first"
        try:
            made.receive(into).wait()
        except JobLinkError as error:
            say(str(error))

def is_killed():
    try:
        made = link(2)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        made.receive(bytearray(5)).wait()
    except JobLinkError as error:
        say(f"killed: {error}")
    os._exit(0)

def is_another_size():
    made = link()
    if dist.get_rank() == 0:
        made.send(b"first").wait()
    else:
        try:
            made.receive(bytearray(6)).wait()
        except JobLinkError as error:
            say(str(error))

signal.signal(signal.SIGTERM, signal.SIG_IGN)
assert start(2, gives_up)
assert not start(2, is_killed)
assert start(2, is_another_size)
"""
    told = run_program(BEGIN + program, tmp_path)
    assert "rank 0 gave up" in told
    assert "killed: rank 0" in told
    assert "rank 0: a piece of another size than was expected" in told


def test_a_job_with_copies_loses_a_store(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    program = """
def train(last):
    rank = dist.get_rank()
    store = STORES[rank] + "/run"
    weights = torch.arange(3_000_000) * (rank + 1)
    def save(directory): torch.save(weights, directory / "weights.pt")
    def load(directory): assert torch.equal(torch.load(directory / "weights.pt"), weights)
    made = Checkpointer(store, replicas=2, domain=store, deadline_seconds=60, allow_volatile=True)
    found = made.restore_from_checkpoint(load)
    fetched = getattr(found, "is_fetched", None)
    say(f"rank {rank} began at {found.resumes_at}, fetched {fetched}")
    for step in range(found.resumes_at, last):
        outcome = made.distributed_checkpoint(step, save)
        assert outcome.is_cleaned and len(outcome.copies) == 1, outcome
    made.close()

assert start(2, train, 2)
shutil.rmtree(STORES[1] + "/run")
assert start(2, train, 4)
assert start(2, train, 4)
"""
    told = run_program(BEGIN + program, tmp_path, *(place.mountpoint for place in places))
    assert "rank 0 began at 2, fetched False" in told
    assert "rank 1 began at 2, fetched True" in told
    assert "rank 1 began at 4, fetched False" in told


def test_ranks_with_other_links_do_not_begin(tmp_path: Path) -> None:
    program = """
def task():
    if dist.get_rank():
        os.environ["CXLFS_LINKS"] = "gloo"
    try:
        engine_named("torch")
    except JobEngineError as error:
        say(error.message)
assert start(2, task)
"""
    told = run_program(BEGIN + program, tmp_path)
    assert "rank 0 copies over nixl, this one, rank 1, over gloo" in told


def test_links_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine.LINKS_VARIABLE, "ibverbs")
    with pytest.raises(JobEngineError, match="ibverbs"):
        engine._links_wanted()
    monkeypatch.setenv(engine.LINKS_VARIABLE, "")
    assert engine._links_wanted() == "auto"
