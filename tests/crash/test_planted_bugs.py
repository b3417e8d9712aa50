"""The campaign must fail when the store is broken on purpose: each planted bug is caught by the
unit that is meant for it. ``scripts/crash-test --mutants`` tells which image does.
"""

from __future__ import annotations

import pytest

from tests.support.crash.planting import catch, hinted
from tests.support.mutants import MUTANTS

CLASSES = range(1, 21)
CLASS_MUTANTS_MIN = 2
SEED = 20_260_101


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str) -> None:
    mutant = MUTANTS[name]
    found = catch(mutant, SEED, units_max=len(hinted(mutant)))
    assert found is not None
    print(f"{found.unit}, image {found.image} after {found.images}: {found.problem}")


def test_every_class_of_bugs_is_planted() -> None:
    """docs/crash-testing.md lists the classes."""
    counts = {n: sum(n in mutant.classes for mutant in MUTANTS.values()) for n in CLASSES}
    assert len(MUTANTS) >= 40
    assert {n: count for n, count in counts.items() if count < CLASS_MUTANTS_MIN} == {}
