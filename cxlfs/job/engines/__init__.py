"""How the ranks of a job reach each other: engines over what exists, one module each.

Never: what they say. No framework is imported before its engine is made.
"""

from __future__ import annotations

import os
import sys

from cxlfs.errors import JobEngineError
from cxlfs.job.engines import launchers
from cxlfs.job.engines.interface import Engine, Link, Pending, World, gather, group_size_of

__all__ = ["Engine", "Link", "Pending", "World", "engine_named", "gather", "group_size_of"]

_SIZES_OF_MPI = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""How many processes mpirun started: Open MPI's, and MPICH's and those made of it."""


def engine_named(name: str) -> Engine:
    """``local``, ``torch``, ``mpi``, or ``auto``: torch where a process group was made in this
    process, mpi where mpirun started several, else local where no launcher speaks of others (see
    ``launchers``).

    Raises JobEngineError.
    """
    if name == "auto":
        name = _automatic()
    if name == "local":
        from cxlfs.job.engines.local import LocalEngine  # noqa: PLC0415 - the one asked for alone

        return LocalEngine()
    if name == "torch":
        from cxlfs.job.engines.torch import TorchEngine  # noqa: PLC0415

        return TorchEngine()
    if name == "mpi":
        from cxlfs.job.engines.mpi import MpiEngine  # noqa: PLC0415

        return MpiEngine()
    raise JobEngineError(f"no engine {name!r}: there are auto, local, torch and mpi")


def _require_whole_group(size: int) -> None:
    """Raises JobEngineError: the process group is of this process alone, and there are others."""
    if size == 1:
        launchers.require_alone()


def _automatic() -> str:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        _require_whole_group(torch.get_world_size())
        return "torch"
    if any(os.environ.get(name, "1") != "1" for name in _SIZES_OF_MPI):
        return "mpi"
    launchers.require_alone()
    return "local"
