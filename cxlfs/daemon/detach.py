"""Take a mount away, once, as root or through fusermount3.

Never here: waiting for a daemon (``unmount``), deciding what may be detached.

The system call may need the daemon to answer (pages of shared mappings are written back), so a
daemon must not call this from the thread that serves requests, and detaches its mount ``apart``.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from pathlib import Path

from cxlfs.control.mountinfo import read_mounts
from cxlfs.daemon import linux
from cxlfs.errors import BusyError, FuseUnavailableError, MountError

_HOLDERS_NAMED_MAX = 3
_HELPER_SECONDS_MAX = 60
_UMOUNT2 = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.umount2(os.fsencode(sys.argv[1]), int(sys.argv[2])) != 0:
    sys.exit(ctypes.get_errno())
"""


def detach(mountpoint: str, *, lazy: bool = False, apart: bool = False) -> None:
    """Unmount; ``lazy`` takes it out of the tree at once and ends it after its last user.

    ``apart``: for the daemon of this mount, see ``linux.call_apart``.

    Raises BusyError naming who holds it, MountError, FuseUnavailableError.
    """
    if os.geteuid() == 0:
        _detach_as_root(mountpoint, lazy=lazy, apart=apart)
    else:
        _detach_with_helper(mountpoint, lazy=lazy)


def _detach_as_root(mountpoint: str, *, lazy: bool, apart: bool) -> None:
    flags = linux.UMOUNT_NOFOLLOW | (linux.MNT_DETACH if lazy else 0)
    try:
        if apart:
            linux.call_apart(_UMOUNT2, mountpoint, str(flags))
        else:
            linux.umount2(mountpoint, flags)
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise _busy(mountpoint) from error
        raise MountError(
            f"cannot unmount {mountpoint}: {error.strerror}",
            next_step="check with: findmnt -t fuse.cxlfs",
        ) from error


def _detach_with_helper(mountpoint: str, *, lazy: bool) -> None:
    helper = shutil.which("fusermount3")
    if helper is None:
        raise FuseUnavailableError(
            "unmounting as an ordinary user needs fusermount3, which is not installed"
        )
    command = [helper, "-u", *(["-z"] if lazy else []), "--", mountpoint]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=_HELPER_SECONDS_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MountError(f"fusermount3 did not finish unmounting {mountpoint}") from error
    if done.returncode == 0:
        return
    reason = done.stderr.strip().splitlines()
    if "busy" in done.stderr:
        raise _busy(mountpoint)
    raise MountError(
        f"cannot unmount {mountpoint}: {reason[-1] if reason else 'fusermount3 failed'}",
        next_step="check with: findmnt -t fuse.cxlfs; a mount of another user needs root",
    )


def _busy(mountpoint: str) -> BusyError:
    holders = holders_of(mountpoint)
    who = f" by {', '.join(holders)}" if holders else ""
    command = "umount -l" if os.geteuid() == 0 else "fusermount3 -uz"
    return BusyError(
        f"{mountpoint} is in use{who}",
        next_step=f"close the files and leave the directory, or detach it: {command} {mountpoint}",
    )


def holders_of(mountpoint: str, proc_root: Path = Path("/proc")) -> list[str]:
    """Up to three processes, ``PID (name)``, with a file, a mapping or a directory of theirs below
    ``mountpoint``; only those that this user may look at. Reads links only, never the mount.
    """
    found: list[str] = []
    for process in sorted(proc_root.glob("[0-9]*")):
        if len(found) == _HOLDERS_NAMED_MAX:
            break
        if _holds(process, mountpoint):
            try:
                name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
            except OSError:
                name = "?"
            found.append(f"{process.name} ({name})")
    return found


def copies_of(device: str, proc_root: Path = Path("/proc")) -> list[tuple[int, str, str]]:
    """Where the mount with this device number stands in other mount namespaces: a process, its
    name and the mount point there; up to three, and only those that this user may look at.
    """
    found: list[tuple[int, str, str]] = []
    seen: set[str] = set()
    for process in sorted(proc_root.glob("[0-9]*"), key=lambda path: int(path.name)):
        if len(found) == _HOLDERS_NAMED_MAX:
            break
        try:
            namespace = os.readlink(process / "ns/mnt")  # noqa: PTH115
            mounts = () if namespace in seen else read_mounts(process / "mountinfo")
            name = (process / "comm").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        seen.add(namespace)
        place = next((mount.mountpoint for mount in mounts if mount.device == device), None)
        if place is not None:
            found.append((int(process.name), name, place))
    return found


def _holds(process: Path, mountpoint: str) -> bool:
    below = mountpoint.rstrip("/") + "/"
    for link in (process / "cwd", process / "root", *_entries(process / "fd")):
        try:
            target = os.readlink(link)  # noqa: PTH115  a Path would lose nothing, but costs more
        except OSError:
            continue
        if target == mountpoint or target.startswith(below):
            return True
    return any(link.startswith(below) for link in _mapped(process))


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _mapped(process: Path) -> list[str]:
    try:
        lines = (process / "maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    path_field = 5
    return [fields[path_field] for line in lines if len(fields := line.split(None, 5)) > path_field]
