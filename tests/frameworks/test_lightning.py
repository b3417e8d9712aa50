"""``cxlfs.adapters.lightning`` with Lightning as it is: two nodes, each with a store of its own at
the same path, DDP over gloo; killed in mid-save, and resumed.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.mount import Workplace
from tests.support.torch_ranks import run_program

pytestmark = [
    pytest.mark.frameworks("lightning"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root"),
]
pytest.importorskip("lightning", reason="lightning is not installed (pip install lightning)")

TRAIN = """
import logging, os, signal, sys, warnings
warnings.filterwarnings("ignore")
import torch
import torch._dynamo
import torch.distributed as dist
import lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from cxlfs.adapters.lightning import CheckpointIO
from tests.support.torch_ranks import on_nodes, say, start

AT, MOUNTS = sys.argv[1], sys.argv[2:]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(200, 200)
    def training_step(self, batch, _index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

class Killed(CheckpointIO):
    step = -1
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if checkpoint["global_step"] == self.step:
            inner = torch.save
            def torn(checkpoint, file):
                inner(checkpoint, file)
                os.kill(os.getpid(), signal.SIGKILL)
            torch.save = torn
        super().save_checkpoint(checkpoint, path, storage_options)

def train(steps, kill_at=-1, path=None):
    os.environ |= {"LOCAL_RANK": "0", "GROUP_RANK": os.environ["RANK"], "LOCAL_WORLD_SIZE": "1",
                   "TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_RESTART_COUNT": "0"}
    lightning.seed_everything(1, verbose=False)
    Killed.step = kill_at
    keep = ModelCheckpoint(AT, every_n_train_steps=2, save_top_k=-1, filename="{step}",
                           save_last=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, strategy="ddp", max_steps=steps,
        callbacks=[keep], plugins=[Killed()], logger=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )
    model = Model()
    data = torch.utils.data.DataLoader([torch.linspace(-1, 1, 200)] * 64, batch_size=4)
    seen = []
    model.on_train_start = lambda: seen.append(trainer.global_step)
    trainer.fit(model, data, ckpt_path=path)
    total = sum(p.double().sum().item() for p in model.parameters())
    say(f"rank {trainer.global_rank} began at {seen[0]}: {total:.12f}")

first = on_nodes(MOUNTS, AT)
"""


def test_two_nodes(places: tuple[Workplace, Workplace], tmp_path: Path) -> None:
    at = tmp_path / "ckpt"
    at.mkdir()
    program = """
assert start(2, train, 10, first=first)
assert not start(2, train, 20, 16, AT, first=first)
assert start(2, train, 20, -1, AT, first=first)
assert start(2, train, 20, -1, AT + "/step=12.ckpt", first=first)
"""
    told = run_program(TRAIN + program, tmp_path, at, *(place.mountpoint for place in places))
    lines = [line for line in told.splitlines() if " began at " in line]
    sums = {}
    for line in lines:
        head, _, total = line.partition(": ")
        rank, began = int(head.split()[1]), int(head.split()[-1])
        sums.setdefault(began, {})[rank] = total
    assert sorted(sums) == [0, 12, 14], told
    assert all(set(by_rank) == {0, 1} for by_rank in sums.values())
    assert sums[14] == sums[12], "the same model, from whatever checkpoint"
    assert len(set(sums[14].values())) == 1
    names = [sorted(path.name for path in place.mountpoint.iterdir()) for place in places]
    wanted = sorted(f"step={step}.ckpt" for step in range(2, 21, 2))
    assert set(wanted) <= set(names[0]), "and step 14 once more, from step 12 on"
    assert not [name for name in names[0] if name.endswith(".tmp")], "step 16 was saved again"
    assert names[1] == [], "Lightning saves on rank 0 alone"


def test_files(place: Workplace) -> None:
    import torch

    from cxlfs.adapters import lightning
    from cxlfs.errors import NoCheckpointError, NoGoodCheckpointError

    plugin = lightning.CheckpointIO()
    directory = place.mountpoint / "run"
    with pytest.raises(NoCheckpointError):
        plugin.load_checkpoint(directory / "epoch=0.ckpt")
    for step in range(3):
        plugin.save_checkpoint(
            {"step": step, "w": torch.full((9,), step)}, directory / f"{step}.ckpt"
        )
    assert plugin.load_checkpoint(directory, weights_only=True)["step"] == 2
    assert plugin.load_checkpoint(directory / "1.ckpt")["step"] == 1

    class Torn:
        def __reduce__(self) -> str:
            raise RuntimeError("in mid-save")

    with pytest.raises(RuntimeError, match="in mid-save"):
        plugin.save_checkpoint({"a": torch.ones(5), "b": Torn()}, directory / "2.ckpt")
    assert plugin.load_checkpoint(directory)["step"] == 2
    assert sorted(path.name for path in directory.iterdir()) == ["0.ckpt", "1.ckpt", "2.ckpt"]
    (directory / "2.ckpt").write_bytes((directory / "2.ckpt").read_bytes()[:-40])
    assert plugin.load_checkpoint(directory)["step"] == 1
    for name in ("0.ckpt", "1.ckpt", "nothing.ckpt"):
        plugin.remove_checkpoint(directory / name)
    with pytest.raises(NoGoodCheckpointError):
        plugin.load_checkpoint(directory)
    with pytest.raises(TypeError):
        plugin.save_checkpoint({}, directory / "x.ckpt", storage_options={})
    plugin.remove_checkpoint(directory)
    assert not directory.exists()
