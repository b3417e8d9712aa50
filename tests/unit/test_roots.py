"""Roots and segment headers: every field is checked before it is used."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from cxlfs.format import layout, roots, segments, superblock
from cxlfs.media import MemoryMedia
from cxlfs.native import crc32c
from tests.support.stores import format_small, make_media

ROOT = roots.Root(
    generation=9,
    flags=layout.ROOT_IN_USE,
    image_bytes=70_000,
    image_lsn=41,
    image_header_crc=5,
    image_segments=(3, 1),
    journal_segment=7,
    journal_mirror=8,
    journal_epoch=11,
    journal_first_lsn=42,
    next_epoch=12,
    dirty_shutdown_known=1,
    dirty_shutdown_count=2,
    device_hash=3,
    written_ns=-4,
)


@pytest.fixture(scope="module")
def media() -> MemoryMedia:
    made = make_media()
    format_small(made)
    return made


@pytest.fixture(scope="module")
def block(media: MemoryMedia) -> superblock.Superblock:
    return superblock.choose(media)[0]


def slot_of(block: superblock.Superblock, root: roots.Root) -> int:
    return root.generation % block.ring_slots


def test_round_trip(block: superblock.Superblock) -> None:
    for root in (ROOT, dataclasses.replace(ROOT, journal_segment=None, journal_mirror=None)):
        data = roots.encode(root, block.uuid)
        assert len(data) == 2048
        assert roots.decode(data, block, slot_of(block, root)) == root


def test_every_bit_is_covered(block: superblock.Superblock) -> None:
    data = roots.encode(ROOT, block.uuid)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(roots.decode(bytes(changed), block, slot_of(block, ROOT)), str)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"generation": 10}, "slot"),
        ({"image_segments": (3, 3)}, "twice"),
        ({"image_segments": (3, 7)}, "twice"),
        ({"image_segments": (3, 63)}, "does not exist"),
        ({"journal_segment": 1 << 40}, "does not exist"),
        ({"journal_mirror": None}, "half a journal"),
        ({"image_bytes": 0}, "larger than its segments"),
        ({"image_bytes": 2 * 61440 + 1}, "larger than its segments"),
        ({"image_segments": ()}, "larger than its segments"),
    ],
)
def test_impossible_roots(
    block: superblock.Superblock, changes: dict[str, object], problem: str
) -> None:
    root = dataclasses.replace(ROOT, **changes)  # type: ignore[arg-type]
    found = roots.decode(roots.encode(root, block.uuid), block, slot_of(block, ROOT))
    assert isinstance(found, str)
    assert problem in found


def test_too_many_segments(block: superblock.Superblock) -> None:
    row = np.frombuffer(bytearray(roots.encode(ROOT, block.uuid)), dtype=layout.ROOT_DTYPE)
    row = row.copy()
    row["image_segment_count"] = 385
    row["crc"] = crc32c(row.tobytes()[:2044])
    assert roots.decode(row.tobytes(), block, slot_of(block, ROOT)) == "too many image segments"


def test_another_store(block: superblock.Superblock) -> None:
    data = roots.encode(ROOT, bytes(16))
    assert roots.decode(data, block, slot_of(block, ROOT)) == "the root belongs to another store"


def test_rings(block: superblock.Superblock) -> None:
    media = MemoryMedia(block.size_bytes)
    for generation in range(1, 12):
        roots.write(media, block, dataclasses.replace(ROOT, generation=generation))
    states = roots.read_slots(media, block)
    assert len(states) == 2 * block.ring_slots
    found = [root.generation for root in roots.candidates(states)]
    assert found == list(range(11, 11 - block.ring_slots, -1))
    slot = 11 % block.ring_slots
    for ring in (0, 1):
        assert not roots.newer_root_may_be_lost(roots.read_slots(media, block))
        media.store(block.ring_offsets[ring] + slot * layout.SLOT_BYTES + 100, b"\xff")
        newest = roots.candidates(roots.read_slots(media, block))[0]
        assert newest.generation == 11 - ring
    assert roots.newer_root_may_be_lost(roots.read_slots(media, block))
    media.close()


# --- segment headers ------------------------------------------------------------------------

HEADER = segments.SegmentHeader(
    role=layout.ROLE_JOURNAL,
    index=5,
    epoch=6,
    nonce=(1 << 64) - 1,
    copy_number=1,
    predecessor=3,
    predecessor_epoch=4,
    predecessor_last_lsn=17,
    first_lsn=18,
    partner=9,
)


def test_segment_round_trip(block: superblock.Superblock) -> None:
    data = segments.encode(HEADER, block.uuid)
    assert segments.decode(data, block, 5) == HEADER


def test_every_bit_of_a_segment_header(block: superblock.Superblock) -> None:
    data = segments.encode(HEADER, block.uuid)
    for bit in range(len(data) * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(segments.decode(bytes(changed), block, 5), str)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index": 6}, "lies in segment 5"),
        ({"role": 0}, "unknown role"),
        ({"role": 5}, "unknown role"),
        ({"partner": 5}, "other copy"),
        ({"partner": 63}, "other copy"),
        ({"partner": layout.NO_SEGMENT}, "other copy"),
    ],
)
def test_impossible_segment_headers(
    block: superblock.Superblock, changes: dict[str, int], problem: str
) -> None:
    header = dataclasses.replace(HEADER, **changes)
    found = segments.decode(segments.encode(header, block.uuid), block, 5)
    assert isinstance(found, str)
    assert problem in found


def test_foreign_segment(block: superblock.Superblock) -> None:
    found = segments.decode(segments.encode(HEADER, bytes(16)), block, 5)
    assert found == "the segment belongs to another store"


def test_noise_is_no_header(block: superblock.Superblock, rng: random.Random) -> None:
    for _ in range(500):
        assert isinstance(segments.decode(rng.randbytes(128), block, 0), str)
        data = layout.SEGMENT_MAGIC + rng.randbytes(120)
        assert isinstance(segments.decode(data, block, 0), str)


def test_seed_depends_on_everything() -> None:
    seeds = {
        segments.record_seed(nonce, epoch, uuid)
        for nonce in (0, 1, 1 << 63)
        for epoch in (0, 1, 2)
        for uuid in (bytes(16), bytes(15) + b"\1")
    }
    assert len(seeds) == 18
