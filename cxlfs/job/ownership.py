"""One start of one job at a time in a directory of checkpoints: a lock whose owner can be read.

All ranks of a start that share the directory hold the lock together. It ends with their processes,
also by a kill. A process that makes a ``Checkpointer`` anew takes it over from its own older one,
whose votes count no more then (``lines.require_owner``).

Never: which line may vote (``lines``).

Invariants
- A forked child does not hold what its parent has.
- Nothing waits without an end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import threading
import time
from pathlib import Path

from cxlfs.errors import JobBusyError
from cxlfs.job.lines import DIRECTORY_NAME

log = logging.getLogger(__name__)

LOCK_NAME = "lock"
WAIT_SECONDS = 10.0
"""For processes of the start before that are being killed."""
_PAUSE_SECONDS = 0.05
_OWNER_BYTES_MAX = 4096
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

_Key = tuple[int, int]


@dataclasses.dataclass(slots=True)
class _Held:
    descriptor: int
    incarnation: str
    count: int


_held: dict[_Key, _Held] = {}
_guard = threading.Lock()


def take(root: Path, incarnation: str, seconds: float = WAIT_SECONDS) -> _Key | None:
    """Until ``release`` of what is returned. None: the file system has no locks.

    Raises JobBusyError (another start has it), OSError.
    """
    path = root / DIRECTORY_NAME / LOCK_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with _guard:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        own = _held.get(key)
        if own is not None and _takes_over(own, incarnation):
            os.close(descriptor)
            own.count += 1
            return key
        try:
            is_locked = _lock(descriptor, root, incarnation, seconds)
        except BaseException:
            os.close(descriptor)
            raise
        if not is_locked:
            os.close(descriptor)
            return None
        if own is not None:
            _close(own.descriptor)
        _held[key] = _Held(descriptor, incarnation, 1 if own is None else own.count + 1)
        return key


def _takes_over(own: _Held, incarnation: str) -> bool:
    """False: the mount that it was of is gone, and its lock with it."""
    try:
        if own.incarnation != incarnation:
            _write_owner(own.descriptor, incarnation)
    except OSError:
        return False
    own.incarnation = incarnation
    return True


def release(key: _Key | None) -> None:
    """Once for each ``take``."""
    with _guard:
        held = None if key is None else _held.get(key)
        if key is None or held is None:
            return
        held.count -= 1
        if not held.count:
            del _held[key]
            _close(held.descriptor)


def _close(descriptor: int) -> None:
    """The daemon of its mount may be gone."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _lock(descriptor: int, root: Path, incarnation: str, seconds: float) -> bool:
    """False: there are no locks. Raises JobBusyError, OSError."""
    end = time.monotonic() + seconds
    while True:
        try:
            if _try(descriptor, incarnation):
                return True
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            log.warning("%s has no locks: a second start of the job is not seen", root)
            return False
        if time.monotonic() >= end:
            owner = _owner(descriptor)
            raise JobBusyError(
                f"{root} is in use by another start: process {owner.get('process', 'unknown')} "
                f"on {owner.get('host', 'unknown')}, since {owner.get('since', 'unknown')}"
            )
        time.sleep(_PAUSE_SECONDS)


def _try(descriptor: int, incarnation: str) -> bool:
    """Whoever has it alone says whose it is; then all of that start share it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_owner(descriptor, incarnation)
    except BlockingIOError:
        if _owner(descriptor).get("incarnation") != incarnation:
            return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    # Between the two locks another start may have come in.
    if _owner(descriptor).get("incarnation") == incarnation:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _write_owner(descriptor: int, incarnation: str) -> None:
    owner = {
        "incarnation": incarnation,
        "host": os.uname().nodename,
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    data = json.dumps(owner).encode().ljust(_OWNER_BYTES_MAX)
    os.pwritev(descriptor, [data], 0)


def _owner(descriptor: int) -> dict[str, object]:
    try:
        found = json.loads(os.pread(descriptor, _OWNER_BYTES_MAX, 0))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _forget_in_child() -> None:
    """Its descriptors would keep the lock when the parent has ended."""
    global _guard  # noqa: PLW0603 - another thread of the parent may have had it
    _guard = threading.Lock()
    for held in _held.values():
        _close(held.descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
