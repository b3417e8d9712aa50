"""Random programs on a mount: they do what they do on tmpfs (``scripts/fuzz-run`` plays more)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support import run_fuzz_kills
from tests.support.mount import MIB
from tests.support.run_fuzz_kills import kill_under, may_be
from tests.support.run_fuzzing import (
    Difference,
    Playground,
    Said,
    first_difference,
    parse,
    playground,
    shorten,
)

SAMPLE = {"single": 16, "pair": 8}
WHOLE = {"single": 5000, "pair": 1000}
KILLS = 2
ALL_KILLS = 200
BATCH = 25
TRIES = 40
"""To leave out steps of a program that differs."""
WAYS = ("tmpfs", "mount")
UNDER_RUN = ("tmpfs", "run")


@pytest.fixture(scope="module")
def ground() -> Iterator[Playground]:
    with playground() as made:
        yield made


def assert_same(
    ground: Playground, seeds: range, mode: str, ways: Sequence[str], *options: str
) -> None:
    chosen = [*options, *(["mode=pair"] if mode == "pair" else [])]
    for first in range(seeds.start, seeds.stop, BATCH):
        batch = range(first, min(first + BATCH, seeds.stop))
        found = ground.compare(batch, chosen, ways)
        if found:
            steps, shorter = shorten(ground, found[0], chosen, tries_max=TRIES)
            keep = ",".join(map(str, steps))
            again = f"scripts/fuzz-run --mode {mode} --seed {found[0].seed} --keep {keep} --show"
            pytest.fail("\n".join([*found[0].lines(), *shorter.lines(), f"again: {again}"]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", SAMPLE)
def test_random_programs_do_the_same(ground: Playground, seed: int, mode: str) -> None:
    assert_same(ground, range(seed, seed + SAMPLE[mode]), mode, WAYS)


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", WHOLE)
def test_many_random_programs_do_the_same(ground: Playground, seed: int, mode: str) -> None:
    assert_same(ground, range(seed, seed + WHOLE[mode]), mode, WAYS)


# --- under cxlfs run ------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", SAMPLE)
def test_random_programs_do_the_same_under_run(ground: Playground, seed: int, mode: str) -> None:
    before = ground.direct_bytes()
    assert_same(ground, range(seed, seed + SAMPLE[mode]), mode, UNDER_RUN)
    assert ground.direct_bytes() - before > MIB, "the direct way was not taken"


@pytest.mark.campaign
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", WHOLE)
def test_many_random_programs_do_the_same_under_run(
    ground: Playground, seed: int, mode: str
) -> None:
    assert_same(ground, range(seed, seed + WHOLE[mode]), mode, UNDER_RUN)


def assert_survives(ground: Playground, seeds: range) -> None:
    for seed in seeds:
        finding = kill_under(ground, seed)
        assert finding is None, "\n".join(finding.lines())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_daemon_is_killed_under_random_programs(ground: Playground, seed: int) -> None:
    assert_survives(ground, range(seed, seed + KILLS))


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_the_daemon_is_killed_under_many_programs(ground: Playground, seed: int) -> None:
    assert_survives(ground, range(seed, seed + ALL_KILLS))


# --- what the harness finds ---------------------------------------------------------------------

REPORT = """program 7 0
0a write: way 1, 5 = 5
1a read: read way 2, 5 = 5, sum 1f
program 8 1011
0a open: way 0 = 3
"""


def test_reports_are_told_apart() -> None:
    said = parse(REPORT)
    assert said[7].lines == ("0a write: way 1, 5 = 5", "1a read: read way 2, 5 = 5, sum 1f")
    assert said[8] == Said(1011, ("0a open: way 0 = 3",))
    assert said[8].ending() == "killed by signal 11"


@pytest.mark.parametrize(
    ("lines", "code", "kind"),
    [
        (("0a write: = 5", "1a read: = 5, sum 2"), 0, "read"),
        (("0a write: = 5",), 1011, "read"),
        (("0a write: = 5", "1a read: = 5, sum 1", "2a look: = 0"), 0, "look"),
        (("0a write: = 5", "1a read: = 5, sum 1"), 0, None),
    ],
)
def test_the_first_difference_is_found(lines: tuple[str, ...], code: int, kind: str | None) -> None:
    expected = Said(0, ("0a write: = 5", "1a read: = 5, sum 1"))
    found = first_difference(1, ("tmpfs", "run"), expected, Said(code, lines))
    assert (found.kind if found else None) == kind


def test_a_program_is_shortened_to_the_steps_that_matter() -> None:
    class Fake(Playground):
        def __init__(self) -> None:
            pass

        def compare(
            self, seeds: Sequence[int], options: Sequence[str] = (), ways: Sequence[str] = ()
        ) -> list[Difference]:
            kept = set(options[-1].removeprefix("keep=").split(","))
            ends = (ways[0], ways[1])
            return [Difference(seeds[0], ends, "9a x: 1", "9a x: 2", "x")] * ({"3", "9"} <= kept)

    steps, _ = shorten(Fake(), Difference(5, ("tmpfs", "run"), "9a x: 1", "9a x: 2", "x"))
    assert steps == [3, 9]


SAVES = (
    "0a save: publishing 1: 10 bytes, last 0, sum aa",
    "0a save: published 1 = 0",
    "1a save: state 1: 20 bytes, last 0, sum bb",
    "1a save: publishing 1: 30 bytes, last 0, sum cc",
    "1a save: published 1 = 0",
)


@pytest.mark.parametrize(
    ("code", "rest", "file", "problem"),
    [
        (0, "1a save: state 1: 0 bytes, last -107, sum 0", "10 bytes, last 0, sum aa", None),
        (0, "1a save: state 1: 0 bytes, last -107, sum 0", "20 bytes, last 0, sum bb", None),
        (0, "1a save: state 1: 0 bytes, last -107, sum 0", "20 bytes, last 0, sum aa", "content"),
        (0, "1a save: state 1: 0 bytes, last -107, sum 0", "0 bytes, last 0, sum 0", "content"),
        (0, "1a save: state 1: 0 bytes, last -107, sum 0", "-2", "content"),
        (0, "1a save: state 1: 20 bytes, last 0, sum dd", "10 bytes, last 0, sum aa", "save"),
        (1014, "1a save: state 1: 0 bytes, last -107, sum 0", "10 bytes, last 0, sum aa", "save"),
    ],
)
def test_a_kill_is_judged(code: int, rest: str, file: str, problem: str | None) -> None:
    others = tuple(f"0a : file {name}: -2" for name in (0, 2, 3))
    found = run_fuzz_kills.judge(
        1,
        Said(0, SAVES),
        Said(code, (*SAVES[:2], rest)),
        Said(0, (f"0a : file 1: {file}", *others)),
    )
    assert (found.kind if found else None) == problem


def test_what_was_never_published_may_be_empty_or_absent() -> None:
    allowed = may_be(1, (), SAVES, 0)
    assert allowed == [None, ("10", "aa"), ("0", "0")]
