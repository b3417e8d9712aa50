"""Who may use a source: an exclusive (or, for readers, shared) flock on it, and the name of whoever
holds it already; of a DAX device also whoever uses it without a lock.

Never: waits for a lock; writes an owner into the media; asks the file system of another process's
file anything. One that hangs, anywhere on the machine, would hang this process.

The lock ends with the last descriptor that shares it, so a crash leaves none behind.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from cxlfs.errors import BusyError
from cxlfs.media import locks

PROC = Path("/proc")
_DEVICE_FIELD = 2
_IN_MEMORY = frozenset({"devtmpfs", "tmpfs", "ramfs"})
"""File systems that answer at once."""


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
    users = {
        "open": _processes_with_open(descriptor, status, proc),
        "mapped": _processes_with_mapping(status, proc),
    }
    for has_it, processes in users.items():
        for pid in processes:
            if pid in clients or _has_locked_ranges(descriptor, status, proc / str(pid)):
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
    for heir in _processes_with_open(descriptor, status, proc):
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


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Where an open file lies, as the kernel says by itself: the device of its mount, the type of
    that file system, and the number of the inode.
    """

    device: str
    file_system_type: str
    inode: str


def _place_of(process: Path, number: str, mounts: dict[str, tuple[str, str]]) -> _Place | None:
    """Of a descriptor of a process, whose mounts these are; None: its mount is not among them."""
    info = (process / "fdinfo" / number).read_text(encoding="ascii", errors="replace")
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    mount = mounts.get(fields.get("mnt_id", "").strip())
    return None if mount is None else _Place(*mount, fields.get("ino", "").strip())


def _mounts_of(process: Path) -> dict[str, tuple[str, str]]:
    """Device and type by the number of the mount, from lines like
    ``36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw``.
    """
    found: dict[str, tuple[str, str]] = {}
    for line in (process / "mountinfo").read_bytes().decode(errors="replace").splitlines():
        before, _, behind = line.partition(" - ")
        fields, kind = before.split(" "), behind.split(" ")[0]
        if len(fields) > _DEVICE_FIELD:
            found[fields[0]] = fields[_DEVICE_FIELD], kind
    return found


def _open_descriptors(descriptor: int, status: os.stat_result, process: Path) -> Iterator[Path]:
    """Descriptors of another process that are of the source, of a device under any name.

    Only what lies in memory is asked what it is: nodes of devices lie there. A kernel that does not
    tell the number of the inode (before 5.15) tells the path.
    """
    own = Path("/proc/self")
    source = _place_of(own, str(descriptor), _mounts_of(own))
    name = (own / "fd" / str(descriptor)).readlink()
    mounts = _mounts_of(process)
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(each.readlink()).startswith("/"):
                continue
            place = _place_of(process, each.name, mounts)
            if place is not None and place.file_system_type in _IN_MEMORY:
                is_source = _is_same(each.stat(), status)
            elif place is not None and place.inode:
                is_source = place == source
            else:
                is_source = each.readlink() == name
            if is_source:
                yield each


def _processes_with_open(descriptor: int, status: os.stat_result, proc: Path) -> Iterator[int]:
    """Other processes that have the source open."""
    for process in _others(proc):
        with contextlib.suppress(OSError):
            if next(_open_descriptors(descriptor, status, process), None) is not None:
                yield int(process.name)


def _has_locked_ranges(descriptor: int, status: os.stat_result, process: Path) -> bool:
    """One of its descriptors of the source is of an open file description with locks of ranges,
    whatever the number of the process that took them: the kernel shows them in lines like
    ``lock: 1: OFDLCK ADVISORY READ -1 00:06:109 0 4095``.
    """
    with contextlib.suppress(OSError):
        for each in _open_descriptors(descriptor, status, process):
            shown = (process / "fdinfo" / each.name).read_text(encoding="ascii")
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
