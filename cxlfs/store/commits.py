"""Commits that nobody asked for: of what is open for long, when everything is synced, when room is
needed.

Never here: what a version is (``versions``), closing and fsync (``files``).

Invariants
- An overwrite that would be atomic is staged aside, never published before its writer says so;
  everything else is published as it is, a new file marked incomplete.
- What a shell redirected and has grown by less than LOG_BYTES until the first of these commits is a
  log: whoever looks why its program was killed wants its last lines, not those of the run before.
- A version with a failed range waits: its close must still tell the error.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError
from cxlfs.format import layout
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

    def __init__(self, versions: Versions) -> None:
        self.versions = versions

    def commit_old(self, *, older_than: float, count: int | None = None) -> bool:
        """Of what has been open for long, at most ``count`` (None: all); True when there was
        something to do.
        """
        due: list[Inode] = []
        for inode in self.versions.open_versions.values():  # the oldest first
            version = inode.version
            if isinstance(version, Version) and version.began_monotonic > older_than:
                break
            if len(due) == count:
                break
            due.append(inode)
        for inode in due:
            self.commit(inode)
        return bool(due)

    def sync_step(self, began_monotonic: float) -> bool:
        """A part of syncfs(2), which was asked for then: True: the next one comes first. Raises as
        ``Store.sync``, of which it does the rest at once where something fails.
        """
        try:
            if self.commit_old(older_than=began_monotonic, count=COMMITS_PER_STEP):
                return True
        except CxlfsError:
            self.commit_all()
            raise
        finally:
            self.versions.volume.fence()
        return False

    def commit_all(self) -> bool:
        """Of everything that is open now; True when there was something to do. One that fails does
        not keep the others back, its error is raised in the end.
        """
        first: CxlfsError | None = None
        worked = False
        for inode in list(self.versions.open_versions.values()):
            try:
                worked |= self.commit(inode)
            except CxlfsError as error:
                first = first or error
        if first is not None:
            raise first
        return worked

    def commit(self, inode: Inode) -> bool:
        """Of one inode; True when there was something to do."""
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
        if version.failed or not (inode.content.is_dirty or inode.uncommitted):
            return False
        if version.redirection is not None and inode.content.size < LOG_BYTES:
            version.redirection.ordinary = True
            version.redirection = None
            version.atomic = False
        if version.atomic and not inode.uncommitted:
            self.versions.stage(inode)
        else:
            new = inode.uncommitted or bool(inode.flags & layout.INODE_INCOMPLETE)
            self.versions.publish(inode, incomplete=new)
        return True
