"""All ranks load one checkpoint that other ranks have saved: each reads, of the parts that it can
have, what it needs.

    what each rank reaches -> the same choice on every rank -> heads of parts that others reach
        -> what each needs -> brought over links -> verify, load -> did all load it?
    ^------------------------- without the holder, or the choice, that failed -------------'

Never: what is in a part, and what a rank needs of it (``check`` and ``load`` of who asks); which
one is chosen, and who brings it (``offers``).

Invariants
- What is brought is checked against the manifest that was voted for, on arrival and read back. It
  lies beside the checkpoints, counts as none, and is gone when this ends.
- A holder that fails is tried once more, since a link that failed says nothing about the bytes.
  Then it is left out, so that the rounds end. An older checkpoint is never loaded instead.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from cxlfs.errors import CxlfsError, InvariantError, JobFilesError, NotRestoredError
from cxlfs.job import copying, files
from cxlfs.job.driver import REASON_MAX, reason_of
from cxlfs.job.engines import Engine, Link
from cxlfs.job.exchange import LINK_SHARE, exchange
from cxlfs.job.offers import (
    MESSAGE_BYTES_MAX,
    Choice,
    Head,
    Holder,
    Offer,
    Verdict,
    choose,
    decode_heads,
    decode_offers,
    decode_verdict,
    encode_heads,
    encode_offers,
    encode_verdict,
)
from cxlfs.job.protocol import Attempt, Transfer, rounds
from cxlfs.job.protocol.restoring import TRIES
from cxlfs.job.reachable import Part, Reachable, Stock, reachable
from cxlfs.native import crc32c

log = logging.getLogger(__name__)

BROUGHT_NAME = ".cxlfs-brought"
LINKS_AT_ONCE = 4
"""Of one rank; each takes the memory of a copy."""
_ROUNDS_MAX = 64

Gather = Callable[[str, bytes], dict[int, bytes]]
Check = Callable[[Reachable], Collection[int] | None]
Load = Callable[[Reachable], object]
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True, slots=True)
class Resharded:
    """All ranks have loaded the attempt, which ``world`` ranks had saved."""

    attempt: Attempt
    world: int

    @property
    def step(self) -> int:
        return self.attempt.step

    @property
    def resumes_at(self) -> int:
        """The step behind it: the first that is to be done."""
        return self.step + 1


def remove_brought(root: Path) -> None:
    """What a kill has left, in a store of which no rank is resharding."""
    shutil.rmtree(root / BROUGHT_NAME, ignore_errors=True)


class Resharding:
    """One rank's part in it. ``gather``: what all ranks say of a key, by rank; raises if one is not
    heard. ``name``: the same on all ranks, and no other time. ``roots``: this rank's own directory,
    and others that it reaches; ``heads``: the names of the files that ``check`` reads; ``head``:
    the checkpoint, the same on all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        gather: Gather,
        roots: Sequence[Path],
        heads: Collection[str],
        name: str,
        *,
        seconds: float,
        head: Attempt,
    ) -> None:
        self._head = head
        self._engine = engine
        self._gather = gather
        self._rank = engine.world().rank
        self._heads = frozenset(heads)
        self._name = name
        self._seconds = seconds
        self._brought_root = roots[0] / BROUGHT_NAME / f"{self._rank:05d}"
        self._brought: set[tuple[Attempt, int]] = set()
        self._stocks, self._ahead = reachable(roots)

    def restore(self, check: Check, load: Load) -> tuple[Resharded, int]:
        """And a number larger than that of every attempt that any rank has met. ``check`` returns
        whose parts this rank needs (None: all), or raises if it cannot load that.

        Raises NotRestoredError, JobMessageError; what ``gather`` raises.
        """
        own = [_offer_of(stock) for stock in self._stocks if stock.attempt == self._head]
        heard = self._gather("offers", encode_offers(own, self._ahead))
        told = {rank: decode_offers(body) for rank, body in heard.items()}
        offers = {rank: offered for rank, (offered, _) in told.items()}
        try:
            found = self._restore(offers, check, load)
        finally:
            shutil.rmtree(self._brought_root, ignore_errors=True)
            with contextlib.suppress(OSError):  # others of this node are not done
                self._brought_root.parent.rmdir()
        return found, max(ahead for _, ahead in told.values())

    def _restore(
        self, offers: Mapping[int, Sequence[Offer]], check: Check, load: Load
    ) -> Resharded:
        bad: set[tuple[Attempt, Holder]] = set()
        tries: collections.Counter[Holder] = collections.Counter()
        reasons: list[str] = []
        for number in range(_ROUNDS_MAX):
            choice, refusals = choose(offers, (), bad)
            reasons += refusals
            if choice is None:
                break
            verdicts = self._try(choice, number, check, load)
            failed = {rank: each for rank, each in verdicts.items() if each.reason}
            if not failed:
                return Resharded(choice.attempt, choice.world)
            why = "; ".join(f"rank {rank}: {each.reason}" for rank, each in failed.items())
            reasons.append(f"{choice.attempt}, of {choice.world} ranks: {why}. {choice.told()}")
            blamed = {holder for each in failed.values() for holder in each.bad}
            if not blamed:
                break
            tries.update(blamed)
            bad |= {(choice.attempt, holder) for holder in blamed if tries[holder] >= TRIES}
        raise NotRestoredError(
            "; ".join(dict.fromkeys(reasons))
            or "no rank reaches any part of a committed checkpoint",
            next_step="name the directories of the stores that hold its parts, as reached here",
        )

    def _try(self, choice: Choice, number: int, check: Check, load: Load) -> dict[int, Verdict]:
        """Of all ranks."""
        heads: dict[int, Head] = {}
        verdict = Verdict()
        if any(choice.lacking(rank) for rank in choice.stores):
            own, verdict = _judged(lambda: self._own_heads(choice))
            for body in self._gather(f"heads/{number}", encode_heads(own or {})).values():
                heads |= decode_heads(body)
        found, needs = Reachable(choice.attempt, choice.world, ()), frozenset[int]()
        if not verdict.reason:
            looked, verdict = _judged(lambda: self._look(choice, heads, check))
            found, needs = looked or (found, needs)
        brought = {part for attempt, part in self._brought if attempt == choice.attempt}
        wanted = tuple(sorted(needs & found.elsewhere - brought))
        heard = self._say(f"needs/{number}", dataclasses.replace(verdict, wanted=wanted))
        if any(each.reason for each in heard.values()):
            return heard
        transfers = choice.transfers({rank: each.wanted for rank, each in heard.items()})

        def bring_and_load() -> None:
            self._bring(choice, transfers, str(number))
            for part in found.parts:
                if part.rank in needs - found.elsewhere:
                    with _blaming(part.rank, part.store):
                        found.verified(part.rank)
            load(dataclasses.replace(found, compared=needs))

        _, verdict = _judged(bring_and_load)
        return self._say(f"loaded/{number}", verdict)

    def _say(self, key: str, verdict: Verdict) -> dict[int, Verdict]:
        heard = self._gather(key, encode_verdict(verdict))
        return {rank: decode_verdict(body) for rank, body in sorted(heard.items())}

    def _local(self, choice: Choice, rank: int) -> Part | None:
        """Where this rank reaches that part."""
        stores = choice.stores[self._rank].get(rank, ())
        parts = next((s.parts for s in self._stocks if s.attempt == choice.attempt), ())
        voted = choice.manifests[rank]
        mine = (p for p in parts if (p.rank, p.manifest) == (rank, voted) and p.store in stores)
        return next(mine, None)

    # --- heads ------------------------------------------------------------------------------

    def _own_heads(self, choice: Choice) -> dict[int, Head]:
        """Of the parts of which this rank is the first that reaches them, and others do not."""
        lacked = {part for rank in choice.stores for part in choice.lacking(rank)}
        found = {}
        for rank in sorted(lacked):
            part = self._local(choice, rank) if choice.reaching(rank)[0] == self._rank else None
            if part is not None:
                with _blaming(rank, part.store):
                    found[rank] = self._head_of(choice.attempt, part)
        if len(encode_heads(found)) > MESSAGE_BYTES_MAX:
            raise JobFilesError(f"more than {MESSAGE_BYTES_MAX} bytes of {sorted(self._heads)}")
        return found

    def _head_of(self, attempt: Attempt, part: Part) -> Head:
        directory = files.rank_path(part.root, attempt, part.rank)
        data = files.read_manifest(directory, part.manifest)
        manifest = files.decode_manifest(data, directory)
        return Head(
            data,
            tuple(
                (shard.name, files.read_shard(directory, shard, MESSAGE_BYTES_MAX))
                for shard in manifest.shards
                if shard.name in self._heads
            ),
        )

    def _look(
        self, choice: Choice, heads: Mapping[int, Head], check: Check
    ) -> tuple[Reachable, frozenset[int]]:
        """What this rank can have, and whose parts it needs of it."""
        parts = []
        for rank, manifest in sorted(choice.manifests.items()):
            part = self._local(choice, rank)
            if part is None:
                if (choice.attempt, rank) not in self._brought:
                    self._put(choice, rank, heads.get(rank))
                part = Part(rank, manifest, self._brought_root, "")
            parts.append(part)
        elsewhere = frozenset(choice.lacking(self._rank))
        found = Reachable(choice.attempt, choice.world, tuple(parts), elsewhere)
        asked = check(found)
        needs = frozenset(range(choice.world) if asked is None else asked)
        lost = ", ".join(map(str, sorted(needs - set(choice.manifests))))
        if lost:
            raise JobFilesError(f"it needs the part of rank {lost}")
        return found, needs

    def _put(self, choice: Choice, rank: int, head: Head | None) -> None:
        """As the files that they are, where the part is to be. Raises JobFilesError, OSError."""
        directory = files.rank_path(self._brought_root, choice.attempt, rank)
        if head is None:
            raise JobFilesError(f"{directory.name}: who reaches it did not say what is in it")
        if files.digest_of_bytes(head.manifest) != choice.manifests[rank]:
            raise JobFilesError(f"{directory.name}: another manifest than the one that was chosen")
        shards = {s.name: s for s in files.decode_manifest(head.manifest, directory).shards}
        for name, data in head.files:
            shard = shards.get(name)
            if shard is None or (shard.size_bytes, shard.crc32c) != (len(data), crc32c(data)):
                raise JobFilesError(f"{directory.name}/{name}: not what its manifest says")
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        directory.mkdir(parents=True, exist_ok=True)

    # --- over links -------------------------------------------------------------------------

    def _bring(self, choice: Choice, transfers: Sequence[Transfer], name: str) -> None:
        """Those that this rank needs, and from it what others do."""
        attempt, bad, reasons = choice.attempt, [], []

        def send(link: Link, transfer: Transfer) -> None:
            part = self._local(choice, transfer.shard)
            if part is None:
                raise InvariantError(f"the part of rank {transfer.shard} is not here")
            directory = files.rank_path(part.root, attempt, part.rank)
            copying.send_sealed(link, directory, part.manifest)

        def receive(link: Link, transfer: Transfer) -> None:
            shard = transfer.shard
            wanted = copying.Wanted(attempt, shard, choice.world, choice.manifests[shard])
            copying.receive(link, self._brought_root, wanted)
            self._brought.add((attempt, shard))

        for turn, some in enumerate(rounds(transfers, LINKS_AT_ONCE)):
            whole = f"{self._name}/{name}.{turn}"
            failures = exchange(
                self._engine, some, whole, LINK_SHARE * self._seconds, send, receive
            )
            for transfer, error in sorted(failures.items()):
                if transfer.target != self._rank:
                    continue
                reasons.append(f"the part of rank {transfer.shard}: {reason_of(error)}")
                if not isinstance(error, OSError):  # which is of this rank's own store
                    bad.append((transfer.shard, choice.stores[transfer.source][transfer.shard][0]))
        if reasons:
            raise _UnusableError("; ".join(reasons), tuple(bad))


