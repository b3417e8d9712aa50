"""Which checkpoint all ranks load where each reads parts that several have saved; from whom it has
those that it does not reach itself; and what ranks tell each other about it.

Pure functions of what all ranks told: every rank computes the same.

Invariants
- Parts of two attempts are never put together, and none that were not voted for: of manifests that
  differ the recorded commit decides.
- The newest that somebody knows to be committed, or of which every part is somewhere. Each failure
  leaves out a holder, or the attempt.
- What others say is bounded.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence

from cxlfs.errors import JobMessageError
from cxlfs.job.protocol import Attempt, Inventory, Transfer, decode, encode
from cxlfs.job.protocol.messages import Stock, attempt_of
from cxlfs.job.protocol.planning import Refusal, voted_for
from cxlfs.plain import Plain, PlainError, fields, number, parse, row, text

OFFERS_MAX = 16
"""Attempts, the newest, that a rank tells of."""
MESSAGE_BYTES_MAX = 64 << 20

Holder = tuple[int, str]
"""Of a part: whose it is, and the store that it lies in."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a rank reaches of an attempt. ``parts``: whose, in which store, of which manifest."""

    attempt: Attempt
    worlds: tuple[int, ...]
    digests: tuple[str, ...]
    parts: tuple[tuple[int, str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """Files of a part, by which a rank sees what it needs of it, and its manifest."""

    manifest: bytes
    files: tuple[tuple[str, bytes], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """``reason``: why this rank cannot go on with a choice; empty: it can. ``bad``: which holders
    that lies at. ``wanted``: the parts that it needs to be brought.
    """

    reason: str = ""
    bad: tuple[Holder, ...] = ()
    wanted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """``manifests``: of the parts that somebody reaches; ``stores[i]``: where rank i reaches which
    of them.
    """

    attempt: Attempt
    world: int
    manifests: Mapping[int, str]
    stores: Mapping[int, Mapping[int, tuple[str, ...]]]

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.world)) - set(self.manifests))

    def lacking(self, rank: int) -> list[int]:
        """Parts that only others reach."""
        return sorted(set(self.manifests) - set(self.stores[rank]))

    def reaching(self, part: int) -> list[int]:
        return sorted(rank for rank, own in self.stores.items() if part in own)

    def transfers(self, wanted: Mapping[int, Collection[int]]) -> list[Transfer]:
        """``wanted``: parts, by the rank that needs them; each comes from one that reaches it."""
        found = []
        for target, parts in sorted(wanted.items()):
            for part in sorted(set(parts) & set(self.lacking(target))):
                holders = self.reaching(part)
                found.append(Transfer(part, holders[target % len(holders)], target))
        return found

    def told(self) -> str:
        """Where its parts are."""
        pairs = {(p, s[0]) for own in self.stores.values() for p, s in own.items()}
        places = ", ".join(f"that of rank {part} in {store}" for part, store in sorted(pairs))
        lost = ", ".join(map(str, self.missing))
        return f"Its parts: {places}" + (f"; nobody reaches that of rank {lost}" if lost else "")


def choose(
    offers: Mapping[int, Sequence[Offer]],
    left_out: Collection[Attempt] = (),
    bad: Collection[tuple[Attempt, Holder]] = (),
) -> tuple[Choice | None, list[str]]:
    """The newest, without the attempts and holders that failed; and why not newer ones."""
    by_attempt: dict[Attempt, dict[int, Offer]] = {}
    for rank, told in sorted(offers.items()):
        for offer in told:
            by_attempt.setdefault(offer.attempt, {})[rank] = offer
    reasons: list[str] = []
    for attempt in sorted(set(by_attempt) - set(left_out), reverse=True):
        told_by = by_attempt[attempt]
        parts = {
            rank: [p for p in offer.parts if (attempt, (p[0], p[1])) not in bad]
            for rank, offer in told_by.items()
        }
        try:
            choice = _choice_of(attempt, told_by.values(), parts, sorted(offers))
        except Refusal as refusal:
            reasons.append(f"{attempt}: {refusal}")
        else:
            if choice is not None:
                return choice, reasons
    return None, reasons


def _choice_of(
    attempt: Attempt,
    offers: Collection[Offer],
    parts: Mapping[int, Sequence[tuple[int, str, str]]],
    ranks: Sequence[int],
) -> Choice | None:
    """None: nobody knows that it was ever committed, or reaches any of it. Raises Refusal."""
    worlds = {world for offer in offers for world in offer.worlds}
    digests = {digest for offer in offers for digest in offer.digests}
    votes: dict[int, set[str]] = {}
    for part, _, manifest in (each for own in parts.values() for each in own):
        votes.setdefault(part, set()).add(manifest)
    if not votes:
        return None
    if len(worlds) > 1 or len(digests) > 1:
        raise Refusal("its parts contradict each other")
    (world,) = worlds
    if set(votes) == set(range(world)):
        voted = dict(enumerate(voted_for([votes[rank] for rank in range(world)], digests)))
    elif not digests:
        return None
    elif any(len(each) > 1 for each in votes.values()) or max(votes) >= world:
        raise Refusal("its parts contradict each other, and not all of them are reached")
    else:
        voted = {part: manifest for part, (manifest,) in votes.items()}
    stores: dict[int, dict[int, tuple[str, ...]]] = {rank: {} for rank in ranks}
    for rank, own in parts.items():
        for part, store, manifest in sorted(own):
            if voted[part] == manifest:
                stores[rank][part] = (*stores[rank].get(part, ()), store)
    return Choice(attempt, world, voted, stores)


