"""Verifying a store: declared passes over its structures and its data, and what can be repaired."""

from __future__ import annotations

from cxlfs.verify.findings import (
    ERROR,
    KINDS,
    WARNING,
    Finding,
    Kind,
    Progress,
    Use,
    finding_from_dict,
    finding_to_dict,
    progress_from_dict,
    progress_to_dict,
)
from cxlfs.verify.passes import PASSES, Pass, run_passes, run_steps

__all__ = [
    "ERROR",
    "KINDS",
    "PASSES",
    "WARNING",
    "Finding",
    "Kind",
    "Pass",
    "Progress",
    "Use",
    "finding_from_dict",
    "finding_to_dict",
    "progress_from_dict",
    "progress_to_dict",
    "run_passes",
    "run_steps",
]
