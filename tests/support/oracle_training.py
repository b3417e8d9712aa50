"""Formats of ``oracle`` that a training program writes: its directory, and how it resumes.

DeepSpeed, Lightning and TensorFlow save and load by themselves, on a processor. Megatron-LM needs
GPUs: its layout and its loads are replayed with PyTorch (megatron/training/checkpointing.py, core
0.14).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.oracle_values import Format, arrays, tensors

_RANKS = 2
_INPUTS = 20


def _network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(_INPUTS, 30), torch.nn.Linear(30, 5))


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


# --- Lightning ------------------------------------------------------------------------------


def _lightning(seed: int) -> tuple[Any, Any]:
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.model = _network()

        def training_step(self, batch: Any, _index: int) -> Any:
            return self.model(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.model.parameters())

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    return trainer, Module()


def _fit(seed: int, path: Path | None = None) -> tuple[Any, Any]:
    import torch

    logging.getLogger("lightning").setLevel(logging.ERROR)
    trainer, module = _lightning(seed)
    items = torch.utils.data.DataLoader(torch.ones(8, _INPUTS), batch_size=1)
    trainer.fit(module, items, ckpt_path=path, weights_only=False)
    return trainer, module


def _save_lightning(path: Path, seed: int) -> None:
    _fit(seed)[0].save_checkpoint(path)


def _load_lightning(path: Path) -> Any:
    trainer, module = _fit(99, path)
    return [module.state_dict(), trainer.optimizers[0].state_dict(), trainer.global_step]


# --- DeepSpeed ------------------------------------------------------------------------------


def _join_group(rank: int, ranks: int, directory: str) -> None:
    import deepspeed
    import torch

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    deepspeed.init_distributed(
        "gloo",
        auto_mpi_discovery=False,
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=ranks,
        verbose=False,
    )


def _zero_rank(rank: int, stage: int, path: Path, seed: int, directory: str) -> None:
    import deepspeed
    import torch

    _join_group(rank, _RANKS, directory)
    torch.manual_seed(seed)
    model = _network()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
        dist_init_required=False,
    )
    engine.backward(engine(torch.ones(1, _INPUTS)).sum())
    engine.step()
    engine.save_checkpoint(str(path.parent), tag=path.name)


def _save_zero(path: Path, seed: int, stage: int) -> None:
    """By two ranks, processes of their own."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=_zero_rank, args=(rank, stage, path, seed, directory))
            for rank in range(_RANKS)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    if any(each.exitcode for each in ranks):
        raise RuntimeError(f"ranks of DeepSpeed ended with {[each.exitcode for each in ranks]}")


def _load_zero(path: Path, stage: int) -> Any:
    """What each rank loads (``load_checkpoint``), and all of them put together by DeepSpeed's own
    converter, which needs no group.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    ranks = [f"zero_pp_rank_{rank}_mp_rank_00" for rank in range(_RANKS)]
    models = ranks if stage == 3 else ["mp_rank_00"]
    parts = [_load(path / f"{name}_model_states.pt") for name in models]
    parts += [_load(path / f"{name}_optim_states.pt") for name in ranks]
    whole = get_fp32_state_dict_from_zero_checkpoint(str(path.parent), tag=path.name)
    return [[_plain(part) for part in parts], _plain(dict(whole))]


def _plain(value: Any) -> Any:
    """Without what prints its place in memory."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "detach") or isinstance(value, bool | int | float | str | None):
        return value
    return type(value).__name__


_ENGINES: dict[str, Any] = {}


def _engine(kind: str) -> Any:
    """The only rank of a group; one for each kind, as a process can have."""
    if kind in _ENGINES:
        return _ENGINES[kind]
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch

    directory = tempfile.mkdtemp()
    _join_group(0, 1, directory)
    torch.manual_seed(0)
    config: dict[str, Any] = {"train_batch_size": 1}
    if kind == "pipeline":
        layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, 20, 20) for _ in range(4)]
        model: Any = deepspeed.pipe.PipelineModule(
            layers=layers, num_stages=1, loss_fn=torch.nn.MSELoss()
        )
    else:
        from deepspeed.moe.layer import MoE
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        class Experts(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.begin = torch.nn.Linear(20, 20)
                self.experts = MoE(20, torch.nn.Linear(20, 20), num_experts=3, use_rts=False)

            def forward(self, values: Any) -> Any:
                return self.experts(self.begin(values))[0]

        model = Experts()
    parameters: Any = list(model.parameters())
    if kind == "experts":
        groups = {"params": parameters, "name": "all"}
        parameters = split_params_into_different_moe_groups_for_optimizer(groups)
    optimizer = torch.optim.AdamW(parameters)
    made, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    _ENGINES[kind] = made
    return made


def _fill(engine: Any, seed: int) -> None:
    """Every parameter and every state of the optimizer, a function of the seed."""
    import torch

    made = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=made))
        for group in engine.optimizer.param_groups:
            for parameter in group["params"]:
                engine.optimizer.state[parameter] = {
                    "step": torch.tensor(float(seed)),
                    "exp_avg": torch.rand(parameter.shape, generator=made),
                    "exp_avg_sq": torch.rand(parameter.shape, generator=made),
                }
    engine.global_steps = seed


def _save_engine(path: Path, seed: int, kind: str) -> None:
    engine = _engine(kind)
    _fill(engine, seed)
    engine.global_steps = 7
    engine.save_checkpoint(str(path.parent), tag=path.name, client_state={"seed": seed})


