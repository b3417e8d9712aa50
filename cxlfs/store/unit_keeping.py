"""What open checkpoint units keep of what was there before: by name what dies in them, which names
were given in them, and the content of files that change.

A unit copies nothing when it begins. The record that takes a name away, or publishes another
content, is the one that keeps what was there. Where it lies: see ``unit_aside``.

Other modules say what belongs to a unit (``unit_changes``), bring it back (``unit_returns``) and
remove it (``unit_garbage``).

Invariants
- A crash finds a change and what undoes it, or neither.
- A name and a content are kept once: what was there when the unit began.
- The copy of a content has the same references and no bytes of its own.
- A content that one record cannot hold is kept before it changes, in several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cxlfs.errors import InvariantError, invariant
from cxlfs.format import layout
from cxlfs.format.operations import (
    ContentOperation,
    LinkOperation,
    Operation,
    UnlinkOperation,
    XattrSetOperation,
)
from cxlfs.native.maps import FileMap
from cxlfs.store.commit_numbers import commit_operation
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_aside import (
    CONTENTS,
    GIVEN,
    MOVED_IN,
    apply_attributes,
    apply_names,
    free_name,
)
from cxlfs.store.unit_large import LargeCopy
from cxlfs.types import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable

    from cxlfs.store.open_unit import OpenUnit
    from cxlfs.store.unit_aside import Aside
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

PART: Final = b".part"
"""Behind the name of a content of which not all is kept yet."""
_RECORD_PART = 4
"""A content is kept in the record of its change if it takes no more than this part of one."""


class KeptContent:
    """The copy of a content, which waits for the record with ``operations``."""

    __slots__ = ("_commit", "_ino", "_keeping", "_unit", "copy", "operations")

    def __init__(self, keeping: Keeping, unit: OpenUnit | None, source: Inode, copy: Inode) -> None:
        self._keeping = keeping
        self._unit = unit
        self._ino = source.ino
        self.copy = copy
        content = copy.content
        self.operations: list[Operation] = [
            copy.operation(),
            ContentOperation(copy.ino, False, 0, content.size, content.references()),  # noqa: FBT003
            commit_operation(copy.ino, source),
            LinkOperation(copy.parent, copy.ino, copy.name),
        ]
        self._commit = source.commit_lsn, source.commit_ns

    def done(self) -> None:
        """The record is stored."""
        namespace = self._keeping.namespace
        namespace.set_committed(self.copy)
        apply_attributes(namespace, self.operations)
        self.copy.commit_lsn, self.copy.commit_ns = self._commit
        if self._unit is not None:
            self._unit.contents.add(self._ino)

    def cancel(self) -> None:
        """It was not."""
        self._keeping.forget_unfinished(self.copy)


class Keeping:
    """One for each open store. ``require_room`` raises NoSpaceError when metadata cannot grow."""

    def __init__(
        self, volume: Volume, versions: Versions, aside: Aside, require_room: Callable[[], None]
    ) -> None:
        self._volume = volume
        self._versions = versions
        self._aside = aside
        self._require_room = require_room
        self.namespace = volume.namespace
        self._record_bytes_max = volume.record_bytes_max
        self._large: dict[int, LargeCopy] = {}
        """Copies in the making, by the inode number of their source."""

    # --- names --------------------------------------------------------------------------------

    def home_for(self, unit: OpenUnit, name: bytes) -> Inode:
        """The directory of that name below the unit's own; made where there is none, in a record
        that lies before what is kept in it. Raises NoSpaceError, and as ``Volume.commit``.
        """
        if unit.kept_in is None:
            self._require_room()
            unit.kept_in = self._aside.make_for(unit.record)
        found = self.namespace.find(unit.kept_in.ino, name)
        if found is None:
            self._require_room()
            found = self._aside.make(unit.kept_in.ino, name)
        return found

    def keep_name(self, unit: OpenUnit, parent: int, name: bytes, inode: Inode) -> list[Operation]:
        """What the record that takes the name away says behind that. Raises as :meth:`home_for`."""
        home = self.home_for(unit, b"%d" % parent)
        if name in (home.entries or {}):
            return []  # what had the name when the unit began is kept
        unit.kept_names.setdefault(inode.ino, (home.ino, name))
        return [LinkOperation(home.ino, inode.ino, name)]

    def keep_origin(
        self, unit: OpenUnit, parent: int, name: bytes, inode: Inode
    ) -> list[Operation]:
        """The same of the name that a file has elsewhere, and loses to one in the unit. Where what
        had that name came before, it is kept under one like it.
        """
        home = self.home_for(unit, b"%d" % parent)
        found = self.namespace.find(home.ino, name)
        if inode.ino in unit.came or found is inode:
            return []
        kept = name
        if found is not None:
            kept = free_name(self.namespace, home.ino, name, MOVED_IN)
        unit.kept_names.setdefault(inode.ino, (home.ino, kept))
        unit.came[inode.ino] = home.ino, kept
        return [LinkOperation(home.ino, inode.ino, kept)]

    def keep_directory(
        self, unit: OpenUnit, parent: int, name: bytes, directory: Inode, first_ino: int | None
    ) -> None:
        """The name of a directory that is about to get another one, in a record of its own.
        ``first_ino``: of the region that it lies in; None: it comes from elsewhere. Raises as
        :meth:`home_for`.
        """
        home = self.home_for(unit, b"%d" % parent)
        kept = name
        if name in (home.entries or {}):
            if first_ino is not None:
                return
            kept = free_name(self.namespace, home.ino, name, MOVED_IN)
        made = self._aside.make_stand_in(home, kept, directory)
        unit.stand_ins[directory.ino] = home.ino, kept
        unit.regions[directory.ino] = made.ino if first_ino is None else first_ino
        if first_ino is None:
            unit.came[directory.ino] = home.ino, kept

    def keep_moved(self, unit: OpenUnit, directory: Inode) -> list[Operation]:
        """As :meth:`keep_name`, of a directory that loses a name that it was given: it is kept by
        the one that it had before.
        """
        home = unit.stand_ins.pop(directory.ino, None)
        if home is None:
            return []
        unit.came.pop(directory.ino, None)
        return [UnlinkOperation(*home), LinkOperation(home[0], directory.ino, home[1])]

    def origin_of(self, unit: OpenUnit, inode: Inode) -> tuple[int, bytes] | None:
        """Directory and name that something had before the unit began, or it came."""
        place = unit.came.get(inode.ino) or unit.kept_names.get(inode.ino)
        home = None if place is None else self.namespace.inodes.get(place[0])
        return None if place is None or home is None else (int(home.name), place[1])

    def release(self, unit: OpenUnit, inode: Inode) -> list[Operation]:
        """What the record says by which something leaves the unit that it came into: it is not
        brought back to where it was. The content that a file had there is, if it has another one.
        """
        place = unit.came.pop(inode.ino, None)
        if place is None:
            return []
        unit.kept_names.pop(inode.ino, None)
        ops: list[Operation] = [UnlinkOperation(*place)]
        unit.stand_ins.pop(inode.ino, None)
        unit.regions.pop(inode.ino, None)
        kept = self._content_of(unit, inode)
        if kept is not None and inode.links - inode.kept_links == 1:
            told = _attributes(kept, inode)
            if told:
                self._volume.commit([*told], durable=False)
                apply_attributes(self.namespace, told)
            unit.contents.discard(inode.ino)
            link = LinkOperation(place[0], kept.ino, place[1])
            ops += [UnlinkOperation(kept.parent, kept.name), link]
        return ops

    def give_name(self, unit: OpenUnit, parent: int, name: bytes, inode: Inode) -> list[Operation]:
        """What the record that gives a name to a file which had another one before says in front of
        that. Raises as :meth:`home_for`.
        """
        if unit.linked is not None:
            unit.linked.add(inode.ino)
        home = self.home_for(unit, GIVEN + b"%d" % parent)
        return [LinkOperation(home.ino, inode.ino, name)]

    def give_made(self, unit: OpenUnit, parent: int, name: bytes, directory: Inode) -> None:
        """The same of a directory that was made in the unit and goes where it would pass for what
        was there; in a record of its own.
        """
        home = self.home_for(unit, GIVEN + b"%d" % parent)
        self._aside.make_stand_in(home, name, directory)
        unit.regions[directory.ino] = unit.first_ino

    def is_given(self, unit: OpenUnit, parent: int, name: bytes, inode: Inode) -> bool:
        """The name was, since the unit began."""
        if unit.kept_in is None:
            return False
        home = self.namespace.find(unit.kept_in.ino, GIVEN + b"%d" % parent)
        return home is not None and self.namespace.find(home.ino, name) is inode

    def first_of(self, unit: OpenUnit, directory: Inode) -> int:
        """The first inode number that was not there, in a directory, when the unit began or the
        directory came.
        """
        if unit.regions:
            current: Inode | None = directory
            while current is not None and current is not unit.inode and current.ino != ROOT_INO:
                if current.ino in unit.regions:
                    return unit.regions[current.ino]
                current = self.namespace.inodes.get(current.parent)
        return unit.first_ino

    # --- contents -------------------------------------------------------------------------------

    def keep_content(self, unit: OpenUnit, inode: Inode) -> KeptContent | None:
        """What the record keeps that publishes another content; None: that was done before. Raises
        as :meth:`home_for`.
        """
        if self._is_large(_content(inode)):
            while self.keep_part(unit, inode):
                pass
            return None
        return self._twin(unit, inode, self.home_for(unit, CONTENTS), b"%d" % inode.ino)

    def keep_copy(self, unit: OpenUnit, parent: int, name: bytes, inode: Inode) -> None:
        """A copy of a file that is about to get a name elsewhere, with the content that it had when
        the unit began, in records of its own. Raises as :meth:`home_for`.
        """
        home = self.home_for(unit, b"%d" % parent)
        if name not in (home.entries or {}):
            self._keep_copy(unit, home, name, inode)

    def leave_given(self, unit: OpenUnit, inode: Inode) -> list[Operation]:
        """A file moves out of the unit from a name that it was given there: a copy stays for the
        one that it had, in records of its own.
        """
        place = unit.kept_names.get(inode.ino)
        if inode.ino in unit.came or place is None or inode.live is None:
            return []
        if inode.links - inode.kept_links > 1:
            return []
        contents = self.home_for(unit, CONTENTS)
        free = free_name(self.namespace, contents.ino, b"%d" % inode.ino, MOVED_IN)
        self._keep_copy(unit, contents, free, inode)
        copy = self.namespace.find(contents.ino, free)
        if copy is None:
            raise InvariantError("a copy has its name")
        del unit.kept_names[inode.ino]
        unlinks = [UnlinkOperation(*place), UnlinkOperation(contents.ino, free)]
        return [*unlinks, LinkOperation(place[0], copy.ino, place[1])]

    def _keep_copy(self, unit: OpenUnit, home: Inode, name: bytes, inode: Inode) -> None:
        kept = self._content_of(unit, inode)
        source = inode if kept is None else kept
        left: list[Operation] = []
        if kept is not None and inode.links - inode.kept_links == 1:
            left.append(UnlinkOperation(kept.parent, kept.name))
        if self._is_large(_content(source)):
            large = self._begin_large(source, home, name)
            while large.step(_content(source)):
                pass
            self._publish(large.made, source, name, [*_attributes(large.made, inode), *left])
        else:
            copy = self._twin(None, source, home, name)
            copy.operations += _attributes(copy.copy, inode)
            try:
                self._volume.commit([*copy.operations, *left], durable=False)
            except BaseException:
                copy.cancel()
                raise
            copy.done()
            apply_names(self.namespace, left)
        if left:
            unit.contents.discard(inode.ino)

    def _content_of(self, unit: OpenUnit, inode: Inode) -> Inode | None:
        """The copy of the content that a file had."""
        if unit.kept_in is None or inode.ino not in unit.contents:
            return None
        home = self.namespace.find(unit.kept_in.ino, CONTENTS)
        return None if home is None else self.namespace.find(home.ino, b"%d" % inode.ino)

    def _twin(self, unit: OpenUnit | None, inode: Inode, home: Inode, name: bytes) -> KeptContent:
        content = _content(inode)
        copy = self._new(inode, home, name)
        copy.live = self._versions.sharing.twin(content, copy.ino, of=inode)
        return KeptContent(self, unit, inode, copy)

    def keep_part(self, unit: OpenUnit, inode: Inode) -> bool:
        """Before a content changes that one record cannot hold: one step of keeping it; False: it
        is kept, or needs no step. Raises as :meth:`home_for`.
        """
        content = inode.committed_content
        if content is None or not self._is_large(content) or inode.ino in unit.contents:
            return False
        large = self._large.get(inode.ino)
        if large is None or not large.made.links:
            home = self.home_for(unit, CONTENTS)
            large = self._large[inode.ino] = self._begin_large(inode, home, b"%d" % inode.ino)
        if large.step(content):
            return True
        del self._large[inode.ino]
        self._publish(large.made, inode, b"%d" % inode.ino, [])
        unit.contents.add(inode.ino)
        return False

    def _begin_large(self, source: Inode, home: Inode, name: bytes) -> LargeCopy:
        copy = self._new(source, home, name + PART)
        copy.live = FileMap(self._volume.engine, owner=copy.ino)
        self._versions.begin_new(copy, copy.name)
        return LargeCopy(self._versions, source, copy, self._share)

    def _publish(self, copy: Inode, source: Inode, name: bytes, more: list[Operation]) -> None:
        """All parts of a copy are there: it gets its name. ``more``: what the same record says."""
        incomplete = bool(source.flags & layout.INODE_INCOMPLETE)
        _take_attributes(copy, source)
        self._versions.publish(copy, incomplete=incomplete)
        ops: list[Operation] = [
            UnlinkOperation(copy.parent, copy.name),
            LinkOperation(copy.parent, copy.ino, name),
            commit_operation(copy.ino, source),
            *more,
        ]
        self._volume.commit(ops, durable=False)
        apply_names(self.namespace, ops)
        apply_attributes(self.namespace, ops)
        copy.commit_lsn, copy.commit_ns = source.commit_lsn, source.commit_ns

    def _new(self, source: Inode, home: Inode, name: bytes) -> Inode:
        """A file that nobody knows, with the committed attributes of ``source``."""
        left = self.namespace.find(home.ino, name)
        if left is not None:
            invariant(left.uncommitted, "a content is kept once")
            self.forget_unfinished(left)
        copy = Inode(
            self.namespace.allocate_ino(), source.mode, source.uid, source.gid, rdev=source.rdev
        )
        _take_attributes(copy, source)
        self.namespace.add_uncommitted(copy)
        self.namespace.link(home.ino, name, copy.ino)
        return copy

    def forget_unfinished(self, copy: Inode) -> None:
        """Its record was not stored."""
        self.namespace.unlink(copy.parent, copy.name)
        self.namespace.reap(copy.ino)

    def _is_large(self, content: FileMap) -> bool:
        size = content.ref_count * layout.REF_DTYPE.itemsize
        return size > self._record_bytes_max // _RECORD_PART

    def _share(self, source: Inode, target: FileMap, offset: int, length: int) -> None:
        """Let ``target`` refer to a range of the committed content, where that is."""
        content = source.committed_content
        if content is not None:
            self._versions.sharing.range(content, target, (offset, offset, length), of=source)


def _content(inode: Inode) -> FileMap:
    content = inode.committed_content
    if content is None:
        raise InvariantError("what was committed has a content")
    return content


def _attributes(copy: Inode, inode: Inode) -> list[XattrSetOperation]:
    """What says that a copy has the extended attributes that users see of a file."""
    shown = {n: v for n, v in (inode.xattrs or {}).items() if not n.startswith(HIDDEN_PREFIX)}
    return [XattrSetOperation(copy.ino, name, value) for name, value in shown.items()]


def _take_attributes(made: Inode, source: Inode) -> None:
    """Times and state as they are committed."""
    clean = source.version is None
    made.flags = source.flags & layout.INODE_INCOMPLETE
    made.birth_ns, made.atime_ns = source.birth_ns, source.atime_ns
    made.mtime_ns = source.mtime_ns if clean else source.committed_mtime_ns
    made.ctime_ns = source.ctime_ns if clean else source.committed_ctime_ns
    made.committed_mtime_ns, made.committed_ctime_ns = made.mtime_ns, made.ctime_ns
