"""History: one row for each fact that died, in the order of death.

A row keeps what a file, directory, symbolic link or special file was before a record changed it.
Its data stays where it is and counts as free (csrc/extents/coverage.c). Other modules give it back
(``past_space``, ``past_order``) and bring it back (``past_restore``).

Invariants
- A row follows from the state and the operations of the record that killed it. Its key is the LSN
  of that record and the number of the operation in it.
- A row exists for committed facts only. What no record has published leaves none, nor does a
  content in which damage was seen.
- A death takes no record, no fence and no copy of data.
- While a segment is referred to by a row, it is not used again: the row's content holds it.
- Rows live in DRAM. The archive stores them too, a moment later (``past_archive``), and an opening
  brings those back whose data is still there (``past_loading``).
"""

from __future__ import annotations

import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cxlfs.native.extents import Counting
from cxlfs.store.clones import REFS_AT_ONCE
from cxlfs.store.commit_numbers import COMMIT_XATTR
from cxlfs.store.past_archive import Archive
from cxlfs.store.past_names import NameEnd, NameEnds, TakenName
from cxlfs.store.past_order import Limits, Order
from cxlfs.store.past_rows import ArchiveSegment, Death, Row

if TYPE_CHECKING:
    from cxlfs.native.maps import Delta, FileMap
    from cxlfs.store.held import Held
    from cxlfs.store.leases import Leases
    from cxlfs.store.namespace import Inode
    from cxlfs.store.volume import Volume

IN_PLACE_REFS_MAX = 64
"""A content with more references leaves no row when it changes in place: it would be copied."""
_ROWS_PER_BLOCK = 4096


def _is_short(content: FileMap) -> bool:
    """True if it can be counted anew at once; a longer one ends in steps, without a row."""
    return content.ref_count <= REFS_AT_ONCE


