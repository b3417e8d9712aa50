"""The way back of a checkpoint unit: each name in it means what it meant, and each file has the
content that it had, before the unit began.

Never here: when a unit goes back (``unit_deciding``), keeping what was there (``unit_keeping``).

Invariants
- What was made since the unit began loses its name, and is in history. What was there comes back by
  reference, with its inode number, attributes and commit number.
- What somebody else has changed since stays as they made it. So do files of other users, logs, and
  what has no other name than the one it got there.
- It takes as many records as it needs, and the last one forgets the unit. A crash in between leaves
  the unit open: recovery goes on with what is not back yet.
"""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.format import layout
from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrSetOperation,
    encode,
)
from cxlfs.store import unit_record
from cxlfs.store.commit_numbers import COMMIT_XATTR, commit_operation
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.past_names import TakenName
from cxlfs.store.past_rows import Death
from cxlfs.store.paths import path_of
from cxlfs.store.unit_aside import CONTENTS, GIVEN, free_name, stands_for
from cxlfs.store.unit_members import is_others, never_belongs, path_below
from cxlfs.store.unit_record import OpenRecord
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.unit_policies import Policies
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume

_PATH_NAMES = 3
"""So many names at the end of a path say whether a file never belongs (``unit_members``)."""


class Returns:
    """One for each open store. ``name_changed``: told of each name that means something else
    without a request for it, and ``content_changed`` of each file with another content; ``gone`` of
    the inode numbers that have lost their name so.
    """

    def __init__(
        self, volume: Volume, versions: Versions, aside: Aside, policies: Policies
    ) -> None:
        self.volume = volume
        self.versions = versions
        self.namespace = volume.namespace
        self.aside = aside
        self.policies = policies
        self.name_changed: Callable[[int, bytes], None] = lambda _parent, _name: None
        self.content_changed: Callable[[int], None] = lambda _ino: None
        self.gone: Callable[[set[int]], None] = lambda _inos: None

    def left_open(self) -> list[OpenRecord]:
        """What the media say was open."""
        xattrs = self.namespace.get(ROOT_INO).xattrs or {}
        said = [unit_record.decode_unit(name, value) for name, value in xattrs.items()]
        return [record for record in said if record is not None]

    def back(
        self,
        record: OpenRecord,
        without: list[Operation],
        reason: str,
        stored: Callable[[list[Operation]], None],
    ) -> Inode | None:
        """``without``: operations that forget the unit; ``stored`` is told of them. Durable when it
        returns: the directory of what was kept, which nobody wants now. Raises as
        ``Volume.commit``.
        """
        path = path_of(self.namespace, record.ino)
        kept = _WayBack(self, record).go(without, stored)
        self.volume.counters.reverts += 1
        message = f"what was there before is back: {reason}; cxlfs history has what was written"
        if self.policies.is_directory(record.ino) or path is None:
            self.volume.event("unit-back", message, ino=record.ino)
        else:  # it was made, and is gone
            self.volume.event("unit-back", f"{message} ({os.fsdecode(path)})")
        return kept


