"""What a checkpoint is: which files belong together, whether it is complete, and what is in it.

Works on any directory, mounted from a store or not, with POSIX calls and ``user.cxlfs.*``
attributes. Pure readers of bytes that anybody may have written: within limits, nothing is ever
unpickled, imported or run, no framework is needed, and nothing is changed but by ``tidy``.
"""

from __future__ import annotations

from cxlfs.checkpoint.inspection import inspect, recognise
from cxlfs.checkpoint.model import Checkpoint, File, Level, State, Tensor

__all__ = ["Checkpoint", "File", "Level", "State", "Tensor", "inspect", "recognise"]
