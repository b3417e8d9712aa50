"""What every kind of media offers: the region of :mod:`cxlfs.native`, and where it comes from.

Never: opens or creates a source (``open``, ``dax``, ``file`` do).

The verbs, from weakest to strongest: ``store`` may become durable at any time, in any order, each
aligned 8-byte word on its own. ``write_back`` begins to make a range durable and orders nothing.
``fence`` completes what this thread wrote back or copied. Nothing is atomic beyond one word.
"""

from __future__ import annotations

from typing import NamedTuple

from cxlfs.errors import InvariantError
from cxlfs.media.locks import Ranges
from cxlfs.media.pages import SMALL_PAGE_BYTES, MappedPages, huge_page_bytes
from cxlfs.native import MappedRegion, MediaHandle, routines
from cxlfs.native.mapped_pages import mapped_bytes


class DirtyShutdown(NamedTuple):
    """How often the devices lost power without their buffers reaching the media."""

    supported: bool
    """False: some device does not tell, and ``shutdowns`` means nothing."""
    shutdowns: int
    """Sum over all devices of the region."""
    device_hash: int
    """64 bits over the ids of the devices; another value means another set of devices."""


class Identity(NamedTuple):
    """What a program that opens the source itself finds there, so that it maps the same bytes."""

    path: str
    device: int
    inode: int
    special_device: int
    synchronous: bool
    """It is mapped with MAP_SYNC."""


class Media(MappedRegion):
    """One mapped source. Fields below are for people and for status, never for decisions."""

    kind: str
    """``devdax``, ``fsdax``, ``file``, ``block``, ``memory`` or ``simulated``."""

    def __init__(
        self, handle: MediaHandle, *, kind: str, path: str, read_only: bool = False
    ) -> None:
        super().__init__(handle, read_only=read_only)
        self.kind = kind
        self.path = path
        self.alignment_bytes = 4096
        """The mapping begins at a multiple of this. Of a DAX device: the pages it is mapped in."""
        self.persistence_domain: str | None = None
        """What the kernel says: ``memory_controller``, ``cpu_cache``; None: nothing, or no DAX."""
        self.volatile = False
        """A file in memory (tmpfs, hugetlbfs): gone with the power, or a restart."""

    @property
    def write_back_name(self) -> str:
        """Routine that makes stores durable: an instruction, ``msync``, or ``none``."""
        name = self.granularity.name
        return {"BYTE": "none", "PAGE": "msync"}.get(name, routines().write_back)

    def dirty_shutdown(self) -> DirtyShutdown:
        """Read anew at each call; never raises."""
        return DirtyShutdown(supported=False, shutdowns=0, device_hash=0)

    def mapped_pages(self) -> MappedPages:
        """How large its pages are, looked up anew in some places of it; never raises."""
        found = mapped_bytes(self)
        if found is None or not found.mapped:
            return MappedPages(None, None)
        page_size_bytes = huge_page_bytes() if found.huge else SMALL_PAGE_BYTES
        return MappedPages(page_size_bytes, found.huge / found.mapped)

    def identity(self) -> Identity | None:
        """None: no other program can map it."""
        return None

    def locked_ranges(self, start: int = 0, end: int | None = None) -> Ranges:
        """What of [start, end) programs have locked, because they may store or look there: clipped,
        sorted, apart; see ``locks``.
        """
        del start, end
        return []

    def begin_watch(self) -> int | None:
        """A place beyond the medium that other processes find locked by this one, until
        :meth:`end_watch`, or this process is dead; None where they cannot.
        """
        return None

    def end_watch(self, place: int) -> None:
        """Nobody finds it locked when this returns. Raises MediaError."""
        raise InvariantError(f"nothing is watched at {place}")

    def preallocate(self) -> None:
        """Make sure that no later store can fail for want of space below; raises NoSpaceError."""
