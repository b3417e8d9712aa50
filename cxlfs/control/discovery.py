"""Finding the daemon of a mounted store: who registered where, and which socket answers there.

``UUID.json`` in a runtime directory names the mount that a daemon serves, ``UUID.sock`` beside it
is its control socket.

Never here: writing registrations (``daemon/runtime``), the protocol on the socket (``client``).

Invariants
- A registration is only a hint: its daemon may be gone. Only an answer on the socket is proof.
- A directory that others can write to is not looked into.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cxlfs.control.mountinfo import Mount

ENVIRONMENT_OVERRIDE = "CXLFS_RUNTIME_DIR"


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
    if session and is_private(Path(session), uid):
        return Path(session) / "cxlfs"
    return Path(f"/tmp/cxlfs-{uid}")  # noqa: S108  owner and mode are checked before use


def is_private(directory: Path, uid: int) -> bool:
    """It belongs to ``uid``, and nobody else can write to it."""
    try:
        status = directory.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & others


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
            if is_private(directory, uid):
                yield directory


def _same_file(one: str, other: str) -> bool:
    try:
        return one == other or Path(one).samefile(other)
    except OSError:
        return False
