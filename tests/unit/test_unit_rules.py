"""Which directories are checkpoint units, when one is over, and what the media say of both."""

from __future__ import annotations

import itertools
import json
import random

import pytest

from cxlfs.store import unit_record
from cxlfs.store.unit_record import OpenRecord
from cxlfs.store.unit_rules import (
    TABLE,
    Decision,
    Ending,
    Facts,
    decide,
    rule_of_directory,
    rule_of_file,
)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (b"checkpoint-500", "transformers"),
        (b"checkpoint_3", "accelerate"),
        (b"global_step1000", "deepspeed"),
        (b"iter_0000500", "megatron"),
        (b"7.orbax-checkpoint-tmp-17", "orbax"),
        (b"state.zarr", "zarr"),
    ],
)
def test_directories_are_known_by_name(name: bytes, rule: str) -> None:
    found = rule_of_directory(name, TABLE)
    assert found is not None
    assert found.name == rule


@pytest.mark.parametrize(
    "name", [b"checkpoint", b"checkpoints", b"checkpoint-best", b"logs", b"7", b"step-5", b"runs"]
)
def test_other_directories_are_none(name: bytes) -> None:
    assert rule_of_directory(name, TABLE) is None


def test_sharded_formats_are_known_by_their_files() -> None:
    dcp = rule_of_file(b"__3_0.distcp", ())
    assert dcp is not None
    assert dcp.done == (b".metadata",)
    sharded = rule_of_file(b"model-00001-of-00003.safetensors", ())
    assert sharded is not None
    assert sharded.name == "safetensors"
    for name in (b"model.safetensors", b".metadata", b"log.txt", b"train-1.txt"):
        assert rule_of_file(name, (b"log.txt", b"train-1.txt")) is None
    assert rule_of_file(b".metadata", (b"log.txt", b"__0_0.distcp")) is dcp


def facts(**known: object) -> Facts:
    return Facts(**{"expects_marker": True, **known})  # type: ignore[arg-type]


def endings(*all_of_them: Ending) -> frozenset[Ending]:
    return frozenset(all_of_them)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({}, Decision.WAIT),
        ({"marked": True}, Decision.DONE),
        ({"marked": True, "busy": True}, Decision.WAIT),
        ({"marked": True, "spoiled": True}, Decision.WAIT),
        ({"marked": True, "spoiled": True, "quiet": True}, Decision.BACK),
        ({"marked": True, "endings": endings(Ending.KILLED)}, Decision.DONE),
        ({"quiet": True}, Decision.DONE),
        ({"quiet": True, "busy": True}, Decision.WAIT),
        ({"endings": endings(Ending.KILLED)}, Decision.BACK),
        ({"endings": endings(Ending.KILLED, Ending.ALIVE)}, Decision.WAIT),
        ({"endings": endings(Ending.KILLED, Ending.ALIVE), "quiet": True}, Decision.BACK),
        ({"endings": endings(Ending.BADLY)}, Decision.BACK),
        ({"endings": endings(Ending.UNKNOWN)}, Decision.BACK),
        ({"endings": endings(Ending.UNKNOWN), "expects_marker": False}, Decision.DONE),
        ({"endings": endings(Ending.WELL)}, Decision.WAIT),
        ({"endings": endings(Ending.WELL), "quiet": True}, Decision.DONE),
        ({"endings": endings(Ending.WELL), "expects_marker": False}, Decision.DONE),
        ({"followed": True}, Decision.WAIT),
        ({"followed": True, "expects_marker": False}, Decision.DONE),
        ({"followed": True, "expects_marker": False, "spoiled": True}, Decision.WAIT),
        ({"lacks": "a name", "endings": endings(Ending.WELL)}, Decision.BACK),
        ({"lacks": "a name", "endings": endings(Ending.ALIVE)}, Decision.WAIT),
        ({"closing": True, "lacks": "a name", "endings": endings(Ending.WELL)}, Decision.BACK),
        ({"closing": True}, Decision.BACK),
        ({"closing": True, "endings": endings(Ending.ALIVE)}, Decision.BACK),
        ({"closing": True, "endings": endings(Ending.WELL)}, Decision.DONE),
        ({"closing": True, "quiet": True}, Decision.DONE),
        ({"closing": True, "expects_marker": False}, Decision.DONE),
        ({"closing": True, "busy": True, "expects_marker": False}, Decision.BACK),
        ({"closing": True, "marked": True}, Decision.DONE),
    ],
)
def test_decisions(known: dict[str, object], expected: Decision) -> None:
    assert decide(facts(**known))[0] is expected


