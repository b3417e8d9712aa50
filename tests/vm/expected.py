"""What ``cxlfs status --json`` must say of a mounted store on each target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.vm.machine import MIB, Target

WRITE_BACK_ROUTINES = ("clwb", "clflushopt", "clflush")
ALIGNMENT_BYTES = 2 * MIB


def _expected(target: Target, *, after_cut: bool) -> dict[str, object]:
    """Field name, with dots where fields lie in each other, to value."""
    device = target.mode == "devdax"
    return {
        "state": "ONLINE",
        "status": None,
        "read_only": False,
        "label": "vm",
        "media.kind": "devdax" if device else "fsdax",
        "media.granularity": "line",
        "media.persistence_domain": "memory_controller",
        "media.alignment_bytes": ALIGNMENT_BYTES,
        "media.page_size_bytes": ALIGNMENT_BYTES,
        # The emulated devices have no such counter: absent is not zero.
        "media.dirty_shutdowns": None,
        "recovery.clean": not after_cut,
        "recovery.dirty_shutdown": False,
        "recovery.problems": [],
        "errors.checksum": 0,
        "errors.media": 0,
        "errors.no_space": 0,
    }


def _look_up(report: Mapping[str, Any], name: str) -> object:
    value: Any = report
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return "(not there)"
        value = value[part]
    return value


def status_problems(target: Target, report: Mapping[str, Any], *, after_cut: bool) -> list[str]:
    """One line for each field that is not as it must be."""
    problems = []
    for name, want in _expected(target, after_cut=after_cut).items():
        have = _look_up(report, name)
        if have != want or type(have) is not type(want):
            problems.append(f"{name} is {have!r}, not {want!r}")
    routine = _look_up(report, "media.write_back")
    if routine not in WRITE_BACK_ROUTINES:
        problems.append(f"media.write_back is {routine!r}, not one of {WRITE_BACK_ROUTINES}")
    return problems
