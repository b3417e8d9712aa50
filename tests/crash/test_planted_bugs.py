"""The campaign must fail when the store is broken on purpose: each planted bug is caught by the
unit that is meant for it. ``scripts/crash-test --mutants`` tells which image does.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.crash.planting import catch
from tests.support.mutants import MUTANTS

CLASSES = range(1, 21)
CLASS_MUTANTS_MIN = 2
SEED = 20_260_101
UNITS_EVERY = 3
"""What catches a bug is long where it is a workload over checkpoint units: of those bugs one in so
many is planted in each test run.
"""


def planted() -> list[Any]:
    """All; some are left to campaigns."""
    of_units = [name for name, mutant in MUTANTS.items() if "/unit" in mutant.hint]
    left_out = {*of_units} - {*of_units[::UNITS_EVERY]}
    return [
        pytest.param(name, marks=[pytest.mark.campaign] if name in left_out else [])
        for name in MUTANTS
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", planted())
def test_caught(name: str) -> None:
    found = catch(MUTANTS[name], SEED, units_max=1)
    assert found is not None
    print(f"{found.unit}, image {found.image} after {found.images}: {found.problem}")


def test_every_bug_can_be_planted() -> None:
    """Those that are left to campaigns, too, are bugs of the code as it is: what they replace is
    there.
    """
    for mutant in MUTANTS.values():
        with pytest.MonkeyPatch.context() as patch:
            mutant.plant(patch)


def test_every_class_of_bugs_is_planted_in_each_test_run() -> None:
    here = [param.values[0] for param in planted() if not param.marks]
    assert {number for name in here for number in MUTANTS[name].classes} == set(CLASSES)


def test_every_class_of_bugs_is_planted() -> None:
    """docs/crash-testing.md lists the classes."""
    counts = {n: sum(n in mutant.classes for mutant in MUTANTS.values()) for n in CLASSES}
    assert len(MUTANTS) >= 40
    assert {n: count for n, count in counts.items() if count < CLASS_MUTANTS_MIN} == {}
