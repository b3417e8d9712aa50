"""Passes 1 to 3: superblock copies, root rings, segment headers."""

from __future__ import annotations

import dataclasses

import pytest

from cxlfs.format import image_search, layout, roots, segments, superblock
from cxlfs.media import MemoryMedia
from cxlfs.store import Store
from cxlfs.verify import PASSES, Progress, run_passes, run_steps
from tests.support.corrupt import IMAGE_BYTES, Anatomy, Damage, populated_media
from tests.support.stores import format_small, write_file
from tests.support.verdict import findings_of, good_picture, picture_of, short

SLOT_BYTES = layout.ROOT_DTYPE.itemsize


def test_nothing_is_found_in_good_stores(closed: Anatomy, crashed: Anatomy) -> None:
    assert findings_of(closed.media) == []
    assert findings_of(crashed.media) == []


def test_nothing_is_found_in_an_empty_store() -> None:
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    assert findings_of(media) == []


def test_every_pass_runs_in_its_order(closed: Anatomy) -> None:
    told: list[Progress] = []
    assert list(run_passes(closed.media, structure_only=False, progress=told.append)) == []
    ends = [p for p in told if p.finished]
    assert [(p.pass_id, p.name) for p in ends] == [(each.id, each.name) for each in PASSES]
    assert all(p.skipped is None and p.done == p.total > 0 for p in ends)
    assert [p.pass_id for p in ends if p.unit == "bytes"] == [5, 11]


def test_structure_only_reads_no_data(closed: Anatomy) -> None:
    steps = run_steps(closed.media, structure_only=True)
    ran = {step.pass_id for step in steps if isinstance(step, Progress)}
    assert ran == {each.id for each in PASSES if not each.data}


def test_verifying_changes_no_byte(closed: Anatomy, crashed: Anatomy) -> None:
    for anatomy in (closed, crashed):
        before = bytes(anatomy.media.unguarded_memory())
        findings_of(anatomy.media)
        assert bytes(anatomy.media.unguarded_memory()) == before


# --- 1: superblock --------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(4))
def test_damaged_superblock_copy(closed: Anatomy, closed_damage: Damage, number: int) -> None:
    offset = closed.block.copy_offsets[number]
    closed_damage.flip((offset + 130) * 8)
    found = findings_of(closed.media)
    assert short(found) == [("superblock-copy-damaged", "superblock", offset)]
    assert found[0].severity == "warning"
    assert found[0].repairable
    assert "checksum" in found[0].message
    assert picture_of(closed.media) == good_picture(closed=True)


def test_superblock_copy_in_the_wrong_place(closed: Anatomy, closed_damage: Damage) -> None:
    zero, _, _, three = closed.block.copy_offsets
    closed_damage.write(three, closed_damage.read(zero, 512))
    found = findings_of(closed.media)
    assert short(found) == [("superblock-copy-damaged", "superblock", three)]
    assert "it says that it is copy 0" in found[0].message


def test_superblock_copy_of_another_store(closed: Anatomy, closed_damage: Damage) -> None:
    other = dataclasses.replace(closed.block, uuid=bytes(16))
    offset = closed.block.copy_offsets[0]
    closed_damage.write(offset, superblock.encode(other, 0))
    found = findings_of(closed.media)
    assert short(found) == [("superblock-copy-damaged", "superblock", offset)]
    assert "another store" in found[0].message


def test_no_superblock_at_all(closed: Anatomy, closed_damage: Damage) -> None:
    for offset in closed.block.copy_offsets:
        closed_damage.zero(offset, 512)
    told: list[Progress] = []
    found = list(run_passes(closed.media, structure_only=False, progress=told.append))
    assert short(found) == [("superblock-unusable", "superblock", None)]
    assert {p.pass_id for p in told if p.skipped} == {each.id for each in PASSES[1:]}


def test_superblock_copies_in_two_camps(closed: Anatomy, closed_damage: Damage) -> None:
    other = dataclasses.replace(closed.block, uuid=bytes(16))
    for number in (0, 1):
        closed_damage.write(closed.block.copy_offsets[number], superblock.encode(other, number))
    found = findings_of(closed.media)
    assert short(found) == [("superblock-unusable", "superblock", None)]
    assert found[0].severity == "error"


# --- 2: roots -------------------------------------------------------------------------------


@pytest.mark.parametrize("ring", [0, 1])
@pytest.mark.parametrize("age", [0, 1, 2])
def test_damaged_root_in_one_ring(
    closed: Anatomy, closed_damage: Damage, ring: int, age: int
) -> None:
    slot = _slot(closed, closed.newest.generation - age, ring)
    closed_damage.flip((slot.media_offset + 100) * 8)
    found = findings_of(closed.media)
    assert short(found) == [("root-copy-damaged", "root", slot.media_offset)]
    assert found[0].severity == "warning"
    assert picture_of(closed.media) == good_picture(closed=True)


