"""Files that are numbered: by ranks, layers, or the objects that somebody saved.

Never here: what a format calls them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

from cxlfs.checkpoint.model import Contents, File, IncompleteError
from cxlfs.checkpoint.place import Place


def first_gap(
    axes: Sequence[Sequence[int]], found: Collection[tuple[int, ...]]
) -> tuple[int, tuple[int, ...]]:
    """What is missing first of the whole grid, and its place; the first axis runs first."""
    total = math.prod(map(len, axes))
    for index in range(min(total, len(found) + 1)):
        rest, numbers = index, []
        for axis in axes:
            rest, at = divmod(rest, len(axis))
            numbers.append(axis[at])
        if tuple(numbers) not in found:
            return index, tuple(numbers)
    return total, ()


def check_numbers(
    contents: Contents,
    place: Place,
    pattern: re.Pattern[str],
    template: str,
    *,
    by_rank: bool = True,
) -> None:
    """Files that are numbered from 0: none below the highest may be missing. ``by_rank``: or those
    of a later node alone, which has as many ranks as each, in a directory of its own.
    """
    numbers = {int(match[1]) for match in map(pattern.fullmatch, place.names()) if match}
    if not numbers:
        return
    lowest, highest = min(numbers), max(numbers)
    is_node = by_rank and highest - lowest + 1 == len(numbers) and lowest % len(numbers) == 0
    if is_node:
        return
    missing = next((n for n in range(min(highest, len(numbers)) + 1) if n not in numbers), None)
    if missing is not None and missing < highest:
        name = template.format(missing)
        contents.files.append(File(place.full_name(name), None))
        contents.problems.append(IncompleteError(f"{place.full_name(name)} is missing"))
