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

Invalidation of pages waits for those that are being read or written back, that is for replies of
this very process. It therefore runs in a thread of its own, never in a handler, and the connection
is neither left unserved nor closed while that thread is at it (``quiesce``). Attributes are
invalidated at once: that waits for nothing, and who took a set-ID bit away by writing must not find
it there afterwards.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable

from cxlfs.fuse.data_plane import DataPlane
from cxlfs.fuse.handles import OpenFiles

log = logging.getLogger(__name__)

REPLACED_SECONDS = 5.0


class PageCache:
    """Decides how files are opened; remembers and carries out invalidations."""

    def __init__(self, files: OpenFiles, data_plane: DataPlane) -> None:
        self._files = files
        self._data_plane = data_plane
        self._stale: set[int] = set()
        """Inodes whose cached pages may be wrong: the next cached open drops them."""
        self._changed = threading.Condition()
        """Of the following. Held for moments, also by those who hold the lock of the store."""
        self._pending: dict[int | tuple[int, bytes], None] = {}
        """Inodes, and names in directories, to invalidate soon, the longest known first."""
        self._replaced: dict[int, float] = {}
        """Inodes whose content the store replaced, until the kernel has dropped their pages; and
        until when whoever opens them waits for that at most."""
        self._started = self._stopped = False
        self._busy = False
        """The thread is at work."""

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
        if ino in self._pending:
            with self._changed:
                self._pending.pop(ino, None)

    def written_directly(self, ino: int) -> None:
        """A direct write changed the content."""
        self._stale.add(ino)
        if self._files.has_cached(ino):
            self._schedule(ino)

    def content_replaced(self, ino: int) -> None:
        """The store itself changed content, size and times. Size and times are asked for anew when
        this returns: whoever closes a file finds those of the version that is back.
        """
        self._stale.add(ino)
        if self._started:
            self._replaced[ino] = time.monotonic() + REPLACED_SECONDS
        self._invalidate(ino, attributes_only=True)
        self._schedule(ino)

    def is_replacing(self, ino: int) -> bool:
        """The kernel is about to drop the pages of a content that was replaced. Who opens the file
        meanwhile may be told its new size while the kernel goes by the old one: an attribute that
        is asked for during an invalidation counts for the caller alone, and a map of the file would
        end in SIGBUS (fs/fuse/inode.c, fuse_change_attributes).
        """
        until = self._replaced.get(ino) if self._replaced else None
        return until is not None and time.monotonic() < until

    def name_changed(self, parent: int, name: bytes) -> None:
        """The store itself gave a name another meaning, or took it away."""
        self._schedule((parent, name))

    def attributes_changed(self, ino: int) -> None:
        """The store changed attributes in a way that the kernel does not expect; it knows when this
        returns.
        """
        self._invalidate(ino, attributes_only=True)

    def _schedule(self, what: int | tuple[int, bytes]) -> None:
        with self._changed:
            self._pending[what] = None
            self._changed.notify_all()

    def start(self) -> None:
        """Carry out what is scheduled from now on, and what was before."""
        self._started = True
        threading.Thread(target=self._run, name="cxlfs-invalidate", daemon=True).start()

    def is_invalidating(self) -> bool:
        """The kernel is yet to be told something."""
        return self._started and not self._stopped and (self._busy or bool(self._pending))

    def quiesce(self, seconds_max: float) -> bool:
        """Begin no invalidation any more; True when none is at work. Waits for one that is."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not self._busy, seconds_max)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or bool(self._pending))
                if self._stopped:
                    return
                self._busy = True
                what = next(iter(self._pending))
                del self._pending[what]
            if isinstance(what, int):
                self._invalidate(what, attributes_only=False)
                if what not in self._pending:
                    self._replaced.pop(what, None)
            else:
                self._invalidate(what[0], attributes_only=True)
                self._invalidate_name(*what)

    def _invalidate(self, ino: int, *, attributes_only: bool) -> None:
        """Raises nothing."""
        self._try(ino, lambda: self._data_plane.invalidate(ino, attributes_only))

    def _invalidate_name(self, parent: int, name: bytes) -> None:
        self._try(parent, lambda: self._data_plane.invalidate_name(parent, name))

    def _try(self, ino: int, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            # ENOENT: the kernel does not know the inode (any more), so it has no pages of it.
            # ENOTCONN, EBADF, ENODEV: unmounted meanwhile.
            gone = (errno.ENOENT, errno.ENOTCONN, errno.EBADF, errno.ENODEV)
            if error.errno not in gone:
                log.warning("cannot invalidate what is cached of inode %d: %s", ino, error)
        except Exception:
            log.exception("cannot invalidate what is cached of inode %d", ino)
