"""``cxlfs.adapters.dcp`` with PyTorch as it is: two stores, ranks as processes over gloo, a sharded
model; one is killed in mid-save, the job comes back, also in other numbers of ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cxlfs import client
from cxlfs.adapters import dcp
from cxlfs.job import medium
from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [pytest.mark.frameworks("torch"), pytest.mark.slow, pytest.mark.timeout(240)]
torch = pytest.importorskip(
    "torch", reason="torch is not installed (scripts/test --frameworks installs it)"
)

TRAIN = """
import os, signal, sys
import torch
import torch._dynamo  # which DTensor imports: once, and not in each rank
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from cxlfs.adapters import dcp
from cxlfs.job import Checkpointer, NotRestoredError
from tests.support.torch_ranks import say, start

STORES = sys.argv[1:]
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate()}

def whole(step):  # what training makes of the model in so many steps
    return torch.arange(30 * 7, dtype=torch.float32).reshape(30, 7) * (step + 1)

def state_of(step):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        **{n: distribute_tensor(whole(step) + i, mesh, [PLACEMENTS[n]])
           for i, n in enumerate(PLACEMENTS)},
        "nested": {"plain": torch.full((3,), float(step)), "step": step, "list": [step, "x"]},
        "scalar": torch.tensor(float(step)),
        "own": {"rank": dist.get_rank()},
    }

def check(state, step):
    wanted = state_of(step)
    for name in PLACEMENTS:
        assert torch.equal(state[name].to_local(), wanted[name].to_local()), name
    assert torch.equal(state["nested"]["plain"], wanted["nested"]["plain"])
    assert (state["nested"]["step"], state["nested"]["list"]) == (step, [step, "x"])
    assert state["scalar"] == step

def train(last, kill_at=-1, beside=False, reached=()):
    rank = dist.get_rank()
    store = STORES[rank % len(STORES)]
    made = Checkpointer(store, deadline_seconds=60, allow_volatile=True)
    state = state_of(-1)
    try:
        found = dcp.load(made, state, stores=reached)
    except NotRestoredError as error:
        say(f"rank {rank}: {error}")
        return
    first = 0
    if hasattr(found, "step"):
        check(state, found.step)
        assert state["own"]["rank"] == rank or type(found).__name__ == "Resharded"
        first = found.step + 1
    say(f"rank {rank} {type(found).__name__} began at {first}")
    pending, write = [], dcp.write
    def torn(directory, state):
        write(directory, state)
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(first, last):
        if step == kill_at and rank == 1:
            dcp.write = torn
        state = state_of(step)
        if beside:
            pending.append(dcp.async_save(made, step, state))
            for value in (state["copied"].to_local(), state["scalar"], state["nested"]["plain"]):
                value.fill_(-7)  # training goes on
        else:
            assert dcp.save(made, step, state).step == step
    assert [type(one.wait()).__name__ for one in pending] == ["Committed"] * len(pending)
    made.close()

"""


def run(program: str, places: tuple[Workplace, Workplace], where: Path) -> str:
    return run_program(TRAIN + program, where, *(place.mountpoint / "run" for place in places))


@pytest.mark.parametrize("beside", [pytest.param(False, marks=pytest.mark.campaign), True])
def test_killed_in_mid_save_and_resumed(
    places: tuple[Workplace, Workplace], tmp_path: Path, beside: bool
) -> None:
    program = f"""
