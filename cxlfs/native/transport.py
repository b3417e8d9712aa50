"""The threads that serve file data on /dev/fuse: the Python face of ``cxl_transport``.

Never: mounts, closes a descriptor, decides what a request means.

Invariants
- No byte of file data is handled here: an upcall's data is a view of the kernel's buffer.
- Every upcall but UPCALL_LEASE is answered exactly once.
- A transport keeps its engine alive; what was closed raises.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from cxlfs._native import ffi, lib
from cxlfs.errors import InvariantError, invariant
from cxlfs.native.extent_calls import NOT_DURABLE, failure

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from cxlfs.native.extents import Engine
    from cxlfs.native.maps import FileMap


_UPCALL = struct.Struct("=IIIIQQQQQi4x")
"""``cxl_upcall``: taken as a whole, as each field by its name takes as long."""
invariant(_UPCALL.size == ffi.sizeof("cxl_upcall"), "an upcall has the layout of C")
_COPIED_BYTES_MAX = 4096
"""Arguments of that size are copied: to take them apart in place takes longer."""
_serve = lib.cxl_worker_serve
_new = tuple.__new__

UPCALL_LEASE = 0
"""Opcode of an upcall that needs no answer: the file of ``inode`` will soon want another lease."""
ABSENT_NAMES_MAX: int = lib.CXL_ABSENT_NAMES_MAX
"""So many names that mean nothing are kept, the last ones."""
WAITING_BYTES_MAX = 64 << 20
"""Of requests that wait for a worker or for the socket: dozens of large writes, as many small ones
as there can be threads that wait for them.
"""


class Upcall(NamedTuple):
    """A request that a worker's thread takes to the control plane, before it serves on.

    ``opcode``: of the FUSE protocol. ``pid``: the calling thread, 0 when the kernel itself asks.
    ``arguments``: what follows the header. ``done``: bytes of a WRITE that are already in the live
    content; when a SYNCFS that goes on was begun, ns. ``not_durable``: a fence failed under it (see
    ``MediaError``).
    """

    opcode: int
    unique: int
    inode: int
    uid: int
    gid: int
    pid: int
    arguments: bytes | memoryview
    done: int
    not_durable: bool


class Answer(NamedTuple):
    """To an upcall: an errno, or 0 and data."""

    unique: int
    error: int
    data: bytes


_NO_ANSWER = Answer(0, 0, b"")


class Unfinished(NamedTuple):
    """Of an upcall that is to go on after others had their turn; of a WRITE ``done`` bytes are in
    the live content by now, a SYNCFS was begun then.
    """

    done: int


class TransportStatistics(NamedTuple):
    """Requests and bytes since the start; ``waited``: upcalls and forwarded requests that could not
    go at once; ``ahead_bytes``: of reads, verified before they were asked for; ``direct_mapping``:
    the kernel lets files that bypass its page cache be mapped; ``active_workers``: that do not rest
    just now, ``busy_workers``: of these, serve a request; ``stays``: who serves one thread alone
    stays on its processor, as was quicker in the last of ``trials``.
    """

    reads: int
    writes: int
    read_bytes: int
    write_bytes: int
    upcalls: int
    forwarded: int
    waited: int
    read_copies: int
    spliced_reads: int
    ahead_bytes: int
    direct_mapping: bool
    active_workers: int
    busy_workers: int
    stays: bool
    trials: int


class Transport:
    """Serves READ and WRITE of ``fuse_fd`` in its workers, and passes the rest on.

    ``control_fd``: an end of a SOCK_SEQPACKET pair. ``upcalls``: opcodes that become some, beside
    READ and WRITE that cannot be served. ``request_bytes_max``: in whole pages, of which the kernel
    is told; ``read_bytes_max``: what it reads at most, where that is less. ``poll_ns``: how long a
    worker that serves alone looks for the next request before it sleeps. ``splice_bytes_min``:
    reads from this size on are answered through a pipe (0: none), which needs a descriptor that
    takes an answer in parts, as /dev/fuse does. ``waiting_bytes_max``: of upcalls that wait for a
    worker, and of requests that wait for the socket. ``absent_seconds``: how long the kernel may
    remember that a name is absent. The descriptors stay the caller's, open until
    :meth:`close`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        fuse_fd: int,
        control_fd: int,
        request_bytes_max: int,
        file_bytes_max: int,
        upcalls: Iterable[int],
        verify: bool,
        poll_ns: int = 0,
        splice_bytes_min: int = 0,
        read_bytes_max: int | None = None,
        waiting_bytes_max: int = WAITING_BYTES_MAX,
        absent_seconds: int = 0,
    ) -> None:
        self._transport: Any = None
        self._fuse_fd = fuse_fd
        self.engine = engine
        settings = {
            "file_size_max": file_bytes_max,
            "upcalls": sum(1 << opcode for opcode in upcalls),
            "poll_ns": poll_ns,
            "splice_min": splice_bytes_min,
            "request_max": request_bytes_max,
            "read_max": request_bytes_max if read_bytes_max is None else read_bytes_max,
            "waiting_bytes_max": waiting_bytes_max,
            "verify": verify,
            "absent_seconds": absent_seconds,
        }
        out = ffi.new("cxl_transport **")
        code = lib.cxl_transport_new(
            engine.handle, fuse_fd, control_fd, ffi.new("cxl_transport_settings *", settings), out
        )
        if code != 0:
            raise failure(code, "make a transport")
        self._transport = out[0]

    @property
    def handle(self) -> Any:
        """The ``cxl_transport *``."""
        if self._transport is None or self.engine.closed:
            raise InvariantError("the transport is closed")
        return self._transport

    def start(self) -> None:
        """Pass answers from the socket on. Raises InvariantError (no thread could be started)."""
        code = lib.cxl_transport_start(self.handle)
        if code != 0:
            raise failure(code, "start a thread of the transport")

    def stay_with_client(self, *, stays: bool | None) -> None:
        """Whether a worker that serves one thread alone stays on its processor. None, as at first:
        both are tried on its requests (csrc/transport/trial.c).
        """
        lib.cxl_transport_stay(self.handle, -1 if stays is None else stays)

    def stop(self) -> None:
        """No request is read afterwards: every :meth:`Worker.serve` returns. Idempotent.

        The threads may still be busy with an upcall: they end before :meth:`close`.
        """
        if self._transport is not None:
            lib.cxl_transport_stop(self._transport)

    def close(self) -> None:
        """Let go of everything, workers included; before the engine is closed, and after the
        threads have ended. Idempotent.
        """
        transport, self._transport = self._transport, None
        if transport is not None:
            invariant(not self.engine.closed, "the transport ends before its engine")
            lib.cxl_transport_free(transport)

    # ---------------------------------------------------------------------------------- answers

    def reply(self, unique: int, data: Buffer = b"") -> None:
        """Answer an upcall at once. A requester who has gone away meanwhile is no error."""
        view = ffi.from_buffer(data)
        lib.cxl_transport_reply(self.handle, unique, 0, view, len(view))

    # ----------------------------------------------------------------------------------- handles

    def open_handle(self, handle: int, port: Port, *, readable: bool) -> None:
        """The kernel knows ``port``'s file by this handle, too; reads need no upcall."""
        code = lib.cxl_handle_open(self.handle, handle, port.handle, readable)
        if code != 0:
            raise failure(code, f"open handle {handle}")

    def close_handle(self, handle: int) -> None:
        lib.cxl_handle_close(self.handle, handle)

    def allow_writes(self, handle: int, pid: int) -> None:
        """Writes by the thread ``pid`` need no upcall from here on, until the port is stopped."""
        lib.cxl_handle_allow(self.handle, handle, pid)

    # ------------------------------------------------------------------------------------- names

    def note_absent(self, directory: int, name: bytes) -> None:
        """The name means nothing: LOOKUP of it needs no upcall, until it is taken back, or
        ``ABSENT_NAMES_MAX`` more are noted.
        """
        lib.cxl_absent_note(self.handle, directory, name, len(name))

    def take_absent_back(self, directory: int, name: bytes) -> None:
        """It may mean something; nobody is being told otherwise when this returns."""
        lib.cxl_absent_take_back(self.handle, directory, name, len(name))

    def take_all_absent_back(self) -> None:
        """The same of all names."""
        lib.cxl_absent_take_all_back(self.handle)

    # --------------------------------------------------------------------------------- the rest

    def invalidate(self, inode: int, attributes_only: bool) -> None:  # noqa: FBT001  as pyfuse3's
        """Make the kernel forget what it caches of ``inode``. Raises OSError.

        Waits for requests that are being served: not for the thread that serves upcalls. The
        descriptor stays open meanwhile; the transport may be closed.
        """
        code = lib.cxl_fuse_invalidate(self._fuse_fd, inode, attributes_only)
        if code != 0:
            raise OSError(-code, os.strerror(-code))

    def notify(self, message: bytes) -> None:
        """Tell the kernel something that it has not asked for. Raises OSError. Waits as
        :meth:`invalidate` does.
        """
        os.write(self._fuse_fd, message)

    def statistics(self) -> TransportStatistics:
        out = ffi.new("cxl_transport_stats *")
        lib.cxl_transport_statistics(self.handle, out)
        return TransportStatistics(
            out.reads,
            out.writes,
            out.read_bytes,
            out.write_bytes,
            out.upcalls,
            out.forwarded,
            out.waited,
            out.read_copies,
            out.spliced_reads,
            out.ahead_bytes,
            bool(out.direct_mapping),
            out.active_workers,
            out.busy_workers,
            bool(out.stays),
            out.trials,
        )


