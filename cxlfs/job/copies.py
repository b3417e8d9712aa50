"""What one rank does about copies: where they belong, bringing them there, fetching its own.

Never: decides where they belong (``protocol.placement``) or what counts (``protocol``).

Invariants
- All ranks carry out the same list of transfers, each those that it is an end of, all at once: none
  waits for a turn that another holds up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

from cxlfs.errors import JobConfigurationError, JobLinkError
from cxlfs.job import copying, files
from cxlfs.job.engines import Engine, Link
from cxlfs.job.exchange import Failures, exchange
from cxlfs.job.files import Manifest
from cxlfs.job.protocol import (
    PLACEMENTS,
    Attempt,
    Inventory,
    Placement,
    Restoring,
    Transfer,
    fetches,
    missing_copies,
    place_copies,
)

log = logging.getLogger(__name__)


class Copies:
    """Of one rank, whose store is at ``root``. ``placement``: groups of stores that copy to each
    other, or one ring of all, in which each copies to those behind it. ``each_its_own``: of the
    ranks that share a store each removes what is its own. Raises JobConfigurationError.
    """

    def __init__(
        self,
        root: Path,
        engine: Engine,
        replicas: int,
        placement: str = "groups",
        *,
        each_its_own: bool = False,
    ) -> None:
        self.root = root
        self.each_its_own = each_its_own
        self.engine = engine
        self.replicas = replicas
        self.rank, self.world = engine.world().rank, engine.world().size
        if not 1 <= replicas <= self.world:
            raise JobConfigurationError(
                f"replicas={replicas} in a job of {self.world} processes",
                next_step="each replica lies in another rank's store: 1 to the number of ranks",
            )
        if placement not in PLACEMENTS:
            raise JobConfigurationError(
                f"no placement {placement!r}: there are {' and '.join(PLACEMENTS)}"
            )
        self.placement = placement
        self._stores: tuple[str, ...] = ()
        self._placement = Placement(((),) * self.world)

    def settle(self, inventories: Sequence[Inventory]) -> None:
        """Which store each rank has. Raises JobConfigurationError, alike on all ranks."""
        self._stores = tuple(inventory.store for inventory in inventories)
        if self.replicas > 1:
            is_ring = self.placement == "ring"
            self._placement = place_copies(inventories, self.replicas, ring=is_ring)

    def stores(self) -> tuple[str, ...]:
        """Those that copies of this rank's shards belong in."""
        return tuple(self._stores[target] for target in self._placement.targets[self.rank])

    def stores_of_node(self) -> tuple[str, ...]:
        """Those that copies of what the ranks of this store have belong in."""
        own = self._stores[self.rank]
        mine = (rank for rank, store in enumerate(self._stores) if store == own)
        targets = (target for rank in mine for target in self._placement.targets[rank])
        return tuple(sorted({self._stores[target] for target in targets}))

    @property
    def is_first(self) -> bool:
        """Of the ranks that share this store."""
        return self._stores.index(self._stores[self.rank]) == self.rank

    @property
    def has_all(self) -> bool:
        """All that lies in this store is this rank's to remove."""
        return self.is_first and not self.each_its_own

    def is_mine(self, rank: int) -> bool:
        """Whose things in this store this rank removes: the first of the ranks that share it those
        of all; or each its own, and the first those of all who have another store now, which are
        copies, and what moved away.
        """
        is_here = rank < self.world and self._stores[rank] == self._stores[self.rank]
        return rank == self.rank if is_here and self.each_its_own else self.is_first

    def discard(self, attempt: Attempt) -> None:
        """What this rank has brought into its store of it."""
        received = [t.shard for t in self._placement.transfers() if t.target == self.rank]
        for shard in (self.rank, *received):
            files.remove_rank(self.root, attempt, shard)

    # --- on the way -------------------------------------------------------------------------

    def replicate(self, manifest: Manifest, name: str, seconds: float) -> None:
        """This rank's shards, staged, to where they belong, and those that belong here. ``name``:
        the same on all ranks, and no other time. Raises JobLinkError.
        """
        attempt, data = manifest.attempt, manifest.encode()
        staged = files.staging_path(self.root, attempt, self.rank)

        def send(link: Link, _transfer: Transfer) -> None:
            copying.send(link, staged, data)

        def receive(link: Link, transfer: Transfer) -> None:
            wanted = copying.Wanted(attempt, transfer.shard, self.world)
            copying.receive(link, self.root, wanted)

        transfers = self._placement.transfers()
        failures = exchange(self.engine, transfers, name, seconds, send, receive)
        if failures:
            raise JobLinkError("; ".join(self._told(*item) for item in sorted(failures.items())))

    def fetch(self, machine: Restoring, name: str, seconds: float) -> None:
        """What ranks need of the choice that their own stores lack. Raises what kept this one from
        having it; that another could not be served is for that one to say.
        """
        choice = machine.choice
        if choice is None:
            return
        transfers = fetches(choice, machine.inventories)
        failures = self._bring(machine, transfers, name, seconds)
        for transfer, error in failures.items():
            if transfer.target == self.rank:
                raise error

    def fill(self, machine: Restoring, name: str, seconds: float) -> None:
        """Behind a restore: the copies that are missing of what was loaded, and a record that they
        are there. What fails is logged: the next commit makes copies of its own.
        """
        choice = machine.choice
        if choice is None:
            return
        transfers = missing_copies(self._placement, choice, machine.inventories, machine.excluded)
        failures = self._bring(machine, transfers, name, seconds)
        for item in sorted(failures.items()):
            log.warning("a copy of %s was not made again: %s", choice.attempt, self._told(*item))
        stores = self.stores_of_node()
        if stores and self.is_first and not failures:
            attempt, digest = choice.attempt, choice.digest
            files.record_commit(self.root, attempt, self.rank, digest, stores)

    def _bring(
        self, machine: Restoring, transfers: Iterable[Transfer], name: str, seconds: float
    ) -> Failures:
        """Shards that count already."""
        choice = machine.choice
        if choice is None:
            return {}
        attempt, manifests = choice.attempt, choice.manifests

        def send(link: Link, transfer: Transfer) -> None:
            directory = files.rank_path(self.root, attempt, transfer.shard)
            copying.send_sealed(link, directory, manifests[transfer.shard])

        def receive(link: Link, transfer: Transfer) -> None:
            shard = transfer.shard
            wanted = copying.Wanted(attempt, shard, self.world, manifests[shard])
            copying.receive(link, self.root, wanted)

        return exchange(self.engine, transfers, name, seconds, send, receive)

    def _told(self, transfer: Transfer, error: Exception) -> str:
        way = (
            f"copying to rank {transfer.target}"
            if transfer.source == self.rank
            else f"keeping a copy of rank {transfer.source}"
        )
        is_told = isinstance(error, JobLinkError)
        return f"{way}: {error}" if is_told else f"{way}: {type(error).__name__}: {error}"
