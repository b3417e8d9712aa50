"""The layout of direct access in Python is that of the C header."""

from __future__ import annotations

import itertools
import struct
import subprocess
from pathlib import Path

from cxlfs.fuse import direct_wire, kernel
from cxlfs.fuse.direct_wire import Command, size_of
from tests.native.compiling import CSRC, STRICT, needs_compiler

LEASES = range(direct_wire.LEASES_MAX)
LEASE = [direct_wire.LEASE_HEAD, *(direct_wire.LEASE_ROW for _ in LEASES)]
RETURNED = [f"returned_lease_ids[{i}]" for i in LEASES]
ROOM = ["lease_id", "media_offset", "capacity_bytes", "crc_offset", "length_bytes"]
PAYLOAD = struct.Struct(f"<{direct_wire.MAP_PAYLOAD_BYTES}s")

STRUCTURES: dict[str, tuple[list[struct.Struct], list[str]]] = {
    "cxl_direct_attach": (
        [direct_wire.ATTACH],
        [
            *("version", "granularity", "media_bytes", "device", "inode", "special_device"),
            *("chunk_bytes", "flags", "uuid", "watch", "path"),
        ],
    ),
    "cxl_direct_lease": (
        LEASE,
        [
            *(
                "wanted_bytes",
                "file_offset",
                "slip_offset",
                "watch",
                "slip_bytes",
                "count",
                "flags",
                "reserved",
            ),
            *RETURNED,
            *(f"rooms[{i}].{name}" for i in LEASES for name in ROOM),
        ],
    ),
    "cxl_direct_confirm": ([direct_wire.CONFIRM], ["reserved"]),
    "cxl_direct_settled": (
        [direct_wire.SETTLE],
        [*RETURNED, "flags", "reserved", "absorbed", "size_bytes"],
    ),
    "cxl_direct_map": (
        [direct_wire.MAP_HEAD, PAYLOAD],
        [
            *("offset", "next_offset", "size_bytes", "row_count", "crc_count", "flags", "watch"),
            "payload",
        ],
    ),
    "cxl_direct_unmap": ([direct_wire.UNMAP], ["reserved"]),
    "cxl_direct_verify": (
        [direct_wire.VERIFY],
        ["done_offset", "done_bytes", "offset", "length_bytes", "flags"],
    ),
    "fuse_wire_ioctl": (
        [kernel.IOCTL],
        ["handle", "flags", "command", "argument", "in_size", "out_size"],
    ),
}
"""What Python packs, and the fields that it fills in, in their order."""

NUMBERS = {
    "CXL_DIRECT_VERSION": direct_wire.VERSION,
    "CXL_DIRECT_PATH_BYTES": direct_wire.PATH_BYTES_MAX + 1,
    "CXL_DIRECT_SYNC": direct_wire.ATTACH_SYNCHRONOUS,
    "CXL_DIRECT_AHEAD": direct_wire.LEASE_AHEAD,
    "CXL_DIRECT_LEASES": direct_wire.LEASES_MAX,
    "CXL_DIRECT_DONE": direct_wire.SETTLE_DONE,
    "CXL_DIRECT_WATCH": direct_wire.MAP_WATCH,
    "CXL_DIRECT_VERIFIED": direct_wire.MAP_VERIFIED,
    "CXL_DIRECT_SHARED": direct_wire.MAP_SHARED,
    "CXL_DIRECT_WRONG": direct_wire.VERIFY_WRONG,
    "CXL_DIRECT_MAP_PAYLOAD": direct_wire.MAP_PAYLOAD_BYTES,
    "FUSE_WIRE_IOCTL": kernel.Opcode.IOCTL,
    **{f"CXL_DIRECT_{command.name}": command for command in Command},
}


def places(parts: list[struct.Struct]) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of all, and offset and size of each field."""
    fields, base = [], 0
    for part in parts:
        order, position = part.format[0], 0
        for count, kind in _items(part.format[1:]):
            if kind == "s":
                fields.append((base + position, count))
            elif kind != "x":
                size = struct.calcsize(f"{order}{kind}")
                fields += [(base + position + i * size, size) for i in range(count)]
            position += struct.calcsize(f"{order}{count}{kind}")
        base += part.size
    return base, fields


def _items(text: str) -> list[tuple[int, str]]:
    found, digits = [], ""
    for letter in text:
        if letter.isdigit():
            digits += letter
        else:
            found.append((int(digits or 1), letter))
            digits = ""
    return found


@needs_compiler
def test_sizes_places_and_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", "#include <stdio.h>"]
    lines += [
        '#include "client/direct.h"',
        '#include "transport/fuse_wire.h"',
        "int main(void)",
        "{",
    ]
    for name, (_, fields) in STRUCTURES.items():
        lines.append(f'    printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'    printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), '
            f"sizeof((({name} *)0)->{field}));"
            for field in fields
        ]
    lines += [f'    printf("{name} %llu\\n", (unsigned long long)({name}));' for name in NUMBERS]
    (tmp_path / "places.c").write_text("\n".join([*lines, "    return 0;", "}", ""]))
    compiled = ["cc", "-std=gnu11", *STRICT, f"-I{CSRC}", "places.c", "-o", "places"]
    subprocess.run(compiled, cwd=tmp_path, check=True)
    said = subprocess.run(["./places"], cwd=tmp_path, check=True, capture_output=True, text=True)

    expected = []
    for name, (parts, fields) in STRUCTURES.items():
        size, found = places(parts)
        expected.append(f"{name} {size}")
        assert len(found) == len(fields)
        expected += [
            f"{name}.{f} {at} {count}" for f, (at, count) in zip(fields, found, strict=True)
        ]
    expected += [f"{name} {int(number)}" for name, number in NUMBERS.items()]
    assert said.stdout.splitlines() == expected


def test_a_command_says_how_long_it_is() -> None:
    for command in Command:
        parts = {
            Command.ATTACH: [direct_wire.ATTACH],
            Command.LEASE: LEASE,
            Command.CONFIRM: [direct_wire.CONFIRM],
            Command.SETTLE: [direct_wire.SETTLE],
            Command.MAP: [direct_wire.MAP_HEAD, PAYLOAD],
            Command.UNMAP: [direct_wire.UNMAP],
            Command.VERIFY: [direct_wire.VERIFY],
        }[command]
        assert size_of(command) == sum(part.size for part in parts)
    assert len(set(itertools.chain(Command))) == 7
