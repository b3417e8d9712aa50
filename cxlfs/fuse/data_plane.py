"""Who serves file data: pyfuse3's own handlers, or workers beside them.

With workers this process mounts by itself. Each worker is a thread that reads /dev/fuse in C and
serves READ and WRITE there; what it cannot decide, and the most frequent other requests, come back
to Python as calls and are served in the same thread (``direct``). All the rest goes over a socket
pair to pyfuse3, which takes the other end for /dev/fuse.

Never here: what a request means (``requests``), file data.

Invariants
- A file has a port from its first open handle to its last.
- Writes go past the store only while ``Requests.may_write_alone`` holds for their handle and their
  thread belongs to a known writer; whatever changes that calls ``Inode.stop_writes`` first.
- The workers end before the store is closed, and the connection after them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import pyfuse3

from cxlfs.errors import MountError, OutOfMemoryError
from cxlfs.format import layout
from cxlfs.fuse import kernel
from cxlfs.native.transport import Port, Transport, Worker

if TYPE_CHECKING:
    from cxlfs.fuse.direct import Direct
    from cxlfs.store import Store

log = logging.getLogger(__name__)

WORKERS_MAX = 8
REQUEST_PAGES_MAX = 1024
"""4 MiB, where the kernel's limit was raised: a worker has a buffer of that size."""
PAGE_BYTES = 4096
SPLICE_BYTES_MIN = 64 << 10
"""From here on a pipe is faster than writev: csrc/transport/splice.c has the figures."""


class DataPlane(Protocol):
    """What ``requests`` tells whoever serves file data."""

    @property
    def direct_mapping(self) -> bool:
        """Files that bypass the kernel's page cache can be mapped all the same."""
        ...

    @property
    def writes_past_store(self) -> bool:
        """It makes use of :meth:`allow_writes`."""
        ...

    def opened(self, handle: int, ino: int, *, readable: bool) -> None:
        """Raises OutOfMemoryError: the handle is not known then."""
        ...

    def released(self, handle: int, ino: int) -> None: ...

    def allow_writes(self, handle: int, tid: int) -> None:
        """Writes of this thread need not be told any more, until ``Inode.stop_writes``."""
        ...

    def describe(self) -> dict[str, object]:
        """For ``cxlfs status``: kind, and counts where there are any."""
        ...

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        """Make the kernel forget what it caches of ``ino``. Waits for requests, unless it is only
        about attributes. Raises OSError.
        """
        ...


class HandlersOnly:
    """pyfuse3's handlers serve everything: there is nothing to tell."""

    direct_mapping = False
    writes_past_store = False

    def opened(self, handle: int, ino: int, *, readable: bool) -> None: ...

    def released(self, handle: int, ino: int) -> None: ...

    def allow_writes(self, handle: int, tid: int) -> None: ...

    def describe(self) -> dict[str, object]:
        return {"kind": "pyfuse3"}

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        pyfuse3.invalidate_inode(pyfuse3.InodeT(ino), attributes_only)


