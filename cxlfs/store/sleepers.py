"""Inodes of a metadata image, and those that the journal made, that nobody has asked for yet:
columns, of which objects are made one by one. A million of them as objects would take two seconds
of an opening and 600 MB.

Never here: loading the image (``loading``), reading the journal (``replay_runs``), anything that
changes: what changes is awake.

Invariants
- After loading no directory sleeps, no symbolic link, nothing with extended attributes, with
  content kept aside, or with more than REFERENCES_MAX references. Whoever looks for such, looks
  at those that are awake.
- Nothing has changed about a sleeper since it was loaded, and every operation on an inode asks for
  it first: so a row here is what an image says of it, but for its references, which the engine has.
- A content belongs to the engine until its inode wakes up, then to that.
- Numbers go up from one block of columns to the next one.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.errors import invariant
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


class _Block:
    """Columns that came together; ``first_row``: how many rows come before them."""

    __slots__ = ("columns", "first_row", "inos", "is_awake")

    def __init__(self, columns: SleeperColumns, first_row: int) -> None:
        self.columns = columns
        self.first_row = first_row
        self.inos = np.ascontiguousarray(columns.rows["ino"]).data
        self.is_awake = np.zeros(len(columns.rows), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.inos)

    def find(self, ino: int) -> int | None:
        """The row of a number that sleeps."""
        row = bisect.bisect_left(self.inos, ino)
        known = row < len(self.inos) and self.inos[row] == ino and not self.is_awake[row]
        return row if known else None


class Sleepers:
    """See the module. ``export_number``, ``exported``: the last metadata image that was begun has
    taken down so many rows.
    """

    def __init__(self, engine: Engine, columns: SleeperColumns) -> None:
        self._engine = engine
        self._blocks: list[_Block] = []
        self._firsts: list[int] = []  # number of each block
        self._count = 0
        self.last_ino = 0
        """Those that are added have larger numbers."""
        self.row_count = 0
        self.export_number = 0
        self.exported = 0
        self.add(columns)

    def add(self, columns: SleeperColumns) -> None:
        """More of them, all with larger numbers, before any image is begun."""
        if len(columns.rows):
            block = _Block(columns, self.row_count)
            invariant(block.inos[0] > self.last_ino, "those that go to sleep are new")
            self._blocks.append(block)
            self._firsts.append(block.inos[0])
            self.last_ino = block.inos[-1]
            self._count += len(block)
            self.row_count += len(block)

    def __len__(self) -> int:
        return self._count

    def _find(self, ino: int) -> tuple[_Block, int] | None:
        index = bisect.bisect_right(self._firsts, ino)
        if not index:
            return None
        block = self._blocks[index - 1]
        row = block.find(ino)
        return None if row is None else (block, row)

    def __contains__(self, ino: object) -> bool:
        return isinstance(ino, int) and self._find(ino) is not None

    def __iter__(self) -> Iterator[int]:
        for block in self._blocks:
            for row in range(len(block)):
                if not block.is_awake[row]:
                    yield block.inos[row]

    def wake(self, ino: int) -> Inode | None:
        """Make the object, once; None: no such number sleeps."""
        found = self._find(ino)
        if found is None:
            return None
        block, row = found
        columns = block.columns
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
        if block.first_row + row < self.exported:
            inode.exported = self.export_number
        block.is_awake[row] = True
        self._count -= 1
        return inode

    def all(self) -> Iterator[Inode]:
        """Wake everyone."""
        for ino in list(self):
            inode = self.wake(ino)
            if inode is not None:
                yield inode

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
        parts = [
            (block.columns.rows[asleep], block.columns.contents[asleep])
            for block, asleep in self._asleep(first, end)
        ]
        rows = np.concatenate([np.empty(0, layout.IMAGE_INODE_DTYPE), *(each for each, _ in parts)])
        contents = np.concatenate([np.empty(0, np.uintp), *(each for _, each in parts)])
        files = contents != 0
        sizes, counts, references = references_at(self._engine, contents[files])
        rows["size"][files], rows["ref_count"][files] = sizes, counts
        rows["reserved"] = 0
        return rows, references

    def _asleep(self, first: int, end: int) -> Iterator[tuple[_Block, npt.NDArray[np.int64]]]:
        """The blocks that rows [first, end) lie in, and which of their rows sleep."""
        index = bisect.bisect_right(self._blocks, first, key=lambda block: block.first_row) - 1
        while first < end:
            block = self._blocks[index]
            inside = first - block.first_row
            count = min(end - first, len(block) - inside)
            yield block, np.flatnonzero(~block.is_awake[inside : inside + count]) + inside
            first += count
            index += 1