def test_no_decision_ends_what_went_wrong_or_is_being_written() -> None:
    """Of all that can be known at once: never done while a file of it waits, or could not be
    finished; and it always ends when everybody is gone and it is quiet.
    """
    switches = ("expects_marker", "marked", "busy", "spoiled", "followed", "quiet", "closing")
    groups = [
        frozenset(group) for size in range(3) for group in itertools.combinations(Ending, size)
    ]
    for values in itertools.product((False, True), repeat=len(switches)):
        for group, lacks in itertools.product(groups, ("", "a name")):
            switched = dict(zip(switches, values, strict=True))
            known = Facts(**switched, lacks=lacks, endings=group)
            decision, reason = decide(known)
            assert reason
            if known.busy or known.spoiled:
                assert decision is not Decision.DONE, known
            if known.quiet and not known.busy:
                assert decision is not Decision.WAIT, known


def test_records_come_back() -> None:
    for unit in (
        OpenRecord(7, 0, 5),
        OpenRecord(9, 12, 1 << 61, 1000, 500, (7, 8), (499,), (3,)),
    ):
        name, value = unit_record.unit_xattr(unit.ino), unit_record.encode_unit(unit)
        assert unit_record.decode_unit(name, value) == unit
        assert unit_record.fits(unit)
    rules = (
        unit_record.policy_rule((b"step-*", b"."), (b"done", b"\xff.json"), 2.5),
        unit_record.policy_rule((b"x",), (), None),
    )
    policies = {5: rules}
    assert unit_record.decode_policies(unit_record.encode_policies(policies)) == policies


def test_a_record_with_too_many_files_does_not_fit() -> None:
    assert not unit_record.fits(OpenRecord(7, 0, 5, apart=tuple(range(10**9, 10**9 + 1000))))


HOSTILE = [
    b"",
    b"null",
    b"{}",
    b"[[]]",
    b"[1,2,3]",
    b"[[0,0,0]]",
    b"[[-1,0,0]]",
    b"[[true,0,0]]",
    b"[[1.5,0,0]]",
    b"[[1,0]]",
    b"[[4611686018427387904,0,0]]",
    b'[["1",0,0]]',
    b"[" * 9000,
    b"\xff\xfe",
    b"[[1,0,NaN]]",
    b'[[2,[[["a/b"],[],1]]]]',
    b'[[2,[[["a"],[],1e999]]]]',
    b'[[2,[[["a"],[],-1]]]]',
    b"[[2,[[[],[],1]]]]",
    b'[[2,[[["\\ud800\\udc00x\\udfff"],7,1]]]]',
    b'["/p", "x", 5]',
    json.dumps([["a"] * 100_000]).encode(),
]


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_what_makes_no_sense_counts_as_none(value: bytes) -> None:
    assert unit_record.decode_unit(unit_record.unit_xattr(7), value) is None
    assert unit_record.decode_policies(value) == {}


def test_damaged_records_never_raise(seed: int) -> None:
    rng = random.Random(seed)
    good = [
        unit_record.encode_unit(OpenRecord(7, 3, 5, 1000, 9, (4, 5), (6,))),
        unit_record.encode_policies({5: (unit_record.policy_rule((b"a*",), (b"b",), 1.0),)}),
    ]
    for _ in range(3000):
        value = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 4)):
            value[rng.randrange(len(value))] = rng.randrange(256)
        unit = unit_record.decode_unit(unit_record.unit_xattr(7), bytes(value))
        assert unit is None or (unit.kept >= 0 and unit.first_ino > 1)
        for rules in unit_record.decode_policies(bytes(value)).values():
            assert all(rule.directories and rule.quiet_seconds >= 0 for rule in rules)
