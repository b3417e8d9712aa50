"""The sample of long tests that one run makes, and the number that draws it.

Other modules mark what is sampled. This one never draws at random: the number is that of the commit
unless ``CXLFS_SAMPLE`` gives another one.

Invariants: the same number draws the same tests. Each group of sampled cases, by default those of
one test function, keeps at least one. Consecutive numbers draw every case in turn.
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

DIGITS = 7


def number_of_commit(root: Path, default: int) -> int:
    """Return a number made from the commit that is checked out, or ``default`` without git."""
    command = ["git", "-C", str(root), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return default
    return int(said[:DIGITS], 16)


def left_out(cases: Iterable[tuple[str, int]], number: int) -> set[int]:
    """Return the positions of the cases that this run leaves out.

    Args:
        cases: for each case the name of its group and ``every``: the group keeps one case in so
            many.
        number: what draws the sample.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for position, case in enumerate(cases):
        groups.setdefault(case, []).append(position)
    out: set[int] = set()
    for (name, every), positions in groups.items():
        first = (number + zlib.crc32(name.encode())) % min(every, len(positions))
        out.update({*positions} - {*positions[first::every]})
    return out
