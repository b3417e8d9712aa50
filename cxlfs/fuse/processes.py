"""Who opened a file, and whether that process is being killed while it closes it.

A killed process closes its files too, so a FLUSH arrives as if it had called close(2). While it is
being served the process still exists: /proc/PID/stat field 9 has the flag PF_EXITING and field 52
the exit code, whose low 7 bits are the signal. Where it is not the process itself that closes, but
another one of the same command, the signal may have been sent to it, too, and no processor have had
the time for it: the exit code is there, the flag is not. Of a process that is stopped the code is
the signal that stopped it, and of one that is traced whatever its tracer was told last (133 half of
the time, under strace). Sources: proc(5); include/linux/sched.h; fs/proc/array.c, do_task_stat;
kernel/signal.c, complete_signal.

Never here: what follows from it (the store decides).

Invariants
- Where nothing can be known (process gone, number used again, /proc unreadable) the answer is "not
  known to be killed".
- Of a process in execve(2) nothing is read that the kernel keeps until its descriptors are closed.
- At most _KEPT_MAX descriptors are kept open, each of one process that closed files.
- A thread group is identified by its number and its start time: numbers are used again.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

PF_EXITING = 0x4
_SIGNAL_MASK = 0x7F
_STOPPING = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
"""They end nothing, where a program lets the kernel do with them what it does."""
# Fields are numbered from 1 in proc(5); what follows the command name begins with field 3.
_FIRST_FIELD = 3
_FIELD_FLAGS = 9
_FIELD_START_TIME = 22
_FIELD_EXIT_CODE = 52
_LAST_SPACES = _FIELD_EXIT_CODE - _FIRST_FIELD
"""Between the fields, where the exit code is the last one."""


_KNOWN_SECONDS = 0.1
"""For so long the number of a thread cannot come to mean another: 32768 others would have to begin
meanwhile. Looking it up costs 60 µs, and saving a small file takes three times."""
_KNOWN_MAX = 1024
_KEPT_MAX = 16
_STAT_BYTES_MAX = 8192
_COMMAND_LINE_BYTES_MAX = 128 << 10
_DESCRIPTORS_MAX = 4096
_TEXT_PAGES = 3
"""Of /proc/PID/statm: the size of the program itself; the first word is that of all memory."""
_FILE_SYSTEM_TYPE = "fuse.cxlfs"
_MOUNT_ID, _MOUNT_DEVICE = 0, 2
"""Of a line of /proc/PID/mountinfo: the device as MAJOR:MINOR."""
_MAPS_MODE, _MAPS_DEVICE, _MAPS_INODE = 1, 3, 4
"""Of a line of /proc/PID/maps: the device likewise, in hexadecimal digits."""


class Process(NamedTuple):
    """One thread group, for good."""

    tgid: int
    start_time: int
    """Clock ticks after boot."""


class _State(NamedTuple):
    flags: int
    start_time: int
    exit_code: int


class ProcessTable:
    """Reads /proc; ``proc_root`` is another directory in tests."""

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._root = str(proc_root)
        self._known: dict[int, tuple[float, Process]] = {}
        self._kept: dict[int, int] = {}
        """Descriptors of what /proc says of some, by thread group, the last one used last. What was
        opened for one process tells of no other one.
        """

    def __del__(self) -> None:
        while self._kept:
            os.close(self._kept.popitem()[1])

    def identify(self, tid: int) -> Process | None:
        """The thread group of a thread (request headers name threads); None when unknown."""
        if tid <= 0:
            return None
        now = time.monotonic()
        until, known = self._known.get(tid, (0.0, None))
        if now < until:
            return known
        process = self._look_up(tid)
        if len(self._known) >= _KNOWN_MAX:
            self._known.clear()
        if process is not None:
            self._known[tid] = (now + _KNOWN_SECONDS, process)
        return process

    def _look_up(self, tid: int) -> Process | None:
        tgid = self._thread_group(tid)
        state = self._state(tgid) if tgid is not None else None
        if tgid is None or state is None:
            return None
        return Process(tgid, state.start_time)

    def command(self, process: Process) -> bytes:
        """The name of the program (15 bytes at most); empty when the process is gone."""
        try:
            return _read(f"{self._root}/{process.tgid}/comm").rstrip(b"\n")
        except OSError:
            return b""

    def command_line(self, process: Process) -> bytes:
        """Its words, each with a zero byte behind it; empty when the process is gone."""
        try:
            with open(f"{self._root}/{process.tgid}/cmdline", "rb") as file:  # noqa: PTH123
                return file.read(_COMMAND_LINE_BYTES_MAX)
        except OSError:
            return b""

    def groups(self, tid: int) -> frozenset[int]:
        """Supplementary groups of a thread; none when it is gone."""
        try:
            text = _read(f"{self._root}/{tid}/status")
            start = text.index(b"\nGroups:") + len(b"\nGroups:")
            return frozenset(map(int, text[start : text.index(b"\n", start)].split()))
        except (OSError, ValueError):
            return frozenset()

    def is_alive(self, process: Process) -> bool:
        """It has not ended, or is only about to."""
        if self._is_in_exec(process.tgid):
            return True
        state = self._state(process.tgid)
        return state is not None and state.start_time == process.start_time

    def is_being_killed(self, process: Process | None) -> bool:
        """The process is on its way out because of a signal."""
        if process is None:
            return False
        state = self._state(process.tgid, keep=True, but_well=True)
        if state is None or state.start_time != process.start_time:
            return False
        number = state.exit_code & _SIGNAL_MASK
        if number == 0 or state.flags & PF_EXITING:
            return number != 0
        return number not in _STOPPING and not self._is_traced(process.tgid)

    def _is_traced(self, tgid: int) -> bool:
        try:
            return b"\nTracerPid:\t0\n" not in _read(f"{self._root}/{tgid}/status")
        except OSError:
            return True

    def exit_code(self, process: Process) -> int | None:
        """Of a process that has ended and whose parent has not asked yet, as wait(2) tells it; None
        when it is not known: who may not look at a process reads 0 for any code.
        """
        state = self._state(process.tgid)
        if state is None or state.start_time != process.start_time:
            return None
        return 0 if state.exit_code == 0 and self._may_look_at(process) else state.exit_code or None

    def _may_look_at(self, process: Process) -> bool:
        """ptrace(2), "access mode checking": root may, and who has the same user."""
        try:
            owner = os.stat(f"{self._root}/{process.tgid}").st_uid  # noqa: PTH116  plain system call
        except OSError:
            return False
        return os.geteuid() in (0, owner)

    def holds(self, process: Process | None, ino: int) -> bool:
        """The process has a descriptor that can write to the inode ``ino`` of a mount of ours.

        /proc/PID/fdinfo names inode and mount since Linux 5.14 (proc_pid_fdinfo(5)), without a
        question to any file system. What is being closed, and what a process that ends had open, is
        not there any more.
        """
        if process is None:
            return False
        directory = f"{self._root}/{process.tgid}/fdinfo"
        try:
            names = os.listdir(directory)  # noqa: PTH208  plain system calls
        except OSError:
            return False
        for name in names[:_DESCRIPTORS_MAX]:
            mount = _mount_of_writer(f"{directory}/{name}", ino)
            if mount is not None and self._is_ours(process.tgid, mount):
                return True
        return False

    def maps(self, process: Process, ino: int) -> bool:
        """True if the process maps the inode ``ino`` of a mount of ours, shared.

        Do not call this with a lock that a request needs: the kernel may have the reader wait until
        requests of that process are answered (mmap_lock, and execve(2), see ``_is_in_exec``).
        """
        wanted = str(ino).encode()
        try:
            if self._is_in_exec(process.tgid):
                return False
            with open(f"{self._root}/{process.tgid}/maps", "rb") as lines:  # noqa: PTH123
                devices = {
                    fields[_MAPS_DEVICE]
                    for fields in (line.split(maxsplit=_MAPS_INODE + 1) for line in lines)
                    if len(fields) > _MAPS_INODE
                    and fields[_MAPS_INODE] == wanted
                    and fields[_MAPS_MODE].endswith(b"s")
                }
        except OSError:
            return False
        return any(self._is_ours_by_device(process.tgid, device) for device in devices)

    def _is_ours_by_device(self, tgid: int, device: bytes) -> bool:
        major, minor = (int(number, 16) for number in device.split(b":"))
        return self._has_mount(tgid, _MOUNT_DEVICE, f"{major}:{minor}".encode())

    def _is_ours(self, tgid: int, mount: bytes) -> bool:
        return self._has_mount(tgid, _MOUNT_ID, mount)

    def _has_mount(self, tgid: int, field: int, value: bytes) -> bool:
        """True if the process sees a mount of ours with this field in /proc/PID/mountinfo."""
        try:
            with open(f"{self._root}/{tgid}/mountinfo", "rb") as lines:  # noqa: PTH123
                return any(
                    line.split(maxsplit=field + 1)[field] == value
                    and f" - {_FILE_SYSTEM_TYPE} ".encode() in line
                    for line in lines
                )
        except OSError:
            return False

    def _thread_group(self, tid: int) -> int | None:
        try:
            text = _read(f"{self._root}/{tid}/status")
            start = text.index(b"\nTgid:") + len(b"\nTgid:")
            return int(text[start : text.index(b"\n", start)])
        except (OSError, ValueError):
            return None

    def _is_in_exec(self, tgid: int) -> bool:
        """It is in execve(2), and has no program yet: so it closes its descriptors, and waits for
        whoever serves that. Later kernels (6.18.44) have whoever reads its ``stat`` wait for it.
        """
        try:
            words = _read(f"{self._root}/{tgid}/statm").split()
            return len(words) > _TEXT_PAGES and words[0] != b"0" and words[_TEXT_PAGES] == b"0"
        except OSError:
            return False

    def _read_kept(self, tgid: int) -> bytes:
        """``stat`` of who closes one file after the other: 2 µs, and 9 where it is opened each
        time. Raises OSError.
        """
        descriptor = self._kept.pop(tgid, None)
        if descriptor is not None:
            try:
                text = os.pread(descriptor, _STAT_BYTES_MAX, 0)
            except OSError:  # it is gone; the number may be another's
                text = b""
            if text:
                self._kept[tgid] = descriptor
                return text
            os.close(descriptor)
        if len(self._kept) >= _KEPT_MAX:
            os.close(self._kept.pop(next(iter(self._kept))))
        self._kept[tgid] = os.open(f"{self._root}/{tgid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        return os.pread(self._kept[tgid], _STAT_BYTES_MAX, 0)

    def _state(self, tgid: int, *, keep: bool = False, but_well: bool = False) -> _State | None:
        """``but_well``: None also where the exit code is 0, which costs less to see."""
        try:
            if self._is_in_exec(tgid):
                return None
            text = self._read_kept(tgid) if keep else _read(f"{self._root}/{tgid}/stat")
            # The command name stands in parentheses and may itself hold any character.
            text = text[text.rindex(b")") + 2 :]
            if but_well and text.endswith(b" 0\n") and text.count(b" ") == _LAST_SPACES:
                return None
            words = text.split()
            return _State(
                flags=int(words[_FIELD_FLAGS - _FIRST_FIELD]),
                start_time=int(words[_FIELD_START_TIME - _FIRST_FIELD]),
                exit_code=int(words[_FIELD_EXIT_CODE - _FIRST_FIELD]),
            )
        except (OSError, ValueError, IndexError):
            return None


def _mount_of_writer(path: str, ino: int) -> bytes | None:
    """The id of the mount, if the descriptor is open for writing on an inode of that number."""
    try:
        words = _read(path).split()
        fields = dict(zip(words[::2], words[1::2], strict=False))
        writes = int(fields[b"flags:"], 8) & os.O_ACCMODE != os.O_RDONLY
        return fields[b"mnt_id:"] if writes and int(fields[b"ino:"]) == ino else None
    except (OSError, ValueError, KeyError):
        return None


def _read(path: str) -> bytes:
    """A small file of /proc, which comes whole in one piece; plain system calls on a hot path."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _STAT_BYTES_MAX)
    finally:
        os.close(descriptor)
