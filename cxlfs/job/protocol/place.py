"""Which rank of how many a machine is for, and who counts whose answers.

Ranks are put into *groups* of neighbours. The lowest rank of a group *leads* it: it hears the
others of it, and what it has counted goes to rank 0, which leads the first group and counts those
of all. What rank 0 tells comes back the same way. A job of one group is *flat*: rank 0 hears all.

Never: how large groups are (``engines``); messages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """``call``: see ``Key``. ``group_size``: ranks of a group, the same on all ranks; 0: of all."""

    rank: int
    world: int
    incarnation: str
    call: int
    group_size: int = 0

    @property
    def leader(self) -> int:
        """Who counts for this rank; it may be itself."""
        return self.rank - self.rank % self._size

    @property
    def leads(self) -> bool:
        return self.rank == self.leader

    @property
    def group(self) -> range:
        return range(self.leader, min(self.leader + self._size, self.world))

    @property
    def leaders(self) -> range:
        return range(0, self.world, self._size)

    @property
    def is_flat(self) -> bool:
        return len(self.leaders) == 1

    @property
    def above(self) -> int:
        """Who tells this rank what rank 0 says."""
        return 0 if self.leads else self.leader

    @property
    def below(self) -> tuple[int, ...]:
        """Whom this rank tells it."""
        others = [*self.leaders] if self.rank == 0 else []
        group = [*self.group] if self.leads else []
        return tuple(sorted({*others, *group} - {self.rank}))

    def is_near(self, ranks: Iterable[int]) -> bool:
        """All of them are of this rank's group."""
        return all(rank in self.group for rank in ranks)

    @property
    def _size(self) -> int:
        return self.group_size or self.world
