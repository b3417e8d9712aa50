"""Commits that nobody asked for: of what is open for long, when everything is synced, when room is
needed.

Never here: what a version is (``versions``), closing and fsync (``files``).

Invariants
- An overwrite that would be atomic is staged aside, never published before its writer says so;
  everything else is published as it is, a new file marked incomplete. An atomic change in place is
  staged aside only where room is needed.
- What a shell redirected and has grown by less than LOG_BYTES in the commit interval is a log:
  whoever looks why its program was killed wants its last lines, not those of the run before. What
  is committed sooner (a sync, want of room) says nothing about that.
- A version with a failed range, or lost pages, waits: its close must still tell the error.
- A file that was closed while it was mapped is published once nothing of it is missing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError
from cxlfs.store.version import Version

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Versions


LOG_BYTES = 1 << 20
"""A checkpoint that is written through a shell's redirection is larger after some seconds."""
COMMITS_PER_STEP = 64
"""Of small files 3 ms, where a fence takes little."""


class Commits:
    """One for each volume."""

    def __init__(self, versions: Versions, interval_s: float) -> None:
        self.versions = versions
        self.interval_s = interval_s

    def commit_old(
        self, *, older_than: float, count: int | None = None, log_before: float | None = None
    ) -> bool:
        """Of what has been open for long, at most ``count`` (None: all); True when there was
        something to do. ``log_before``: as for ``commit`` (None: ``older_than``).
        """
        log_before = older_than if log_before is None else log_before
        due: list[Inode] = []
        for inode in self.versions.open_versions.values():  # the oldest first
            version = inode.version
            if isinstance(version, Version) and version.began_monotonic > older_than:
                break
            if len(due) == count:
                break
            due.append(inode)
        for inode in due:
            self.commit(inode, log_before=log_before)
        return bool(due)

    def sync_step(self, began_monotonic: float) -> bool:
        """A part of syncfs(2), which was asked for then: True: the next one comes first. Raises as
        ``Store.sync``, of which it does the rest at once where something fails.
        """
        try:
            if self.commit_old(
                older_than=began_monotonic,
                count=COMMITS_PER_STEP,
                log_before=began_monotonic - self.interval_s,
            ):
                return True
        except CxlfsError:
            self.commit_all()
            raise
        finally:
            self.versions.volume.fence()
        return False

    def commit_all(self, *, for_room: bool = False) -> bool:
        """Of everything that is open now; True when there was something to do. One that fails does
        not keep the others back, its error is raised in the end. ``for_room``: but for whole files
        that are changed through a mapping. If there is no room for their pages, the committed
        content is what comes back.
        """
        first: CxlfsError | None = None
        worked = False
        for inode in list(self.versions.open_versions.values()):
            if for_room and self.versions.shared_maps.is_filled(inode):
                continue
            try:
                log_before = time.monotonic() - self.interval_s
                worked |= self.commit(inode, log_before=log_before, for_room=for_room)
            except CxlfsError as error:
                first = first or error
        if first is not None:
            raise first
        return worked

    def commit(self, inode: Inode, *, log_before: float, for_room: bool = False) -> bool:
        """Of one inode; True when there was something to do. ``log_before``: what was redirected
        then, or sooner, is a log if it is small. ``for_room``: as for :meth:`commit_all`.
        """
        version = inode.version
        if not isinstance(version, Version):
            return False
        version.began_monotonic = time.monotonic()
        self.versions.open_versions.pop(inode.ino, None)
        self.versions.open_versions[inode.ino] = inode
        if inode.links == 0:
            self.versions.open_versions.pop(inode.ino, None)
            return False
        inode.note_writes()
        if self.versions.error_of(inode) is not None:
            return False
        finished = self.versions.shared_maps.is_finished(inode)
        became_log = self._becomes_log(inode, version, log_before) and version.staged
        if not (inode.content.is_dirty or inode.uncommitted or became_log or finished):
            return False
        if finished:
            self.versions.publish(inode, incomplete=False)
        elif version.atomic and not inode.uncommitted and (for_room or not version.in_place):
            if inode.held is None:  # else its place is taken by the version before
                self.versions.stage(inode)
        else:
            self.versions.publish(inode, incomplete=self.versions.is_incomplete(inode))
        return True

    def _becomes_log(self, inode: Inode, version: Version, log_before: float) -> bool:
        """From here on what a shell redirected is published as it comes."""
        redirection = version.redirection
        if (
            redirection is None
            or version.redirected_monotonic > log_before
            or inode.content.size >= LOG_BYTES
            or not (inode.content.is_dirty or version.staged)
        ):
            return False
        redirection.ordinary = True
        version.redirection = None
        version.atomic = False
        return True