class _Block:
    """Some thousand rows, and the columns that queries look through."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.inos, self.parents = array.array("Q"), array.array("Q")
        self.names = array.array("q")
        self.live = 0

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.inos.append(row.ino)
        self.parents.append(row.parent)
        self.names.append(hash(row.name))
        self.live += 1

    def find(self, column: array.array[int], value: int) -> list[int]:
        """Places where a column has the value."""
        return np.flatnonzero(np.frombuffer(column, column.typecode) == value).tolist()


class Past:
    """History of one volume. ``is_on`` False: nothing is kept."""

    def __init__(self, volume: Volume, leases: Leases, *, is_on: bool = True) -> None:
        self.volume = volume
        self.is_on = is_on
        self.limits = Limits.of(
            volume.superblock.segment_count * volume.superblock.segment_payload_bytes
        )
        self.order = Order()
        self.archive = Archive(volume, is_on=is_on)
        self.memory_bytes = 0
        self.name_ends = NameEnds()
        self.home_of: Callable[[int], int] = lambda ino: ino
        """Of a directory, the one whose names it has (``unit_aside``); 0: they leave no rows."""
        self._leases = leases
        self._rows: dict[tuple[int, int], Row] = {}
        self._blocks = [_Block()]
        self._unnamed: dict[int, Row] = {}
        """Rows of inodes that live on without a name; complete ones, once another content came."""
        self._contents: dict[int, Row] = {}
        """Rows with a content, by its address in the engine."""
        self._held: dict[int, list[Row]] = {}
        """Held rows of each inode."""
        self._lent: dict[int, list[FileMap]] = {}
        """Contents of each inode that readers have copies of."""
        self._placed: dict[int, tuple[int, int]] = {}
        """Of files that came back, or whose content did: the last record that brought it, and its
        time.
        """
        self._opened_ns = volume.now()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def content_count(self) -> int:
        return len(self._contents)

    # --- births -----------------------------------------------------------------------------

    def came_back(self, ino: int, lsn: int, time_ns: int) -> None:
        """A record brought a file back, or its content, under the commit number that it had."""
        self._placed[ino] = lsn, time_ns

    def placed(self, inode: Inode) -> tuple[int, int]:
        """Number and time of the record since which a file has its content and a name without a
        break, or of a later one.
        """
        published = inode.commit_lsn, inode.commit_ns
        found = self._placed.get(inode.ino, published)
        if found is published and COMMIT_XATTR in (inode.xattrs or {}):
            return self.volume.namespace.opened_lsn, self._opened_ns
        return max(found, published)

    # --- deaths -----------------------------------------------------------------------------

    def wants(self, inode: Inode, delta: Delta) -> bool:
        """True if a change in place leaves a row: it changes bytes that were there, of a content
        that is cheap to copy. The row takes the second map, which the next change makes anew.
        """
        old = inode.committed
        if not self.is_on or old is None or not inode.commit_lsn:
            return False
        if self._is_incomplete(self._unnamed.get(inode.ino)):
            return True
        size = old.size
        first = int.from_bytes(delta.references[:8], "little") if delta.references else size
        return min(delta.cut, first) < size and old.ref_count < IN_PLACE_REFS_MAX

    def replaced(
        self, inode: Inode, key: tuple[int, int], died_ns: int, *, whole: bool = True
    ) -> None:
        """The committed content of a file was replaced by a record; it ends here, or is kept."""
        content, inode.committed = inode.committed, None
        if content is None:
            return
        self._leases.close(content)
        row = self._unnamed.get(inode.ino)
        if row is not None:
            self._complete(row, content)
            return
        is_wanted = self.is_on and inode.commit_lsn and content.size and not inode.damaged
        if not (is_wanted and _is_short(content)):
            content.close()
            return
        parent = self.home_of(inode.parent)
        if not parent:
            content.close()
            return
        content.count_as(Counting.PAST)
        death = Death.OVERWRITTEN if whole else Death.CHANGED
        row = self._born(Row(key, died_ns, death, inode, parent, inode.name, content), inode)
        row.ended_lsn = self._ended(row, inode)
        self._add(row)

    def _born(self, row: Row, inode: Inode) -> Row:
        """With the record that put the content in its place."""
        row.born_lsn, row.born_ns = self.placed(inode)
        return row

    def _ended(self, row: Row, inode: Inode) -> int:
        """The record until which the row's name surely had its content."""
        if row.parent == inode.parent:
            return row.ended_lsn
        return (
            row.born_lsn
        )  # users lost that name before, since the store keeps it: when is not known

    def outlived(
        self,
        inode: Inode,
        content: FileMap,
        held: Held,
        key: tuple[int, int],
        died_ns: int,
    ) -> None:
        """The version before of a file was held after it was overwritten, and is not any more."""
        self._leases.close(content)
        if not (self.is_on and held.commit_lsn and content.size and _is_short(content)):
            content.close()
            return
        parent = self.home_of(inode.parent)
        if not parent:
            content.close()
            return
        content.count_as(Counting.PAST)
        row = Row(key, died_ns, Death.OVERWRITTEN, inode, parent, inode.name, content)
        row.mtime_ns, row.born_lsn, row.born_ns = held.mtime_ns, held.commit_lsn, held.commit_ns
        row.flags = 0
        row.ended_lsn = min(held.ended_lsn or held.commit_lsn, self._ended(row, inode))
        self._add(row)

    def died(
        self,
        inode: Inode,
        parent: int,
        name: bytes,
        key: tuple[int, int],
        died_ns: int,
        death: Death,
    ) -> None:
        """A record took the last name of an inode. Call it before the inode is reaped.

        Users lost a name that the store keeps for itself before: when is not known.
        """
        home = self.home_of(parent)
        if not (self.is_on and home) or inode.uncommitted or inode.damaged:
            return
        row = self._born(Row(key, died_ns, death, inode, home, name, None), inode)
        if home == parent:
            row.named_lsn = self.volume.namespace.named_since(inode)
        else:
            row.ended_lsn = row.born_lsn
        if row.is_incomplete and not row.born_lsn:
            return
        if inode.live is None:
            row.inode = None
        else:
            self._unnamed[inode.ino] = row
        self._add(row)

    def has_unnamed(self, inode: Inode) -> bool:
        """A row says that the inode lost its last name."""
        return inode.ino in self._unnamed

    def names_taken(self, taken: Sequence[TakenName], lsn: int, time_ns: int, death: Death) -> None:
        """A record took names; the last one of each inode, if none is left, is how it died."""
        last = {name.inode.ino: name.number for name in taken}
        for parent, name, inode, since, number in taken:
            if inode.is_removed and number == last[inode.ino]:
                self.died(inode, parent, name, (lsn, number), time_ns, death)
            else:
                self.name_ended(NameEnd(parent, name, inode.ino, since, lsn))

    def revive(self, ino: int, lsn: int, time_ns: int) -> None:
        """A record gave what had lost its last name a name again. Its row stays: it has a copy of
        the references.
        """
        self.came_back(ino, lsn, time_ns)
        row = self._unnamed.get(ino)
        content = None if row is None else row.data
        if row is not None and content is not None and self._is_incomplete(row):
            self._leases.close(content)
            self._complete(row, content.clone(Counting.PAST))
        self._unnamed.pop(ino, None)

    def name_ended(self, end: NameEnd) -> None:
        """A record took a name of an inode that has others."""
        if self.is_on and self.home_of(end.parent) == end.parent:
            self.name_ends.add(end)

    def dropping(self, inode: Inode) -> None:
        """An inode without a name is about to go: its row takes the committed content over."""
        self._placed.pop(inode.ino, None)
        row = self._unnamed.pop(inode.ino, None)
        content = inode.committed or inode.live
        if row is None or content is None or not self._is_incomplete(row):
            return
        if inode.port is not None:
            self.forget(row)
            return
        if content is inode.committed:
            inode.committed = None
        else:
            inode.live = None
        self._leases.close(content)
        self._complete(row, content)

    def closing(self) -> None:
        """No content changes any more: rows of what is open without a name copy the references."""
        for row in list(self._unnamed.values()):
            content = row.data
            if content is not None and self._is_incomplete(row):
                self._leases.close(content)
                self._complete(row, content.clone(Counting.PAST))

    def _is_incomplete(self, row: Row | None) -> bool:
        """Its content is that of an inode that lives on without a name."""
        return row is not None and row.inode is not None and not row.is_gone

    def _complete(self, row: Row, content: FileMap) -> None:
        """The content that an inode had when it lost its last name is its row's from now on, or
        ends here.
        """
        if not self._is_incomplete(row):
            content.close()
        elif not _is_short(content):
            self.forget(row)
            content.close()
        else:
            row.inode, row.content = None, content
            content.count_as(Counting.HELD if row.is_held else Counting.PAST)
            self._contents[content.address] = row
            self.memory_bytes += row.measure() - row.memory_bytes
            row.memory_bytes = row.measure()
            self.archive.add(row)

    def adopt(self, rows: Iterable[Row], found: Sequence[ArchiveSegment]) -> None:
        """Rows that an opening found, in the order of death, and the segments that have them."""
        self.archive.adopt(found)
        for row in rows:
            self._put(row)

    def _add(self, row: Row) -> None:
        self._put(row)
        if row.inode is None:
            self.archive.add(row)

    def _put(self, row: Row) -> None:
        self._rows[row.key] = row
        if row.content is not None:
            self._contents[row.content.address] = row
        block = self._blocks[-1]
        if len(block.rows) == _ROWS_PER_BLOCK:
            block = _Block()
            self._blocks.append(block)
        block.add(row)
        self.order.add(row)
        self.memory_bytes += row.memory_bytes
        while len(self._rows) > self.limits.rows or self.memory_bytes > self.limits.memory_bytes:
            oldest = self.order.next()
            if oldest is None:
                break
            self.forget(oldest)

    # --- ends of rows -----------------------------------------------------------------------

    def forget(self, row: Row) -> None:
        """Drop a row and what it holds of the media, held or not. Idempotent."""
        if row.is_gone:
            return
        row.is_gone = True
        self.archive.drop(row)
        del self._rows[row.key]
        self.order.remove(row)
        self.memory_bytes -= row.memory_bytes
        if row.is_held:
            self._drop_hold(row)
        if row.inode is not None:
            self._unnamed.pop(row.ino, None)
            row.inode = None
        content, row.content = row.content, None
        if content is not None:
            del self._contents[content.address]
            content.close()
        self._shrink(row)

    def _shrink(self, row: Row) -> None:
        """Drop blocks whose rows are gone, and join two neighbours that one has room for."""
        index = self._block_of(row)
        block = self._blocks[index]
        block.live -= 1
        behind = index + 1
        if behind < len(self._blocks) and (
            block.live + self._blocks[behind].live <= _ROWS_PER_BLOCK // 2
            and len(block.rows) + len(self._blocks[behind].rows) > _ROWS_PER_BLOCK
        ):
            joined = _Block()
            for left in (*block.rows, *self._blocks[behind].rows):
                if not left.is_gone:
                    joined.add(left)
            self._blocks[index : behind + 1] = [joined]
        elif not block.live and len(self._blocks) > 1:
            del self._blocks[index]

    def _block_of(self, row: Row) -> int:
        low, high = 0, len(self._blocks)
        while high - low > 1:
            middle = (low + high) // 2
            if self._blocks[middle].rows and self._blocks[middle].rows[0].key <= row.key:
                low = middle
            else:
                high = middle
        return low

    def forget_all(self) -> None:
        """Drop all rows, as at the end. Call :meth:`Archive.finish` first: what it has stored stays
        on the media.
        """
        for row in list(self._rows.values()):
            self.forget(row)

    def forget_in(self, segment: int) -> None:
        """Drop the rows whose content refers to bytes in a segment, but for held ones."""
        for address in self.volume.engine.past_contents(segment):
            row = self._contents.get(address)
            if row is not None:
                self.forget(row)

    # --- holds ------------------------------------------------------------------------------

    def hold(self, row: Row, *, pinned: bool = False) -> None:
        """Keep a row: it counts as used, and goes only before a write would fail; never if it is
        pinned. :meth:`release` ends one hold.
        """
        row.holds += 1
        row.is_pinned = row.is_pinned or pinned
        if row.holds == 1 and not row.is_gone:
            self.order.remove(row)
            self._held.setdefault(row.ino, []).append(row)
            if row.content is not None:
                row.content.count_as(Counting.HELD)

    def release(self, row: Row) -> None:
        row.holds -= 1
        if row.holds or row.is_gone:
            return
        row.is_pinned = False
        self._drop_hold(row)
        self.order.put_back(row)
        if row.content is not None:
            row.content.count_as(Counting.PAST)
        self.archive.renew(row)  # what is held may have been moved

    def _drop_hold(self, row: Row) -> None:
        held = self._held[row.ino]
        held.remove(row)
        if not held:
            del self._held[row.ino]

    def oldest_held(self) -> Row | None:
        """The oldest held row that may be given up."""
        held = (row for rows in self._held.values() for row in rows if not row.is_pinned)
        return min(held, default=None)

    def held_contents(self, ino: int) -> list[FileMap]:
        """Contents of held rows of an inode, and lent ones: what moves data moves them too."""
        held = [row.content for row in self._held.get(ino, ()) if row.content is not None]
        return held + self._lent.get(ino, [])

    def lend(self, ino: int, content: FileMap) -> None:
        """A reader has a copy of an earlier content of an inode until :meth:`give_back`."""
        self._lent.setdefault(ino, []).append(content)

    def give_back(self, ino: int, content: FileMap) -> None:
        lent = self._lent[ino]
        lent.remove(content)
        if not lent:
            del self._lent[ino]
        content.close()

    # --- questions --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Row]:
        """All rows, in the order of death."""
        return iter(self._rows.values())

    def get(self, key: tuple[int, int]) -> Row | None:
        return self._rows.get(key)

    def versions_of(self, parent: int, name: bytes) -> list[Row]:
        """What a name meant, in the order of death."""
        wanted = hash(name)
        return [
            row
            for block in self._blocks
            for row in (block.rows[i] for i in block.find(block.names, wanted))
            if row.parent == parent and row.name == name and not row.is_gone
        ]

    def of_inode(self, ino: int) -> list[Row]:
        """What an inode was, in the order of death."""
        found = ((block, block.find(block.inos, ino)) for block in self._blocks)
        return [b.rows[i] for b, places in found for i in places if not b.rows[i].is_gone]

    def of_inodes(self, inos: set[int]) -> dict[int, list[Row]]:
        """The same of many, by number."""
        found: dict[int, list[Row]] = {}
        wanted = np.fromiter(inos, np.uint64, len(inos))
        for block in self._blocks if inos else ():
            places = np.flatnonzero(np.isin(np.frombuffer(block.inos, np.uint64), wanted))
            for row in (block.rows[place] for place in places.tolist()):
                if not row.is_gone:
                    found.setdefault(row.ino, []).append(row)
        return found

    def died_in(self, directory: int) -> list[Row]:
        """What the names in a directory meant, in the order of death."""
        found = ((block, block.find(block.parents, directory)) for block in self._blocks)
        return [b.rows[i] for b, places in found for i in places if not b.rows[i].is_gone]
