"""Messages on the way: what goes out comes back, and nothing else comes in."""

from __future__ import annotations

import json
import random

import hypothesis
import hypothesis.strategies as st
import pytest

from cxlfs.errors import JobMessageError
from cxlfs.job.protocol import Attempt, Body, Commit, Held, Inventory, decode, encode, messages
from cxlfs.job.protocol.messages import (
    REASONS_MAX,
    Loaded,
    Part,
    Prepare,
    Recorded,
    Saved,
    Stock,
    Tally,
    Vote,
    tally_of,
)

ATTEMPT = Attempt(7, 100, "0123abcd")
BODIES: tuple[Body, ...] = (
    Prepare(ATTEMPT, 4, 2, "ring"),
    Saved(ATTEMPT),
    Saved(None, "no room"),
    Vote(ATTEMPT, "digest"),
    Vote(None, "", "no room: \N{GREEK SMALL LETTER ALPHA}"),
    Recorded(ATTEMPT, durable=False),
    Stock(None, "unreadable"),
    Stock(Inventory("uuid", (Held(ATTEMPT, 3, 4, "digest"),), (Commit(ATTEMPT, "all"),), "rack")),
    Loaded(ATTEMPT, 3, "uuid", "damaged"),
    Tally(ATTEMPT, "digest"),
    Tally(None, "", ((1, "no room"), (3, ""))),
    Part(Tally(ATTEMPT, "0123456789abcdef" * 4)),
    Part(Tally(None, "", ((1, "no room"),))),
)
SEEN = pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)


@SEEN
def test_what_goes_out_comes_back(body: Body) -> None:
    assert decode(encode(body)) == body


@SEEN
def test_what_is_cut_or_changed_is_refused_or_another_message(
    body: Body, rng: random.Random
) -> None:
    data = encode(body)
    for length in range(len(data)):
        with pytest.raises(JobMessageError):
            decode(data[:length])
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        try:
            found = decode(bytes(changed))
        except JobMessageError:
            continue
        assert decode(encode(found)) == found


@pytest.mark.parametrize(
    "plain",
    [
        None,
        [],
        {"kind": "Prepare"},
        {"kind": ["Prepare"], "body": {}},
        {"kind": "Machine", "body": {}},
        {
            "kind": "Prepare",
            "body": {"attempt": None, "world": 1, "replicas": 1, "placement": "ring"},
        },
        {"kind": "Recorded", "body": {"attempt": {}, "durable": True}},
        {"kind": "Stock", "body": {"inventory": [], "reason": ""}},
        {"kind": "Stock", "body": {"inventory": None, "reason": 3}},
        {"kind": "Stock", "body": {"inventory": None, "reason": "x" * 5000}},
        {"kind": "Stock", "body": {"inventory": None, "reason": "", "more": 1}},
        {"kind": "Tally", "body": {"attempt": None, "digest": "", "against": [[1]]}},
        {"kind": "Part", "body": {"attempt": None, "digest": "", "against": []}},
        {"kind": "Part", "body": {"tally": {"attempt": None, "digest": "0x", "against": []}}},
        {"kind": "Part", "body": {"tally": {"attempt": None, "digest": "-" * 64, "against": []}}},
        {"kind": "Tally", "body": {"attempt": None, "digest": "", "against": [["1", "no"]]}},
    ],
)
def test_what_is_no_message_is_refused(plain: object) -> None:
    with pytest.raises(JobMessageError):
        decode(json.dumps(plain).encode())


@pytest.mark.parametrize("number", [-1, 1 << 63, True, 1.5, "1", None])
def test_numbers_have_their_bounds(number: object) -> None:
    attempt = {"number": number, "step": 1, "id": "x"}
    plain = {"kind": "Prepare", "body": {"attempt": attempt, "world": 1, "replicas": 1}}
    with pytest.raises(JobMessageError):
        decode(json.dumps(plain).encode())


def test_depth_and_size_have_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobMessageError):
        decode(b"[" * 100_000)
    with pytest.raises(JobMessageError):
        decode(b"1" * 10_000)
    monkeypatch.setattr(messages, "MESSAGE_BYTES_MAX", 10)
    with pytest.raises(JobMessageError):
        decode(encode(BODIES[0]))


def test_a_tally_is_small_whoever_is_against() -> None:
    made = tally_of(ATTEMPT, "", dict.fromkeys(reversed(range(10_000)), "x" * 500))
    assert [rank for rank, _ in made.against] == list(range(10_000))
    assert sum(len(reason) == 500 for _, reason in made.against) == REASONS_MAX
    assert len(encode(made)) < 500 * REASONS_MAX + 10_000 * 24


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    with pytest.raises(JobMessageError):
        decode(data)
