"""Requests that a worker hands over as they came from the kernel, served without libfuse and trio.

These are the frequent ones (saving a small file takes nine requests, eight of them are here: the
way over the socket pair, trio and pyfuse3 costs 0.15 ms of CPU time for each) and those for which
pyfuse3 has no handler.

Never here: what a request means (``requests``), errno values (``boundary``).

Invariants
- Every call that wants an answer gets one, whatever happens.
- The lock is held from the first look at the store to the last, and not while the kernel copies
  the answer, but for data that lies in the media.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from cxlfs.errors import InvalidArgumentError, MediaError
from cxlfs.fuse import kernel
from cxlfs.fuse.boundary import outcome_of
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.requests import Caller, Opened
from cxlfs.native.transport import CALL_LEASE, Answer, Call

if TYPE_CHECKING:
    from cxlfs.fuse.requests import Requests
    from cxlfs.native.transport import Transport

_Handler: TypeAlias = Callable[[Call], bytes | memoryview]

_COPY_BYTES_MAX = 1 << 30
"""What one COPY_FILE_RANGE takes: its reply has 32 bits, and others want their turn."""


class Direct:
    """Serves the calls of one transport."""

    def __init__(self, requests: Requests, transport: Transport) -> None:
        self._requests = requests
        self._store = requests.store
        self._transport = transport
        self._handlers: dict[int, _Handler] = {
            CALL_LEASE: self._lease,
            Opcode.LOOKUP: self._lookup,
            Opcode.FORGET: self._forget,
            Opcode.BATCH_FORGET: self._batch_forget,
            Opcode.GETATTR: self._getattr,
            Opcode.UNLINK: self._unlink,
            Opcode.RENAME: self._rename,
            Opcode.RENAME2: self._rename2,
            Opcode.CREATE: self._create,
            Opcode.OPEN: self._open,
            Opcode.FLUSH: self._flush,
            Opcode.RELEASE: self._release,
            Opcode.FSYNC: self._fsync,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.FALLOCATE: self._fallocate,
            Opcode.LSEEK: self._lseek,
            Opcode.COPY_FILE_RANGE: self._copy,
            Opcode.SYNCFS: self._syncfs,
        }

    def serve(self, call: Call) -> Answer | None:
        """Serve one call; returns the answer that the kernel still waits for. Raises nothing."""
        handler = self._handlers.get(call.opcode, self._unknown)
        with self._requests.lock:
            error, result = outcome_of(
                self._requests.failures, f"request {call.opcode}", lambda: handler(call)
            )
            if isinstance(result, memoryview):
                # Of the media: it may go another way as soon as somebody else uses the store.
                self._transport.reply(call.unique, result)
                return None
        if call.opcode in _UNANSWERED:
            return None
        return Answer(call.unique, error, result or b"")

    def _unknown(self, call: Call) -> bytes:
        raise InvalidArgumentError(f"a request of an unexpected kind: {call.opcode}")

    # --- names --------------------------------------------------------------------------------

    def _lookup(self, call: Call) -> bytes:
        (name,) = kernel.names(call.arguments, 0)
        return kernel.entry_reply(self._requests.find(call.inode, name))

    def _forget(self, call: Call) -> bytes:
        self._requests.forget_all([(call.inode, *kernel.NUMBER.unpack_from(call.arguments))])
        return b""

    def _batch_forget(self, call: Call) -> bytes:
        pairs = call.arguments[kernel.BATCH_FORGET.size :]
        whole = len(pairs) // kernel.FORGET_ONE.size * kernel.FORGET_ONE.size
        self._requests.forget_all(kernel.FORGET_ONE.iter_unpack(pairs[:whole]))
        return b""

    def _getattr(self, call: Call) -> bytes:
        return kernel.attributes_reply(self._store.get_attributes(call.inode))

    def _unlink(self, call: Call) -> bytes:
        (name,) = kernel.names(call.arguments, 0)
        self._requests.remove(call.inode, name)
        return b""

    def _rename(self, call: Call) -> bytes:
        (directory,) = kernel.NUMBER.unpack_from(call.arguments)
        old, new = kernel.names(call.arguments, kernel.NUMBER.size)
        self._requests.move(call.inode, old, directory, new, 0)
        return b""

    def _rename2(self, call: Call) -> bytes:
        directory, flags, _ = kernel.NUMBER_AND_FLAGS.unpack_from(call.arguments)
        old, new = kernel.names(call.arguments, kernel.NUMBER_AND_FLAGS.size)
        self._requests.move(call.inode, old, directory, new, flags)
        return b""

    # --- files --------------------------------------------------------------------------------

    def _create(self, call: Call) -> bytes:
        flags, mode, _, _ = kernel.CREATE.unpack_from(call.arguments)
        (name,) = kernel.names(call.arguments, kernel.CREATE.size)
        attributes, opened = self._requests.create_file(
            call.inode, name, mode, flags, _caller(call)
        )
        return kernel.entry_reply(attributes) + _opened_reply(opened)

    def _open(self, call: Call) -> bytes:
        flags, _ = kernel.OPEN.unpack_from(call.arguments)
        opened = self._requests.open_file(call.inode, flags, _caller(call))
        return _opened_reply(opened)

    def _flush(self, call: Call) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(call.arguments)
        self._requests.flush_by(call.pid, handle)
        return b""

    def _release(self, call: Call) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(call.arguments)
        self._requests.release_file(handle)
        return b""

    def _fsync(self, call: Call) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(call.arguments)
        self._store.fsync(handle)
        return b""

    # --- data ---------------------------------------------------------------------------------

    def _read(self, call: Call) -> bytes | memoryview:
        handle, offset, size = kernel.READ.unpack_from(call.arguments)
        return self._store.read(handle, offset, size)

    def _write(self, call: Call) -> bytes:
        handle, offset, size = kernel.WRITE.unpack_from(call.arguments)
        data = call.arguments[kernel.WRITE.size :]
        if len(data) != size:
            raise InvalidArgumentError(f"a write of {size} bytes came with {len(data)}")
        if call.not_durable:
            error = MediaError("a fence failed under a write", not_durable=True)
            self._store.media_failed(error)
            raise error
        written = self._requests.write_by(call.pid, handle, offset, data, done=call.done)
        if self._requests.may_write_alone(handle):
            self._transport.allow_writes(handle, call.pid)
            self._store.files.lease_ahead(call.inode)
        return kernel.WRITTEN.pack(written)

    def _lease(self, call: Call) -> bytes:
        self._store.files.lease_ahead(call.inode)
        return b""

    def _fallocate(self, call: Call) -> bytes:
        handle, offset, length, mode = kernel.FALLOCATE.unpack_from(call.arguments)
        self._requests.allocate(handle, offset, length, mode)
        return b""

    def _lseek(self, call: Call) -> bytes:
        handle, offset, whence = kernel.LSEEK.unpack_from(call.arguments)
        return kernel.NUMBER.pack(self._store.seek(handle, offset, whence))

    def _copy(self, call: Call) -> bytes:
        handle_in, offset_in, _, handle_out, offset_out, length, flags = kernel.COPY.unpack_from(
            call.arguments
        )
        if flags:
            raise InvalidArgumentError(f"copy flags not known: {flags:#x}")
        copied = self._requests.copy_range(
            handle_in, offset_in, handle_out, offset_out, min(length, _COPY_BYTES_MAX)
        )
        return kernel.WRITTEN.pack(copied)

    def _syncfs(self, _call: Call) -> bytes:
        self._store.sync()
        return b""


def _caller(call: Call) -> Caller:
    return Caller(call.uid, call.gid, call.pid)


def _opened_reply(opened: Opened) -> bytes:
    return kernel.opened_reply(opened.handle, direct=opened.direct, keep_cache=opened.keep_cache)


_UNANSWERED = frozenset({CALL_LEASE, Opcode.FORGET, Opcode.BATCH_FORGET})

CALLS = frozenset(Opcode)
"""Opcodes that a transport is to hand over."""
