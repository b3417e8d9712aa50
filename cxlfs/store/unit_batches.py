"""What a step of a copy has made: operations of many inodes in few records.

Never here: what is copied (``unit_copying``).

Invariants
- A record holds all that is said of a file, its name included: a crash finds it whole or not at
  all.
- What no record holds is forgotten by :meth:`Batch.cancel`, in DRAM, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cxlfs.errors import InvariantError
from cxlfs.format import layout
from cxlfs.format.operations import (
    LEAST_BYTES,
    ContentOperation,
    LinkOperation,
    Operation,
    encode,
)
from cxlfs.store.unit_copies import apply_names

if TYPE_CHECKING:
    from cxlfs.native.maps import FileMap
    from cxlfs.store.namespace import Inode
    from cxlfs.store.versions import Prepared, Versions
    from cxlfs.store.volume import Volume

_FILE_BYTES = sum(LEAST_BYTES[k] for k in (layout.OP_INODE, layout.OP_LINK, layout.OP_CONTENT)) + 24
"""Of a file's operations without name and references; 24: each is padded by 7 bytes at most."""


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
        self._new: list[tuple[Inode, tuple[int, bytes]]] = []

    def is_large(self, content: FileMap) -> bool:
        """A record of its own, or several, must say what it refers to."""
        return content.ref_count * layout.REF_DTYPE.itemsize > self._limit // 4

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
        if self.is_large(made.content):
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
        self._versions.fence_data()
        lsn, time_ns = self._volume.commit(ops, durable=False)
        prepared, self._prepared = self._prepared, []
        for one in prepared:
            one.done(lsn, time_ns)
        for twin in self._twins:
            self._volume.namespace.set_committed(twin)
            twin.commit_lsn, twin.commit_ns = lsn, time_ns
        others, self._others = self._others, []
        self._volume.note_committed(others)
        links: list[Operation] = [op for op in others if isinstance(op, LinkOperation)]
        apply_names(self._volume.namespace, links)
        self._made.clear()
        self._twins.clear()
        self._new = [item for item in self._new if item[0].uncommitted]

    def cancel(self) -> None:
        """Whatever was not committed is forgotten."""
        for prepared in self._prepared:
            prepared.cancel()
        namespace = self._volume.namespace
        for inode, place in self._new:
            if inode.uncommitted:
                namespace.unlink(*place)
                namespace.reap(inode.ino)
        for inode in self._made:
            if inode.links == 0:
                namespace.withdraw(inode)
