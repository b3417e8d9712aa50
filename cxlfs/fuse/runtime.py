"""The runtime directory: where daemons are registered, listen, and write their text output.

``UUID.json`` names the mount that a daemon serves, ``UUID.sock`` is its control socket,
``MOUNTPOINT.log`` is what it has to say.

Never here: trio, the protocol on the socket.

Invariants
- The directory belongs to the user of the daemon and nobody else can write into it.
- A registration is only a hint: its daemon may be gone. Only an answer on the socket is proof.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import logging.handlers
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import MountError
from cxlfs.fuse.mountinfo import Mount

ENVIRONMENT_OVERRIDE = "CXLFS_RUNTIME_DIR"
LOG_BYTES_MAX = 4 << 20
LOG_NAME_LENGTH_MAX = 200
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """One daemon, as it registered itself."""

    uuid: str
    pid: int
    source: str
    mountpoint: str
    log_path: str | None = None


def runtime_directory(uid: int | None = None) -> Path:
    """Where daemons of ``uid`` (default: ours) keep their runtime files; it may not exist."""
    override = os.environ.get(ENVIRONMENT_OVERRIDE)
    if override:
        return Path(override)
    own = os.geteuid()
    uid = own if uid is None else uid
    if uid == 0:
        return Path("/run/cxlfs")
    session = os.environ.get("XDG_RUNTIME_DIR") if uid == own else f"/run/user/{uid}"
    if session and _is_private(Path(session), uid):
        return Path(session) / "cxlfs"
    return Path(f"/tmp/cxlfs-{uid}")  # noqa: S108  owner and mode are checked before use


def make_runtime_directory() -> Path:
    """Our own runtime directory, made if need be; raises MountError when it cannot be trusted."""
    directory = runtime_directory()
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise MountError(
            f"cannot make the runtime directory {directory}: {error.strerror}",
            next_step=f"check {directory.parent}, or set {ENVIRONMENT_OVERRIDE}",
        ) from error
    if not _is_private(directory, os.geteuid()):
        raise MountError(
            f"the runtime directory {directory} belongs to someone else, or others can write to it",
            next_step=f"remove it, or set {ENVIRONMENT_OVERRIDE} to a directory of yours",
        )
    return directory


def _is_private(directory: Path, uid: int) -> bool:
    try:
        status = directory.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & others


# --- registrations ------------------------------------------------------------------------------


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
    beside.replace(path)
    return path


def registrations(directory: Path) -> Iterator[Registration]:
    """Every readable registration in ``directory``."""
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, TypeError):
                registration = Registration(**json.loads(path.read_text(encoding="utf-8")))
                if registration.uuid == path.stem:
                    yield registration


def socket_path(directory: Path, uuid: str) -> Path:
    return directory / f"{uuid}.sock"


def find_registrations(
    *, mount: Mount | None = None, source: str | None = None
) -> Iterator[tuple[Path, Registration]]:
    """Runtime directory and registration of the daemons that say they serve a mount, or a source's
    path: at most one of them is alive.
    """
    users = [os.geteuid(), 0]
    if mount is not None and mount.user_id is not None:
        users.append(mount.user_id)
    for directory in _directories_of(users):
        for registration in registrations(directory):
            if (mount is not None and registration.mountpoint == mount.mountpoint) or (
                source is not None and _same_file(registration.source, source)
            ):
                yield directory, registration


def _directories_of(users: list[int]) -> Iterator[Path]:
    """Where daemons of ``users`` may have registered; what is not theirs alone is left out.

    A session may have ended since, or begun: both places of a user are looked at.
    """
    if os.environ.get(ENVIRONMENT_OVERRIDE):
        yield runtime_directory()
        return
    for uid in dict.fromkeys(users):
        session, shared = Path(f"/run/user/{uid}/cxlfs"), Path(f"/tmp/cxlfs-{uid}")  # noqa: S108
        for directory in dict.fromkeys([runtime_directory(uid), session, shared]):
            if _is_private(directory, uid):
                yield directory


def _same_file(one: str, other: str) -> bool:
    try:
        return one == other or Path(one).samefile(other)
    except OSError:
        return False


# --- text output --------------------------------------------------------------------------------


def default_log_path(directory: Path, mountpoint: str) -> Path:
    """A file named after the mount point: ``/mnt/a`` gives ``mnt-a.log``; a dash is doubled."""
    name = "-".join(part.replace("-", "--") for part in Path(mountpoint).parts[1:]) or "root"
    return directory / f"{name[-LOG_NAME_LENGTH_MAX:]}.log"


def log_to_file(path: Path, *, debug: bool) -> None:
    """Send all messages to ``path`` (bounded: one older part is kept), and warnings to syslog."""
    handler = logging.handlers.RotatingFileHandler(
        path, maxBytes=LOG_BYTES_MAX, backupCount=1, encoding="utf-8"
    )
    _install(handler, debug=debug)
    if Path("/dev/log").exists():
        with contextlib.suppress(OSError):
            system = logging.handlers.SysLogHandler("/dev/log")
            system.setLevel(logging.WARNING)
            system.setFormatter(logging.Formatter(f"cxlfs[{os.getpid()}]: %(message)s"))
            logging.getLogger().addHandler(system)


def log_to_stderr(*, debug: bool) -> None:
    """Messages for a terminal or a service manager."""
    _install(logging.StreamHandler(sys.stderr), debug=debug)


def _install(handler: logging.Handler, *, debug: bool) -> None:
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("cxlfs").setLevel(logging.DEBUG if debug else logging.INFO)
