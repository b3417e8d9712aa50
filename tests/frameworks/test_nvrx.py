"""The local checkpoints of NVIDIA's resiliency extension, without GPUs: its own manager on a mount,
and ours in its place, with copies; two stores, ranks over gloo, one is killed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from cxlfs.control.discovery import ENVIRONMENT_OVERRIDE
from tests.support.cli import run_program as run_program_of_ours
from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [
    pytest.mark.frameworks("nvidia_resiliency_ext"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
]
pytest.importorskip("nvidia_resiliency_ext", reason="nvidia-resiliency-ext is not installed")

TRAIN = """
import os, shutil, signal, sys, warnings
warnings.filterwarnings("ignore", category=FutureWarning)
import torch
import torch.distributed as dist
from nvidia_resiliency_ext.checkpointing.local.base_state_dict import TensorAwareStateDict
from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import (
    LocalCheckpointManager,
)
from nvidia_resiliency_ext.checkpointing.local.replication import strategies
from cxlfs.adapters import nvrx, nvrx_replicas
from cxlfs.job import Checkpointer
from tests.support.torch_ranks import say, start

STORES = sys.argv[1:]

class State(TensorAwareStateDict):  # NVRx's basic one asks for CUDA
    def __init__(self, step, tensors):
        self.step, self.held = step, tensors
    def pop_tensors(self):
        popped, self.held = self.held, None
        return popped
    @property
    def tensors(self):
        return list(self.held)
    @property
    def is_hollow(self):
        return self.held is None
    def insert_tensors(self, tensors):
        self.held = list(tensors)
    def init_tensors(self):
        self.held = []
    def copy_tensors_to_cpu(self, non_blocking=False):
        self.held = [tensor.to("cpu", non_blocking=non_blocking) for tensor in self.held]
    def restore_tensor_device(self, non_blocking=True):
        pass
    def to_state_dict(self):
        return {}

def tensors_of(step):
    return [torch.full((1000,), float(step * 10 + dist.get_rank())), torch.arange(5) + step]

def manager_of(kind):
    store = STORES[dist.get_rank()]
    if kind == "theirs":
        return LocalCheckpointManager(store + "/theirs")
    os.environ["CXLFS_DOMAIN"] = store
    if kind == "replicated":
        strategy = nvrx_replicas.ReplicationStrategy(store + "/theirs", deadline_seconds=60)
        assert isinstance(strategy, strategies.ReplicationStrategy)
        return LocalCheckpointManager(store + "/theirs", repl_strategy=strategy)
    replicas = 2 if kind == "copies" else 1
    made = Checkpointer(store + "/ours", deadline_seconds=60, allow_volatile=True,
                        replicas=replicas)
    return nvrx.CheckpointManager(made)

def train(kind, last, kill_at=-1, is_async=False):
    manager = manager_of(kind)
    rank, latest = dist.get_rank(), manager.find_latest()
    if latest != -1:
        state, _ = manager.load()
        assert state.step == latest
        for found, wanted in zip(state.tensors, tensors_of(latest), strict=True):
            assert torch.equal(found, wanted)
    say(f"rank {rank} {kind} found {latest}")
    if latest == -1:
        try:
            manager.load()
        except Exception as error:
            assert type(error).__name__ == "CheckpointingException", error
    inner = torch.save
    def torn(state, file):
        inner(state, file)
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(latest + 1, last):
        if step == kill_at and rank == 1:
            torch.save = torn
        tensors = tensors_of(step)
        request = manager.save(State(step, tensors), step, is_async=is_async)
        for tensor in tensors:
            tensor.fill_(-1)  # training goes on
        if request is not None:
            request.execute_sync()
    assert last <= latest + 1 or kind != "ours" or manager.find_latest() == last - 1

"""


def run(program: str, places: tuple[Workplace, Workplace], where: Path) -> str:
    return run_program(TRAIN + program, where, *(place.mountpoint for place in places))


def both(told: str, words: str) -> bool:
    return all(f"rank {rank} {words}" in told for rank in range(2))


def test_their_manager_on_a_mount(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    """The policy is what it needs after a kill: it does not save an iteration again of which a torn
    file is there. (Its own replication sends through CUDA.)
    """
    for place in places:
        place.announced.append("unit-back")
        for rank in range(2):
            directory = place.mountpoint / "theirs" / str(rank)
            directory.mkdir(parents=True)
            said = run_program_of_ours(
                *("policy", "set", directory, "--unit", ".", "--done", "*_local.pt"),
                environment={ENVIRONMENT_OVERRIDE: str(place.runtime)},
            )
            assert said.code == 0, said
    program = """
assert not start(2, train, "theirs", 6, 4)
assert start(2, train, "theirs", 6)
assert start(2, train, "theirs", 6)
"""
    told = run(program, places, tmp_path)
    assert both(told, "theirs found 3")
    assert both(told, "theirs found 5")


def test_ours_in_its_place(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    program = """
assert not start(2, train, "ours", 6, 4)
assert start(2, train, "ours", 6)
assert start(2, train, "ours", 8, -1, True)
assert start(2, train, "ours", 8)
"""
    told = run(program, places, tmp_path)
    for latest in (3, 5, 7):
        assert both(told, f"ours found {latest}")


def test_a_lost_store_with_copies(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    program = """
assert start(2, train, "copies", 3)
shutil.rmtree(STORES[1] + "/ours")
assert start(2, train, "copies", 4)
"""
    assert both(run(program, places, tmp_path), "copies found 2")


def test_their_manager_with_our_replicas(
    places: tuple[Workplace, Workplace], tmp_path: Path
) -> None:
    """Both stores have both ranks' files; one is lost, and its rank goes on where it was."""
    program = """
assert start(2, train, "replicated", 3)
for rank in range(2):
    found = sorted(os.listdir(STORES[rank] + f"/theirs/{rank}"))
    assert found == [f"iter_0000002_{other}_local.pt" for other in range(2)], found
shutil.rmtree(STORES[1] + "/theirs")
assert start(2, train, "replicated", 5)
"""
    assert both(run(program, places, tmp_path), "replicated found 2")
