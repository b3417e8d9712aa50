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

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from cxlfs.format import layout
from cxlfs.format.operations import (
    AsideDropOperation,
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrSetOperation,
    encode,
)
from cxlfs.store import unit_record
from cxlfs.store.commit_numbers import COMMIT_XATTR, commit_operation
from cxlfs.store.held import last_of
from cxlfs.store.namespace import FileKind, Inode
from cxlfs.store.past_names import TakenName
from cxlfs.store.past_rows import Death
from cxlfs.store.paths import path_of
from cxlfs.store.unit_aside import ASIDE_NAME, MOVED_IN, free_name, stands_for
from cxlfs.store.unit_kept import Kept, KeptName, is_copy
from cxlfs.store.unit_members import is_others, never_belongs, path_below
from cxlfs.store.unit_record import (
    TAKEN_BACK_XATTR,
    OpenRecord,
    decode_taken_back,
    encode_taken_back,
)
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
    the inode numbers that have lost their name so. ``goes_back``: whether an open unit does now.
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
        self.goes_back: Callable[[int], bool] = lambda _ino: True

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
        if path is not None and path.startswith(b"/" + ASIDE_NAME + b"/"):
            return kept  # all of it was removed, and waits for another unit: nobody sees it
        message = f"what was there before is back: {reason}; cxlfs history has what was written"
        if self.policies.is_directory(record.ino) or path is None:
            self.volume.event("unit-back", message, ino=record.ino)
        else:  # it was made, and is gone
            self.volume.event("unit-back", f"{message} ({os.fsdecode(path)})")
        return kept


