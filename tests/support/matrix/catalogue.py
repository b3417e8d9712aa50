"""Which frameworks the matrix knows: the program of each, what it needs, and what makes its
directory a checkpoint unit.

Never here: running anything.
"""

from __future__ import annotations

import dataclasses

TORCH = ("torch==2.13.0", "numpy")
PAUSE_SECONDS = 0.02
"""Between two saves."""
QUIET_SECONDS = 0.3
"""Of units without a file that comes last. A training program saves every few minutes and its units
wait ten seconds; these programs save without a pause but the one below."""
PAUSE_WHERE_QUIET_SECONDS = 1.2
"""More than QUIET_SECONDS and the half second between two looks at open units."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """``program``: the module below ``trainers`` and its arguments. ``environment``: those of one
    name share a virtual environment. ``unit``: directory below the trainer's own and arguments of
    ``cxlfs policy set``; empty where ``-o units=auto`` knows it by itself.
    """

    title: str
    program: tuple[str, ...]
    environment: str
    requires: tuple[str, ...]
    unit: tuple[str, ...] = ()
    kept: int = 1
    """How many checkpoints lie in the directory: room for one is its size divided by this."""
    temporary_below: bool = False
    """TMPDIR lies on the same file system, as docs/operations.md says."""

    @property
    def expects_marker(self) -> bool:
        return not self.unit or "--done" in self.unit


_EACH_FILE = ("--unit", ".", "--done", "*")
_ITSELF = ("--unit", ".", "--quiet", str(QUIET_SECONDS))
_TRAINERS = (*TORCH, "transformers", "accelerate", "safetensors")

FRAMEWORKS: dict[str, Framework] = {
    "torch": Framework(
        title="`torch.save` by name, one name",
        program=("torch_file",),
        environment="torch",
        requires=TORCH,
        unit=_EACH_FILE,
    ),
    "torch-file": Framework(
        title="`torch.save` to a file object, one name",
        program=("torch_file", "file"),
        environment="torch",
        requires=TORCH,
        unit=_EACH_FILE,
    ),
    "dcp": Framework(
        title="torch DCP, one directory",
        program=("torch_dcp",),
        environment="torch",
        requires=TORCH,
    ),
    "dcp-steps": Framework(
        title="torch DCP, `step-N`, newest wins",
        program=("torch_dcp", "steps"),
        environment="torch",
        requires=TORCH,
        unit=("--unit", "step-*", "--done", ".metadata"),
        kept=2,
    ),
    "hugging-face": Framework(
        title="Hugging Face Trainer, `get_last_checkpoint`",
        program=("hugging_face",),
        environment="torch",
        requires=_TRAINERS,
        kept=2,
    ),
    "accelerate": Framework(
        title="accelerate `save_state`, automatic names",
        program=("accelerate_state",),
        environment="torch",
        requires=_TRAINERS,
        unit=("--unit", "checkpoint_*", "--done", "custom_checkpoint_0.pkl"),
        kept=2,
    ),
    "deepspeed": Framework(
        title="DeepSpeed, `latest`",
        program=("deepspeed_engine",),
        environment="torch",
        requires=(*TORCH, "deepspeed"),
        kept=2,
    ),
    "megatron": Framework(
        title="Megatron-LM, tracker (replayed, see below)",
        program=("megatron_tracker",),
        environment="torch",
        requires=TORCH,
        kept=2,
    ),
    "lightning": Framework(
        title='Lightning, `ckpt_path="last"`',
        program=("lightning_last",),
        environment="torch",
        requires=(*TORCH, "lightning"),
        unit=_EACH_FILE,
        kept=3,
        temporary_below=True,
    ),
    "safetensors": Framework(
        title="safetensors in shards, `save_pretrained` into one directory",
        program=("safetensors_shards",),
        environment="torch",
        requires=_TRAINERS,
        unit=("--unit", "model", "--done", "model.safetensors.index.json"),
    ),
    "hdf5-a": Framework(
        title='h5py `"a"`, in place',
        program=("hdf5",),
        environment="torch",
        requires=("h5py", "numpy"),
        unit=_EACH_FILE,
    ),
    "hdf5-w": Framework(
        title='h5py `"w"`',
        program=("hdf5", "w"),
        environment="torch",
        requires=("h5py", "numpy"),
        unit=_EACH_FILE,
    ),
    "zarr": Framework(
        title='zarr `mode="w"`, metadata consolidated',
        program=("zarr_group", "consolidate"),
        environment="torch",
        requires=("zarr", "numpy"),
    ),
    "zarr-plain": Framework(
        title='zarr `mode="w"`',
        program=("zarr_group",),
        environment="torch",
        requires=("zarr", "numpy"),
        unit=("--unit", "*.zarr", "--quiet", str(QUIET_SECONDS)),
    ),
    "numpy": Framework(
        title="`numpy.savez`, one name",
        program=("numpy_archive",),
        environment="torch",
        requires=("numpy",),
        unit=_EACH_FILE,
    ),
    "xgboost": Framework(
        title="XGBoost by number, newest wins",
        program=("xgboost_number",),
        environment="torch",
        requires=("xgboost-cpu", "scipy", "numpy"),
        unit=_EACH_FILE,
        kept=2,
    ),
    "tensorflow": Framework(
        title="TensorFlow CheckpointManager",
        program=("tensorflow_manager",),
        environment="tensorflow",
        requires=("tensorflow-cpu",),
        kept=3,
    ),
    "keras": Framework(
        title="Keras `ModelCheckpoint`, one `.keras`",
        program=("keras_callbacks",),
        environment="tensorflow",
        requires=("tensorflow-cpu",),
        unit=_EACH_FILE,
    ),
    "keras-backup": Framework(
        title="Keras `BackupAndRestore`",
        program=("keras_callbacks", "backup"),
        environment="tensorflow",
        requires=("tensorflow-cpu",),
    ),
    "flax": Framework(
        title="flax `save_checkpoint` (msgpack)",
        program=("flax_checkpoints",),
        environment="orbax",
        requires=("flax", "jax", "jaxlib", "numpy"),
        kept=2,
        unit=_EACH_FILE,
    ),
    "orbax": Framework(
        title="Orbax CheckpointManager",
        program=("orbax_manager",),
        environment="orbax",
        requires=("orbax-checkpoint", "jax", "jaxlib"),
        kept=2,
    ),
}

CARELESS = Framework(
    title="NumPy, eight files one after the other",
    program=("numpy_archive", "shards"),
    environment="",
    requires=(),
    unit=_ITSELF,
)
"""Not in the table: shows that the matrix sees what is mixed."""
