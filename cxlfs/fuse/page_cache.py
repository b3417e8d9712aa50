"""How files are opened with respect to the kernel's page cache, and how it is kept true.

The decision
- Where the kernel lets files that bypass the cache be mapped (``direct_mapping``: Linux 6.6, and
  workers that ask for it): direct I/O for all, as the medium is memory itself. Only mapped pages
  are cached then.
- Elsewhere ``O_WRONLY``: direct I/O. Such a file cannot be mapped, and a checkpoint writer needs no
  second copy of its data in DRAM. Any other access: cached, because a direct file refuses
  MAP_SHARED (ENODEV). Measured (Linux 6.18, 2 cores, verified reads of 1 MiB from a file of
  256 MiB, file medium in memory, pyfuse3): direct 4.3 GB/s each time; cached 3.7 GB/s the first
  time with 1 MiB of readahead (3.3 with 4 MiB), 10.6 GB/s when read again.
- Attributes and names are cached for a day, also names that do not exist: every change goes
  through this mount, so the kernel knows of it. What the store changes by itself is invalidated.

Who keeps cached pages true
- The kernel: its own cached writes, truncation and O_TRUNC; since Linux 6.6 it writes back and
  drops the pages under a direct write; and before a cached read it compares the modification time
  and drops all pages when that changed (FUSE_AUTO_INVAL_DATA).
- This module: pages of an inode that others hold cached while a direct writer writes (mappings are
  not compared by the kernel), and content that the store replaced (the version of a killed writer).
- Nobody, before Linux 6.6: a page changed through a shared mapping and, before it was written back,
  through an O_WRONLY descriptor as well. One of the two changes is lost.

Invalidation waits for pages that are being read or written back, that is for replies of this very
process. It therefore runs in a thread, never in a handler, and the connection is neither left
unserved nor closed while that thread is at it (``quiesce``).
"""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from cxlfs.fuse.handles import OpenFiles

if TYPE_CHECKING:
    from cxlfs.fuse.data_plane import DataPlane

log = logging.getLogger(__name__)


class PageCache:
    """Decides how files are opened; remembers and carries out invalidations."""

    def __init__(
        self,
        files: OpenFiles,
        data_plane: DataPlane,
        lock: threading.Lock,
    ) -> None:
        self._lock = lock
        self._files = files
        self._data_plane = data_plane
        self._stale: set[int] = set()
        """Inodes whose cached pages may be wrong: the next cached open drops them."""
        self._pending: dict[int, bool] = {}
        """Inodes to invalidate soon; True: only their attributes."""
        self._wake = trio.Event()
        self._wake_up: Callable[[], None] | None = None
        """Tells ``run``, from any thread."""
        self._stopped = False
        self._idle = threading.Event()
        """Cleared while the thread is at work."""
        self._idle.set()

    def is_direct(self, flags: int) -> bool:
        """A file opened with these ``O_`` flags bypasses the page cache."""
        return self._data_plane.direct_mapping or flags & os.O_ACCMODE == os.O_WRONLY

    def keep_at_open(self, ino: int, *, direct: bool) -> bool:
        """Pages that the kernel has of ``ino`` are still true at this open."""
        if direct or ino not in self._stale:
            return True
        self._stale.discard(ino)
        return False

    def forgotten(self, ino: int) -> None:
        """The kernel has dropped the inode, pages and all."""
        self._stale.discard(ino)
        self._pending.pop(ino, None)

    def written_directly(self, ino: int) -> None:
        """A direct write changed the content."""
        self._stale.add(ino)
        if self._files.has_cached(ino):
            self._schedule(ino, attributes_only=False)

    def content_replaced(self, ino: int) -> None:
        """The store itself changed content, size and times."""
        self._stale.add(ino)
        self._schedule(ino, attributes_only=False)

    def attributes_changed(self, ino: int) -> None:
        """The store changed attributes in a way that the kernel does not expect."""
        self._schedule(ino, attributes_only=True)

    def _schedule(self, ino: int, *, attributes_only: bool) -> None:
        self._pending[ino] = attributes_only and self._pending.get(ino, True)
        if self._wake_up is not None:
            self._wake_up()

    def _set(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        """Carry out what was scheduled, until cancelled."""
        token = trio.lowlevel.current_trio_token()
        self._wake_up = lambda: token.run_sync_soon(self._set, idempotent=True)
        self._set()
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            with self._lock:
                batch, self._pending = self._pending, {}
            if self._stopped:
                return
            self._idle.clear()
            await trio.to_thread.run_sync(self._invalidate_all, batch, abandon_on_cancel=True)

    async def quiesce(self, seconds_max: float) -> bool:
        """Begin no invalidation any more; True when none is at work."""
        self._stopped = True
        return await trio.to_thread.run_sync(self._idle.wait, seconds_max)

    def _invalidate_all(self, batch: dict[int, bool]) -> None:
        try:
            self._invalidate_each(batch)
        finally:
            self._idle.set()

    def _invalidate_each(self, batch: dict[int, bool]) -> None:
        for ino, attributes_only in batch.items():
            if self._stopped:
                return
            try:
                self._data_plane.invalidate(ino, attributes_only)
            except OSError as error:
                # ENOENT: the kernel does not know the inode (any more), so it has no pages of it.
                # ENOTCONN, EBADF, ENODEV: unmounted meanwhile.
                gone = (errno.ENOENT, errno.ENOTCONN, errno.EBADF, errno.ENODEV)
                if error.errno not in gone:
                    log.warning("cannot invalidate cached pages of inode %d: %s", ino, error)
