"""Workers beside the handlers, with a socket in place of /dev/fuse."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cxlfs.daemon import server
from cxlfs.daemon.options import MountConfig, make_config
from cxlfs.errors import MountError, OutOfMemoryError
from cxlfs.fuse.direct import UPCALLS, Direct
from cxlfs.fuse.handles import Caller
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.operations import Operations
from cxlfs.fuse.request_sizes import RequestSizes
from cxlfs.fuse.workers import Workers
from cxlfs.media import MemoryMedia
from cxlfs.native import FaultKind, set_fault
from cxlfs.native.transport import Answer, Upcall
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.fuse_socket import SECONDS_MAX, request

ROOT = 1
BY_ROOT = Caller(0, 0, 0)
SIZES = RequestSizes(1 << 20, 1 << 20)


class Plane:
    """A store, its operations and workers, which nobody has started yet."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.kernel, fuse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.kernel.settimeout(SECONDS_MAX)
        self.workers = Workers(store, fuse.detach(), upcalls=UPCALLS, sizes=SIZES, count=2)
        self.operations = Operations(store, data_plane=self.workers)
        store.on_event = self.operations.on_store_event
        self.errors: list[MountError | None] = []

    def start(self, direct: Direct) -> None:
        self.workers.start(direct.serve, self.errors.append)


@contextlib.contextmanager
def made_plane() -> Iterator[Plane]:
    media = MemoryMedia(64 << 20)
    Store.format(media)
    store = Store.open(media)
    made = Plane(store)
    yield made
    made.workers.close()
    made.kernel.close()
    os.close(made.workers.serves_fd)
    made.operations.lookups.forget_all()
    store.close()
    assert not made.operations.failures.counts
    assert not list(run_passes(media, structure_only=False))
    media.close()


@pytest.fixture
def plane() -> Iterator[Plane]:
    with made_plane() as made:
        yield made


class Slow(Direct):
    """Waits in the middle of a call, as a thread does that waits for the store's lock."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def serve(self, call: Upcall) -> Answer | None:
        self.begun.set()
        assert self.go_on.wait(SECONDS_MAX)
        return super().serve(call)


def test_a_call_under_way_is_answered_before_stop_returns(plane: Plane) -> None:
    direct = Slow(plane.operations, plane.workers.transport)
    plane.start(direct)
    plane.kernel.send(request(Opcode.SYNCFS, 2, bytes(8)))
    assert direct.begun.wait(SECONDS_MAX)
    stopped = threading.Event()

    def stop() -> None:
        plane.workers.stop()
        stopped.set()

    thread = threading.Thread(target=stop)
    thread.start()
    assert not stopped.wait(0.1), "the store would be closed under the call"
    direct.go_on.set()
    thread.join(SECONDS_MAX)
    assert stopped.is_set()
    assert len(plane.kernel.recv(1 << 16)) == 16
    assert plane.errors == [None], "nothing failed, and the last thread said so"


def test_an_open_without_memory_leaves_nothing(plane: Plane) -> None:
    requests = plane.operations
    with requests.lock:
        _, opened = requests.create_file(ROOT, b"file", 0o644, os.O_RDWR, BY_ROOT)
        requests.release_file(opened.handle)
        ino = plane.store.lookup(ROOT, b"file").ino
        failed = 0
        for nth in range(1, 20):
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                opened = requests.open_file(ino, os.O_RDONLY, BY_ROOT)
            except OutOfMemoryError:
                failed += 1
            else:
                set_fault(FaultKind.ALLOCATE, 0)
                requests.release_file(opened.handle)
            finally:
                set_fault(FaultKind.ALLOCATE, 0)
            assert len(requests.files) == 0
            assert plane.store.namespace.get(ino).port is None
            assert plane.store.namespace.get(ino).handles == 0
        assert failed == 2, "a port and a handle take memory"


def test_a_mount_that_libfuse_refuses_closes_what_it_had(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, fuse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def attach(_config: MountConfig, *, read_bytes_max: int) -> int:
        assert read_bytes_max == SIZES.read // 2, "what fits the pipe"
        return fuse.detach()

    def refuse(*_arguments: object) -> None:
        raise RuntimeError("fuse_session_new() failed")

    monkeypatch.setattr(server, "attach", attach)
    monkeypatch.setattr(server, "request_sizes", lambda: SIZES._replace(read=SIZES.read // 2))
    monkeypatch.setattr(server.pyfuse3, "init", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MountError, match="cannot mount"):
        server._mount(plane.store, make_config("/source", "/mnt"))
    assert kernel.recv(1) == b"", "the connection is closed"
    assert len(list(Path("/proc/self/fd").iterdir())) == before - 1, "and nothing else is open"
    kernel.close()


def test_a_processor_that_is_alone_has_a_worker_for_data(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    kernel, fuse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    workers = Workers(plane.store, fuse.detach(), upcalls=UPCALLS, sizes=SIZES)
    assert workers.count == 2
    workers.close()
    os.close(workers.serves_fd)
    kernel.close()


def test_workers_that_cannot_be_made_close_what_was_theirs(plane: Plane) -> None:
    kernel, fuse = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    set_fault(FaultKind.ALLOCATE, 1)
    with pytest.raises(OutOfMemoryError):
        Workers(plane.store, fuse.detach(), upcalls=UPCALLS, sizes=SIZES)
    set_fault(FaultKind.ALLOCATE, 0)
    assert kernel.recv(1) == b""
    kernel.close()
