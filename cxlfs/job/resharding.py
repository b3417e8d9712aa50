"""All ranks load one checkpoint that other ranks have saved: each reads, of the parts that it can
reach, what it needs.

    what each rank could load -> the same choice on every rank -> verify, load -> did all load it?
                                          ^------------- without that one ------------'

Never: what is in a part, and what a rank needs of it (``check`` and ``load`` of who asks).

Invariants
- As in ``protocol.restoring``: one attempt for all ranks, the newest that somebody knows to be
  committed, or of which every part is somewhere; each round leaves out one, so that they end.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cxlfs.errors import CxlfsError, JobMessageError, NotRestoredError
from cxlfs.job.driver import REASON_MAX
from cxlfs.job.protocol import Attempt
from cxlfs.job.protocol.messages import attempt_of
from cxlfs.job.reachable import Reachable, reachable
from cxlfs.plain import Plain, PlainError, fields, number, parse, row, text, truth

log = logging.getLogger(__name__)

_MESSAGE_BYTES_MAX = 1 << 22
_OFFERS_MAX = 16
"""Attempts, the newest, that a rank looks into."""


@dataclasses.dataclass(frozen=True, slots=True)
class Resharded:
    """All ranks have loaded the attempt, which ``world`` ranks had saved."""

    attempt: Attempt
    world: int

    @property
    def step(self) -> int:
        return self.attempt.step


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """What a rank says of an attempt: which parts it reaches, in which stores, and why it cannot
    load it (empty: it can).
    """

    attempt: Attempt
    world: int
    is_committed: bool
    parts: tuple[tuple[int, str], ...]
    reason: str


def restore_parts(
    gather: Callable[[str, bytes], dict[int, bytes]],
    roots: Sequence[Path],
    check: Callable[[Reachable], object],
    load: Callable[[Reachable], object],
) -> tuple[Resharded, int]:
    """And a number larger than that of every attempt that any rank has met. ``gather``: what all
    ranks say of a key, by rank. ``check`` raises if this rank cannot load that.

    Raises NotRestoredError; what ``gather`` raises.
    """
    excluded: set[Attempt] = set()
    reasons: list[str] = []
    for turn in range(_OFFERS_MAX + 1):
        stock, ahead = reachable(roots)
        found = {one.attempt: one for one in stock[:_OFFERS_MAX]}
        offers = [_offer(one, check) for one in found.values() if one.attempt not in excluded]
        heard = gather(f"offers/{turn}", _encode(offers, ahead))
        told_by = {rank: _decode(body) for rank, body in heard.items()}
        chosen, older = choose({rank: told for rank, (told, _) in told_by.items()})
        reasons += older
        if chosen is None:
            break
        failure = _attempted(load, found[chosen.attempt])
        failures = gather(f"loaded/{turn}", json.dumps(failure).encode())
        lacking = {rank: _reason(body) for rank, body in failures.items() if _reason(body)}
        if not lacking:
            found_by_all = Resharded(chosen.attempt, chosen.world)
            return found_by_all, max(ahead for _, ahead in told_by.values())
        reasons += [f"{chosen.attempt}, rank {rank}: {told}" for rank, told in lacking.items()]
        excluded.add(chosen.attempt)
    raise NotRestoredError(
        "; ".join(dict.fromkeys(reasons)) or "no rank reaches any part of a committed checkpoint",
        next_step="name the directories of the stores that hold its parts, as reached here",
    )


def _offer(found: Reachable, check: Callable[[Reachable], object]) -> Offer:
    parts = tuple((part.rank, part.store) for part in found.parts)
    reason = _attempted(check, found)
    return Offer(found.attempt, found.world, found.is_committed, parts, reason)


def _attempted(act: Callable[[Reachable], object], found: Reachable) -> str:
    """Why it failed; empty: it did not."""
    try:
        act(found)
    except Exception as error:
        log.info("%s", found.attempt, exc_info=True)
        told = (
            error.message if isinstance(error, CxlfsError) else f"{type(error).__name__}: {error}"
        )
        return " ".join(told.split())[:REASON_MAX] or type(error).__name__
    return ""


def choose(offers: Mapping[int, Sequence[Offer]]) -> tuple[Offer | None, list[str]]:
    """The newest that all can load; and why not newer ones. Pure: the same on every rank."""
    by_attempt: dict[Attempt, dict[int, Offer]] = {}
    for rank, told in sorted(offers.items()):
        for offer in told:
            by_attempt.setdefault(offer.attempt, {})[rank] = offer
    reasons: list[str] = []
    for attempt in sorted(by_attempt, reverse=True):
        told_by = by_attempt[attempt]
        first = min(told_by.items())[1]
        holders = {pair for offer in told_by.values() for pair in offer.parts}
        nowhere = sorted(set(range(first.world)) - {rank for rank, _ in holders})
        if nowhere and not any(offer.is_committed for offer in told_by.values()):
            continue  # nobody knows that it was ever committed
        lacking = {
            rank: told_by[rank].reason if rank in told_by else "it reaches no part of it"
            for rank in sorted(offers)
            if rank not in told_by or told_by[rank].reason
        }
        if not lacking:
            return first, reasons
        places = ", ".join(f"that of rank {rank} in {store}" for rank, store in sorted(holders))
        lost = f"; nobody reaches that of rank {', '.join(map(str, nowhere))}" if nowhere else ""
        why = "; ".join(f"rank {rank}: {reason}" for rank, reason in lacking.items())
        reasons.append(f"{attempt}, of {first.world} ranks: {why}. Its parts: {places}{lost}")
    return None, reasons


# --- messages -----------------------------------------------------------------------------------


def _encode(offers: Sequence[Offer], ahead: int) -> bytes:
    plain = {"offers": [dataclasses.asdict(offer) for offer in offers], "ahead": ahead}
    return json.dumps(plain).encode()


def _decode(body: bytes) -> tuple[tuple[Offer, ...], int]:
    try:
        found = fields(parse(body, _MESSAGE_BYTES_MAX), ("offers", "ahead"))
        return row(found["offers"], _offer_of, _OFFERS_MAX), number(found["ahead"])
    except PlainError as error:
        raise JobMessageError(f"what a rank offers to load: {error}") from None


def _offer_of(plain: Plain) -> Offer:
    found = fields(plain, ("attempt", "world", "is_committed", "parts", "reason"))
    return Offer(
        attempt_of(found["attempt"]),
        number(found["world"]),
        truth(found["is_committed"]),
        row(found["parts"], _part_of),
        text(found["reason"]),
    )


def _part_of(plain: Plain) -> tuple[int, str]:
    pair = row(plain, lambda item: item, 2)
    if len(pair) != 2:
        raise PlainError("not a rank and a store")
    return number(pair[0]), text(pair[1])


def _reason(body: bytes) -> str:
    try:
        return text(parse(body, _MESSAGE_BYTES_MAX))
    except PlainError as error:
        raise JobMessageError(f"whether a rank has loaded: {error}") from None
