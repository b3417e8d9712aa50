"""How large the pages are that a region has got: asked of the kernel, of parts of the region.

Never here: what a source promises by itself (``media.pages``), changing a mapping.

Invariants
- The cost is bounded whatever the size of the region: at most PARTS times PART_PAGES pages and
  PARTS times PART_BYTES_MAX of address space are walked, in 1 ms. ``/proc/self/smaps`` walks every
  page: 5 to 25 ms for each GiB in pages of 4 KiB, so 5 s and more for a TiB.
- Nothing is touched: a page that is not mapped stays so.

Source: Linux, Documentation/admin-guide/mm/pagemap.rst and include/uapi/linux/fs.h, PAGEMAP_SCAN.
"""

from __future__ import annotations

import fcntl
import os
import struct
from typing import NamedTuple

from cxlfs._native import ffi, lib
from cxlfs.native.primitives import MappedRegion

PARTS = 64
PART_PAGES = 512
PART_BYTES_MAX = 1 << 30

_ARGUMENT = struct.Struct("=12Q")
_PAGEMAP_SCAN = 3 << 30 | _ARGUMENT.size << 16 | ord("f") << 8 | 16
_PRESENT, _HUGE = 1 << 3, 1 << 6
_ROW_WORDS = 3  # start, end, categories


class MappedBytes(NamedTuple):
    """Of the parts that were looked at; both 0: nothing there is mapped."""

    mapped: int
    huge: int
    """Of ``mapped``: by entries of a higher table (2 MiB on x86-64), or by hugetlbfs."""


def mapped_bytes(region: MappedRegion) -> MappedBytes | None:
    """None: the kernel does not tell (before Linux 6.7). Neither the store's lock nor any other is
    needed.
    """
    page = os.sysconf("SC_PAGESIZE")
    base = int(ffi.cast("uintptr_t", lib.cxl_media_base(region.handle)))
    size = -(-region.size_bytes // page) * page
    step = -(-size // PARTS // page) * page
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        found = [
            _scan(descriptor, base + start, base + min(start + min(step, PART_BYTES_MAX), size))
            for start in range(0, size, step)
        ]
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return MappedBytes(sum(part.mapped for part in found), sum(part.huge for part in found))


def _scan(descriptor: int, start: int, end: int) -> MappedBytes:
    """Of the first PART_PAGES pages that are mapped there."""
    rows = ffi.new("uint64_t[]", PART_PAGES * _ROW_WORDS)
    argument = bytearray(
        _ARGUMENT.pack(
            _ARGUMENT.size,
            0,
            start,
            end,
            0,
            int(ffi.cast("uintptr_t", rows)),
            PART_PAGES,
            PART_PAGES,
            0,
            _PRESENT,
            0,
            _PRESENT | _HUGE,
        )
    )
    count = fcntl.ioctl(descriptor, _PAGEMAP_SCAN, argument)
    mapped = huge = 0
    for row in range(count):
        first, last, categories = rows[row * _ROW_WORDS : (row + 1) * _ROW_WORDS]
        mapped += last - first
        huge += last - first if categories & _HUGE else 0
    return MappedBytes(mapped, huge)
