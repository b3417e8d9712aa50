"""What the ranks of a job speak of: attempts, what stores hold of them, and how a call ends.

Never: behaviour, but for what a value is made of.

Invariants
- An attempt is one try at saving one step. The same step tried again is another attempt, with
  another id, so that nothing of two tries is ever put together.
- Attempts are in the order of their numbers, not of their steps: a job that went back and trains
  step 150 again is ahead of what it had saved of step 200 before.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """``number``: one more than that of every attempt that any rank knew before. ``id``: random."""

    number: int
    step: int
    id: str

    def __str__(self) -> str:
        return f"step {self.step} (attempt {self.id}, number {self.number})"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Key:
    """Which gathering a message belongs to. ``incarnation``: one start of all the job's processes;
    ``call``: how many calls the ranks made before it, which is the same on all of them.
    """

    incarnation: str
    call: int
    phase: str
    round: int = 0


_DIGEST_BITS = 256


def digest_of(manifests: Sequence[str]) -> str:
    """What a commit names: the digests of all manifests, ``manifests[i]`` of rank i."""
    return digest_of_some(enumerate(manifests))


def digest_of_some(manifests: Iterable[tuple[int, str]]) -> str:
    """Of some ranks. Each of them is a number (SHA-256 of rank and manifest), and the digest is
    their sum: whichever groups the ranks are counted in, that of all is the sum of those of groups.
    """
    return sum_of(
        hashlib.sha256(f"{rank} {manifest}".encode()).hexdigest() for rank, manifest in manifests
    )


def sum_of(digests: Iterable[str]) -> str:
    """Of hexadecimal digits."""
    total = sum(int(digest, 16) for digest in digests) % (1 << _DIGEST_BITS)
    return f"{total:0{_DIGEST_BITS // 4}x}"


# --- what stores hold ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Held:
    """The shards of one rank, with their manifest: durable, and complete when they were stored.
    ``world``: of how many ranks the checkpoint is; ``manifest``: its digest, which is the vote.
    """

    attempt: Attempt
    rank: int
    world: int
    manifest: str


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Commit:
    """All have voted for the attempt, with these votes."""

    attempt: Attempt
    digest: str


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """Of one store, by its UUID. ``domain``: with what else it fails, as its ranks state."""

    store: str
    held: tuple[Held, ...] = ()
    commits: tuple[Commit, ...] = ()
    domain: str = ""


TIER = "tier"
"""What the tier below is called among stores, whose names are UUIDs."""


# --- how a call ends ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Committed:
    """All ranks voted for the attempt: it is what a restart resumes from. ``is_cleaned``: it is
    recorded in every store, and what is older goes. ``copies``: the stores, beside its own, that
    hold this rank's shards.
    """

    attempt: Attempt
    digest: str
    is_cleaned: bool
    copies: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def step(self) -> int:
        return self.attempt.step


@dataclasses.dataclass(frozen=True, slots=True)
class Aborted:
    """A rank could not vote for it, and never will: ``reasons`` by rank."""

    step: int
    reasons: tuple[tuple[int, str], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Restored:
    """All ranks have loaded the attempt, this one ``shard`` from the store ``holder``.
    ``is_fetched``: that is another rank's, as this one's own did not have it, or damaged.
    """

    attempt: Attempt
    digest: str
    shard: int
    holder: str
    is_fetched: bool = False

    @property
    def step(self) -> int:
        return self.attempt.step

    @property
    def resumes_at(self) -> int:
        """The step behind it: the first that is to be done."""
        return self.step + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Nothing:
    """No store holds a checkpoint that was ever committed: a first start."""

    @property
    def resumes_at(self) -> int:
        """Step 0."""
        return 0


@dataclasses.dataclass(frozen=True, slots=True)
class Undecided:
    """Ranks were not heard before the deadline, so that nobody may say how it ended: an error. What
    was saved stays, and a restart resumes from it if all had voted.
    """

    phase: str
    missing: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class NotRestored:
    """There are checkpoints, and none that all ranks could load: an error, never a first start."""

    reasons: tuple[str, ...]


Outcome: TypeAlias = Committed | Aborted | Restored | Nothing | Undecided | NotRestored
