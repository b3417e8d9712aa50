"""Applying many journal records at once that make, name, change and remove files.

A full journal holds 170 000 saves of new files, or 350 000 unlinks. One after the other each takes
a hundred steps of Python; as columns each inode is looked at once, and stays asleep (``sleepers``)
or goes asleep where it is new.

Never here: records that do anything else (``replay``), the contents themselves (those go to the
engine, in their order, by ``replay``), whether it can be done (``replay_subjects``).

Invariants
- A run has the same effect as its operations one after the other. Where that is not certain, or
  where something is wrong, nothing has changed.
"""

from __future__ import annotations

import dataclasses
import stat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cxlfs.format import layout
from cxlfs.native.extents import REF_DTYPE
from cxlfs.store.commit_numbers import COMMIT_XATTR
from cxlfs.store.namespace import kind_of
from cxlfs.store.replay_subjects import TYPE_BITS, NameChanges, Part, Subjects, look_at_names
from cxlfs.store.sleepers import REFERENCES_MAX, SleeperColumns, Sleepers, put_xattr

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.operation_columns import OperationColumns
    from cxlfs.native.extents import Engine, Rows
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Namespace

    Integers: TypeAlias = npt.NDArray[np.int64]
    Flags: TypeAlias = npt.NDArray[np.bool_]

_ASLEEP_MIN = 16
"""Fewer new files in one run are made as objects: columns take as much."""
_NO_REFERENCES = np.empty(0, dtype=REF_DTYPE)
_PLAIN = (
    *(layout.OP_INODE, layout.OP_LINK, layout.OP_UNLINK),
    *(layout.OP_SYMLINK, layout.OP_XATTR_SET, layout.OP_XATTR_REMOVE),
)


def plain_runs(found: OperationColumns, run_min: int) -> list[tuple[int, int]]:
    """Where ``run_min`` operations or more follow each other, in whole records, that do what a
    :class:`Run` does: all but keeping aside, moving data, and contents of an earlier commit.
    """
    plain = np.isin(found.kinds, _PLAIN)
    plain[found.kinds == layout.OP_CONTENT] = ~found.asides
    if COMMIT_XATTR in found.string_names:
        names = np.array([name == COMMIT_XATTR for name in found.string_names])
        plain[(found.kinds == layout.OP_XATTR_SET) & names[found.indexes % len(names)]] = False
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
    """What a run leaves to do: of each inode that is an object the row of its last attributes and
    the last record that publishes it; the content of each of its changes, or its address; where
    the contents are that nobody has any more.
    """

    attributes: dict[int, int]
    commits: dict[int, int]
    contents: list[FileMap | int]
    dropped: list[int]


