"""What some journal records mention: names, and inodes in columns, by number; and whether all that
the records say of them can be.

Never here: changing anything, but for waking an inode up; what is done then (``replay_runs``).

Invariants
- What is found possible has, all at once, the same effect as one operation after the other. What is
  not certain is not possible.
"""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cxlfs.format import layout
from cxlfs.store.namespace import kind_of
from cxlfs.store.sleepers import REFERENCES_MAX
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.format.operation_columns import OperationColumns
    from cxlfs.store.namespace import Inode, Namespace
    from cxlfs.store.sleepers import Sleepers

    Integers: TypeAlias = npt.NDArray[np.int64]
    Numbers: TypeAlias = npt.NDArray[np.uint64]
    Flags: TypeAlias = npt.NDArray[np.bool_]
    Overlay: TypeAlias = tuple[dict[bytes, int], dict[bytes, int]]

TYPE_BITS = 0o170000
_NEVER = np.iinfo(np.int64).max
_STRINGS = (layout.OP_SYMLINK, layout.OP_XATTR_SET, layout.OP_XATTR_REMOVE)


class Part:
    """Operations [first, end) of a batch. Of each kind: where they are among these, and their
    indexes among all of their kind.
    """

    def __init__(self, found: OperationColumns, first: int, end: int) -> None:
        self.found = found
        self.records = found.records[first:end]
        kinds, indexes = found.kinds[first:end], found.indexes[first:end]
        self.inode_places = np.flatnonzero(kinds == layout.OP_INODE)
        self.change_places = np.flatnonzero(kinds == layout.OP_CONTENT)
        is_name = (kinds == layout.OP_LINK) | (kinds == layout.OP_UNLINK)
        self.name_places = np.flatnonzero(is_name)
        self.string_places = np.flatnonzero(np.isin(kinds, _STRINGS))
        self.inode_rows = indexes[self.inode_places]
        self.changes = indexes[self.change_places]
        self.names = indexes[self.name_places]
        self.strings = indexes[self.string_places]
        self.is_link = kinds[self.name_places] == layout.OP_LINK
        self.string_kinds = kinds[self.string_places]
        self.parents = found.parents[self.names]
        self.meant = np.where(self.is_link, found.meant[self.names], np.uint64(0))
        """What each name means from then on; 0: nothing."""


class NameChanges:
    """Names of a part: ``old``: what each one meant before (0: nothing); ``of_directories``: by
    number, the names of the directory and those that change, with what they mean in the end.
    """

    def __init__(self, old: list[int], of_directories: dict[int, Overlay]) -> None:
        self.old = np.array(old, dtype=np.uint64)
        self.of_directories = of_directories


def look_at_names(namespace: Namespace, part: Part) -> NameChanges | None:
    """None: one that is taken away is not there, or a directory is not."""
    found = part.found
    types = found.modes[part.inode_rows] & TYPE_BITS
    made = set(found.inos[part.inode_rows[types == stat.S_IFDIR]].tolist())
    of_directories: dict[int, Overlay] = {}
    for parent in np.unique(part.parents).tolist():
        directory = namespace.inodes.get_awake(parent)
        if directory is None and parent in made:
            of_directories[parent] = ({}, {})
        elif directory is None or directory.entries is None or directory.listing is not None:
            return None
        else:
            of_directories[parent] = (directory.entries, {})
    old = [0] * len(part.names)
    names = found.names
    columns = (part.parents.tolist(), part.names.tolist(), part.meant.tolist())
    for place, (parent, index, meant) in enumerate(zip(*columns, strict=True)):
        entries, new = of_directories[parent]
        name = names[index]
        if name in new:
            old[place] = new[name]
        elif name in entries:
            old[place] = entries[name]
        new[name] = meant
    changes = NameChanges(old, of_directories)
    return None if (changes.old[~part.is_link] == 0).any() else changes


