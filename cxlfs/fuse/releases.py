"""Who asks for a file between the last close of a killed writer and the kernel's RELEASE: he waits.

A killed process closes its files while it ends (FLUSH), and its parent may hear of its end, and
begin anew, before the RELEASE of a file is served, which brings the previous version back. Until
then the file is what was half written: whoever asks for it meanwhile waits.

Never here: who was killed (``processes``), what RELEASE does (the store).

Invariants
- Nobody waits where a process that opened the file for writing, or wrote to it, lives, and for
  RELEASE_SECONDS behind the last close at most: then somebody else holds the descriptor, as a child
  that inherited it may, and the file is what its descriptors show.
- Who has the file open reads, writes and closes without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.store import UnfinishedError

if TYPE_CHECKING:
    from cxlfs.store import Store

RELEASE_SECONDS = 5.0
"""RELEASE is sent before the parent of a killed process can hear of its end."""


class Releases:
    """One for each mount. The lock of the store is held by whoever calls."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._until: dict[int, float] = {}
        """In the order of their ends."""

    def expect(self, ino: int) -> None:
        """A killed process has closed a file that nobody else is known to write to."""
        now = self._clock()
        self._until.pop(ino, None)
        self._until[ino] = now + RELEASE_SECONDS
        while now >= self._until[oldest := next(iter(self._until))]:
            del self._until[oldest]

    def wait_for(self, ino: int) -> None:
        """Raises UnfinishedError while the RELEASE of a file is on its way."""
        until = self._until.get(ino) if self._until else None
        if until is None:
            return
        if self._clock() < until and self._store.files.is_left_by_killed(ino):
            raise UnfinishedError
        del self._until[ino]

    def wait_for_name(self, parent: int, name: bytes) -> None:
        """The same of the file that a name means, if it means one. Raises as ``Namespace.find``."""
        if self._until:
            inode = self._store.namespace.find(parent, name)
            if inode is not None:
                self.wait_for(inode.ino)
