"""The ledger must find every kind of damage it is there to find."""

from __future__ import annotations

import pytest

from tests.vm.ledger import (
    DIRECTORY,
    Entry,
    Found,
    Ledger,
    Operation,
    State,
    apply,
    content,
    digest,
)

SIZE = 1000


def write(number: int, path: str, seed: str) -> Operation:
    return Operation(number, "write", path, seed=seed, size=SIZE)


def entry(data: bytes) -> Entry:
    return Entry(len(data), digest(data))


def found(state: State) -> dict[str, Found]:
    return {
        path: Found(have, "" if have.is_directory else "complete") for path, have in state.items()
    }


def test_contents_repeat_nowhere() -> None:
    data = content("a 1", (1 << 20) + 5)
    assert len(data) == (1 << 20) + 5
    assert data == content("a 1", (1 << 20) + 5)
    assert data[:100] == content("a 1", 100)
    pages = {data[at : at + 4096] for at in range(0, 1 << 20, 4096)}
    assert len(pages) == 256
    assert not pages & {content("a 2", 1 << 20)[at : at + 4096] for at in range(0, 1 << 20, 4096)}


@pytest.fixture
def ledger() -> Ledger:
    """Two files committed, and a third version of one of them in flight."""
    book = Ledger()
    for number, operation in enumerate([write(1, "a", "a 1"), write(2, "b", "b 1")], 1):
        book.begin(operation)
        book.done(number)
    book.begin(write(3, "a", "a 2"))
    return book


OLD = {"a": entry(content("a 1", SIZE)), "b": entry(content("b 1", SIZE))}
NEW = {**OLD, "a": entry(content("a 2", SIZE))}
TORN = content("a 2", SIZE)[:500] + content("a 1", SIZE)[500:]


def test_the_old_version_passes(ledger: Ledger) -> None:
    assert ledger.judge(found(OLD)) == ("before", [])
    assert ledger.committed == OLD


def test_the_new_version_passes(ledger: Ledger) -> None:
    assert ledger.judge(found(NEW)) == ("after", [])
    assert ledger.committed == NEW


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({**OLD, "a": entry(TORN)}, id="half old, half new"),
        pytest.param({**OLD, "a": entry(b"")}, id="empty"),
        pytest.param({**OLD, "a": entry(bytes(SIZE))}, id="zeros"),
        pytest.param({"b": OLD["b"]}, id="the file in flight is gone"),
        pytest.param({"a": NEW["a"]}, id="a committed file is gone"),
        pytest.param({**OLD, "b": entry(content("b 0", SIZE))}, id="an older version"),
        pytest.param({**OLD, "c": entry(b"x")}, id="a file that was never written"),
        pytest.param({**OLD, "b": DIRECTORY}, id="a directory in the place of a file"),
        pytest.param({}, id="nothing"),
    ],
)
def test_anything_else_is_a_problem(ledger: Ledger, wrong: State) -> None:
    outcome, problems = ledger.judge(found(wrong))
    assert outcome is None
    assert problems


def test_a_complete_file_that_says_incomplete_is_a_problem(ledger: Ledger) -> None:
    outcome, problems = ledger.judge({**found(OLD), "b": Found(OLD["b"], "incomplete")})
    assert outcome is None
    assert any("'incomplete'" in line for line in problems)


def test_nothing_in_flight_allows_one_state_only(ledger: Ledger) -> None:
    ledger.done(3)
    assert ledger.judge(found(NEW)) == ("nothing in flight", [])
    outcome, problems = ledger.judge(found(OLD))
    assert outcome is None
    assert problems


@pytest.mark.parametrize("length", [0, 1, 999])
def test_a_new_file_may_be_there_in_part_if_it_says_so(ledger: Ledger, length: int) -> None:
    ledger.done(3)
    ledger.begin(write(4, "new", "new 1"))
    part = entry(content("new 1", SIZE)[:length])
    assert ledger.judge({**found(NEW), "new": Found(part, "incomplete")}) == ("incomplete", [])
    assert ledger.committed == {**NEW, "new": part}


def test_a_new_file_in_part_that_calls_itself_complete_is_a_problem(ledger: Ledger) -> None:
    ledger.done(3)
    ledger.begin(write(4, "new", "new 1"))
    part = entry(content("new 1", SIZE)[:500])
    outcome, problems = ledger.judge({**found(NEW), "new": Found(part, "complete")})
    assert outcome is None
    assert problems


def test_an_incomplete_file_with_wrong_bytes_is_a_problem(ledger: Ledger) -> None:
    ledger.done(3)
    ledger.begin(write(4, "new", "new 1"))
    outcome, problems = ledger.judge({**found(NEW), "new": Found(entry(bytes(500)), "incomplete")})
    assert outcome is None
    assert problems


def test_a_directory_rename_moves_all_below_it_and_nothing_else() -> None:
    state: State = {"d": DIRECTORY, "d/1": OLD["a"], "d/2": OLD["b"], "d2": DIRECTORY}
    after = apply(state, Operation(1, "rename", "d", target="e"))
    assert after == {"e": DIRECTORY, "e/1": OLD["a"], "e/2": OLD["b"], "d2": DIRECTORY}


def test_a_directory_rename_done_in_half_is_a_problem() -> None:
    book = Ledger({"d": DIRECTORY, "d/1": OLD["a"], "d/2": OLD["b"]})
    book.begin(Operation(1, "rename", "d", target="e"))
    half: State = {"d": DIRECTORY, "d/1": OLD["a"], "e": DIRECTORY, "e/2": OLD["b"]}
    outcome, problems = book.judge(found(half))
    assert outcome is None
    assert problems


def test_operations_come_one_at_a_time(ledger: Ledger) -> None:
    with pytest.raises(ValueError, match="operation 3 has not ended"):
        ledger.begin(write(4, "b", "b 2"))
    with pytest.raises(ValueError, match="operation 4 is not the one in flight"):
        ledger.done(4)