class Subjects:
    """Inodes that a part mentions, in the order of their numbers ``inos``; other columns have an
    entry for each. ``of_*``: which of them each operation is about.
    """

    def __init__(
        self, namespace: Namespace, sleeping: Sleepers, part: Part, names: NameChanges
    ) -> None:
        self._namespace = namespace
        self._sleeping = sleeping
        self._part = part
        self._names = names
        self._mentioned(part, names)
        count = len(self.inos)
        self.rows = sleeping.find_rows(self.inos)
        """Of those that sleep, else -1."""
        self.awake: dict[int, Inode] = {}
        self.is_made = self.rows < 0
        perhaps = np.flatnonzero(self.is_made & (self.inos < namespace.next_ino))
        for index, ino in zip(perhaps.tolist(), self.inos[perhaps].tolist(), strict=True):
            inode = namespace.inodes.get_awake(ino)
            if inode is not None:
                self.awake[index] = inode
        self.is_made[list(self.awake)] = False
        self.modes = np.zeros(count, dtype=np.uint32)
        self.links = np.zeros(count, dtype=np.int64)
        self.references = np.zeros(count, dtype=np.uint64)
        """At most, in the end."""
        self.contents = np.zeros(count, dtype=np.uintp)
        """Of those that sleep."""
        self._fill()
        types = self.modes & TYPE_BITS
        self.is_file = types == stat.S_IFREG
        self.is_directory = types == stat.S_IFDIR
        self.drop_records = np.full(count, _NEVER)
        """Behind which record each is gone."""

    def _mentioned(self, part: Part, names: NameChanges) -> None:
        """Everything that is mentioned, and where."""
        found = part.found
        linked, had = np.flatnonzero(part.is_link), np.flatnonzero(names.old)
        columns = (
            (found.inos[part.inode_rows], part.inode_places),
            (found.change_inos[part.changes], part.change_places),
            (part.meant[linked], part.name_places[linked]),
            (found.string_inos[part.strings], part.string_places),
            (part.parents, part.name_places),
            (names.old[had], part.name_places[had]),
        )
        self.inos, which = np.unique(np.concatenate([c for c, _ in columns]), return_inverse=True)
        self._which: Integers = which
        self._places = np.concatenate([places for _, places in columns])
        ends = np.cumsum([len(places) for _, places in columns])
        self.of_inodes, self.of_changes, of_links, self.of_strings, self.of_parents, of_old = (
            np.split(which, ends[:-1])
        )
        self.of_links = np.full(len(part.names), -1)
        self.of_links[linked] = of_links
        self.of_old = np.full(len(part.names), -1)
        self.of_old[had] = of_old

    def _fill(self) -> None:
        """What is known of each, and of those that are made here what makes them."""
        part = self._part
        self.modes[self.of_inodes[::-1]] = part.found.modes[part.inode_rows[::-1]]
        asleep = np.flatnonzero(self.rows >= 0)
        told = self._sleeping.tell(self.rows[asleep])
        self.modes[asleep], self.links[asleep] = told.modes, told.links
        self.references[asleep], self.contents[asleep] = told.ref_counts, told.contents
        awake = list(self.awake)
        self.modes[awake] = [inode.mode for inode in self.awake.values()]
        self.links[awake] = [inode.links for inode in self.awake.values()]
        counts = part.found.changes["ref_count"][part.changes]
        np.add.at(self.references, self.of_changes, counts)

    # --- whether it can be ------------------------------------------------------------------

    def possible(self) -> bool:
        """All that is said of them can be."""
        return (
            self._are_there()
            and self._have_types()
            and self._are_whole()
            and self._look_at_directories()
            and self._look_at_drops()
        )

    def _are_there(self) -> bool:
        """Nothing is mentioned before it is made."""
        first = np.full(len(self.inos), _NEVER)
        first[self.of_inodes[::-1]] = self._part.inode_places[::-1]
        first[~self.is_made] = -1
        return bool((self._places >= first[self._which]).all())

    def _have_types(self) -> bool:
        """Of all that is said of each."""
        part, types = self._part, self.modes & TYPE_BITS
        said = part.found.modes[part.inode_rows] & TYPE_BITS
        targets = self.of_strings[part.string_kinds == layout.OP_SYMLINK]
        known = [kind_of(mode) is not None for mode in np.unique(types).tolist()]
        return bool(
            all(known)
            and (said == types[self.of_inodes]).all()
            and self.is_file[self.of_changes].all()
            and self.is_directory[self.of_parents].all()
            and (types[targets] == stat.S_IFLNK).all()
        )

    def _are_whole(self) -> bool:
        """True if the record that makes an inode also gives it a name, and a symbolic link its
        target.
        """
        part = self._part
        linked, to_links = part.is_link, part.string_kinds == layout.OP_SYMLINK
        made = self._first_records(self.of_inodes, part.inode_places)
        named = self._first_records(self.of_links[linked], part.name_places[linked])
        led = self._first_records(self.of_strings[to_links], part.string_places[to_links])
        is_link = self.is_made & (self.modes & TYPE_BITS == stat.S_IFLNK)
        return bool(
            (named[self.is_made] == made[self.is_made]).all()
            and (led[is_link] == made[is_link]).all()
        )

    def _first_records(self, which: Integers, places: Integers) -> Integers:
        """Return the first record of each subject, among the operations at ``places``."""
        first = np.full(len(self.inos), _NEVER)
        first[which[::-1]] = self._part.records[places[::-1]]
        return first

    def _look_at_directories(self) -> bool:
        """A directory gets its first name below one that has its own by then, no name that it has
        already, and never one below itself.
        """
        ops = np.flatnonzero(self.of_links >= 0)
        ops = ops[self.is_directory[self.of_links[ops]]]
        meant, places = self.of_links[ops], self._part.name_places[ops]
        named = np.full(len(self.inos), _NEVER)
        named[~self.is_made] = -1
        made = self.is_made[meant]
        named[meant[made][::-1]] = places[made][::-1]
        return bool(
            (self.of_old[ops] != meant).all()
            and (named[self.of_parents[ops]] < places).all()
            and self._are_trees(meant, self._part.parents[ops])
        )

    def _are_trees(self, meant: Integers, parents: Numbers) -> bool:
        """No directory comes below itself when these, one after the other, lie in ``parents``: only
        those that leave where they lay could.
        """
        inos, which = np.unique(meant, return_inverse=True)
        known = [self.awake.get(index) for index in inos.tolist()]
        above = np.array([0 if one is None else one.parent for one in known], dtype=np.uint64)
        order = np.argsort(which, kind="stable")
        is_first = np.append(True, which[order][1:] != which[order][:-1])[: len(order)]
        before = np.append(np.uint64(0), parents[order])[: len(order)]
        before[is_first] = above[which[order][is_first]]
        moved = order[before != parents[order]]
        if self.is_made[meant[moved]].all() and len(np.unique(meant[moved])) == len(moved):
            return True  # new ones alone, which nothing lies below
        moved.sort()
        changed = dict[int, int]()
        for ino, parent in zip(
            self.inos[meant[moved]].tolist(), parents[moved].tolist(), strict=True
        ):
            if self._is_below(parent, ino, changed):
                return False
            changed[ino] = parent
        return True

    def _is_below(self, ino: int, ancestor: int, changed: dict[int, int]) -> bool:
        """As ``Namespace.is_below``, where some directories lie in others: in ``changed``."""
        while ino not in (ancestor, ROOT_INO):
            above = changed.get(ino)
            if above is None:
                inode = self._namespace.inodes.get_awake(ino)
                above = 0 if inode is None else inode.parent
            if above in (0, ino):
                return False
            ino = above
        return ino == ancestor

    def _look_at_drops(self) -> bool:
        """Who has no name at the end of a record is gone, and not mentioned again; directories have
        one name at a time. ``links`` become those in the end.
        """
        part = self._part
        which = np.stack((self.of_old, self.of_links), axis=1).ravel()
        records = np.repeat(part.records[part.name_places], 2)
        deltas = np.tile(np.array([-1, 1]), len(part.names))
        order = np.argsort(which, kind="stable")
        order = order[np.searchsorted(which[order], 0) :]
        if not len(order):
            return True
        which, records, deltas = which[order], records[order], deltas[order]
        is_last = np.append(which[1:] != which[:-1], True)
        before = np.cumsum(deltas) - deltas
        firsts = np.flatnonzero(np.append(True, is_last[:-1]))
        counts = np.cumsum(deltas) - np.repeat(before[firsts], np.diff([*firsts, len(which)]))
        counts += self.links[which]
        ends_record = is_last | np.append(records[1:] != records[:-1], True)
        drops = ends_record & (counts == 0)
        most = np.where(self.is_directory[which], 1, _NEVER)
        if (counts < 0).any() or (counts > most).any() or not is_last[drops].all():
            return False
        self.links[which[is_last]] = counts[is_last]
        self.drop_records[which[drops]] = records[drops]
        if (part.records[self._places] > self.drop_records[self._which]).any():
            return False
        directories = which[drops & self.is_directory[which]]
        return all(self._may_go(ino) for ino in self.inos[directories].tolist())

    def _may_go(self, ino: int) -> bool:
        """A directory that has no name any more is empty."""
        inode = self._namespace.inodes.get_awake(ino)
        known = {} if inode is None or inode.entries is None else inode.entries
        _, new = self._names.of_directories.get(ino, ({}, {}))
        left = any(new.get(name, 1) for name in known)
        return ino != ROOT_INO and not left and not any(new.values())

    # --- afterwards -------------------------------------------------------------------------

    @property
    def is_gone(self) -> Flags:
        """In the end."""
        gone: Flags = self.drop_records != _NEVER
        return gone

    def wake_large(self) -> None:
        """Those that may have more references than sleepers have."""
        large = (self.rows >= 0) & (self.references > REFERENCES_MAX)
        for index in np.flatnonzero(large & ~self.is_gone).tolist():
            self.awake[index] = self._namespace.get(int(self.inos[index]))
            self.rows[index] = -1
