"""What the media say of checkpoint units: which are open, and which directories have a policy.

Both are extended attributes of the root directory under the hidden prefix (``health``), so that a
program of any version reads the store, and opening looks at few values, whatever is in it.

Never here: inodes, deciding (``unit_rules``), committing (``units``).

Invariants
- What is read is not trusted: a value that makes no sense counts as none, whatever it holds.
- Sizes are bounded: UNITS_OF_ALL_MAX open units, POLICIES_MAX policies, ATTRIBUTE_BYTES_MAX each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Final

from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.unit_rules import POLICY, QUIET_SECONDS, QUIET_UNMARKED_SECONDS, Rule, has_pattern
from cxlfs.types import ROOT_INO

UNIT_PREFIX: Final = HIDDEN_PREFIX + b"unit-"
POLICIES_XATTR: Final = HIDDEN_PREFIX + b"policies"
PLACE_XATTR: Final = HIDDEN_PREFIX + b"place"
"""On the directory where the store keeps what units may want back: the store made it."""
STAND_IN_XATTR: Final = HIDDEN_PREFIX + b"stand-in"
"""There, on what stands for a directory: the inode number of that."""
TAKEN_BACK_XATTR: Final = HIDDEN_PREFIX + b"taken-back"
"""On a file that was made in a unit which went back, and lay in another one then: the inode number
of its directory, and when. Units that were open then do not bring it there."""

UNITS_MAX = 64
"""Of one user."""
UNITS_OF_ALL_MAX = 4096
POLICIES_MAX = 64
NAMES_MAX = 16
ATTRIBUTE_BYTES_MAX = 8192
QUIET_SECONDS_MAX = 86_400.0
_NUMBER_MAX = 1 << 62
_DIGITS_MAX = 18
_TAKEN_BACK = struct.Struct("<QQ")


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRecord:
    """An open unit: the inode number of its directory, and of the directory that has what died in
    it (0: nothing did), since when, whose changes belong to it (-1: everybody's), the first inode
    number that was not given yet when it began, files below it that do not belong to it, those that
    were not committed when it began, and those that other users have changed.
    """

    ino: int
    kept: int
    since_ns: int
    uid: int = -1
    first_ino: int = ROOT_INO + 1
    apart: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    foreign: tuple[int, ...] = ()

    def is_new(self, ino: int) -> bool:
        """What has this number was not committed when the unit began."""
        return ino >= self.first_ino or ino in self.fresh


def unit_xattr(ino: int) -> bytes:
    """The attribute of the root directory that tells of the open unit in a directory."""
    return UNIT_PREFIX + b"%d" % ino


def encode_unit(record: OpenRecord) -> bytes:
    numbers = record.kept, record.since_ns, record.uid, record.first_ino
    return _json([*numbers, list(record.apart), list(record.fresh), list(record.foreign)])


def fits(record: OpenRecord) -> bool:
    """The media can say it."""
    return len(encode_unit(record)) <= ATTRIBUTE_BYTES_MAX


def decode_unit(name: bytes, value: bytes) -> OpenRecord | None:
    """What an attribute of the root directory says; None: nothing of a unit, or no sense."""
    digits, fields = name.removeprefix(UNIT_PREFIX), _list(_parsed(value))
    if digits == name or not digits.isdigit() or len(digits) > _DIGITS_MAX or len(fields) != 7:
        return None
    ino, kept, since_ns, first_ino = int(digits), *(_number(fields[n]) for n in (0, 1, 3))
    uid = fields[2] if type(fields[2]) is int and -1 <= fields[2] < 1 << 32 else None
    if not ino or min(kept, since_ns) < 0 or first_ino <= ROOT_INO or uid is None:
        return None
    lists = (tuple(_number(item) for item in _list(fields[n])) for n in (4, 5, 6))
    return OpenRecord(ino, kept, since_ns, uid, first_ino, *lists)


def encode_taken_back(ino: int, when_ns: int) -> bytes:
    """Of TAKEN_BACK_XATTR."""
    return _TAKEN_BACK.pack(ino, when_ns)


def decode_taken_back(value: bytes) -> tuple[int, int]:
    """Two numbers; (0, 0): nothing, or no sense."""
    if len(value) != _TAKEN_BACK.size:
        return 0, 0
    ino, when_ns = _TAKEN_BACK.unpack(value)
    return ino, when_ns


def encode_policies(policies: Mapping[int, tuple[Rule, ...]]) -> bytes:
    return _json(
        [
            [
                ino,
                [
                    [
                        [os.fsdecode(name) for name in rule.directories],
                        [os.fsdecode(name) for name in rule.done],
                        rule.quiet_seconds,
                    ]
                    for rule in rules
                ],
            ]
            for ino, rules in policies.items()
        ]
    )


def decode_policies(value: bytes) -> dict[int, tuple[Rule, ...]]:
    """Inode number of a directory: its rules; what makes no sense is left out."""
    found: dict[int, tuple[Rule, ...]] = {}
    for item in _list(_parsed(value))[:POLICIES_MAX]:
        fields = _list(item)
        if len(fields) != 2 or (ino := _number(fields[0])) < 0:
            continue
        rules = [_rule(_list(rule)) for rule in _list(fields[1])[:NAMES_MAX]]
        known = tuple(rule for rule in rules if rule is not None)
        if known:
            found[ino] = known
    return found


def policy_rule(
    patterns: Iterable[bytes], done: Iterable[bytes], quiet_seconds: float | None
) -> Rule:
    """The rule that a policy asks for."""
    names = tuple(done)
    has_last_file = bool(names) and not has_pattern(names)
    quiet = QUIET_SECONDS if has_last_file else QUIET_UNMARKED_SECONDS
    return Rule(
        name=POLICY,
        directories=tuple(patterns),
        done=names,
        quiet_seconds=quiet if quiet_seconds is None else quiet_seconds,
    )


def _rule(fields: list[object]) -> Rule | None:
    if len(fields) != 3:
        return None
    patterns, done, quiet = _names(fields[0]), _names(fields[1]), fields[2]
    if not patterns or done is None or type(quiet) not in {int, float}:
        return None
    seconds = float(quiet)  # type: ignore[arg-type]
    if not 0 <= seconds <= QUIET_SECONDS_MAX:
        return None
    return policy_rule(patterns, done, seconds)


def _names(value: object) -> list[bytes] | None:
    """Names or patterns of one path component; None: something else."""
    names = [_name(item) if isinstance(item, str) else b"" for item in _list(value)]
    wrong = any(not 0 < len(name) <= 255 or b"/" in name or b"\0" in name for name in names)
    return None if wrong or len(names) > NAMES_MAX else names


def _name(text: str) -> bytes:
    """As it was before os.fsdecode; empty when no name decodes to it."""
    try:
        return os.fsencode(text)
    except UnicodeEncodeError:
        return b""


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _parsed(value: bytes) -> object:
    try:
        return json.loads(value) if len(value) <= ATTRIBUTE_BYTES_MAX else None
    except (ValueError, RecursionError):
        return None


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _number(value: object) -> int:
    """-1 when it is none that a store has."""
    return value if type(value) is int and 0 <= value < _NUMBER_MAX else -1
