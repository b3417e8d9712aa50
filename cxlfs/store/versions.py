"""Versions of a file's content: begin one, publish it, stage it aside, or bring the old one back.

Never here: when to do which (``files``, ``names``, ``Store.maintain``), handles, names.

Invariants
- ``inode.version`` is None exactly while the live content is the committed one.
- Publishing is one record, after everything it names is durable; a content too large for one record
  is staged aside in several and then promoted by one.
- What was committed is never withdrawn: a revert makes the committed content the live one again.
- A version whose write failed is not published until the failed range was written with success.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cxlfs.errors import CxlfsError, InvariantError, MediaError, NoSpaceError, invariant
from cxlfs.format import layout
from cxlfs.format.operations import (
    ContentOperation,
    ExtentOperation,
    LinkOperation,
    Operation,
    PromoteOperation,
    XattrSetOperation,
)
from cxlfs.native.extent_calls import EXTENT_INFO
from cxlfs.native.extents import Counting
from cxlfs.native.maps import Delta, FileMap
from cxlfs.store import commit_numbers
from cxlfs.store.clones import Clones, count_committed
from cxlfs.store.commit_numbers import COMMIT_XATTR
from cxlfs.store.held import drop_operations, hold_operations, undecided_operation
from cxlfs.store.leases import Leases
from cxlfs.store.overwrite_hooks import NoOverwrites, OverwriteHooks
from cxlfs.store.past import Past
from cxlfs.store.promises import Promises
from cxlfs.store.shared_maps import SharedMaps
from cxlfs.store.sharing import Sharing
from cxlfs.store.unit_hooks import NoUnits, UnitHooks
from cxlfs.store.version import Version

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from cxlfs.store.held import Held
    from cxlfs.store.namespace import Inode
    from cxlfs.store.unit_hooks import KeptContent
    from cxlfs.store.volume import Volume

_OPERATION_BYTES = layout.OPERATION_DTYPE.itemsize + layout.OP_EXTENT_DTYPE.itemsize + 8
_RECORD_REST_BYTES = 1024
"""Of a record: header, attributes of file and directory, a name of full length, padding."""


class Prepared:
    """A publication whose operations wait for their record: then ``done``, else ``cancel``."""

    __slots__ = (
        "_delta",
        "_flags",
        "_held",
        "_inode",
        "_keeps",
        "_kept",
        "_moves",
        "_versions",
        "number",
        "operations",
    )

    def __init__(
        self,
        versions: Versions,
        inode: Inode,
        delta: Delta,
        ops: list[Operation],
        flags: int,
        held: Held | None,
        *,
        kept: KeptContent | None,
        keeps: bool,
        number: int,
        moves: bool,
    ) -> None:
        self.operations = ops
        self.number = number
        """Of the operation in the record that ends the content before."""
        self._kept = kept
        self._versions = versions
        self._inode = inode
        self._delta = delta
        self._flags = flags
        self._held = held
        self._keeps = keeps
        self._moves = moves

    def cancel(self) -> None:
        self._delta.cancel(self._inode.content)
        if self._kept is not None:
            self._kept.cancel()

    def done(self, lsn: int, time_ns: int) -> None:
        """The record is stored: live and committed are the same again."""
        inode = self._inode
        live = inode.content
        version = inode.version
        if not isinstance(version, Version):
            raise InvariantError("what is published has a version")
        key, before = (lsn, self.number), inode.committed
        is_overwrite = version.atomic and not version.in_place
        whole = is_overwrite or version.staged or before is None
        if self._held is not None:
            self._held.ended_lsn = lsn
            self._delta.apply(live, None)
            inode.committed = None
        elif whole or self._versions.past.wants(inode, self._delta):
            self._delta.apply(live, None)
            self._versions.past.replaced(inode, key, time_ns, whole=whole)
        else:
            self._delta.apply(live, before)
        if inode.aside is not None and not self._keeps:
            self._versions.end_aside(inode, (lsn, self.number + 1), time_ns)
        if self._held is not None:
            inode.aside = before
        self._note_what_ended(inode, version)
        self._versions.volume.namespace.set_committed(inode)
        inode.flags = self._flags
        self._versions.shared_maps.published(inode)
        overwrites = self._versions.overwrites
        if self._held is not None:
            overwrites.published(inode, self._held)
        elif inode.held is not None or inode.xattrs is not None:
            overwrites.written(inode)
        inode.commit_lsn, inode.commit_ns = lsn, time_ns
        self._versions.end(inode)
        units = self._versions.units
        if units.active:
            incomplete = bool(self._flags & layout.INODE_INCOMPLETE)
            units.published(inode, incomplete=incomplete, moves=self._moves, whole=version.whole)

    def _note_what_ended(self, inode: Inode, version: Version) -> None:
        """With the content before; what a checkpoint unit keeps of it is there."""
        if self._kept is not None:
            self._kept.done()
        if version.whole and inode.damaged:
            self._versions.volume.health.replaced(inode)
        if inode.xattrs is not None:
            self._versions.volume.namespace.remove_xattr(inode, COMMIT_XATTR)


class Versions:
    """The verbs over versions; one for each volume. ``asides``: inodes with content kept aside."""

    def __init__(self, volume: Volume, *, history: bool = True) -> None:
        self.volume = volume
        self.units: UnitHooks = NoUnits()
        self.overwrites: OverwriteHooks = NoOverwrites()
        self.asides: dict[int, Inode] = {
            ino: inode for ino, inode in volume.namespace.inodes.items() if inode.aside is not None
        }
        self.open_versions: dict[int, Inode] = {}
        self.promises = Promises(volume.engine, lease_bytes_max=volume.space.lease_bytes_max)
        self.leases = Leases(volume, self.promises)
        self.sharing = Sharing(self.leases)
        self.clones = Clones(self.close_map)
        self.past = Past(volume, self.leases, is_on=history)
        self.shared_maps = SharedMaps()
        self._new_names: dict[int, bytes] = {}
        """Of uncommitted inodes: each has the one name that it was created with."""
        volume.namespace.on_drop = self._forget
        for inode in self.asides.values():
            if inode.aside is not None:
                inode.aside.count_as(Counting.ASIDE)

    def _forget(self, inode: Inode) -> None:
        self._new_names.pop(inode.ino, None)
        self.clones.forget(inode)
        self.asides.pop(inode.ino, None)
        self.overwrites.forget(inode)
        if self.shared_maps.is_used:
            self.shared_maps.forget(inode)
        self.open_versions.pop(inode.ino, None)
        self.promises.drop(inode)
        if inode.live is not None:
            self.leases.close(inode.live)
            self.past.dropping(inode)
        self.volume.health.forget(inode)

    # --- beginning --------------------------------------------------------------------------

    def prepare_change(self, ino: int, *, emptied: bool = False) -> bool:
        """Before a change of content, so that others have their turn: one step of what it needs;
        True: the next one comes first. Who does not call it may wait long in the change itself.
        ``emptied``: nothing of the old content is in the new one. Raises as ``units.changing``.
        """
        inode = self.volume.namespace.get(ino)
        if inode.live is None or self.volume.read_only:
            return False
        begins = emptied or inode.version is None
        if begins and self.units.active and self.units.changing_content(inode, in_steps=True):
            return True
        return not emptied and self.clones.prepare(inode)

    def begin(self, inode: Inode, *, atomic: bool, now: float) -> Version:
        """Before live content changes in place: keep the committed one apart."""
        version = inode.version
        if isinstance(version, Version):
            if version.atomic and not atomic:
                version.atomic = False
                count_committed(inode, comes_back=False)
            return version
        if self.units.active:
            self.units.changing_content(inode)
        atomic = atomic and not inode.uncommitted
        self.clones.make(inode, comes_back=atomic)
        return self._new(inode, atomic=atomic, now=now)

    def begin_empty(self, inode: Inode, *, atomic: bool, now: float) -> Version:
        """The live content becomes empty; a committed one stays behind until publication."""
        inode.stop_writes()
        if self.units.active:
            self.units.changing_content(inode)
        version = inode.version
        old_live = inode.content
        self.promises.drop(inode)
        self.shared_maps.forget(inode)
        if inode.uncommitted:
            old_live.truncate(0)
            if isinstance(version, Version):
                version.cut(0)
                version.killed = False
                version.whole = True
                return version
            return self._new(inode, atomic=False, now=now, whole=True)
        empty = FileMap(self.volume.engine, owner=inode.ino)  # may fail: before anything changes
        self.leases.close(old_live)
        if isinstance(version, Version) or inode.committed is not None:
            old_live.close()
        else:
            inode.committed = old_live
        inode.replace_live(empty)
        self.clones.forget(inode)
        if isinstance(version, Version):
            version.failed.clear()
            version.atomic = atomic
            version.killed = False
            version.whole = True
            count_committed(inode, comes_back=atomic)
            return version
        return self._new(inode, atomic=atomic, now=now, whole=True)

    def begin_new(self, inode: Inode, name: bytes) -> None:
        """A file was created: name and inode are not committed before its content is."""
        self._new_names[inode.ino] = name
        self._new(inode, atomic=False, now=time.monotonic())

    def _new(self, inode: Inode, *, atomic: bool, now: float, whole: bool = False) -> Version:
        version = Version(atomic, now, whole=whole)
        inode.version = version
        self.open_versions.pop(inode.ino, None)
        self.open_versions[inode.ino] = inode
        count_committed(inode, comes_back=atomic)
        return version

    def count_replaced(self) -> bool:
        """What versions will replace counts so of large contents, too (see ``clones``); True: that
        is less than was kept before.
        """
        before = self.volume.engine.statistics().kept_bytes
        for inode in self.open_versions.values():
            version = inode.version
            if inode.committed is not None and isinstance(version, Version) and not version.atomic:
                inode.committed.count_as(Counting.REPLACED)
        return self.volume.engine.statistics().kept_bytes < before

    def close_map(self, content: FileMap | None) -> None:
        if content is not None:
            self.leases.close(content)
            content.close()

    # --- publishing -------------------------------------------------------------------------

    def prepare(
        self, inode: Inode, *, incomplete: bool, with_name: bool = True, holds: bool = True
    ) -> Prepared | None:
        """The operations that publish the live content; None when it is committed as it is.

        ``with_name`` False: the caller gives it another name in the same record.
        ``holds`` False: the version before is wanted no more (``overwrites``). Stages a content
        that one record cannot hold. Raises NoSpaceError, MediaError, ReadOnlyError.
        """
        inode.stop_writes()
        flags = inode.flags & ~layout.INODE_INCOMPLETE
        if incomplete:
            flags |= layout.INODE_INCOMPLETE
        version = inode.version
        if version is None and not inode.uncommitted and flags == inode.flags:
            return None
        self.volume.require_writable()
        if with_name and not incomplete:
            self.units.publishing(inode, inode.parent, inode.name)
        if not isinstance(version, Version):
            version = self._new(inode, atomic=False, now=0.0)
        kept = self.units.keeping(inode) if self.units.active else None
        delta = self._take_delta(inode.content)
        if not self._fits(delta):
            delta.cancel(inode.content)
            if inode.uncommitted:
                self._commit_name(inode)
            self.stage(inode)
            delta = self._take_delta(inode.content)
        ops: list[Operation] = [] if kept is None else list(kept.operations)
        ops.append(inode.operation(flags=flags, mtime_ns=inode.mtime_ns, ctime_ns=inode.ctime_ns))
        if inode.uncommitted:
            ops.extend(xattr_operations(inode))
            if with_name:
                ops.extend(self._name_operations(inode))
        ops.extend(extent_operations(delta.definitions, delta.sums))
        held = self.overwrites.to_hold(inode, version) if holds and not incomplete else None
        keeps = holds and held is None and not version.staged  # its place is taken
        keeps = keeps and (incomplete or self.overwrites.keeps(inode, version))
        number = len(ops) + version.staged  # of the operation that ends the content before
        content = ContentOperation(
            inode.ino, version.staged, delta.cut, delta.size, delta.references
        )
        ops.extend(_content_operations(inode, content, held, keeps=keeps))
        ops.extend(self.volume.health.removal(inode, whole=version.whole))
        ops.extend(commit_numbers.removal(inode))
        return Prepared(
            self,
            inode,
            delta,
            ops,
            flags,
            held,
            kept=kept,
            keeps=keeps,
            number=number,
            moves=not with_name,
        )

    def replace_content(
        self, inode: Inode, source: FileMap, *, incomplete: bool, times: tuple[int, int]
    ) -> Prepared:
        """What makes the references of ``source`` the content of a file. Nothing of the content
        before is kept. ``times``: mtime and ctime. Raises as :meth:`prepare`.
        """
        fresh = FileMap(self.volume.engine, owner=inode.ino)
        self.sharing.whole(source, fresh)
        self.begin_empty(inode, atomic=True, now=time.monotonic())
        empty = inode.content
        inode.replace_live(fresh)
        self.close_map(empty)
        inode.mtime_ns, inode.ctime_ns = times
        prepared = self.prepare(inode, incomplete=incomplete, holds=False)
        if prepared is None:
            raise InvariantError("a new content is to be published")
        return prepared

    @contextlib.contextmanager
    def outside_units(self) -> Iterator[None]:
        """What is changed meanwhile begins no checkpoint unit and belongs to none."""
        units, self.units = self.units, NoUnits()
        try:
            yield
        finally:
            self.units = units

    def _take_delta(self, content: FileMap) -> Delta:
        try:
            return content.take_delta()
        except MediaError as error:
            self.volume.watch(error)
            raise

    def publish(self, inode: Inode, *, incomplete: bool) -> None:
        """Make the live content the committed one. Durable when it returns."""
        prepared = self.prepare(inode, incomplete=incomplete)
        if prepared is None:
            self.volume.fence()
            return
        self.commit(prepared, prepared.operations)

    def is_incomplete(self, inode: Inode) -> bool:
        """True if the content is incomplete unless its writer says otherwise."""
        if inode.uncommitted or inode.flags & layout.INODE_INCOMPLETE:
            return True
        return self.shared_maps.is_unfinished(inode.ino)

    def publish_left(self, inode: Inode, *, spoiled: bool) -> None:
        """What the last writer left; ``spoiled``: it was killed, or a write has failed."""
        try:
            self.publish(inode, incomplete=spoiled and self.is_incomplete(inode))
        finally:  # behind the publication, which is none that makes a spoiled file good
            if spoiled:
                self.units.spoil(inode)

    def commit(self, prepared: Prepared, ops: list[Operation]) -> tuple[int, int]:
        """One record: ``ops`` begin with those of the publication. Durable when it returns: its LSN
        and time.
        """
        try:
            self.fence_data()
            lsn, time_ns = self.volume.commit(ops)
        except BaseException:
            prepared.cancel()
            raise
        with self.volume.applying:
            prepared.done(lsn, time_ns)
            self.volume.note_committed(ops)
        return lsn, time_ns

    def fence_data(self) -> None:
        """Page media: file data reaches the media before the record that names it."""
        volume = self.volume
        if volume.journal is not None and not volume.journal.must_fence_each:
            with volume.writing:
                volume.media.fence()

    def end(self, inode: Inode) -> None:
        """Live and committed content are the same."""
        inode.version = None
        self.open_versions.pop(inode.ino, None)
        self._new_names.pop(inode.ino, None)

    def _name_operations(self, inode: Inode) -> list[Operation]:
        directory = self.volume.namespace.get(inode.parent)
        name = self._new_names[inode.ino]
        named = self.volume.namespace.find(directory.ino, name)
        invariant(named is inode, "an uncommitted inode has the name that it was created with")
        return [LinkOperation(directory.ino, inode.ino, name), directory.operation()]

    def _commit_name(self, inode: Inode) -> None:
        """Before a new file's content is staged: its name, empty and marked incomplete."""
        flags = inode.flags | layout.INODE_INCOMPLETE
        attributes = inode.operation(flags=flags, mtime_ns=inode.mtime_ns, ctime_ns=inode.ctime_ns)
        ops = [attributes, *xattr_operations(inode), *self._name_operations(inode)]
        self.volume.commit(ops)
        self.volume.note_committed(ops)
        inode.flags = flags
        self.volume.namespace.set_committed(inode)
        inode.committed = FileMap(self.volume.engine, owner=inode.ino)

    def _fits(self, delta: Delta) -> bool:
        size = len(delta.references) + len(delta.sums)
        size += len(delta.definitions) // EXTENT_INFO.size * _OPERATION_BYTES
        return size + _RECORD_REST_BYTES <= self.volume.record_bytes_max

    # --- staging ----------------------------------------------------------------------------

    def stage_part(self, inode: Inode) -> None:
        """Of a content that is not published before all of it is there, what came since the last
        part. As publish raises.
        """
        if inode.uncommitted:
            self._commit_name(inode)
        self.stage(inode)

    def stage(self, inode: Inode) -> None:
        """Make the live content durable aside, in as many records as needed. As publish raises."""
        version = inode.version
        if not isinstance(version, Version):
            return
        self.volume.require_writable()
        inode.stop_writes()
        if inode.held is not None:
            self.drop_aside(inode)
        live = inode.content
        delta = self._take_delta(live)
        try:
            self.fence_data()
            if version.staged:
                self._stage_refs(inode, delta, delta.refs, cut=delta.cut)
            else:
                self._stage_refs(inode, delta, live.export(0, live.size), cut=0)
        except BaseException:
            delta.cancel(live)
            raise
        version.staged = True
        delta.apply(live, None)

    def _stage_refs(
        self, inode: Inode, delta: Delta, refs: npt.NDArray[np.void], *, cut: int
    ) -> None:
        """Cut the content kept aside, then add ``refs``: each record defines what it names."""
        aside = inode.aside
        if aside is None:
            aside = FileMap(self.volume.engine, owner=inode.ino)
            aside.count_as(Counting.ASIDE)
        for piece, rows in self._pieces(delta, refs):
            definitions = list(extent_operations(delta.extents[rows].tobytes(), delta.sums))
            refs_bytes = piece.tobytes()
            content = ContentOperation(
                inode.ino, aside=True, cut=cut, size=delta.size, refs=refs_bytes
            )
            self.volume.commit([*definitions, content])
            inode.aside = aside
            self.asides[inode.ino] = inode
            for definition in definitions:
                self.volume.engine.publish(definition.id)
            aside.replay(cut, refs_bytes, delta.size)
            cut = delta.size

    def _pieces(
        self, delta: Delta, refs: npt.NDArray[np.void]
    ) -> Iterator[tuple[npt.NDArray[np.void], list[int]]]:
        """``refs`` in runs that fit a record, with the rows of delta.extents each needs first."""
        rows = {extent_id: row for row, extent_id in enumerate(delta.extents["id"].tolist())}
        sizes = (delta.extents["crc_count"] * 4 + _OPERATION_BYTES).tolist()
        limit = self.volume.record_bytes_max - _RECORD_REST_BYTES
        begin, used, wanted = 0, 0, list[int]()
        for index, extent_id in enumerate(refs["extent_id"].tolist()):
            row = rows.pop(extent_id, None)
            size = layout.REF_DTYPE.itemsize + (sizes[row] if row is not None else 0)
            if used + size > limit and index > begin:
                yield refs[begin:index], wanted
                begin, used, wanted = index, 0, []
            used += size
            if row is not None:
                wanted.append(row)
        yield refs[begin:], wanted

    # --- taking back ------------------------------------------------------------------------

    def revert(self, inode: Inode, reason: str) -> None:
        """The committed content is live again; what was written is kept aside, incomplete."""
        inode.stop_writes()
        self.units.spoil(inode, reverted=True)
        version = inode.version
        invariant(isinstance(version, Version) and not inode.uncommitted, "nothing to go back to")
        if inode.content.allocated and not self.volume.read_only and inode.held is None:
            try:
                self.stage(inode)
            except CxlfsError as error:
                log.info("what was written is not kept aside: %s", error.message)
                if inode.aside is not None:
                    self.drop_aside(inode)
        if inode.committed is None:
            raise InvariantError("an overwrite keeps the committed content")
        self.promises.drop(inode)
        given_up = inode.content
        inode.committed.count_as(Counting.KEPT)
        inode.replace_live(inode.committed)
        inode.committed = None
        self.close_map(given_up)
        inode.mtime_ns, inode.ctime_ns = inode.committed_mtime_ns, inode.committed_ctime_ns
        self.end(inode)
        self.shared_maps.published(inode)
        self.volume.counters.reverts += 1
        self.volume.event("reverted", f"the previous version is back: {reason}", ino=inode.ino)

    def drop_aside(self, inode: Inode) -> None:
        """Give up what is kept aside: its space is needed. One record."""
        if inode.aside is not None and inode.links:
            operations = drop_operations(inode.ino, inode.held)
            lsn, time_ns = self.volume.commit(operations, durable=False)
            self.end_aside(inode, (lsn, 0), time_ns)
        else:
            self.drop_aside_map(inode)

    def end_aside(self, inode: Inode, key: tuple[int, int], time_ns: int) -> None:
        """A record has dropped what is kept aside: of a version before history has a row now."""
        content, held = inode.aside, inode.held
        if content is not None and held is not None:
            inode.aside = None
            self.past.outlived(inode, content, held, key, time_ns)
        self.drop_aside_map(inode)

    def drop_aside_map(self, inode: Inode) -> None:
        self.close_map(inode.aside)
        inode.aside = None
        self.asides.pop(inode.ino, None)
        self.overwrites.forget(inode)
        if isinstance(inode.version, Version):
            inode.version.staged = False

    def drop_oldest_aside(self) -> bool:
        """Give up one version kept aside that nobody goes on with; False when there is none."""
        for inode in list(self.asides.values()):
            if not _is_staged(inode) and inode.held is None:
                self.drop_aside(inode)
                return True
        return False

    def finish(self, inode: Inode) -> None:
        """No writer is left: give back the lease, and the second map (but see ``clones``)."""
        if inode.live is None:
            return
        self.leases.close(inode.live)
        if inode.version is None:
            self.clones.keep(inode)

    def error_of(self, inode: Inode) -> CxlfsError | None:
        """Why the live content must not be published, if so."""
        version = inode.version
        lost = self.shared_maps.lost_of(inode.ino)
        cause = lost.error if lost is not None else None
        if isinstance(version, Version) and version.failed:
            cause = version.failed[0].error
        return NoSpaceError(cause.message) if isinstance(cause, NoSpaceError) else cause


