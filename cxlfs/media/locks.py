"""Which ranges of a source programs may still store into, or look at: their locks say so.

A program that stores file data by itself locks its room (F_OFD_SETLK, F_RDLCK) through the open
file description that it has mapped. The kernel keeps such a lock exactly as long as a descriptor or
a mapping of that description lives in any process: behind SIGKILL, fork, and the end of the daemon
that gave the room. From MARKS_FROM on each program also locks the byte of its process id.

The other way round, from WATCHES_FROM on the daemon locks a byte for each file that a program reads
from the source by itself, as long as the file stays what it is; whoever asks for it finds it gone
as soon as it may not, or the daemon is dead: the kernel drops such locks before the flock on the
source, which the next daemon waits for.

Never here: locking a part of the source, deciding what becomes of a range.

Source: fcntl_locking(2), "Open file description locks"; that a mapping alone keeps one is tried in
tests/media/test_locks.py.
"""

from __future__ import annotations

import fcntl
import struct

from cxlfs.errors import BusyError
from cxlfs.units import format_size

MARKS_FROM = 1 << 62
"""Beyond every medium: the lock at MARKS_FROM + pid says that the process is one of ours."""
WATCHES_FROM = 1 << 61
"""Beyond every medium, too, and before the marks."""
WATCHES = 1 << 60
_OFFSET_MAX = (1 << 63) - 1
_FLOCK = struct.Struct("=hh4xqqi4x")
"""struct flock on a 64-bit machine: type, whence, start, length (0: to the end), process."""

Ranges = list[tuple[int, int]]


def locked_ranges(descriptor: int, start: int, end: int) -> Ranges:
    """Where others have locks in [start, end): [start, end) of each, clipped, sorted, apart.

    At most two questions for each lock. Raises OSError.
    """
    return _joined(sorted(_locks(descriptor, start, end)))


def _locks(descriptor: int, start: int, end: int) -> Ranges:
    found: Ranges = []
    rest = [(start, end)]
    while rest:
        low, high = rest.pop()
        lock = _first_conflict(descriptor, low, high)
        if lock is None:
            continue
        first, last = max(lock[0], low), min(lock[1], high)
        found.append((first, last))
        rest.extend(piece for piece in ((low, first), (last, high)) if piece[0] < piece[1])
    return found


def _first_conflict(descriptor: int, start: int, end: int) -> tuple[int, int] | None:
    """[start, end) of a lock in the range that a write lock would have to wait for."""
    question = _FLOCK.pack(fcntl.F_WRLCK, 0, start, end - start, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, question)
    kind, _, first, length, _ = _FLOCK.unpack(answer)
    if kind == fcntl.F_UNLCK:
        return None
    return first, first + length if length else _OFFSET_MAX


def _joined(ranges: Ranges) -> Ranges:
    joined: Ranges = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def marked_processes(descriptor: int) -> set[int]:
    """Processes that map the source as clients of its daemon, by their own word: one byte each."""
    marks = _locks(descriptor, MARKS_FROM, _OFFSET_MAX)
    return {start - MARKS_FROM for start, end in marks if end - start == 1}


def lock_watch(descriptor: int, watch: int) -> None:
    """Lock the byte of a watch. Raises OSError."""
    _set_watch(descriptor, fcntl.F_RDLCK, watch)


def unlock_watch(descriptor: int, watch: int) -> None:
    """Nobody finds it locked when this returns. Raises OSError."""
    _set_watch(descriptor, fcntl.F_UNLCK, watch)


def _set_watch(descriptor: int, kind: int, watch: int) -> None:
    question = _FLOCK.pack(kind, 0, WATCHES_FROM + watch, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, question)


def refuse_locked(path: str, ranges: Ranges) -> None:
    """Raises BusyError where a program may still store into the source, for whoever is about to
    write over all of it.
    """
    if ranges:
        size_bytes = sum(end - start for start, end in ranges)
        raise BusyError(
            f"a program still has {format_size(size_bytes)} of {path} mapped, to store into",
            next_step=f"end it first: fuser -v {path} names it",
        )
