"""One rank's part in the tier below: what was committed is drained behind training, and what no
store has any more is brought back from there.

    URL/step-000000000100.000007-0123.../rank-00003/model.pt ...     see tier.stock
    URL/step-000000000100.000007-0123.../rank-00003.cxlfs-manifest
    URL/step-000000000100.000007-0123....cxlfs-job                   last: the shards of all ranks,
                                                                     and the lines that led to them
    URL/job.cxlfs-job-id                                             whose all of it is

Never: decides what is loaded (``protocol``); holds up, or fails, what is saved in the stores.

Invariants
- An attempt is in the tier when its last object is there, which is put when the shards of every
  rank are. Whoever sees all of them puts it, by a conditional put: nobody waits for anybody.
- It belongs to the job that has claimed it first, by a conditional put.
- What was begun to be removed counts no more, and loses its last object before anything else.
- Which attempts are drained follows from their numbers, alike on all ranks.
- What is on its way is not given back by this rank's store.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import CxlfsError, JobTierError, NotRestoredError, TierUntrustedError
from cxlfs.job import files, lines
from cxlfs.job.pending import InOrder, PendingCheckpoint
from cxlfs.job.protocol import (
    TIER,
    Attempt,
    Commit,
    Held,
    Inventory,
    Line,
    Lineage,
    collectable,
    digest_of,
    is_of_line,
)
from cxlfs.job.protocol.messages import attempt_of, line_of
from cxlfs.plain import PlainError, constant, fields, number, parse, row, text
from cxlfs.tier import Bucket, Options, drain, fetch, open_bucket
from cxlfs.tier.stock import MANIFEST, begin_removal, read_manifest

log = logging.getLogger(__name__)

FORMAT = 2
"""It has the lines. In format 1, of attempts before there were any, there are none."""
FORMAT_BEFORE = 1
JOB_SUFFIX = ".cxlfs-job"
GOING_SUFFIX = ".cxlfs-job-going"
JOB_NAME = "job.cxlfs-job-id"
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
                self._give_back(attempt, self._keep)
        except Exception as error:
            log.warning("%s was not drained", attempt, exc_info=True)
            failure = JobTierError(f"{attempt} was not drained: {type(error).__name__}: {error}")
            self._failures.append(failure)
        finally:
            self._waiting.remove(attempt)

    def _give_back(self, attempt: Attempt, keep: int) -> None:
        """What is older. It is in the tier all the same if that fails."""
        try:
            self._remove_older(attempt, keep)
        except Exception as error:
            log.warning("%s: older ones were not removed", self._bucket.url, exc_info=True)
            self._failures.append(
                JobTierError(
                    f"{attempt} is drained, and older ones were not removed: "
                    f"{type(error).__name__}: {error}",
                    next_step="let the job delete objects there, or drain without tier_keep",
                )
            )

    def _complete(self, place: Bucket, attempt: Attempt, world: int) -> bool:
        """Whether this rank is the one that has put the last object: all shards are there."""
        names = {files.rank_name(rank) + MANIFEST for rank in range(world)}
        if not names <= place.objects_here().keys():
            return False
        manifests = [self._vote_of(place, rank) for rank in range(world)]
        plain: dict[str, object] = {
            "format": FORMAT if is_of_line(attempt) else FORMAT_BEFORE,
            "attempt": dataclasses.asdict(attempt),
            "manifests": manifests,
        }
        if is_of_line(attempt):
            led = self._lineage().led_by(attempt)
            plain["lines"] = [dataclasses.asdict(line) for line in led]
        name = files.attempt_name(attempt) + JOB_SUFFIX
        data = json.dumps(plain).encode()
        is_first = self._bucket.create(name, data)
        if self._bucket.read(name, _BYTES_MAX) != data:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: put, and another one is there")
        return is_first

    def _lineage(self) -> Lineage:
        """As this rank's store knows it."""
        return Lineage(lines.lines_in(self._root)[0])

    def claim(self, job: str, *, is_first: bool) -> None:
        """It is of this job from now on. A start of a job that has begun before (``is_first``: it
        has not) goes on where that cannot be said.

        Raises NotRestoredError (it is another's), TierUnavailableError.
        """
        try:
            self._bucket.create(JOB_NAME, job.encode())
            owner = self._job()
        except CxlfsError:
            if is_first:
                raise
            log.warning("%s: it was not claimed", self._bucket.url, exc_info=True)
            return
        if owner != job:
            raise NotRestoredError(
                f"{self._bucket.url} belongs to job {owner or 'unknown'}, not to {job}",
                next_step="name another place in the tier for this job",
            )

    def _job(self) -> str:
        data = self._bucket.read(JOB_NAME, _BYTES_MAX)
        return "" if data is None else data.decode("ascii", "replace")

    def _vote_of(self, place: Bucket, rank: int) -> str:
        """The digest of the manifest with which it voted: that is one of the files."""
        found = read_manifest(place, files.rank_name(rank))
        for file in () if found is None else found.files:
            if file.name == files.MANIFEST_NAME:
                return file.sha256
        raise TierUntrustedError(f"{place.url}: rank {rank} has no manifest there")

    # --- back -------------------------------------------------------------------------------

    def stock(self) -> Inventory:
        """The latest attempts that are there, and the last of each line that leads to none of
        these. Raises TierUnavailableError, TierUntrustedError.
        """
        held: list[Held] = []
        commits: list[Commit] = []
        known: dict[str, Line] = {}
        for attempt in self._looked_at():
            lineage = Lineage(known.values())
            latest = [commit.attempt for commit in commits]
            if len(latest) >= _LISTED_MAX and any(lineage.leads_to(attempt, a) for a in latest):
                continue
            manifests, led = self._content_of(attempt)
            known |= {line.id: line for line in led}
            world = len(manifests)
            held += [Held(attempt, rank, world, m) for rank, m in enumerate(manifests)]
            commits.append(Commit(attempt, digest_of(manifests)))
        return Inventory(
            TIER,
            tuple(sorted(held)),
            tuple(sorted(commits)),
            job=self._job(),
            lines=tuple(known.values()),
        )

    def _looked_at(self) -> list[Attempt]:
        going = set(self._attempts(GOING_SUFFIX))
        there = [attempt for attempt in self._attempts() if attempt not in going]
        of_lines = [attempt for attempt in there if is_of_line(attempt)]
        there = of_lines or there  # the first line that was drained has seen what was before it
        last: dict[str, Attempt] = {}
        for attempt in there:
            last.setdefault(attempt.id if is_of_line(attempt) else "", attempt)
        others = sorted(set(last.values()) - set(there[:_LISTED_MAX]), reverse=True)
        return [*there[:_LISTED_MAX], *others]

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

    def _content_of(self, attempt: Attempt) -> tuple[tuple[str, ...], tuple[Line, ...]]:
        """The manifests of its ranks, and the lines that led to it."""
        name = files.attempt_name(attempt) + JOB_SUFFIX
        data = self._bucket.read(name, _BYTES_MAX)
        try:
            names, has_lines = ["format", "attempt", "manifests"], is_of_line(attempt)
            names += ["lines"] if has_lines else []
            plain = fields(parse(data or b"", _BYTES_MAX), tuple(names))
            constant(plain["format"], FORMAT if has_lines else FORMAT_BEFORE)
            said, manifests = attempt_of(plain["attempt"]), row(plain["manifests"], text)
            led = row(plain["lines"], line_of) if has_lines else ()
        except PlainError as error:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: {error}") from None
        if said != attempt:
            raise TierUntrustedError(f"{self._bucket.url}/{name}: it is of {said}")
        return manifests, led

    # --- older ones -------------------------------------------------------------------------

    def _remove_older(self, newest: Attempt, keep: int) -> None:
        """What leads to the newest, but for ``keep``. The last object goes first: under another
        name, until all of it is gone.
        """
        there = self._attempts()
        commits = tuple(Commit(attempt, "") for attempt in there if is_of_line(attempt))
        older = collectable(Inventory(TIER, (), commits), newest, keep, self._lineage())
        before = [attempt for attempt in there if not is_of_line(attempt)]
        for attempt in (*older, *before[max(keep - len(commits) + len(older), 0) :]):
            name = files.attempt_name(attempt)
            count = len(self._content_of(attempt)[0])
            going = json.dumps(count).encode()
            self._bucket.put(name + GOING_SUFFIX, [going], len(going), parallel=1)
        for attempt in self._attempts(GOING_SUFFIX):
            name = files.attempt_name(attempt)
            self._bucket.remove(name + JOB_SUFFIX)
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
