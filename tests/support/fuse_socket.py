"""The kernel's end of a transport, in Python: a SOCK_SEQPACKET pair in place of /dev/fuse.

Like /dev/fuse it keeps the borders of messages: a read(2) is one request, a writev(2) one answer.
An answer that comes through a pipe it would cut: where there may be some, it is a SOCK_STREAM pair,
and requests wait for each other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from cxlfs.native import transport
from cxlfs.native.extents import Engine, FileMap
from cxlfs.native.transport import UPCALL_LEASE, Port, Transport, Unfinished, Upcall, Worker

FORGET, READ, WRITE, INIT, READDIR, INTERRUPT = 2, 15, 16, 26, 28, 36
NOTIFY_REPLY, BATCH_FORGET = 41, 42
UNANSWERED = frozenset({FORGET, BATCH_FORGET, INTERRUPT, NOTIFY_REPLY})

HEADER = struct.Struct("=IIQQIIII")
REPLY = struct.Struct("=IiQ")
IN = struct.Struct("=QQI20x")
"""READ and WRITE: handle, offset, size."""

REQUEST_BYTES_MAX = 128 << 10
FILE_BYTES_MAX = 1 << 40
SECONDS_MAX = 30.0
"""Nothing takes so long: who waits longer waits for ever."""

INO, READER, WRITER = 7, 1, 2
TID = 4711


class Answer(NamedTuple):
    unique: int
    error: int
    data: bytes


class Kept(NamedTuple):
    """A upcall, with bytes of its own."""

    opcode: int
    unique: int
    pid: int
    arguments: bytes
    done: int


def request(
    opcode: int, unique: int, body: bytes, *, inode: int = INO, pid: int = TID, uid: int = 0
) -> bytes:
    return HEADER.pack(HEADER.size + len(body), opcode, unique, inode, uid, 0, pid, 0) + body


def refuse(upcall: Kept) -> transport.Answer | None:
    """Give the answer that nobody else gives."""
    if upcall.opcode in UNANSWERED:
        return None
    return transport.Answer(upcall.unique, errno.ENOSYS, b"")


def accept(upcall: Kept) -> transport.Answer:
    """A write is as long as it was when it became an upcall."""
    return transport.Answer(upcall.unique, 0, struct.pack("=II", upcall.done, 0))


class FuseSocket:
    """A transport whose workers serve one file, and both of its other ends.

    A upcall is kept in ``calls`` and goes to ``on_upcall``, in the thread of its worker.
    """

    def __init__(
        self,
        engine: Engine,
        content: FileMap,
        *,
        upcalls: Iterable[int] = (),
        verify: bool = True,
        poll_ns: int = 0,
        request_bytes_max: int = REQUEST_BYTES_MAX,
        splice_bytes_min: int = 0,
        waiting_bytes_max: int = transport.WAITING_BYTES_MAX,
        absent_seconds: int = 0,
    ) -> None:
        self.engine, self.content = engine, content
        self._stream = splice_bytes_min > 0
        kind = socket.SOCK_STREAM if self._stream else socket.SOCK_SEQPACKET
        self.kernel, self._fuse = socket.socketpair(socket.AF_UNIX, kind)
        self.served, self._control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.kernel, self.served):
            end.settimeout(SECONDS_MAX)
        with contextlib.ExitStack() as undo:
            for end in (self.kernel, self._fuse, self.served, self._control):
                undo.callback(end.close)
            self.transport = Transport(
                engine,
                fuse_fd=self._fuse.fileno(),
                control_fd=self._control.fileno(),
                request_bytes_max=request_bytes_max,
                file_bytes_max=FILE_BYTES_MAX,
                upcalls=upcalls,
                verify=verify,
                poll_ns=poll_ns,
                splice_bytes_min=splice_bytes_min,
                waiting_bytes_max=waiting_bytes_max,
                absent_seconds=absent_seconds,
            )
            undo.callback(self.transport.close)
            self.port = Port(INO, content)
            undo.callback(self.port.close)
            self.transport.open_handle(READER, self.port, readable=True)
            self.transport.open_handle(WRITER, self.port, readable=False)
            undo.pop_all()
        self.upcalls: queue.Queue[Kept] = queue.Queue()
        self.on_upcall: Callable[[Kept], transport.Answer | None] = refuse
        self.errors: list[Exception] = []
        self.uniques = itertools.count(2, 2)
        self._threads: list[threading.Thread] = []

    def start(self, workers: int = 1) -> None:
        self.transport.start()
        for _ in range(workers):
            thread = threading.Thread(target=self._serve, args=(Worker(self.transport),))
            thread.start()
            self._threads.append(thread)

    def _serve(self, worker: Worker) -> None:
        try:
            answer = None
            while (upcall := worker.serve(answer)) is not None:
                kept = Kept(
                    upcall.opcode, upcall.unique, upcall.pid, bytes(upcall.arguments), upcall.done
                )
                self._check(upcall)
                self.upcalls.put(kept)
                answer = self.on_upcall(kept) if kept.opcode != UPCALL_LEASE else None
                while isinstance(answer, Unfinished):
                    if worker.put_back(answer):
                        answer = None
                    else:
                        kept = kept._replace(done=answer.done)
                        answer = self.on_upcall(kept)
        except Exception as error:  # noqa: BLE001  the test looks at them
            self.errors.append(error)

    def _check(self, upcall: Upcall) -> None:
        assert upcall.opcode == UPCALL_LEASE or upcall.inode == INO
        assert not upcall.not_durable

    def take_errors(self) -> list[Exception]:
        """Those so far, which were to be expected."""
        taken, self.errors = self.errors, []
        return taken

    def join(self) -> list[Exception]:
        for thread in self._threads:
            thread.join(SECONDS_MAX)
            assert not thread.is_alive(), "a worker goes on"
        self._threads.clear()
        return self.errors

    def close(self) -> None:
        self.transport.stop()
        self.join()
        self.port.close()
        self.transport.close()
        for end in (self.kernel, self.served, self._fuse, self._control):
            end.close()

    # --- requests -----------------------------------------------------------------------------

    def send(self, opcode: int, body: bytes = b"", *, pid: int = TID) -> int:
        unique = next(self.uniques)
        self.kernel.send(request(opcode, unique, body, pid=pid))
        return unique

    def block_answers(self) -> None:
        """From here on a worker that answers waits where some answers were not taken yet."""
        self._fuse.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least there is

    def answer(self) -> Answer:
        message = self.kernel.recv(REPLY.size if self._stream else 1 << 20)
        length, error, unique = REPLY.unpack_from(message)
        while self._stream and len(message) < length:
            part = self.kernel.recv(length - len(message))
            assert part, "the transport closed its end"
            message += part
        assert length == len(message)
        return Answer(unique, -error, message[REPLY.size :])

    def ask(self, opcode: int, body: bytes = b"", *, pid: int = TID) -> Answer:
        unique = self.send(opcode, body, pid=pid)
        answer = self.answer()
        assert answer.unique == unique
        return answer

    def read(self, offset: int, size: int, *, handle: int = READER) -> Answer:
        return self.ask(READ, IN.pack(handle, offset, size))

    def write(self, offset: int, data: bytes, *, handle: int = WRITER, pid: int = TID) -> Answer:
        return self.ask(WRITE, IN.pack(handle, offset, len(data)) + data, pid=pid)

    def upcall(self) -> Kept:
        """The next upcall."""
        return self.upcalls.get(timeout=SECONDS_MAX)

    def no_upcall(self) -> bool:
        return self.upcalls.empty()


@contextlib.contextmanager
def fuse_socket(
    engine: Engine,
    content: FileMap,
    *,
    upcalls: Iterable[int] = (),
    verify: bool = True,
    workers: int = 1,
    poll_ns: int = 0,
    request_bytes_max: int = REQUEST_BYTES_MAX,
    splice_bytes_min: int = 0,
    waiting_bytes_max: int = transport.WAITING_BYTES_MAX,
    absent_seconds: int = 0,
) -> Iterator[FuseSocket]:
    """Started; the writer's thread TID may write without calls."""
    made = FuseSocket(
        engine,
        content,
        upcalls=upcalls,
        verify=verify,
        poll_ns=poll_ns,
        request_bytes_max=request_bytes_max,
        splice_bytes_min=splice_bytes_min,
        waiting_bytes_max=waiting_bytes_max,
        absent_seconds=absent_seconds,
    )
    try:
        made.start(workers)
        made.transport.allow_writes(WRITER, TID)
        yield made
    finally:
        made.close()