class Run:
    """Operations [first, end) of a batch, see :func:`plain_runs`, once."""

    def __init__(self, namespace: Namespace, found: OperationColumns, first: int, end: int) -> None:
        self._namespace = namespace
        self._found = found
        self._part = Part(found, first, end)
        self._sleeping: Sleepers
        self._names: NameChanges
        self._subjects: Subjects
        self._is_gone: Flags
        self._last_rows: Integers  # of each subject the row of its last attributes; -1: none
        self._last_changes: Integers  # and its last change

    def apply(self, engine: Engine, records: Rows) -> Applied | None:
        """``records``: those of the batch. None: it cannot be done at once, and nothing was.
        Raises OutOfMemoryError.
        """
        namespace, sleeping = self._namespace, self._namespace.inodes.sleeping
        if namespace.orphan_count() or not isinstance(sleeping, Sleepers):
            return None
        names = look_at_names(namespace, self._part)
        if names is None:
            return None
        subjects = Subjects(namespace, sleeping, self._part, names)
        if not subjects.possible():
            return None
        subjects.wake_large()
        self._sleeping, self._names, self._subjects = sleeping, names, subjects
        self._is_gone = subjects.is_gone
        self._last_rows = np.full(len(subjects.inos), -1)
        self._last_rows[subjects.of_inodes] = self._part.inode_rows
        self._last_changes = np.full(len(subjects.inos), -1)
        self._last_changes[subjects.of_changes] = self._part.changes
        self._make(engine, records)
        contents = self._contents()
        self._change_sleepers(records)
        self._name_objects(records)
        self._put_names()
        self._put_strings()
        return Applied(*self._rest(), contents, self._drop())

    # --- new inodes -------------------------------------------------------------------------

    def _make(self, engine: Engine, records: Rows) -> None:
        """With everything that the run says of them but their contents."""
        subjects, namespace = self._subjects, self._namespace
        made = np.flatnonzero(subjects.is_made)
        if not len(made):
            return
        files = made[subjects.is_file[made]]
        none = np.zeros(len(files) + 1, dtype=np.uint64)
        subjects.contents[files] = engine.import_contents(
            subjects.inos[files], none[1:], none, _NO_REFERENCES
        )
        namespace.next_ino = max(namespace.next_ino, int(subjects.inos[made[-1]]) + 1)
        made = made[~self._is_gone[made]]
        if not len(made):
            return
        columns = self._columns(made, records)
        types = columns.rows["mode"] & TYPE_BITS
        may_sleep = (types != stat.S_IFDIR) & (types != stat.S_IFLNK) & (columns.links > 0)
        may_sleep &= subjects.inos[made] > np.uint64(self._sleeping.last_ino)
        may_sleep &= subjects.references[made] <= REFERENCES_MAX
        if np.count_nonzero(may_sleep) < _ASLEEP_MIN:
            may_sleep[:] = False
        self._sleeping.add(_part(columns, may_sleep))
        awake = Sleepers(engine, _part(columns, ~may_sleep))
        namespace.inodes.add_awake(awake.wake_rows(np.arange(awake.row_count)))
        for kind, count in zip(*np.unique(types, return_counts=True), strict=True):
            found = kind_of(int(kind))
            if found is not None:
                namespace.kind_counts[found] += int(count)

    def _columns(self, made: Integers, records: Rows) -> SleeperColumns:
        """What the run says of new inodes."""
        subjects, count = self._subjects, len(made)
        said = self._found.attributes(self._last_rows[made].tolist())
        rows = np.zeros(count, dtype=layout.IMAGE_INODE_DTYPE)
        for name in said.dtype.names or ():
            if name in (rows.dtype.names or ()):
                rows[name] = said[name]
        rows["ref_count"] = subjects.references[made]
        published = np.flatnonzero(self._last_changes[made] >= 0)
        lsns, times = self._commits(made[published], records)
        rows["commit_lsn"][published], rows["commit_ns"][published] = lsns, times
        last = self._last_links()[made]
        named = np.flatnonzero(last >= 0)
        rows["named_lsn"][named] = self._named(last[named], records)
        parents = np.zeros(count, dtype=np.uint64)
        parents[named] = self._part.parents[last[named]]
        name_indexes = np.full(count, -1)
        name_indexes[named] = np.arange(len(named))
        subdirectories = self._subdirectories()[made]
        links, contents = subjects.links[made], subjects.contents[made]
        names = self._names_at(last[named])
        return SleeperColumns(rows, links, subdirectories, parents, name_indexes, names, contents)

    def _last_links(self) -> Integers:
        """Of each subject the last operation that names it, among the names; -1: none."""
        last = np.full(len(self._subjects.inos), -1)
        at = np.flatnonzero(self._part.is_link)
        last[self._subjects.of_links[at]] = at
        return last

    def _named(self, at: Integers, records: Rows) -> npt.NDArray[np.uint64]:
        """The records that give names; 0: an inode cannot say so."""
        of_names = self._part.records[self._part.name_places[at]]
        lsns: npt.NDArray[np.uint64] = records["lsn"][of_names]
        return np.where(lsns == lsns.astype(np.uint32), lsns, np.uint64(0))

    def _names_at(self, at: Integers) -> list[bytes]:
        names = self._found.names
        return [names[index] for index in self._part.names[at].tolist()]

    def _subdirectories(self) -> Integers:
        """How many more each subject has."""
        subjects = self._subjects
        more = np.zeros(len(subjects.inos), dtype=np.int64)
        for which, sign in ((subjects.of_links, 1), (subjects.of_old, -1)):
            at = np.flatnonzero((which >= 0) & subjects.is_directory[which])
            np.add.at(more, subjects.of_parents[at], sign)
        return more

    def _commits(self, which: Integers, records: Rows) -> tuple[Rows, Rows]:
        """The record that publishes each of these last, and when."""
        published = self._found.change_records[self._last_changes[which]]
        return records["lsn"][published], records["time_ns"][published]

    # --- those that were there --------------------------------------------------------------

    def _contents(self) -> list[FileMap | int]:
        """The content of each change."""
        subjects = self._subjects
        contents = np.empty(len(subjects.inos), dtype=object)
        contents[:] = subjects.contents.tolist()
        for index, inode in subjects.awake.items():
            contents[index] = inode.live
        found: list[FileMap | int] = contents[subjects.of_changes].tolist()
        return found

    def _change_sleepers(self, records: Rows) -> None:
        """What is said of those that sleep, and stay."""
        subjects, sleeping = self._subjects, self._sleeping
        asleep = np.flatnonzero((subjects.rows >= 0) & ~self._is_gone)
        said = asleep[self._last_rows[asleep] >= 0]
        attributes = self._found.attributes(self._last_rows[said].tolist())
        sleeping.set_fields(subjects.rows[said], attributes)
        published = asleep[self._last_changes[asleep] >= 0]
        lsns, times = self._commits(published, records)
        counts = subjects.references[published]
        fields = {"commit_lsn": lsns, "commit_ns": times, "ref_count": counts}
        sleeping.set_fields(subjects.rows[published], fields)
        sleeping.set_links(subjects.rows[asleep], subjects.links[asleep])
        last = self._last_links()
        named = asleep[last[asleep] >= 0]
        parents, names = self._part.parents[last[named]], self._names_at(last[named])
        by = self._named(last[named], records)
        sleeping.set_names(subjects.rows[named], parents, names, by)

    def _name_objects(self, records: Rows) -> None:
        """Names of those that were awake, and what directories have."""
        subjects, part, names = self._subjects, self._part, self._found.names
        if not len(part.names):
            return
        awake = np.array(list(subjects.awake), dtype=np.int64)
        last = self._last_links()[awake]
        known = (subjects.links[awake], self._subdirectories()[awake], last >= 0)
        columns = (*known, part.parents[last], part.names[last], self._named(last, records))
        for inode, links, more, is_named, parent, name, lsn in zip(
            subjects.awake.values(), *(column.tolist() for column in columns), strict=True
        ):
            inode.links = links
            inode.subdirectories += more
            if is_named:
                inode.parent, inode.name, inode.named_lsn = parent, names[name], lsn

    def _put_names(self) -> None:
        """Into their directories, and out of them."""
        namespace, part = self._namespace, self._part
        for parent, (entries, new) in self._names.of_directories.items():
            directory = namespace.inodes.get_awake(parent)
            if directory is None:
                continue  # it came and went
            for name, ino in new.items():
                if ino:
                    entries[name] = ino
                elif name in entries:
                    del entries[name]
            directory.entries = entries
        names = self._found.names
        those = [names[index] for index in part.names.tolist()]
        lengths = np.fromiter(map(len, those), dtype=np.int64, count=len(those))
        had = self._names.old != 0
        namespace.name_bytes += int(lengths[part.is_link].sum()) - int(lengths[had].sum())
        namespace.string_items += int(part.is_link.sum()) - int(had.sum())

    def _put_strings(self) -> None:
        """Extended attributes, and where symbolic links lead."""
        part, found, namespace = self._part, self._found, self._namespace
        stay = ~self._is_gone[self._subjects.of_strings]
        indexes = part.strings[stay]
        columns = (part.string_kinds[stay], indexes, found.string_inos[indexes])
        for kind, index, ino in zip(*(column.tolist() for column in columns), strict=True):
            value = found.string_values[index]
            if kind == layout.OP_SYMLINK:
                namespace.set_target(namespace.get(ino), value)
            else:
                new = value if kind == layout.OP_XATTR_SET else None
                put_xattr(namespace, self._sleeping, ino, found.string_names[index], new)

    def _drop(self) -> list[int]:
        """What has no name any more; returns where the contents of those are that had no object."""
        subjects, namespace, sleeping = self._subjects, self._namespace, self._sleeping
        asleep = np.flatnonzero((subjects.rows >= 0) & self._is_gone)
        for ino in subjects.inos[asleep].tolist() if sleeping.xattrs else ():
            xattrs = sleeping.xattrs.pop(ino, {})
            for name in list(xattrs):
                namespace.change_xattr(xattrs, name, None)
        for kind, count in zip(
            *np.unique(subjects.modes[asleep] & TYPE_BITS, return_counts=True), strict=True
        ):
            found = kind_of(int(kind))
            if found is not None:
                namespace.kind_counts[found] -= int(count)
        addresses = sleeping.remove(subjects.rows[asleep])
        for index in [index for index in subjects.awake if self._is_gone[index]]:
            namespace.drop(subjects.awake[index])
        made = subjects.contents[subjects.is_made & self._is_gone]
        addresses += made[made != 0].tolist()
        return addresses

    def _rest(self) -> tuple[dict[int, int], dict[int, int]]:
        """Of objects: the rows of their last attributes, and the records that publish them."""
        subjects = self._subjects
        awake = np.array(list(subjects.awake), dtype=np.int64)
        awake = awake[~self._is_gone[awake]]
        said = awake[self._last_rows[awake] >= 0]
        published = awake[self._last_changes[awake] >= 0]
        records = self._found.change_records[self._last_changes[published]]
        return (
            dict(zip(subjects.inos[said].tolist(), self._last_rows[said].tolist(), strict=True)),
            dict(zip(subjects.inos[published].tolist(), records.tolist(), strict=True)),
        )


def _part(columns: SleeperColumns, which: npt.NDArray[np.bool_]) -> SleeperColumns:
    """Some of them, all names."""
    return dataclasses.replace(
        columns,
        rows=columns.rows.compress(which),
        links=columns.links[which],
        subdirectories=columns.subdirectories[which],
        parents=columns.parents[which],
        name_indexes=columns.name_indexes[which],
        contents=columns.contents[which],
    )
