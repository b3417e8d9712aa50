"""What an engine is, and what it says of the job's processes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

GROUPED_FROM = 129
"""So many ranks, or more, are put into groups: one process hears fewer than that at once."""


def group_size_of(size: int) -> int:
    """Ranks of a group in a job of so many (see ``protocol.place``); 0: no groups. As many groups
    as a group has ranks, so that the two who hear most hear the same.
    """
    return math.isqrt(size - 1) + 1 if size >= GROUPED_FROM else 0


@dataclasses.dataclass(frozen=True, slots=True)
class World:
    """``incarnation``: the same on all ranks, and another one for each start of the processes.
    ``group_size``: see ``group_size_of``.
    """

    rank: int
    size: int
    incarnation: str
    group_size: int = 0


class Pending(Protocol):
    """Bytes on their way. What they are in stays as it is until ``wait`` has returned."""

    def wait(self) -> None:
        """Raises JobLinkError: the other rank is gone, or the link's time has passed."""
        ...


class Link(Protocol):
    """Between two ranks. What one sends, the other receives in the same order and in pieces of the
    same sizes. Used by one thread at each end.
    """

    @property
    def is_stream(self) -> bool:
        """The sizes may be others. What is sent, or received, is when the call returns, not before:
        more than one piece on its way gains nothing. The same at both ends.
        """
        ...

    def send(self, data: bytearray | memoryview) -> Pending:
        """Raises JobLinkError."""
        ...

    def receive(self, into: bytearray | memoryview) -> Pending:
        """Fills all of it. Raises JobLinkError."""
        ...

    def close(self, *, is_done: bool) -> None:
        """``is_done``: both ends know that nothing more comes; else the other's next operation
        fails.
        """
        ...


class Engine(Protocol):
    """What the protocol needs. Of each ``key`` a rank says one thing; it may be said before others
    listen. Calls come from one thread at a time, not always the same one; those of ``link`` from
    several, also while others are under way.
    """

    def world(self) -> World: ...

    def say(
        self, key: str, body: bytes, *, to: Sequence[int] | None = None, near: bool = False
    ) -> None:
        """Waits for nobody. ``to``: who has to hear it (None: all ranks); others may. ``near``: it
        is said within this rank's group, and heard so. What cannot be said is lost, as any message
        may be.
        """
        ...

    def hear(
        self, key: str, ranks: Sequence[int], seconds: float, *, near: bool = False
    ) -> dict[int, bytes]:
        """What these have said, by rank, this one among them or not; without those that were not
        heard in time. What is there is heard, whatever the time.
        """
        ...

    def link(self, other: int, name: str, seconds: float) -> Link:
        """To another rank, which calls this with the same name. It takes ``seconds`` at most until
        it is there, and as long again for all that is done with it. Raises JobLinkError.
        """
        ...

    def forget(self, key: str) -> None:
        """Nobody asks any more for what this rank said of it."""
        ...


def gather(engine: Engine, key: str, body: bytes, seconds: float) -> dict[int, bytes]:
    """Tell all; what all said, by rank, without those not heard in time."""
    engine.say(key, body)
    return engine.hear(key, range(engine.world().size), seconds)
