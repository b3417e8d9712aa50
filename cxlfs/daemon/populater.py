"""Maps the pages that data will go to next: some of them while nothing happens, and as fast as it
goes while somebody writes.

The first touch of a page costs whoever touches it a page fault: on a store in a tmpfs file 0.3 µs
of mapping where the page is there, and 1 to 2 µs where one has to be found and zeroed, which is as
long as a writer takes for everything else.

Never here: which pages these are, and whether it is worth it (``Space.room_ahead``).

Invariants
- Neither the store's lock nor Python's is held while pages are mapped, and no worker does it.
- When :meth:`Populater.run` has ended nothing is being mapped: the media can be closed.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from cxlfs.store import Store

IDLE_SECONDS = 0.5
_IDLE_PIECES = 8
"""Mapped at a time while nobody writes: 64 MiB, which is some 20 ms of zeroing pages."""


class Populater:
    """One for each mount. ``lock``: the one that every use of the store is under."""

    def __init__(self, store: Store, lock: threading.Lock) -> None:
        self._store = store
        self._lock = lock
        self._token: trio.lowlevel.TrioToken | None = None
        self._woken = trio.Event()

    def wake(self) -> None:
        """Somebody writes. From any thread."""
        if self._token is not None:
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._set_woken, idempotent=True)

    def _set_woken(self) -> None:
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled."""
        self._token = trio.lowlevel.current_trio_token()
        while True:
            with trio.move_on_after(IDLE_SECONDS):
                await self._woken.wait()
            writing = self._woken.is_set()
            self._woken = trio.Event()
            pieces = 0
            while (writing or pieces < _IDLE_PIECES) and await self._map_next():
                pieces += 1

    async def _map_next(self) -> bool:
        """False: there is nothing."""
        with self._lock:
            room = self._store.volume.space.room_ahead()
        if room is not None:
            await trio.to_thread.run_sync(self._store.media.populate, *room)
        return room is not None