assert not start(2, train, 6, 4, {beside})
assert start(2, train, 6, -1, {beside})
assert start(2, train, 6, -1, {beside})
"""
    told = run(program, places, tmp_path)
    for rank in range(2):
        assert f"rank {rank} Nothing began at 0" in told
        assert f"rank {rank} Restored began at 4" in told
        assert f"rank {rank} Restored began at 6" in told
    for rank, place in enumerate(places):
        (newest,) = place.mountpoint.glob(f"run/step-000000000005.*/rank-{rank:05d}")
        names = sorted(path.name for path in newest.iterdir())
        assert names == [".metadata", "__0_0.distcp", "__0_1.distcp", "manifest.json"]
    read_as_dcp_does(newest)


def test_past_the_kernel(
    places: tuple[Workplace, Workplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is large is stored into the medium, and copied out of it."""
    replacing, mapped = client.replacing, client.map
    stored: list[bool] = []
    read: list[bool] = []

    @contextlib.contextmanager
    def watched(path: Path) -> Iterator[client.File]:
        with replacing(path) as file:
            yield file
            stored.append(file.direct)

    def watched_map(*arguments: Any) -> client.MappedFile:
        found = mapped(*arguments)
        read.append(found.direct)
        return found

    monkeypatch.setattr(client, "replacing", watched)
    monkeypatch.setattr(client, "map", watched_map)
    directory = places[0].mountpoint
    state = {name: torch.rand(500_000) for name in ("first", "second")}
    dcp.write(directory, dict(state))
    found: dict[str, object] = {name: torch.zeros(500_000) for name in state}
    dcp.read({0: directory}, found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert (stored, read) == ([True, True], [True, True])
    client.forget()


def read_as_dcp_does(directory: Path) -> None:
    """A rank's part is a checkpoint that PyTorch reads without us."""
    from torch.distributed import checkpoint

    state = {"copied": torch.zeros(30, 7), "scalar": torch.tensor(0.0)}
    with pytest.warns(UserWarning, match="disabled"):
        checkpoint.load(state, checkpoint_id=directory, no_dist=True)
    wanted = torch.arange(210, dtype=torch.float32).reshape(30, 7) * 6 + 2
    assert torch.equal(state["copied"], wanted)
    assert state["scalar"] == 5


def test_other_numbers_of_ranks(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    program = """
assert start(2, train, 3)
for ranks, last in ((4, 5), (1, 7), (2, 9)):
    for _ in range(2):
        assert start(ranks, train, last, -1, False, STORES)
"""
    told = run(program, places, tmp_path)
    for ranks, first in ((4, 3), (1, 5), (2, 7)):
        for rank in range(ranks):
            assert f"rank {rank} Resharded began at {first}" in told
            assert f"rank {rank} Restored began at {first + 2}" in told


def test_parts_in_stores_that_only_others_reach(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    """They come over gloo, and nothing of them stays."""
    program = """
assert start(2, train, 3)
for ranks, last in ((4, 5), (2, 7)):
    for _ in range(2):
        assert start(ranks, train, last)
"""
    told = run(program, places, tmp_path)
    for ranks, first in ((4, 3), (2, 5)):
        for rank in range(ranks):
            assert f"rank {rank} Resharded began at {first}" in told
            assert f"rank {rank} Restored began at {first + 2}" in told
    for place in places:
        assert not (place.mountpoint / "run" / ".cxlfs-brought").exists()


def test_parts_that_are_not_reached_are_named(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    told = run("assert start(2, train, 3) and start(1, train, 3)", places, tmp_path)
    identity = medium.identity(places[0].mountpoint / "run")
    assert "105 of 210 elements of rows are there" in told
    assert f"that of rank 0 in {identity}; nobody reaches that of rank 1" in told


@pytest.mark.campaign
def test_what_all_ranks_held_needs_no_other_store(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    """A model that is copied to all ranks, as of DistributedDataParallel."""
    program = """
PLACEMENTS = {"copied": Replicate()}
assert start(2, train, 3) and start(1, train, 4)
"""
    assert "rank 0 Resharded began at 3" in run(program, places, tmp_path)


@pytest.mark.campaign
def test_another_sharding_in_as_many_ranks(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    """Each rank's own part is not what it needs: never half of a tensor, without a word."""
    program = """
assert start(2, train, 3)
PLACEMENTS["rows"] = Shard(1)
assert start(2, train, 4)
"""
    told = run(program, places, tmp_path)
    assert "rank 1 Resharded began at 3" in told


def test_what_pytorch_alone_leaves_as_it_was(tmp_path: Path) -> None:
    """Half of a tensor is there: PyTorch's own reader and planner load that half, and say nothing.
    It is why we look; once they do, our look can go.
    """
    program = """
from torch.distributed import checkpoint
from pathlib import Path

def halves(directory):
    rank, mine = dist.get_rank(), Path(directory) / str(dist.get_rank())
    mine.mkdir(parents=True)
    mesh = init_device_mesh("cpu", (2,))
    dcp.write(mine, {"rows": distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])})
    state = {"rows": torch.zeros(4, 2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=mine, no_dist=True)
    say(f"rank {rank}: {int(state['rows'].sum())}")
    try:
        dcp.read({rank: mine}, {"rows": torch.zeros(4, 2)}, rank=rank)
    except Exception as error:
        say(f"rank {rank}: {error}")

import warnings
assert start(2, halves, STORES[0])
"""
    told = run_program(TRAIN + program, tmp_path, tmp_path / "store")
    for rank in range(2):
        assert f"rank {rank}: 4" in told
        assert f"rank {rank}: 4 of 8 elements of rows are there" in told
