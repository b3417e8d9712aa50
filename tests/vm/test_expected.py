"""Each field of the status that must be right is looked at."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.vm.expected import status_problems
from tests.vm.machine import TARGETS, Target

FIELDS = [
    ("state", "READ-ONLY"),
    ("status", "something is wrong"),
    ("read_only", True),
    ("label", ""),
    ("media.kind", "file"),
    ("media.granularity", "page"),
    ("media.write_back", "msync"),
    ("media.persistence_domain", None),
    ("media.alignment_bytes", 1),
    ("media.page_size_bytes", 4096),
    ("media.dirty_shutdowns", 0),
    ("recovery.clean", True),
    ("recovery.dirty_shutdown", True),
    ("recovery.problems", ["a record"]),
    ("errors.checksum", 1),
    ("errors.media", 1),
    ("errors.no_space", 1),
]


def good(target: Target) -> dict[str, Any]:
    device = target.mode == "devdax"
    return {
        "state": "ONLINE",
        "status": None,
        "read_only": False,
        "label": "vm",
        "media": {
            "kind": "devdax" if device else "fsdax",
            "granularity": "line",
            "write_back": "clwb",
            "persistence_domain": "memory_controller",
            "alignment_bytes": 2097152,
            "page_size_bytes": 2097152,
            "dirty_shutdowns": None,
        },
        "recovery": {"clean": False, "dirty_shutdown": False, "problems": []},
        "errors": {"checksum": 0, "media": 0, "no_space": 0},
    }


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_good_status_passes_and_an_empty_one_does_not(target: Target) -> None:
    assert status_problems(target, good(target), after_cut=True) == []
    assert len(status_problems(target, {}, after_cut=True)) == len(FIELDS)


@pytest.mark.parametrize(("name", "value"), FIELDS)
def test_a_wrong_field_is_named(name: str, value: object) -> None:
    report = copy.deepcopy(good(TARGETS[0]))
    *folders, last = name.split(".")
    part = report
    for folder in folders:
        part = part[folder]
    part[last] = value
    problems = status_problems(TARGETS[0], report, after_cut=True)
    assert len(problems) == 1
    assert problems[0].startswith(f"{name} is {value!r}")


def test_a_clean_unmount_must_be_seen_as_one() -> None:
    problems = status_problems(TARGETS[0], good(TARGETS[0]), after_cut=False)
    assert problems == ["recovery.clean is False, not True"]
