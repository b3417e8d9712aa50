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
from collections.abc import Iterable, Mapping
from typing import Final

from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.unit_rules import POLICY, QUIET_SECONDS, QUIET_UNMARKED_SECONDS, Rule, has_pattern

UNITS_XATTR: Final = HIDDEN_PREFIX + b"units"
"""Of stores of earlier programs: all open units."""
UNIT_PREFIX: Final = HIDDEN_PREFIX + b"unit-"
POLICIES_XATTR: Final = HIDDEN_PREFIX + b"policies"
BEFORE_XATTR: Final = HIDDEN_PREFIX + b"before"
"""On the copy of what was in a unit before: the inode number of the unit."""
ASIDE_XATTR: Final = HIDDEN_PREFIX + b"aside"
"""On what was set aside: where it was, when and why."""
PLACE_XATTR: Final = HIDDEN_PREFIX + b"place"
"""On the directory where the store keeps both: the store made it."""

UNITS_MAX = 64
"""Of one user."""
UNITS_OF_ALL_MAX = 4096
POLICIES_MAX = 64
NAMES_MAX = 16
ATTRIBUTE_BYTES_MAX = 8192
QUIET_SECONDS_MAX = 86_400.0
_TEXT_BYTES_MAX = 4096
_NUMBER_MAX = 1 << 62
_DIGITS_MAX = 18


@dataclasses.dataclass(frozen=True, slots=True)
class OpenRecord:
    """An open unit: its directory, the copy of what it was before (0: nothing), since when, whose
    changes belong to it (-1: everybody's), files below it that do not, and what was moved there
    from elsewhere: inode number, directory and name before.
    """

    ino: int
    before: int
    since_ns: int
    uid: int = -1
    apart: tuple[int, ...] = ()
    moved: tuple[tuple[int, int, bytes], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class AsideRecord:
    """Where what was set aside was, when it went there, and why."""

    path: bytes
    time_ns: int
    reason: str


def unit_xattr(ino: int) -> bytes:
    """The attribute of the root directory that tells of the open unit in a directory."""
    return UNIT_PREFIX + b"%d" % ino


def encode_unit(record: OpenRecord) -> bytes:
    moved = [[ino, parent, os.fsdecode(name)] for ino, parent, name in record.moved]
    return _json([record.before, record.since_ns, record.uid, list(record.apart), moved])


def fits(record: OpenRecord) -> bool:
    """The media can say it."""
    return len(encode_unit(record)) <= ATTRIBUTE_BYTES_MAX


def decode_unit(name: bytes, value: bytes) -> OpenRecord | None:
    """What an attribute of the root directory says; None: nothing of a unit, or no sense."""
    digits, fields = name.removeprefix(UNIT_PREFIX), _list(_parsed(value))
    if digits == name or not digits.isdigit() or len(digits) > _DIGITS_MAX or len(fields) != 5:
        return None
    ino, before, since_ns = int(digits), _number(fields[0]), _number(fields[1])
    uid = fields[2] if type(fields[2]) is int and -1 <= fields[2] < 1 << 32 else None
    if not ino or min(before, since_ns) < 0 or uid is None:
        return None
    apart = [_number(item) for item in _list(fields[3])]
    moved = [_moved(_list(item)) for item in _list(fields[4])]
    return OpenRecord(
        ino,
        before,
        since_ns,
        uid,
        tuple(item for item in apart if item > 0),
        tuple(item for item in moved if item is not None),
    )


def _moved(fields: list[object]) -> tuple[int, int, bytes] | None:
    names = _names(fields[2:])
    if len(fields) != 3 or not names or names[0] in {b".", b".."}:
        return None
    ino, parent = _number(fields[0]), _number(fields[1])
    return None if min(ino, parent) < 1 else (ino, parent, names[0])


def encode_units(units: Iterable[OpenRecord]) -> bytes:
    return _json([[unit.ino, unit.before, unit.since_ns] for unit in units])


def decode_units(value: bytes) -> list[OpenRecord]:
    """Each inode at most once; what makes no sense is left out."""
    found: dict[int, OpenRecord] = {}
    for item in _list(_parsed(value))[:UNITS_MAX]:
        numbers = [_number(field) for field in _list(item)]
        if len(numbers) == 3 and min(numbers) >= 0 and numbers[0]:
            found.setdefault(numbers[0], OpenRecord(numbers[0], numbers[1], numbers[2]))
    return list(found.values())


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


def encode_aside(record: AsideRecord) -> bytes:
    path = os.fsdecode(record.path[-_TEXT_BYTES_MAX // 4 :])
    return _json([path, record.time_ns, record.reason[: _TEXT_BYTES_MAX // 4]])


def decode_aside(value: bytes) -> AsideRecord | None:
    fields = _list(_parsed(value))
    if len(fields) != 3:
        return None
    path, time_ns, reason = fields[0], _number(fields[1]), fields[2]
    if not isinstance(path, str) or time_ns < 0 or not isinstance(reason, str):
        return None
    return AsideRecord(_name(path), time_ns, reason)


def encode_place(parent: int, name: bytes) -> bytes:
    return _json([parent, os.fsdecode(name)])


def decode_place(value: bytes) -> tuple[int, bytes] | None:
    """Directory and name of a unit that was removed; None: it was not."""
    fields = _list(_parsed(value))
    names = _names(fields[1:])
    if len(fields) != 2 or _number(fields[0]) < 1 or not names or names[0] in {b".", b".."}:
        return None
    return _number(fields[0]), names[0]


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
