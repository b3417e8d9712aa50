"""Applying many journal records that only make files, name them and say what is in them, at once.

A full journal holds 170 000 saves of new files. One after the other each takes a hundred steps of
Python; as columns each file is looked at once, or made and left asleep (``sleepers``).

Never here: records that do anything else (``replay``), the contents themselves (those go to the
engine, in their order, by ``replay``).

Invariants
- A run has the same effect as its operations one after the other. Where that is not certain, or
  where something is wrong, nothing has changed.
"""

from __future__ import annotations

import dataclasses
import itertools
import stat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cxlfs.format import layout
from cxlfs.native.extents import REF_DTYPE
from cxlfs.store.namespace import FileKind, entries_of
from cxlfs.store.sleepers import REFERENCES_MAX, SleeperColumns, Sleepers

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.operation_columns import OperationColumns
    from cxlfs.native.extents import Engine, Rows
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode, Namespace

    Integers: TypeAlias = npt.NDArray[np.int64]
    Numbers: TypeAlias = npt.NDArray[np.uint64]
    Made: TypeAlias = tuple[Integers, Integers]

_TYPE_BITS = 0o170000
_ASLEEP_MIN = 16
"""Fewer new files in one run are made as objects: columns take as much."""
_NONE = (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
_NO_REFERENCES = np.empty(0, dtype=REF_DTYPE)


def plain_runs(found: OperationColumns, run_min: int, next_ino: int) -> list[tuple[int, int]]:
    """Where ``run_min`` operations or more follow each other, in whole records that make files,
    name something or set contents. Numbers from ``next_ino`` on were never used before.
    """
    is_inode = found.kinds == layout.OP_INODE
    plain = is_inode | (found.kinds == layout.OP_LINK)
    plain[found.kinds == layout.OP_CONTENT] = ~found.asides
    # Whatever is made and is no file, where it is mentioned first.
    special = np.flatnonzero(
        ((found.modes & _TYPE_BITS) != stat.S_IFREG) & (found.inos >= np.uint64(next_ino))
    )
    _, first = np.unique(found.inos[special], return_index=True)
    plain[np.flatnonzero(is_inode)[special[first]]] = False
    # No part of a record: two borders of records for each operation that is not plain.
    others = found.records[~plain]
    begins = np.searchsorted(found.records, others, side="left")
    behind = np.searchsorted(found.records, others, side="right")
    firsts = np.concatenate(([0], behind))
    ends = np.concatenate((begins, [len(plain)]))
    long = ends - firsts >= run_min
    return list(zip(firsts[long].tolist(), ends[long].tolist(), strict=True))


def middle_of(found: OperationColumns, first: int, end: int) -> int:
    """Where a record begins behind the middle of a run, or its end."""
    record = found.records[(first + end) // 2]
    return first + int(np.searchsorted(found.records[first:end], record, side="right"))


@dataclasses.dataclass(frozen=True, slots=True)
class Applied:
    """What a run leaves to do: of each inode that it did not make the row of its last attributes
    and the last record that publishes it; the content of each of its changes, or its address.
    """

    attributes: dict[int, int]
    commits: dict[int, int]
    contents: list[FileMap | int]


class _Numbers:
    """Inode numbers of some operations, in order and each once; ``which`` of them each operation
    has, the place in the run of the first and the index of the last one that has it.
    """

    def __init__(self, inos: Numbers, places: Integers) -> None:
        self.inos, first, which = np.unique(inos, return_index=True, return_inverse=True)
        self.first_places = places[first]
        self.which: Integers = which
        self.last = np.empty(len(self.inos), dtype=np.int64)
        self.last[which] = np.arange(len(inos))  # of equal indexes the last one counts


class Run:
    """Operations [first, end) of a batch, see :func:`plain_runs`, once."""

    def __init__(self, namespace: Namespace, found: OperationColumns, first: int, end: int) -> None:
        self._namespace = namespace
        self._found = found
        kinds, indexes = found.kinds[first:end], found.indexes[first:end]
        at_inode, at_change, at_name = (
            np.flatnonzero(kinds == kind)
            for kind in (layout.OP_INODE, layout.OP_CONTENT, layout.OP_LINK)
        )
        self._rows, self._changes = indexes[at_inode], indexes[at_change]
        self._links = indexes[at_name]
        self._inodes = _Numbers(found.inos[self._rows], at_inode)
        self._owners = _Numbers(found.change_inos[self._changes], at_change)
        self._meant = _Numbers(found.meant[self._links], at_name)
        self._known: list[Inode | None] = []
        self._new: Integers  # which of _inodes are made here
        self._owners_made: Made | None = None
        self._old_contents: list[FileMap] = []  # of those of _owners that are not
        self._meant_made: Made | None = None
        self._old_meant: list[Inode] = []  # those of _meant that are not
        self._entries: list[tuple[dict[bytes, int], dict[bytes, int]]] = []  # and what is new there

    def apply(self, engine: Engine, rows: Rows) -> Applied | None:
        """``rows``: the records of the batch. None: it cannot be done at once, and nothing was.
        Raises OutOfMemoryError.
        """
        possible = (
            not self._namespace.orphan_count()
            and self._look_at_inodes()
            and self._look_at_contents()
            and self._look_at_names()
        )
        if not possible:
            return None
        addresses = self._make(engine, rows)
        self._put_names()
        return self._rest(addresses)

    # --- whether it can be ------------------------------------------------------------------

    def _look_at_inodes(self) -> bool:
        """Files are made, and nothing changes its type."""
        inos, namespace = self._inodes.inos, self._namespace
        perhaps = int(np.searchsorted(inos, namespace.next_ino))
        known = [namespace.inodes.get(ino) for ino in inos[:perhaps].tolist()]
        known += [None] * (len(inos) - perhaps)
        modes = [stat.S_IFREG if inode is None else inode.mode for inode in known]
        self._known = known
        self._new = np.flatnonzero([inode is None for inode in known])
        types = np.array(modes, dtype=np.uint32)[self._inodes.which]
        return not ((types ^ self._found.modes[self._rows]) & _TYPE_BITS).any()

    def _made_here(self, numbers: _Numbers) -> Made | None:
        """Which of ``numbers`` are inodes that the run makes, and which of those; None when one is
        mentioned before it is made.
        """
        made = self._inodes.inos[self._new]
        place = np.searchsorted(made, numbers.inos)
        is_made = np.isin(numbers.inos, made)
        at, place = np.flatnonzero(is_made), place[is_made]
        before = numbers.first_places[at] < self._inodes.first_places[self._new[place]]
        return None if before.any() else (at, place)

    def _look_at_contents(self) -> bool:
        """Each content is one of a file that is there by then."""
        self._owners_made = self._made_here(self._owners)
        if self._owners_made is None:
            return False
        get = self._namespace.inodes.get
        for ino in np.delete(self._owners.inos, self._owners_made[0]).tolist():
            inode = get(ino)
            if inode is None or inode.live is None:
                return False
            self._old_contents.append(inode.live)
        return True

    def _look_at_names(self) -> bool:
        """Each is new in a directory, and means something that is there and is no directory."""
        self._meant_made = self._made_here(self._meant)
        if self._meant_made is None:
            return False
        get, names = self._namespace.inodes.get, self._found.names
        for ino in np.delete(self._meant.inos, self._meant_made[0]).tolist():
            inode = get(ino)
            if inode is None or inode.is_directory:
                return False
            self._old_meant.append(inode)
        parents = self._found.parents[self._links]
        order = np.argsort(parents, kind="stable")
        parents, links = parents[order], self._links[order]
        borders = np.flatnonzero(parents[1:] != parents[:-1]) + 1
        meant = self._found.meant
        for first, end in itertools.pairwise([0, *borders.tolist(), len(links)]):
            if first == end:
                break
            directory = get(int(parents[first]))
            if directory is None or not directory.is_directory or directory.listing is not None:
                return False
            of_these = links[first:end]
            new = dict(zip([names[i] for i in of_these], meant[of_these].tolist(), strict=True))
            entries = entries_of(directory)
            if len(new) < end - first or not entries.keys().isdisjoint(new):
                return False
            self._entries.append((entries, new))
        return True

    # --- doing it ---------------------------------------------------------------------------

    def _make(self, engine: Engine, records: Rows) -> list[int]:
        """The new files, with everything that the run says of them but their contents, whose
        addresses are returned.
        """
        count = len(self._new)
        if not count:
            return []
        inos, none = self._inodes.inos[self._new], np.zeros(count + 1, dtype=np.uint64)
        maps = engine.import_contents(inos, none[1:], none, _NO_REFERENCES)
        columns = self._columns(records, maps)
        namespace = self._namespace
        sleeping = namespace.inodes.sleeping
        asleep = np.zeros(count, dtype=np.bool_)
        if isinstance(sleeping, Sleepers) and count >= _ASLEEP_MIN:
            asleep = (inos > np.uint64(sleeping.last_ino)) & (self._references() <= REFERENCES_MAX)
            sleeping.add(_part(columns, asleep))
        for inode in Sleepers(engine, _part(columns, ~asleep)).all():
            namespace.inodes[inode.ino] = inode
        namespace.kind_counts[FileKind.FILE] += count
        namespace.next_ino = max(namespace.next_ino, int(inos[-1]) + 1)
        addresses: list[int] = maps.tolist()
        return addresses

    def _columns(self, records: Rows, maps: npt.NDArray[np.uintp]) -> SleeperColumns:
        """What the run says of the new files."""
        found, count = self._found, len(self._new)
        said = found.attributes(self._rows[self._inodes.last[self._new]].tolist())
        rows = np.zeros(count, dtype=layout.IMAGE_INODE_DTYPE)
        for name in said.dtype.names or ():
            rows[name] = said[name]
        at, place = self._owners_made or _NONE
        published = found.change_records[self._changes[self._owners.last[at]]]
        rows["commit_lsn"][place] = records["lsn"][published]
        rows["commit_ns"][place] = records["time_ns"][published]
        links = np.zeros(count, dtype=np.int64)
        parents = np.zeros(count, dtype=np.uint64)
        name_indexes = np.full(count, -1, dtype=np.int64)
        at, place = self._meant_made or _NONE
        links[place] = np.bincount(self._meant.which, minlength=len(self._meant.inos))[at]
        last = self._links[self._meant.last[at]]
        parents[place], name_indexes[place] = found.parents[last], np.arange(len(last))
        names = [found.names[index] for index in last.tolist()]
        return SleeperColumns(rows, links, np.zeros_like(links), parents, name_indexes, names, maps)

    def _references(self) -> Numbers:
        """How many each new file gets, at most."""
        of_each = np.zeros(len(self._owners.inos), dtype=np.uint64)
        np.add.at(of_each, self._owners.which, self._found.changes["ref_count"][self._changes])
        at, place = self._owners_made or _NONE
        counts = np.zeros(len(self._new), dtype=np.uint64)
        counts[place] = of_each[at]
        return counts

    def _put_names(self) -> None:
        """Into their directories; and what they are for inodes that were there before."""
        namespace, found = self._namespace, self._found
        for entries, new in self._entries:
            entries.update(new)
            namespace.name_bytes += sum(map(len, new))
            namespace.string_items += len(new)
        made = self._meant_made or _NONE
        counts = np.bincount(self._meant.which, minlength=len(self._meant.inos))
        for inode, count, last in zip(
            self._old_meant,
            np.delete(counts, made[0]).tolist(),
            np.delete(self._links[self._meant.last], made[0]).tolist(),
            strict=True,
        ):
            inode.links += count
            inode.parent, inode.name = int(found.parents[last]), found.names[last]

    def _rest(self, addresses: list[int]) -> Applied:
        found, owners = self._found, self._owners
        rows = self._rows[self._inodes.last].tolist()
        attributes = {
            inode.ino: row
            for inode, row in zip(self._known, rows, strict=True)
            if inode is not None
        }
        at, place = self._owners_made or _NONE
        contents = np.empty(len(owners.inos), dtype=object)
        contents[at] = [addresses[index] for index in place.tolist()]
        old = np.delete(np.arange(len(owners.inos)), at)
        contents[old] = self._old_contents
        records = found.change_records[self._changes[owners.last[old]]]
        commits = dict(zip(owners.inos[old].tolist(), records.tolist(), strict=True))
        return Applied(attributes, commits, contents[owners.which].tolist())


def _part(columns: SleeperColumns, which: npt.NDArray[np.bool_]) -> SleeperColumns:
    """Some of them, all names."""
    return dataclasses.replace(
        columns,
        rows=columns.rows[which],
        links=columns.links[which],
        subdirectories=columns.subdirectories[which],
        parents=columns.parents[which],
        name_indexes=columns.name_indexes[which],
        contents=columns.contents[which],
    )
