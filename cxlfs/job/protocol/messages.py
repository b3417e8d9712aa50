"""What ranks tell each other, and its form on the way: JSON.

Never: how it gets there (``engines``).

Invariants
- ``decode`` takes any bytes: what is not a message raises, and nothing larger than a message can be
  is looked at. Numbers and texts are in their bounds afterwards.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from cxlfs.errors import UsageError
from cxlfs.job.protocol.model import Attempt, Commit, Held, Inventory

MESSAGE_BYTES_MAX = 64 << 20
"""An inventory of 100 000 shards; each takes some 300 bytes."""
TEXT_MAX = 1 << 12
NUMBER_MAX = (1 << 63) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """From rank 0: what is about to be saved."""

    attempt: Attempt
    world: int


@dataclasses.dataclass(frozen=True, slots=True)
class Vote:
    """``manifest``: its digest, all that it names is durable; empty: this rank has none, and never
    will have, for ``reason``. ``attempt`` is None where PREPARE was not heard.
    """

    attempt: Attempt | None
    manifest: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """The commit is durable on this rank's store, or (False) could not be made so."""

    attempt: Attempt
    durable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Stock:
    """What a rank's store holds; None: it could not be read, for ``reason``."""

    inventory: Inventory | None
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """``shard`` of the attempt from ``holder``; ``reason``: why it was not loaded, or empty."""

    attempt: Attempt
    shard: int
    holder: str
    reason: str = ""


Body: TypeAlias = Prepare | Vote | Recorded | Stock | Loaded


class MessageError(UsageError):
    """Bytes that are not a message of this program: another version, or something else's."""

    id = "job-message"
    default_next_step = "run the same version of cxlfs on all nodes"


# --- form ---------------------------------------------------------------------------------------

_Plain: TypeAlias = "dict[str, _Plain] | list[_Plain] | str | int | bool | None"


def encode(body: Body) -> bytes:
    plain = {"kind": type(body).__name__, "body": dataclasses.asdict(body)}
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(data: bytes) -> Body:
    """Raises MessageError."""
    if len(data) > MESSAGE_BYTES_MAX:
        raise MessageError(f"a message of {len(data)} bytes")
    try:
        plain = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not a message: {error}") from None
    fields = _fields(plain, ("kind", "body"))
    kind = fields["kind"]
    if not isinstance(kind, str) or kind not in _READERS:
        raise MessageError("a message of a kind that is not known")
    return _READERS[kind](fields["body"])


def _fields(plain: _Plain, names: tuple[str, ...]) -> dict[str, _Plain]:
    if not isinstance(plain, dict) or set(plain) != set(names):
        raise MessageError(f"a message without {', '.join(names)}")
    return plain


def _number(plain: _Plain) -> int:
    if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain <= NUMBER_MAX:
        raise MessageError("a number out of its bounds")
    return plain


def _text(plain: _Plain) -> str:
    if not isinstance(plain, str) or len(plain) > TEXT_MAX:
        raise MessageError("a text that is none, or too long")
    return plain


def _truth(plain: _Plain) -> bool:
    if not isinstance(plain, bool):
        raise MessageError("neither true nor false")
    return plain


_Item = TypeVar("_Item")


def _row(plain: _Plain, read: Callable[[_Plain], _Item]) -> tuple[_Item, ...]:
    if not isinstance(plain, list):
        raise MessageError("not a list")
    return tuple(read(item) for item in plain)


def _attempt(plain: _Plain) -> Attempt:
    fields = _fields(plain, ("number", "step", "id"))
    return Attempt(_number(fields["number"]), _number(fields["step"]), _text(fields["id"]))


def _held(plain: _Plain) -> Held:
    fields = _fields(plain, ("attempt", "rank", "world", "manifest"))
    numbers = _number(fields["rank"]), _number(fields["world"])
    return Held(_attempt(fields["attempt"]), *numbers, _text(fields["manifest"]))


def _commit(plain: _Plain) -> Commit:
    fields = _fields(plain, ("attempt", "digest"))
    return Commit(_attempt(fields["attempt"]), _text(fields["digest"]))


def _inventory(plain: _Plain) -> Inventory:
    fields = _fields(plain, ("store", "held", "commits"))
    return Inventory(
        _text(fields["store"]), _row(fields["held"], _held), _row(fields["commits"], _commit)
    )


def _prepare(plain: _Plain) -> Prepare:
    fields = _fields(plain, ("attempt", "world"))
    return Prepare(_attempt(fields["attempt"]), _number(fields["world"]))


def _vote(plain: _Plain) -> Vote:
    fields = _fields(plain, ("attempt", "manifest", "reason"))
    attempt = None if fields["attempt"] is None else _attempt(fields["attempt"])
    return Vote(attempt, _text(fields["manifest"]), _text(fields["reason"]))


def _recorded(plain: _Plain) -> Recorded:
    fields = _fields(plain, ("attempt", "durable"))
    return Recorded(_attempt(fields["attempt"]), _truth(fields["durable"]))


def _stock(plain: _Plain) -> Stock:
    fields = _fields(plain, ("inventory", "reason"))
    inventory = None if fields["inventory"] is None else _inventory(fields["inventory"])
    return Stock(inventory, _text(fields["reason"]))


def _loaded(plain: _Plain) -> Loaded:
    fields = _fields(plain, ("attempt", "shard", "holder", "reason"))
    texts = _text(fields["holder"]), _text(fields["reason"])
    return Loaded(_attempt(fields["attempt"]), _number(fields["shard"]), *texts)


_READERS: dict[str, Callable[[_Plain], Body]] = {
    "Prepare": _prepare,
    "Vote": _vote,
    "Recorded": _recorded,
    "Stock": _stock,
    "Loaded": _loaded,
}
