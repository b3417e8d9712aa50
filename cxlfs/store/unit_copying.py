"""Copies of directories that share every extent with what they copy, made in steps.

Never here: when a copy is wanted (``units``), where it is kept and how it goes away
(``unit_copies``), data that is read or moved.

Invariants
- A finished copy has the committed content, names, modes, owners, times and extended attributes
  that its source has at that moment; what is not committed is not in it. No verb changes it.
- Between two steps all that was made is committed, and garbage to whoever finds it after a crash.
- Every record that is stored between two steps is heard of: what it changed in the part that was
  copied is copied anew before the copy counts as finished.
- A file of many references is copied in parts (``unit_large``), and nothing else until it is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

from cxlfs.errors import InvariantError, invariant
from cxlfs.format import layout
from cxlfs.format.operations import (
    ContentOperation,
    InodeOperation,
    LinkOperation,
    Operation,
    PromoteOperation,
    UnlinkOperation,
    XattrRemoveOperation,
    XattrSetOperation,
)
from cxlfs.native.maps import FileMap
from cxlfs.store.unit_batches import Batch
from cxlfs.store.unit_copies import take_attributes
from cxlfs.store.unit_large import REFS_AT_ONCE, LargeCopy
from cxlfs.store.unit_record import BEFORE_XATTR

if TYPE_CHECKING:
    from cxlfs.store.namespace import Inode
    from cxlfs.store.unit_copies import Copies
    from cxlfs.store.versions import Versions
    from cxlfs.store.volume import Volume

FILES_AT_ONCE = 256
"""7 µs of processor time each; 48 where their content changes meanwhile."""
NAMES_AT_ONCE = 4096
"""Looked at, to put files in the order of their commits: 1 to 2 µs each."""
IDLE_SECONDS = 30.0
"""After so long without a step nobody goes on with a copy: its change was refused meanwhile."""

_LAST = 1 << 64
_OF_INODES = (
    InodeOperation,
    XattrSetOperation,
    XattrRemoveOperation,
    ContentOperation,
    PromoteOperation,
)
_OF_NAMES = (LinkOperation, UnlinkOperation)


class Copyings:
    """Those in the making; one for each store. ``require_room`` raises NoSpaceError when metadata
    cannot grow.
    """

    def __init__(
        self,
        copies: Copies,
        volume: Volume,
        versions: Versions,
        *,
        require_room: Callable[[], None],
    ) -> None:
        self._copies = copies
        self._volume = volume
        self._versions = versions
        self._require_room = require_room
        self._running: dict[int, Copying] = {}
        self._followed: dict[int, Copying] = {}
        """Finished ones, which go on when the next unit begins in the same directory."""
        self.steps = 0
        """Since the store was opened."""

    def step(self, source: Inode, now: float) -> bool:
        """One step towards the copy of a directory and of all below it, of a bounded number of
        files; False: it is finished (:meth:`take`). ``now``: seconds, monotonic.

        Raises NoSpaceError, MediaError, OutOfMemoryError; what was made so far is garbage then.
        """
        copying = self._running.get(source.ino)
        again = False
        if copying is not None and copying.is_void:
            again = not copying.went_on
            self._give_up(source.ino)
            copying = None
        self.steps += 1
        try:
            self._require_room()
            if copying is None:
                copying = Copying(self._copies, self._volume, self._versions, source)
                self._running[source.ino] = copying
                self._volume.on_record = self._heard
            copying.stepped = now
            while copying.step():
                if not again:  # else it might be disturbed each time
                    return True
        except BaseException:
            self._give_up(source.ino)
            raise
        return False

    def take(self, source: Inode, *, follow: bool = False) -> Inode:
        """The finished copy, durable in the order of the journal, and the caller's from now on.
        ``follow``: note what changes in the directory from here on, for :meth:`go_on`.
        """
        copying = self._running.pop(source.ino)
        invariant(not copying.is_unfinished, "a copy is taken when it is finished")
        if follow:
            copying.forget_removed()
            self._followed[source.ino] = copying
        self._stop_hearing()
        return copying.top

    def go_on(self, source: Inode, top: Inode | None) -> bool:
        """The unit of a copy that was taken is over, and another one begins in its directory: its
        copy is that one but for what has changed. False: it was not followed.
        """
        copying = self._followed.get(source.ino)
        if copying is None or copying.top is not top or source.ino in self._running:
            return False
        del self._followed[source.ino]
        copying.went_on = True
        self._running[source.ino] = copying
        return True

    def follow_no_more(self, source: Inode) -> None:
        """The unit is over."""
        self._followed.pop(source.ino, None)
        self._stop_hearing()

    def make(self, source: Inode) -> Inode:
        """The whole copy at once. Raises as :meth:`step`."""
        while self.step(source, 0.0):
            pass
        return self.take(source)

    def drop_idle(self, now: float) -> None:
        """Give up what nobody goes on with."""
        before = now - IDLE_SECONDS
        for ino in [ino for ino, one in self._running.items() if one.stepped <= before]:
            self._give_up(ino)

    def drop_all(self) -> None:
        self._followed.clear()
        for ino in list(self._running):
            self._give_up(ino)

    def _give_up(self, ino: int) -> None:
        copying = self._running.pop(ino, None)
        if copying is not None:
            self._copies.drop(copying.top)
        self._stop_hearing()

    def _stop_hearing(self) -> None:
        if not self._running and not self._followed:
            self._volume.on_record = None

    def _heard(self, ops: Sequence[Operation]) -> None:
        for copying in (*self._running.values(), *self._followed.values()):
            copying.heard(ops)


class Copying:
    """One of them. Its first record, which the constructor stores, makes it garbage until it is
    taken; raises as :meth:`step`.
    """

    def __init__(self, copies: Copies, volume: Volume, versions: Versions, source: Inode) -> None:
        self._copies = copies
        self._volume = volume
        self._versions = versions
        self._namespace = volume.namespace
        self.stepped = 0.0
        self.is_void = False
        """It cannot be made what its source is any more."""
        self.went_on = False
        """It was finished before: what makes it void has not disturbed the making of this one."""
        self._since = volume.last_lsn
        """What is published from here on comes last."""
        self.top = self._begin(source)
        self._made: dict[int, Inode] = {source.ino: self.top}
        """Of each inode that was copied: its copy."""
        self._made_before = 0
        self._directories: list[tuple[Inode, Iterator[bytes]]] = [_names_of(source)]
        """Whose names are being looked at."""
        self._found: list[tuple[int, int, bytes]] = []
        """Files: the record that published them, where they are."""
        self._names: dict[tuple[int, bytes], None] = {}
        """Names of which a record has told since."""
        self._changed: dict[int, bool] = {}
        """Inodes, likewise: whether their content is another one."""
        self._large: LargeCopy | None = None
        self._batch: Batch | None = None
        """Of the step that is being made."""

    def _begin(self, source: Inode) -> Inode:
        place, ops = self._copies.aside.directory_or_new()
        top = self._copies.inode_like(source)
        name = self._copies.aside.free_name(place, source.name, b"before-%d" % source.ino)
        value = b"%d" % source.ino
        ops += self._copies.operations_like(top, source, place.ino, name)
        ops.append(XattrSetOperation(top.ino, BEFORE_XATTR, value))
        try:
            self._copies.commit(ops)
        except BaseException:
            for made in (top, place):
                if made.links == 0:
                    self._namespace.withdraw(made)
            raise
        self._namespace.set_xattr(top, BEFORE_XATTR, value)
        return top

    # --- hearing ------------------------------------------------------------------------------

    def heard(self, ops: Sequence[Operation]) -> None:
        """A record of ``ops`` was stored."""
        if self._batch is not None and ops is self._batch.flushed:
            return  # says of the copy alone what is known
        made = self._made
        for op in ops:
            if isinstance(op, _OF_INODES):
                if op.ino in made:
                    self._changed[op.ino] = self._changed.get(op.ino, False) or _publishes(op)
            elif isinstance(op, _OF_NAMES) and op.parent in made:
                self._names[op.parent, op.name] = None

    @property
    def is_unfinished(self) -> bool:
        waits = self._directories or self._found or self._names or self._changed or self._large
        return bool(waits) or self.is_void

    def forget_removed(self) -> None:
        """Copies of what is not in the source any more: now and then, when they are many."""
        if len(self._made) > 2 * self._made_before + FILES_AT_ONCE:
            self._made = {ino: made for ino, made in self._made.items() if made.links}
            self._made_before = len(self._made)

    # --- copying ------------------------------------------------------------------------------

    def step(self) -> bool:
        """Directories first; then files in the order of their commits, which so stays theirs; then
        what has changed meanwhile, likewise. See :meth:`Copyings.step`.
        """
        self._batch = batch = Batch(self._volume, self._versions)
        try:
            if self._large is not None:
                self._go_on(self._large)
            elif self._directories:
                self._look(batch)
            if not self._directories and self._large is None:
                self._copy_found(batch)
            batch.flush()
        except BaseException:
            batch.cancel()
            raise
        self._batch = None
        return self.is_unfinished

    def _look(self, batch: Batch) -> None:
        looked, made = 0, len(self._made)
        while self._directories and looked < NAMES_AT_ONCE:
            directory, names = self._directories[-1]
            name = next(names, None)
            if name is None:
                self._directories.pop()
                continue
            looked += 1
            child = self._committed_in(directory, name)
            if child is not None and child.commit_lsn > self._since:
                self._names[directory.ino, name] = None
            elif child is not None and child.live is not None:
                self._found.append((child.commit_lsn, directory.ino, name))
            elif child is not None:
                self._copy(child, directory.ino, name, batch)
                if len(self._made) - made >= FILES_AT_ONCE:
                    return
        if not self._directories:
            # From the end on they are copied: the oldest last in this list, names as they stand.
            self._found.reverse()
            self._found.sort(key=itemgetter(0), reverse=True)

    def _copy_found(self, batch: Batch) -> None:
        left, refs = FILES_AT_ONCE, 0
        while self._found and left and refs < REFS_AT_ONCE and self._large is None:
            lsn, parent, name = self._found.pop()
            child = self._committed(parent, name)
            if child is None or child.live is None or child.commit_lsn != lsn:
                self._names[parent, name] = None
                continue
            refs += self._copy(child, parent, name, batch)
            left -= 1
        if not self._found and self._large is None and (self._names or self._changed):
            batch.flush()
            self._follow_changes(batch, left, refs)

    def _committed(self, parent: int, name: bytes) -> Inode | None:
        """What a name means, if a record knows it."""
        directory = self._namespace.inodes.get(parent)
        return None if directory is None else self._committed_in(directory, name)

    def _committed_in(self, directory: Inode, name: bytes) -> Inode | None:
        ino = directory.entries.get(name) if directory.entries is not None else None
        child = self._namespace.inodes.get(ino) if ino is not None else None
        return None if child is None or child.uncommitted else child

    def _copy(self, source: Inode, parent: int, name: bytes, batch: Batch) -> int:
        """Returns how many references that took."""
        directory = self._made[parent]
        made = self._made.get(source.ino)
        if made is not None and made.links:
            batch.add([LinkOperation(directory.ino, made.ino, name)], None)
            return 0
        ref_count = 0
        if source.live is not None:
            content = source.live if source.committed is None else source.committed
            ref_count = content.ref_count
            plain = batch.add_plain(source, content, ref_count, directory.ino, name)
            if plain is not None:
                self._made[source.ino] = plain
                return ref_count
        made = self._copies.inode_like(source)
        if source.live is not None:
            self._copy_file(source, made, directory, name, batch)
        else:
            batch.add(self._copies.operations_like(made, source, directory.ino, name), made)
            if source.entries is not None:
                self._directories.append(_names_of(source))
        self._made[source.ino] = made
        return ref_count

    def _copy_file(
        self, source: Inode, made: Inode, directory: Inode, name: bytes, batch: Batch
    ) -> None:
        has_more = source.xattrs is not None or source.damaged
        ops = self._copies.xattrs_like(made, source) if has_more else []
        content = _committed_content(source)
        is_large = batch.is_large(content.ref_count)
        in_parts = content.ref_count > REFS_AT_ONCE
        if is_large:
            made.live = FileMap(self._volume.engine, owner=made.ino)
            if not in_parts:
                self._share(source, made.live)
        else:
            made.live = content.twin(made.ino) or self._twin(source, made.ino)
        self._namespace.add_uncommitted(made)
        self._namespace.link(directory.ino, name, made.ino)
        if is_large:
            self._versions.begin_new(made, name)
            if in_parts:
                batch.begin_large(made, (directory.ino, name))
                self._begin_large(source, made)
                return
            batch.add_large(made, (directory.ino, name), incomplete=_is_incomplete(source))
        else:
            made.flags = source.flags & layout.INODE_INCOMPLETE
            batch.add_twin(made, (directory.ino, name), ops)

    def _twin(self, source: Inode, owner: int) -> FileMap:
        """Of one that has an open extent."""
        self._close_leases(source)
        twin = _committed_content(source).twin(owner)
        if twin is None:
            raise InvariantError("only a content's own lease keeps its extents open")
        return twin

    def _close_leases(self, source: Inode) -> None:
        """The open extent ends here; whoever writes on gets another one."""
        self._versions.leases.close(source.content)
        self._versions.leases.close(_committed_content(source))
        if source.direct is not None:
            source.direct.close()

    def _share(self, source: Inode, target: FileMap) -> None:
        """Let ``target`` refer to all of the committed content."""
        size = _committed_content(source).size
        self._share_part(source, target, 0, size)
        target.truncate(size)

    # --- very many references -------------------------------------------------------------------

    def _begin_large(self, source: Inode, made: Inode) -> None:
        self._large = LargeCopy(self._versions, source, made, self._share_part)
        self._go_on(self._large)

    def _go_on(self, large: LargeCopy) -> None:
        """One part; its last record gives the copy the attributes of its source, too."""
        source, made = large.source, large.made
        if not source.links or not made.links or self._changed.get(source.ino):
            self._large = None  # what has its name, or its content now, comes behind the others
            return
        if large.step(_committed_content(source)):
            return
        self._large = None
        take_attributes(made, source)
        self._versions.publish(made, incomplete=_is_incomplete(source))

    def _share_part(self, source: Inode, target: FileMap, offset: int, length: int) -> None:
        """Let ``target`` refer to a range of the committed content, where that is."""
        if length and _committed_content(source).share(offset, length, target, offset) is None:
            self._close_leases(source)
            shared = _committed_content(source).share(offset, length, target, offset)
            invariant(shared == length, "only a content's own lease keeps its extents open")

    # --- what has changed meanwhile -------------------------------------------------------------

    def _follow_changes(self, batch: Batch, left: int, refs: int) -> None:
        """In the order of the commits; names that were taken away at last: what they meant may have
        another one.
        """
        names = [(self._committed(*place), place) for place in self._names]
        inodes = [(self._namespace.inodes.get(ino), ino) for ino in self._changed]
        waiting: list[tuple[Inode | None, tuple[int, bytes] | int]] = [*names, *inodes]
        waiting.sort(key=lambda item: item[0].commit_lsn if item[0] is not None else _LAST)
        for _, what in waiting[:left]:
            if isinstance(what, tuple):
                del self._names[what]
                self._correct(*what, batch)
            else:
                with_content = self._changed.pop(what)
                refs += self._refresh(what, batch, with_content=with_content)
            if self.is_void or self._large is not None or refs >= REFS_AT_ONCE:
                return

    def _correct(self, parent: int, name: bytes, batch: Batch) -> None:
        """Let a name in the copy mean what it means in the source."""
        source, directory = self._committed(parent, name), self._made[parent]
        known = self._namespace.find(directory.ino, name) if directory.links else None
        made = self._made.get(source.ino) if source is not None else None
        if known is not None and known is made:
            return
        if any(one is not None and one.entries is not None for one in (known, made)):
            self.is_void = True  # directories that were copied moved, or are gone
            return
        if known is not None:
            batch.flush()
            self._copies.commit([UnlinkOperation(directory.ino, name)])
        if source is not None and directory.links:
            self._copy(source, parent, name, batch)

    def _refresh(self, ino: int, batch: Batch, *, with_content: bool) -> int:
        """Let a copy be what its source is; returns how many references that took."""
        source, made = self._namespace.inodes.get(ino), self._made[ino]
        if source is None or not source.links or not made.links or made.uncommitted:
            return 0  # it is gone, or was copied in this step
        if not with_content:
            take_attributes(made, source)
            batch.add([made.operation(), *self._copies.xattrs_like(made, source)], None)
            return 0
        self._versions.begin_empty(made, atomic=True, now=time.monotonic())
        xattrs = self._copies.xattrs_like(made, source)
        count = _committed_content(source).ref_count
        if count > REFS_AT_ONCE:
            if xattrs:
                batch.add(xattrs, None)
                batch.flush()
            self._begin_large(source, made)
            return count
        self._share(source, made.content)
        take_attributes(made, source)
        batch.add_changed(made, xattrs, incomplete=_is_incomplete(source))
        return made.content.ref_count


def _names_of(directory: Inode) -> tuple[Inode, Iterator[bytes]]:
    return directory, iter(list(directory.entries or ()))


def _publishes(op: Operation) -> bool:
    is_content = isinstance(op, ContentOperation) and not op.aside
    return is_content or isinstance(op, PromoteOperation)


def _committed_content(source: Inode) -> FileMap:
    content = source.committed_content
    if content is None:
        raise InvariantError("a committed file has a committed content")
    return content


def _is_incomplete(source: Inode) -> bool:
    return bool(source.flags & layout.INODE_INCOMPLETE)
