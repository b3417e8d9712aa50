"""What ranks tell each other, and its form on the way: JSON.

Never: how it gets there (``engines``).

Invariants
- ``decode`` takes any bytes: what is not a message raises, and nothing larger than a message can be
  is looked at. Numbers and texts are in their bounds afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import TypeAlias

from cxlfs.errors import JobMessageError
from cxlfs.job.protocol.model import (
    Attempt,
    Closed,
    Commit,
    Decision,
    GivenUp,
    Held,
    Inventory,
    Line,
)
from cxlfs.plain import (
    Plain,
    PlainError,
    fields,
    number,
    parse,
    row,
    text,
    truth,
)

MESSAGE_BYTES_MAX = 64 << 20
"""An inventory of 100 000 shards; each takes some 300 bytes."""
REASONS_MAX = 32
"""Of ranks whose reasons a tally repeats; where more have one it is the same, or in their logs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Prepare:
    """From rank 0: what is about to be saved, in how many stores each shard, placed how."""

    attempt: Attempt
    world: int
    replicas: int = 1
    placement: str = "groups"


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """Before copies are made: this rank has its shards, or never will, for ``reason``."""

    attempt: Attempt | None
    reason: str = ""


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
    """What a rank's store holds; None: it could not be read, for ``reason``. From rank 0 also what
    the tier below holds: None: there is none, or it could not be read, for ``below_reason``.
    ``nonce``: of this rank and this start; ``began``: seconds since 1970 by this rank's clock.
    """

    inventory: Inventory | None
    reason: str = ""
    below: Inventory | None = None
    below_reason: str = ""
    nonce: str = ""
    began: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """``shard`` of the attempt from ``holder``; ``reason``: why it was not loaded, or empty."""

    attempt: Attempt
    shard: int
    holder: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """The record of the line is durable in this rank's store; ``reason``: why not, or empty."""

    line: str
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """What was heard of all, by rank 0, where each of them needs to know no more than this.
    ``digest``: of what all have said yes to, or empty; ``against``: ranks that said no, and why.
    """

    attempt: Attempt | None
    digest: str
    against: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """From the leader of a group to rank 0: what it has heard of its group, as a tally of that."""

    tally: Tally


Body: TypeAlias = Prepare | Saved | Vote | Recorded | Stock | Loaded | Begun | Tally | Part


def tally_of(attempt: Attempt | None, digest: str, against: dict[int, str]) -> Tally:
    """Of any number of ranks a message that can be sent to each of them."""
    reasons = [
        (rank, reason if index < REASONS_MAX else "see its log")
        for index, (rank, reason) in enumerate(sorted(against.items()))
    ]
    return Tally(attempt, digest, tuple(reasons))


# --- form ---------------------------------------------------------------------------------------

_DIGEST = re.compile(r"(?:[0-9a-f]{64})?", re.ASCII)


def encode(body: Body) -> bytes:
    plain = {"kind": type(body).__name__, "body": dataclasses.asdict(body)}
    return json.dumps(plain, separators=(",", ":")).encode()


def decode(data: bytes) -> Body:
    """Raises JobMessageError."""
    try:
        message = fields(parse(data, MESSAGE_BYTES_MAX), ("kind", "body"))
        return _READERS.get(text(message["kind"]), _unknown)(message["body"])
    except PlainError as error:
        raise JobMessageError(f"not a message: {error}") from None


def attempt_of(plain: Plain) -> Attempt:
    found = fields(plain, ("number", "step", "id"))
    return Attempt(number(found["number"]), number(found["step"]), text(found["id"]))


def _held(plain: Plain) -> Held:
    found = fields(plain, ("attempt", "rank", "world", "manifest"))
    numbers = number(found["rank"]), number(found["world"])
    return Held(attempt_of(found["attempt"]), *numbers, text(found["manifest"]))


def _commit(plain: Plain) -> Commit:
    found = fields(plain, ("attempt", "digest"))
    return Commit(attempt_of(found["attempt"]), text(found["digest"]))


_INVENTORY = tuple(field.name for field in dataclasses.fields(Inventory))
_LINE = tuple(field.name for field in dataclasses.fields(Line))
_DECISION = tuple(field.name for field in dataclasses.fields(Decision))


def _inventory(plain: Plain) -> Inventory:
    found = fields(plain, _INVENTORY)
    return Inventory(
        text(found["store"]),
        row(found["held"], _held),
        row(found["commits"], _commit),
        text(found["domain"]),
        text(found["job"]),
        row(found["lines"], line_of),
        row(found["damaged"], _damaged),
        None if found["decision"] is None else decision_of(found["decision"]),
        row(found["torn"], text),
    )


