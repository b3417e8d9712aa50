"""The Hugging Face Trainer as it is, ``save_on_each_node=True``: two nodes, each with a store of
its own at the same path, over gloo; killed in mid-save, and resumed from what both have.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [
    pytest.mark.frameworks("transformers"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

TRAIN = """
import logging, os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
import torch._dynamo
import torch.distributed as dist
import transformers
from transformers import Trainer, TrainingArguments
from cxlfs.job import agreed_checkpoint
from tests.support.torch_ranks import on_nodes, say, start

AT, MOUNTS = sys.argv[1], sys.argv[2:]
transformers.utils.logging.set_verbosity_error()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(50, 50)
    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}

class Killed(Trainer):
    step = -1
    def _save_rng_state(self, output_dir):
        if self.state.global_step == self.step and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_rng_state(output_dir)

def train(steps, kill_at=-1):
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": os.environ["RANK"]}
    given = TrainingArguments(
        AT, max_steps=steps, save_steps=2, save_on_each_node=True, save_total_limit=3,
        per_device_train_batch_size=4, use_cpu=True, report_to=[], disable_tqdm=True, seed=1,
        logging_strategy="no", ddp_backend="gloo", dataloader_pin_memory=False,
    )
    Killed.step = kill_at
    data = [{"x": torch.linspace(-1, 1, 50)}] * 64
    torch.manual_seed(1)
    trainer = Killed(Model(), given, train_dataset=data)
    found = agreed_checkpoint(AT, deadline_seconds=60)
    trainer.train(resume_from_checkpoint=None if found is None else str(found))
    total = sum(p.double().sum().item() for p in trainer.model.parameters())
    name = None if found is None else found.name
    say(f"rank {dist.get_rank()} from {name}: {total:.12f}")

first = on_nodes(MOUNTS, AT)
"""


def test_two_nodes(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    at = tmp_path / "out"
    at.mkdir()
    program = """
assert not start(2, train, 10, 6, first=first)
assert start(2, train, 10, first=first)
assert start(2, train, 10, first=first)
"""
    told = run_program(TRAIN + program, tmp_path, at, *(place.mountpoint for place in places))
    totals = set()
    for rank in range(2):
        for name in ("checkpoint-4", "checkpoint-10"):
            (line,) = [each for each in told.splitlines() if f"rank {rank} from {name}:" in each]
            totals.add(line.rpartition(" ")[2])
    assert len(totals) == 1, told
    for rank, place in enumerate(places):
        newest = place.mountpoint / "checkpoint-10"
        assert (newest / "model.safetensors").exists()
        assert (newest / f"rng_state_{rank}.pth").exists()