# --- messages -----------------------------------------------------------------------------------


def encode_offers(offers: Sequence[Offer], ahead: int) -> bytes:
    plain = {"offers": [dataclasses.asdict(offer) for offer in offers], "ahead": ahead}
    return json.dumps(plain).encode()


def decode_offers(body: bytes) -> tuple[tuple[Offer, ...], int]:
    """Raises JobMessageError."""
    try:
        found = fields(parse(body, MESSAGE_BYTES_MAX), ("offers", "ahead"))
        return row(found["offers"], _offer_of, OFFERS_MAX), number(found["ahead"])
    except PlainError as error:
        raise JobMessageError(f"what a rank reaches: {error}") from None


@dataclasses.dataclass(frozen=True, slots=True)
class Roots:
    """What is in the stores that a rank reaches. ``nonce``, ``began``: see ``messages.Stock``."""

    inventories: tuple[Inventory, ...]
    nonce: str
    began: int


def encode_roots(inventories: Sequence[Inventory], nonce: str, began: int) -> bytes:
    stocks = [Stock(inventory, nonce=nonce, began=began) for inventory in inventories]
    return json.dumps([json.loads(encode(stock)) for stock in stocks]).encode()


def decode_roots(body: bytes) -> Roots:
    """Raises JobMessageError."""
    try:
        rows = row(parse(body, MESSAGE_BYTES_MAX), lambda plain: json.dumps(plain).encode())
    except PlainError as error:
        raise JobMessageError(f"which stores a rank reaches: {error}") from None
    stocks = [stock for stock in map(decode, rows) if isinstance(stock, Stock)]
    found = tuple(stock.inventory for stock in stocks if stock.inventory is not None)
    if not found or len(found) != len(rows):
        raise JobMessageError("which stores a rank reaches: no stock of a store")
    return Roots(found, stocks[0].nonce, stocks[0].began)


def encode_verdict(verdict: Verdict) -> bytes:
    return json.dumps(dataclasses.asdict(verdict)).encode()


def decode_verdict(body: bytes) -> Verdict:
    """Raises JobMessageError."""
    try:
        found = fields(parse(body, MESSAGE_BYTES_MAX), ("reason", "bad", "wanted"))
        bad, wanted = row(found["bad"], _holder_of), row(found["wanted"], number)
        return Verdict(text(found["reason"]), bad, wanted)
    except PlainError as error:
        raise JobMessageError(f"whether a rank can load it: {error}") from None


def encode_heads(heads: Mapping[int, Head]) -> bytes:
    plain = [
        [part, _text_of(head.manifest), [[name, _text_of(data)] for name, data in head.files]]
        for part, head in sorted(heads.items())
    ]
    return json.dumps(plain).encode()


def decode_heads(body: bytes) -> dict[int, Head]:
    """Raises JobMessageError."""
    try:
        return dict(row(parse(body, MESSAGE_BYTES_MAX), _head_of))
    except PlainError as error:
        raise JobMessageError(f"what a part begins with: {error}") from None


def _offer_of(plain: Plain) -> Offer:
    found = fields(plain, ("attempt", "worlds", "digests", "parts"))
    return Offer(
        attempt_of(found["attempt"]),
        row(found["worlds"], number),
        row(found["digests"], text),
        row(found["parts"], _part_of),
    )


def _part_of(plain: Plain) -> tuple[int, str, str]:
    part, store, manifest = _items(plain, 3)
    return number(part), text(store), text(manifest)


def _holder_of(plain: Plain) -> Holder:
    part, store = _items(plain, 2)
    return number(part), text(store)


def _head_of(plain: Plain) -> tuple[int, Head]:
    part, manifest, found = _items(plain, 3)
    return number(part), Head(_bytes_of(manifest), row(found, _file_of))


def _file_of(plain: Plain) -> tuple[str, bytes]:
    name, data = _items(plain, 2)
    return text(name), _bytes_of(data)


def _items(plain: Plain, count: int) -> tuple[Plain, ...]:
    found = row(plain, lambda item: item, count)
    if len(found) != count:
        raise PlainError(f"not {count} values")
    return found


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes_of(plain: Plain) -> bytes:
    if not isinstance(plain, str):
        raise PlainError("no text")
    try:
        return base64.b64decode(plain, validate=True)
    except ValueError:
        raise PlainError("no bytes in base64") from None
