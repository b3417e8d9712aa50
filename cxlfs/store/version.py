"""One version of a file's content while it is not committed: what is known of its writing.

Never here: what becomes of it (``versions``), its bytes.

Invariants
- A failed range stays until it was written with success, or lies beyond the end.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from cxlfs.errors import CxlfsError
from cxlfs.store.space import LEASE_BYTES_MIN


@dataclasses.dataclass(slots=True)
class FailedRange:
    start: int
    end: int
    error: CxlfsError


class Redirection(Protocol):
    """A handle that may become ordinary: what is written through it is published as it comes."""

    ordinary: bool


@dataclasses.dataclass(slots=True)
class Version:
    """Live content that is not committed.

    ``atomic``: the previous content comes back unless it is published. ``whole``: it began empty,
    so that nothing of the previous content is in it. ``in_place``: an atomic one of which the
    periodic commit publishes what is there, as it began with the previous content.
    ``staged``: ``inode.aside`` holds what the periodic commit has made durable of it. ``killed``: a
    writer was killed; who has written nothing does not publish what that one left. ``redirection``:
    the handle through which a shell has begun it, at ``redirected_monotonic``. ``has_lost_pages``:
    pages of a mapping could not be stored (``shared_maps``).
    """

    atomic: bool
    began_monotonic: float
    whole: bool = False
    in_place: bool = False
    staged: bool = False
    killed: bool = False
    has_lost_pages: bool = False
    redirection: Redirection | None = None
    redirected_monotonic: float = 0.0
    lease_bytes: int = LEASE_BYTES_MIN
    failed: list[FailedRange] = dataclasses.field(default_factory=list)

    def fail(self, start: int, end: int, error: CxlfsError) -> None:
        # Without its traceback, which would keep the caller's buffer alive.
        self.failed.append(FailedRange(start, end, error.with_traceback(None)))

    def repair(self, start: int, end: int) -> None:
        """[start, end) was written with success."""
        remaining: list[FailedRange] = []
        for bad in self.failed:
            if bad.start < start:
                remaining.append(FailedRange(bad.start, min(bad.end, start), bad.error))
            if bad.end > end:
                remaining.append(FailedRange(max(bad.start, end), bad.end, bad.error))
        self.failed = [bad for bad in remaining if bad.start < bad.end]

    def cut(self, size: int) -> None:
        """What lies beyond the new size need not be repaired."""
        self.failed = [
            FailedRange(bad.start, min(bad.end, size), bad.error)
            for bad in self.failed
            if bad.start < size
        ]
