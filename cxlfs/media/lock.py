"""Who may use a source: an exclusive (or, for readers, shared) flock on it, and the name of whoever
holds it already; of a DAX device also whoever uses it without a lock.

Never: waits for a lock; writes an owner into the media.

The lock ends with the last descriptor that shares it, so a crash leaves none behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import BusyError
from cxlfs.media import locks

PROC = Path("/proc")


def lock_source(descriptor: int, path: str, *, shared: bool, proc: Path = PROC) -> None:
    """Take the lock; raises BusyError, which names the process that holds it."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(f"{path} is in use by {describe_owner(descriptor, proc)}") from None


def refuse_other_users(descriptor: int, path: str, proc: Path = PROC) -> None:
    """Raises BusyError when another process has the source open, or mapped and closed: what knows
    nothing of our lock, like a virtual machine that has a DAX device for its memory. Programs that
    store file data by themselves are no others: what they may store into is locked, and stays
    apart. Nor are their children, which inherit what was mapped to be read, and bear no mark. Only
    processes that this one may look into are seen: root sees all.
    """
    status = os.fstat(descriptor)
    clients = locks.marked_processes(descriptor)
    for has_it, users in (("open", _processes_with_open), ("mapped", _processes_with_mapping)):
        for pid in users(status, proc):
            if pid in clients or _has_locked_ranges(status, proc / str(pid)):
                continue
            command = _command_line(proc / str(pid)) or "command unknown"
            raise BusyError(
                f"{path} is in use by process {pid} ({command}), which has it {has_it}",
                next_step="end that process first, or use another source",
            )


def describe_owner(descriptor: int, proc: Path = PROC) -> str:
    """``process 1234 (cxlfs mount ...)``, or what is known of it."""
    status = os.fstat(descriptor)
    pid = _lock_owner(status, proc)
    command = None if pid is None else _command_line(proc / str(pid))
    if command is not None:
        return f"process {pid} ({command})"
    # In a container the kernel does not show the lock of one that has ended.
    for heir in _processes_with_open(status, proc):
        command = _command_line(proc / str(heir))
        has_it = ", which has it open" if pid is None else ""
        return f"process {heir} ({command or 'command unknown'}){has_it}"
    if pid is None:
        return "another process, which cannot be seen from here"
    return f"process {pid}, which has ended and left the lock to one that cannot be seen from here"


def _lock_owner(status: os.stat_result, proc: Path) -> int | None:
    """Who took the lock, from lines like ``1: FLOCK ADVISORY WRITE 12 fd:01:34 0 EOF``."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    same_inode: int | None = None
    try:
        lines = (proc / "locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if len(fields) < 6 or fields[1] != "FLOCK" or not fields[4].isdigit():
            continue
        where, _, inode = fields[5].rpartition(":")
        if inode != str(status.st_ino) or fields[4] == "0":
            continue
        if where == device:
            return int(fields[4])
        same_inode = int(fields[4])  # btrfs and overlays show another device number in stat
    return same_inode


def _command_line(process: Path) -> str | None:
    """The command of a living process; None when it is gone, or dead and only not yet reaped."""
    with contextlib.suppress(OSError):
        state = (process / "stat").read_bytes().rpartition(b")")[2].split()
        if state[:1] in ([b"Z"], [b"X"]):
            return None
        words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        command = b" ".join(words).decode(errors="replace")
        return command or (process / "comm").read_text(errors="replace").strip() or None
    return None


def _others(proc: Path) -> Iterator[Path]:
    for process in sorted(proc.iterdir()):
        if process.name.isdigit() and int(process.name) != os.getpid():
            yield process


def _processes_with_open(status: os.stat_result, proc: Path) -> Iterator[int]:
    """Other processes that have the source open, of a device under any name."""
    for process in _others(proc):
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if _is_same(descriptor.stat(), status):
                        yield int(process.name)
                        break


def _has_locked_ranges(status: os.stat_result, process: Path) -> bool:
    """One of its descriptors of the source is of an open file description with locks of ranges,
    whatever the number of the process that took them: the kernel shows them in lines like
    ``lock: 1: OFDLCK ADVISORY READ -1 00:06:109 0 4095``.
    """
    with contextlib.suppress(OSError):
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if _is_same(descriptor.stat(), status):
                    shown = (process / "fdinfo" / descriptor.name).read_text(encoding="ascii")
                    if "OFDLCK" in shown:
                        return True
    return False


def _is_same(one: os.stat_result, other: os.stat_result) -> bool:
    if stat.S_ISCHR(one.st_mode) and stat.S_ISCHR(other.st_mode):
        return one.st_rdev == other.st_rdev
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino)


def _processes_with_mapping(status: os.stat_result, proc: Path) -> Iterator[int]:
    """Other processes that have it mapped, by lines like
    ``7f0000000000-7f0000200000 rw-s 00000000 00:06 435 /dev/dax0.0``.
    """
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)
    for process in _others(proc):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_bytes().decode(errors="replace").splitlines()
            if any(tuple(line.split(maxsplit=5)[3:5]) == place for line in lines):
                yield int(process.name)
