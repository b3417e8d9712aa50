"""Every bit of every metadata structure flipped, one at a time.

The first half asks the code that reads a structure, for each bit there is. The second half asks
the whole: the state must be the same as before from other copies, and verify must name the
structure; for a sample of the bits, or for all of them with CXLFS_CAMPAIGN=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from cxlfs.format import layout, roots, segments
from cxlfs.format.journal_reader import SegmentReader
from cxlfs.verify.image_pass import Damage as ImageDamage
from cxlfs.verify.image_pass import sum_image
from cxlfs.verify.media_passes import good_superblock_bytes, superblock_problem
from tests.corruption.conftest import OneIn
from tests.support.corrupt import Anatomy, Damage, Region
from tests.support.verdict import Picture, findings_of, good_picture, good_store, picture_of


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


# --- each bit, by the reader of the structure -----------------------------------------------


def test_superblock_copies() -> None:
    anatomy = good_store(closed=True)
    good = good_superblock_bytes(anatomy.media, anatomy.block)
    for region in anatomy.superblocks():
        data = anatomy.media.read(region.offset, region.length)
        assert superblock_problem(data, region.copy, good, anatomy.media.size_bytes) is None
        for bit in range(region.length * 8):
            changed = _flipped(data, bit)
            problem = superblock_problem(changed, region.copy, good, anatomy.media.size_bytes)
            assert problem is not None, (region, bit)


def test_roots(anatomy: Anatomy) -> None:
    regions = anatomy.roots()
    assert len(regions) == 2 * anatomy.block.ring_slots
    for region in regions:
        data = anatomy.media.read(region.offset, region.length)
        for bit in range(region.length * 8):
            found = roots.decode(_flipped(data, bit), anatomy.block, region.index)
            assert isinstance(found, str), (region, bit)


def test_segment_headers(anatomy: Anatomy) -> None:
    for region in anatomy.segment_headers():
        data = anatomy.media.read(region.offset, region.length)
        for bit in range(region.length * 8):
            found = segments.decode(_flipped(data, bit), anatomy.block, region.index)
            assert isinstance(found, str), (region, bit)


def _read_journal(anatomy: Anatomy) -> tuple[list[tuple[int, bytes]], list[tuple[int, int]]]:
    """(LSN, payload) of each record, and (LSN, copy) of those that are bad."""
    journal = anatomy.newest.journal_segment
    assert journal is not None
    header = anatomy.header(journal)
    reader = SegmentReader(
        anatomy.media,
        anatomy.block,
        header,
        expected_lsn=header.first_lsn,
        compare=True,
        end=layout.SEGMENT_HEADER_BYTES + 8192,
    )
    records = [(record.lsn, record.payload) for record in reader]
    assert reader.scan.lost_lsn is None
    return records, [(bad.lsn, bad.copy_number) for bad in reader.scan.bad_copies]


def test_journal_records() -> None:
    anatomy = good_store(closed=False)
    whole, bad = _read_journal(anatomy)
    assert not bad
    assert len(whole) >= 5
    for region in anatomy.records(anatomy.newest):
        bits = region.bits
        if region.index not in (whole[0][0], whole[-1][0]):
            bits = bits[: layout.RECORD_DTYPE.itemsize * 8]  # payloads are alike
        for bit in bits:
            with Damage(anatomy.media) as damage:
                damage.flip(bit)
                assert _read_journal(anatomy) == (whole, [(region.index, region.copy)]), bit


def test_metadata_images(anatomy: Anatomy, one_in: OneIn[int]) -> None:
    root = anatomy.newest
    for piece in anatomy.image_pieces(root):
        for bit in one_in(3, piece.bits):
            with Damage(anatomy.media) as damage:
                damage.flip(bit)
                items = sum_image(anatomy.media, anatomy.block, root)
                found = [item for item in items if isinstance(item, ImageDamage)]
            assert [item.media_offset for item in found] == [piece.offset], bit


# --- the whole store ------------------------------------------------------------------------

Regions = Callable[[Anatomy], Iterable[Region]]


def _all_records(anatomy: Anatomy) -> list[Region]:
    """Of the journal in use, and of the one that is kept; without the last one of each: when that
    is bad in one copy it may just be torn.
    """
    found: list[Region] = []
    for root in (anatomy.newest, anatomy.fallback):
        if root is not None:
            found.extend(anatomy.records(root)[:-2])
    return found


def _all_images(anatomy: Anatomy) -> list[Region]:
    found = (anatomy.newest, anatomy.fallback)
    return [piece for root in found if root is not None for piece in anatomy.image_pieces(root)]


def _all_continuations(anatomy: Anatomy) -> list[Region]:
    return [*anatomy.continuations(anatomy.newest), *anatomy.continuations(anatomy.fallback)]


STRUCTURES: dict[str, tuple[Regions, set[str]]] = {
    "superblock": (Anatomy.superblocks, {"superblock-copy-damaged"}),
    "root": (Anatomy.roots, {"root-copy-damaged"}),
    "segment header": (
        Anatomy.segment_headers,
        {"segment-header-damaged", "journal-header-damaged"},
    ),
    "record": (_all_records, {"journal-copy-damaged"}),
    "continuation": (_all_continuations, {"journal-copy-damaged"}),
    "image": (_all_images, {"image-damaged", "image-fallback-damaged"}),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.timeout(0)
def test_any_bit_is_found_and_changes_nothing(
    anatomy: Anatomy, good: Picture, name: str, rng: random.Random, sample_count: int | None
) -> None:
    regions, expected = STRUCTURES[name]
    for region in regions(anatomy):
        bits: Iterable[int] = region.bits
        if sample_count is not None:
            bits = rng.sample(region.bits, sample_count)
        for bit in bits:
            with Damage(anatomy.media) as damage:
                damage.flip(bit)
                found = findings_of(anatomy.media, structure_only=True)
                assert picture_of(anatomy.media) == good, (region, bit)
            if _may_be_torn(anatomy, region):
                continue
            assert found, (region, bit)
            assert found[0].id in expected, (region, bit)
            assert found[0].media_offset == region.offset, (region, bit)
            assert {f.severity for f in found} == {"warning"}, (region, bit)


@pytest.mark.parametrize("number", [1, 2])
def test_both_headers_of_a_journal_that_no_root_names(number: int) -> None:
    """The continuation of the journal before it has led there: nothing is lost, and verify says
    what is damaged.
    """
    anatomy = good_store(closed=False, chained=True)
    header = anatomy.journals(anatomy.newest)[number].header
    places = [anatomy.block.segment_offset(index) for index in (header.index, header.partner)]
    with Damage(anatomy.media) as damage:
        for place in places:
            damage.flip((place + 30) * 8)
        found = findings_of(anatomy.media, structure_only=True)
        assert picture_of(anatomy.media) == good_picture(closed=False, chained=True)
    headers = [f.media_offset for f in found if f.id == "journal-header-damaged"]
    assert headers == places


def test_all_that_leads_to_a_journal_but_one_copy() -> None:
    """Two headers and two continuations: each of them is enough."""
    anatomy = good_store(closed=False, chained=True)
    scan, successor = anatomy.journals(anatomy.newest)[:2]
    header = successor.header
    leads = [anatomy.block.segment_offset(index) for index in (header.index, header.partner)]
    ends = [anatomy.block.segment_offset(i) for i in (scan.header.index, scan.header.partner)]
    leads += [offset + scan.end for offset in ends]
    for left in leads:
        with Damage(anatomy.media) as damage:
            for place in leads:
                if place != left:
                    damage.zero(place, 64)
            assert picture_of(anatomy.media) == good_picture(closed=False, chained=True), left
            assert findings_of(anatomy.media, structure_only=True), left


def _may_be_torn(anatomy: Anatomy, region: Region) -> bool:
    """Of a store that was not closed: the last root in the second ring, the next in the first."""
    slots = anatomy.block.ring_slots
    torn = {(0, (anatomy.newest.generation + 1) % slots), (1, anatomy.newest.generation % slots)}
    return region.name == "root" and anatomy.newest.in_use and (region.copy, region.index) in torn
