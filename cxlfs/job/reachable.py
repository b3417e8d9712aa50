"""The checkpoints of a job in whatever directories can be read here: for who does not load as many
parts as there are, each its own (another number of ranks, a single process that looks at all).

Never: says which one all ranks load (who asks does); changes anything.

Invariants
- Parts of two attempts are never put together, and none whose votes are not those that were
  recorded as committed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from cxlfs.errors import JobFilesError
from cxlfs.job import files, medium
from cxlfs.job.protocol import Attempt, digest_of, next_number

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Part:
    """What one rank saved, in one of the directories; ``manifest``: its digest."""

    rank: int
    manifest: str
    root: Path
    store: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reachable:
    """Of one attempt, what can be read here. ``is_committed``: as far as is known here."""

    attempt: Attempt
    world: int
    parts: tuple[Part, ...]
    is_committed: bool

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose parts are elsewhere."""
        return tuple(sorted(set(range(self.world)) - {part.rank for part in self.parts}))

    def directory(self, part: Part) -> Path:
        return files.rank_path(part.root, self.attempt, part.rank)

    def verified(self, rank: int) -> Path:
        """The directory of that part, each byte of which is what its manifest says.

        Raises JobFilesError, OSError.
        """
        part = next(part for part in self.parts if part.rank == rank)
        return files.verify(part.root, self.attempt, rank, part.manifest)


def reachable(roots: Sequence[Path]) -> tuple[tuple[Reachable, ...], int]:
    """Newest first, of each part one that is there; and a number larger than that of any attempt.
    A directory that cannot be read is left out, with a warning.
    """
    inventories = []
    parts: dict[Attempt, dict[int, set[Part]]] = {}
    worlds: dict[Attempt, set[int]] = {}
    digests: dict[Attempt, set[str]] = {}
    for root in dict.fromkeys(root.resolve() for root in roots):
        try:
            store = _name_of(root)
            inventory, problems = files.take_stock(root, store)
        except (JobFilesError, OSError) as error:
            log.warning("left out: %s", error)
            continue
        inventories.append(inventory)
        for problem in problems:
            log.warning("left out: %s", problem)
        for held in inventory.held:
            part = Part(held.rank, held.manifest, root, store)
            parts.setdefault(held.attempt, {}).setdefault(held.rank, set()).add(part)
            worlds.setdefault(held.attempt, set()).add(held.world)
        for commit in inventory.commits:
            digests.setdefault(commit.attempt, set()).add(commit.digest)
    found = []
    for attempt in sorted(parts, reverse=True):
        one = _of(attempt, parts[attempt], worlds[attempt], digests.get(attempt, set()))
        if one is not None:
            found.append(one)
    return tuple(found), next_number(inventories)


def _name_of(root: Path) -> str:
    """Its identity; of what has none, nothing is made, the path."""
    has_one = (root / medium.IDENTITY_NAME).exists()
    return medium.identity(root) if has_one else str(root)


def _of(
    attempt: Attempt, parts: dict[int, set[Part]], worlds: set[int], digests: set[str]
) -> Reachable | None:
    """None: what was found of it contradicts itself."""
    votes = {rank: {part.manifest for part in held} for rank, held in parts.items()}
    if len(worlds) > 1 or len(digests) > 1 or any(len(each) > 1 for each in votes.values()):
        log.warning("left out: %s: its parts contradict each other", attempt)
        return None
    (world,) = worlds
    chosen = tuple(min(held) for _, held in sorted(parts.items()))
    is_whole = len(chosen) == world
    if is_whole and digests - {digest_of([part.manifest for part in chosen])}:
        log.warning("left out: %s: its parts are not those that were voted for", attempt)
        return None
    return Reachable(attempt, world, chosen, is_whole or bool(digests))
