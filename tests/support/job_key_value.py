"""Key-value stores in memory, as the engine of torch uses them, which count what they are asked."""

from __future__ import annotations

import datetime as dt
import threading


class Shelf:
    """What is stored, for all that have a ``MemoryStore`` of it. ``requests``: as many as torch's
    client makes.
    """

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.requests = 0
        self.changed = threading.Condition()


class MemoryStore:
    """Of one rank."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._seconds = 60.0

    def set(self, key: str, value: bytes) -> None:
        with self._shelf.changed:
            self._shelf.requests += 1
            self._shelf.kept[key] = bytes(value)
            self._shelf.changed.notify_all()

    def check(self, keys: list[str]) -> bool:
        with self._shelf.changed:
            self._shelf.requests += 1
            return all(key in self._shelf.kept for key in keys)

    def set_timeout(self, timeout: dt.timedelta) -> None:
        self._seconds = timeout.total_seconds()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """One request waits, one gets."""
        shelf = self._shelf
        with shelf.changed:
            shelf.requests += 2
            if not shelf.changed.wait_for(lambda: shelf.kept.keys() >= set(keys), self._seconds):
                raise RuntimeError("timed out")
            return [shelf.kept[key] for key in keys]

    def delete_key(self, key: str) -> bool:
        with self._shelf.changed:
            self._shelf.requests += 1
            return self._shelf.kept.pop(key, None) is not None

    def clone(self) -> MemoryStore:
        return MemoryStore(self._shelf)


class MemoryGroups:
    """See ``engines.torch.Groups``. ``cut``: a rank that does not reach its leader's store."""

    def __init__(self, rank: int, size: int, shelves: dict[str, Shelf], *, cut: int = -1) -> None:
        self._rank = rank
        self.size = size
        self._shelves = shelves
        self._cut = cut

    def serve(self) -> bytes:
        name = f"of rank {self._rank}"
        self._shelves[name] = Shelf()
        return name.encode()

    def reach(self, where: bytes) -> MemoryStore | None:
        return None if self._rank == self._cut else MemoryStore(self._shelves[where.decode()])
