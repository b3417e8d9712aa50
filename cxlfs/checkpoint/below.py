"""Tidy every directory below one that holds checkpoints: what a mount asks for after a crash.

Never here: what is set aside in one directory, and how (``tidy``).

Invariants
- What is itself a checkpoint is not entered, nor what was set aside, a symbolic link, or another
  file system. Directories changed last come first: where time ends before the work, that is where
  the newest checkpoints are.
- One directory that cannot be tidied keeps no other one from it.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.catalogue import OWN_PREFIX, Entry, catalogue
from cxlfs.checkpoint.model import Level, ProblemError
from cxlfs.checkpoint.tidy import Plan, plan, tidy
from cxlfs.errors import CxlfsError


class Found(NamedTuple):
    """A directory with checkpoints in it: what was done there, or why nothing could be."""

    directory: Path
    plan: Plan | None
    problem: str | None


class TidyBelow:
    """Iterate over it once; the counts are true when that has ended.

    ``level``: how much is read of what may be the newest good one. ``seconds_max``: no directory is
    begun later than that; None: without a limit. With ``dry_run`` nothing is changed.
    """

    def __init__(
        self,
        directory: str | Path,
        level: Level,
        *,
        dry_run: bool = False,
        seconds_max: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = Path(directory)
        self._level = level
        self._work = plan if dry_run else tidy
        self._seconds_max = seconds_max
        self._clock = clock
        self.directories = 0
        """Looked at, with checkpoints in them or not."""
        self.left_out: str | None = None
        """Why some were not looked at; None: all were."""

    def __iter__(self) -> Iterator[Found]:
        """Raises nothing for what lies below; OSError where the directory itself is not there."""
        status = self._directory.stat()
        began = self._clock()
        waiting = [(-status.st_mtime_ns, str(self._directory))]
        while waiting:
            if self._seconds_max is not None and self._clock() - began >= self._seconds_max:
                self.left_out = f"time ended after {self._seconds_max:g} s"
                return
            if self.directories >= limits.DIRECTORIES_MAX:
                self.left_out = f"more than {limits.DIRECTORIES_MAX} directories"
                return
            directory = Path(heapq.heappop(waiting)[1])
            self.directories += 1
            entries = _entries(directory)
            if entries and not entries[0].names:
                continue  # it is a checkpoint
            if entries:
                yield self._tidied(directory, entries)
            checkpoints = {name for entry in entries for name in entry.names}
            for each in _directories_in(directory, checkpoints, status.st_dev):
                if len(waiting) >= limits.DIRECTORIES_MAX:
                    self.left_out = f"more than {limits.DIRECTORIES_MAX} directories"
                    break
                heapq.heappush(waiting, each)

    def _tidied(self, directory: Path, entries: tuple[Entry, ...]) -> Found:
        try:
            return Found(directory, self._work(directory, self._level, entries), None)
        except CxlfsError as error:
            return Found(directory, None, error.message)
        except OSError as error:  # a full store, a name that went away
            return Found(directory, None, f"{directory}: {error.strerror}")


def _entries(directory: Path) -> tuple[Entry, ...]:
    try:
        return catalogue(directory)
    except ProblemError:
        return ()


def _directories_in(
    directory: Path, checkpoints: set[str], device: int
) -> Iterator[tuple[int, str]]:
    """Those to look into, with what orders them."""
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.name.startswith(OWN_PREFIX) or entry.name in checkpoints:
                    continue
                if not entry.is_dir(follow_symlinks=False):
                    continue
                status = entry.stat(follow_symlinks=False)
                if status.st_dev == device:
                    yield -status.st_mtime_ns, entry.path
    except OSError:
        return  # removed meanwhile, or not for this user