@pytest.mark.parametrize("ring", [0, 1])
def test_blank_root_in_one_ring(closed: Anatomy, closed_damage: Damage, ring: int) -> None:
    """Of the newest root the second ring may be behind: the crash came between the two."""
    slot = _slot(closed, closed.newest.generation - 1, ring)
    closed_damage.zero(slot.media_offset, SLOT_BYTES)
    assert short(findings_of(closed.media)) == [("root-copy-damaged", "root", slot.media_offset)]


def test_second_ring_one_root_behind_is_a_crash_not_damage() -> None:
    media = populated_media(closed=False)
    store = Store.open(media)
    second = Anatomy(media).block.ring_offsets[1]
    before = media.read(second, 3 * layout.SLOT_BYTES)
    store.volume.rollover()
    store.abandon()
    media.store(second, before)
    assert findings_of(media) == []
    Store.open(media).close()
    assert findings_of(media) == []


def test_torn_roots_are_a_crash_not_damage(crashed: Anatomy, crashed_damage: Damage) -> None:
    """The next one in the first ring, the last one in the second."""
    for slot in (
        _slot(crashed, crashed.newest.generation - crashed.block.ring_slots + 1, 0),
        _slot(crashed, crashed.newest.generation, 1),
    ):
        crashed_damage.zero(slot.media_offset, 64)
        assert findings_of(crashed.media) == []


@pytest.mark.parametrize("ring", [0, 1])
def test_torn_roots_anywhere_else_are_damage(
    crashed: Anatomy, crashed_damage: Damage, ring: int
) -> None:
    slot = _slot(crashed, crashed.newest.generation - 1, ring)
    crashed_damage.zero(slot.media_offset, 64)
    assert short(findings_of(crashed.media)) == [("root-copy-damaged", "root", slot.media_offset)]


def test_older_root_lost_in_both_rings(closed: Anatomy, closed_damage: Damage) -> None:
    generation = closed.newest.generation - 1
    places = [_slot(closed, generation, ring).media_offset for ring in (0, 1)]
    for place in places:
        closed_damage.flip((place + 9) * 8)
    found = findings_of(closed.media)
    assert short(found) == [("root-lost", "root", places[0])]
    assert found[0].severity == "warning"
    assert picture_of(closed.media) == good_picture(closed=True)


def test_newest_root_lost_in_both_rings(crashed: Anatomy, crashed_damage: Damage) -> None:
    """The journal of the root before leads to the same state."""
    places = [_slot(crashed, crashed.newest.generation, ring).media_offset for ring in (0, 1)]
    for place in places:
        crashed_damage.flip((place + 9) * 8)
    found = findings_of(crashed.media)
    assert short(found) == [("root-lost", "root", places[0])]
    assert picture_of(crashed.media) == good_picture(closed=False)


def test_no_root_at_all(closed: Anatomy, closed_damage: Damage) -> None:
    for slot in closed.slots:
        closed_damage.zero(slot.media_offset, SLOT_BYTES)
    told: list[Progress] = []
    found = list(run_passes(closed.media, structure_only=False, progress=told.append))
    image = closed.block.segment_offset(closed.newest.image_segments[0])
    assert short(found) == [("root-missing", "root", image)]
    assert found[0].repairable
    assert {p.pass_id for p in told if p.skipped} == set(range(3, 12))


def test_no_root_and_no_image(closed: Anatomy, closed_damage: Damage) -> None:
    for slot in closed.slots:
        closed_damage.zero(slot.media_offset, SLOT_BYTES)
    for index in range(closed.block.segment_count):
        if (
            getattr(segments.read(closed.media, closed.block, index), "role", 0)
            == layout.ROLE_IMAGE
        ):
            offset = closed.block.segment_offset(index) + layout.SEGMENT_HEADER_BYTES
            closed_damage.flip((offset + 600) * 8)
    assert short(findings_of(closed.media)) == [("root-missing", "root", None)]


def test_no_root_and_an_image_that_is_too_old(crashed: Anatomy, crashed_damage: Damage) -> None:
    """The newest image is lost, and a record of the journal that leads to it."""
    for slot in crashed.slots:
        crashed_damage.zero(slot.media_offset, SLOT_BYTES)
    assert crashed.fallback is not None
    for record in crashed.records(crashed.fallback)[:2]:
        crashed_damage.zero(record.offset, 64)
    assert image_search.find_root(crashed.media, crashed.block) is not None
    image = crashed.block.segment_offset(crashed.newest.image_segments[0])
    crashed_damage.zero(image + layout.SEGMENT_HEADER_BYTES, 64)
    assert image_search.find_root(crashed.media, crashed.block) is None
    assert short(findings_of(crashed.media)) == [("root-missing", "root", None)]


