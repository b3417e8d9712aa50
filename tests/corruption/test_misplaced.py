"""Structures in the wrong place or from the wrong time: swapped, doubled, put back from an earlier
epoch, blanked. Whatever is done: what users see is the same, or verify says that it is not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from cxlfs.errors import CxlfsError
from cxlfs.format import layout
from cxlfs.store import Store
from cxlfs.verify import ERROR, Finding
from tests.corruption.conftest import OneIn
from tests.support.corrupt import Anatomy, Damage, Region, populated_media
from tests.support.stores import write_file
from tests.support.verdict import Picture, findings_of, good_picture, good_store, picture_of

LINE_BYTES = 64


def judge(
    anatomy: Anatomy, good: Picture, what: object
) -> tuple[list[Finding], Picture | CxlfsError]:
    """Nothing found: nothing changed. Only warnings: everything is there. Else an error says so."""
    found = findings_of(anatomy.media)
    seen = picture_of(anatomy.media)
    if not any(finding.severity == ERROR for finding in found):
        assert seen == good, (what, found, seen)
    return found, seen


def _lines(regions: list[Region]) -> Iterator[tuple[Region, int]]:
    for region in regions:
        for offset in range(region.offset, region.offset + region.length, LINE_BYTES):
            yield region, offset


# --- blanked --------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_every_metadata_line_blanked(
    anatomy: Anatomy, good: Picture, fill: bytes, one_in: OneIn[tuple[Region, int]]
) -> None:
    """What a lost cache line or an uncorrectable error leaves; fewer of those with ones."""
    tried = found_count = 0
    every = 4 if fill == b"\0" else 16
    for region, offset in one_in(every, _lines(anatomy.metadata())):
        size = min(LINE_BYTES, region.offset + region.length - offset)
        blank = fill * size
        if anatomy.media.read(offset, size) == blank:
            continue
        with Damage(anatomy.media) as damage:
            damage.write(offset, blank)
            found, seen = judge(anatomy, good, (region, offset))
            assert seen == good, (region, offset)
        tried += 1
        found_count += bool(found)
    assert tried > 150 // every - 2
    # The rest: last records in one copy, and two root slots, which a crash may tear.
    assert found_count > 0.6 * tried


def test_every_data_line_blanked() -> None:
    anatomy = good_store(closed=True)
    good = good_picture(closed=True)
    for row in anatomy.extents():
        start = int(row["media_offset"])
        for offset in range(start, start + int(row["length"]), 16 * LINE_BYTES):
            with Damage(anatomy.media) as damage:
                damage.zero(offset, LINE_BYTES)
                found, _ = judge(anatomy, good, offset)
            assert {f.id for f in found} <= {"data-checksum", "data-unused-damaged"}
            assert len(found) == 1


@pytest.mark.parametrize("part", ["unit", "segment"])
def test_whole_units_and_segments_blanked(anatomy: Anatomy, good: Picture, part: str) -> None:
    """The largest page that one uncorrectable error takes away; and any one segment."""
    block = anatomy.block
    if part == "unit":
        places = [(offset, block.unit_bytes) for offset in block.copy_offsets]
    else:
        size = block.segment_size_bytes
        places = [(block.segment_offset(i), size) for i in range(block.segment_count)]
    with_data = {anatomy.segment_of(int(row["media_offset"])) for row in anatomy.extents()}
    for offset, length in places:
        with Damage(anatomy.media) as damage:
            damage.zero(offset, length)
            _, seen = judge(anatomy, good, offset)
            if part == "unit" or anatomy.segment_of(offset) not in with_data:
                assert seen == good, offset


# --- swapped and doubled --------------------------------------------------------------------


def _pairs(regions: list[Region]) -> Iterator[tuple[Region, Region]]:
    return itertools.permutations(regions, 2)


@pytest.mark.parametrize("name", ["superblocks", "roots", "segment_headers"])
@pytest.mark.parametrize("swap", [True, False], ids=["swapped", "doubled"])
def test_structures_in_each_others_place(
    anatomy: Anatomy,
    good: Picture,
    name: str,
    swap: bool,
    one_in: OneIn[tuple[Region, Region]],
) -> None:
    for one, other in one_in(3, _pairs(getattr(anatomy, name)())):
        if swap and one.offset > other.offset:
            continue
        before = anatomy.media.read(one.offset, one.length)
        same = before == anatomy.media.read(other.offset, other.length)
        with Damage(anatomy.media) as damage:
            if swap:
                damage.swap(one.offset, other.offset, one.length)
            else:
                damage.write(other.offset, before)
            found, _ = judge(anatomy, good, (one, other))
            if not same:
                assert found or anatomy.newest.in_use, (one, other)


@pytest.mark.parametrize("swap", [True, False], ids=["swapped", "doubled"])
def test_segments_in_each_others_place(
    anatomy: Anatomy, good: Picture, swap: bool, one_in: OneIn[tuple[int, int]]
) -> None:
    size = anatomy.block.segment_size_bytes
    used = [anatomy.block.segment_offset(r.index) for r in anatomy.segment_headers()]
    free = next(
        offset
        for offset in map(anatomy.block.segment_offset, range(anatomy.block.segment_count))
        if offset not in used
    )
    for one, other in one_in(4, itertools.permutations([*used, free], 2)):
        with Damage(anatomy.media) as damage:
            if swap:
                damage.swap(one, other, size)
            else:
                damage.write(other, damage.read(one, size))
            found, _ = judge(anatomy, good, (one, other))
            assert found or other == free or (swap and one == free), (one, other)


def test_records_in_each_others_place() -> None:
    """In one copy of the journal, then in both; not the last one, which may look torn then."""
    anatomy = good_store(closed=False)
    good = good_picture(closed=False)
    records = anatomy.records(anatomy.newest)[:-2]
    for copies in ((0,), (1,), (0, 1)):
        for one, other in itertools.combinations([r for r in records if r.copy == 0], 2):
            with Damage(anatomy.media) as damage:
                for copy in copies:
                    shift = next(r for r in records if r.copy == copy).offset - records[0].offset
                    size = min(one.length, other.length)
                    damage.swap(one.offset + shift, other.offset + shift, size)
                found, _ = judge(anatomy, good, (copies, one, other))
                assert found


def test_lines_in_each_others_place(
    anatomy: Anatomy, good: Picture, rng: random.Random, sample_count: int | None
) -> None:
    places = [offset for _, offset in _lines(anatomy.metadata())]
    for number in range(10 * (sample_count or 1000)):
        one, other = rng.sample(places, 2)
        with Damage(anatomy.media) as damage:
            if number % 2:
                damage.swap(one, other, LINE_BYTES)
            else:
                damage.write(other, damage.read(one, LINE_BYTES))
            judge(anatomy, good, (one, other))


# --- from an earlier time -------------------------------------------------------------------


class History:
    """A store, and its bytes at earlier moments."""

    def __init__(self) -> None:
        self.media = populated_media(closed=True)
        self.moments: list[bytes] = []
        for number in range(4):
            self.moments.append(self.content())
            store = Store.open(self.media)
            write_file(store, 1, b"moment-%d" % number, b"x" * 3000 * number)
            if number % 2:
                store.volume.rollover()
                write_file(store, 1, b"behind-%d" % number, b"y" * 100)
            self.moments.append(self.content())
            store.close() if number < 3 else store.abandon()
        self.anatomy = Anatomy(self.media)

    def content(self) -> bytes:
        return bytes(self.media.unguarded_memory())


@pytest.fixture(scope="module")
def history() -> History:
    return History()


def _put_back(history: History, moment: bytes, places: list[tuple[int, int]]) -> Damage:
    damage = Damage(history.media)
    for offset, length in places:
        damage.write(offset, moment[offset : offset + length])
    return damage


def test_root_rings_from_an_earlier_time(history: History) -> None:
    """One ring is noticed. Both together change nothing as long as journals lead to the present."""
    good = picture_of(history.media)
    assert isinstance(good, dict)
    block = history.anatomy.block
    size = block.ring_slots * layout.SLOT_BYTES
    rings = [(offset, size) for offset in block.ring_offsets]
    for moment in history.moments[:-1]:
        for places in (rings[:1], rings[1:], rings):
            with _put_back(history, moment, places):
                found, _ = judge(history.anatomy, good, places)
                assert found or len(places) == 2


def test_single_roots_from_an_earlier_time(history: History) -> None:
    good = picture_of(history.media)
    assert isinstance(good, dict)
    for moment in history.moments:
        for slot in history.anatomy.slots:
            with _put_back(history, moment, [(slot.media_offset, 2048)]):
                judge(history.anatomy, good, slot)


def test_segments_from_an_earlier_time(history: History) -> None:
    good = picture_of(history.media)
    assert isinstance(good, dict)
    anatomy = history.anatomy
    size = anatomy.block.segment_size_bytes
    for moment in history.moments:
        for region in anatomy.segment_headers():
            with _put_back(history, moment, [(region.offset, size)]):
                judge(anatomy, good, region)


def test_both_copies_of_the_journal_from_an_earlier_time(history: History) -> None:
    """Headers of another epoch are no journal of this root."""
    good = picture_of(history.media)
    assert isinstance(good, dict)
    anatomy = history.anatomy
    journal = [anatomy.newest.journal_segment, anatomy.newest.journal_mirror]
    size = anatomy.block.segment_size_bytes
    places = [(anatomy.block.segment_offset(i), size) for i in journal if i is not None]
    now = history.content()
    for moment in history.moments:
        changed = any(moment[o : o + n] != now[o : o + n] for o, n in places)
        with _put_back(history, moment, places):
            found, _ = judge(anatomy, good, places)
            assert bool(found) == changed


def test_stray_blocks_from_an_earlier_time(
    history: History, rng: random.Random, sample_count: int | None
) -> None:
    """Any 4 KiB of the media as they were before: a write that never arrived."""
    good = picture_of(history.media)
    assert isinstance(good, dict)
    for _ in range(8 * (sample_count or 1000)):
        moment = rng.choice(history.moments)
        offset = rng.randrange(len(moment) // 4096) * 4096
        with _put_back(history, moment, [(offset, 4096)]):
            judge(history.anatomy, good, offset)