def _damaged(plain: Plain) -> tuple[Attempt, int]:
    attempt, rank = _pair(plain)
    return attempt_of(attempt), number(rank)


def _pair(plain: Plain) -> tuple[Plain, Plain]:
    if not isinstance(plain, list) or len(plain) != 2:
        raise PlainError("not a pair")
    return plain[0], plain[1]


def line_of(plain: Plain) -> Line:
    """Raises PlainError."""
    found = fields(plain, _LINE)
    line = Line(
        text(found["id"]),
        text(found["job"]),
        _perhaps(found["parent"]),
        text(found["digest"]),
        row(found["members"], text),
        row(found["targets"], lambda each: row(each, text)),
        row(found["known"], text),
        row(found["closes"], _closed),
        row(found["settled"], text),
        row(found["gives_up"], _given_up),
        truth(found["is_provisional"]),
        number(found["began"]),
    )
    if len(line.targets) != len(line.members):
        raise PlainError("not the targets of each member")
    return line


def _closed(plain: Plain) -> Closed:
    found = fields(plain, ("line", "number"))
    return Closed(text(found["line"]), number(found["number"]))


def _given_up(plain: Plain) -> GivenUp:
    found = fields(plain, ("attempt", "instead"))
    return GivenUp(attempt_of(found["attempt"]), attempt_of(found["instead"]))


def decision_of(plain: Plain) -> Decision:
    """Raises PlainError."""
    found = fields(plain, _DECISION)
    return Decision(_perhaps(found["resume"]), row(found["heads"], attempt_of))


def _prepare(plain: Plain) -> Prepare:
    found = fields(plain, ("attempt", "world", "replicas", "placement"))
    numbers = number(found["world"]), number(found["replicas"])
    return Prepare(attempt_of(found["attempt"]), *numbers, text(found["placement"]))


def _saved(plain: Plain) -> Saved:
    found = fields(plain, ("attempt", "reason"))
    return Saved(_perhaps(found["attempt"]), text(found["reason"]))


def _vote(plain: Plain) -> Vote:
    found = fields(plain, ("attempt", "manifest", "reason"))
    return Vote(_perhaps(found["attempt"]), text(found["manifest"]), text(found["reason"]))


def _tally(plain: Plain) -> Tally:
    found = fields(plain, ("attempt", "digest", "against"))
    against = row(found["against"], _objection)
    return Tally(_perhaps(found["attempt"]), text(found["digest"]), against)


def _part(plain: Plain) -> Part:
    """Its digest is one that can be summed up."""
    tally = _tally(fields(plain, ("tally",))["tally"])
    if _DIGEST.fullmatch(tally.digest) is None:
        raise PlainError("not a digest")
    return Part(tally)


def _objection(plain: Plain) -> tuple[int, str]:
    rank, reason = _pair(plain)
    return number(rank), text(reason)


def _perhaps(plain: Plain) -> Attempt | None:
    return None if plain is None else attempt_of(plain)


def _recorded(plain: Plain) -> Recorded:
    found = fields(plain, ("attempt", "durable"))
    return Recorded(attempt_of(found["attempt"]), truth(found["durable"]))


def _stock(plain: Plain) -> Stock:
    found = fields(plain, tuple(field.name for field in dataclasses.fields(Stock)))
    inventory, below = (
        None if found[name] is None else _inventory(found[name]) for name in ("inventory", "below")
    )
    texts = text(found["below_reason"]), text(found["nonce"])
    return Stock(inventory, text(found["reason"]), below, *texts, number(found["began"]))


def _begun(plain: Plain) -> Begun:
    found = fields(plain, ("line", "reason"))
    return Begun(text(found["line"]), text(found["reason"]))


def _loaded(plain: Plain) -> Loaded:
    found = fields(plain, ("attempt", "shard", "holder", "reason"))
    texts = text(found["holder"]), text(found["reason"])
    return Loaded(attempt_of(found["attempt"]), number(found["shard"]), *texts)


def _unknown(plain: Plain) -> Body:
    del plain
    raise PlainError("a kind that is not known")


_READERS: dict[str, Callable[[Plain], Body]] = {
    "Prepare": _prepare,
    "Saved": _saved,
    "Vote": _vote,
    "Recorded": _recorded,
    "Stock": _stock,
    "Loaded": _loaded,
    "Begun": _begun,
    "Tally": _tally,
    "Part": _part,
}