def _content_operations(
    inode: Inode, content: ContentOperation, held: Held | None, *, keeps: bool
) -> Iterator[Operation]:
    """What the content is, and what becomes of the one kept aside; ``held``, if it is to be: in the
    place of the staged content, once that is the committed one.
    """
    holding: list[Operation] = []
    if held is not None and inode.committed is not None:
        holding = hold_operations(inode.ino, inode.committed, held)
    if content.aside:
        yield from (content, PromoteOperation(inode.ino), *holding)
        return
    yield from (*holding, content)
    if holding:
        return
    if keeps and inode.held is not None and inode.held.is_decided:
        yield undecided_operation(inode.ino, inode.held)
    elif inode.aside is not None and not keeps:
        yield from drop_operations(inode.ino, inode.held)


def _is_staged(inode: Inode) -> bool:
    """What is kept aside belongs to the version that is being written."""
    return isinstance(inode.version, Version) and inode.version.staged


def xattr_operations(inode: Inode) -> list[Operation]:
    return [XattrSetOperation(inode.ino, n, v) for n, v in (inode.xattrs or {}).items()]


def extent_operations(definitions: bytes, sums: bytes) -> Iterator[ExtentOperation]:
    """One for each row of EXTENT_INFO; ``sums``: the checksums that its ``crc_index`` counts."""
    for extent_id, offset, length, index, first, count in EXTENT_INFO.iter_unpack(definitions):
        crcs = sums[4 * index : 4 * (index + count)]
        yield ExtentOperation(extent_id, offset, length, first, crcs)