def _load_engine(path: Path, kind: str) -> Any:
    engine = _engine(kind)
    _fill(engine, 99)
    found, client = engine.load_checkpoint(str(path.parent), tag=path.name)
    if found is None:
        raise RuntimeError("DeepSpeed finds nothing")
    states = [engine.optimizer.state[p] for g in engine.optimizer.param_groups for p in g["params"]]
    return [dict(engine.module.named_parameters()), states, client["seed"], engine.global_steps]


# --- Megatron-LM ----------------------------------------------------------------------------


def _rank_file(path: Path, rank: int, name: str) -> Path:
    return path / f"mp_rank_{rank:02d}" / name


def _save_megatron(path: Path, seed: int) -> None:
    import torch

    arguments = argparse.Namespace(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=1,
        use_distributed_optimizer=True,
        no_save_optim=None,
    )
    for rank in range(_RANKS):
        _rank_file(path, rank, "").mkdir(parents=True)
        model = {"iteration": 7, "args": arguments, "model": tensors(seed + 10 * rank)}
        torch.save(
            model | {"num_floating_point_operations_so_far": seed},
            _rank_file(path, rank, "model_optim_rng.pt"),
        )
        torch.save({0: tensors(seed + rank)}, _rank_file(path, rank, "distrib_optim.pt"))


def _load_megatron(path: Path) -> Any:
    found = []
    for rank in range(_RANKS):
        model = _load(_rank_file(path, rank, "model_optim_rng.pt"))
        optimizer = _load(_rank_file(path, rank, "distrib_optim.pt"))
        found.append([model["iteration"], vars(model["args"]), model["model"], optimizer])
    return found


def _save_megatron_dist(path: Path, seed: int) -> None:
    """``--ckpt-format torch_dist``: a distributed checkpoint, and what is common to all ranks."""
    import torch
    import torch.distributed.checkpoint as dcp

    path.mkdir()
    writer = dcp.FileSystemWriter(path, thread_count=2)
    dcp.save(tensors(seed), storage_writer=writer, no_dist=True)
    torch.save({"iteration": 7, "args": argparse.Namespace(seed=seed)}, path / "common.pt")
    about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    about |= {"common_backend": "torch", "common_backend_version": 1}
    (path / "metadata.json").write_text(json.dumps(about))


def _load_megatron_dist(path: Path) -> Any:
    """As core/dist_checkpointing/serialization.py, ``load``: the configuration, what is common, the
    tensors.
    """
    import torch
    import torch.distributed.checkpoint as dcp

    about = json.loads((path / "metadata.json").read_text())
    if about["sharded_backend"] != "torch_dist":
        raise ValueError("the backend is another one")
    common = _load(path / "common.pt")
    state: dict[str, Any] = {name: torch.zeros_like(each) for name, each in tensors(0).items()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return [about, common["iteration"], vars(common["args"]), state]


# --- SavedModel, Orbax without its database ---------------------------------------------------


def _save_saved_model(path: Path, seed: int) -> None:
    import tensorflow as tf

    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            values = arrays(seed)
            self.w = tf.Variable(values["layers.0.w"])
            self.b = tf.Variable(values["layers.0.b"])
            vocabulary = path.parent / "vocabulary.txt"
            vocabulary.write_text(f"a\nb\n{seed}\n")
            self.asset = tf.saved_model.Asset(str(vocabulary))

        @tf.function(input_signature=[tf.TensorSpec([None, 40], tf.float64)])  # type: ignore[untyped-decorator]
        def __call__(self, values: Any) -> Any:
            return tf.matmul(values, self.w)

    tf.saved_model.save(Module(), str(path))
    (path.parent / "vocabulary.txt").unlink()


def _load_saved_model(path: Path) -> Any:
    import tensorflow as tf

    found = tf.saved_model.load(str(path))
    text = Path(found.asset.asset_path.numpy().decode()).read_text()
    return [found.w.numpy(), found.b.numpy(), found(np.ones((2, 40))).numpy(), text]


def _save_orbax_zarr(path: Path, seed: int) -> None:
    import orbax.checkpoint as ocp

    tree = {n.replace(".", "_"): a for n, a in arrays(seed).items() if a.size}
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    with ocp.Checkpointer(handler) as saver:
        saver.save(path, tree)


def _load_orbax_zarr(path: Path) -> Any:
    import orbax.checkpoint as ocp

    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as loader:
        found = loader.restore(path)
    return {name: np.asarray(each) for name, each in found.items()}


def _zero(stage: int) -> Format:
    return Format(
        f"deepspeed-zero-{stage}",
        ("deepspeed",),
        "global_step7",
        lambda path, seed: _save_zero(path, seed, stage),
        lambda path: _load_zero(path, stage),
        checked=True,
    )


def _of_engine(kind: str) -> Format:
    return Format(
        f"deepspeed-{kind}",
        ("deepspeed",),
        "global_step7",
        lambda path, seed: _save_engine(path, seed, kind),
        lambda path: _load_engine(path, kind),
        checked=True,
    )


TRAINING = (
    Format(
        "lightning", ("lightning",), "last.ckpt", _save_lightning, _load_lightning, checked=True
    ),
    *(_zero(stage) for stage in (1, 2, 3)),
    _of_engine("experts"),
    _of_engine("pipeline"),
    Format("megatron", ("torch",), "iter_0000007", _save_megatron, _load_megatron, checked=True),
    Format(
        "megatron-dist",
        ("torch",),
        "iter_0000007",
        _save_megatron_dist,
        _load_megatron_dist,
        checked=True,
    ),
    Format("saved-model", ("tensorflow",), "model", _save_saved_model, _load_saved_model),
    Format("orbax-zarr", ("orbax",), "7", _save_orbax_zarr, _load_orbax_zarr),
)
