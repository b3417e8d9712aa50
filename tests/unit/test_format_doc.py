"""docs/format.md says what cxlfs/format/layout.py does: each structure and field, both ways."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from cxlfs.format import layout, segments, superblock
from cxlfs.store import volume

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
Row = tuple[int, int, str, str]

_TYPES = {"u8": "u64", "i8": "i64", "u4": "u32", "i4": "i32", "u2": "u16"}


def sections() -> dict[str, str]:
    """The text below each ``###`` heading."""
    parts = re.split(r"^#{2,3} (.+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def documented(name: str) -> list[Row]:
    pattern = re.compile(r"^\| (\d+) \| (\d+) \| ([^|]+) \| `([^`]+)` \|", re.MULTILINE)
    found = pattern.findall(sections()[name])
    return [(int(at), int(size), kind.strip(), field) for at, size, kind, field in found]


def type_name(dtype: np.dtype[np.void] | np.dtype[np.generic]) -> str:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        inner = next((n for n, d in layout.STRUCTURES.items() if d == base), None)
        return f"{inner or type_name(base)}[{shape[0]}]"
    if dtype.kind == "S":
        return "char"
    if dtype.kind == "V":
        return "bytes"
    assert dtype.str[0] in "<|"
    return _TYPES[dtype.str[1:]]


def declared(dtype: np.dtype[np.void]) -> list[Row]:
    assert dtype.fields is not None
    return [
        (offset, field.itemsize, type_name(field), name)
        for name, (field, offset, *_) in dtype.fields.items()
    ]


@pytest.mark.parametrize("name", layout.STRUCTURES)
def test_structure(name: str) -> None:
    dtype = layout.STRUCTURES[name]
    assert documented(name) == declared(dtype)
    assert f"{dtype.itemsize} bytes." in sections()[name]


@pytest.mark.parametrize("name", layout.STRUCTURES)
def test_no_implicit_padding(name: str) -> None:
    position = 0
    for offset, size, _, _ in declared(layout.STRUCTURES[name]):
        assert offset == position
        position += size
    assert position == layout.STRUCTURES[name].itemsize


def test_every_table_is_a_structure_and_every_structure_has_a_table() -> None:
    tables = {name for name in sections() if documented(name)}
    assert tables == set(layout.STRUCTURES)
    dtypes = {id(v) for k, v in vars(layout).items() if k.endswith("_DTYPE")}
    assert dtypes == {id(dtype) for dtype in layout.STRUCTURES.values()}


def test_operation_types() -> None:
    rows = re.findall(r"^\| (\d+) \| ([a-z ]+) \| ", sections()["operation header"], re.MULTILINE)
    declared_types = {
        value: name.removeprefix("OP_").replace("_", " ").lower()
        for name, value in vars(layout).items()
        if name.startswith("OP_") and isinstance(value, int) and not name.startswith("OP_FLAG")
    }
    assert {int(number): name for number, name in rows} == declared_types


def test_image_sections() -> None:
    rows = re.findall(r"^\| (\d+) \| ([a-z]+) \| ", sections()["image section"], re.MULTILINE)
    renamed = {"crcs": "checksums", "refs": "references"}
    constants = {
        value: name.removeprefix("SECTION_").lower()
        for name, value in vars(layout).items()
        if name.startswith("SECTION_")
        and name not in ("SECTION_COUNT", "SECTION_ALIGN", "SECTION_ITEM_BYTES")
        and isinstance(value, int)
    }
    assert {int(n): name for n, name in rows} == {
        value: renamed.get(name, name) for value, name in constants.items()
    }
    assert len(constants) == layout.SECTION_COUNT


def value_of(text: str) -> int | bytes:
    """The value that a row of the table of constants has: a number, a power of two, or bytes."""
    power = re.fullmatch(r"(-?)2\^(\d+)(?: - (\d+))?", text)
    if power is not None:
        sign, exponent, less = power.groups()
        return (-1 if sign else 1) * (1 << int(exponent)) - int(less or 0)
    is_bytes = re.fullmatch(r"[0-9a-f]{2}( [0-9a-f]{2})+", text) is not None
    return bytes.fromhex(text) if is_bytes else int(text, 0)


def test_constants() -> None:
    """Every constant has a row, but for those that the text lists by their number."""
    rows = re.findall(
        r"^\| ([A-Z_, ]+) \| ([^|]+) \| [^|]*\|$", sections()["Constants"], re.MULTILINE
    )
    found = {name: value_of(text) for names, text in rows for name in names.split(", ")}
    listed = {name for name in vars(layout) if re.match(r"(OP|ROLE|SECTION)_[A-Z_]+$", name)}
    listed -= {"OP_FLAG_ASIDE", "SECTION_COUNT", "SECTION_ALIGN"}
    assert found == {
        name: value
        for name, value in vars(layout).items()
        if name.isupper() and isinstance(value, int | bytes) and name not in listed
    }


def test_roles() -> None:
    line = next(line for line in TEXT.splitlines() if line.startswith("Roles: "))
    found = {int(number): name for number, name in re.findall(r"(\d) (\w+)", line)}
    assert found == layout.ROLE_NAMES


def test_ends_of_history() -> None:
    line = next(line for line in TEXT.splitlines() if line.startswith("Ends (`death`): "))
    found = re.findall(r"(\d) ([a-z ]+)", line.split(": ")[1])
    assert {int(number): name for number, name in found} == layout.DEATHS


def test_limits() -> None:
    limits = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", sections()["Limits"], re.MULTILINE))
    least = superblock.SEGMENTS_MIN * layout.SEGMENT_SIZE_MIN + 4 * layout.UNIT_BYTES
    expected = {
        "name": f"{layout.NAME_BYTES_MAX} bytes",
        "symbolic link": f"{layout.SYMLINK_BYTES_MAX} bytes",
        "extended attribute": f"name {layout.XATTR_NAME_BYTES_MAX} bytes, "
        f"value {layout.XATTR_VALUE_BYTES_MAX >> 10} KiB",
        "names of one file": f"{layout.LINK_COUNT_MAX // 1000} 000",
        "file": f"2^{layout.FILE_SIZE_MAX.bit_length() - 1} bytes",
        "metadata image": f"{layout.IMAGE_SEGMENTS_MAX} segments",
        "label": f"{layout.LABEL_BYTES} bytes",
        "inode or extent number, LSN, epoch, generation": "2^62",
        "store": f"at least {superblock.SEGMENTS_MIN} segments: {least >> 20} MiB",
    }
    assert set(limits) - {"what", "---"} == set(expected)
    assert layout.NUMBER_LIMIT == 1 << 62
    for what, text in expected.items():
        assert text in limits[what], what


def test_numbers_in_the_text() -> None:
    """Numbers that the prose repeats."""
    assert f"*unit* is {layout.UNIT_BYTES >> 20} MiB" in TEXT
    assert f"up to {layout.RING_SLOTS_MAX} slots of {layout.SLOT_BYTES} bytes" in TEXT
    assert f"Payload begins {layout.SEGMENT_HEADER_BYTES} bytes into the segment" in TEXT
    assert f"[*i* · {layout.CHUNK_BYTES}, (*i* + 1) · {layout.CHUNK_BYTES})" in TEXT
    assert (
        f"from {layout.SEGMENT_SIZE_MIN >> 20} MiB to {layout.SEGMENT_SIZE_MAX >> 20} MiB" in TEXT
    )
    assert f"divided by {superblock.SEGMENTS_PER_STORE}" in TEXT
    assert f"at most {volume.RECORD_BYTES_MAX >> 20} MiB" in TEXT
    assert f"version {layout.FORMAT_VERSION}" in TEXT.splitlines()[0]


def test_seed_of_records() -> None:
    """``nonce`` (u64), ``epoch`` (u64) and the uuid, as the text says."""
    from cxlfs.native import crc32c

    uuid = bytes(range(16))
    data = (7).to_bytes(8, "little") + (9).to_bytes(8, "little") + uuid
    assert segments.record_seed(7, 9, uuid) == crc32c(data)
