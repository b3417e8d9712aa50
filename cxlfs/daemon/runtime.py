"""The runtime directory: where daemons are registered, listen, and write their text output.

``UUID.json`` names the mount that a daemon serves, ``UUID.sock`` is its control socket,
``MOUNTPOINT.log`` is what it has to say. Who looks for a daemon: ``control/discovery``.

Never here: trio, the protocol on the socket.

Invariants
- The directory belongs to the user of the daemon and nobody else can write into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import logging.handlers
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from cxlfs.control.discovery import (
    ENVIRONMENT_OVERRIDE,
    Registration,
    is_private,
    registrations,
    runtime_directory,
    socket_path,
)
from cxlfs.errors import MountError
from cxlfs.units import printable

LOG_BYTES_MAX = 4 << 20
LOG_NAME_LENGTH_MAX = 200
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def make_runtime_directory() -> Path:
    """Our own runtime directory, made if need be; raises MountError when it cannot be trusted.
    Others may look for daemons in it.
    """
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o755, exist_ok=True)
    except OSError as error:
        raise MountError(
            f"cannot make the runtime directory {directory}: {error.strerror}",
            next_step=f"check {directory.parent}, or set {ENVIRONMENT_OVERRIDE}",
        ) from error
    if not is_private(directory, os.geteuid()):
        raise MountError(
            f"the runtime directory {directory} belongs to someone else, or others can write to it",
            next_step=f"remove it, or set {ENVIRONMENT_OVERRIDE} to a directory of yours",
        )
    if not os.environ.get(ENVIRONMENT_OVERRIDE):
        directory.chmod(0o755)
    return directory


def register(directory: Path, registration: Registration) -> Path:
    """Make the daemon findable; returns the file to remove at the end.

    What a killed daemon registered for the same mount point goes.
    """
    for old in registrations(directory):
        if old.mountpoint == registration.mountpoint and old.uuid != registration.uuid:
            (directory / f"{old.uuid}.json").unlink(missing_ok=True)
            socket_path(directory, old.uuid).unlink(missing_ok=True)
    path = directory / f"{registration.uuid}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(dataclasses.asdict(registration)), encoding="utf-8")
    beside.chmod(0o644)
    beside.replace(path)
    return path


# --- text output --------------------------------------------------------------------------------


def default_log_path(directory: Path, mountpoint: str) -> Path:
    """A file named after the mount point: ``/mnt/a`` gives ``mnt-a.log``; a dash is doubled."""
    name = "-".join(part.replace("-", "--") for part in Path(mountpoint).parts[1:]) or "root"
    return directory / f"{name[-LOG_NAME_LENGTH_MAX:]}.log"


class OneLine(logging.Formatter):
    """Users choose the names in a message: none of them begins a line of its own, or cannot be
    written.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name there
        record.message = printable(record.message)
        return super().formatMessage(record)


class _PrivateLog(logging.handlers.RotatingFileHandler):
    """It names files of all users: nobody else reads it."""

    def _open(self) -> TextIOWrapper:
        stream = super()._open()
        os.fchmod(stream.fileno(), 0o600)
        return stream


def log_to_file(path: Path, *, debug: bool) -> None:
    """Send all messages to ``path`` (bounded: one older part is kept), and warnings to syslog."""
    handler = _PrivateLog(path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    _install(handler, debug=debug)
    if Path("/dev/log").exists():
        with contextlib.suppress(OSError):
            system = logging.handlers.SysLogHandler("/dev/log")
            system.setLevel(logging.WARNING)
            system.setFormatter(OneLine(f"cxlfs[{os.getpid()}]: %(message)s"))
            logging.getLogger().addHandler(system)


def log_to_stderr(*, debug: bool) -> None:
    """Messages for a terminal or a service manager."""
    _install(logging.StreamHandler(sys.stderr), debug=debug)


def _install(handler: logging.Handler, *, debug: bool) -> None:
    handler.setFormatter(OneLine(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("cxlfs").setLevel(logging.DEBUG if debug else logging.INFO)
