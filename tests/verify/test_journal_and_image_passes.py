"""Passes 4 to 6: the journal in both copies, metadata images, and whether they make a state."""

from __future__ import annotations

import pytest

from cxlfs.format import layout
from cxlfs.format.operations import UnlinkOperation
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from tests.support.corrupt import (
    IMAGE_BYTES,
    Anatomy,
    Damage,
    Region,
    make_record,
    raw_record,
    seal_image,
    seal_record,
    section_rows,
)
from tests.support.stores import format_small, write_file
from tests.support.verdict import findings_of, good_picture, picture_of, short


def _records(anatomy: Anatomy, copy: int) -> list[Region]:
    return [region for region in anatomy.records(anatomy.newest) if region.copy == copy]


# --- 4: journal -----------------------------------------------------------------------------


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("place", [20, 64 + 9])
def test_record_damaged_in_one_copy(
    crashed: Anatomy, crashed_damage: Damage, copy: int, place: int
) -> None:
    record = _records(crashed, copy)[2]
    crashed_damage.flip((record.offset + place) * 8 + 3)
    found = findings_of(crashed.media)
    assert short(found) == [("journal-copy-damaged", "journal record", record.offset)]
    assert found[0].severity == "warning"
    assert f"record {record.index}" in found[0].message
    assert picture_of(crashed.media) == good_picture(closed=False)


def test_last_record_torn_in_one_copy_is_a_crash_not_damage(
    crashed: Anatomy, crashed_damage: Damage
) -> None:
    record = _records(crashed, 1)[-1]
    crashed_damage.zero(record.offset, 64)
    assert findings_of(crashed.media) == []


def test_record_damaged_in_both_copies(crashed: Anatomy, crashed_damage: Damage) -> None:
    primary, mirror = _records(crashed, 0)[2], _records(crashed, 1)[2]
    for record in (primary, mirror):
        crashed_damage.flip((record.offset + 70) * 8)
    found = findings_of(crashed.media)
    assert [finding.id for finding in found] == ["journal-record-lost", "store-incomplete"]
    assert found[0].media_offset == primary.offset
    assert {finding.severity for finding in found} == {"error"}


def test_valid_copies_that_differ(crashed: Anatomy, crashed_damage: Damage) -> None:
    primary, mirror = _records(crashed, 0)[1], _records(crashed, 1)[1]
    data = bytearray(crashed_damage.read(primary.offset, primary.length))
    data[40] ^= 1  # the time
    journal = crashed.newest.journal_segment
    assert journal is not None
    sealed = seal_record(bytes(data), crashed.header(journal), crashed.block)
    crashed_damage.write(mirror.offset, sealed)
    assert short(findings_of(crashed.media)) == [
        ("journal-copies-contradict", "journal record", mirror.offset)
    ]


def _append(anatomy: Anatomy, damage: Damage, record: bytes) -> int:
    """Behind the last record, in both copies; returns where."""
    ends = [r.offset + r.length for r in (_records(anatomy, copy)[-1] for copy in (0, 1))]
    for end in ends:
        damage.write(end, record)
    return ends[0]


def test_record_that_makes_no_sense(crashed: Anatomy, crashed_damage: Damage) -> None:
    """Its checksums are right, but there is no such operation: the state ends before it."""
    journal = crashed.newest.journal_segment
    assert journal is not None
    lsn = _records(crashed, 0)[-1].index + 1
    record = raw_record(crashed.header(journal), crashed.block, lsn, b"\xff" * 64, 1)
    offset = _append(crashed, crashed_damage, record)
    found = findings_of(crashed.media)
    assert short(found) == [
        ("journal-record-malformed", "journal record", offset),
        ("store-incomplete", "store", None),
    ]
    assert {finding.severity for finding in found} == {"error"}


def test_record_that_contradicts_the_state(crashed: Anatomy, crashed_damage: Damage) -> None:
    journal = crashed.newest.journal_segment
    assert journal is not None
    lsn = _records(crashed, 0)[-1].index + 1
    ops = [UnlinkOperation(1, b"there is no such name")]
    record = make_record(crashed.header(journal), crashed.block, lsn, ops)
    _append(crashed, crashed_damage, record)
    found = findings_of(crashed.media)
    assert short(found) == [("store-incomplete", "store", None)]
    assert f"record {lsn} contradicts the state" in found[0].message


def test_both_journal_headers_damaged(crashed: Anatomy, crashed_damage: Damage) -> None:
    newest = crashed.newest
    assert newest.journal_segment is not None
    assert newest.journal_mirror is not None
    for index in (newest.journal_segment, newest.journal_mirror):
        crashed_damage.flip((crashed.block.segment_offset(index) + 60) * 8)
    found = findings_of(crashed.media)
    assert [finding.id for finding in found] == [
        "segment-header-damaged",
        "segment-header-damaged",
        "journal-lost",
        "store-incomplete",
    ]
    assert found[2].media_offset == crashed.block.segment_offset(newest.journal_segment)


