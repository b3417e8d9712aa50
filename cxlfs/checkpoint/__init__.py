"""What a checkpoint is: which files belong together, whether it is complete, and what is in it.

Works on any directory, mounted from a store or not, with POSIX calls and ``user.cxlfs.*``
attributes. Pure readers of bytes that anybody may have written: within limits, nothing is ever
unpickled, imported or run, no framework is needed, and nothing is changed but by ``tidy`` and
``keep``.
"""

from __future__ import annotations

from cxlfs.checkpoint.below import TidyBelow
from cxlfs.checkpoint.catalogue import By, Entry, catalogue, good, newer_by, with_step
from cxlfs.checkpoint.directory import nothing_in, require_directory
from cxlfs.checkpoint.inspection import inspect, recognise
from cxlfs.checkpoint.model import Checkpoint, File, Level, State, Tensor
from cxlfs.checkpoint.suspects import FAILED_RESUMES_MAX, Suspect, failed_resumes, suspect_of
from cxlfs.checkpoint.tidy import Retargeted, astray, plan, tidy, undo

__all__ = [
    "FAILED_RESUMES_MAX",
    "By",
    "Checkpoint",
    "Entry",
    "File",
    "Level",
    "Retargeted",
    "State",
    "Suspect",
    "Tensor",
    "TidyBelow",
    "astray",
    "catalogue",
    "failed_resumes",
    "good",
    "inspect",
    "newer_by",
    "nothing_in",
    "plan",
    "recognise",
    "require_directory",
    "suspect_of",
    "tidy",
    "undo",
    "with_step",
]
