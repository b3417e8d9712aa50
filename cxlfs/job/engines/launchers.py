"""What a launcher's variables say of how many processes a job has, and which engine reaches them.

``engine="auto"`` asks this before it takes a process for a job of its own: ranks that each believe
to be alone would save into one directory, and load each other's shards.

Never: imports a framework. What is imported already may be asked.

Invariants
- A variable that says "more than one", or that only a process among others has, refuses.
- A launcher that says "one" is believed, also where a variable without a size would refuse.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping

from cxlfs.errors import JobEngineError

TORCH = "call torch.distributed.init_process_group first, for engine='torch'"
MPI = "engine='mpi', or init_process_group first, for engine='torch'"
_ALONE = "; engine='local', if this process saves a job of its own in a directory of its own"

Environment = Mapping[str, str]
_Reader = Callable[["Environment"], "Said | None"]


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """``size``: how many processes; None: others, how many is not said. ``engine``: what reaches
    them.
    """

    launcher: str
    variables: str
    size: int | None
    engine: str = TORCH


def _number(environment: Environment, *names: str) -> tuple[str, int] | None:
    """Of the first that is there. One that is no number is a size that is not known: 0."""
    for name in names:
        text = environment.get(name, "")
        if text:
            return f"{name}={text}", int(text) if text.isascii() and text.isdigit() else 0
    return None


def _sized(launcher: str, *names: str, engine: str = TORCH) -> _Reader:
    def read(environment: Environment) -> Said | None:
        found = _number(environment, *names)
        return None if found is None else Said(launcher, found[0], found[1] or None, engine)

    return read


def _present(launcher: str, *names: str, engine: str = TORCH) -> _Reader:
    """A process among others, how many is not said."""

    def read(environment: Environment) -> Said | None:
        found = next((name for name in names if environment.get(name)), None)
        return None if found is None else Said(launcher, found, None, engine)

    return read


def _slurm(environment: Environment) -> Said | None:
    """A step has tasks. What sbatch or salloc say is the allocation: a script in it is one process
    alone, and its number is 0.
    """
    launcher, rank = "Slurm (srun)", environment.get("SLURM_PROCID", "0")
    if environment.get("SLURM_STEP_ID"):
        return _sized(launcher, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", engine=MPI)(environment)
    return None if rank == "0" else Said(launcher, f"SLURM_PROCID={rank}", None, MPI)


def _indexed(environment: Environment) -> Said | None:
    """Kubernetes: Indexed Jobs, JobSets and LeaderWorkerSets."""
    size = _number(environment, "LWS_GROUP_SIZE")
    if size is not None:
        return Said("LeaderWorkerSet", size[0], size[1] or None)
    index = _number(environment, "JOB_COMPLETION_INDEX")
    return None if index is None else Said("Kubernetes, an indexed Job", index[0], None)


def _hosts(environment: Environment) -> Said | None:
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES"):
        found = [host for host in environment.get(name, "").split(",") if host]
        if found:
            return Said("Cloud TPU", f"{name}, {len(found)} of them", len(found))
    return None


LAUNCHERS: tuple[_Reader, ...] = (
    _sized("torchrun, or one of its kind", "WORLD_SIZE"),
    _sized("Open MPI", "OMPI_COMM_WORLD_SIZE", engine=MPI),
    _sized("MPICH, or one of its kind", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", engine=MPI),
    _sized("LSF", "JSM_NAMESPACE_SIZE", engine=MPI),
    _sized("Flux", "FLUX_JOB_SIZE", engine=MPI),
    _slurm,
    _sized("JAX", "JAX_NUM_PROCESSES"),
    _sized("Cloud TPU", "MEGASCALE_NUM_SLICES"),
    _hosts,
    _present("torchrun", "TORCHELASTIC_RUN_ID"),
    _present("JAX", "JAX_COORDINATOR_ADDRESS"),
    _present("PMIx", "PMIX_RANK", "PMIX_NAMESPACE", engine=MPI),
    _present("Cray PALS", "PALS_RANKID", engine=MPI),
    _indexed,
)
"""Those that say a size come first: they are believed."""


def _of_modules() -> Said | None:
    """Frameworks that this process has begun already."""
    ray = sys.modules.get("ray")
    worker = getattr(getattr(getattr(ray, "_private", None), "worker", None), "global_worker", None)
    if worker is not None and getattr(worker, "mode", None) == 1:  # a worker, no driver
        return Said("Ray", "a worker of ray", None)
    jax = sys.modules.get("jax._src.distributed")
    state = getattr(jax, "global_state", None)
    size = getattr(state, "num_processes", None)
    if getattr(state, "client", None) is not None and isinstance(size, int):
        return Said("JAX", f"jax.distributed, {size} processes", size)
    return None


def said_by(environment: Environment) -> tuple[Said, ...]:
    """What launchers say, those that say a size first."""
    found = [read(environment) for read in LAUNCHERS]
    return tuple(said for said in [*found, _of_modules()] if said is not None)


def require_alone(environment: Environment | None = None) -> None:
    """Raises JobEngineError: there are other processes of this job, or may be."""
    said = said_by(os.environ if environment is None else environment)
    sizes = {each.size for each in said if each.size is not None}
    more = [each for each in said if each.size != 1]
    if sizes == {1}:
        more = [each for each in more if each.launcher == "Ray"]
    if more:
        first = more[0]
        raise JobEngineError(
            f"{first.launcher} says that there are other processes of this job "
            f"({first.variables}), and none of them is reached",
            next_step=f"{first.engine}{_ALONE}",
        )
