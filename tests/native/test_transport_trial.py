"""Which of two ways to serve a client a transport takes, by how long requests take in each."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.native.compiling import compile_program, needs_compiler

pytestmark = needs_compiler
BLOCK = 32 + 96
"""Requests of one block of a trial, of which there are four pairs."""
TRIAL = 8 * BLOCK
AGAIN, AGAIN_MAX = 16 * 96, 256 * 96
"""Requests until the next one, at first and in the end."""
LONG_NS = 1_000_000
"""From here on it is a pause."""


class Way(NamedTuple):
    """In force; a trial tries others, and so does not change what is usual."""

    stays: bool
    usual: bool
    ended: int


@pytest.fixture(scope="module")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("trial") / "trial"
    compile_program(["trial.c"], ["transport/trial.c"], target)
    return target


def ways(binary: Path, *commands: str) -> list[Way]:
    words = " ".join(commands).split()
    done = subprocess.run([binary, *words], check=True, capture_output=True, text=True)
    rows = (map(int, line.split()) for line in done.stdout.splitlines())
    return [Way(bool(stays), bool(usual), ended) for stays, usual, ended in rows]


def requests(count: int, together_ns: int, apart_ns: int) -> str:
    return f"requests {count} {together_ns} {apart_ns}"


def test_both_are_tried_at_once_and_again(binary: Path) -> None:
    blocks = ways(binary, *[requests(BLOCK, 500, 500)] * 8, requests(AGAIN, 500, 500))
    assert [way.stays for way in blocks[:7]] == [False, False, True, True, False, False, True]
    assert {way.usual for way in blocks} == {True}
    assert blocks[7] == Way(stays=True, usual=True, ended=1)
    again = ways(binary, requests(TRIAL + AGAIN - 1, 500, 500), requests(BLOCK + 1, 500, 500))
    assert [way.stays for way in again] == [True, False]


@pytest.mark.parametrize(
    ("together_ns", "apart_ns", "stays"),
    [
        (510, 355, False),
        (300, 430, True),
        (400, 380, True),  # by less than a sixteenth: it stays as it was
        (400, 370, False),
    ],
)
def test_what_is_quicker_is_in_force(
    binary: Path, together_ns: int, apart_ns: int, stays: bool
) -> None:
    (way,) = ways(binary, requests(TRIAL, together_ns, apart_ns))
    assert way == Way(stays=stays, usual=stays, ended=1)


def test_it_changes_with_what_is_asked(binary: Path) -> None:
    """Of other requests the other way is the quicker one: within the next trial."""
    first, second = ways(binary, requests(TRIAL, 500, 300), requests(AGAIN + TRIAL, 300, 500))
    assert (first.usual, second.usual) == (False, True)
    assert second == Way(stays=True, usual=True, ended=2)


def test_trials_are_rarer_as_long_as_nothing_comes_of_them(binary: Path) -> None:
    pauses = [min(AGAIN << number, AGAIN_MAX) for number in range(6)]
    tie = [requests(TRIAL, 500, 500), *(requests(p + TRIAL, 500, 500) for p in pauses)]
    assert [way.ended for way in ways(binary, *tie)] == [1, 2, 3, 4, 5, 6, 7]
    early = [requests(TRIAL, 500, 500), *(requests(p + TRIAL - 1, 500, 500) for p in pauses[:1])]
    assert ways(binary, *early)[-1].ended == 1
    changed = [*tie, requests(AGAIN_MAX + TRIAL, 500, 300), requests(AGAIN + TRIAL, 500, 300)]
    assert ways(binary, *changed)[-1] == Way(stays=False, usual=False, ended=9)


def test_what_gets_slower_is_tried_again_soon(binary: Path) -> None:
    """As two that were together until the kernel parted them; not for a moment of it."""
    tie, block = requests(TRIAL, 300, 300), requests(96, 300, 300)
    slow = requests(8 * 96, 400, 300)
    calm = [requests(7 * 96, 400, 300), block, requests(7 * 96, 400, 300)]
    assert ways(binary, tie, *calm)[-1] == Way(stays=True, usual=True, ended=1)
    begun = ways(binary, tie, slow, requests(BLOCK, 400, 300))
    assert [way.stays for way in begun] == [True, True, False]
    assert ways(binary, tie, slow, requests(TRIAL, 400, 300))[-1] == Way(
        stays=False, usual=False, ended=2
    )


def test_one_pair_that_was_disturbed_decides_nothing(binary: Path) -> None:
    quiet, busy = requests(BLOCK, 500, 300), requests(BLOCK, 500, 5000)
    assert not ways(binary, quiet, busy, *[quiet] * 6)[-1].usual
    assert ways(binary, quiet, busy, quiet, quiet, busy, busy, quiet, quiet)[-1].usual


def test_what_comes_behind_a_pause_does_not_count(binary: Path) -> None:
    """A client that computes between its requests, at whatever moments."""
    quick, slow = requests(BLOCK // 4, 500, 300), f"pause {LONG_NS}"
    way = ways(binary, *[f"{quick} {slow}"] * 32)[-1]
    assert way == Way(stays=False, usual=False, ended=1)
    counted = ways(binary, *[requests(BLOCK // 4, 500, 300), f"pause {LONG_NS - 1}"] * 33)[-1]
    assert counted.usual  # the time of both ways is that of what is no pause


def test_a_pair_is_one_client_s(binary: Path) -> None:
    block = requests(BLOCK, 500, 300)
    begun = ways(binary, block, block, block, "client")
    assert begun[-1] == begun[1]  # the second pair, from its beginning
    assert begun[-1].ended == 0
    assert not ways(binary, block, block, block, "client", *[block] * 6)[-1].usual
    few = [requests(2 * BLOCK - 1, 500, 300), "client"]
    assert ways(binary, *few * 20)[-1].ended == 0
    done = ways(binary, requests(TRIAL + 1, 500, 300), "client", requests(AGAIN - 2, 1, 1))
    assert done[-1] == Way(stays=False, usual=False, ended=1)


@pytest.mark.parametrize("way", [0, 1])
def test_what_was_fixed_stays(binary: Path, way: int) -> None:
    found = ways(binary, f"fix {way}", requests(3 * AGAIN, 500 - 300 * way, 200 + 300 * way))
    assert found[-1] == Way(stays=bool(way), usual=bool(way), ended=0)
    free = ways(binary, f"fix {way}", "fix -1", requests(TRIAL, 500, 300))
    assert free[-1] == Way(stays=False, usual=False, ended=1)