class Worker:
    """Serves requests in the thread that calls :meth:`serve`; one thread at a time."""

    __slots__ = ("_fields", "_transport", "_upcall", "_worker")

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        out = ffi.new("cxl_worker **")
        code = lib.cxl_worker_new(transport.handle, out)
        if code != 0:
            raise failure(code, "make a worker")
        self._worker = out[0]
        self._upcall = ffi.new("cxl_upcall *")
        self._fields = ffi.buffer(self._upcall)

    def put_back(self, unfinished: Unfinished) -> bool:
        """The upcall of the last :meth:`serve` goes on later, behind those that wait: it comes from
        a :meth:`serve` again. False: none waits, or there is no room for it.
        """
        self._upcall.done = unfinished.done
        return bool(lib.cxl_worker_put_back(self._worker, self._upcall))

    def serve(self, answer: Answer | None = None) -> Upcall | None:
        """Give the answer to the upcall before, if it is not given yet; then serve until there is
        another one, or, with None, until stopped or unmounted.

        Both in one step, because giving up the interpreter's lock and waiting for it again costs
        more than either. The upcall and its arguments are valid until the next :meth:`serve`.
        Raises OSError when /dev/fuse fails.
        """
        invariant(self._transport.handle, "a transport lives as long as its workers serve")
        upcall = self._upcall
        unique, error, data = answer if answer is not None else _NO_ANSWER
        code = _serve(self._worker, unique, error, data, len(data), upcall)
        if code == 0:
            return None
        if code < 0:
            raise OSError(-code, os.strerror(-code))
        opcode, uid, gid, pid, unique, inode, _, length, done, error = _UPCALL.unpack(self._fields)
        arguments = ffi.buffer(upcall.arguments, length)
        if length <= _COPIED_BYTES_MAX:
            arguments = arguments[:]
        else:
            arguments = memoryview(arguments).toreadonly()
        return _new(
            Upcall,
            (opcode, unique, inode, uid, gid, pid, arguments, done, error == NOT_DURABLE),
        )


