#!/usr/bin/env python3
"""Checkpoints of the real libraries, as small as they get: ``*.tar.xz`` beside this file.

Needs an environment of its own:
    python3 -m venv ~/makers && ~/makers/bin/pip install torch==2.13.0+cpu safetensors==0.8.0 \
        transformers==5.23.0 accelerate==1.15.0 lightning==2.6.6 deepspeed==0.19.8
    ~/makers/bin/python tests/checkpoint/golden/make_torch.py

Megatron-LM needs GPUs: its directories are made here with ``torch.save``, by the names and keys of
its source (megatron/training/checkpointing.py), as are those of DeepSpeed's older format
(deepspeed/runtime/engine.py). ``deepspeed-zero`` is DeepSpeed's own.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from pack import pack_each
from safetensors.torch import save_file


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "layers.0.w": torch.randn(8, 16),
        "layers.0.b": torch.zeros(16, dtype=torch.bfloat16),
        "layers.1.w": torch.randn(16, 4).t(),
    }


def full() -> dict[str, object]:
    moments = {"exp_avg": torch.randn(8, 16), "step": torch.tensor(3.0)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"model": state(), "optimizer": optimizer, "global_step": 42}


def make_torch(place: Path) -> None:
    torch.save(full(), place / "zip.pt")
    torch.save(full(), place / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(3, 4), place / "module.pt")
    save_file({k: v.contiguous() for k, v in state().items()}, place / "model.safetensors")


def make_dcp(place: Path) -> None:
    dcp.save({"model": state(), "step": 7}, checkpoint_id=place / "step-7")


def make_accelerate(place: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    accelerator.save_state(str(place / "checkpoint_3"))


def small_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def make_shards(place: Path) -> None:
    small_model().save_pretrained(place / "model", max_shard_size="1KB")


def make_hugging_face(place: Path) -> None:
    from transformers import Trainer, TrainingArguments

    tokens = torch.ones(4, dtype=torch.long)
    arguments = TrainingArguments(
        output_dir=str(place), max_steps=2, save_steps=2, use_cpu=True, report_to=[], optim="sgd"
    )
    data = [{"input_ids": tokens, "labels": tokens}] * 16
    Trainer(model=small_model(), args=arguments, train_dataset=data).train()


def make_lightning(place: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)))
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=3, default_root_dir=place, logger=False, barebones=False
    )
    trainer.fit(Module(), data)
    next(place.glob("checkpoints/*.ckpt")).rename(place / "epoch=0-step=3.ckpt")
    (place / "checkpoints").rmdir()


def make_deepspeed(place: Path) -> None:
    """Four ranks of data, ZeRO stage 1, in the format that DeepSpeed saves by default."""
    tag = place / "global_step10"
    tag.mkdir()
    common = {"dp_world_size": 4, "mp_world_size": 1, "global_steps": 10}
    legacy = {"_use_new_zipfile_serialization": False}
    torch.save({"module": state(), **common}, tag / "mp_rank_00_model_states.pt", **legacy)
    for rank in range(4):
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        shard = {"optimizer_state_dict": {"fp32": torch.randn(8)}, "ds_version": "0.19.0"}
        torch.save(shard, tag / name, **legacy)
    (place / "latest").write_text("global_step10")


def make_deepspeed_zero(place: Path) -> None:
    """Two ranks of data, saved after two steps and three; ZeRO stages 1 and 3."""
    for stage, port in ((1, "29561"), (3, "29563")):
        torch.multiprocessing.spawn(
            _deepspeed_rank, args=(place / f"stage-{stage}", stage, port), nprocs=2
        )


def _deepspeed_rank(rank: int, place: Path, stage: int, port: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4).bfloat16()
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, dist_init_required=False
    )
    for step in range(1, 4):
        engine.backward(engine(torch.ones(1, 8).bfloat16()).sum())
        engine.step()
        if step > 1:
            engine.save_checkpoint(str(place))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    if rank == 0:
        for tool in place.glob("*.py"):
            tool.unlink()


def make_megatron(place: Path) -> None:
    """Two ranks of tensors and two stages; and one distributed checkpoint."""
    ranks = place / "ranks" / "iter_0000100"
    arguments = argparse.Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for tensor in range(2):
        for stage in range(2):
            rank = ranks / f"mp_rank_{tensor:02d}_{stage:03d}"
            rank.mkdir(parents=True)
            saved = {"args": arguments, "iteration": 100, "model": {"w": torch.randn(4)}}
            torch.save(saved, rank / "model_optim_rng.pt")
    one = place / "distributed" / "iter_0000200"
    dcp.save({"w": torch.randn(4, 4)}, checkpoint_id=one)
    torch.save({"iteration": 200}, one / "common.pt")
    (one / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    for run, iteration in (("ranks", 100), ("distributed", 200)):
        (place / run / "latest_checkpointed_iteration.txt").write_text(str(iteration))


MAKERS = {
    "torch": make_torch,
    "dcp": make_dcp,
    "accelerate": make_accelerate,
    "shards": make_shards,
    "hugging-face": make_hugging_face,
    "lightning": make_lightning,
    "deepspeed": make_deepspeed,
    "deepspeed-zero": make_deepspeed_zero,
    "megatron": make_megatron,
}


if __name__ == "__main__":
    pack_each(MAKERS)
