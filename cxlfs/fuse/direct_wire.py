"""The byte layout of what programs ask of their open files: csrc/client/direct.h, the requests.

Never here: what a request means (``direct_access``), slips and the rows of a map (the store).

Invariants
- The same sizes and places as the C header has, which a test compares.
"""

from __future__ import annotations

import enum
import struct

from cxlfs.native.direct import MAP_PAYLOAD_BYTES, VERSION

__all__ = ["MAP_PAYLOAD_BYTES", "VERSION"]

ATTACH = struct.Struct("<IIQQQQII16sQ24x1952s")
"""Version, granularity; bytes, device, inode and special device of the medium; bytes of a chunk,
flags, uuid, watch, path, ended by a zero."""
LEASES_MAX = 16
LEASE_HEAD = struct.Struct(f"<QQQQIIII{LEASES_MAX}Q")
"""Bytes wanted and file offset; slip, its watch and bytes; how many leases at most, and were given;
flags, 0; those that are returned."""
LEASE_ROW = struct.Struct("<QQQQQ")
"""Lease, media offset, capacity, place of the checksums, length: LEASES_MAX of them."""
CONFIRM = struct.Struct("<Q")
SETTLE = struct.Struct(f"<{LEASES_MAX}QIIQQ")
"""Leases that are returned, flags; descriptors done, bytes of the file."""
MAP_HEAD = struct.Struct("<QQQIIQQ")
"""Offset; the next one, bytes of the file, rows, checksums; flags; watch."""
UNMAP = struct.Struct("<Q")
VERIFY = struct.Struct("<QQQQQ")
"""Offset and bytes of what was compared, offset and bytes of what comes next, flags."""

PATH_BYTES_MAX = 1951
ATTACH_SYNCHRONOUS = 1
LEASE_AHEAD = 1
SETTLE_DONE = 1
MAP_WATCH = 1
MAP_VERIFIED = 2
MAP_SHARED = 4
VERIFY_WRONG = 8


def _command(number: int, size_bytes: int) -> int:
    """_IOWR('c', number, ...) of asm-generic/ioctl.h."""
    return 3 << 30 | size_bytes << 16 | ord("c") << 8 | number


class Command(enum.IntEnum):
    ATTACH = _command(0x40, ATTACH.size)
    LEASE = _command(0x41, LEASE_HEAD.size + LEASES_MAX * LEASE_ROW.size)
    CONFIRM = _command(0x42, CONFIRM.size)
    SETTLE = _command(0x43, SETTLE.size)
    MAP = _command(0x44, MAP_HEAD.size + MAP_PAYLOAD_BYTES)
    UNMAP = _command(0x45, UNMAP.size)
    VERIFY = _command(0x46, VERIFY.size)


def size_of(command: int) -> int:
    """Bytes of a request, and of its answer."""
    return command >> 16 & 0x3FFF