class Port:
    """One open file as the threads see it: its live content, and whether they may write to it."""

    __slots__ = ("_engine", "_port")

    def __init__(self, inode: int, content: FileMap) -> None:
        self._port: Any = None
        self._engine = content.engine
        out = ffi.new("cxl_port **")
        code = lib.cxl_port_new(inode, content.handle, out)
        if code != 0:
            raise failure(code, "open a port")
        self._port = out[0]

    @property
    def handle(self) -> Any:
        if self._port is None or self._engine.closed:
            raise InvariantError("the port, or its engine, is closed")
        return self._port

    def set_content(self, content: FileMap) -> None:
        """The live content is this one now; between :meth:`stop` and the next permission."""
        lib.cxl_port_set_map(self.handle, content.handle)

    def stop(self) -> int:
        """Make every write an upcall from here on; returns as :meth:`written`.

        Waits for writes that are being copied, which wait for nothing else.
        """
        return int(lib.cxl_port_stop(self.handle))

    def written(self) -> int:
        """When the threads last wrote, ns since the epoch, if they did since the last question."""
        return int(lib.cxl_port_written(self.handle))

    def ask(self, asks: bool) -> None:  # noqa: FBT001  the protocol of ports
        """Whether every read and write is an upcall, whoever is allowed; what is under way goes on,
        and permissions stay.
        """
        lib.cxl_port_ask(self.handle, asks)

    def close(self) -> None:
        """After the last handle, and before the engine is closed. Idempotent."""
        port, self._port = self._port, None
        if port is not None:
            invariant(not self._engine.closed, "a port ends before its engine")
            lib.cxl_port_free(port)