class _WayBack:
    """Of one unit: names that were given or made are taken away, directories that moved are brought
    from where they are, then all that is kept gets its name.
    """

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
        self._kept = Kept(self._namespace, returns.aside, record)
        self._replaces = self._top is not None and self._has_kept(self._top)
        self._above = self._find_above()
        self._open = {each.ino for each in returns.left_open()}
        self._ops: list[Operation] = []
        self._bytes = 0
        self._instead: dict[int, int] = {}
        """Kept directories whose name means another one now: that one."""
        self._unsettled: set[int] = set()
        """Numbers of what the operations name, where that matters."""
        self._changes: list[tuple[Prepared, Inode, Inode]] = []
        """Files whose content the operations change, and the copies that have it."""
        self._gone: set[int] = set()

    def _directory(self, ino: int) -> Inode | None:
        """Of that number, where users reach it."""
        inode = self._namespace.inodes.get(ino)
        if inode is None or inode.entries is None or inode.is_removed or ino == ROOT_INO:
            return None
        return None if ino in self._namespace.kept_directories else inode

    def _find_above(self) -> int:
        """The directory that the unit's own is in, or was."""
        inode = self._namespace.inodes.get(self._record.ino)
        above = 0 if inode is None else self._returns.aside.home_of(inode.parent)
        return above if self._directory(above) is not None else ROOT_INO

    def go(
        self, without: list[Operation], stored: Callable[[list[Operation]], None]
    ) -> Inode | None:
        if self._top is not None:
            self._end_versions(self._top)
        self._take_given()
        made = self._remove_made()
        self._flush()
        self._bring_directories()
        self._flush()
        self._put_lost()
        self._flush()
        for directory in made:
            self._remove_directory(directory)
        self._flush()
        self._put_inside()
        self._flush()
        self._put_contents()  # while what was removed and made again is known by where it is kept
        self._flush()
        self._put_outside()
        self._flush()
        self._put_contents()
        self._note_elsewhere()
        self._say([*self._policy(), *without])
        self._flush(durable=True)
        stored(without)
        self._returns.gone(self._gone)
        return self._kept.top

    def _end_versions(self, top: Inode) -> None:
        """Of files that were being overwritten: whoever did is gone, and its RELEASE on the way."""
        versions = self._returns.versions
        for inode in list(versions.open_versions.values()):
            if inode.committed is None or inode.uncommitted or not inode.links:
                continue
            if self._is_apart(inode):
                continue
            above = self._namespace.inodes.get(inode.parent)
            path = None if above is None else path_below(self._namespace, top, above)
            if path is None:
                continue
            is_directory = False
            if self._is_new or not never_belongs((*path, inode.name), is_directory, self._done):
                with versions.outside_units():
                    versions.revert(inode, "it belongs to a checkpoint that was not finished")

    def _is_apart(self, inode: Inode) -> bool:
        """It stays as it is."""
        known = (*self._record.apart, *self._record.foreign)
        return inode.ino in known or is_others(inode, self._record.uid)

    # --- what was given and made --------------------------------------------------------------

    def _take_given(self) -> None:
        """Names that files were given which have another one, or leave a copy, or were made."""
        is_kept = self._kept.keeps()
        for kept in self._kept.given():
            inode, name = kept.inode, kept.name
            means = self._entries(kept.parent).get(name) == inode.ino
            if not means or self._is_apart(inode) or self._is_left_behind(kept.parent):
                continue
            self._settle(inode.ino)
            is_made = self._record.is_new(inode.ino)
            if is_made or inode.links - inode.kept_links > 1 or is_kept(inode):
                self._take(kept.parent, name, inode)
                self._unsettled.add(inode.ino)
        self._flush()

    def _entries(self, ino: int) -> dict[bytes, int]:
        directory = self._namespace.inodes.get(ino)
        return (directory.entries or {}) if directory is not None else {}

    def _remove_made(self) -> list[Inode]:
        """Take the names of files that were made, and return directories that were, innermost
        first.
        """
        stand_ins = self._kept.stand_ins()
        regions = self._kept.regions(stand_ins)
        made: list[Inode] = []
        pending: list[tuple[Inode, tuple[bytes, ...], int]] = []
        if self._top is not None:
            pending.append((self._top, (), self._record.first_ino))
            if self._is_new and not is_others(self._top, self._record.uid):
                made.append(self._top)
        pending += self._moved_to_look_into(stand_ins, regions)
        while pending:
            directory, above, first_ino = pending.pop()
            for name, ino in list((directory.entries or {}).items()):
                inode = self._namespace.get(ino)
                path = (*above, name)[-_PATH_NAMES:]
                if is_others(inode, self._record.uid) or self._stays(inode, path):
                    continue
                is_made = (ino >= first_ino or ino in self._record.fresh) and not _is_back(inode)
                if inode.entries is not None:
                    if ino in stand_ins:
                        continue
                    first = regions.get(ino, first_ino)
                    pending.append((inode, path, first))
                    if is_made or (ino in regions and ino >= first):
                        made.append(inode)
                elif is_made:
                    self._take(directory.ino, name, inode)
        made.reverse()
        return made

    def _moved_to_look_into(
        self, stand_ins: dict[int, KeptName], regions: dict[int, int]
    ) -> Iterator[tuple[Inode, tuple[bytes, ...], int]]:
        """Directories that have another name than they had."""
        for kept in self._kept.kept_directories():
            if self._kept.is_inside(kept.parent, stand_ins):
                yield kept.inode, (b"",), self._record.first_ino
        for ino in stand_ins:
            inode = self._directory(ino)
            if inode is not None and not self._is_left_behind(ino):
                yield inode, (b"",), regions[ino]

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
            return
        if inode.held is not None:
            self._settle(inode.ino)  # whether it is the last name counts
            self._unsettled.add(inode.ino)
        last = last_of(inode.ino, inode.links, inode.held)
        self._say([*last, UnlinkOperation(parent, name)])

    def _remove_directory(self, directory: Inode) -> None:
        """One that was made, if nothing stays in it."""
        self._flush()
        has_policy = directory is self._top and self._policies.has_own(directory)
        if directory.entries or directory.is_removed:
            return
        if has_policy and self._kept.at(directory.parent, directory.name) is None:
            return
        self._take(directory.parent, directory.name, directory)
        above = self._namespace.get(directory.parent)
        now = self._volume.now()
        self._say([above.operation(mtime_ns=now, ctime_ns=now)])
        above.mtime_ns = above.ctime_ns = now

    # --- directories that moved ---------------------------------------------------------------

    def _bring_directories(self) -> None:
        """From wherever they are, to where their names are kept."""
        for ino, kept in self._kept.stand_ins().items():
            inode = self._directory(ino)
            if inode is None or self._is_left_behind(ino):
                continue
            if self._top is not None and self._namespace.is_below(self._record.ino, ino):
                continue
            self._changed(inode.parent, inode.name, inode)
            unlinks = [
                UnlinkOperation(inode.parent, inode.name),
                UnlinkOperation(kept.home.ino, kept.name),
            ]
            self._say([*unlinks, LinkOperation(kept.home.ino, ino, kept.name)])
            self._flush()

    def _is_left_behind(self, ino: int) -> bool:
        """It lies in another unit, which is done."""
        inode = self._directory(ino)
        found = None if inode is None else self._policies.outermost(inode)
        if found is None or self._kept.is_inside(ino):
            return False
        return found[0].ino not in self._open

    # --- what is kept -------------------------------------------------------------------------

    def _is_in_place_of(self, kept: KeptName) -> bool:
        """The unit's directory was made again under the name that is kept."""
        top = self._top
        return (
            top is not None
            and not top.is_removed
            and (kept.parent, kept.name) == (top.parent, top.name)
        )

    def _has_kept(self, directory: Inode) -> bool:
        """One is kept that had the name of this directory: what stays is below that one then."""
        found = self._kept.at(directory.parent, directory.name)
        return found is not None and found.entries is not None

    def _put_inside(self) -> None:
        """Each name in a directory of the unit means again what it meant. Where a directory stays
        that has the name of one which has nothing, what was below comes into that. Where another
        file stays, what has no other name gets one like it.
        """
        instead = self._instead = self._find_instead()
        for kept in list(self._kept.names()):
            inode = kept.inode
            if not self._kept.is_inside(kept.parent) or not _is_itself(inode):
                continue
            to = instead.get(kept.parent, kept.parent)
            target = self._namespace.inodes.get(to)
            if inode.ino in instead or target is None or target.entries is None:
                continue
            found = self._namespace.find(to, kept.name)
            if found is not None and found is not inode and is_copy(inode, found):
                if found.commit_lsn == inode.commit_lsn:
                    continue  # it did not leave, or is back as it was
                self._take(to, kept.name, found)
                found = None
            lost = inode.entries or (inode.live is not None and inode.is_removed)
            if found is not None and found is not inode and lost:
                self._put_free(kept, to)
            elif found is None and not self._namespace.is_below(to, inode.ino):
                self._put(kept, to, kept.name)
                if inode.entries is not None:
                    self._flush()

    def _find_instead(self) -> dict[int, int]:
        """Kept directories whose name means another one now: that one."""
        waiting = {kept.inode.ino: kept for kept in self._kept.kept_directories()}
        instead: dict[int, int] = {}
        while waiting:
            ready = [kept for kept in waiting.values() if kept.parent not in waiting]
            for kept in ready:
                del waiting[kept.inode.ino]
                is_top = kept.inode.ino == self._record.ino or self._is_in_place_of(kept)
                if kept.inode.entries or not (is_top or self._kept.is_inside(kept.parent)):
                    continue
                found = self._entries(instead.get(kept.parent, kept.parent)).get(kept.name)
                if found is not None and self._directory(found) is not None:
                    instead[kept.inode.ino] = found
            if not ready:
                break
        return instead

    def _put_outside(self) -> None:
        """What came from elsewhere goes there: under its name or, if that is taken and it has no
        other one, under one like it. If the directory is gone, that is the one above the unit.
        """
        for kept in list(self._kept.names()):
            self._settle(kept.inode.ino)
            is_top = kept.inode.ino == self._record.ino
            target = self._target(kept.parent)
            if self._kept.is_inside(kept.parent) or (is_top and target is None):
                continue
            if kept.inode.ino in self._instead or not _is_itself(kept.inode):
                continue
            if self._is_homeless(kept):
                self._put_free(kept, self._above if target is None else target.ino)
            elif target is not None and self._has_lost_one_of_its_names(kept, target):
                self._put(kept, target.ino, kept.name)

    def _has_lost_one_of_its_names(self, kept: KeptName, target: Inode) -> bool:
        """A file that has others, and nothing else has this one."""
        inode = kept.inode
        if inode.is_removed or inode.entries is not None or self._is_left_behind(kept.parent):
            return False
        return kept.name not in (target.entries or {})

    def _put_lost(self) -> None:
        """What has no other name than the one that it was given goes to the directory above the
        unit.
        """
        for given in self._kept.given():
            inode, name = given.inode, given.name
            means = self._entries(given.parent).get(name) == inode.ino
            if not means or self._is_apart(inode) or self._is_left_behind(given.parent):
                continue
            if self._record.is_new(inode.ino):
                continue
            self._take(given.parent, name, inode)
            self._flush()
            self._put_free(given, self._above)

    def _is_homeless(self, kept: KeptName) -> bool:
        """It has no other name than the kept one, and no copy is there, or will be."""
        inode = kept.inode
        if not _is_itself(inode) or not inode.is_removed:
            return False
        if self._was_taken_back(kept):
            return False
        if inode.entries is not None and self._is_left_behind(kept.parent):
            return False
        found = self._namespace.inodes.get(self._entries(kept.parent).get(kept.name, 0))
        if found is not None and is_copy(found, inode):
            return False
        return not self._kept.is_elsewhere(kept, filter(self._goes_back, self._returns.left_open()))

    def _was_taken_back(self, kept: KeptName) -> bool:
        """The unit that a file was made in, and came from, has gone back since."""
        ino, when_ns = decode_taken_back((kept.inode.xattrs or {}).get(TAKEN_BACK_XATTR, b""))
        if self._directory(ino) is None or when_ns < self._record.since_ns:
            return False
        return self._namespace.is_below(kept.parent, ino)

    def _note_elsewhere(self) -> None:
        """What was made here and lies in other units has no place to go back to."""
        value = encode_taken_back(self._record.ino, self._volume.now())
        for record in self._returns.left_open():
            if record.ino == self._record.ino:
                continue
            for kept in Kept(self._namespace, self._returns.aside, record).names():
                inode = kept.inode
                if not self._kept.is_inside(kept.parent) or self._is_apart(inode):
                    continue
                if inode.live is not None and self._record.is_new(inode.ino):
                    self._say([XattrSetOperation(inode.ino, TAKEN_BACK_XATTR, value)])

    def _goes_back(self, record: OpenRecord) -> bool:
        """Another unit that puts what it has kept where it was, too."""
        return record.ino != self._record.ino and self._returns.goes_back(record.ino)

    def _target(self, parent: int) -> Inode | None:
        """Where what had a name in that directory goes."""
        return self._namespace.get(ROOT_INO) if parent == ROOT_INO else self._directory(parent)

    def _put_free(self, kept: KeptName, to: int) -> None:
        """Under its name or, where something has that, under one like it."""
        self._settle(to)
        if self._namespace.is_below(to, kept.inode.ino):
            to = ROOT_INO
        name = kept.name
        if name in self._entries(to):
            name = free_name(self._namespace, to, name, MOVED_IN)
        self._put(kept, to, name)
        self._unsettled.add(kept.inode.ino)
        if name != kept.name or kept.inode.entries is not None:
            self._unsettled.add(to)

    def _put(self, kept: KeptName, to: int, name: bytes) -> None:
        """The name is not one that was given any more: a crash may come, and this again."""
        self._changed(to, name, kept.inode)
        self._returns.name_changed(to, name)
        ops: list[Operation] = [UnlinkOperation(kept.home.ino, kept.name)]
        given = self._kept.given_at(to, name)
        if given is not None and (given[0], name) != (kept.home, kept.name):
            ops.append(UnlinkOperation(given[0].ino, name))
        self._say([*ops, LinkOperation(to, kept.inode.ino, name)])

    # --- contents -------------------------------------------------------------------------------

    def _put_contents(self) -> None:
        for name, copy in self._kept.contents():
            inode = self._namespace.inodes.get(int(name)) if name.isdigit() else None
            if copy.kind is not FileKind.FILE or copy.uncommitted or inode is None:
                continue
            if inode.kind is not FileKind.FILE or inode.is_removed:
                continue
            if not self._is_apart(inode) and not self._is_left_behind(inode.parent):
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

    def _settle(self, ino: int) -> None:
        """Something is asked of names in it, or of its own."""
        if ino in self._unsettled:
            self._flush()

    def _flush(self, *, durable: bool = False) -> None:
        ops, self._ops, self._bytes = self._ops, [], 0
        self._unsettled.clear()
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
            if isinstance(op, AsideDropOperation):
                self._returns.versions.end_aside(namespace.get(op.ino), (lsn, number), time_ns)
            elif isinstance(op, UnlinkOperation):
                inode = namespace.unlink(op.parent, op.name)
                since = namespace.named_since(inode)
                taken.append(TakenName(op.parent, op.name, inode, since, number))
            elif isinstance(op, LinkOperation):
                namespace.link(op.parent, op.name, op.ino)
            elif isinstance(op, XattrSetOperation) and op.name in {COMMIT_XATTR, TAKEN_BACK_XATTR}:
                namespace.set_xattr(namespace.get(op.ino), op.name, op.value)
        for ino in removed:
            if not namespace.get(ino).is_removed:
                past.revive(ino, lsn, time_ns)
        past.names_taken(taken, lsn, time_ns, Death.REMOVED)
        for each in taken:
            namespace.reap(each.inode.ino)


def _is_back(inode: Inode) -> bool:
    """It is a copy that got its name before a crash broke off the way back."""
    return COMMIT_XATTR in (inode.xattrs or {})


def _is_itself(inode: Inode) -> bool:
    """Nothing that stands for a directory, or is not finished."""
    return stands_for(inode) == inode.ino and not inode.uncommitted
