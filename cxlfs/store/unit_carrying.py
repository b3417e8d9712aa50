"""What stays where it is when a checkpoint unit goes back: logs, files of other users, files that
were moved there from elsewhere.

They change over into the copy of what was there before, which then gets the directory's name. What
was moved there gets its old name again, where nothing else has it.

Other modules decide that a unit goes back (``units``) and give the copy its name
(``unit_returns``).

Invariants
- No content loses its last name. What gives way in the copy is an older content of the same file,
  or the copy of a directory, which is removed in the background.
- A record holds all that happens to a name. A crash between two of them leaves the unit open: the
  recovery goes on with what has not changed over yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cxlfs.errors import InvariantError
from cxlfs.format.operations import (
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrSetOperation,
    encode,
)
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_members import is_others, never_belongs
from cxlfs.store.unit_record import BEFORE_XATTR, OpenRecord, encode_unit, unit_xattr
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from cxlfs.store.namespace import Namespace
    from cxlfs.store.unit_copies import Copies
    from cxlfs.store.volume import Volume


class Carrying:
    """Of one unit: ``top`` is its directory, ``done`` are the markers of its rule."""

    def __init__(
        self,
        volume: Volume,
        copies: Copies,
        top: Inode,
        record: OpenRecord,
        done: tuple[bytes, ...],
    ) -> None:
        self._volume = volume
        self._namespace: Namespace = volume.namespace
        self._copies = copies
        self._top = top
        self._record = record
        self._done = done
        self._moved = {ino: (parent, name) for ino, parent, name in record.moved}
        self._ops: list[Operation] = []
        self._step: list[Operation] = []
        """Of the name that is being looked at."""
        self._dropped: list[Inode] = []
        self.count = 0
        """Names that stay."""

    def carry(self, before: Inode | None) -> Inode | None:
        """Let all that stays change over; returns the copy, made if there was none and something
        stays. Raises as ``Volume.commit``.
        """
        for directory, path, name, inode in list(self._found(is_new=before is None)):
            home = self._home_of(inode)
            if home is not None:
                self._move(directory, name, inode, home)
                self._copies.changed(*home)
                continue
            if before is None:
                before = self._empty_before()
            target = self._target(before, path)
            if inode.ino in self._moved and self._namespace.find(target.ino, name) is not None:
                free = self._copies.aside.free_name(target, name, b"moved-in")
                self._move(directory, name, inode, (target.ino, free))
            else:
                self._replace(target, name, inode)
                self._move(directory, name, inode, (target.ino, name))
        self._flush()
        for dropped in self._dropped:
            self._copies.drop(dropped)
        return before

    # --- what stays -----------------------------------------------------------------------------

    def _found(self, *, is_new: bool) -> Iterator[tuple[Inode, tuple[bytes, ...], bytes, Inode]]:
        """Directory, its path below the top, name, and what that means. Logs in a directory that
        was not there before go with it: a directory of logs alone is taken for a checkpoint.
        """
        pending: list[tuple[Inode, tuple[bytes, ...]]] = [(self._top, ())]
        while pending:
            directory, path = pending.pop()
            for name, ino in (directory.entries or {}).items():
                inode = self._namespace.get(ino)
                if self._stays(inode, (*path, name), is_new=is_new):
                    yield directory, path, name, inode
                elif inode.entries is not None:
                    pending.append((inode, (*path, name)))

    def _stays(self, inode: Inode, path: tuple[bytes, ...], *, is_new: bool) -> bool:
        if inode.ino in self._moved:
            parent, name = self._moved[inode.ino]
            return not self._means(parent, name, inode)  # else it has kept that name
        if is_others(inode, self._record.uid):
            return True
        if is_new:
            return False
        is_directory = inode.entries is not None
        return inode.ino in self._record.apart or never_belongs(path, is_directory, self._done)

    def _means(self, parent: int, name: bytes, inode: Inode) -> bool:
        directory = self._namespace.inodes.get(parent)
        return directory is not None and (directory.entries or {}).get(name) == inode.ino

    def _home_of(self, inode: Inode) -> tuple[int, bytes] | None:
        """Where it was before it was moved there, if it can go there."""
        home = self._moved.get(inode.ino)
        directory = self._namespace.inodes.get(home[0]) if home is not None else None
        if home is None or directory is None or directory.entries is None or not directory.links:
            return None
        is_away = self._copies.aside.is_kept_aside(directory) or any(
            self._namespace.is_below(directory.ino, ino) for ino in (self._top.ino, inode.ino)
        )
        return None if is_away or home[1] in directory.entries else home

    # --- changing over --------------------------------------------------------------------------

    def _target(self, before: Inode, path: tuple[bytes, ...]) -> Inode:
        """The directory at that path below the copy, made where there is none."""
        target, source = before, self._top
        for name in path:
            source = self._child(source, name)
            found = self._namespace.find(target.ino, name)
            if found is not None and found.entries is not None:
                target = found
                continue
            self._flush()
            if found is not None:
                name = self._copies.aside.free_name(target, name, b"kept")  # noqa: PLW2901
            target, ops = self._copies.empty_like(source, target.ino, name)
            self._copies.commit(ops)
        return target

    def _child(self, directory: Inode, name: bytes) -> Inode:
        found = self._namespace.find(directory.ino, name)
        if found is None:
            raise InvariantError("a directory that was walked through has its name")
        return found

    def _replace(self, target: Inode, name: bytes, inode: Inode) -> None:
        """The name in the copy gives way to what has it now."""
        old = self._namespace.find(target.ino, name)
        if old is None or old is inode:
            return
        ops: list[Operation] = [UnlinkOperation(target.ino, name)]
        if old.entries is not None:
            self._flush()  # the next name must not be taken
            place, made = self._copies.aside.directory_or_new()
            free = self._copies.aside.free_name(place, name, b"before-%d" % inode.ino)
            ops += [*made, LinkOperation(place.ino, old.ino, free)]
            ops.append(XattrSetOperation(old.ino, BEFORE_XATTR, b"0"))
            self._namespace.set_xattr(old, BEFORE_XATTR, b"0")
            self._dropped.append(old)
        self._step += ops

    def _move(self, directory: Inode, name: bytes, inode: Inode, to: tuple[int, bytes]) -> None:
        self.count += 1
        if inode.uncommitted:  # the media do not know it: its name is one of the living
            self._end_step()
            self._flush()
            self._namespace.unlink(directory.ino, name)
            self._namespace.link(*to, inode.ino)
        else:
            self._step += [
                UnlinkOperation(directory.ino, name),
                LinkOperation(to[0], inode.ino, to[1]),
            ]
            self._end_step()
        if inode.pins:
            self._copies.changed(directory.ino, name)

    def _end_step(self) -> None:
        """What one name needs goes into one record."""
        if len(encode([*self._ops, *self._step])) > self._volume.record_bytes_max // 2:
            self._flush()
        self._ops += self._step
        self._step = []

    def _flush(self) -> None:
        ops, self._ops = self._ops, []
        if ops:
            self._copies.commit(ops)

    def _empty_before(self) -> Inode:
        """A directory like the unit's, with nothing in it, that its record names."""
        aside = self._copies.aside
        place, ops = aside.directory_or_new()
        top = self._copies.inode_like(self._top)
        name = aside.free_name(place, self._top.name, b"before-%d" % self._top.ino)
        ops += self._copies.operations_like(top, self._top, place.ino, name)
        value = b"%d" % self._top.ino
        record = dataclasses.replace(self._record, before=top.ino)
        ops.append(XattrSetOperation(top.ino, BEFORE_XATTR, value))
        ops.append(XattrSetOperation(ROOT_INO, unit_xattr(record.ino), encode_unit(record)))
        self._copies.commit(ops)
        self._namespace.set_xattr(top, BEFORE_XATTR, value)
        return top
