"""The DRAM extent map behind typed Python: the second half of ``csrc/cxlfs.h``.

Never: decides where data lies, when a delta is taken, or what a record says.

Invariants
- No byte of file data is handled here, only addresses; the GIL is not held over a copy.
- Arrays that come out are copies; arrays that go in have the layout of the C structs.
- An engine, or a map, that was closed is not used: it raises and touches no memory of theirs.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlfs._native import ffi, lib
from cxlfs.errors import CorruptionError, DataFault, InvariantError, invariant
from cxlfs.native.extent_calls import (
    CHANGE_DTYPE,
    CRC_DTYPE,
    EXTENT_INFO_DTYPE,
    LIVE_RANGE_DTYPE,
    MOVE_DTYPE,
    REF_DTYPE,
    SPAN_DTYPE,
    Rows,
    bad_input,
    copy_array,
    data_failure,
    failure,
    fault_of,
    scratch,
    take_array,
)
from cxlfs.native.maps import Delta, FileMap

__all__ = [
    "CHANGE_DTYPE",
    "EXTENT_INFO_DTYPE",
    "LIVE_RANGE_DTYPE",
    "MOVE_DTYPE",
    "REF_DTYPE",
    "SPAN_DTYPE",
    "Counting",
    "Delta",
    "Engine",
    "EngineStatistics",
    "FileMap",
    "LiveRanges",
    "ReplayStop",
    "Rows",
    "Verification",
]

_DEAD_AT_ONCE = 256
_FAULTS_AT_ONCE = 64


class Counting(enum.IntEnum):
    """How the bytes count that a content refers to; those of several contents as the first of these
    that fits.
    """

    KEPT = 0
    REPLACED = 1
    """The committed content behind a live one that will be published."""
    ASIDE = 2
    """Kept aside until the room is needed."""
    HELD = 3
    """History that is not given back: counts as used. Images do not know it, nor PAST."""
    PAST = 4
    """History that is given back when its room is needed: counts as free, is not alive."""


class EngineStatistics(NamedTuple):
    """Counts of what the engine holds now, and sums since it began. Sizes in bytes.

    ``kept_bytes`` to ``past_bytes``: what contents refer to, each byte once; see Counting.
    ``past_refs``: the references of contents that count as held or past. ``leased_bytes``: of open
    extents, whether anything refers to them or not. ``uncounted_extents``: since the engine began,
    those that memory was too short for to go on counting them; too much is counted while they last.
    ``refs_visited``: by looking for what is alive, by moving it, by copying and dropping contents.
    ``pieces_visited``: of extents, by counting what references cover. ``discarded_refs``: of no
    content, and not dropped yet.
    """

    extents: int
    refs: int
    discarded_refs: int
    crcs: int
    maps: int
    memory: int
    bytes_written: int
    bytes_read: int
    checksum_errors: int
    chunks_verified: int
    refs_visited: int
    pieces_visited: int
    kept_bytes: int
    replaced_bytes: int
    aside_bytes: int
    held_bytes: int
    past_bytes: int
    past_refs: int
    leased_bytes: int
    uncounted_extents: int


class Verification(NamedTuple):
    """What checking one extent found: ``faults`` may be cut short, ``fault_count`` never is."""

    faults: list[DataFault]
    fault_count: int
    bytes_checked: int


class LiveRanges(NamedTuple):
    """What is alive in some spans of the media: ``ranges`` (LIVE_RANGE_DTYPE) in the order of their
    files, and ``owners``, which they point into. ``busy``: spans of which nothing must be moved.
    ``visited``: how many references were looked at for it.
    """

    ranges: Rows
    owners: npt.NDArray[np.uint64]
    busy: npt.NDArray[np.bool_]
    visited: int


class ReplayStop(NamedTuple):
    """Where :meth:`Engine.replay` stopped: the first definition or change that cannot be."""

    definition: int | None
    change: int | None
    error: CorruptionError


class Engine:
    """All extents and maps of one store. Segment i covers ``segment_size`` bytes of the media from
    ``first + i * segment_size`` on; a checksum covers ``chunk`` bytes (a power of two).

    The media must stay open until :meth:`close`, which also ends every map of the engine.
    """

    __slots__ = (
        "__weakref__",
        "_engine",
        "chunk",
        "closed",
        "first",
        "segment_count",
        "segment_size",
    )

    def __init__(
        self, media_handle: Any, *, first: int, segment_size: int, segment_count: int, chunk: int
    ) -> None:
        self.closed = True
        self.first = first
        self.segment_size = segment_size
        self.segment_count = segment_count
        self.chunk = chunk
        out = ffi.new("cxl_engine **")
        code = lib.cxl_engine_new(media_handle, first, segment_size, segment_count, chunk, out)
        if code != 0:
            raise failure(code, "make an extent map of this geometry")
        self._engine = out[0]
        self.closed = False

    @property
    def handle(self) -> Any:
        """The ``cxl_engine *``."""
        if self.closed:
            raise InvariantError("the engine is closed")
        return self._engine

    def close(self) -> None:
        """Forget everything. Idempotent."""
        if not self.closed:
            self.closed = True
            lib.cxl_engine_free(self._engine)

    def __del__(self) -> None:
        self.close()

    def statistics(self) -> EngineStatistics:
        out = scratch.statistics
        lib.cxl_engine_statistics(self.handle, out)
        return EngineStatistics._make(ffi.unpack(*scratch.statistics_fields))

    def table_bytes(self, extent_bytes: int, ref_bytes: int, crc_bytes: int) -> int:
        """What tables take with so many bytes for each extent, reference and checksum there is."""
        return int(lib.cxl_engine_table_bytes(self.handle, extent_bytes, ref_bytes, crc_bytes))

    @property
    def promised_bytes(self) -> int:
        """Of all contents, see ``FileMap.promise``. No walk."""
        return int(lib.cxl_engine_promised(self.handle))

    # --------------------------------------------------------------------------------- extents

    def define(self, infos: Rows, crcs: npt.NDArray[np.uint32]) -> None:
        """Define extents, or extend known ones: all or none; they count as published, and are
        kept without references until :meth:`drop_unreferenced`.

        Raises CorruptionError for what cannot be, OutOfMemoryError.
        """
        rows = ffi.from_buffer("cxl_extent_info[]", np.ascontiguousarray(infos))
        sums = ffi.from_buffer("uint32_t[]", np.ascontiguousarray(crcs))
        invariant(infos.dtype == EXTENT_INFO_DTYPE, "definitions have the layout of C")
        bad = ffi.new("uint64_t *")
        code = lib.cxl_engine_define(self.handle, rows, len(rows), sums, len(sums), bad)
        if code != 0:
            raise bad_input(code, "extent", bad[0])

    def define_one(
        self, extent_id: int, media_offset: int, length: int, first_chunk: int, crcs: bytes
    ) -> None:
        """:meth:`define` of one extent, with its checksums as they stand in a record."""
        info = scratch.info
        info.id, info.media_offset, info.length = extent_id, media_offset, length
        info.crc_index, info.first_chunk, info.crc_count = 0, first_chunk, len(crcs) // 4
        sums = ffi.from_buffer("uint32_t[]", crcs)
        code = lib.cxl_engine_define(self.handle, info, 1, sums, len(crcs) // 4, scratch.bad)
        if code != 0:
            raise bad_input(code, "extent", extent_id)

    def replay(
        self, infos: Rows, changes: Rows, contents: list[FileMap], data: bytes | bytearray
    ) -> ReplayStop | None:
        """:meth:`define` and ``FileMap.replay`` in the order of the records in ``data``.

        Change i (CHANGE_DTYPE) is one of ``contents[i]`` behind its first ``definitions`` of
        ``infos``; checksums and references stand in ``data``. None: all took effect. Else what
        comes before the stop did. Raises OutOfMemoryError.
        """
        rows = ffi.from_buffer("cxl_extent_info[]", np.ascontiguousarray(infos))
        list_ = ffi.from_buffer("cxl_change[]", np.ascontiguousarray(changes))
        invariant(infos.dtype == EXTENT_INFO_DTYPE, "definitions have the layout of C")
        invariant(changes.dtype == CHANGE_DTYPE, "changes have the layout of C")
        invariant(len(list_) == len(contents), "a content for each change")
        addresses = [content.address for content in contents]
        maps = ffi.from_buffer("cxl_map *[]", np.array(addresses, dtype=np.uintp))
        defined, changed = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        code = lib.cxl_engine_replay(
            self.handle,
            rows,
            len(rows),
            list_,
            maps,
            len(list_),
            ffi.from_buffer(data),
            len(data),
            defined,
            changed,
        )
        if code == 0:
            return None
        definition, change = int(defined[0]), int(changed[0])
        at_change = change < len(list_) and int(changes["definitions"][change]) == definition
        structure, index = ("reference", change) if at_change else ("extent", definition)
        error = bad_input(-errno.EINVAL if code == -errno.EFBIG else code, structure, index)
        if not isinstance(error, CorruptionError):
            raise error
        return ReplayStop(None if at_change else definition, change if at_change else None, error)

    def retain(self, on: bool) -> None:  # noqa: FBT001 - a switch, named by its verb
        """On, as from the beginning: defined extents stay without references, because a later
        record may refer to them. Off: those that nobody refers to are dropped now.
        """
        if not on:
            self.drop_unreferenced()

    def drop_unreferenced(self) -> None:
        """Drop every extent that no map refers to and no lease holds (after replay)."""
        lib.cxl_engine_drop_unreferenced(self.handle)

    def lease(self, extent_id: int, media_offset: int, capacity: int) -> None:
        """Open an extent with room for ``capacity`` bytes at ``media_offset``, a multiple of 64."""
        code = lib.cxl_engine_lease(self.handle, extent_id, media_offset, capacity)
        if code != 0:
            raise failure(code, f"open extent {extent_id} at {media_offset}")

    def close_lease(self, extent_id: int) -> tuple[int, int]:
        """Close an open extent that no map has: media offset and length of the room left over."""
        offset, length = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        code = lib.cxl_engine_close_lease(self.handle, extent_id, offset, length)
        if code != 0:
            raise failure(code, f"close extent {extent_id}")
        return offset[0], length[0]

    def copy_ranges(self, ranges: Rows, target_id: int) -> Rows:
        """Verify ranges (LIVE_RANGE_DTYPE) of extents and append them to an open one, as far as it
        has room: what went where (MOVE_DTYPE). LINE, BYTE: durable then.

        Raises CorruptionError, MediaError (``fault``: extent offsets), OutOfMemoryError: nothing
        was appended.
        """
        invariant(ranges.dtype == LIVE_RANGE_DTYPE, "ranges have the layout of C")
        rows = ffi.from_buffer("cxl_live_range[]", np.ascontiguousarray(ranges))
        moves = np.zeros(len(ranges), dtype=MOVE_DTYPE)
        out = ffi.from_buffer("cxl_move[]", moves)
        fault, bad = ffi.new("cxl_fault *"), ffi.new("uint64_t *")
        count = lib.cxl_engine_copy_ranges(
            self.handle, rows, len(ranges), target_id, out, bad, fault
        )
        if count < 0:
            raise data_failure(count, "copied", fault)
        return moves[:count]

    def move(self, contents: Sequence[FileMap], moves: Rows) -> None:
        """Re-aim what the contents refer to in the sources of ``moves`` (MOVE_DTYPE) at their
        targets; each content is walked once. Marks stay.

        Raises CorruptionError when a target does not exist or sources overlap; OutOfMemoryError:
        calling again does the rest.
        """
        invariant(moves.dtype == MOVE_DTYPE, "moves have the layout of C")
        order = np.lexsort((moves["source_offset"], moves["source_id"]))
        rows = ffi.from_buffer("cxl_move[]", moves[order])
        maps = ffi.new("cxl_map *[]", [content.handle for content in contents] or [ffi.NULL])
        bad = scratch.bad
        code = lib.cxl_maps_move(self.handle, maps, len(contents), rows, len(moves), bad)
        if code != 0:
            raise bad_input(code, "move to extent", int(moves["target_id"][order[bad[0]]]))

    def describe(self, extent_id: int) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """Definition (one row) and all checksums of an extent as it is now."""
        info, crcs = ffi.new("cxl_extent_info *"), ffi.new("uint32_t **")
        code = lib.cxl_engine_describe(self.handle, extent_id, info, crcs)
        if code != 0:
            raise failure(code, f"describe extent {extent_id}")
        sums = take_array(crcs[0], info.crc_count, CRC_DTYPE)
        return copy_array(info, 1, EXTENT_INFO_DTYPE), sums

    def publish(self, extent_id: int) -> None:
        """The journal knows the extent as it is now."""
        code = lib.cxl_engine_publish(self.handle, extent_id)
        if code != 0:
            raise failure(code, f"publish extent {extent_id}")

    def verify(self, extent_id: int) -> Verification | None:
        """Check every chunk of an extent, offsets of faults are its own; None when it is gone."""
        faults = ffi.new("cxl_fault[]", _FAULTS_AT_ONCE)
        count, size = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        code = lib.cxl_engine_verify(self.handle, extent_id, faults, _FAULTS_AT_ONCE, count, size)
        if code != 0:
            return None
        found = [fault_of(faults[i]) for i in range(min(count[0], _FAULTS_AT_ONCE))]
        return Verification(found, count[0], size[0])

    def list(self) -> Rows:
        """Id, media offset and length of every extent, by media offset (EXTENT_INFO_DTYPE)."""
        out, count = ffi.new("cxl_extent_info **"), ffi.new("uint64_t *")
        code = lib.cxl_engine_list(self.handle, out, count)
        if code != 0:
            raise failure(code, "list extents")
        return take_array(out[0], count[0], EXTENT_INFO_DTYPE)

    # -------------------------------------------------------------------------------- segments

    def dead_segments(self) -> Sequence[int]:
        """Segments whose last extent vanished since the last call."""
        indexes = ffi.new("uint64_t[]", _DEAD_AT_ONCE)
        dead: list[int] = []
        while True:
            count = lib.cxl_engine_dead_segments(self.handle, indexes, _DEAD_AT_ONCE)
            dead.extend(indexes[0:count])
            if count < _DEAD_AT_ONCE:
                return dead

    def usage(self) -> npt.NDArray[np.uint64]:
        """Bytes of each segment that a map refers to (shared ones once) or a lease holds. They are
        counted as they come and go: no walk over the maps.
        """
        used = np.zeros(self.segment_count, dtype=np.uint64)
        out = ffi.from_buffer("uint64_t[]", used)
        code = lib.cxl_engine_usage(self.handle, out, self.segment_count)
        if code != 0:
            raise failure(code, "count what is used")
        return used

    @property
    def past_segments(self) -> int:
        """Segments without used bytes that history, or a reader, keeps from being free."""
        return int(lib.cxl_engine_past_segments(self.handle))

    def past_contents(self, segment: int) -> Sequence[int]:
        """``FileMap.address`` of each content that counts as PAST and refers to bytes in a segment.

        Raises OutOfMemoryError.
        """
        out, count = ffi.new("cxl_map ***"), ffi.new("uint64_t *")
        code = lib.cxl_engine_past_maps(self.handle, segment, out, count)
        if code != 0:
            raise failure(code, "find what history holds")
        found: Sequence[int] = take_array(out[0], count[0], np.dtype(np.uintp)).tolist()
        return found

    def live_ranges(self, spans: Rows, *, preferred: int = 0) -> LiveRanges:
        """What maps refer to inside spans (SPAN_DTYPE, sorted, apart, none beyond a segment), by
        (owner, file_offset); of several owners of a range ``preferred`` is named if it is one.
        """
        invariant(spans.dtype == SPAN_DTYPE, "spans have the layout of C")
        rows = ffi.from_buffer("cxl_span[]", np.ascontiguousarray(spans))
        asked = (self.handle, rows, len(spans), preferred)
        return self._live_ranges(len(spans), lib.cxl_engine_live_ranges, *asked)

    def live_ranges_of(self, content: FileMap, offset: int, length: int) -> LiveRanges:
        """The same for the parts of the media that a range of ``content`` refers to, its owner
        preferred; ``busy`` has one element.
        """
        asked = (content.handle, offset, length)
        return self._live_ranges(1, lib.cxl_map_live_ranges, *asked)

    def _live_ranges(self, spans: int, question: Callable[..., int], *asked: Any) -> LiveRanges:
        """What C allocates to answer, as arrays."""
        busy = np.zeros(spans, dtype=np.uint8)
        ranges, owners = ffi.new("cxl_live_range **"), ffi.new("uint64_t **")
        counts = ffi.new("uint64_t[2]")
        before = self.statistics().refs_visited
        told = (ffi.from_buffer("uint8_t[]", busy), ranges, counts, owners, counts + 1)
        code = question(*asked, *told)
        if code != 0:
            raise failure(code, "list what is alive")
        return LiveRanges(
            take_array(ranges[0], counts[0], LIVE_RANGE_DTYPE),
            take_array(owners[0], counts[1], np.dtype("u8")),
            busy.astype(np.bool_),
            self.statistics().refs_visited - before,
        )

    # -------------------------------------------------------------------------- maps in one go

    def import_contents(
        self,
        owners: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
        first: npt.NDArray[np.uint64],
        refs: Rows,
    ) -> npt.NDArray[np.uintp]:
        """Content i has ``refs[first[i]:first[i + 1]]``; all or none. Clean. What comes out are
        addresses for ``FileMap.at``; until then a content belongs to the engine.

        Raises CorruptionError for what cannot be, OutOfMemoryError.
        """
        count = len(owners)
        invariant(len(sizes) == count and len(first) == count + 1, "arrays of one length")
        invariant(refs.dtype == REF_DTYPE, "references have the layout of C")
        if int(first[-1]) != len(refs):
            raise CorruptionError("reference counts do not fit", structure="reference")
        arrays = [np.ascontiguousarray(a, dtype=np.uint64) for a in (owners, sizes, first)]
        views = [ffi.from_buffer("uint64_t[]", a) for a in arrays]
        rows = ffi.from_buffer("cxl_ref[]", np.ascontiguousarray(refs))
        found, bad = np.zeros(count, dtype=np.uintp), ffi.new("uint64_t *")
        out = ffi.from_buffer("cxl_map *[]", found)
        code = lib.cxl_maps_import(self.handle, count, *views, rows, out, bad)
        if code != 0:
            raise bad_input(code, "reference", bad[0])
        return found

    def export_maps(
        self, maps: Sequence[FileMap]
    ) -> tuple[npt.NDArray[np.uint64], Rows, Rows, npt.NDArray[np.uint32]]:
        """The published state: references for each map, all references, extents, checksums.

        The extents are all that are published and held by anything, each once, by id.
        """
        counts = np.zeros(len(maps), dtype=np.uint64)
        handles = ffi.new("cxl_map *[]", [content.handle for content in maps] or [ffi.NULL])
        refs, infos, crcs = (
            ffi.new(f"{name} **") for name in ("cxl_ref", "cxl_extent_info", "uint32_t")
        )
        numbers = ffi.new("uint64_t[3]")
        code = lib.cxl_maps_export(
            *(self.handle, handles, len(maps), ffi.from_buffer("uint64_t[]", counts)),
            *(refs, numbers, infos, numbers + 1, crcs, numbers + 2),
        )
        if code != 0:
            raise failure(code, "export what is published")
        return (
            counts,
            take_array(refs[0], numbers[0], REF_DTYPE),
            take_array(infos[0], numbers[1], EXTENT_INFO_DTYPE),
            take_array(crcs[0], numbers[2], CRC_DTYPE),
        )