class Workers:
    """Threads that serve the mounted /dev/fuse ``fuse_fd``, which is theirs from here on.

    ``busy_poll_us``: how long one that serves alone looks for the next request before it sleeps.
    ``serves_fd`` is for pyfuse3, which closes it. Every method that a request leads to is called
    with the lock of the store held. Raises OutOfMemoryError, OSError; ``fuse_fd`` is closed then.
    """

    def __init__(
        self,
        store: Store,
        fuse_fd: int,
        *,
        calls: frozenset[int],
        count: int | None = None,
        busy_poll_us: int = 0,
    ) -> None:
        self._store = store
        self._fuse_fd = fuse_fd
        self._ports: dict[int, tuple[Port, int]] = {}
        self.count = count or min(os.cpu_count() or 1, WORKERS_MAX)
        pages = min(kernel.request_pages_max(), REQUEST_PAGES_MAX)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fuse_fd)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            undo.callback(theirs.close)
            self.transport = Transport(
                store.volume.engine,
                fuse_fd=fuse_fd,
                control_fd=ours.fileno(),
                request_bytes_max=pages * PAGE_BYTES,
                file_bytes_max=layout.FILE_SIZE_MAX,
                calls=calls,
                verify=store.options.verify_reads,
                poll_ns=busy_poll_us * 1000 if self.count > 1 else 0,
                splice_bytes_min=SPLICE_BYTES_MIN,
            )
            undo.pop_all()
        self._control, self.serves_fd = ours, theirs.detach()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._running_lock = threading.Lock()

    # --- life ---------------------------------------------------------------------------------

    def start(self, direct: Direct, on_end: Callable[[MountError | None], None]) -> None:
        """Begin to serve. ``on_end`` is called in one of the threads when all have ended, after an
        unmount or :meth:`stop`; and with an error as soon as one of them failed.

        Raises OutOfMemoryError, InvariantError.
        """
        workers = [Worker(self.transport) for _ in range(self.count)]
        self._running = len(workers)
        self.transport.start()
        for number, worker in enumerate(workers):
            thread = threading.Thread(
                target=self._run,
                args=(worker, direct, on_end),
                name=f"cxlfs-data-{number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def _run(
        self, worker: Worker, direct: Direct, on_end: Callable[[MountError | None], None]
    ) -> None:
        error: MountError | None = None
        try:
            answer = None
            while (call := worker.serve(answer)) is not None:
                answer = direct.serve(call)
        except OSError as failure:
            error = MountError(f"/dev/fuse failed: {failure.strerror}")
        except Exception as failure:
            log.exception("a thread that serves requests failed")
            error = MountError(f"serving requests failed: {failure}")
        with self._running_lock:
            self._running -= 1
            is_last = self._running == 0
        if error is not None or is_last:
            on_end(error)

    def stop(self) -> None:
        """Serve nothing any more; before the store is closed. Idempotent. Not with the lock held,
        which a worker may be waiting for: calls that were begun are served to their end.
        """
        self.transport.stop()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        while self._ports:
            ino, (port, _) = self._ports.popitem()
            inode = self._store.namespace.get(ino)
            inode.note_writes()
            inode.port = None
            port.close()
        self.transport.close()

    def close(self) -> None:
        """Close the connection: the mount is dead, unless it is gone already. Idempotent."""
        if self._fuse_fd < 0:
            return
        self.stop()
        self._control.close()
        os.close(self._fuse_fd)
        self._fuse_fd = -1

    def describe(self) -> dict[str, object]:
        counts = self.transport.statistics()._asdict()
        return {"kind": "native", "threads": self.count, **counts}

    # --- what requests tell -------------------------------------------------------------------

    writes_past_store = True

    @functools.cached_property
    def direct_mapping(self) -> bool:
        """Asked for the first time when a file is opened, which is after the kernel said so."""
        return self.transport.statistics().direct_mapping

    def opened(self, handle: int, ino: int, *, readable: bool) -> None:
        port, users = self._ports.get(ino, (None, 0))
        if port is None:
            port = Port(ino, self._store.files.content_of(handle))
        try:
            self.transport.open_handle(handle, port, readable=readable)
        except OutOfMemoryError:
            if users == 0:
                port.close()
            raise
        if users == 0:
            self._store.files.set_port(handle, port)
        self._ports[ino] = (port, users + 1)

    def released(self, handle: int, ino: int) -> None:
        port, users = self._ports[ino]
        self.transport.close_handle(handle)
        if users > 1:
            self._ports[ino] = (port, users - 1)
            return
        del self._ports[ino]
        self._store.files.set_port(handle, None)
        port.close()

    def allow_writes(self, handle: int, tid: int) -> None:
        self.transport.allow_writes(handle, tid)

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        self.transport.invalidate(ino, attributes_only)
