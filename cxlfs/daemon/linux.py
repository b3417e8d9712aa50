"""System calls that the standard library lacks, and what the daemon asks of the kernel for itself.

Never here: policy about mounts. Each request to the kernel is best effort where it says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from cxlfs.control.mountinfo import ANSWER_SECONDS_MAX

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_DIRSYNC = 128
MS_NOATIME = 1024
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
CPU_LATENCY_DEVICE = Path("/dev/cpu_dma_latency")
_ASK = """
import os, sys
try:
    os.statvfs(sys.argv[1])
except OSError as error:
    sys.exit(error.errno)
"""
_PR_SET_NAME = 15
_PR_SET_IO_FLUSHER = 57
_TITLE_BYTES_MIN = 16
_OOM_SCORE_NEVER = -1000
_OOM_SCORE_LATE = -500

_libc = ctypes.CDLL(None, use_errno=True)


def umount2(mountpoint: str, flags: int) -> None:
    """Raises OSError."""
    if _libc.umount2(os.fsencode(mountpoint), flags) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def mount(source: str, mountpoint: str, file_system_type: str, flags: int, data: str) -> None:
    """Mount a file system, as the system call of that name does. Raises OSError."""
    texts = (os.fsencode(text) for text in (source, mountpoint, file_system_type))
    if _libc.mount(*texts, ctypes.c_ulong(flags), data.encode("ascii")) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), mountpoint)


def call_apart(program: str, *arguments: str, seconds: float | None = None) -> None:
    """Run a few lines of Python, which end with an errno or 0, in a process of its own: for what a
    daemon asks of its own mount. Takes 10 to 20 ms.

    A thread that waits for an answer does not even end with SIGKILL, and keeps the descriptors that
    it shares. A daemon killed while it waits for itself would keep /dev/fuse open for ever: a mount
    that hangs instead of being dead, and a source that stays locked.

    Raises OSError; ETIMEDOUT after ``seconds``, EIO when the process was killed.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", program, *arguments], stdin=subprocess.DEVNULL
    )
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:  # it may be waiting where no signal ends it
        status = errno.ETIMEDOUT
    if status != 0:
        number = status if status > 0 else errno.EIO
        raise OSError(number, os.strerror(number))


def answer_apart(mountpoint: str, *, seconds: float = ANSWER_SECONDS_MAX) -> OSError | None:
    """What ``mountinfo.answer_of`` tells, for the daemon of this mount: see :func:`call_apart`."""
    try:
        call_apart(_ASK, mountpoint, seconds=seconds)
    except OSError as error:
        return error
    return None


def protect_process(proc_root: Path = Path("/proc")) -> list[str]:
    """Ask not to be killed for memory, and not to be throttled or made to write back file pages
    while serving (PR_SET_IO_FLUSHER, Linux 5.6). Returns what was granted; nothing is an error,
    because both need CAP_SYS_RESOURCE.
    """
    granted = []
    for score in (_OOM_SCORE_NEVER, _OOM_SCORE_LATE):
        try:
            (proc_root / "self" / "oom_score_adj").write_text(f"{score}\n", encoding="ascii")
        except OSError:
            continue
        granted.append(f"oom_score_adj {score}")
        break
    if _libc.prctl(_PR_SET_IO_FLUSHER, 1, 0, 0, 0) == 0:
        granted.append("PR_SET_IO_FLUSHER")
    return granted


def set_process_title(title: str, proc_root: Path = Path("/proc")) -> bool:
    """Let ps show ``title`` as the command line of this process, and "cxlfs" as its name.

    The command line is memory of the process, whose place fields 48 and 49 of /proc/self/stat tell
    (proc(5)); what does not fit there is cut. False: it stays as it is.
    """
    _libc.prctl(_PR_SET_NAME, b"cxlfs", 0, 0, 0)
    try:
        text = (proc_root / "self" / "stat").read_bytes()
        fields = text[text.rindex(b")") + 2 :].split()
        start, end = (int(fields[number - 3]) for number in (48, 49))
    except (OSError, ValueError, IndexError):
        return False
    room = end - start - 1  # the last byte stays 0: else the environment is taken for arguments
    if start == 0 or room < _TITLE_BYTES_MIN:
        return False
    ctypes.memmove(start, os.fsencode(title)[:room].ljust(room, b"\0"), room)
    return True


@contextlib.contextmanager
def wakeup_latency_limit(microseconds: int) -> Iterator[None]:
    """Ask that idle processors wake within so many microseconds meanwhile: the PM QoS interface
    (Documentation/power/pm_qos_interface.rst), which concerns the whole machine and needs root.
    Entering it raises OSError.
    """
    descriptor = os.open(CPU_LATENCY_DEVICE, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, struct.pack("=i", microseconds))
        yield
    finally:
        os.close(descriptor)


def is_root() -> bool:
    """Not a program with set-user-ID: the kernel lets the real user into a mount."""
    return os.getuid() == os.geteuid() == 0


def raise_readahead(device: str, kib: int, sys_root: Path = Path("/sys")) -> bool:
    """Let the kernel read ``kib`` KiB ahead on the mount ``device`` (major:minor); needs root."""
    try:
        (sys_root / "class" / "bdi" / device / "read_ahead_kb").write_text(f"{kib}\n", "ascii")
    except OSError:
        return False
    return True


def abort_connection(device: str, sys_root: Path = Path("/sys")) -> bool:
    """Make every request on the mount ``device`` (major:minor) fail, as if its daemon had died.

    Possible where the fusectl file system is mounted, for the mount's owner.
    """
    minor = device.rpartition(":")[2]
    try:
        (sys_root / "fs" / "fuse" / "connections" / minor / "abort").write_text("1", "ascii")
    except OSError:
        return False
    return True


def notify_service_manager(state: str, environment: dict[str, str] | None = None) -> bool:
    """Send ``READY=1`` and the like to the socket in NOTIFY_SOCKET; False when there is none.

    Protocol: sd_notify(3); a name that starts with @ is in the abstract namespace.
    """
    address = (os.environ if environment is None else environment).get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
        try:
            channel.connect(address)
            channel.sendall(state.encode())
        except OSError:
            return False
    return True
