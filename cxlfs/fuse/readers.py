"""Programs that opened a checkpoint to read it, and failed: what a checkpoint that kills its job
looks like from here.

A file counts where a process that opened it for reading ended with an exit code other than 0, or by
a signal, but not where it was told to end (SIGINT, SIGTERM, SIGHUP, by signal or as a shell says
it: 128 + N). Of many that read a file together (the ranks of a job) one counts: who opened it
before the last one that counted does not. Nothing follows from the number here.

Never here: what a checkpoint is, and whether a newer one was saved since (``cxlfs.checkpoint``).

Invariants
- Files of less than FILE_BYTES_MIN cost nothing, others one question to /proc for each thread and
  tenth of a second. Reading costs nothing.
- A bounded number of processes, and of files of each, is watched; the rest is not counted.
- Who opens with O_NONBLOCK, as this project's own readers do, does not count.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.fuse.endings import Endings
from cxlfs.fuse.processes import Process, ProcessTable
from cxlfs.store.failed_resumes import count_failed_resumes
from cxlfs.store.unit_rules import Ending

if TYPE_CHECKING:
    from cxlfs.store import Store

FILE_BYTES_MIN = 64 << 10
_PROCESSES_MAX = 256
_FILES_MAX = 1024
_SIGNAL_MASK = 0x7F
_SHELL_BASE = 128
_TOLD_TO_END = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


class Readers:
    """See the module. The lock of the store is held by whoever calls."""

    def __init__(
        self,
        store: Store,
        processes: ProcessTable,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._processes = processes
        self._endings = Endings(processes)
        self._clock = clock
        self._opened: dict[Process, dict[int, float]] = {}
        """When each file was opened by each process that has not ended."""
        self._counted: dict[int, float] = {}
        """When a failure was last counted, of files that are still open in :attr:`_opened`."""

    def opened(self, tid: int, ino: int, size_bytes: int, flags: int) -> None:
        """The thread ``tid`` opened a file to read it."""
        if size_bytes < FILE_BYTES_MIN or flags & os.O_NONBLOCK or self._store.read_only:
            return
        process = self._processes.identify(tid)
        if process is None:
            return
        files = self._opened.get(process)
        if files is None:
            if len(self._opened) >= _PROCESSES_MAX:
                return
            self._endings.watch(process)
            files = self._opened[process] = {}
        if len(files) < _FILES_MAX or ino in files:
            files[ino] = self._clock()

    def maintain(self) -> None:
        """Look who has ended, and count. Raises MediaError."""
        if not self._opened:
            return
        ended = [(process, self._endings.of(process)) for process in self._opened]
        ended = [(process, ending) for process, ending in ended if ending is not Ending.ALIVE]
        if not ended:  # all files of all processes are gone over below
            return
        failed: set[int] = set()
        for process, ending in ended:
            files = self._opened.pop(process)
            if not _has_failed(ending, self._endings.code_of(process)):
                continue
            for ino, opened in files.items():
                if opened > self._counted.get(ino, float("-inf")):
                    failed.add(ino)
        now = self._clock()
        for ino in failed:
            self._counted[ino] = now
        self._endings.keep_only(self._opened)
        open_still = {ino for files in self._opened.values() for ino in files}
        self._counted = {ino: at for ino, at in self._counted.items() if ino in open_still}
        if failed:
            count_failed_resumes(self._store.volume, sorted(failed))

    def close(self) -> None:
        self._endings.close()


def _has_failed(ending: Ending, code: int | None) -> bool:
    """``code``: as wait(2) tells it."""
    if code is None or ending not in (Ending.KILLED, Ending.BADLY):
        return False
    number = code & _SIGNAL_MASK or (code >> 8) - _SHELL_BASE
    return number not in _TOLD_TO_END
