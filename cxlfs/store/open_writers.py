"""Who has which file open for writing, and who has published one.

Never here: what a handle may do, and what becomes of a file when the last of them is gone
(``files``).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cxlfs.store.handle import Handle

PUBLISHERS_MAX: Final = 4096
"""Files."""


class Publishers:
    """Who has published which file: the last ones."""

    def __init__(self) -> None:
        self._of: dict[int, Hashable | None] = {}

    def note(self, ino: int, writer: Hashable | None) -> None:
        """None stands for several, or for one that is not known."""
        known = self._of
        if known.setdefault(ino, writer) != writer:
            known[ino] = None
        if len(known) > PUBLISHERS_MAX:
            del known[next(iter(known))]

    def of(self, ino: int) -> Hashable | None:
        """Who has published all that was of a file; None: not known."""
        return self._of.get(ino)

    def clear(self) -> None:
        self._of.clear()


class Writers:
    """Handles that may write, of each inode that has any."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Handle]] = {}

    def add(self, handle: Handle) -> None:
        self._of.setdefault(handle.inode.ino, {})[handle.id] = handle

    def remove(self, handle: Handle) -> None:
        others = self._of[handle.inode.ino]
        del others[handle.id]
        if not others:
            del self._of[handle.inode.ino]

    def __contains__(self, ino: object) -> bool:
        """Somebody has the file open for writing."""
        return ino in self._of

    def of(self, ino: int) -> Collection[Handle]:
        return self._of.get(ino, {}).values()

    def inos(self) -> set[int]:
        """Numbers of those that are open for writing."""
        return set(self._of)
