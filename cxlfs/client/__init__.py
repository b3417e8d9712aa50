"""A program's own way to the files of a mounted store: bytes go between its memory and the medium,
without a copy in the kernel, where the machine, the user and the mount allow it.

Never here: a promise that POSIX does not make for the same file. Whatever cannot go directly goes
through the kernel, on any file system; ``File.why_not`` tells why, ``counts`` how much.

Invariants
- Names, permissions, commits and what becomes of a killed writer are the mount's, as ever.
- Importing it imports neither NumPy nor a framework.
"""

from __future__ import annotations

from cxlfs.client.files import File, open  # noqa: A004  as in io, which this stands in for
from cxlfs.client.mapped import MappedFile, StoredFile, Verify, map  # noqa: A004  as in mmap
from cxlfs.client.replacing import replacing
from cxlfs.native.client import ClientCounts, counts, forget

__all__ = [
    "ClientCounts",
    "File",
    "MappedFile",
    "StoredFile",
    "Verify",
    "counts",
    "forget",
    "map",
    "open",
    "replacing",
]