class _WayBack:
    """Of one unit."""

    def __init__(self, returns: Returns, record: OpenRecord) -> None:
        self._returns = returns
        self._volume = returns.volume
        self._namespace = returns.namespace
        self._policies = returns.policies
        self._record = record
        self._top = self._directory(record.ino)
        self._is_new = record.is_new(record.ino)
        """Its directory was made since."""
        rule = self._policies.rule_of(self._top) if self._top is not None else None
        self._done = rule.done if rule is not None else ()
        self._kept = self._kept_in()
        self._replaces = self._top is not None and self._has_kept(self._top)
        self._instead: dict[int, int] = {}
        """Kept directories whose name means another one now: that one."""
        self._ops: list[Operation] = []
        self._bytes = 0
        self._changes: list[tuple[Prepared, Inode, Inode]] = []
        """Files whose content the operations change, and the copies that have it."""
        self._gone: set[int] = set()

    def _directory(self, ino: int) -> Inode | None:
        """Of that number, where users reach it."""
        inode = self._namespace.inodes.get(ino)
        if inode is None or inode.entries is None or inode.is_removed or ino == ROOT_INO:
            return None
        return None if ino in self._namespace.kept_directories else inode

    def _kept_in(self) -> Inode | None:
        place = self._returns.aside.directory()
        kept = self._namespace.inodes.get(self._record.kept)
        if place is None or kept is None or kept.entries is None or kept.parent != place.ino:
            return None
        return kept if kept.links else None

    def go(
        self, without: list[Operation], stored: Callable[[list[Operation]], None]
    ) -> Inode | None:
        if self._top is not None:
            self._end_versions(self._top)
        if self._kept is not None:
            self._take_given(self._kept)
        made = self._remove_made()
        self._flush()
        if self._kept is not None:
            self._put_homeless(self._kept, self._lacks_home)
        for directory in made:
            self._remove_directory(directory)
        self._flush()
        if self._kept is not None:
            self._put_directories(self._kept)
            self._put_files(self._kept)
            self._flush()
            self._put_homeless(self._kept, lambda _home, _name: True)
            self._put_contents(self._kept)
        self._say([*self._policy(), *without])
        self._flush(durable=True)
        stored(without)
        self._returns.gone(self._gone)
        return self._kept

    def _end_versions(self, top: Inode) -> None:
        """Of files that were being overwritten: whoever did is gone, and its RELEASE on the way."""
        versions = self._returns.versions
        for inode in list(versions.open_versions.values()):
            if inode.committed is None or inode.uncommitted or not inode.links:
                continue
            if inode.ino in (*self._record.apart, *self._record.foreign):
                continue
            if is_others(inode, self._record.uid):
                continue
            above = self._namespace.inodes.get(inode.parent)
            path = None if above is None else path_below(self._namespace, top, above)
            if path is None:
                continue
            is_directory = False
            if self._is_new or not never_belongs((*path, inode.name), is_directory, self._done):
                with versions.outside_units():
                    versions.revert(inode, "it belongs to a checkpoint that was not finished")

    # --- what was given and made --------------------------------------------------------------

    def _take_given(self, kept: Inode) -> None:
        """Names that were given to what has another one. A directory has no other: it is kept by
        the one that it had.
        """
        homes = {
            stands_for(inode): (home, name)
            for home, _ in self._homes(kept)
            for name, inode in self._meanings(home)
            if stands_for(inode) != inode.ino
        }
        given = collections.Counter(ino for _, _, ino in self._given(kept))
        for parent, name, ino in self._given(kept):
            inode = self._namespace.inodes.get(ino)
            directory = self._namespace.inodes.get(parent)
            means = directory is not None and (directory.entries or {}).get(name) == ino
            if not means or inode is None:
                continue
            if inode.entries is None:
                if inode.links > 1 + given[ino]:  # it has a name that it had before
                    self._take(parent, name, inode)
            elif ino in homes:
                home, old_name = homes[ino]
                self._changed(parent, name, inode)
                unlinks = [UnlinkOperation(parent, name), UnlinkOperation(home.ino, old_name)]
                self._say([*unlinks, LinkOperation(home.ino, ino, old_name)])
        self._flush()

    def _given(self, kept: Inode) -> Iterator[tuple[int, bytes, int]]:
        """Directory, name, and the inode number of what got it."""
        for home, parent in self._homes(kept, GIVEN):
            for name, inode in self._meanings(home):
                yield parent, name, stands_for(inode)

    def _remove_made(self) -> list[Inode]:
        """Take the names of files that were made, and return directories that were, innermost
        first.
        """
        made: list[Inode] = []
        pending: list[tuple[Inode, tuple[bytes, ...]]] = []
        if self._top is not None:
            pending.append((self._top, ()))
            if self._is_new and not is_others(self._top, self._record.uid):
                made.append(self._top)
        pending += [(each, (b"",)) for each in self._kept_within()]
        while pending:
            directory, above = pending.pop()
            for name, ino in list((directory.entries or {}).items()):
                inode = self._namespace.get(ino)
                path = (*above, name)[-_PATH_NAMES:]
                if is_others(inode, self._record.uid) or self._stays(inode, path):
                    continue
                if inode.entries is not None:
                    pending.append((inode, path))
                    if self._record.is_new(ino):
                        made.append(inode)
                elif self._record.is_new(ino):
                    self._take(directory.ino, name, inode)
        made.reverse()
        return made

    def _kept_within(self) -> list[Inode]:
        """Kept directories that were in the unit when it began: not what came from elsewhere."""
        if self._kept is None:
            return []
        homes = {
            inode.ino: (inode, parent)
            for home, parent in self._homes(self._kept)
            for _, inode in self._meanings(home)
            if inode.entries is not None
        }
        return [inode for inode, parent in homes.values() if self._is_within(parent, homes)]

    def _is_within(self, ino: int, homes: dict[int, tuple[Inode, int]]) -> bool:
        """A directory lies in the unit, or in one that did."""
        for _ in range(len(homes) + 1):
            inode = self._namespace.inodes.get(ino)
            above = None if inode is None else self._kept_above(inode, homes)
            if above is None:
                return self._top is not None and self._namespace.is_below(ino, self._top.ino)
            if above == self._record.ino:
                return True
            ino = homes[above][1]
        return False

    def _kept_above(self, inode: Inode, homes: dict[int, tuple[Inode, int]]) -> int | None:
        """The kept directory that a directory is, or lies in."""
        current: Inode | None = inode
        while current is not None and current.ino != ROOT_INO:
            if current.ino in homes:
                return current.ino
            current = self._namespace.inodes.get(current.parent)
        return None

    def _stays(self, inode: Inode, path: tuple[bytes, ...]) -> bool:
        """A log, or a file that was set apart. In a directory that was not there before, and takes
        the place of none, they go with it: a directory of logs alone is taken for a checkpoint.
        """
        if inode.ino in self._record.foreign:
            return True
        if self._is_new and not self._replaces:
            return False
        is_directory = inode.entries is not None
        return inode.ino in self._record.apart or never_belongs(path, is_directory, self._done)

    def _take(self, parent: int, name: bytes, inode: Inode) -> None:
        self._changed(parent, name, inode)
        if inode.links - inode.kept_links == 1 and inode.pins:
            self._gone.add(inode.ino)
        if inode.uncommitted:
            self._namespace.unlink(parent, name)
            self._namespace.reap(inode.ino)
        else:
            self._say([UnlinkOperation(parent, name)])

    def _remove_directory(self, directory: Inode) -> None:
        """One that was made, if nothing stays in it."""
        self._flush()
        has_policy = directory is self._top and self._policies.has_own(directory)
        if directory.entries or directory.is_removed:
            return
        if has_policy and self._kept_at(directory.parent, directory.name) is None:
            return
        self._take(directory.parent, directory.name, directory)
        above = self._namespace.get(directory.parent)
        now = self._volume.now()
        self._say([above.operation(mtime_ns=now, ctime_ns=now)])
        above.mtime_ns = above.ctime_ns = now

    # --- what is kept -------------------------------------------------------------------------

    def _homes(self, kept: Inode, kind: bytes = b"") -> Iterator[tuple[Inode, int]]:
        """The kept directories, and the inode number of the one whose names each has."""
        for name, ino in list((kept.entries or {}).items()):
            home, digits = self._namespace.get(ino), name.removeprefix(kind)
            is_kind = name.startswith(kind) and len(digits) == len(name) - len(kind)
            if is_kind and digits.isdigit() and home.entries is not None:
                yield home, int(digits)

    def _kept_at(self, parent: int, name: bytes) -> Inode | None:
        """What the unit keeps of that name."""
        home = None
        if self._kept is not None:
            home = self._namespace.find(self._kept.ino, b"%d" % parent)
        return None if home is None else self._namespace.find(home.ino, name)

    def _has_kept(self, directory: Inode) -> bool:
        """One is kept that had the name of this directory: what stays is below that one then."""
        found = self._kept_at(directory.parent, directory.name)
        return found is not None and found.entries is not None

    def _meanings(self, home: Inode) -> list[tuple[bytes, Inode]]:
        entries = (home.entries or {}).items()
        return [(name, self._namespace.get(ino)) for name, ino in entries]

    def _put_directories(self, kept: Inode) -> None:
        """Outermost first. Where another one has the name, what was below comes into that."""
        waiting = {
            inode.ino: (home, parent, name, inode)
            for home, parent in self._homes(kept)
            for name, inode in self._meanings(home)
            if inode.entries is not None
        }
        while waiting:
            ready = [ino for ino, (_, parent, _, _) in waiting.items() if parent not in waiting]
            for ino in ready:
                home, parent, name, inode = waiting.pop(ino)
                directory = self._target(parent)
                if directory is None:
                    continue
                found = self._namespace.find(directory.ino, name)
                if found is None:
                    self._put(home, name, inode, directory, name)
                    self._flush()
                elif found.entries is not None and not inode.entries:
                    self._instead[ino] = found.ino
            if not ready:
                return

    def _put_files(self, kept: Inode) -> None:
        for home, parent in self._homes(kept):
            directory = self._target(parent)
            for name, inode in self._meanings(home) if directory is not None else ():
                if directory is None or inode.entries is not None:
                    continue
                is_stand_in = stands_for(inode) != inode.ino
                if name not in (directory.entries or {}) and not is_stand_in:
                    self._put(home, name, inode, directory, name)

    def _lacks_home(self, parent: int, name: bytes) -> bool:
        """What had this name cannot get it again."""
        directory = self._namespace.inodes.get(parent)
        if directory is not None and directory.kept_links:
            return False  # the directory comes back, too
        target = self._target(parent)
        return target is None or name in (target.entries or {})

    def _put_homeless(self, kept: Inode, lacks_home: Callable[[int, bytes], bool]) -> None:
        """What was moved, and cannot get the name again that it had, keeps the one that it got. It
        gets one like it where something comes back under this one.
        """
        at_home = {
            inode.ino: (home, name)
            for home, parent in self._homes(kept)
            for name, inode in self._meanings(home)
            if inode.is_removed and lacks_home(parent, name)
        }
        for parent, name, ino in self._given(kept):
            inode, directory = self._namespace.inodes.get(ino), self._target(parent)
            if inode is None or directory is None or not inode.is_removed or ino not in at_home:
                continue
            home, old_name = at_home[ino]
            free = name
            if name in (directory.entries or {}) or self._kept_at(parent, name) is not None:
                free = free_name(self._namespace, directory.ino, name, b"moved-in")
            self._put(home, old_name, inode, directory, free)
            self._flush()

    def _target(self, parent: int) -> Inode | None:
        """Where what had a name in that directory goes."""
        parent = self._instead.get(parent, parent)
        return self._namespace.get(ROOT_INO) if parent == ROOT_INO else self._directory(parent)

    def _put(self, home: Inode, name: bytes, inode: Inode, directory: Inode, to: bytes) -> None:
        self._changed(directory.ino, to, inode)
        self._returns.name_changed(directory.ino, to)
        link = LinkOperation(directory.ino, inode.ino, to)
        self._say([UnlinkOperation(home.ino, name), link])

    # --- contents -------------------------------------------------------------------------------

    def _put_contents(self, kept: Inode) -> None:
        home = self._namespace.find(kept.ino, CONTENTS)
        copies = self._meanings(home) if home is not None and home.entries is not None else []
        for name, copy in copies:
            inode = self._namespace.inodes.get(int(name)) if name.isdigit() else None
            if copy.kind is not FileKind.FILE or copy.uncommitted or inode is None:
                continue
            if inode.kind is not FileKind.FILE or inode.is_removed:
                continue
            if inode.ino in (*self._record.apart, *self._record.foreign):
                continue
            if not is_others(inode, self._record.uid):
                self._put_content(inode, copy)

    def _put_content(self, inode: Inode, copy: Inode) -> None:
        versions = self._returns.versions
        with versions.outside_units():
            prepared = versions.replace_content(
                inode,
                copy.content,
                incomplete=bool(copy.flags & layout.INODE_INCOMPLETE),
                times=(copy.mtime_ns, self._volume.now()),
            )
        ops = [*prepared.operations, commit_operation(inode.ino, copy)]
        self._say([*ops, UnlinkOperation(copy.parent, copy.name)])
        prepared.number += len(self._ops) - len(ops) - 1
        self._changes.append((prepared, inode, copy))

    # --- committing -----------------------------------------------------------------------------

    def _policy(self) -> list[Operation]:
        """A policy that the next directory of a name had taken over comes back with the first."""
        if self._top is None or self._top.links:
            return []
        found = self._namespace.find(self._top.parent, self._top.name)
        return list(self._policies.moved(self._record.ino, found))

    def _changed(self, parent: int, name: bytes, inode: Inode) -> None:
        if inode.pins:
            self._returns.name_changed(parent, name)

    def _say(self, ops: list[Operation]) -> None:
        """Of one name or file: it goes into one record."""
        size = len(encode(ops))
        if self._bytes + size > self._volume.record_bytes_max // 2:
            self._flush()
        self._ops += ops
        self._bytes += size

    def _flush(self, *, durable: bool = False) -> None:
        ops, self._ops, self._bytes = self._ops, [], 0
        changes, self._changes = self._changes, []
        if not ops:
            if durable:
                self._volume.fence()
            return
        try:
            lsn, time_ns = self._volume.commit(ops, durable=durable)
        except BaseException:
            for prepared, _, _ in changes:
                prepared.cancel()
            raise
        with self._volume.applying:
            for prepared, inode, copy in changes:
                prepared.done(lsn, time_ns)
                inode.commit_lsn, inode.commit_ns = copy.commit_lsn, copy.commit_ns
                self._returns.versions.past.came_back(inode.ino, lsn, time_ns)
            self._volume.note_committed(ops)
            self._apply_names(ops, lsn, time_ns)
            self._policies.stored(ops)
        for _, inode, _ in changes:
            self._returns.versions.finish(inode)
            self._returns.content_changed(inode.ino)

    def _apply_names(self, ops: list[Operation], lsn: int, time_ns: int) -> None:
        past, namespace = self._returns.versions.past, self._namespace
        taken: list[TakenName] = []
        linked = {op.ino for op in ops if isinstance(op, LinkOperation)}
        removed = {ino for ino in linked if namespace.get(ino).is_removed}
        for number, op in enumerate(ops):
            if isinstance(op, UnlinkOperation):
                inode = namespace.unlink(op.parent, op.name)
                since = namespace.named_since(inode)
                taken.append(TakenName(op.parent, op.name, inode, since, number))
            elif isinstance(op, LinkOperation):
                namespace.link(op.parent, op.name, op.ino)
            elif isinstance(op, XattrSetOperation) and op.name == COMMIT_XATTR:
                namespace.set_xattr(namespace.get(op.ino), op.name, op.value)
        for ino in removed:
            if not namespace.get(ino).is_removed:
                past.revive(ino, lsn, time_ns)
        past.names_taken(taken, lsn, time_ns, Death.REMOVED)
        for each in taken:
            namespace.reap(each.inode.ino)