def test_fallback_journal_with_a_hole(closed: Anatomy, closed_damage: Damage) -> None:
    """Nothing is lost yet, but the fallback would not help any more."""
    assert closed.fallback is not None
    for record in closed.records(closed.fallback):
        if record.index == closed.fallback.image_lsn + 3:
            closed_damage.flip((record.offset + 70) * 8)
    found = findings_of(closed.media)
    assert [finding.id for finding in found] == ["fallback-journal-incomplete"]
    assert found[0].severity == "warning"
    assert picture_of(closed.media) == good_picture(closed=True)


@pytest.mark.parametrize("copy", [0, 1])
def test_fallback_record_damaged_in_one_copy(
    closed: Anatomy, closed_damage: Damage, copy: int
) -> None:
    assert closed.fallback is not None
    record = next(r for r in closed.records(closed.fallback) if r.copy == copy)
    closed_damage.flip((record.offset + 70) * 8)
    assert short(findings_of(closed.media)) == [
        ("journal-copy-damaged", "journal record", record.offset)
    ]


# --- 5: metadata image ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", range(9))
def test_damaged_image(closed: Anatomy, closed_damage: Damage, kind: int) -> None:
    """0: the header; the kinds of sections otherwise."""
    (piece,) = [p for p in closed.image_pieces(closed.newest) if p.index == kind]
    closed_damage.flip((piece.offset + piece.length // 2) * 8)
    found = findings_of(closed.media)
    assert [finding.id for finding in found] == ["image-damaged", "root-unusable"]
    assert found[0].structure == "metadata image"
    assert found[0].media_offset == piece.offset
    assert found[0].expected != found[0].actual
    assert {finding.severity for finding in found} == {"warning"}
    assert all(finding.repairable for finding in found)
    assert picture_of(closed.media) == good_picture(closed=True)


@pytest.mark.parametrize("kind", [0, layout.SECTION_INODES, layout.SECTION_STRINGS])
def test_damaged_fallback_image(closed: Anatomy, closed_damage: Damage, kind: int) -> None:
    assert closed.fallback is not None
    (piece,) = [p for p in closed.image_pieces(closed.fallback) if p.index == kind]
    closed_damage.flip((piece.offset + piece.length // 2) * 8)
    found = findings_of(closed.media)
    assert short(found) == [("image-fallback-damaged", "metadata image", piece.offset)]
    assert found[0].severity == "warning"


def test_damaged_image_without_a_fallback() -> None:
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    anatomy = Anatomy(media)
    piece = anatomy.image_pieces(anatomy.newest)[1]
    with Damage(media) as damage:
        damage.flip(piece.offset * 8)
        found = findings_of(media)
    assert [finding.id for finding in found] == ["image-damaged", "store-unusable"]
    assert {finding.severity for finding in found} == {"error"}
    assert not found[0].repairable


def test_image_of_an_older_root_put_back(closed: Anatomy, closed_damage: Damage) -> None:
    """Everything in it is valid, but it is not the one that the root names."""
    assert closed.fallback is not None
    size = closed.block.segment_payload_bytes
    starts = [
        closed.block.segment_offset(root.image_segments[0]) + layout.SEGMENT_HEADER_BYTES
        for root in (closed.fallback, closed.newest)
    ]
    closed_damage.write(starts[1], closed_damage.read(starts[0], size))
    found = findings_of(closed.media)
    assert [finding.id for finding in found] == ["image-damaged", "root-unusable"]
    assert "not the image that the root names" in found[0].message


# --- 6: state -------------------------------------------------------------------------------


def test_image_that_contradicts_itself_and_no_fallback() -> None:
    """Right checksums everywhere: the passes over its columns say what is wrong."""
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    store = Store.open(media)
    write_file(store, 1, b"file", b"x" * 5000)
    store.close()
    anatomy = Anatomy(media)
    with Damage(media) as damage:
        for root in (anatomy.newest, anatomy.fallback):
            assert root is not None
            for offset, row in section_rows(anatomy, root, layout.SECTION_INODES):
                if int(row["ino"]) == 1:
                    damage.write(offset + 8, (0o100644).to_bytes(4, "little"))
            seal_image(damage, anatomy, root)
        found = findings_of(media)
    ids = [finding.id for finding in found]
    assert "store-unusable" in ids
    assert ("inode-impossible", "inode", 1) in [(f.id, f.structure, f.ino) for f in found]
