"""The reader of docs/: its structures against the code's, its program, damage, hostile stores."""

from __future__ import annotations

import ast
import io
import json
import lzma
import random
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cxlfs.format import layout
from cxlfs.native import crc32c
from tests.golden.make import IMAGE, text
from tests.support import reader
from tests.support.repository import ROOT

Image = bytearray
Captured = pytest.CaptureFixture[str]
structures = reader.load("reader_structures")
program = reader.load()
FLIPS = 150
UNREAD = ("device", "history")
"""Structures that the reader does not need for what is committed."""


@pytest.fixture
def image() -> Image:
    return bytearray(lzma.decompress(IMAGE.read_bytes()))


def files_of(store: Any) -> dict[bytes, bytes]:
    return {
        path: store.state.read(inode.content)
        for path, inode in store.state.walk()
        if inode.kind == "file"
    }


# --- what it is made of ---------------------------------------------------------------------


def test_it_needs_numpy_and_the_standard_library_alone() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", *reader.NAMES}
    for name in reader.NAMES:
        tree = ast.parse((ROOT / "docs" / f"{name}.py").read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0
                assert str(node.module).split(".")[0] in allowed, name
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, name


def test_every_python_file_beside_the_documents_belongs_to_it() -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.py")} == set(reader.NAMES)


def fields(dtype: np.dtype[np.void]) -> dict[str, tuple[int, int]]:
    assert dtype.fields is not None
    return {name: (offset, field.itemsize) for name, (field, offset, *_) in dtype.fields.items()}


@pytest.mark.parametrize("name", [n for n in layout.STRUCTURES if not n.startswith(UNREAD)])
def test_structure(name: str) -> None:
    short = {"segment header": "SEGMENT", "record header": "RECORD", "image header": "IMAGE"}
    short |= {"operation header": "OPERATION", "image section": "SECTION"}
    named = name.replace("operation ", "op ").replace(" ", "_").upper()
    mine = getattr(structures, short.get(name, named))
    assert fields(mine) == fields(layout.STRUCTURES[name])
    signed = {field for field in mine.names if mine[field].kind == "i"}
    assert signed == {field for field in mine.names if layout.STRUCTURES[name][field].kind == "i"}


def test_constants() -> None:
    known = {
        name: value
        for name, value in vars(structures).items()
        if name.isupper() and isinstance(value, int) and hasattr(layout, name)
    }
    assert {"RECORD_MAGIC", "NO_SEGMENT", "FILE_SIZE_MAX", "ROLE_JOURNAL"} <= set(known)
    assert known == {name: getattr(layout, name) for name in known}
    assert structures.UNITS_BYTES == (layout.UNIT_BYTES, layout.UNIT_BYTES_TEST)
    items = {kind: dtype.itemsize for kind, dtype in structures.SECTION_ITEMS.items()}
    assert items == layout.SECTION_ITEM_BYTES


@pytest.mark.parametrize("length", [0, 1, 3, 64, 511, 512, 513, 1000, 4096, 65536, 100_001])
def test_checksum(length: int, rng: random.Random) -> None:
    data = rng.randbytes(length)
    assert structures.crc32c(data) == crc32c(data)
    assert structures.crc32c(data, 0x12345678) == crc32c(data, 0x12345678)


# --- the program ----------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["reader.py", *map(str, arguments)])
    code = program.main()
    assert isinstance(code, int)
    return code


def test_list(
    image: Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "store.img"
    source.write_bytes(image)
    assert run(monkeypatch, source) == 0
    shown, errors = capsys.readouterr()
    lines = shown.splitlines()
    assert errors == ""
    assert lines[0].startswith("drwxr-xr-x")
    assert any(line.endswith(" /latest -> step-0001") for line in lines)
    assert any("12345 /plain" in line for line in lines)
    assert any("/log [incomplete: its writer did not close it]" in line for line in lines)
    assert any("/step-0001/shard-1 [a version is kept aside: 3000 bytes]" in x for x in lines)
    assert source.read_bytes() == image


def test_json(
    image: Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "store.img"
    source.write_bytes(image)
    assert run(monkeypatch, source, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    entries = {entry["path"]: entry for entry in found["entries"]}
    assert (found["last_lsn"], found["problems"]) == (21, [])
    assert entries["/sparse"]["size"] == 300_008
    assert entries["/sparse"]["xattrs"] == {"user.note": bytes(range(256)).hex()}
    assert entries["/latest"]["target"] == "step-0001"


def test_extract(image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = tmp_path / "store.img", tmp_path / "out"
    source.write_bytes(image)
    assert run(monkeypatch, source, "--extract", target) == 0
    assert (target / "plain").read_bytes() == text(12_345, b"overwritten")
    sparse = (target / "sparse").read_bytes()
    assert (len(sparse), sparse[70_000:70_013]) == (300_008, b"in the middle")
    assert (target / "hard link").samefile(target / "step-0001" / "shard-0")
    assert (target / "latest").readlink() == Path("step-0001")
    assert (target / "step-0001").stat().st_mtime_ns == 1_700_000_000_000_000_001
    assert stat.S_IMODE((target / "step-0001").stat().st_mode) == 0o750
    assert run(monkeypatch, source, "--extract", target) == 2  # nothing is written over


def test_what_is_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    source = tmp_path / "store.img"
    for content in (b"", b"x" * 100, bytes(1 << 20)):
        source.write_bytes(content)
        assert run(monkeypatch, source) == 2
        assert "no superblock is good" in capsys.readouterr().err
    assert run(monkeypatch, tmp_path / "missing") == 2


def test_names_do_not_reach_the_terminal_as_they_are() -> None:
    assert program._shown(b"a\x1b[2Jb\xff\n") == "a\\x1b[2Jb\\udcff\\n"


# --- damage ---------------------------------------------------------------------------------


def parts(image: Image) -> tuple[Any, Any]:
    """Superblock and newest root."""
    medium = structures.Medium(io.BytesIO(image))
    block = structures.read_superblock(medium)
    return block, structures.read_roots(medium, block)[0][0]


def flip(image: Image, *offsets: int) -> None:
    for offset in offsets:
        image[offset] ^= 0xFF


Places = Callable[[Any, Any], list[int]]


@pytest.mark.parametrize(
    "places",
    [
        lambda block, _root: [block.copy_offsets[0] + 50, block.copy_offsets[2] + 50],
        lambda block, root: [
            block.copy_offsets[1] + (1 + root.generation % block.ring_slots) * 4096 + 9
        ],
        lambda block, root: [block.segment_offset(root.journal_segment) + 30],
        lambda block, root: [block.segment_offset(root.journal_mirror) + 4096 + 80],
        lambda block, root: [block.segment_offset(root.journal_segment) + 4096 + 80],
    ],
    ids=["superblocks", "ring", "journal header", "mirror", "primary"],
)
def test_damage_of_what_has_a_copy(image: Image, places: Places) -> None:
    good = reader.read(image)
    flip(image, *places(*parts(image)))
    found = reader.read(image)
    assert found.problems == []
    assert reader.state_of(found) == reader.state_of(good)


def test_record_lost_in_both_copies(image: Image) -> None:
    block, root = parts(image)
    for index in (root.journal_segment, root.journal_mirror):
        flip(image, block.segment_offset(index) + 4096 + 80)
    found = reader.read(image)
    assert found.problems == [
        f"record {root.image_lsn + 1} is damaged in both copies: later changes are missing"
    ]
    assert found.state.last_lsn == root.image_lsn


def test_damaged_image_without_another_root(image: Image) -> None:
    block, root = parts(image)
    flip(image, block.segment_offset(root.image_segments[0]) + 4096 + 600)
    found = reader.read(image)  # the root before that has an image too, and a journal behind it
    assert f"root {root.generation} cannot be used" in found.problems[0]
    assert found.state.last_lsn == 21


def test_damaged_content(
    image: Image,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = reader.read(image)
    plain = next(inode for path, inode in found.state.walk() if path == b"/plain")
    _, _, number, inside = plain.content.references[0]
    flip(image, found.state.extents[number].media_offset + inside + 5000)
    state = reader.read(image).state
    with pytest.raises(structures.ReaderError, match="the content is damaged at 4096"):
        state.read(state.inodes[plain.ino].content)
    source, target = tmp_path / "store.img", tmp_path / "out"
    source.write_bytes(image)
    assert run(monkeypatch, source, "--extract", target) == 1
    assert "/plain: damaged at 4096, zeros stand there" in capsys.readouterr().err
    expected = bytearray(text(12_345, b"overwritten"))
    expected[4096:8192] = bytes(4096)
    assert (target / "plain").read_bytes() == expected


class Broken(io.BytesIO):
    """A page of it cannot be read."""

    bad = range(0)

    def read(self, size: int | None = -1, /) -> bytes:
        begin = self.tell()
        if begin < self.bad.stop and begin + (size or 0) > self.bad.start:
            raise OSError(5, "an uncorrectable error")
        return super().read(size)


def test_what_cannot_be_read_has_a_copy(image: Image) -> None:
    block, root = parts(image)
    stream = Broken(image)
    start = block.segment_offset(root.journal_segment) + 4096
    stream.bad = range(start, start + 4096)
    found = program.Store(stream)
    assert found.problems == []
    assert files_of(found) == files_of(reader.read(image))


# --- hostile stores -------------------------------------------------------------------------


def used_places(image: Image) -> list[int]:
    """Offsets in superblocks, roots, headers, records and the image."""
    block, root = parts(image)
    starts = [*block.copy_offsets, *(offset + 4096 for offset in block.copy_offsets[1:3])]
    starts += [block.segment_offset(index) for index in range(block.segment_count)]
    starts += [
        block.segment_offset(index) + 4096
        for index in (*root.image_segments, root.journal_segment, root.journal_mirror)
    ]
    return [start + at for start in starts for at in range(0, 2048, 4) if start + at < len(image)]


def test_flipped_bits(image: Image, rng: random.Random) -> None:
    """Whatever is flipped: a state, or an error of the reader's own; no content is wrong."""
    good = set(files_of(reader.read(image)).values())
    places = used_places(image)
    for _ in range(FLIPS):
        changed = bytearray(image)
        for place in rng.sample(places, 3):
            changed[place + rng.randrange(4)] ^= 1 << rng.randrange(8)
        try:
            found = reader.read(changed)
        except structures.ReaderError:
            continue
        old = {b"plain", b"shard", b"overwritten"}
        for content in files_of(found).values():
            assert content in good or content[:5] in {word[:5] for word in old}


def with_record(image: Image, payload: bytes, count: int, kind: int = 1) -> Image:
    """The image with one more record at the end of both copies, whose checksums are right."""
    block, root = parts(image)
    store = reader.read(image)
    journal = store._journals[-1]
    padded = payload.ljust(-(-len(payload) // 64) * 64, b"\0")
    lsn = store.state.last_lsn + 1
    numbers = (len(padded) + 64, len(payload), lsn, root.journal_epoch, lsn - 1, 0)
    head = struct.pack("<IHHIIQQQq", layout.RECORD_MAGIC, kind, count, *numbers)
    head += struct.pack("<III", crc32c(padded, journal._seed), 0, 0)
    head += struct.pack("<I", crc32c(head, journal._seed))
    for index in (root.journal_segment, root.journal_mirror):
        start = block.segment_offset(index) + journal._end
        image[start : start + len(head + padded)] = head + padded
    return image


def operation(kind: int, body: bytes, flags: int = 0) -> bytes:
    body = body.ljust(-(-len(body) // 8) * 8, b"\0")
    return struct.pack("<HHI", kind, flags, 8 + len(body)) + body


def named(kind: int, parent: int, ino: int, name: bytes) -> bytes:
    return operation(kind, struct.pack("<QQII", parent, ino, len(name), 0) + name)


PLAIN, DIRECTORY = 2, 3
BAD = {
    "an unknown operation": operation(99, b""),
    "an unknown flag": operation(8, struct.pack("<QQQQ", PLAIN, 0, 0, 0), 4),
    "no inode": operation(10, struct.pack("<Q", 999)),
    "a directory's content": operation(8, struct.pack("<QQQQ", DIRECTORY, 0, 5, 0)),
    "nothing to promote": operation(9, struct.pack("<Q", PLAIN)),
    "a name with a slash": named(2, 1, PLAIN, b"a/b"),
    "a name that leads up": named(2, 1, PLAIN, b".."),
    "a second name of a directory": named(2, 1, DIRECTORY, b"again"),
    "no such name": named(3, 1, 0, b"missing"),
    "a directory that loses its name": named(3, 1, 0, b"step-0001"),
    "a huge file": operation(8, struct.pack("<QQQQ", PLAIN, 0, 1 << 60, 0)),
    "no extent": operation(8, struct.pack("<QQQQ8Q", PLAIN, 0, 9, 1, 0, 9, 999, 0, 0, 0, 0, 0)),
    "references that are missing": operation(8, struct.pack("<QQQQ", PLAIN, 0, 9, 1 << 40)),
    "an extent outside": operation(7, struct.pack("<QQQIII", 999, 1 << 50, 4096, 0, 1, 7)),
    "an extent without checksums": operation(7, struct.pack("<QQQII", 999, 40960, 4096, 0, 9)),
    "a move to nowhere": operation(11, struct.pack("<QQQQQQQ", 1, 0, 9, 999, 0, 1, PLAIN)),
    "inodes that are missing": operation(11, struct.pack("<QQQQQQ", 1, 0, 9, 1, 0, 1 << 50)),
    "another type": operation(1, struct.pack("<QIIIIII4q", PLAIN, 0o40755, *[0] * 9)),
    "an operation that is too long": struct.pack("<HHI", 10, 0, 1 << 20),
    "an operation that is too short": struct.pack("<HHI", 10, 0, 0),
}


@pytest.mark.parametrize("what", BAD)
def test_record_that_contradicts_the_state(image: Image, what: str) -> None:
    good = reader.read(image)
    found = reader.read(with_record(image, BAD[what], 1))
    assert len(found.problems) == 1
    assert found.problems[0].startswith("record 22 contradicts the state: ")
    assert reader.state_of(found) == reader.state_of(good)


def test_record_of_an_unknown_type(image: Image) -> None:
    found = reader.read(with_record(image, b"", 0, kind=77))
    assert found.problems == ["record 22 has the unknown type 77: later changes are missing"]


def test_record_with_a_file(image: Image) -> None:
    """The forged records of these tests are good ones but for what is wrong on purpose."""
    store = reader.read(image)
    number = max(store.state.inodes) + 1
    attributes = struct.pack("<QIIIIII4q", number, 0o100600, 1, 2, 0, 0, 0, 3, 4, 5, 6)
    payload = operation(1, attributes) + named(2, 1, number, b"forged")
    found = reader.read(with_record(image, payload, 2))
    assert found.problems == []
    assert dict(found.state.walk())[b"/forged"].mtime_ns == 4


def test_work_is_bounded(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structures, "WORK_MAX", 1000)
    with pytest.raises(structures.ReaderError, match="more work than any honest store"):
        reader.read(image)


def test_memory_is_bounded(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader.load("reader_state"), "IMAGE_BYTES_MAX", 1000)
    with pytest.raises(structures.ReaderError, match="too many"):
        reader.read(image)
