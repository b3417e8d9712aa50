"""The content of one file, and its deltas: the Python face of ``cxl_map`` and ``cxl_delta``.

Never: handles a byte of file data; keeps state beside the C handles.

Invariants
- The hot calls (write, read, peek) check that the engine lives and pass addresses on, no more.
- A map keeps its engine alive; what was closed raises and touches no memory.
- No error leaves a frame that holds a buffer of a caller's memoryview (the object that from_buffer
  returns): CPython 3.11 crashes when its garbage collector finds both in one traceback's cycle.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cxlfs._native import ffi, lib
from cxlfs.errors import (
    BeyondDataError,
    CorruptionError,
    InvalidArgumentError,
    InvariantError,
    MediaError,
    invariant,
)
from cxlfs.native.direct import Absorbed, DirectRoom, HeldContent, absorb
from cxlfs.native.extent_calls import (
    CRC_DTYPE,
    EXTENT_INFO_DTYPE,
    NOT_DURABLE,
    REF_DTYPE,
    Engine,
    Rows,
    bad_input,
    copy_bytes,
    data_failure,
    failure,
    scratch,
    take_array,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import ReadableBuffer, WriteableBuffer

_EAGAIN = -errno.EAGAIN
_ALL = (1 << 64) - 1
_from_buffer = ffi.from_buffer
_write, _read, _peek = lib.cxl_map_write, lib.cxl_map_read, lib.cxl_map_peek


def _closed() -> InvariantError:
    return InvariantError("the content, or its engine, is closed")


class FileMap:
    """One content of one file: sorted references into extents, and a size in bytes.

    New: empty, and new to the journal (its first delta is all of it). It ends with :meth:`close`.
    """

    __slots__ = ("__weakref__", "_map", "engine", "owner")

    def __init__(self, engine: Engine, *, owner: int, handle: Any = None) -> None:
        """Takes over ``handle`` (a ``cxl_map *`` of this engine), if there is one."""
        self._map = handle
        self.engine = engine
        self.owner = owner
        if handle is None:
            out = scratch.map
            code = lib.cxl_map_new(engine.handle, owner, out)
            if code != 0:
                raise failure(code, "make a map")
            self._map = out[0]

    @classmethod
    def at(cls, engine: Engine, owner: int, address: int) -> FileMap:
        """Take over what ``Engine.import_contents`` made; once for each address."""
        return cls(engine, owner=owner, handle=ffi.cast("cxl_map *", address))

    @staticmethod
    def handles(contents: list[FileMap]) -> list[Any]:
        """The handle of each, as cheap as 100 000 of them must be."""
        found = [content._map for content in contents]  # noqa: SLF001 - of its own kind
        if contents and (contents[0].engine.closed or None in found):
            raise _closed()
        return found

    @property
    def closed(self) -> bool:
        return self._map is None or self.engine.closed

    @property
    def handle(self) -> Any:
        """The ``cxl_map *``."""
        handle = self._map
        if handle is None or self.engine.closed:
            raise _closed()
        return handle

    @property
    def address(self) -> int:
        """Of :attr:`handle`, as :meth:`at` takes it."""
        return int(ffi.cast("uintptr_t", self.handle))

    def clone(self, counting: int = 0) -> FileMap:
        """The same content, clean and without a lease; it counts as ``extents.Counting`` says."""
        out = ffi.new("cxl_map **")
        code = lib.cxl_map_clone(self.handle, counting, out)
        if code != 0:
            raise failure(code, "clone a map")
        return FileMap(self.engine, owner=self.owner, handle=out[0])

    def begin_copy(self, counting: int = 0) -> FileMap:
        """An empty content to which :meth:`copy_part` brings this one, as :meth:`clone` would."""
        out = ffi.new("cxl_map **")
        code = lib.cxl_map_begin_copy(self.handle, counting, out)
        if code != 0:
            raise failure(code, "begin a copy of a map")
        return FileMap(self.engine, owner=self.owner, handle=out[0])

    def copy_part(self, copy: FileMap, count: int) -> bool:
        """Up to ``count`` references more; False: all are there. Meanwhile nothing but moves of
        both may change one of them. Raises OutOfMemoryError: as before.
        """
        code = lib.cxl_map_copy_part(self.handle, copy.handle, count)
        if code < 0:
            raise failure(code, "copy a part of a map")
        return bool(code)

    def promise(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Promise room to these ranges [start, end), sorted and apart, instead of those before."""
        rows = ffi.new("cxl_range[]", list(ranges) or 1)
        code = lib.cxl_map_promise(self.handle, rows, len(ranges))
        if code != 0:
            raise failure(code, "promise room")

    def promised(self, offset: int = 0, length: int = 0) -> tuple[int, bool]:
        """Bytes promised and not written yet, in blocks; and whether some lie in a range."""
        inside = scratch.bad
        count = lib.cxl_map_promised(self.handle, offset, length, inside)
        return int(count), bool(inside[0])

    def count_as(self, counting: int) -> None:
        """How what it refers to counts from now on (``extents.Counting``). One walk, where that is
        another way than before.
        """
        code = lib.cxl_map_count_as(self.handle, counting)
        if code != 0:
            raise failure(code, "count a map")

    def close(self) -> None:
        """Drop the content; a lease's unused room is lost until its segment dies. Idempotent."""
        handle, self._map = self._map, None
        if handle is not None and not self.engine.closed:
            lib.cxl_map_free(handle)

    def __del__(self) -> None:
        self.close()

    # ------------------------------------------------------------------------------- questions

    @property
    def size(self) -> int:
        return int(lib.cxl_map_size(self.handle))

    @property
    def ref_count(self) -> int:
        return int(lib.cxl_map_ref_count(self.handle))

    @property
    def allocated(self) -> int:
        """Bytes that are not holes."""
        return int(lib.cxl_map_allocated(self.handle))

    @property
    def size_and_occupied(self) -> tuple[int, int]:
        """The size, and bytes that are not holes or holes that room is promised to."""
        size = scratch.bad
        occupied = lib.cxl_map_occupied(self.handle, size)
        return size[0], occupied

    @property
    def is_dirty(self) -> bool:
        """It differs from what the last delta left."""
        return bool(lib.cxl_map_is_dirty(self.handle))

    def export(self, offset: int, length: int) -> Rows:
        """References that overlap a range, clipped to it, without holes (REF_DTYPE)."""
        out, count = ffi.new("cxl_ref **"), ffi.new("uint64_t *")
        code = lib.cxl_map_export(self.handle, offset, length, out, count)
        if code != 0:
            raise failure(code, "export references")
        return take_array(out[0], count[0], REF_DTYPE)

    def references(self) -> bytes:
        """All of them, as :meth:`export` gives them (the bytes of REF_DTYPE rows)."""
        out, count = scratch.refs, scratch.bad
        code = lib.cxl_map_export(self.handle, 0, _ALL, out, count)
        if code != 0:
            raise failure(code, "export references")
        try:
            return bytes(ffi.buffer(out[0], count[0] * REF_DTYPE.itemsize))
        finally:
            lib.cxl_free(out[0])

    def mapped(self, offset: int, length: int) -> tuple[int, int]:
        """Bytes of a range that are not holes, and in how many references they lie."""
        refs = scratch.bad
        count = lib.cxl_map_mapped(self.handle, offset, length, refs)
        return int(count), int(refs[0])

    def reach(self, offset: int, length: int, references_max: int) -> int:
        """How many of ``length`` bytes from ``offset`` on lie in so many references, and holes."""
        return int(lib.cxl_map_reach(self.handle, offset, length, references_max))

    def seek(self, offset: int, *, hole: bool) -> int:
        """The first byte at or behind ``offset`` with data, or in a hole (the end of file is one).

        Raises BeyondDataError when there is none.
        """
        found = lib.cxl_map_seek(self.handle, offset, hole)
        if found < 0:
            raise BeyondDataError("nothing more before the end of file")
        return int(found)

    # -------------------------------------------------------------------------------- file data

    def write(self, offset: int, data: ReadableBuffer, start: int = 0) -> tuple[int, int]:
        """Write ``data[start:]`` at ``offset`` as far as the lease has room: bytes taken, and when
        that is 0, how many a lease must have room for. LINE, BYTE: durable (not published) then.

        Raises CorruptionError and MediaError (the old bytes around a small overwrite are damaged,
        or the media failed; nothing changed), FileTooLargeError, OutOfMemoryError, ReadOnlyError.
        """
        if self.engine.closed:
            raise _closed()
        view = _from_buffer(data)
        length = len(view) - start
        invariant(start >= 0 and length >= 0, "start lies in the data")
        needed, fault = scratch.write
        taken = _write(self._map, offset, view + start, length, needed, fault)
        if taken >= 0:
            return taken, 0
        if taken == _EAGAIN:
            return 0, needed[0]
        del view
        raise data_failure(taken, "written", fault)

    def read(self, offset: int, length: int, *, verify: bool = True) -> memoryview:
        """Bytes of a range in memory of their own, short at the end of file.

        ``verify``: every chunk that is touched was checked as a whole. Raises CorruptionError and
        MediaError, with ``fault``: nothing is delivered then.
        """
        size = self.size
        length = max(min(length, size - offset), 0)
        buffer: Any = np.empty(length, dtype=np.uint8)
        count = self.read_into(offset, buffer, verify=verify)
        return memoryview(buffer if count == length else buffer[:count])

    def read_into(self, offset: int, target: WriteableBuffer, *, verify: bool = True) -> int:
        """As :meth:`read` into ``target``; returns the count. After an error it is undefined."""
        if self.engine.closed:
            raise _closed()
        buffer = _from_buffer(target, require_writable=True)
        fault = scratch.fault
        count = _read(self._map, offset, buffer, len(buffer), verify, fault)
        if count < 0:
            del buffer
            raise data_failure(count, "read", fault)
        return int(count)

    def peek(self, offset: int, length: int, *, verify: bool = True) -> memoryview | None:
        """The media itself, where a range (clipped at the end of file) lies in one piece.

        Valid until the content changes, at most; else None. Raises as :meth:`read`.
        """
        if self.engine.closed:
            raise _closed()
        address, fault = scratch.peek
        count = _peek(self._map, offset, length, verify, address, fault)
        if count > 0:
            return memoryview(ffi.buffer(address[0], count)).toreadonly()
        if count < 0:
            raise data_failure(count, "read", fault)
        return None

    def crc32c(self, offset: int, crc: int, work_bytes: int) -> tuple[int, int]:
        """CRC32C of what :meth:`read` gives from ``offset`` on, continuing from ``crc``: how many
        bytes it is of (0: the end of file), and what it is. One step, of the work that reading so
        many bytes is; chunks that are this content's as a whole are not read, but their checksums
        combined. Raises as :meth:`read`, of chunks that it has in part.
        """
        out, fault = ffi.new("uint32_t *", crc), scratch.fault
        count = lib.cxl_map_crc(self.handle, offset, work_bytes, out, fault)
        if count < 0:
            raise data_failure(count, "read", fault)
        return int(count), int(out[0])

    def punch(self, offset: int, length: int) -> None:
        """Make a range read as zeros; the size stays."""
        code = lib.cxl_map_punch(self.handle, offset, length)
        if code != 0:
            raise failure(code, "punch a hole")

    def share(self, offset: int, length: int, target: FileMap, target_offset: int) -> int | None:
        """Let ``target`` refer at ``target_offset`` to what this content has at ``offset``: bytes
        shared, short at the end of file. None: the open extent of a lease is part of the range, and
        nothing was done. No data is read or moved.

        Raises InvalidArgumentError (ranges of one content overlap), FileTooLargeError,
        OutOfMemoryError: nothing changed.
        """
        code = lib.cxl_map_share(self.handle, offset, length, target.handle, target_offset)
        if code >= 0:
            return int(code)
        if code == -errno.EBUSY:
            return None
        if code == -errno.EINVAL and self is target:
            raise InvalidArgumentError("the ranges overlap")
        raise failure(code, "share a range")

    def twin(self, owner: int) -> FileMap | None:
        """The same content of another file, clean: whoever makes it says all of it in a record.
        None: an extent of it is open, and nothing was done. Raises OutOfMemoryError.
        """
        out = scratch.map
        code = lib.cxl_map_twin(self.handle, owner, out)
        if code == -errno.EBUSY:
            return None
        if code != 0:
            raise failure(code, "make a twin of a map")
        return FileMap(self.engine, owner=owner, handle=out[0])

    def truncate(self, size: int) -> None:
        """Set the size; raises FileTooLargeError."""
        code = lib.cxl_map_truncate(self.handle, size)
        if code != 0:
            raise failure(code, "set a size")

    # ----------------------------------------------------------------------------------- leases

    def attach_lease(self, extent_id: int) -> None:
        """Append to this open extent, once the one that may be attached already is used up."""
        code = lib.cxl_map_attach_lease(self.handle, extent_id)
        if code != 0:
            raise failure(code, f"append to extent {extent_id}")

    def close_lease(self) -> tuple[int, int]:
        """Close the extent attached last: media offset and length of its unused room (0: none)."""
        out = ffi.new("uint64_t[2]")
        lib.cxl_map_close_lease(self.handle, out, out + 1)
        return out[0], out[1]

    def close_leases(self) -> list[tuple[int, int]]:
        """Close all open extents, the last one first: unused room as :meth:`close_lease`."""
        offset, length = scratch.room
        rooms, left = [], 2
        while left > 1:
            left = lib.cxl_map_close_lease(self.handle, offset, length)
            if length[0]:
                rooms.append((offset[0], length[0]))
        return rooms

    @property
    def wants_lease(self) -> bool:
        """The only lease is more than half used up: attach the next one before it is needed."""
        return bool(lib.cxl_map_wants_lease(self.handle))

    # ---------------------------------------------------------------------------- direct access

    def absorb(
        self,
        slip_offset: int,
        first: int,
        last: int,
        rooms: Sequence[DirectRoom],
        *,
        file_bytes_max: int,
    ) -> Absorbed:
        """Make what descriptors [first, last) of a slip say content, as if it was written, in their
        order, as far as they are right. The extents of ``rooms`` are open ones of no content
        (``Engine.lease``), which nothing else appends to. LINE, BYTE: durable (not published) then;
        PAGE: with the next fence. One that is wrong changes nothing. Nothing is absorbed for
        extents of a delta that is out. Small pieces make many references (:attr:`ref_count`).

        Raises MediaError, OutOfMemoryError: nothing changed (behind some that were taken: by the
        next call).
        """
        return absorb(self.handle, slip_offset, first, last, rooms, file_bytes_max)

    def hold(self) -> HeldContent:
        """Where its bytes lie now; they stay there. Raises OutOfMemoryError."""
        return HeldContent(self.engine, self.handle)

    # -------------------------------------------------------------------- replay, image, cleaner

    def replay(self, cut: int, refs: bytes, size: int) -> None:
        """One change of a record, all or nothing: cut to ``cut``; replace ranges by references (the
        bytes of REF_DTYPE rows), one after the other, extent 0 makes a hole; :meth:`set_size`.

        Raises CorruptionError for what cannot be, OutOfMemoryError.
        """
        if self.engine.closed:
            raise _closed()
        if (cut | size) >> 63:
            raise CorruptionError(f"no file has {size} bytes", structure="file size")
        rows = _from_buffer("cxl_ref[]", refs)
        bad = scratch.bad
        code = lib.cxl_map_replay(self._map, cut, rows, len(rows), size, bad)
        if code != 0:
            raise bad_input(code, "reference", bad[0])

    def set_size(self, size: int) -> None:
        """As the journal says: cut what lies beyond, no mark. Raises CorruptionError."""
        if size >> 63 or lib.cxl_map_set_size(self.handle, size) != 0:
            raise CorruptionError(f"no file has {size} bytes", structure="file size")

    # ----------------------------------------------------------------------------------- deltas

    def take_delta(self) -> Delta:
        """What changed since the last one; the marks are clean then.

        Raises MediaError (the open extent could not be padded), OutOfMemoryError.
        """
        code = lib.cxl_map_take_delta(self.handle, scratch.delta)
        if code in (-errno.EIO, NOT_DURABLE):
            raise MediaError(
                "the end of the open extent could not be padded", not_durable=code == NOT_DURABLE
            )
        if code != 0:
            raise failure(code, "take a delta")
        return Delta(self, scratch.delta[0])


