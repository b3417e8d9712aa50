"""One rank's part in the tier below: what was committed is drained behind training, and what no
store has any more is brought back from there.

    URL/step-000000000100.000007-0123.../rank-00003/model.pt ...     see tier.stock
    URL/step-000000000100.000007-0123.../rank-00003.cxlfs-manifest
    URL/step-000000000100.000007-0123....cxlfs-job                   last: the shards of all ranks

Never: decides what is loaded (``protocol``); holds up, or fails, what is saved in the stores.

Invariants
- An attempt is in the tier when its last object is there, which is put when the shards of every
  rank are. Whoever sees all of them puts it, by a conditional put: nobody waits for anybody.
- Which attempts are drained follows from their numbers, alike on all ranks.
- What is on its way is not given back by this rank's store.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import JobTierError, TierUntrustedError
from cxlfs.job import files
from cxlfs.job.pending import InOrder, PendingCheckpoint
from cxlfs.job.protocol import TIER, Attempt, Commit, Held, Inventory, digest_of
from cxlfs.job.protocol.messages import attempt_of
from cxlfs.plain import PlainError, constant, fields, number, parse, row, text
from cxlfs.tier import Bucket, Options, drain, fetch, open_bucket
from cxlfs.tier.stock import MANIFEST, begin_removal, read_manifest

log = logging.getLogger(__name__)

FORMAT = 1
JOB_SUFFIX = ".cxlfs-job"
GOING_SUFFIX = ".cxlfs-job-going"
WAITING_MAX = 2
"""Attempts that are on their way, or wait for that; the store has to have room for them."""
_BYTES_MAX = 64 << 20
_LISTED_MAX = 8
"""The newest so many attempts that a restore looks at."""


class Tier:
    """Of one rank. ``every``: only attempts whose number is a multiple of it are drained; ``keep``:
    how many stay in the tier; None: all.

    Raises UsageError, TierUnavailableError.
    """

    def __init__(self, url: str, root: Path, rank: int, *, every: int, keep: int | None) -> None:
        self._bucket = open_bucket(url)
        self._root = root
        self._rank = rank
        self._every = every
        self._keep = keep
        self._background = InOrder()
        self._waiting: list[Attempt] = []
        self._failures: list[JobTierError] = []

    # --- there ------------------------------------------------------------------------------

    def begin(self, attempt: Attempt, world: int) -> None:
        """Behind training: this rank's shards of what was committed."""
        if attempt.number % self._every:
            return
        if len(self._waiting) >= WAITING_MAX:
            self._failures.append(
                JobTierError(
                    f"{attempt} is not drained: {len(self._waiting)} before it are not done",
                    next_step="drain fewer of them (tier_every), or use a faster tier",
                )
            )
            return
        self._waiting.append(attempt)
        pending = PendingCheckpoint(attempt.step, 0.0, is_seen=True)
        self._background.begin(pending, lambda: self._drain(attempt, world))

    def holds(self, attempt: Attempt) -> bool:
        """It is on its way: it has to stay in the store."""
        return attempt in self._waiting

    def failure(self) -> JobTierError | None:
        """What went wrong since this was asked last, the others as notes of the first."""
        failures, self._failures = self._failures, []
        for other in failures[1:]:
            failures[0].add_note(f"and: {other}")
        return failures[0] if failures else None

    def wait(self, seconds: float) -> None:
        """Until nothing is on its way, or so long."""
        self._background.settle(0, seconds)
        for attempt in list(self._waiting):
            self._failures.append(
                JobTierError(f"{attempt} is still on its way after {seconds:g} s")
            )

    def _drain(self, attempt: Attempt, world: int) -> None:
        try:
            place = self._bucket.below(files.attempt_name(attempt))
            path = files.rank_path(self._root, attempt, self._rank)
            drain(path, place, Options(judge=False))
            is_first = self._complete(place, attempt, world)
            files.record_drained(self._root, attempt, self._rank)  # nobody asks for it again
            if is_first and self._keep is not None:
                self._remove_older(self._keep)
        except Exception as error:
            log.warning("%s was not drained", attempt, exc_info=True)
            failure = JobTierError(f"{attempt} was not drained: {type(error).__name__}: {error}")
            self._failures.append(failure)
        finally:
            self._waiting.remove(attempt)

    def _complete(self, place: Bucket, attempt: Attempt, world: int) -> bool:
        """Whether this rank is the one that has put the last object: all shards are there."""
        names = {files.rank_name(rank) + MANIFEST for rank in range(world)}
        if not names <= place.objects_here().keys():
            return False
        manifests = [self._vote_of(place, rank) for rank in range(world)]
        plain = {
            "format": FORMAT,
            "attempt": dataclasses.asdict(attempt),
            "manifests": manifests,
        }
        name = files.attempt_name(attempt) + JOB_SUFFIX
        data = json.dumps(plain).encode()
        is_first = self._bucket.create(name, data)
        if self._bucket.read(name, _BYTES_MAX) != data:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: put, and another one is there")
        return is_first

    def _vote_of(self, place: Bucket, rank: int) -> str:
        """The digest of the manifest with which it voted: that is one of the files."""
        found = read_manifest(place, files.rank_name(rank))
        for file in () if found is None else found.files:
            if file.name == files.MANIFEST_NAME:
                return file.sha256
        raise TierUntrustedError(f"{place.url}: rank {rank} has no manifest there")

    # --- back -------------------------------------------------------------------------------

    def stock(self) -> Inventory:
        """The newest attempts that are there. Raises TierUnavailableError, TierUntrustedError."""
        held: list[Held] = []
        commits: list[Commit] = []
        for attempt in self._attempts()[:_LISTED_MAX]:
            manifests = self._manifests_of(attempt)
            world = len(manifests)
            held += [Held(attempt, rank, world, m) for rank, m in enumerate(manifests)]
            commits.append(Commit(attempt, digest_of(manifests)))
        return Inventory(TIER, tuple(sorted(held)), tuple(sorted(commits)))

    def bring(self, attempt: Attempt, shard: int) -> None:
        """Its shards into this rank's store, in the place of what is there of them.

        Raises TierUnavailableError, TierUntrustedError, NotInTierError, NoSpaceError, OSError.
        """
        name = files.rank_name(shard)
        directory = files.rank_path(self._root, attempt, shard).parent
        directory.mkdir(exist_ok=True)
        fetch(self._bucket.below(directory.name), name, directory, replace=True)

    def _attempts(self, suffix: str = JOB_SUFFIX) -> list[Attempt]:
        """Newest first."""
        names = (key for key in self._bucket.objects_here() if key.endswith(suffix))
        found = (files.attempt_named(name.removesuffix(suffix)) for name in names)
        return sorted((attempt for attempt in found if attempt is not None), reverse=True)

    def _manifests_of(self, attempt: Attempt) -> tuple[str, ...]:
        name = files.attempt_name(attempt) + JOB_SUFFIX
        data = self._bucket.read(name, _BYTES_MAX)
        try:
            plain = fields(parse(data or b"", _BYTES_MAX), ("format", "attempt", "manifests"))
            constant(plain["format"], FORMAT)
            said, manifests = attempt_of(plain["attempt"]), row(plain["manifests"], text)
        except PlainError as error:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: {error}") from None
        if said != attempt:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: it is of {said}")
        return manifests

    # --- older ones -------------------------------------------------------------------------

    def _remove_older(self, keep: int) -> None:
        """The last object first: under another name, until all of it is gone."""
        for attempt in self._attempts()[keep:]:
            name = files.attempt_name(attempt)
            count = len(self._manifests_of(attempt))
            going = json.dumps(count).encode()
            self._bucket.put(name + GOING_SUFFIX, [going], len(going), parallel=1)
            self._bucket.remove(name + JOB_SUFFIX)
        for attempt in self._attempts(GOING_SUFFIX):
            name = files.attempt_name(attempt)
            place = self._bucket.below(name)
            for rank in self._going_ranks(name):
                begin_removal(place, files.rank_name(rank))
            self._bucket.remove(name + GOING_SUFFIX)

    def _going_ranks(self, name: str) -> Iterator[int]:
        data = self._bucket.read(name + GOING_SUFFIX, _BYTES_MAX)
        try:
            yield from range(min(number(parse(data or b"0", _BYTES_MAX)), 1 << 20))
        except PlainError as error:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: {error}") from None
