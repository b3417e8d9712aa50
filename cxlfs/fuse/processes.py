"""Who opened a file, and whether that process is being killed while it closes it.

A killed process closes its files too, so a FLUSH arrives as if it had called close(2). While it is
being served the process still exists: /proc/PID/stat field 9 has the flag PF_EXITING and field 52
the exit code, whose low 7 bits are the signal. Sources: proc(5); include/linux/sched.h.

Never here: what follows from it (the store decides).

Invariants
- Where nothing can be known (process gone, number used again, /proc unreadable) the answer is "not
  known to be killed".
- A thread group is identified by its number and its start time: numbers are used again.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

PF_EXITING = 0x4
_SIGNAL_MASK = 0x7F
# Fields are numbered from 1 in proc(5); what follows the command name begins with field 3.
_FIRST_FIELD = 3
_FIELD_FLAGS = 9
_FIELD_START_TIME = 22
_FIELD_EXIT_CODE = 52


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """One thread group, for good."""

    tgid: int
    start_time: int
    """Clock ticks after boot."""


class ProcessTable:
    """Reads /proc; ``proc_root`` is another directory in tests."""

    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._root = str(proc_root)

    def identify(self, tid: int) -> Process | None:
        """The thread group of a thread (request headers name threads); None when unknown."""
        if tid <= 0:
            return None
        tgid = self._thread_group(tid)
        fields = self._stat(tgid) if tgid is not None else None
        if tgid is None or fields is None:
            return None
        return Process(tgid, fields[_FIELD_START_TIME - _FIRST_FIELD])

    def is_being_killed(self, process: Process | None) -> bool:
        """The process is on its way out because of a signal."""
        if process is None:
            return False
        fields = self._stat(process.tgid)
        if fields is None or fields[_FIELD_START_TIME - _FIRST_FIELD] != process.start_time:
            return False
        exiting = fields[_FIELD_FLAGS - _FIRST_FIELD] & PF_EXITING
        signal_number = fields[_FIELD_EXIT_CODE - _FIRST_FIELD] & _SIGNAL_MASK
        return bool(exiting and signal_number)

    def _thread_group(self, tid: int) -> int | None:
        try:
            with open(f"{self._root}/{tid}/status", "rb") as status:  # noqa: PTH123  hot path
                for line in status:
                    if line.startswith(b"Tgid:"):
                        return int(line[5:])
        except (OSError, ValueError):
            return None
        return None

    def _stat(self, tgid: int) -> list[int] | None:
        """Fields 3 to 52 as numbers (the state letter counts as 0)."""
        try:
            with open(f"{self._root}/{tgid}/stat", "rb") as stat:  # noqa: PTH123  hot path
                text = stat.read()
            # The command name stands in parentheses and may itself hold any character.
            words = text[text.rindex(b")") + 2 :].split()
            numbers = [0, *map(int, words[1 : _FIELD_EXIT_CODE - _FIRST_FIELD + 1])]
        except (OSError, ValueError):
            return None
        return numbers if len(numbers) == _FIELD_EXIT_CODE - _FIRST_FIELD + 1 else None
