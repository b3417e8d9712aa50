"""Checkpoints that may be what kills a job: opened again and again, and nothing newer was saved.

Only the newest complete checkpoint of a directory can be one: behind every other one the job has
got further. How often programs that opened it failed is counted by a cxlfs mount
(``user.cxlfs.failed_resumes``); elsewhere nothing is known, and nothing is suspect.

Never here: deciding what to do about it, changing anything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from cxlfs.checkpoint import limits
from cxlfs.checkpoint.ages import attribute
from cxlfs.checkpoint.catalogue import Entry
from cxlfs.checkpoint.model import Checkpoint, State

FAILED_RESUMES_XATTR = "user.cxlfs.failed_resumes"
FAILED_RESUMES_MAX = 3
"""From so many on a checkpoint is suspect, unless told otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Suspect:
    """``failed_resumes``: of the file that has the most. ``before``: the newest complete one before
    it, looked at in structure; None: there is none.
    """

    entry: Entry
    failed_resumes: int
    before: Entry | None

    @property
    def words(self) -> str:
        """``suspect: opened and followed by a crash 3 times; the one before it: step-100``."""
        times = "once" if self.failed_resumes == 1 else f"{self.failed_resumes} times"
        text = f"suspect: opened and followed by a crash {times}"
        if self.before is None:
            return f"{text}; there is none before it"
        return f"{text}; the one before it: {self.before.path.name}"


def failed_resumes(found: Checkpoint) -> int:
    """How often a program that had opened one of its files failed; 0 where it is not known."""
    path = Path(found.path)
    home = path if path.exists() else path.parent  # of a prefix: its files are named from there
    most = 0
    for file in found.files[: limits.FILES_MAX]:
        if file.size_bytes is None:
            continue
        text = attribute(home / file.name if file.name else path, FAILED_RESUMES_XATTR)
        if text is None:
            return most
        if text.isascii() and text.isdigit():
            most = max(most, int(text))
    return most


def suspect_of(entries: Sequence[Entry], *, failed_max: int = FAILED_RESUMES_MAX) -> Suspect | None:
    """Of a directory's catalogue (newest first); ``failed_max`` 0: nothing is ever suspect."""
    complete = [each for each in entries if each.checkpoint.state is State.COMPLETE]
    if not complete or not failed_max:
        return None
    count = failed_resumes(complete[0].checkpoint)
    if count < failed_max:
        return None
    return Suspect(complete[0], count, complete[1] if len(complete) > 1 else None)
