"""The checkpoints of a job in whatever directories can be read here: for who does not load as many
parts as there are, each its own (another number of ranks, a single process that looks at all).

Never: says which one all ranks load (``offers``); changes anything.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

from cxlfs.errors import JobFilesError
from cxlfs.job import files, medium
from cxlfs.job.protocol import Attempt, Inventory, next_number

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Part:
    """What one rank saved, in one of the directories; ``manifest``: its digest."""

    rank: int
    manifest: str
    root: Path
    store: str


@dataclasses.dataclass(frozen=True, slots=True)
class Stock:
    """What lies here of an attempt: of each part all that there are. ``worlds``: of how many ranks
    it is, as they say; ``digests``: of the commits that are recorded here.
    """

    attempt: Attempt
    worlds: tuple[int, ...]
    parts: tuple[Part, ...]
    digests: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Reachable:
    """Of one attempt, what this rank can have. ``elsewhere``: the ranks whose parts lie in stores
    that only others reach; ``compared``: those of which every byte was already.
    """

    attempt: Attempt
    world: int
    parts: tuple[Part, ...]
    elsewhere: frozenset[int] = frozenset()
    compared: frozenset[int] = frozenset()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks whose parts nobody reaches."""
        return tuple(sorted(set(range(self.world)) - {part.rank for part in self.parts}))

    def directory(self, part: Part) -> Path:
        return files.rank_path(part.root, self.attempt, part.rank)

    def verified(self, rank: int) -> Path:
        """The directory of that part, each byte of which is what its manifest says.

        Raises JobFilesError, OSError.
        """
        part = next(part for part in self.parts if part.rank == rank)
        if rank in self.compared:
            return self.directory(part)
        return files.verify(part.root, self.attempt, rank, part.manifest)


def reachable(roots: Sequence[Path]) -> tuple[tuple[Stock, ...], int]:
    """In the order of their numbers, largest first; and a number larger than that of any. A
    directory that cannot be read is left out, with a warning.
    """
    found = stores_at(roots)
    parts: dict[Attempt, set[Part]] = {}
    worlds: dict[Attempt, set[int]] = {}
    digests: dict[Attempt, set[str]] = {}
    for root, inventory in found:
        for held in inventory.held:
            part = Part(held.rank, held.manifest, root, inventory.store)
            parts.setdefault(held.attempt, set()).add(part)
            worlds.setdefault(held.attempt, set()).add(held.world)
        for commit in inventory.commits:
            digests.setdefault(commit.attempt, set()).add(commit.digest)
    stocks = [
        Stock(
            attempt,
            tuple(sorted(worlds.get(attempt, ()))),
            tuple(sorted(parts.get(attempt, ()))),
            tuple(sorted(digests.get(attempt, ()))),
        )
        for attempt in sorted(parts.keys() | digests.keys(), reverse=True)
    ]
    return tuple(stocks), next_number([inventory for _, inventory in found])


def inventories(roots: Sequence[Path]) -> tuple[Inventory, ...]:
    """Of the stores there, as ``reachable`` reads them."""
    return tuple(inventory for _, inventory in stores_at(roots))


def stores_at(roots: Sequence[Path]) -> tuple[tuple[Path, Inventory], ...]:
    """A directory that cannot be read is left out, with a warning."""
    found = []
    for root in dict.fromkeys(root.resolve() for root in roots):
        try:
            found.append((root, files.logged_inventory(root, _name_of(root))))
        except (JobFilesError, OSError) as error:
            log.warning("left out: %s", error)
    return tuple(found)


def _name_of(root: Path) -> str:
    """Its identity; of what has none, nothing is made, the path."""
    has_one = (root / medium.IDENTITY_NAME).exists()
    return medium.identity(root) if has_one else str(root)