class _UnusableError(Exception):
    """Holders of parts from which they cannot be had; never leaves this module."""

    def __init__(self, reason: str, bad: tuple[Holder, ...]) -> None:
        super().__init__(reason)
        self.verdict = _verdict(reason, bad)


@contextlib.contextmanager
def _blaming(rank: int, store: str) -> Iterator[None]:
    try:
        yield
    except (JobFilesError, OSError) as error:
        raise _UnusableError(reason_of(error), ((rank, store),)) from error


def _judged(task: Callable[[], _Result]) -> tuple[_Result | None, Verdict]:
    """What it returns; or why there is nothing."""
    try:
        return task(), Verdict()
    except _UnusableError as error:
        log.info("not loaded", exc_info=True)
        return None, error.verdict
    except Exception as error:
        log.info("not loaded", exc_info=True)
        told = error.message if isinstance(error, CxlfsError) else reason_of(error)
        return None, _verdict(told or type(error).__name__)


def _verdict(reason: str, bad: tuple[Holder, ...] = ()) -> Verdict:
    return Verdict(" ".join(reason.split())[:REASON_MAX], bad)


def _offer_of(stock: Stock) -> Offer:
    parts = tuple((part.rank, part.store, part.manifest) for part in stock.parts)
    return Offer(stock.attempt, stock.worlds, stock.digests, parts)
