"""What the ranks of a job speak of: attempts, what stores hold of them, and how a call ends.

Never: behaviour, but for what a value is made of.

Invariants
- An attempt is one try at saving one step. The same step tried again is another attempt, with
  another id, so that nothing of two tries is ever put together.
- Which of two attempts is newer is a question of descent (``lineage``), never of steps or numbers.
  A number names an attempt, and orders those of one line.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """``number``: larger than that of every attempt that any rank knew before. ``id``: of the line
    that saved it (see ``Line``).
    """

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


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Closed:
    """An attempt of ``line`` with a larger number than this was never committed, or given up."""

    line: str
    number: int


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class GivenUp:
    """An operator decided against ``attempt`` and all that leads to it, but for what leads to
    ``instead`` as well.
    """

    attempt: Attempt
    instead: Attempt


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One start of a job and all that it saves. Durable in each of its stores before its first
    vote, and never changed.

    ``job``: the id of the job's first line. ``parent``: what the start resumed from, with its
    ``digest``. ``members``: the store of each rank; ``targets``: the stores that keep copies of it.
    ``known``, ``settled``, ``closes``: what was new to it of earlier lines (those of its chain
    have the rest): ids, lines that have nothing more, and how far each counts. ``gives_up``: what
    a decision was against. ``is_provisional``: too few stores were heard to rule out a commit that
    only absent stores have. ``began``: seconds since 1970 by the clock of rank 0, for people.
    """

    id: str
    job: str
    parent: Attempt | None
    digest: str
    members: tuple[str, ...]
    targets: tuple[tuple[str, ...], ...]
    known: tuple[str, ...] = ()
    closes: tuple[Closed, ...] = ()
    settled: tuple[str, ...] = ()
    gives_up: tuple[GivenUp, ...] = ()
    is_provisional: bool = False
    began: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What an operator answered: of ``heads``, which a start could not choose from, or not load,
    or not with so few stores, resume at ``resume`` (None: where there are no heads, begin anew).
    """

    resume: Attempt | None
    heads: tuple[Attempt, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Inventory:
    """Of one store, by its UUID. ``domain``: with what else it fails, as its ranks state. ``job``:
    the job that it belongs to, or empty. ``damaged``: attempts and ranks of which something is
    there that cannot be read. ``decision``: what an operator left there. ``torn``: ids of lines
    whose records are damaged.
    """

    store: str
    held: tuple[Held, ...] = ()
    commits: tuple[Commit, ...] = ()
    domain: str = ""
    job: str = ""
    lines: tuple[Line, ...] = ()
    damaged: tuple[tuple[Attempt, int], ...] = ()
    decision: Decision | None = None
    torn: tuple[str, ...] = ()


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
    """Nothing can be said of what there is (a store cannot be read, or is another job's), or it is
    of another number of ranks: an error, never a first start.
    """

    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """An operator has to decide: an error. ``heads``: of which none leads to another. One: it
    cannot be loaded, for ``reasons``, or too few stores were heard. None: nothing is there, and
    stores that are absent may have something. ``loadable``: what could be loaded now.
    """

    heads: tuple[Attempt, ...]
    reasons: tuple[str, ...]
    loadable: tuple[Attempt, ...] = ()


Outcome: TypeAlias = Committed | Aborted | Restored | Nothing | Undecided | NotRestored | Asked
