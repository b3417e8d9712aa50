"""What a step of a copy has made: operations of many inodes in few records.

Never here: what is copied (``unit_copying``).

Invariants
- A record holds all that is said of a file, its name included: a crash finds it whole or not at
  all.
- What no record holds is forgotten by :meth:`Batch.cancel`, in DRAM, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import InvariantError, invariant
from cxlfs.format import layout
from cxlfs.format.operations import (
    LEAST_BYTES,
    ContentOperation,
    InodeOperation,
    LinkOperation,
    Operation,
    encode,
)
from cxlfs.store.namespace import FileKind, Inode, Namespace, entries_of
from cxlfs.store.unit_aside import apply_names

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume

_REF_BYTES = layout.REF_DTYPE.itemsize
_FILE_BYTES = sum(LEAST_BYTES[k] for k in (layout.OP_INODE, layout.OP_LINK, layout.OP_CONTENT)) + 24
"""Of a file's operations without name and references; 24: each is padded by 7 bytes at most."""


_new = tuple.__new__
"""A named tuple, in a third of the time that calling its class takes."""


class Batch:
    """Operations of several files that go into one record while they fit."""

    def __init__(self, volume: Volume, versions: Versions) -> None:
        self._volume = volume
        self._versions = versions
        self._limit = volume.record_bytes_max - 1024
        self._ops: list[Operation] = []
        self._bytes = 0
        self._others: list[Operation] = []
        """Those that DRAM does not know yet, which are few: not of twins."""
        self._prepared: list[Prepared] = []
        self._made: list[Inode] = []
        self._twins: list[Inode] = []
        self._plain: list[Inode] = []
        """Twins that DRAM does not know before the record is about to be stored."""
        self._added: list[Inode] = []
        """The same, while it is."""
        self._new: list[tuple[Inode, tuple[int, bytes]]] = []
        self.flushed: list[Operation] = []
        """Those of the last record."""

    def is_large(self, ref_count: int) -> bool:
        """A record of its own, or several, must say what a content of so many references is."""
        return ref_count * _REF_BYTES > self._limit // 4

    def _make_room(self, size: int) -> None:
        if self._bytes + size > self._limit:
            self.flush()
        self._bytes += size

    def add(self, ops: list[Operation], made: Inode | None) -> None:
        """Operations of a directory and the like (``made``: a new one), or of a prepared file."""
        self._make_room(len(encode(ops)))
        if made is not None:
            self._made.append(made)
        self._ops += ops
        self._others += ops

    def add_twin(self, made: Inode, place: tuple[int, bytes], ops: list[Operation]) -> None:
        """A file that nobody knows yet, at ``place`` in DRAM; its content is a twin of one that the
        journal knows. ``ops``: what there is to say of it besides.
        """
        self._new.append((made, place))
        parent, name = place
        content = made.content
        refs = content.references()
        more = len(encode(ops)) if ops else 0
        self._make_room(_FILE_BYTES + len(name) + len(refs) + more)
        self._ops += [
            made.operation(),
            *ops,
            ContentOperation(made.ino, False, 0, content.size, refs),  # noqa: FBT003  its ``aside``
            LinkOperation(parent, made.ino, name),
        ]
        self._twins.append(made)

    def add_plain(
        self, source: Inode, content: FileMap, ref_count: int, directory: int, name: bytes
    ) -> Inode | None:
        """As :meth:`add_twin`, of a file with one name and nothing but a content (the committed
        one, and its references), as most are: half of the calls. It has no link before the next
        :meth:`flush`. None: the source is not so plain, and nothing was done.
        """
        if source.links != 1 or source.xattrs is not None or source.damaged:
            return None
        if self.is_large(ref_count):
            return None
        # First: an image that it begins must not meet a number that was given and is not known.
        self._make_room(_FILE_BYTES + len(name) + ref_count * _REF_BYTES)
        ino = self._volume.namespace.allocate_ino()
        twin = content.twin(ino)
        if twin is None:
            return None
        clean = source.version is None
        attributes = (
            *(ino, source.mode, source.uid, source.gid, source.rdev),
            source.flags & layout.INODE_INCOMPLETE,
            source.atime_ns,
            source.mtime_ns if clean else source.committed_mtime_ns,
            source.ctime_ns if clean else source.committed_ctime_ns,
            source.birth_ns,
        )
        self._ops += (
            _new(InodeOperation, attributes),
            _new(ContentOperation, (ino, False, 0, content.size, content.references())),
            _new(LinkOperation, (directory, ino, name)),
        )
        made = Inode(*attributes, parent=directory, name=name, live=twin)
        self._plain.append(made)
        return made

    def add_large(self, made: Inode, place: tuple[int, bytes], *, incomplete: bool) -> None:
        """A file that nobody knows yet, at ``place`` in DRAM, with a version."""
        self.begin_large(made, place)
        self._versions.publish(made, incomplete=incomplete)

    def begin_large(self, made: Inode, place: tuple[int, bytes]) -> None:
        """The same, whose content comes later: records of its own may follow."""
        self._new.append((made, place))
        self.flush()

    def add_changed(self, made: Inode, ops: list[Operation], *, incomplete: bool) -> None:
        """A file with another content and ``ops``."""
        if self.is_large(made.content.ref_count):
            self.add(ops, None)
            self.flush()
            self._versions.publish(made, incomplete=incomplete)
        else:
            prepared = self._versions.prepare(made, incomplete=incomplete, with_name=False)
            if prepared is None:
                raise InvariantError("another content is something to publish")
            self.add([*prepared.operations, *ops], None)
            self._prepared.append(prepared)

    def flush(self) -> None:
        """One record. Raises as :meth:`Volume.commit`."""
        ops, self._ops, self._bytes = self._ops, [], 0
        if not ops:
            return
        namespace = self._volume.namespace
        _add_files(namespace, self._plain)
        self._added, self._plain = self._plain, []
        self._versions.fence_data()
        self.flushed = ops
        lsn, time_ns = self._volume.commit(ops, durable=False)
        prepared, self._prepared = self._prepared, []
        for one in prepared:
            one.done(lsn, time_ns)
        twins, self._twins, self._added = [*self._twins, *self._added], [], []
        for twin in twins:
            twin.uncommitted = False
            twin.commit_lsn = lsn
            twin.commit_ns = time_ns
        namespace.uncommitted.difference_update([twin.ino for twin in twins])
        others, self._others = self._others, []
        self._volume.note_committed(others)
        links: list[Operation] = [op for op in others if isinstance(op, LinkOperation)]
        apply_names(namespace, links)
        self._made.clear()
        self._new = [item for item in self._new if item[0].uncommitted]

    def cancel(self) -> None:
        """Whatever was not committed is forgotten."""
        for prepared in self._prepared:
            prepared.cancel()
        for made in self._plain:
            made.content.close()
        namespace = self._volume.namespace
        added = [(inode, (inode.parent, inode.name)) for inode in self._added]
        for inode, place in [*self._new, *added]:
            if inode.uncommitted:
                namespace.unlink(*place)
                namespace.reap(inode.ino)
        for inode in self._made:
            if inode.links == 0:
                namespace.withdraw(inode)


def _add_files(namespace: Namespace, made: list[Inode]) -> None:
    """What ``Namespace.add_uncommitted`` and ``link`` do for each of many new files that know where
    they are, in the order of their numbers.
    """
    for inode in made:
        directory = namespace.inodes[inode.parent]
        entries = entries_of(directory)
        invariant(inode.name not in entries, "a copy has each name once")
        if namespace.on_name is not None:
            namespace.on_name(directory.ino, inode.name)
        if directory.listing is not None:
            directory.listing.add(inode.name)
        entries[inode.name] = inode.ino
        inode.links = 1
        inode.uncommitted = True
        namespace.inodes[inode.ino] = inode
        namespace.name_bytes += len(inode.name)
    namespace.uncommitted.update([inode.ino for inode in made])
    namespace.kind_counts[FileKind.FILE] += len(made)
    namespace.string_items += len(made)
