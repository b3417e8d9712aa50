"""What the golden archives hold: each checkpoint in them, and what is known of it."""

from __future__ import annotations

import dataclasses
import shutil
import tarfile
from pathlib import Path

from tests.support.repository import ROOT

GOLDEN = ROOT / "tests" / "checkpoint" / "golden"


@dataclasses.dataclass(frozen=True)
class Case:
    """``optional``: files that a checkpoint may lack. ``needed``: of Orbax' files of data."""

    archive: str
    path: str
    kind: str
    step: int | None
    tensors: int
    optional: tuple[str, ...] = ()
    needed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.archive}:{self.path}"


HUGGING_FACE_OPTIONAL = (
    "config.json",
    "generation_config.json",
    "training_args.bin",
    "rng_state.pth",
)

CASES = (
    Case("torch", "zip.pt", "torch", 42, 5),
    Case("torch", "legacy.pt", "torch-legacy", 42, 5),
    Case("torch", "module.pt", "torch", None, 2),
    Case("torch", "model.safetensors", "safetensors", None, 3),
    Case("dcp", "step-7", "dcp", 7, 4),
    Case("accelerate", "checkpoint_3", "accelerate", 3, 9, ("optimizer.bin", "scheduler.bin")),
    Case("shards", "model", "safetensors-sharded", None, 12, HUGGING_FACE_OPTIONAL),
    Case("hugging-face", "checkpoint-2", "hugging-face", 2, 13, HUGGING_FACE_OPTIONAL),
    Case("lightning", "epoch=0-step=3.ckpt", "lightning", 3, 3),
    Case("deepspeed", "global_step10", "deepspeed", 10, 7),
    Case("deepspeed-zero", "stage-1/global_step3", "deepspeed", 3, 10),
    Case("deepspeed-zero", "stage-3/global_step3", "deepspeed", 3, 10),
    Case("megatron", "ranks/iter_0000100", "megatron", 100, 4),
    Case("megatron", "distributed/iter_0000200", "megatron", 200, 1),
    Case("tensorflow", "run/ckpt-10", "tensorflow", 5, 6),
    Case("tensorflow", "saved", "saved-model", None, 2, ("fingerprint.pb",)),
    Case("keras", "model.keras", "keras", None, 4),
    Case("keras", "model.weights.h5", "hdf5", None, 4),
    Case("orbax", "2", "orbax", 2, 2, needed=("09728e137540bd47e53b769e4e2c65df",)),
    Case("flax", "checkpoint_9", "flax", 9, 2),
)


def unpack_into(name: str, place: Path) -> Path:
    """What the archive ``name`` holds, below ``place``."""
    with tarfile.open(GOLDEN / f"{name}.tar.xz") as archive:
        for member in archive:
            path = place / member.name
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                path.mkdir(exist_ok=True)
            else:
                path.write_bytes(content.read())
    return place


def files_of(path: Path) -> list[Path]:
    """Every file of a checkpoint."""
    if path.is_dir():
        return sorted(each for each in path.rglob("*") if each.is_file())
    if path.is_file():
        return [path]
    return sorted(path.parent.glob(f"{path.name}.*"))


def copy_of(path: Path, target: Path) -> Path:
    """The checkpoint alone, in an empty directory, under its own name."""
    target.mkdir(parents=True)
    copied = target / path.name
    if path.is_dir():
        shutil.copytree(path, copied)
    else:
        for each in files_of(path):
            shutil.copy2(each, target / each.name)
    return copied
