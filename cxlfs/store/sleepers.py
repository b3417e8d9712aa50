"""Inodes of a metadata image, and those that the journal made, that nobody has asked for yet:
columns, of which objects are made one by one. A million of them as objects would take two seconds
of an opening and 600 MB.

Never here: loading the image (``loading``), reading the journal (``replay_runs``), anything that
changes in a store that is open: what changes then is awake.

Invariants
- No directory sleeps, no symbolic link, nothing with an extended attribute that the store itself
  has set (``health``), with content kept aside, or with more than REFERENCES_MAX references.
  Whoever looks for such, looks at those that are awake.
- Only the journal changes sleepers, many at once, before the store is open; after that every
  operation on an inode asks for it first. So a row here is what an image says of it, but for its
  references, which the engine has: ``ref_count`` is how many there are at most.
- A content belongs to the engine until its inode wakes up, then to that.
- Numbers go up from one block of columns to the next one.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cxlfs.errors import invariant
from cxlfs.format import layout
from cxlfs.native.maps import FileMap
from cxlfs.native.snapshot import references_at
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.inodes import SleepingRows
from cxlfs.store.namespace import Inode, Namespace, stored_named_lsn

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.extents import Engine, Rows

    Integers: TypeAlias = npt.NDArray[np.int64]
    Numbers: TypeAlias = npt.NDArray[np.uint64]

REFERENCES_MAX = 7
"""A file with more may be one to be gathered, see ``defragmenter``."""


_FIELDS = (
    *("mode", "uid", "gid", "rdev", "flags"),
    *("atime_ns", "mtime_ns", "ctime_ns", "birth_ns", "commit_lsn", "commit_ns"),
)
"""Of a row, as ``Inode`` takes them behind the number."""


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


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What is known of some sleepers, a copy; ``ref_counts``: at most."""

    modes: npt.NDArray[np.uint32]
    links: Integers
    ref_counts: Numbers
    contents: npt.NDArray[np.uintp]


