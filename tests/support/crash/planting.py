"""Running planted bugs: each against units of the campaign until one catches it, and the table.

A mutant that nothing catches means that the masks or the judge are too weak.
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cxlfs.errors import InvariantError
from cxlfs.media import Granularity
from tests.support.crash.bench import base_image
from tests.support.crash.campaign import prepared
from tests.support.crash.levels import run_unit, split_share, units_of
from tests.support.crash.world import fixed_world
from tests.support.mutants import MUTANTS, Mutant

DOCUMENT = Path(__file__).parents[3] / "docs" / "crash-testing.md"
BEGIN, END = "<!-- mutants: begin -->\n", "<!-- mutants: end -->\n"


@dataclasses.dataclass(frozen=True, slots=True)
class Catch:
    """Which unit caught a mutant, by which image, and how many images and units came before."""

    name: str
    unit: str
    image: str
    problem: str
    images: int
    units: int


def hinted(mutant: Mutant) -> list[str]:
    """Return the units meant for it: where the hint is a share, the whole unit comes second.

    The share saves time. If the store's code moves the cut that catches the mutant into another
    share, the whole unit still catches it.
    """
    whole, _ = split_share(mutant.hint)
    return list(dict.fromkeys((mutant.hint, whole)))


def candidates(mutant: Mutant, seed: int) -> Iterator[str]:
    """The units meant for it, then level t0, then some of t1."""
    meant = hinted(mutant)
    yield from meant
    yield from (unit for unit in units_of("t0", seed) if unit not in meant)
    yield from units_of("t1", seed)[::37]


def catch(mutant: Mutant, seed: int, *, units_max: int | None = None) -> Catch | None:
    """Plant it, and try units until one fails; None: nothing noticed."""
    with fixed_world():
        for granularity in Granularity:
            base_image(granularity)  # made by the right code: what is durable is not the mutant's
    images = 0
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        with prepared():
            for number, unit in enumerate(candidates(mutant, seed)):
                if number == units_max:
                    break
                try:
                    result = run_unit(unit, seed, failures_max=1)
                except (InvariantError, AssertionError, LookupError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
                    return Catch(mutant.name, unit, "", problem, images, number + 1)
                images += len(result.images)
                if result.failures:
                    first = result.failures[0]
                    _must_fit(mutant, first.problem)
                    return Catch(mutant.name, unit, first.image, first.problem, images, number + 1)
    return None


def _must_fit(mutant: Mutant, problem: str) -> None:
    """A mutant that calls what is not there any more is caught at once, and shows nothing."""
    if any(f"{error}Error" in problem for error in ("Type", "Attribute", "Name", "Unpack")):
        raise RuntimeError(f"{mutant.name} does not fit the code: {problem}")


def _catch_named(task: tuple[str, int]) -> tuple[str, Catch | None]:
    name, seed = task
    try:
        return name, catch(MUTANTS[name], seed)
    finally:
        gc.collect()


def run(seed: int, *, jobs: int, only: str | None) -> int:
    """All mutants (or those with ``only`` in the name); the table of all goes into the document."""
    names = [name for name in MUTANTS if only is None or only in name]
    caught: dict[str, Catch | None] = {}
    began = time.monotonic()
    context = multiprocessing.get_context("fork")
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        tasks = ((name, seed) for name in names)
        for name, found in pool.imap_unordered(_catch_named, tasks):
            caught[name] = found
            told = "NOT CAUGHT" if found is None else f"{found.unit}: {found.problem[:100]}"
            sys.stderr.write(f"{len(caught)} of {len(names)} {name}: {told}\n")
    missed = [name for name, found in caught.items() if found is None]
    if only is None and not missed:
        rewrite_table([found for name in names if (found := caught[name]) is not None])
    seconds = time.monotonic() - began
    print(f"{len(names)} mutants, {len(names) - len(missed)} caught, {seconds:.0f} s")
    return 1 if missed else 0


def table(catches: list[Catch]) -> str:
    """Markdown: mutant, classes, what is wrong, what caught it."""
    lines = ["| mutant | class | what is wrong | caught by | image |", "|---|---|---|---|---|"]
    for found in catches:
        mutant = MUTANTS[found.name]
        classes = ", ".join(map(str, mutant.classes))
        image = f"`{found.image}`" if found.image.strip("0") else "while recording or checking"
        lines.append(f"| {found.name} | {classes} | {mutant.what} | `{found.unit}` | {image} |")
    return "\n".join(lines) + "\n"


def rewrite_table(catches: list[Catch]) -> None:
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    DOCUMENT.write_text(before + BEGIN + table(catches) + END + after)
