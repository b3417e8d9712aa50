"""cxlfs: a crash-atomic, checksummed checkpoint store on persistent memory, mounted with FUSE."""

from __future__ import annotations

__version__ = "0.1.0"
