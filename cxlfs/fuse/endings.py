"""How processes end that somebody waits for: with an exit code, or by a signal.

A pidfd (pidfd_open(2), Linux 5.3) becomes readable when all threads of its process are gone: behind
their last FLUSH. How it ended is said by /proc/PID/stat until its parent has asked, and by the
ioctl PIDFD_GET_INFO from then on (Linux 6.15; include/uapi/linux/pidfd.h).

Never here: what follows from it (the store decides).

Invariants
- Where nothing can be known the answer is UNKNOWN; a process that nobody can watch is ALIVE while
  /proc has it.
- A descriptor is open for each process that is watched and has not ended, for no other.
"""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import struct
from collections.abc import Collection, Hashable

from cxlfs.fuse.processes import Process, ProcessTable
from cxlfs.store.unit_rules import Ending

_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, the first 64 bytes of struct pidfd_info)."""
_INFO = struct.Struct("=QQ11Ii")
"""mask, cgroup, pid, tgid, ppid, eight user and group ids, exit_code."""
_INFO_EXIT = 1 << 3
_WATCHED_MAX = 256
"""With more of them, those that nobody asks for are forgotten."""


class Endings:
    """See the module."""

    def __init__(self, processes: ProcessTable) -> None:
        self._processes = processes
        self._descriptors: dict[Process, int | None] = {}
        self._ended: dict[Process, Ending] = {}
        self._codes: dict[Process, int] = {}

    def is_watched(self, process: Process) -> bool:
        """It is, or was until it ended."""
        return process in self._descriptors or process in self._ended

    def watch(self, process: Process) -> None:
        """From here on it will be known how this process, which exists, ends."""
        if self.is_watched(process):
            return
        try:
            descriptor = os.pidfd_open(process.tgid)
        except ProcessLookupError:
            self._ended[process] = Ending.UNKNOWN
            return
        except OSError:
            self._descriptors[process] = None
            return
        if not self._processes.is_alive(process):  # its number may mean another one by now
            os.close(descriptor)
            self._ended[process] = Ending.UNKNOWN
            return
        self._descriptors[process] = descriptor

    def of(self, process: Process) -> Ending:
        """What has become of a process that is watched."""
        known = self._ended.get(process)
        if known is not None:
            return known
        descriptor = self._descriptors.get(process)
        if descriptor is None:
            return Ending.ALIVE if self._processes.is_alive(process) else Ending.UNKNOWN
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(0):
            return Ending.ALIVE
        code = self._processes.exit_code(process)
        if code is None:
            code = _exit_code(descriptor)
        if code is None and self._processes.is_alive(process):
            return Ending.ALIVE  # somebody else's, which its parent has not asked for
        ending = _ending(code)
        os.close(descriptor)
        del self._descriptors[process]
        self._ended[process] = ending
        if code is not None:
            self._codes[process] = code
        return ending

    def code_of(self, process: Process) -> int | None:
        """What wait(2) tells of one that has ended, by :meth:`of`; None where it is not known."""
        return self._codes.get(process)

    @property
    def are_many(self) -> bool:
        """It is time to forget some."""
        return len(self._descriptors) + len(self._ended) >= _WATCHED_MAX

    def keep_only(self, wanted: Collection[Hashable]) -> None:
        """Forget all others."""
        for process in [p for p in self._descriptors if p not in wanted]:
            descriptor = self._descriptors.pop(process)
            if descriptor is not None:
                os.close(descriptor)
        self._ended = {p: ending for p, ending in self._ended.items() if p in wanted}
        self._codes = {p: code for p, code in self._codes.items() if p in wanted}

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            if descriptor is not None:
                os.close(descriptor)
        self._descriptors.clear()


def _exit_code(descriptor: int) -> int | None:
    """As wait(2) tells it; None where this kernel does not."""
    info = array.array("B", _INFO.pack(_INFO_EXIT, *(0,) * 13))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info, True)  # noqa: FBT003  fcntl's own
    except OSError:
        return None
    mask, *_, code = _INFO.unpack(info)
    return int(code) if mask & _INFO_EXIT else None


def _ending(code: int | None) -> Ending:
    if code is None:
        return Ending.UNKNOWN
    if code & 0x7F:
        return Ending.INTERRUPTED if code & 0x7F == signal.SIGINT else Ending.KILLED
    return Ending.WELL if code == 0 else Ending.BADLY
