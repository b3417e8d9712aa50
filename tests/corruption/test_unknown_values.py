"""Test how a program treats values of later versions: the table in docs/format.md, row by row.

Each test plants a value with right checksums into a store that was not closed, opens the store, and
compares the outcome with the word in the table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import UnsupportedFormatError
from cxlfs.format import layout, operations, roots, segments
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from tests.support.corrupt import (
    Anatomy,
    Damage,
    raw_record,
    seal_image,
    seal_record,
    seal_superblock,
    section_rows,
)
from tests.support.stores import picture
from tests.support.verdict import Picture, findings_of, good_picture, good_store

DOCUMENT = Path(__file__).parents[2] / "docs" / "format.md"
HIGH = 1 << 13
"""A value, or a bit, that no version has yet; it fits every field."""


@pytest.fixture
def store() -> Anatomy:
    return good_store(closed=False)


@pytest.fixture
def damage(store: Anatomy) -> Iterator[Damage]:
    with Damage(store.media) as damage:
        yield damage


# --- planting -------------------------------------------------------------------------------


def _superblock(name: str, value: int) -> Callable[[Anatomy, Damage], None]:
    def plant(store: Anatomy, damage: Damage) -> None:
        for region in store.superblocks():
            row = np.frombuffer(damage.read(region.offset, 512), layout.SUPERBLOCK_DTYPE).copy()
            row[name] = value
            damage.write(region.offset, seal_superblock(row.tobytes()))

    return plant


def _root_flag(store: Anatomy, damage: Damage) -> None:
    for slot in store.slots:
        if slot.root == store.newest:
            changed = dataclasses.replace(slot.root, flags=slot.root.flags | HIGH)
            damage.write(slot.media_offset, roots.encode(changed, store.block.uuid))


def _role(store: Anatomy, damage: Damage) -> None:
    assert store.newest.journal_segment is not None
    header = dataclasses.replace(store.header(store.newest.journal_segment), role=HIGH)
    offset = store.block.segment_offset(header.index)
    damage.write(offset, segments.encode(header, store.block.uuid))


def _last_records(store: Anatomy, damage: Damage, change: Callable[[bytearray], object]) -> None:
    assert store.newest.journal_segment is not None
    header = store.header(store.newest.journal_segment)
    for region in store.records(store.newest)[-2:]:
        data = bytearray(damage.read(region.offset, region.length))
        change(data)
        damage.write(region.offset, seal_record(bytes(data), header, store.block))


def _record_type(store: Anatomy, damage: Damage) -> None:
    def change(data: bytearray) -> None:
        np.frombuffer(data, layout.RECORD_DTYPE, count=1)["type"] = HIGH

    _last_records(store, damage, change)


def _operation(field: str) -> Callable[[Anatomy, Damage], None]:
    """Plant a value in the header of the first operation of the last record."""

    def change(data: bytearray) -> None:
        first = layout.RECORD_DTYPE.itemsize
        np.frombuffer(data, layout.OPERATION_DTYPE, count=1, offset=first)[field] |= HIGH

    return lambda store, damage: _last_records(store, damage, change)


def _inode_flag(store: Anatomy, damage: Damage) -> None:
    """Plant a record that sets a flag of the root directory, after the others."""
    assert store.newest.journal_segment is not None
    header = store.header(store.newest.journal_segment)
    op = operations.InodeOperation(1, 0o40755, 0, 0, 0, HIGH, 1, 1, 1, 1)
    for region in store.records(store.newest)[-2:]:
        record = raw_record(header, store.block, region.index, operations.encode([op]), 1)
        damage.write(region.offset, record)


def _image_inode_flag(store: Anatomy, damage: Damage) -> None:
    offset, row = next(section_rows(store, store.newest, layout.SECTION_INODES))
    changed = row.copy()
    changed["flags"] |= HIGH
    damage.write(offset, changed.tobytes())
    seal_image(damage, store, store.newest)


def _section_kind(store: Anatomy, damage: Damage) -> None:
    start = store.block.segment_offset(store.newest.image_segments[0])
    start += layout.SEGMENT_HEADER_BYTES
    head = np.frombuffer(damage.read(start, 512), layout.IMAGE_DTYPE).copy()
    head["sections"]["kind"][0, 0] = HIGH
    damage.write(start, head.tobytes())
    seal_image(damage, store, store.newest)


def _hidden_attribute(store: Anatomy, damage: Damage) -> None:
    assert store.newest.journal_segment is not None
    header = store.header(store.newest.journal_segment)
    op = operations.XattrSetOperation(1, layout.XATTR_HIDDEN_PREFIX + b"later", b"\xff")
    last = store.records(store.newest)[-2:]
    for region in last:
        payload = operations.encode([op])
        record = raw_record(header, store.block, region.index + 1, payload, 1)
        damage.write(region.offset + region.length, record)


def _reserved(store: Anatomy, damage: Damage) -> None:
    def change(data: bytearray) -> None:
        np.frombuffer(data, layout.RECORD_DTYPE, count=1)["reserved"] = HIGH

    _last_records(store, damage, change)


PLANTS: dict[str, Callable[[Anatomy, Damage], None]] = {
    "`format_version`": _superblock("format_version", HIGH),
    "bit of `incompat`": _superblock("incompat", HIGH),
    "bit of `read_only_compat`": _superblock("read_only_compat", HIGH),
    "bit of `compat`": _superblock("compat", HIGH),
    "flag of a root": _root_flag,
    "role of a segment": _role,
    "type of a record": _record_type,
    "type of an operation": _operation("type"),
    "flag of an operation": _operation("flags"),
    "flag of an inode in an operation": _inode_flag,
    "flag of an inode in an image": _image_inode_flag,
    "kind of an image section": _section_kind,
    "attribute `trusted.cxlfs.*`": _hidden_attribute,
    "reserved byte": _reserved,
}


# --- comparing ------------------------------------------------------------------------------


def documented() -> dict[str, str]:
    """The first word of the second column of the table, by the first column."""
    text = DOCUMENT.read_text(encoding="utf-8")
    part = text.split("\n## Unknown values\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| (\w[\w-]*)[^|]* \|", part, re.MULTILINE)
    return {what: word for what, word in rows if what != "unknown value"}


def outcome(media: MemoryMedia) -> tuple[str, Picture | None]:
    """Open the store for writing; return the word for the outcome, and what a user sees."""
    findings = findings_of(media, structure_only=True)
    try:
        opened = Store.open(media)
    except UnsupportedFormatError:
        return "refused", None
    seen = _without_hidden(picture(opened))
    if opened.read_only:
        word = "incomplete" if opened.recovery.lost else "read-only"
    else:
        word = "damage" if findings else "ignored"
    opened.abandon()
    return word, seen


def _without_hidden(seen: Picture) -> Picture:
    """Return a picture without the attributes that the store keeps for itself."""
    return {
        path: dataclasses.replace(
            entry,
            xattrs=tuple(
                item for item in entry.xattrs if not item[0].startswith(layout.XATTR_HIDDEN_PREFIX)
            ),
        )
        for path, entry in seen.items()
    }


@pytest.mark.parametrize("what", PLANTS)
def test_unknown_value(store: Anatomy, damage: Damage, what: str) -> None:
    PLANTS[what](store, damage)
    media = MemoryMedia(store.media.size_bytes)
    media.unguarded_memory()[:] = store.media.unguarded_memory()
    word, seen = outcome(media)
    media.close()
    assert word == documented()[what]
    if word not in ("refused", "incomplete"):
        assert seen == _without_hidden(good_picture(closed=False))


def test_every_row_is_tested() -> None:
    assert documented().keys() == PLANTS.keys()
