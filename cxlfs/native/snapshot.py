"""What the journal knows of extents, and references of files, for a metadata image in the making.

Never here: what else an image holds, or when one is made.

Invariants
- Arrays that come out are copies, but for the rows of a ReferenceSnapshot: C writes to them until
  it ends, and they are kept for longer than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cxlfs._native import ffi, lib
from cxlfs.errors import InvariantError
from cxlfs.native.extent_calls import (
    CRC_DTYPE,
    EXTENT_INFO_DTYPE,
    REF_DTYPE,
    Rows,
    failure,
    take_array,
)
from cxlfs.native.maps import FileMap

if TYPE_CHECKING:
    from cxlfs.native.extents import Engine


LEFT_OUT = (1 << 64) - 1
"""Instead of a number of references."""


def references_of(
    maps: list[FileMap], references_max: int = LEFT_OUT
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Rows]:
    """Size and number of published references of each map, and all references; but none of one
    that has more than ``references_max``, whose number is LEFT_OUT.

    Raises OutOfMemoryError, InvariantError (one is not published).
    """
    handles = ffi.new("cxl_map *[]", FileMap.handles(maps) or [ffi.NULL])
    sizes, counts = np.zeros((2, len(maps)), dtype=np.uint64)
    outs = [ffi.from_buffer("uint64_t[]", each) for each in (sizes, counts)]
    refs, number = ffi.new("cxl_ref **"), ffi.new("uint64_t *")
    code = lib.cxl_maps_references(handles, len(maps), references_max, *outs, refs, number)
    if code != 0:
        raise failure(code, "export references")
    return sizes, counts, take_array(refs[0], number[0], REF_DTYPE)


class Description(NamedTuple):
    """What contents are: ``counts[i]`` of ``references`` (REF_DTYPE) are of content i, which has
    ``sizes[i]`` bytes; ``extents`` (EXTENT_INFO_DTYPE) and ``checksums``: what they refer to.
    """

    sizes: npt.NDArray[np.uint64]
    counts: npt.NDArray[np.uint64]
    references: Rows
    extents: Rows
    checksums: npt.NDArray[np.uint32]


def describe(engine: Engine, contents: list[FileMap]) -> Description:
    """Contents as they are now, published or not; each extent once, by id.

    Raises OutOfMemoryError, InvariantError (the engine is closed).
    """
    sizes, counts = np.zeros((2, len(contents)), dtype=np.uint64)
    handles = ffi.new("cxl_map *[]", FileMap.handles(contents) or [ffi.NULL])
    outs = [ffi.from_buffer("uint64_t[]", each) for each in (sizes, counts)]
    refs, infos, crcs = (
        ffi.new(f"{name} **") for name in ("cxl_ref", "cxl_extent_info", "uint32_t")
    )
    numbers = ffi.new("uint64_t[3]")
    code = lib.cxl_maps_describe(
        *(engine.handle, handles, len(contents), *outs, refs, numbers),
        *(infos, numbers + 1, crcs, numbers + 2),
    )
    if code != 0:
        raise failure(code, "describe contents")
    return Description(
        sizes,
        counts,
        take_array(refs[0], numbers[0], REF_DTYPE),
        take_array(infos[0], numbers[1], EXTENT_INFO_DTYPE),
        take_array(crcs[0], numbers[2], CRC_DTYPE),
    )


class ReferenceSnapshot:
    """The published references of a content when this is made: ``rows``, which are whole when
    :meth:`step` says so, however the content changes or ends meanwhile; and its ``size``. One at a
    time for each content. Raises OutOfMemoryError, InvariantError when there is one.
    """

    def __init__(self, content: FileMap) -> None:
        self._engine = content.engine
        self._snapshot: Any = None
        numbers = ffi.new("uint64_t[2]")
        rows, out = ffi.new("cxl_ref **"), ffi.new("cxl_reference_snapshot **")
        code = lib.cxl_map_begin_snapshot(content.handle, numbers, numbers + 1, rows, out)
        if code != 0:
            raise failure(code, "begin a snapshot of references")
        self._snapshot = out[0]
        self.size = int(numbers[0])
        length = int(numbers[1]) * REF_DTYPE.itemsize
        memory = ffi.buffer(ffi.gc(rows[0], lib.cxl_free), length)
        self.rows: Rows = np.frombuffer(memory, REF_DTYPE)

    def step(self, count: int) -> bool:
        """Take down about ``count`` more; False: all are there. Raises InvariantError (one is not
        published).
        """
        if self._snapshot is None or self._engine.closed:
            raise InvariantError("the snapshot has ended")
        code = lib.cxl_reference_snapshot_step(self._snapshot, count)
        if code < 0:
            raise failure(code, "go on with a snapshot of references")
        if not code:
            self.cancel()
        return bool(code)

    def cancel(self) -> None:
        """Nothing is taken down any more. Idempotent."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None and not self._engine.closed:
            lib.cxl_reference_snapshot_end(snapshot)

    def __del__(self) -> None:
        self.cancel()


class ExtentSnapshot:
    """What the journal knows of all extents when this is made: they are looked at by :meth:`step`,
    or when they are about to change. One at a time. Raises InvariantError when there is one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        code = lib.cxl_snapshot_begin(engine.handle)
        if code != 0:
            raise failure(code, "begin a snapshot of what is published")

    def step(self, count: int) -> bool:
        """Look at about ``count`` extents; False: all are done. Raises OutOfMemoryError."""
        code = lib.cxl_snapshot_step(self._engine.handle, count)
        if code < 0:
            raise failure(code, "go on with a snapshot")
        return bool(code)

    def take(self) -> tuple[Rows, npt.NDArray[np.uint32]]:
        """End it: all extents that ``Engine.export_maps`` would have given, in no order, and their
        checksums. Raises OutOfMemoryError.
        """
        infos, crcs = ffi.new("cxl_extent_info **"), ffi.new("uint32_t **")
        numbers = ffi.new("uint64_t[2]")
        code = lib.cxl_snapshot_take(self._engine.handle, infos, numbers, crcs, numbers + 1)
        if code != 0:
            raise failure(code, "end a snapshot")
        return (
            take_array(infos[0], numbers[0], EXTENT_INFO_DTYPE),
            take_array(crcs[0], numbers[1], CRC_DTYPE),
        )

    def cancel(self) -> None:
        """Forget it."""
        if not self._engine.closed:
            lib.cxl_snapshot_cancel(self._engine.handle)