class _Block:
    """Columns that came together; ``first_row``: how many rows come before them. ``has_left``:
    which of them woke up, or were removed.
    """

    __slots__ = ("columns", "first_row", "has_left", "inos", "numbers")

    def __init__(self, columns: SleeperColumns, first_row: int) -> None:
        self.columns = columns
        self.first_row = first_row
        self.numbers = np.ascontiguousarray(columns.rows["ino"])
        self.inos = self.numbers.data
        self.has_left = np.zeros(len(columns.rows), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.inos)

    def find(self, ino: int) -> int | None:
        """The row of a number that sleeps."""
        row = bisect.bisect_left(self.inos, ino)
        known = row < len(self.inos) and self.inos[row] == ino and not self.has_left[row]
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
        self.xattrs: dict[int, dict[bytes, bytes]] = {}
        """By number: names and values. Few have some."""
        self.export_number = 0
        self.exported = 0
        self._unknown = 0
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
        if ino > self.last_ino:
            return None  # made since: asked for with each new file
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
                if not block.has_left[row]:
                    yield block.inos[row]

    def wake(self, ino: int) -> Inode | None:
        """Make the object, once; None: no such number sleeps."""
        found = self._find(ino)
        if found is None:
            return None
        block, row = found
        columns = block.columns
        address = int(columns.contents[row])
        ino, mode, uid, gid, rdev, flags, named_lsn, *others = columns.rows[row].item()
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
        inode.named_lsn = named_lsn
        inode.xattrs = self.xattrs.pop(ino, None)
        if block.first_row + row < self.exported:
            inode.exported = self.export_number
        block.has_left[row] = True
        self._count -= 1
        return inode

    def wake_rows(self, rows: Integers) -> dict[int, Inode]:
        """Make the objects of these, which sleep, before any image is begun; rows go up. By number.
        Each takes 0.9 µs so, one by one 3.1.
        """
        made = dict[int, Inode]()
        if not len(rows):
            return made
        for columns, block, inside, _ in self._parts(rows):
            said = columns.rows.take(inside)
            said["flags"] &= np.uint32(~layout.INODE_ASIDE & 0xFFFF_FFFF)
            inos = said["ino"].tolist()
            names = [
                b"" if index < 0 else columns.names[index]
                for index in columns.name_indexes[inside].tolist()
            ]
            contents = [
                FileMap.at(self._engine, ino, address) if address else None
                for ino, address in zip(inos, columns.contents[inside].tolist(), strict=True)
            ]
            inodes = map(  # a column for each argument: a call in Python would take as long again
                Inode,
                inos,
                *(said[name].tolist() for name in _FIELDS),
                *(columns.links[inside].tolist(), columns.parents[inside].tolist()),
                *(names, contents, columns.subdirectories[inside].tolist()),
            )
            made.update(zip(inos, inodes, strict=True))
            for ino, named_lsn in zip(inos, said["named_lsn"].tolist(), strict=True):
                made[ino].named_lsn = named_lsn
            block.has_left[inside] = True
        for ino in made.keys() & self.xattrs.keys():
            made[ino].xattrs = self.xattrs.pop(ino)
        self._count -= len(rows)
        return made

    def commits(self) -> Integers:
        """Of all rows with a content, asleep or not: time and number of the commit, as loaded."""
        found = [np.empty((0, 2), np.int64)]
        for block in self._blocks:
            rows = block.columns.rows
            found.append(np.stack((rows["commit_ns"], rows["commit_lsn"].astype(np.int64)), axis=1))
        return np.concatenate(found)

    def opened(self, lsn: int) -> None:
        """All names were linked by that record: what images say where no more is known."""
        self._unknown = stored_named_lsn(lsn)

    def begin_export(self, number: int) -> None:
        """An image is begun that takes the rows from the first on; see ``exported``."""
        self.export_number, self.exported = number, 0

    def export(self, count: int) -> SleepingRows:
        """The next ``count`` rows for that image, as :meth:`rows`."""
        end = min(self.exported + count, self.row_count)
        taken = self.rows(self.exported, end)
        self.exported = end
        return taken

    def rows(self, first: int, end: int) -> SleepingRows:
        """What an image says of those among rows [first, end) that sleep. Raises
        OutOfMemoryError.
        """
        parts = [
            (block.columns.rows.take(asleep), block.columns.contents[asleep])
            for block, asleep in self._asleep(first, end)
        ]
        rows = np.concatenate([np.empty(0, layout.IMAGE_INODE_DTYPE), *(each for each, _ in parts)])
        contents = np.concatenate([np.empty(0, np.uintp), *(each for _, each in parts)])
        files = contents != 0
        sizes, counts, references = references_at(self._engine, contents[files])
        rows["size"][files], rows["ref_count"][files] = sizes, counts
        rows["named_lsn"][rows["named_lsn"] == 0] = self._unknown
        known = self.xattrs
        inos = [ino for ino in rows["ino"].tolist() if ino in known] if known else []
        return SleepingRows(rows, references, [(ino, known[ino]) for ino in inos])

    def _asleep(self, first: int, end: int) -> Iterator[tuple[_Block, npt.NDArray[np.int64]]]:
        """The blocks that rows [first, end) lie in, and which of their rows sleep."""
        index = bisect.bisect_right(self._blocks, first, key=lambda block: block.first_row) - 1
        while first < end:
            block = self._blocks[index]
            inside = first - block.first_row
            count = min(end - first, len(block) - inside)
            yield block, np.flatnonzero(~block.has_left[inside : inside + count]) + inside
            first += count
            index += 1

    # --- what the journal says, many at once; rows and numbers go up --------------------------

    def find_rows(self, inos: Numbers) -> Integers:
        """The row of each that sleeps, else -1."""
        rows = np.full(len(inos), -1, dtype=np.int64)
        borders = np.searchsorted(inos, np.array(self._firsts, dtype=np.uint64)).tolist()
        for block, first, end in zip(self._blocks, borders, [*borders[1:], len(inos)], strict=True):
            if first == end:
                continue
            at = np.minimum(np.searchsorted(block.numbers, inos[first:end]), len(block) - 1)
            known = (block.numbers[at] == inos[first:end]) & ~block.has_left[at]
            rows[first:end][known] = at[known] + block.first_row
        return rows

    def _parts(self, rows: Integers) -> Iterator[tuple[SleeperColumns, _Block, Integers, slice]]:
        """Columns and block of each part of the rows, the rows in it, and which of all they are."""
        firsts = np.array([block.first_row for block in self._blocks], dtype=np.int64)
        borders = np.searchsorted(rows, firsts).tolist()
        for block, first, end in zip(self._blocks, borders, [*borders[1:], len(rows)], strict=True):
            if first != end:
                inside = rows[first:end] - block.first_row
                yield block.columns, block, inside, slice(first, end)

    def tell(self, rows: Integers) -> Told:
        """What is known of these."""
        count = len(rows)
        told = Told(
            np.zeros(count, dtype=np.uint32),
            np.zeros(count, dtype=np.int64),
            np.zeros(count, dtype=np.uint64),
            np.zeros(count, dtype=np.uintp),
        )
        for columns, _, inside, part in self._parts(rows):
            told.modes[part] = columns.rows["mode"][inside]
            told.links[part] = columns.links[inside]
            told.ref_counts[part] = columns.rows["ref_count"][inside]
            told.contents[part] = columns.contents[inside]
        return told

    def set_fields(self, rows: Integers, values: Rows | dict[str, npt.NDArray[np.generic]]) -> None:
        """Fields of an image's rows, by name; others are left out."""
        names = list(values) if isinstance(values, dict) else list(values.dtype.names or ())
        names = [name for name in names if name in (layout.IMAGE_INODE_DTYPE.names or ())]
        for columns, _, inside, part in self._parts(rows):
            for name in names:
                columns.rows[name][inside] = values[name][part]

    def set_links(self, rows: Integers, links: Integers) -> None:
        """How many names each has."""
        for columns, _, inside, part in self._parts(rows):
            columns.links[inside] = links[part]

    def set_names(
        self, rows: Integers, parents: Numbers, names: list[bytes], lsns: Numbers
    ) -> None:
        """The last name of each, and the record that gave it; 0: not known."""
        for columns, _, inside, part in self._parts(rows):
            columns.parents[inside] = parents[part]
            columns.rows["named_lsn"][inside] = lsns[part]
            columns.name_indexes[inside] = len(columns.names) + np.arange(len(inside))
            columns.names.extend(names[part])

    def remove(self, rows: Integers) -> list[int]:
        """They are gone; returns where their contents are, which are the caller's now."""
        addresses: list[int] = []
        for columns, block, inside, _ in self._parts(rows):
            block.has_left[inside] = True
            addresses += columns.contents[inside][columns.contents[inside] != 0].tolist()
        self._count -= len(rows)
        return addresses


def put_xattr(
    namespace: Namespace, sleeping: Sleepers, ino: int, name: bytes, value: bytes | None
) -> None:
    """Set or (None) remove an extended attribute of an inode that there is: asleep, it stays so,
    but for what the store looks for itself.
    """
    inode = namespace.inodes.get_awake(ino)
    if inode is None and name.startswith(HIDDEN_PREFIX):
        inode = namespace.get(ino)
    if inode is None:
        known = sleeping.xattrs.get(ino)
        if known is None and value is not None:
            known = sleeping.xattrs[ino] = {}
        if known is not None:
            namespace.change_xattr(known, name, value)
    elif value is None:
        namespace.remove_xattr(inode, name)
    else:
        namespace.set_xattr(inode, name, value)
