"""Ask the daemon of a mounted store: JSON lines over its unix socket. Synchronous, without trio.

A request is one line, ``{"request": NAME, "parameters": {...}}``. The answer is any number of
lines, each with a ``message_type``, and a last one: ``end``, or ``exit_error`` with an error (see
``wire``), which is raised here as what it was there.

Never here: what a request does.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from cxlfs.control import discovery, mountinfo
from cxlfs.control.unreachable import why_unreachable
from cxlfs.control.wire import error_from_dict
from cxlfs.errors import CxlfsError, MountError, NoDaemonError

CONNECT_SECONDS_MAX = 10.0
_CONNECT_AGAIN_SECONDS = 0.01
ANSWER_SECONDS_MAX = 300.0
LINE_BYTES_MAX = 16 << 20
AWAIT_CLOSE = "await_close"
"""The request that is answered when the daemon has closed the store."""

_SOCKET_NAME_BYTES_MAX = 100


def find_daemons(source_or_mountpoint: str) -> list[tuple[Path, discovery.Registration]]:
    """Socket and registration of each daemon that may serve this mount point or this source; all
    but one are gone. Never touches the mounted file system.
    """
    mount = mountinfo.find_mount(source_or_mountpoint)
    if mount is not None and mount.file_system_type != mountinfo.FILE_SYSTEM_TYPE:
        mount = None
    found = discovery.find_registrations(
        mount=mount, source=None if mount is not None else source_or_mountpoint
    )
    return [
        (discovery.socket_path(directory, registration.uuid), registration)
        for directory, registration in found
    ]


def is_served(source_or_mountpoint: str) -> bool:
    """A living daemon serves it: its socket accepts a connection."""
    try:
        find_and_connect(source_or_mountpoint)[0].close()
    except CxlfsError:
        return False
    return True


def control_request(
    source_or_mountpoint: str,
    request: str,
    parameters: Mapping[str, object] | None = None,
    *,
    seconds_max: float | None = ANSWER_SECONDS_MAX,
) -> Iterator[dict[str, object]]:
    """The messages that answer ``request``, as they come; ``seconds_max`` bounds each silence.

    Raises NoDaemonError, MountError when the daemon goes away or keeps silent, and whatever error
    the daemon reports.
    """
    channel, _ = find_and_connect(source_or_mountpoint)
    with channel:
        yield from ask(channel, request, parameters or {}, seconds_max=seconds_max)


def find_and_connect(source_or_mountpoint: str) -> tuple[socket.socket, discovery.Registration]:
    """An open connection to the daemon. Raises NoDaemonError, MountError."""
    candidates = find_daemons(source_or_mountpoint)
    for path, registration in candidates:
        try:
            return connect(path), registration
        except PermissionError as error:
            raise MountError(
                f"the daemon of {source_or_mountpoint} belongs to another user",
                next_step="run the command as that user, or as root",
            ) from error
        except BlockingIOError as error:
            raise MountError(
                f"the daemon of {source_or_mountpoint} (process {registration.pid}) does not "
                "answer: too many ask it",
                next_step="try again; its log may say why",
            ) from error
        except OSError:
            continue
    if candidates:
        raise NoDaemonError(
            f"the daemon of {source_or_mountpoint} (process {candidates[-1][1].pid}) is gone",
            next_step="mount it again: that clears the dead mount",
        )
    mount = mountinfo.find_mount(source_or_mountpoint)
    if mount is not None and mount.file_system_type == mountinfo.FILE_SYSTEM_TYPE:
        raise why_unreachable(source_or_mountpoint, mount)
    raise NoDaemonError(f"no cxlfs daemon serves {source_or_mountpoint}")


def connect(path: Path) -> socket.socket:
    """Raises OSError; BlockingIOError when so many wait already that nobody was let in for long."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        channel.settimeout(CONNECT_SECONDS_MAX)
        with short_socket_name(path) as name:
            _let_in(channel, name)
    except BaseException:
        channel.close()
        raise
    return channel


def _let_in(channel: socket.socket, name: str) -> None:
    """A socket with a timeout does not wait where the daemon's queue is full: it asks again."""
    deadline = time.monotonic() + CONNECT_SECONDS_MAX
    while True:
        try:
            channel.connect(name)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_CONNECT_AGAIN_SECONDS)
        else:
            return


@contextlib.contextmanager
def short_socket_name(path: Path) -> Iterator[str]:
    """A name of ``path`` that fits into a socket address (108 bytes), however deep it lies."""
    if len(os.fsencode(path)) <= _SOCKET_NAME_BYTES_MAX:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def ask(
    channel: socket.socket,
    request: str,
    parameters: Mapping[str, object],
    *,
    seconds_max: float | None,
) -> Generator[dict[str, object], None, None]:
    """Send one request over an open connection and yield the messages before the last one."""
    channel.settimeout(seconds_max)
    line = json.dumps({"request": request, "parameters": parameters}) + "\n"
    try:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            channel.sendall(line.encode())  # a daemon that refuses us has said why already
        with channel.makefile("rb") as lines:
            while True:
                text = lines.readline(LINE_BYTES_MAX)
                message = _decode(text)
                if message["message_type"] == "end":
                    return
                if message["message_type"] == "exit_error":
                    raise error_from_dict(message)
                yield message
    except TimeoutError as error:
        raise MountError("the daemon does not answer", next_step="look at its log") from error
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.ECONNRESET):
            raise
        raise _hung_up() from error


def _decode(text: bytes) -> dict[str, object]:
    if not text.endswith(b"\n"):
        raise _hung_up()
    try:
        message = json.loads(text)
    except ValueError as error:
        raise MountError("the daemon answered with something that is not JSON") from error
    if not isinstance(message, dict) or not isinstance(message.get("message_type"), str):
        raise MountError("the daemon answered with something that is not a message")
    return message


def _hung_up() -> MountError:
    return MountError("the daemon ended before it had answered", next_step="look at its log")
