"""What programs store by themselves, taken in, and what they read in place, held: the Python face
of ``csrc/cxl_direct.h``, and the numbers of ``csrc/client/direct.h``.

Never: gives room away, or decides who may have some; waits for a program.

Invariants
- What comes from a slip is checked in C, copied once; nothing of it is handled here.
- A HeldContent keeps its engine alive; one that was closed raises and touches no memory.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cxlfs._native import ffi, lib
from cxlfs.errors import InvariantError, MediaError, invariant
from cxlfs.native.extent_calls import SPAN_DTYPE, Engine, failure, scratch, take_array

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = int(lib.CXL_DIRECT_VERSION)

# --- the slip ---------------------------------------------------------------------------------

SLIP_BYTES = int(lib.CXL_SLIP_BYTES)
SLIP_DESCRIPTORS = int(lib.CXL_SLIP_DESCRIPTORS)
"""How many a slip has room for: descriptor n lies at n modulo this."""
SLIP_DESCRIPTORS_AT = int(lib.CXL_SLIP_DESCRIPTORS_AT)
SLIP_DESCRIPTOR_BYTES = int(ffi.sizeof("cxl_slip_descriptor"))
SLIP_STATE_AT = int(ffi.offsetof("cxl_slip", "state"))
SLIP_COPYING_AT = int(ffi.offsetof("cxl_slip", "copying"))
SLIP_ABSORBED_AT = int(ffi.offsetof("cxl_slip", "absorbed"))
SLIP_CLOSED = 1 << 63
"""Of the state; the other bits of it count."""

# --- requests ---------------------------------------------------------------------------------

ROW_BYTES = int(ffi.sizeof("cxl_direct_row"))
CRC_BYTES = 4
MAP_PAYLOAD_BYTES = int(lib.CXL_DIRECT_MAP_PAYLOAD)
"""Room for rows and checksums in the answer to one request."""

LOCK_GAP_BYTES = int(lib.CXL_DIRECT_LOCK_GAP)
"""Between two parts of a mapped file that may be locked as one."""

_WRONG = {
    lib.CXL_WRONG_SLIP: "there are more descriptors than a slip has, or no slip",
    lib.CXL_WRONG_SEQUENCE: "its sequence number is not its own",
    lib.CXL_WRONG_RESERVED: "its flags or reserved fields are not 0",
    lib.CXL_WRONG_LEASE: "it names no lease that is open",
    lib.CXL_WRONG_PLACE: "its bytes are none, or overlap others, or leave the lease",
    lib.CXL_WRONG_FILE: "it lies beyond the largest file",
    lib.CXL_WRONG_TAIL: "it has the checksum of a last chunk that is whole",
    lib.CXL_WRONG_PUBLISHED: "the lease ends in bytes that the journal knows already",
}


class DirectRoom(NamedTuple):
    """An open extent that a program fills: its id, where on the media the checksums of its chunks
    begin, and how many bytes of it are for data.
    """

    id: int
    crc_offset: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class Absorbed:
    """How many descriptors were taken, and their bytes.

    ``error``: why the one behind them was not (None: all were). ``refused``: it is wrong, and
    always will be; else memory or the media failed, and absorbing from there on may be tried again.
    """

    count: int
    bytes: int
    error: str | None
    refused: bool = False


def absorb(
    content: Any,
    slip_offset: int,
    first: int,
    last: int,
    rooms: Sequence[DirectRoom],
    file_bytes_max: int,
) -> Absorbed:
    """``FileMap.absorb`` of a ``cxl_map *``."""
    rows = ffi.new("cxl_direct_room[]", list(rooms) or 1)
    size, wrong, fault = scratch.needed, ffi.new("uint32_t *"), scratch.fault
    count = int(
        lib.cxl_map_absorb(
            content, slip_offset, first, last, rows, len(rooms), file_bytes_max, size, wrong, fault
        )
    )
    if fault.error == 0:
        return Absorbed(count, int(size[0]), None)
    place = f"descriptor {first + count} at media offset {fault.media_offset}"
    if wrong[0]:
        return Absorbed(count, int(size[0]), f"{place}: {_WRONG[wrong[0]]}", refused=True)
    if count == 0:
        if fault.error in (-errno.EIO, -errno.ERANGE):
            raise MediaError(
                f"{place}, or a checksum that it stands for, cannot be read",
                offset=fault.media_offset,
                length=SLIP_DESCRIPTOR_BYTES,
            )
        raise failure(fault.error, "absorb a descriptor")
    return Absorbed(count, int(size[0]), f"{place}: error {-fault.error}")


# --- held for readers -------------------------------------------------------------------------


class HeldContent:
    """What ``FileMap.hold`` gives: where the bytes of a file lay then, and they stay. It ends with
    :meth:`close`.
    """

    __slots__ = ("__weakref__", "_engine", "_held", "size_bytes")

    def __init__(self, engine: Engine, content: Any) -> None:
        """Of a ``cxl_map *`` of the engine. Raises OutOfMemoryError."""
        self._held: Any = None
        self._engine = engine
        out = ffi.new("cxl_held **")
        code = lib.cxl_map_hold(content, out)
        if code != 0:
            raise failure(code, "hold a content")
        self._held = out[0]
        self.size_bytes = int(lib.cxl_held_size(self._held))

    def _open(self) -> Any:
        if self._held is None or self._engine.closed:
            raise InvariantError("the content is not held any more")
        return self._held

    def part(
        self, offset: int, room_bytes: int = MAP_PAYLOAD_BYTES, *, with_sums: bool = True
    ) -> tuple[bytes, int, int, int]:
        """Rows (``cxl_direct_row``) from file ``offset`` on, and behind them the checksums of their
        chunks, as many as ``room_bytes`` have room for (a row and a checksum at least): these
        bytes, the number of rows and of checksums, and the file offset to go on from, which is
        ``size_bytes`` behind the last one. Without ``with_sums`` there are no checksums.
        """
        held = self._open()
        invariant(offset >= 0 and room_bytes >= ROW_BYTES + CRC_BYTES, "room for a row")
        payload = ffi.new("uint64_t[]", room_bytes // 8)
        counts, following = ffi.new("uint32_t[2]"), scratch.bad
        length = len(payload) * 8
        code = lib.cxl_held_rows(
            held, offset, with_sums, payload, length, counts, counts + 1, following
        )
        if code != 0:
            raise failure(code, "say where a content lies")
        used = counts[0] * ROW_BYTES + counts[1] * CRC_BYTES
        return bytes(ffi.buffer(payload, used)), counts[0], counts[1], int(following[0])

    def identity(self) -> bytes:
        """Of no other content: its size, where each part lies, and a checksum of its checksums.
        Raises OutOfMemoryError.
        """
        out, count = ffi.new("uint64_t **"), ffi.new("uint64_t *")
        code = lib.cxl_held_identity(self._open(), out, count)
        if code != 0:
            raise failure(code, "say what a content is")
        try:
            return bytes(ffi.buffer(out[0], count[0] * 8))
        finally:
            lib.cxl_free(out[0])

    def ranges(self, gap_bytes: int = 0) -> list[tuple[int, int]]:
        """Media offset and length of its bytes, by offset, those with at most ``gap_bytes`` between
        them as one. Raises OutOfMemoryError.
        """
        out, count = ffi.new("cxl_span **"), ffi.new("uint64_t *")
        code = lib.cxl_held_ranges(self._open(), gap_bytes, out, count)
        if code != 0:
            raise failure(code, "list what is held")
        rows = take_array(out[0], count[0], SPAN_DTYPE)
        starts, lengths = (np.asarray(rows[name]).tolist() for name in ("media_offset", "length"))
        return list(zip(starts, lengths, strict=True))

    def close(self) -> None:
        """Its bytes may go. Idempotent."""
        held, self._held = self._held, None
        if held is not None and not self._engine.closed:
            lib.cxl_held_free(held)

    def __del__(self) -> None:
        self.close()
