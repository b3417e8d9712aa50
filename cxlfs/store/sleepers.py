"""Inodes of a metadata image that nobody has asked for yet: columns, of which objects are made one
by one. A million of them as objects would take two seconds of an opening and 600 MB.

Never here: loading the image (``loading``), anything that changes: what changes is awake.

Invariants
- After loading no directory sleeps, no symbolic link, nothing with extended attributes, with
  content kept aside, or with more than REFERENCES_MAX references. Whoever looks for such, looks
  at those that are awake.
- Nothing has changed about a sleeper since it was loaded, and every operation on an inode asks for
  it first: so a row here is what an image says of it, but for its references, which the engine has.
- A content belongs to the engine until its inode wakes up, then to that.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.format import layout
from cxlfs.native.maps import FileMap
from cxlfs.native.snapshot import references_at
from cxlfs.store.namespace import Inode

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.extents import Engine

REFERENCES_MAX = 7
"""A file with more may be one to be gathered, see ``defragmenter``."""


@dataclasses.dataclass(frozen=True, slots=True)
class SleeperColumns:
    """``rows`` (IMAGE_INODE_DTYPE) by number; of each how many names and subdirectories it has, the
    directory of the last name, which one that is of ``names`` (-1: none), and the content (0: it is
    not a file; see ``Engine.import_contents``).
    """

    rows: npt.NDArray[np.void]
    links: npt.NDArray[np.int64]
    subdirectories: npt.NDArray[np.int64]
    parents: npt.NDArray[np.uint64]
    name_indexes: npt.NDArray[np.int64]
    names: list[bytes]
    contents: npt.NDArray[np.uintp]


class Sleepers:
    """See the module. ``export_number``, ``exported``: the last metadata image that was begun has
    taken down so many rows.
    """

    def __init__(self, engine: Engine, columns: SleeperColumns) -> None:
        self._engine = engine
        self._columns = columns
        inos = np.ascontiguousarray(columns.rows["ino"])
        self._inos = inos.data
        self._is_awake = np.zeros(len(inos), dtype=np.bool_)
        self._count = len(inos)
        self.row_count = len(inos)
        self.export_number = 0
        self.exported = 0

    def __len__(self) -> int:
        return self._count

    def _find(self, ino: int) -> int | None:
        row = bisect.bisect_left(self._inos, ino)
        known = row < self.row_count and self._inos[row] == ino and not self._is_awake[row]
        return row if known else None

    def __contains__(self, ino: object) -> bool:
        return isinstance(ino, int) and self._find(ino) is not None

    def __iter__(self) -> Iterator[int]:
        for row in range(self.row_count):
            if not self._is_awake[row]:
                yield self._inos[row]

    def wake(self, ino: int) -> Inode | None:
        """Make the object, once; None: no such number sleeps."""
        row = self._find(ino)
        if row is None:
            return None
        columns = self._columns
        address = int(columns.contents[row])
        ino, mode, uid, gid, rdev, flags, _, *others = columns.rows[row].item()
        atime, mtime, ctime, birth, commit_lsn, commit_ns, *_ = others
        name = int(columns.name_indexes[row])
        inode = Inode(
            *(ino, mode, uid, gid, rdev, flags & ~layout.INODE_ASIDE),
            *(atime, mtime, ctime, birth, commit_lsn, commit_ns),
            links=int(columns.links[row]),
            parent=int(columns.parents[row]),
            name=b"" if name < 0 else columns.names[name],
            live=FileMap.at(self._engine, ino, address) if address else None,
            subdirectories=int(columns.subdirectories[row]),
        )
        if row < self.exported:
            inode.exported = self.export_number
        self._is_awake[row] = True
        self._count -= 1
        return inode

    def begin_export(self, number: int) -> None:
        """An image is begun that takes the rows from the first on; see ``exported``."""
        self.export_number, self.exported = number, 0

    def export(self, count: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """The next ``count`` rows for that image, as :meth:`rows`."""
        end = min(self.exported + count, self.row_count)
        taken = self.rows(self.exported, end)
        self.exported = end
        return taken

    def rows(self, first: int, end: int) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
        """What an image says of those among rows [first, end) that sleep, and their references.
        Raises OutOfMemoryError.
        """
        asleep = np.flatnonzero(~self._is_awake[first:end]) + first
        rows, contents = self._columns.rows[asleep], self._columns.contents[asleep]
        files = contents != 0
        sizes, counts, references = references_at(self._engine, contents[files])
        rows["size"][files], rows["ref_count"][files] = sizes, counts
        rows["reserved"] = 0
        return rows, references
