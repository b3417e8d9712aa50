"""Who has which file open for writing.

Never here: what a handle may do, and what becomes of a file when the last of them is gone
(``files``).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cxlfs.store.handle import Handle


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
