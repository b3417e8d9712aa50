"""In which order several workers run tests: each begins with long ones, so that in the end none
waits for what another one has only just begun.

Of pytest-xdist's ``--dist worksteal`` each worker gets one part of all tests first, in their order,
all parts of nearly the same size; later it takes from the ends of others' parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def long_first(long: Sequence[T], others: Sequence[T], workers: int) -> list[T]:
    """All of them, so that the part of each worker begins with as many ``long`` ones."""
    count, ordered, begun = len(long) + len(others), list[T](), 0
    for index in range(workers):
        mine = long[index::workers]
        part = (count - len(ordered)) // (workers - index)
        end = begun + max(0, part - len(mine))
        ordered += [*mine, *others[begun:end]]
        begun = end
    return ordered
