"""The control socket of a running daemon: status, list and whatever else is registered.

Handlers are synchronous generators over the store; between two of their messages other requests
are served, so a handler that works in slices never holds the mount up.

Never here: printing, waiting inside a handler.

Invariants
- The socket is in a directory that only its owner may write to. Other users than root and the owner
  are let in where they may use the mount, for requests in ``OF_USERS``; few of each user at a time.
- A request line is bounded; a bad one gets an ``exit_error``, never a traceback to the peer.
- What a handler raises ends that request only. Defects are reported like those of FUSE handlers.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import json
import logging
import os
import socket
import uuid as uuid_module
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import trio

from cxlfs.control.client import AWAIT_CLOSE, short_socket_name
from cxlfs.control.wire import error_to_dict
from cxlfs.daemon.callers import READ, SEARCH, Caller, caller_of
from cxlfs.errors import (
    BusyError,
    CxlfsError,
    InvariantError,
    NotPermittedError,
    UsageError,
)
from cxlfs.fuse.boundary import Owner
from cxlfs.store import Store
from cxlfs.verify import inspect

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 64 << 10
_BACKLOG = 128
OF_USERS = frozenset({"status", "list", "history", "restore", "undelete", "forget", "policy"})
"""Requests whose handlers answer a user with what is his."""
_CONNECTIONS_EACH_MAX = 8
"""Of one user who does not manage the mount, at a time."""
_READ_SECONDS_MAX = 10.0
"""Until such a user's request is there."""

Message = dict[str, object]
Handler = Callable[[Store, Mapping[str, object], Caller], Iterator[Message]]


def status(store: Store, parameters: Mapping[str, object], caller: Caller) -> Iterator[Message]:
    """One message: what the store counts, and the media below it."""
    del parameters
    told = inspect.status(store)
    damaged = store.statistics().damaged_paths
    told["damaged_paths"] = [path for path in damaged if caller.can_reach(store, os.fsencode(path))]
    yield {"message_type": "status", **told}


def list_checkpoints(
    store: Store, parameters: Mapping[str, object], caller: Caller
) -> Iterator[Message]:
    """One message per checkpoint below ``path``."""
    path = parameters.get("path", "/")
    if not isinstance(path, str):
        raise UsageError("list: path must be text")
    caller.require_reach(store, os.fsencode(path), READ | SEARCH)
    # What programs that are gone have left is decided first, as for whoever lists the directory.
    if store.units.has_open and not store.read_only:
        with contextlib.suppress(CxlfsError):
            store.units.settle()
    # Taken in one go: other requests may change the namespace between two messages.
    for entry in list(store.list_checkpoints(os.fsencode(path))):
        yield {"message_type": "entry", **plain_dict(entry)}


DEFAULT_HANDLERS: dict[str, Handler] = {"status": status, "list": list_checkpoints}
"""``verify`` and ``dump`` are added by who can do them."""


