"""Requests that a worker hands over as they came from the kernel, served without libfuse and trio.

These are the frequent ones (saving a small file over an old one takes nine requests, of which six
are here, and none goes over the socket pair to trio and pyfuse3, which costs 0.15 ms of CPU time
each; the others, a WRITE, the question whether it is a terminal and the one for the temporary name,
are the worker's) and those for which pyfuse3 has no handler.

Never here: what a request means (``requests``), errno values (``boundary``).

Invariants
- Every call that wants an answer gets one, whatever happens.
- The lock is held from the first look at the store to the last, and not while the kernel copies
  the answer, but for data that lies in the media, and what the kernel must know first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from cxlfs.errors import AttributeLongerError, InvalidArgumentError, MediaError
from cxlfs.fuse import kernel
from cxlfs.fuse.boundary import outcome_of
from cxlfs.fuse.handles import Caller, Opened
from cxlfs.fuse.kernel import Opcode
from cxlfs.fuse.past_direct import PastDirect
from cxlfs.native.transport import UPCALL_LEASE, Answer, Unfinished, Upcall
from cxlfs.store import UnfinishedError
from cxlfs.store.namespace import Attributes

if TYPE_CHECKING:
    from cxlfs.fuse.requests import Requests
    from cxlfs.native.transport import Transport

_Handler: TypeAlias = Callable[[Upcall], bytes | memoryview]

_COPY_BYTES_MAX = 1 << 30
"""What one COPY_FILE_RANGE takes: its reply has 32 bits, and others want their turn."""


class Direct:
    """Serves the calls of one transport. ``on_lease``: called, without the lock, when a file that
    is being written was given room ahead, and there is some to be mapped (``Space.room_ahead``).
    """

    def __init__(
        self,
        requests: Requests,
        transport: Transport,
        *,
        on_lease: Callable[[], None] = lambda: None,
    ) -> None:
        self._requests = requests
        self._access = requests.direct_access
        self._store = requests.store
        self._transport = transport
        self._on_lease = on_lease
        self._past = PastDirect(requests.past, is_direct=requests.page_cache.is_direct)
        self._handlers: dict[int, _Handler] = {
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
            Opcode.IOCTL: self._ioctl,
            Opcode.GETXATTR: self._getxattr,
            Opcode.READ: self._read,
            Opcode.WRITE: self._write,
            Opcode.FALLOCATE: self._fallocate,
            Opcode.LSEEK: self._lseek,
            Opcode.COPY_FILE_RANGE: self._copy,
            Opcode.SYNCFS: self._syncfs,
        }

    def serve(self, upcall: Upcall) -> Answer | Unfinished | None:
        """Serve one call; returns the answer that the kernel still waits for, or that others should
        have their turn before it goes on. Raises nothing.
        """
        if upcall.opcode == UPCALL_LEASE:
            self._lease(upcall)
            return None
        requests = self._requests
        handler = self._past.handler(upcall) or self._handlers.get(upcall.opcode, self._unknown)
        with requests.lock:
            requests.caller = upcall.pid
            requests.user = upcall.uid
            try:
                error, result = outcome_of(requests.failures, handler.__name__, handler, upcall)
            except UnfinishedError as unfinished:
                return Unfinished(unfinished.done)
            if isinstance(result, memoryview):
                # Of the media, or attributes that others must not outrun: it may not be so any more
                # as soon as somebody else uses the store.
                self._transport.reply(upcall.unique, result)
                return None
        if upcall.opcode in _UNANSWERED:
            return None
        return Answer(upcall.unique, error, result or b"")

    def _unknown(self, upcall: Upcall) -> bytes:
        raise InvalidArgumentError(f"a request of an unexpected kind: {upcall.opcode}")

    # --- names --------------------------------------------------------------------------------

    def _lookup(self, upcall: Upcall) -> bytes | memoryview:
        (name,) = kernel.names(upcall.arguments, 0)
        return self._entry(self._requests.find(upcall.inode, name))

    def _entry(self, attributes: Attributes | None, opened: bytes = b"") -> bytes | memoryview:
        if attributes is None:
            return kernel.entry_reply(attributes) + opened
        name_seconds = self._requests.name_seconds(attributes.ino)
        if not self._access.has_grown(attributes.ino):
            return kernel.entry_reply(attributes, name_seconds=name_seconds) + opened
        seconds = self._access.told(attributes.ino)
        reply = kernel.entry_reply(attributes, seconds, name_seconds=name_seconds)
        return memoryview(reply + opened)

    def _forget(self, upcall: Upcall) -> bytes:
        self._requests.forget_all([(upcall.inode, *kernel.NUMBER.unpack_from(upcall.arguments))])
        return b""

    def _batch_forget(self, upcall: Upcall) -> bytes:
        pairs = upcall.arguments[kernel.BATCH_FORGET.size :]
        whole = len(pairs) // kernel.FORGET_ONE.size * kernel.FORGET_ONE.size
        self._requests.forget_all(kernel.FORGET_ONE.iter_unpack(pairs[:whole]))
        return b""

    def _getattr(self, upcall: Upcall) -> bytes | memoryview:
        self._requests.releases.wait_for(upcall.inode)
        attributes = self._store.get_attributes(upcall.inode)
        if not self._access.has_grown(upcall.inode):
            return kernel.attributes_reply(attributes)
        return memoryview(kernel.attributes_reply(attributes, self._access.told(upcall.inode)))

    def _unlink(self, upcall: Upcall) -> bytes:
        (name,) = kernel.names(upcall.arguments, 0)
        self._requests.remove(upcall.inode, name)
        return b""

    def _rename(self, upcall: Upcall) -> bytes:
        (directory,) = kernel.NUMBER.unpack_from(upcall.arguments)
        old, new = kernel.names(upcall.arguments, kernel.NUMBER.size)
        self._requests.move(upcall.inode, old, directory, new, 0)
        return b""

    def _rename2(self, upcall: Upcall) -> bytes:
        directory, flags, _ = kernel.NUMBER_AND_FLAGS.unpack_from(upcall.arguments)
        old, new = kernel.names(upcall.arguments, kernel.NUMBER_AND_FLAGS.size)
        self._requests.move(upcall.inode, old, directory, new, flags)
        return b""

    # --- files --------------------------------------------------------------------------------

    def _create(self, upcall: Upcall) -> bytes | memoryview:
        flags, mode, _, _ = kernel.CREATE.unpack_from(upcall.arguments)
        (name,) = kernel.names(upcall.arguments, kernel.CREATE.size)
        attributes, opened = self._requests.create_file(
            upcall.inode, name, mode, flags, _caller(upcall)
        )
        return self._entry(attributes, _opened_reply(opened))

    def _open(self, upcall: Upcall) -> bytes:
        flags, _ = kernel.OPEN.unpack_from(upcall.arguments)
        opened = self._requests.open_file(upcall.inode, flags, _caller(upcall))
        return _opened_reply(opened)

    def _flush(self, upcall: Upcall) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(upcall.arguments)
        self._requests.flush_by(upcall.pid, handle)
        return b""

    def _release(self, upcall: Upcall) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(upcall.arguments)
        self._requests.release_file(handle)
        return b""

    def _fsync(self, upcall: Upcall) -> bytes:
        (handle,) = kernel.NUMBER.unpack_from(upcall.arguments)
        self._store.fsync(handle)
        return b""

    def _ioctl(self, upcall: Upcall) -> bytes:
        """Others than those of direct access do not come here (csrc/transport/transport.c)."""
        handle, _, command, _, _, _ = kernel.IOCTL.unpack_from(upcall.arguments)
        data = upcall.arguments[kernel.IOCTL.size :]
        answer = self._access.answer(command, handle, _caller(upcall), data)
        return kernel.IOCTL_ANSWER.pack(0, 0, 0, 0) + answer

    def _getxattr(self, upcall: Upcall) -> bytes:
        """The kernel asks for file capabilities before each change of a file but by writing."""
        (room,) = kernel.GETXATTR.unpack_from(upcall.arguments)
        (name,) = kernel.names(upcall.arguments, kernel.GETXATTR.size)
        value = self._requests.xattr(upcall.inode, name)
        if room == 0:
            return kernel.GETXATTR.pack(len(value))
        if len(value) > room:
            raise AttributeLongerError(f"{len(value)} bytes, and room for {room}")
        return value

    # --- data ---------------------------------------------------------------------------------

    def _read(self, upcall: Upcall) -> bytes | memoryview:
        handle, offset, size = kernel.READ.unpack_from(upcall.arguments)
        return self._store.read(handle, offset, size)

    def _write(self, upcall: Upcall) -> bytes:
        handle, offset, size, flags, file_flags = kernel.WRITE.unpack_from(upcall.arguments)
        data = upcall.arguments[kernel.WRITE.size :]
        if len(data) != size:
            raise InvalidArgumentError(f"a write of {size} bytes came with {len(data)}")
        if upcall.not_durable:
            error = MediaError("a fence failed under a write", not_durable=True)
            self._store.media_failed(error)
            raise error
        is_write_back = bool(flags & kernel.WRITE_CACHE)
        # A page is written back through any handle that is open for writing, whatever its flags.
        appends = bool(file_flags & os.O_APPEND) and not is_write_back
        end = self._access.appends_at(handle, offset) if appends else None
        written = self._requests.write_by(
            upcall.pid,
            handle,
            offset if end is None else end,
            data,
            done=upcall.done,
            in_steps=end is None,
            is_write_back=is_write_back,
        )
        return kernel.WRITTEN.pack(written)

    def _lease(self, upcall: Upcall) -> None:
        """Room for a file that is being written. Nothing else: while this thread is away, one fewer
        takes the requests of the writer.
        """
        with self._requests.lock:
            _, is_given = outcome_of(
                self._requests.failures,
                "a lease ahead",
                lambda: self._store.files.lease_ahead(upcall.inode),
            )
            tells = is_given is not None and self._store.volume.space.has_room_ahead
        if tells:
            self._on_lease()

    def _fallocate(self, upcall: Upcall) -> bytes:
        handle, offset, length, mode = kernel.FALLOCATE.unpack_from(upcall.arguments)
        self._requests.allocate(handle, offset, length, mode)
        return b""

    def _lseek(self, upcall: Upcall) -> bytes:
        handle, offset, whence = kernel.LSEEK.unpack_from(upcall.arguments)
        return kernel.NUMBER.pack(self._store.seek(handle, offset, whence))

    def _copy(self, upcall: Upcall) -> bytes:
        handle_in, offset_in, _, handle_out, offset_out, length, flags = kernel.COPY.unpack_from(
            upcall.arguments
        )
        if flags:
            raise InvalidArgumentError(f"copy flags not known: {flags:#x}")
        copied = self._requests.copy_range(
            handle_in, offset_in, handle_out, offset_out, min(length, _COPY_BYTES_MAX)
        )
        return kernel.WRITTEN.pack(copied)

    def _syncfs(self, upcall: Upcall) -> bytes:
        began_ns = upcall.done or time.monotonic_ns()
        if self._store.commits.sync_step(began_ns / 1e9):
            raise UnfinishedError(began_ns)
        return b""


def _caller(upcall: Upcall) -> Caller:
    return Caller(upcall.uid, upcall.gid, upcall.pid)


def _opened_reply(opened: Opened) -> bytes:
    return kernel.opened_reply(
        opened.handle,
        direct=opened.direct,
        keep_cache=opened.keep_cache,
        writable=opened.writable,
    )


_UNANSWERED = frozenset({Opcode.FORGET, Opcode.BATCH_FORGET})

UPCALLS = frozenset(Opcode)
"""Opcodes that a transport is to hand over."""
