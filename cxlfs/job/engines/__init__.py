"""How the ranks of a job reach each other: engines over what exists, one module each.

Never: what they say. No framework is imported before its engine is made.
"""

from __future__ import annotations

import os
import sys

from cxlfs.errors import JobEngineError
from cxlfs.job.engines.interface import Engine, World

__all__ = ["Engine", "World", "engine_named"]


def engine_named(name: str) -> Engine:
    """``local``, ``torch``, or ``auto``: torch where a process group was made in this process, else
    local where the environment speaks of one process. Raises JobEngineError.
    """
    if name == "auto":
        name = _automatic()
    if name == "local":
        from cxlfs.job.engines.local import LocalEngine  # noqa: PLC0415 - the one asked for alone

        return LocalEngine()
    if name == "torch":
        from cxlfs.job.engines.torch import TorchEngine  # noqa: PLC0415

        return TorchEngine()
    raise JobEngineError(f"no engine {name!r}: there are auto, local and torch")


def _automatic() -> str:
    torch = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return "torch"
    world = os.environ.get("WORLD_SIZE", "1")
    if world != "1":
        raise JobEngineError(f"WORLD_SIZE is {world}, and there is no process group")
    return "local"
