"""What an engine is, and what it says of the job's processes."""

from __future__ import annotations

import dataclasses
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """``incarnation``: the same on all ranks, and another one for each start of the processes."""

    rank: int
    size: int
    incarnation: str


class Engine(Protocol):
    """What the protocol needs. Of each ``key`` a rank says one thing; it may be said before others
    listen. Calls come from one thread at a time, not always the same one.
    """

    def world(self) -> World: ...

    def gather(self, key: str, body: bytes, seconds: float) -> dict[int, bytes]:
        """Tell all; what all said, by rank, without those not heard in time."""
        ...

    def broadcast(self, key: str, body: bytes | None, seconds: float) -> bytes | None:
        """Rank 0 tells all (the others give None): what it said; None: not heard in time."""
        ...

    def forget(self, key: str) -> None:
        """Nobody asks any more for what this rank said of it."""
        ...
