"""Threads that serve file data beside pyfuse3's handlers.

With them this process mounts by itself. Each worker is a thread that reads /dev/fuse in C and
serves READ and WRITE there; what it cannot decide, and the most frequent other requests, come back
to Python as upcalls and are served in the same thread (``direct``). All the rest goes over a socket
pair to pyfuse3, which takes the other end for /dev/fuse. Of several workers one is always left for
data: what is neither, and comes meanwhile, waits (csrc/transport/upcalls.c).

Never here: what a request means (``requests``), file data.

Invariants
- A file has a port from its first open handle to its last.
- Writes go past the store only where ``allow_writes`` said so, for a handle and a thread; whatever
  changes that calls ``Inode.stop_writes`` first.
- The workers end before the store is closed, and the connection after them.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.errors import MountError, OutOfMemoryError
from cxlfs.format import layout
from cxlfs.fuse import kernel
from cxlfs.fuse.attributes import CACHE_SECONDS
from cxlfs.fuse.request_sizes import SPLICE_BYTES_MIN, RequestSizes
from cxlfs.native.transport import Port, Transport, Unfinished, Worker

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.native.transport import Answer, Upcall
    from cxlfs.store import Store

    Serve = Callable[[Upcall], Answer | Unfinished | None]
    OnEnd = Callable[[MountError | None], None]

log = logging.getLogger(__name__)

WORKERS_MIN = 2
"""One is left for data while the other is busy with an upcall."""
WORKERS_MAX = 8
_TURN_SECONDS = 0.0002
"""Between two steps of a write. Python's locks go to whoever asks first, and a thread that has
waited for one takes some 50 µs to wake up."""


class Workers:
    """Threads that serve the mounted /dev/fuse ``fuse_fd``, which is theirs from here on.

    ``upcalls``: opcodes of requests that are to become some. ``sizes``: what the kernel is told at
    INIT, and was told at mounting. ``busy_poll_us``: how long one that serves alone looks for the
    next request before it sleeps. ``serves_fd`` is for pyfuse3, which closes it. Every method that
    a request leads to is called with the lock of the store held. Raises OutOfMemoryError, OSError;
    ``fuse_fd`` is closed then.
    """

    def __init__(
        self,
        store: Store,
        fuse_fd: int,
        *,
        upcalls: frozenset[int],
        sizes: RequestSizes,
        count: int | None = None,
        busy_poll_us: int = 0,
    ) -> None:
        self._store = store
        self._fuse_fd = fuse_fd
        self._ports: dict[int, tuple[Port, int]] = {}
        processors = os.cpu_count() or 1
        self.count = count or min(max(processors, WORKERS_MIN), WORKERS_MAX)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fuse_fd)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(ours.close)
            undo.callback(theirs.close)
            self.transport = Transport(
                store.volume.engine,
                fuse_fd=fuse_fd,
                control_fd=ours.fileno(),
                request_bytes_max=sizes.request,
                read_bytes_max=sizes.read,
                file_bytes_max=layout.FILE_SIZE_MAX,
                upcalls=upcalls,
                verify=store.options.verify_reads,
                poll_ns=busy_poll_us * 1000 if processors > 1 else 0,
                splice_bytes_min=SPLICE_BYTES_MIN,
                absent_seconds=CACHE_SECONDS,
            )
            undo.pop_all()
        self._control, self.serves_fd = ours, theirs.detach()
        self._threads: list[threading.Thread] = []
        self._running = 0
        self._running_lock = threading.Lock()

    # --- life ---------------------------------------------------------------------------------

    def start(self, serve: Serve, on_end: OnEnd) -> None:
        """Begin; ``serve`` takes the upcalls, in the threads. ``on_end`` is called in one of them
        when all have ended, after an unmount or :meth:`stop`; and with an error as soon as one of
        them failed.

        Raises OutOfMemoryError, InvariantError.
        """
        workers = [Worker(self.transport) for _ in range(self.count)]
        self._running = len(workers)
        self.transport.start()
        for number, worker in enumerate(workers):
            thread = threading.Thread(
                target=self._run,
                args=(worker, serve, on_end),
                name=f"cxlfs-data-{number}",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def _run(self, worker: Worker, serve: Serve, on_end: OnEnd) -> None:
        error: MountError | None = None
        try:
            answer = None
            while (upcall := worker.serve(answer)) is not None:
                outcome = serve(upcall)
                while isinstance(outcome, Unfinished) and not worker.put_back(outcome):
                    time.sleep(_TURN_SECONDS)
                    outcome = serve(upcall._replace(done=outcome.done))
                answer = None if isinstance(outcome, Unfinished) else outcome
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
        which a worker may be waiting for: upcalls that were begun are served to their end.
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
        return {"kind": "native", "threads": self.count, "calls": counts.pop("upcalls"), **counts}

    # --- what requests tell -------------------------------------------------------------------

    writes_past_store = True

    @functools.cached_property
    def direct_mapping(self) -> bool:
        """Asked for the first time when a file is opened, which is after the kernel said so."""
        return self.transport.statistics().direct_mapping

    def opened(self, handle: int, ino: int, *, readable: bool) -> None:
        port, users = self._ports.get(ino, (None, 0))
        if port is None:
            port = _KnownFile(ino, self._store.files.content_of(handle), self.transport)
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

    def note_absent(self, parent: int, name: bytes) -> None:
        self.transport.note_absent(parent, name)

    def take_absent_back(self, parent: int, name: bytes) -> None:
        self.transport.take_absent_back(parent, name)

    def take_all_absent_back(self) -> None:
        self.transport.take_all_absent_back()

    def invalidate(self, ino: int, attributes_only: bool) -> None:  # noqa: FBT001
        self.transport.invalidate(ino, attributes_only)

    def invalidate_name(self, parent: int, name: bytes) -> None:
        self.transport.notify(kernel.name_notification(parent, name))


class _KnownFile(Port):
    """The port of a file whose attributes the kernel remembers."""

    def __init__(self, ino: int, content: FileMap, transport: Transport) -> None:
        super().__init__(ino, content)
        self._ino = ino
        self._transport = transport

    def ask(self, asks: bool) -> None:  # noqa: FBT001  as declared
        """Whoever makes the threads ask knows of changes that the kernel does not: from here on it
        asks anew for the attributes, too, which are valid for no time until they ask no more. What
        it is told then counts: an answer on its way would not, behind another such word.
        """
        super().ask(asks)
        if asks:
            with contextlib.suppress(OSError):  # the kernel has forgotten the inode, or is gone
                self._transport.invalidate(self._ino, attributes_only=True)