def plain_dict(value: object) -> Message:
    """A dataclass as JSON can carry it: a uuid in its usual form, other bytes as text that
    ``os.fsencode`` turns back.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        raise TypeError("a dataclass instance is needed")
    return {
        field.name: _plain(field.name, getattr(value, field.name))
        for field in dataclasses.fields(value)
    }


def _plain(name: str, value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain_dict(value)
    if isinstance(value, bytes):
        return str(uuid_module.UUID(bytes=value)) if name == "uuid" else os.fsdecode(value)
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    return value


class ControlServer:
    """Listens from :meth:`listen` on, answers while :meth:`serve` runs. ``lets_users_in``: other
    users may use the mount, and ask.
    """

    def __init__(
        self,
        store: Store,
        owner: Owner,
        handlers: Mapping[str, Handler] | None = None,
        *,
        lets_users_in: bool = False,
    ) -> None:
        self._store = store
        self._owner = owner
        self._handlers = dict(DEFAULT_HANDLERS if handlers is None else handlers)
        self._lets_users_in = lets_users_in
        self._connections: collections.Counter[int] = collections.Counter()
        """Of users who do not manage the mount, by number."""
        self._closed = trio.Event()
        self._close_error: Exception | None = None
        self._waiting = 0
        self._all_told = trio.Event()
        self._channel: socket.socket | None = None
        self._path: Path | None = None

    def register(self, name: str, handler: Handler) -> None:
        self._handlers[name] = handler

    def listen(self, path: Path) -> None:
        """Take over ``path``: the store's lock says that no other daemon can be behind it."""
        path.unlink(missing_ok=True)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        with short_socket_name(path) as name:
            channel.bind(name)
        path.chmod(0o666 if self._lets_users_in else 0o600)
        channel.listen(_BACKLOG)
        self._channel = channel
        self._path = path

    async def serve(self) -> None:
        """Answer until cancelled."""
        if self._channel is None:
            raise InvariantError("listen comes first")
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(self._channel))
        await trio.serve_listeners(self._connection, [listener])

    async def close(self, error: Exception | None, *, seconds_max: float) -> None:
        """The store is closed (``error``: how that failed): tell whoever waits for it."""
        self.hide()
        self._close_error = error
        self._closed.set()
        if self._waiting:
            with trio.move_on_after(seconds_max):
                await self._all_told.wait()

    def hide(self) -> None:
        """Take no new connections. To be called before the lock on the source ends: the next daemon
        of the store listens at the same path.
        """
        path, self._path = self._path, None
        if path is not None:
            path.unlink(missing_ok=True)

    async def _connection(self, stream: trio.SocketStream) -> None:
        try:
            async with stream:
                caller = caller_of(stream.socket.getsockopt)
                answer = self._answer if caller.manages else self._answer_user
                await answer(stream, caller)
        except trio.BrokenResourceError:
            pass  # the peer went away
        except OSError as error:
            log.info("control connection ended: %s", error)

    async def _answer_user(self, stream: trio.SocketStream, caller: Caller) -> None:
        """Somebody who does not manage the mount: few connections each, and none that stays."""
        if not self._lets_users_in:
            raise PermissionError(errno.EACCES, f"control request of user {caller.uid} refused")
        if self._connections[caller.uid] >= _CONNECTIONS_EACH_MAX:
            busy = BusyError("too many of your commands ask this mount", next_step="try again")
            await _send(stream, error_to_dict(busy))
            return
        self._connections[caller.uid] += 1
        try:
            await self._answer(stream, caller)
        finally:
            self._connections[caller.uid] -= 1
            self._connections += collections.Counter()  # without those that are zero

    async def _read(self, stream: trio.SocketStream, caller: Caller) -> bytes:
        if caller.manages:
            return await _read_line(stream)
        with trio.move_on_after(_READ_SECONDS_MAX):
            return await _read_line(stream)
        raise UsageError("no request came")

    async def _answer(self, stream: trio.SocketStream, caller: Caller) -> None:
        try:
            name, parameters = _parse(await self._read(stream, caller))
            if name == AWAIT_CLOSE and caller.manages:
                await self._await_close(stream)
                return
            messages = self._handler(name, caller)(self._store, parameters, caller)
            while (message := self._next(messages)) is not None:
                await _send(stream, message)
        except CxlfsError as error:
            await _send(stream, error_to_dict(error))
            return
        except (OSError, trio.BrokenResourceError):
            raise
        except Exception as error:  # noqa: BLE001  a defect ends this request only
            with self._owner.lock:
                self._owner.failures.report("control request", error)
            await _send(stream, error_to_dict(error))
            return
        await _send(stream, {"message_type": "end"})

    def _next(self, messages: Iterator[Message]) -> Message | None:
        with self._owner.lock:
            return next(messages, None)

    def _handler(self, name: str, caller: Caller) -> Handler:
        handler = self._handlers.get(name)
        if handler is None and name != AWAIT_CLOSE:
            raise UsageError(f"request not known: {name}")
        if handler is None or not (caller.manages or name in OF_USERS):
            raise NotPermittedError(
                f"the daemon answers {name} to root and its own user only",
                next_step="run the command as root (sudo)",
            )
        return handler

    async def _await_close(self, stream: trio.SocketStream) -> None:
        self._waiting += 1
        try:
            await _send(stream, {"message_type": "waiting", "pid": os.getpid()})
            await self._closed.wait()
            error = self._close_error
            await _send(stream, {"message_type": "end"} if error is None else error_to_dict(error))
        finally:
            self._waiting -= 1
            if self._waiting == 0 and self._closed.is_set():
                self._all_told.set()


async def _send(stream: trio.SocketStream, message: Message) -> None:
    await stream.send_all(json.dumps(message).encode() + b"\n")


async def _read_line(stream: trio.SocketStream) -> bytes:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = await stream.receive_some()
        if not part or len(line) + len(part) > REQUEST_BYTES_MAX:
            raise UsageError("a request is one line of JSON, at most 64 KiB")
        line += part
    return bytes(line)


def _parse(line: bytes) -> tuple[str, Mapping[str, object]]:
    try:
        message = json.loads(line)
        os.fsencode(json.dumps(message, ensure_ascii=False))  # half a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise UsageError(f"a request must be JSON: {error}") from error
    if not isinstance(message, dict):
        raise UsageError("a request must be a JSON object")
    name, parameters = message.get("request"), message.get("parameters", {})
    if not isinstance(name, str) or not isinstance(parameters, dict):
        raise UsageError("a request needs a name, and its parameters in an object")
    return name, parameters
