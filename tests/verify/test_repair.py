"""Repairing: it says before what it changes, changes nothing else, and can be taken back."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import InvariantError, SavedCopyError
from cxlfs.format import image_search, layout
from cxlfs.media import MemoryMedia, SimulatedMedia
from cxlfs.media.simulated import CrashTarget
from cxlfs.store import Store
from cxlfs.verify import repair
from cxlfs.verify.overlay import GuardedMedia, OverlayMedia
from cxlfs.verify.record import outcome_of
from cxlfs.verify.repair import RepairAction, apply, merge_ranges, plan, undo
from tests.support.corrupt import IMAGE_BYTES, Anatomy, Damage, populated_media
from tests.support.stores import format_small, write_file
from tests.support.verdict import findings_of, picture_of


class Case:
    """A store of its own, damaged; what repairing must come to."""

    def __init__(self, *, closed: bool) -> None:
        self.media = populated_media(closed=closed)
        self.anatomy = Anatomy(self.media)
        self.picture = picture_of(self.media)
        self.damage = Damage(self.media)

    def content(self) -> bytes:
        return bytes(self.media.unguarded_memory())

    def flip(self, offset: int) -> None:
        self.damage.flip(offset * 8 + 1)

    def repair(self, save_path: Path) -> list[RepairAction]:
        """Repair; the store must be clean then and show what it showed before the damage."""
        found = findings_of(self.media)
        assert found
        assert all(finding.repairable for finding in found)
        damaged = self.content()
        actions = plan(self.media, found)
        assert actions
        assert self.content() == damaged, "planning changes nothing"
        apply(self.media, actions, save_path)
        assert findings_of(self.media) == []
        assert picture_of(self.media) == self.picture
        self._only_announced_changes(damaged, actions)
        repaired = self.content()
        undo(self.media, save_path)
        assert self.content() == damaged, "undo restores every byte"
        undo(self.media, save_path)
        assert self.content() == damaged
        self.media.unguarded_memory()[:] = repaired
        return actions

    def _only_announced_changes(self, before: bytes, actions: list[RepairAction]) -> None:
        old = np.frombuffer(before, dtype=np.uint8)
        changed = np.flatnonzero(old != np.frombuffer(self.content(), dtype=np.uint8))
        announced = np.zeros(len(old), dtype=bool)
        for action in actions:
            for offset, length in action.ranges:
                announced[offset : offset + length] = True
        assert announced[changed].all()


@pytest.fixture
def save_path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


Damager = Callable[[Case], None]


def _superblocks(case: Case) -> None:
    for number in (0, 2):
        case.flip(case.anatomy.block.copy_offsets[number] + 60)


def _superblock_blank(case: Case) -> None:
    case.damage.zero(case.anatomy.block.copy_offsets[3], 512)


def _root_in_ring_a(case: Case) -> None:
    case.flip(case.anatomy.slots[1].media_offset + 200)


def _roots_in_ring_b(case: Case) -> None:
    for slot in case.anatomy.slots[3:]:
        case.flip(slot.media_offset + 200)


def _older_root_lost(case: Case) -> None:
    lost = (case.anatomy.newest.generation - 1) % 3
    for slot in case.anatomy.slots:
        if slot.slot == lost:
            case.flip(slot.media_offset + 5)


def _newest_root_lost(case: Case) -> None:
    for slot in case.anatomy.slots:
        if slot.root == case.anatomy.newest:
            case.flip(slot.media_offset + 5)


def _all_roots(case: Case) -> None:
    for slot in case.anatomy.slots:
        case.flip(slot.media_offset + 9)


def _headers_of(case: Case, role: int) -> list[int]:
    regions = case.anatomy.segment_headers()
    return [r.offset for r in regions if case.anatomy.header(r.index).role == role]


def _data_headers(case: Case) -> None:
    for offset in _headers_of(case, layout.ROLE_DATA):
        case.flip(offset + 33)


def _mirror_header(case: Case) -> None:
    mirror = case.anatomy.newest.journal_mirror
    assert mirror is not None
    case.flip(case.anatomy.block.segment_offset(mirror) + 33)


def _image_header(case: Case) -> None:
    case.damage.zero(case.anatomy.block.segment_offset(case.anatomy.newest.image_segments[0]), 128)


def _records(case: Case) -> None:
    """Some in one copy, some in the other."""
    for number, record in enumerate(case.anatomy.records(case.anatomy.newest)[:-2]):
        if number % 3 == 0:
            case.flip(record.offset + 70)


def _fallback_records(case: Case) -> None:
    assert case.anatomy.fallback is not None
    case.flip(case.anatomy.records(case.anatomy.fallback)[3].offset + 10)


def _fallback_hole(case: Case) -> None:
    assert case.anatomy.fallback is not None
    for record in case.anatomy.records(case.anatomy.fallback)[4:6]:
        case.flip(record.offset + 10)


def _image(case: Case) -> None:
    case.flip(case.anatomy.image_pieces(case.anatomy.newest)[1].offset)


def _fallback_image(case: Case) -> None:
    assert case.anatomy.fallback is not None
    case.flip(case.anatomy.image_pieces(case.anatomy.fallback)[2].offset)


def _a_bit_of_everything(case: Case) -> None:
    for damager in (_superblocks, _root_in_ring_a, _data_headers, _mirror_header, _records, _image):
        damager(case)


@pytest.mark.parametrize(
    ("damager", "closed"),
    [
        (_superblocks, True),
        (_superblock_blank, False),
        (_root_in_ring_a, True),
        (_roots_in_ring_b, True),
        (_older_root_lost, True),
        (_older_root_lost, False),
        (_newest_root_lost, False),
        (_all_roots, True),
        (_all_roots, False),
        (_data_headers, True),
        (_data_headers, False),
        (_mirror_header, False),
        (_image_header, True),
        (_image_header, False),
        (_records, False),
        (_fallback_records, True),
        (_fallback_records, False),
        (_fallback_hole, True),
        (_image, True),
        (_image, False),
        (_fallback_image, True),
        (_fallback_image, False),
        (_a_bit_of_everything, False),
    ],
)
def test_repair_and_undo(damager: Damager, closed: bool, save_path: Path) -> None:
    case = Case(closed=closed)
    damager(case)
    case.repair(save_path)
    Store.open(case.media).close()
    assert findings_of(case.media) == []


def test_the_header_of_an_only_image_is_rebuilt(save_path: Path) -> None:
    """Without it the store cannot be opened at all."""
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    anatomy = Anatomy(media)
    before = picture_of(media)
    Damage(media).zero(anatomy.block.segment_offset(anatomy.newest.image_segments[0]), 128)
    found = findings_of(media)
    assert [finding.id for finding in found] == ["segment-header-damaged", "store-unusable"]
    (action,) = plan(media, found)
    assert (action.id, action.length) == ("rewrite-copy", 128)
    apply(media, [action], save_path)
    assert findings_of(media) == []
    assert picture_of(media) == before


@pytest.mark.parametrize("closed", [True, False])
def test_an_image_of_many_parts_is_found_without_a_root(closed: bool, save_path: Path) -> None:
    """After the header of one part was repaired, too."""
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    store = Store.open(media)
    for number in range(1200):
        store.make_directory(1, b"%d" % number, 0o755, 0, 0)
    store.volume.rollover()
    store.make_directory(1, b"behind the image", 0o755, 0, 0)
    store.close() if closed else store.abandon()
    before = picture_of(media)
    anatomy = Anatomy(media)
    second = anatomy.block.segment_offset(anatomy.newest.image_segments[1])
    Damage(media).zero(second, 128)
    apply(media, plan(media, findings_of(media)), save_path)
    newest = Anatomy(media).newest
    for slot in anatomy.slots:
        Damage(media).zero(slot.media_offset, layout.ROOT_DTYPE.itemsize)
    found = image_search.find_root(media, anatomy.block)
    assert found is not None
    for name in ("image_segments", "image_bytes", "image_lsn", "image_header_crc", "flags"):
        assert getattr(found, name) == getattr(newest, name), name
    assert found.journal_segment == newest.journal_segment
    apply(media, plan(media, findings_of(media)), save_path.with_name("second"))
    assert findings_of(media) == []
    assert picture_of(media) == before


@pytest.mark.parametrize("ring", [0, 1])
@pytest.mark.parametrize("slot", [0, 2])
def test_a_slot_that_was_never_used_is_blanked(save_path: Path, slot: int, ring: int) -> None:
    """Slot 0 too: generations begin with 1."""
    media = MemoryMedia(IMAGE_BYTES)
    format_small(media)
    anatomy = Anatomy(media)
    assert anatomy.newest.generation == 1
    place = anatomy.block.ring_offsets[ring] + slot * layout.SLOT_BYTES
    Damage(media).flip(place * 8 + 100)
    (finding,) = findings_of(media)
    assert (finding.id, finding.repairable) == ("root-copy-damaged", True)
    (action,) = plan(media, [finding])
    assert f"blank slot {slot} of ring {'AB'[ring]}" in action.text
    apply(media, [action], save_path)
    assert findings_of(media) == []


def test_an_action_says_what_it_does() -> None:
    case = Case(closed=True)
    offset = case.anatomy.block.copy_offsets[1]
    case.flip(offset + 60)
    (action,) = plan(case.media, findings_of(case.media))
    assert action.id == repair.REWRITE_COPY
    assert (action.media_offset, action.length) == (offset, 512)
    assert action.ranges == ((offset, 512),)
    assert action.repairs == ("superblock-copy-damaged",)
    assert action.text == (
        f"rewrite superblock copy 1 from the others: 512 bytes at media offset {offset:#x}"
    )


def test_file_data_and_contradictions_are_left_alone() -> None:
    case = Case(closed=True)
    place = int(case.anatomy.extents()[0]["media_offset"])
    case.flip(place)
    found = findings_of(case.media)
    assert [finding.id for finding in found] == ["data-checksum"]
    assert plan(case.media, found) == []


def test_a_lost_record_is_not_repaired() -> None:
    case = Case(closed=False)
    for record in case.anatomy.records(case.anatomy.newest)[4:6]:
        case.flip(record.offset + 70)
    found = findings_of(case.media)
    assert {finding.id for finding in found} == {"journal-record-lost", "store-incomplete"}
    assert plan(case.media, found) == []


def test_nothing_to_do() -> None:
    case = Case(closed=True)
    assert plan(case.media, []) == []


def test_a_power_cut_in_the_middle_makes_nothing_worse(tmp_path: Path, rng: random.Random) -> None:
    """At any moment everything is still there, and repairing again finishes it."""
    case = Case(closed=False)
    _a_bit_of_everything(case)
    media = SimulatedMedia(case.media.size_bytes, image=case.content())
    apply(media, plan(media, findings_of(media)), tmp_path / "first")
    target = CrashTarget(media.cursor())
    count = len(media.events())
    assert count > 30
    for event in sorted(rng.sample(range(1, count), 24)):
        in_flight = target.advance(event)
        mask = np.array([rng.random() < 0.5 for _ in range(len(in_flight))], dtype=np.bool_)
        with target.crashed(in_flight, mask) as crashed:
            assert picture_of(crashed) == case.picture, event
            found = findings_of(crashed)
            assert all(finding.repairable for finding in found), found
            apply(crashed, plan(crashed, found), tmp_path / f"again-{event}")
            assert findings_of(crashed) == [], event
            assert picture_of(crashed) == case.picture, event
    target.close()


# --- the saved copy -------------------------------------------------------------------------


def _repaired(save_path: Path) -> Case:
    case = Case(closed=True)
    _superblocks(case)
    apply(case.media, plan(case.media, findings_of(case.media)), save_path)
    return case


def test_the_saved_copy_describes_itself(save_path: Path) -> None:
    case = _repaired(save_path)
    header = json.loads(save_path.read_bytes().split(b"\n")[0])
    assert header["schema"] == "cxlfs.saved_copy/1"
    assert header["media_size_bytes"] == case.media.size_bytes
    assert [r["length"] for r in header["ranges"]] == [512, 512]
    assert len(header["actions"]) == 2
    assert save_path.stat().st_mode & 0o777 == 0o600


def test_an_existing_file_is_never_overwritten(save_path: Path) -> None:
    save_path.write_text("precious")
    case = Case(closed=True)
    _superblocks(case)
    damaged = case.content()
    with pytest.raises(SavedCopyError):
        apply(case.media, plan(case.media, findings_of(case.media)), save_path)
    assert save_path.read_text() == "precious"
    assert case.content() == damaged, "nothing is changed without a saved copy"


@pytest.mark.parametrize("where", [0, 40, -600, -1])
def test_a_damaged_saved_copy_is_refused(save_path: Path, where: int) -> None:
    case = _repaired(save_path)
    before = case.content()
    data = bytearray(save_path.read_bytes())
    data[where] ^= 4
    save_path.write_bytes(data)
    with pytest.raises(SavedCopyError):
        undo(case.media, save_path)
    assert case.content() == before


@pytest.mark.parametrize("length", [0, 10, 300, -1])
def test_a_saved_copy_that_is_cut_short_is_refused(save_path: Path, length: int) -> None:
    case = _repaired(save_path)
    save_path.write_bytes(save_path.read_bytes()[:length])
    with pytest.raises(SavedCopyError):
        undo(case.media, save_path)


def test_a_saved_copy_of_another_store_is_refused(save_path: Path) -> None:
    _repaired(save_path)
    other = MemoryMedia(IMAGE_BYTES)
    format_small(other)
    with pytest.raises(SavedCopyError, match="another store"):
        undo(other, save_path)


def test_no_saved_copy_at_all(save_path: Path) -> None:
    case = Case(closed=True)
    with pytest.raises(SavedCopyError):
        undo(case.media, save_path)


# --- the views ------------------------------------------------------------------------------


def test_an_overlay_keeps_what_is_stored_from_the_media() -> None:
    media = MemoryMedia(65536)
    media.store(0, b"below" * 20)
    overlay = OverlayMedia(media)
    overlay.store(3, b"ABC")
    overlay.copy(4, b"xy")
    overlay.store_u64(64, 5)
    overlay.persist(0, 100)
    assert overlay.read(0, 8) == b"belAxyel"
    target = bytearray(8)
    overlay.read_into(0, target)
    assert bytes(target) == b"belAxyel"
    assert overlay.crc32c(0, 8) == overlay.copy_crc32c(200, b"belAxyel")
    assert overlay.ranges == [(3, 3), (4, 2), (64, 8), (200, 8)]
    assert media.read(0, 100) == b"below" * 20
    overlay.close()
    assert media.read(0, 5) == b"below"


def test_a_guard_lets_announced_stores_pass_only() -> None:
    media = MemoryMedia(65536)
    guarded = GuardedMedia(media, [(64, 64), (256, 8)])
    guarded.store(64, b"a" * 64)
    guarded.copy(100, b"b")
    guarded.store_u64(256, 7)
    for change in (
        lambda: guarded.store(63, b"aa"),
        lambda: guarded.copy(127, b"aa"),
        lambda: guarded.copy_crc32c(0, b"a"),
        lambda: guarded.store_u64(264, 7),
    ):
        with pytest.raises(InvariantError):
            change()
    assert media.read(0, 64) == bytes(64)


def test_ranges_are_merged() -> None:
    assert merge_ranges([(8, 4), (0, 4), (4, 2), (9, 10)]) == [(0, 6), (8, 11)]
    assert merge_ranges([]) == []


@pytest.mark.parametrize("damager", [_superblocks, _image, _older_root_lost])
def test_a_store_that_remembers_what_is_repaired_forgets_it(
    damager: Damager, save_path: Path
) -> None:
    """In bytes that are announced and saved like all others."""
    case = Case(closed=True)
    store = Store.open(case.media)
    remembered = outcome_of([], structure_only=False, complete=True)
    remembered = dataclasses.replace(remembered, warnings=1, structure_findings=1, kinds=("x",))
    store.health.verified(remembered)
    store.close()
    case.anatomy = Anatomy(case.media)
    case.picture = picture_of(case.media)
    damager(case)
    damaged = case.content()
    actions = plan(case.media, findings_of(case.media))
    assert actions[-1].id == repair.RECORD
    apply(case.media, actions, save_path)
    repaired = case.content()
    case._only_announced_changes(damaged, actions)
    assert findings_of(case.media) == []
    undo(case.media, save_path)
    assert case.content() == damaged
    case.media.unguarded_memory()[:] = repaired
    store = Store.open(case.media)
    assert store.statistics().state == "ONLINE"
    store.close()


def test_a_repair_is_not_undone_over_what_was_committed_since(save_path: Path) -> None:
    case = _repaired(save_path)
    store = Store.open(case.media)
    write_file(store, 1, b"since", b"new")
    store.close()
    before = case.content()
    with pytest.raises(SavedCopyError, match="has been written since it was repaired"):
        undo(case.media, save_path)
    assert case.content() == before