def test_no_root_and_a_hostile_image(closed: Anatomy, closed_damage: Damage) -> None:
    """A section that ends anywhere costs neither time nor memory."""
    for slot in closed.slots:
        closed_damage.zero(slot.media_offset, SLOT_BYTES)
    offset = closed.block.segment_offset(closed.newest.image_segments[0])
    offset += layout.SEGMENT_HEADER_BYTES + 56 + 8
    closed_damage.write(offset, b"\xff" * 16)
    found = image_search.find_root(closed.media, closed.block)
    assert found is not None
    assert found.image_lsn < closed.newest.image_lsn


def test_roots_that_contradict_each_other(closed: Anatomy, closed_damage: Damage) -> None:
    other = dataclasses.replace(closed.newest, written_ns=1)
    slot = _slot(closed, closed.newest.generation, 1)
    closed_damage.write(slot.media_offset, roots.encode(other, closed.block.uuid))
    found = findings_of(closed.media)
    assert short(found) == [("root-rings-contradict", "root", slot.media_offset)]
    assert found[0].severity == "error"


def test_newest_root_taken_back_in_both_rings() -> None:
    """The root before says that the store was closed, but there is a journal behind it."""
    media = populated_media(closed=True)
    store = Store.open(media)
    write_file(store, 1, b"later", b"data")
    store.abandon()
    anatomy = Anatomy(media)
    journal = anatomy.newest.journal_segment
    assert journal is not None
    with Damage(media) as damage:
        for ring in (0, 1):
            slot = _slot(anatomy, anatomy.newest.generation, ring)
            damage.zero(slot.media_offset, SLOT_BYTES)
        found = findings_of(media)
    assert [finding.id for finding in found] == ["root-outdated"]
    assert found[0].severity == "error"


# --- 3: segment headers ---------------------------------------------------------------------


def _headers(anatomy: Anatomy, role: int) -> list[int]:
    found = [region.index for region in anatomy.segment_headers()]
    return [index for index in found if anatomy.header(index).role == role]


def test_damaged_header_of_a_data_segment(closed: Anatomy, closed_damage: Damage) -> None:
    index = _headers(closed, layout.ROLE_DATA)[0]
    offset = closed.block.segment_offset(index)
    closed_damage.flip((offset + 30) * 8)
    found = findings_of(closed.media)
    assert short(found) == [("segment-header-damaged", "segment header", offset)]
    assert f"data segment {index}" in found[0].message
    assert picture_of(closed.media) == good_picture(closed=True)


@pytest.mark.parametrize("which", [0, 1])
def test_damaged_header_of_a_journal_copy(
    crashed: Anatomy, crashed_damage: Damage, which: int
) -> None:
    index = (crashed.newest.journal_segment, crashed.newest.journal_mirror)[which]
    assert index is not None
    offset = crashed.block.segment_offset(index)
    crashed_damage.flip((offset + 30) * 8)
    assert short(findings_of(crashed.media)) == [
        ("segment-header-damaged", "segment header", offset)
    ]
    assert picture_of(crashed.media) == good_picture(closed=False)


def test_damaged_header_of_the_image(closed: Anatomy, closed_damage: Damage) -> None:
    """The fallback image and its journal lead to the same state."""
    offset = closed.block.segment_offset(closed.newest.image_segments[0])
    closed_damage.flip((offset + 30) * 8)
    found = findings_of(closed.media)
    assert [finding.id for finding in found] == ["segment-header-damaged", "root-unusable"]
    assert found[0].media_offset == offset
    assert {finding.severity for finding in found} == {"warning"}
    assert picture_of(closed.media) == good_picture(closed=True)


def test_valid_header_of_another_use(crashed: Anatomy, crashed_damage: Damage) -> None:
    index = _headers(crashed, layout.ROLE_DATA)[0]
    header = dataclasses.replace(crashed.header(index), role=layout.ROLE_IMAGE)
    offset = crashed.block.segment_offset(index)
    crashed_damage.write(offset, segments.encode(header, crashed.block.uuid))
    found = findings_of(crashed.media)
    assert short(found) == [("segment-header-damaged", "segment header", offset)]
    assert "role image" in found[0].message


def _slot(anatomy: Anatomy, generation: int, ring: int) -> roots.SlotState:
    (state,) = [
        s
        for s in anatomy.slots
        if s.ring == ring and s.root is not None and s.root.generation == generation
    ]
    return state