class Delta:
    """What a record must say of a content: cut to ``cut``, put ``refs`` (holes have extent 0), set
    ``size``; and what the journal does not know yet of the extents that ``refs`` name.

    It ends with :meth:`apply` or :meth:`cancel`; a forgotten one is cancelled.
    """

    __slots__ = ("_delta", "_source", "cut", "definitions", "references", "size", "sums")

    def __init__(self, source: FileMap, handle: Any) -> None:
        """Takes over ``handle`` (a ``cxl_delta *`` of ``source``)."""
        self._delta = handle
        self._source = source
        self.size = int(handle.size)
        self.cut = int(handle.cut)
        self.references = copy_bytes(handle.refs, handle.ref_count, REF_DTYPE)
        self.definitions = copy_bytes(handle.extents, handle.extent_count, EXTENT_INFO_DTYPE)
        self.sums = copy_bytes(handle.crcs, handle.crc_count, CRC_DTYPE)

    @property
    def refs(self) -> Rows:
        return np.frombuffer(self.references, REF_DTYPE)

    @property
    def extents(self) -> Rows:
        return np.frombuffer(self.definitions, EXTENT_INFO_DTYPE)

    @property
    def crcs(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.sums, CRC_DTYPE)

    def _open(self) -> Any:
        if self._delta is None or self._source.engine.closed:
            raise InvariantError("the delta has ended")
        return self._delta

    def apply(self, source: FileMap, target: FileMap | None) -> None:
        """The record is durable: the extents count as published, and ``target`` (unless it is None
        or ``source`` itself) gets cut, references and size.

        Raises OutOfMemoryError: nothing changed, and it may be called again.
        """
        delta = self._open()
        goal = ffi.NULL if target is None else target.handle
        code = lib.cxl_delta_apply(delta, source.handle, goal)
        if code != 0:
            raise failure(code, "apply a delta")
        self._delta = None

    def cancel(self, source: FileMap) -> None:
        """The record was not written: the marks come back."""
        delta = self._open()
        handle = source.handle
        self._delta = None
        lib.cxl_delta_cancel(delta, handle)

    def __del__(self) -> None:
        source = self._source
        if self._delta is not None and not source.engine.closed:
            lib.cxl_delta_cancel(self._delta, ffi.NULL if source.closed else source.handle)
