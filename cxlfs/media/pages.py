"""How large the pages are that a source can be mapped with, and asking for the largest.

Never here: mapping (``native``), allocating (``file``), judging whether large pages are wanted: a
file system that was not mounted for them is left as it is.

Invariants
- Whatever is asked for beyond the ordinary is a wish: without it a source works as ever.
- Nothing is taken from the pool of huge pages here, only compared with what is asked for.

Sources: Linux, Documentation/admin-guide/mm/hugetlbpage.rst and transhuge.rst, drivers/dax/device.c
(a device is mapped in pages of its alignment, or not at all).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cxlfs.errors import MediaUnavailableError, NoSpaceError
from cxlfs.media.room import (
    VOLATILE_FILE_SYSTEMS,
    allocated_bytes,
    file_system_of,
    mount_options_of,
)
from cxlfs.units import KIB, MIB, format_size

SYSFS = Path("/sys")
SMALL_PAGE_BYTES = os.sysconf("SC_PAGESIZE")

_HUGE_PAGE_BYTES_DEFAULT = 2 * MIB
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_POPULATE_AT_ONCE = 64 * MIB


class MappedPages(NamedTuple):
    """What a mapping has got."""

    page_size_bytes: int | None
    """The largest pages in it; None: nothing of it is mapped, or the kernel does not tell."""
    huge_share: float | None
    """The part of what is mapped that is in pages larger than the processor's smallest."""


def huge_page_bytes(sysfs: Path = SYSFS) -> int:
    """What one entry of the second table of pages covers: 2 MiB, with 4 KiB pages."""
    number = _number(sysfs / "kernel/mm/transparent_hugepage/hpage_pmd_size")
    return number if number and number & (number - 1) == 0 else _HUGE_PAGE_BYTES_DEFAULT


def alignment_of(descriptor: int, size_bytes: int) -> int:
    """Where in the address space a file or block device belongs, so that its pages can be large."""
    pool = pool_of(descriptor)
    if pool is not None:
        return pool.page_size_bytes
    huge = huge_page_bytes()
    return huge if size_bytes >= huge else SMALL_PAGE_BYTES


# --- hugetlbfs ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pool:
    """The huge pages that a file on hugetlbfs is made of."""

    page_size_bytes: int
    free_bytes: int
    """What nobody has and nobody was promised."""
    pages: int
    setting: Path
    """Where an administrator says how many pages it has."""
    is_limited_by_mount: bool
    """The mount may take less than the pool has free."""

    def require_whole_pages(self, path: str, size_bytes: int) -> None:
        """Raises MediaUnavailableError: the length of such a file is a multiple of its pages."""
        rest = size_bytes % self.page_size_bytes
        if rest:
            fitting = size_bytes - rest, size_bytes - rest + self.page_size_bytes
            named = " or ".join(str(size) for size in fitting if size)
            raise MediaUnavailableError(
                f"{path} lies on hugetlbfs, in pages of {format_size(self.page_size_bytes)}: "
                f"{size_bytes} bytes are no whole number of them",
                next_step=f"use a size that is a multiple of the page: {named}",
            )

    def require(self, path: str, needed_bytes: int) -> None:
        """Raises NoSpaceError when there are fewer pages than that."""
        if needed_bytes > self.free_bytes:
            raise self.shortfall(path, needed_bytes)

    def shortfall(self, path: str, needed_bytes: int) -> NoSpaceError:
        """What to say when ``needed_bytes`` more are not to be had. No page is kept for others: the
        pool was set up for files like this one.
        """
        missing = max(needed_bytes - self.free_bytes, self.page_size_bytes)
        page = format_size(self.page_size_bytes)
        pages = self.pages + -(-missing // self.page_size_bytes)
        more = f"reserve more pages: echo {pages} > {self.setting} (now {self.pages})"
        if self.is_limited_by_mount:
            more = "mount the hugetlbfs with a larger size="
        return NoSpaceError(
            f"{path} needs {format_size(needed_bytes)} more in huge pages of {page}, and "
            f"{'its mount' if self.is_limited_by_mount else 'the pool of them'} has "
            f"{format_size(self.free_bytes)} free",
            needed_bytes=needed_bytes,
            available_bytes=self.free_bytes,
            next_step=f"choose a smaller size, or {more}",
        )


def pool_of(descriptor: int, *, sysfs: Path = SYSFS, proc: Path = Path("/proc")) -> Pool | None:
    """None: the file does not lie on hugetlbfs."""
    if file_system_of(descriptor, proc) != "hugetlbfs":
        return None
    system = os.fstatvfs(descriptor)
    page = system.f_frsize
    folder = sysfs / f"kernel/mm/hugepages/hugepages-{page // KIB}kB"
    pages = _number(folder / "nr_hugepages") or 0
    free = (_number(folder / "free_hugepages") or 0) - (_number(folder / "resv_hugepages") or 0)
    free += (_number(folder / "nr_overcommit_hugepages") or 0) - (
        _number(folder / "surplus_hugepages") or 0
    )
    limited = system.f_blocks > 0 and system.f_bavail < free
    return Pool(
        page_size_bytes=page,
        free_bytes=max(system.f_bavail if limited else free, 0) * page,
        pages=pages,
        setting=folder / "nr_hugepages",
        is_limited_by_mount=limited,
    )


# --- tmpfs --------------------------------------------------------------------------------------


def lengthen(descriptor: int, size_bytes: int) -> None:
    """Before anything of an empty file is allocated: huge=within_size compares with its length,
    and posix_fallocate changes that last. Elsewhere that would allocate other extents.
    """
    if file_system_of(descriptor) in VOLATILE_FILE_SYSTEMS:
        os.ftruncate(descriptor, size_bytes)


def touch_as_advised(descriptor: int, size_bytes: int) -> None:
    """On a tmpfs with huge=advise, allocate by touching a mapping for which huge pages were asked:
    fallocate asks for none there. What this leaves out is allocated as everywhere.
    """
    if "huge=advise" not in mount_options_of(descriptor) or allocated_bytes(descriptor):
        return
    with contextlib.suppress(OSError, ValueError), mmap.mmap(descriptor, size_bytes) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, size_bytes, _POPULATE_AT_ONCE):
            length = min(_POPULATE_AT_ONCE, size_bytes - start)
            memory.madvise(_MADV_POPULATE_WRITE, start, length)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
