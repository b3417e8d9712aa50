"""How many fences each verb issues, as the recorder saw them: the table in docs/architecture.md.

A verb that changes names or attributes costs at most two, and so does a commit of data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from cxlfs.media import Granularity
from cxlfs.native import EventKind
from tests.support.crash.bench import Bench, new_bench
from tests.support.crash.operations import OPERATIONS, fill_and_fail
from tests.support.crash.world import fixed_world
from tests.support.repository import ROOT

FENCES_MAX = 2
OF_THE_STORE_ITSELF = {"rollover", "clean", "drop", "periodic commit"}
ON_A_FULL_STORE = {fill_and_fail}
"""A write that takes of the last room, or finds none, rolls over and cleans."""


def fences_of(bench: Bench) -> Iterator[tuple[str, int]]:
    """(verb, fences) for each verb on the tape."""
    names = iter(bench.tape.names)
    count = 0
    for kind, *_ in bench.tape.media.events().entries:
        if kind == EventKind.FENCE:
            count += 1
        elif kind == EventKind.MARK:
            yield next(names), count
            count = 0


def measured(granularity: Granularity) -> dict[str, set[int]]:
    """Every count that was seen of each verb, over the operations of the crash campaign."""
    found: dict[str, set[int]] = {}
    with fixed_world():
        for operation in OPERATIONS:
            if operation in ON_A_FULL_STORE:
                continue
            bench = new_bench(granularity)
            operation(bench)
            for name, count in fences_of(bench):
                found.setdefault(name, set()).add(count)
            bench.store.abandon()
            bench.tape.media.close()
    return found


def documented() -> dict[str, tuple[str, str]]:
    """Verb -> (cache-line media, page media) of the table."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text.split("## Fences")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| *([^|]+) \| *([^|]+) \| [^|]+\|$", table, re.MULTILINE)
    return {
        verb.strip(): (line.strip(), page.strip())
        for verbs, line, page in rows
        for verb in verbs.split(",")
    }


@pytest.mark.parametrize("granularity", list(Granularity), ids=lambda g: g.name)
def test_no_verb_needs_more_than_two(granularity: Granularity) -> None:
    found = measured(granularity)
    assert {"write", "close", "rename", "mkdir", "setxattr", "unlink"} <= set(found)
    too_many = {
        name: counts
        for name, counts in found.items()
        if max(counts) > FENCES_MAX and name not in OF_THE_STORE_ITSELF
    }
    assert too_many == {}


@pytest.mark.parametrize(("column", "granularity"), [(0, Granularity.LINE), (1, Granularity.PAGE)])
def test_the_table_is_what_is_measured(column: int, granularity: Granularity) -> None:
    table = documented()
    for name, counts in measured(granularity).items():
        if name not in table:
            continue
        low, _, high = table[name][column].partition(" to ")
        allowed = range(int(low), int(high or low) + 1)
        assert set(allowed) == set(range(min(counts), max(counts) + 1)), (name, counts)
    assert {"write", "close", "fsync", "rename", "link", "mkdir", "rollover"} <= set(table)
