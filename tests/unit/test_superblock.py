"""Superblock copies: the quorum, the geometry, and every way of being wrong."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import (
    CorruptionError,
    CxlfsError,
    MediaError,
    NotACxlfsError,
    UnsupportedFormatError,
    UsageError,
)
from cxlfs.format import layout, superblock
from cxlfs.media import MemoryMedia
from cxlfs.native import crc32c
from cxlfs.units import GIB, MIB
from tests.support.stores import format_small, make_media


@pytest.fixture
def media() -> MemoryMedia:
    made = make_media()
    format_small(made)
    return made


def spoil(media: MemoryMedia, offset: int, bit: int = 77) -> None:
    byte = media.read(offset + bit // 8, 1)[0] ^ 1 << bit % 8
    media.store(offset + bit // 8, bytes([byte]))


def block_of(media: MemoryMedia) -> superblock.Superblock:
    return superblock.choose(media)[0]


@pytest.mark.parametrize("bad", range(15))
def test_one_good_copy_is_enough(media: MemoryMedia, bad: int) -> None:
    expected = block_of(media)
    for number, offset in enumerate(expected.copy_offsets):
        if bad >> number & 1:
            spoil(media, offset)
    found, states = superblock.choose(media)
    assert found == expected
    assert [state.problem is not None for state in states] == [
        bool(bad >> number & 1) for number in range(4)
    ]


def test_no_good_copy(media: MemoryMedia) -> None:
    for offset in block_of(media).copy_offsets:
        spoil(media, offset)
    with pytest.raises(NotACxlfsError, match="damaged"):
        superblock.choose(media)


def test_every_bit_is_covered(media: MemoryMedia) -> None:
    data = media.read(0, 512)
    for bit in range(508 * 8):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises((CorruptionError, NotACxlfsError)):
            superblock.decode(bytes(changed), media_size_bytes=media.size_bytes)


def test_copy_number_is_checked(media: MemoryMedia) -> None:
    media.store(508, b"\3\0\0\0")
    _, states = superblock.choose(media)
    assert states[0].problem is not None


def test_majority_wins_and_a_tie_does_not(media: MemoryMedia) -> None:
    block = block_of(media)
    other = dataclasses.replace(block, label="other")
    offsets = block.copy_offsets
    media.store(offsets[0], superblock.encode(other, 0))
    assert superblock.choose(media)[0] == block
    media.store(offsets[1], superblock.encode(other, 1))
    with pytest.raises(CorruptionError):
        superblock.choose(media)
    media.store(offsets[2], superblock.encode(other, 2))
    assert superblock.choose(media)[0] == other


def test_misplaced_copy_does_not_count(media: MemoryMedia) -> None:
    block = block_of(media)
    larger = dataclasses.replace(
        block, size_bytes=block.size_bytes - layout.UNIT_BYTES_TEST, segment_count=20
    )
    media.store(block.copy_offsets[3], superblock.encode(larger, 3))
    found, states = superblock.choose(media)
    assert found == block
    assert states[3].problem is not None


def test_media_that_shrank(media: MemoryMedia) -> None:
    smaller = MemoryMedia(media.size_bytes // 2)
    smaller.store(0, media.read(0, smaller.size_bytes))
    with pytest.raises(MediaError, match="shrank"):
        superblock.choose(smaller)


def test_larger_media_is_fine(media: MemoryMedia) -> None:
    larger = MemoryMedia(media.size_bytes * 2)
    larger.store(0, media.read(0, media.size_bytes))
    assert superblock.choose(larger)[0] == block_of(media)


Change = Callable[[superblock.Superblock], superblock.Superblock]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unit_bytes", 4096),
        ("unit_bytes", 0),
        ("size_bytes", 0),
        ("size_bytes", 4 << 20 | 512),
        ("first_segment_offset", 0),
        ("segment_count", 0),
        ("segment_count", 15),
        ("segment_count", 1 << 40),
        ("segment_count", 64),
        ("segment_size_bytes", 0),
        ("segment_size_bytes", 3 << 16),
        ("segment_size_bytes", 1 << 40),
        ("ring_slots", 0),
        ("ring_slots", 1),
        ("ring_slots", 9),
        ("ring_slots", 4),
        ("chunk_bytes", 0),
        ("chunk_bytes", 5000),
        ("chunk_bytes", 1 << 21),
    ],
)
def test_contradicting_geometry(media: MemoryMedia, field: str, value: int) -> None:
    block = dataclasses.replace(block_of(media), **{field: value})  # type: ignore[arg-type]
    with pytest.raises(CorruptionError):
        superblock.decode(superblock.encode(block, 0), media_size_bytes=1 << 62)


def test_features(media: MemoryMedia) -> None:
    block = block_of(media)
    size = media.size_bytes

    def again(**changes: int) -> superblock.Superblock:
        changed = dataclasses.replace(block, **changes)  # type: ignore[arg-type]
        return superblock.decode(superblock.encode(changed, 0), media_size_bytes=size)

    assert not again(compat=1 << 63).must_be_read_only()
    assert again(read_only_compat=4).must_be_read_only()
    with pytest.raises(UnsupportedFormatError):
        again(incompat=1)
    with pytest.raises(UnsupportedFormatError):
        again(format_version=2)


# --- later versions -----------------------------------------------------------------------------


def later_copy(
    media: MemoryMedia, number: int, *, size_bytes: int = 512, version: int = 2
) -> bytes:
    """A copy as a later version may write it: the frame, more fields, checksum, copy number."""
    block = dataclasses.replace(block_of(media), format_version=version)
    data = bytearray(superblock.encode(block, number)[:504].ljust(size_bytes - 8, b"\x5a"))
    data[12:16] = size_bytes.to_bytes(4, "little")
    return bytes(data) + crc32c(bytes(data)).to_bytes(4, "little") + number.to_bytes(4, "little")


@pytest.mark.parametrize("size_bytes", [512, 520, 1024, 4096])
def test_a_larger_superblock_needs_a_newer_program(media: MemoryMedia, size_bytes: int) -> None:
    copies = [later_copy(media, number, size_bytes=size_bytes) for number in range(4)]
    offsets = block_of(media).copy_offsets
    for offset, copy in zip(offsets, copies, strict=True):
        media.store(offset, copy)
    with pytest.raises(UnsupportedFormatError, match="version 2, and this program knows") as caught:
        superblock.choose(media)
    assert caught.value.next_step == "use a newer cxlfs"
    for offset in offsets[1:]:
        spoil(media, offset)
    with pytest.raises(UnsupportedFormatError):
        superblock.choose(media)


def test_a_checksum_of_another_kind_needs_a_newer_program(media: MemoryMedia) -> None:
    for number, offset in enumerate(block_of(media).copy_offsets):
        media.store(offset, later_copy(media, number)[:504] + b"\1\2\3\4")
    with pytest.raises(UnsupportedFormatError, match="says that it has format version 2"):
        superblock.choose(media)


@pytest.mark.parametrize("size_bytes", [0, 504, 516, 4104, 1 << 31])
def test_a_size_that_cannot_be_is_damage(media: MemoryMedia, size_bytes: int) -> None:
    data = bytearray(later_copy(media, 0))
    data[12:16] = size_bytes.to_bytes(4, "little")
    data[504:508] = crc32c(bytes(data[:504])).to_bytes(4, "little")
    with pytest.raises(CorruptionError):
        superblock.decode(bytes(data), media_size_bytes=media.size_bytes)


def upgrade(media: MemoryMedia, steps: int, *, torn: bool, size_bytes: int = 1024) -> None:
    """What is there after ``steps`` copies of an upgrade in place, and half of the next."""
    offsets = block_of(media).copy_offsets
    copies = [later_copy(media, number, size_bytes=size_bytes) for number in range(4)]
    for step, number in enumerate((3, 2, 1, 0)):
        if step < steps:
            media.store(offsets[number], copies[number])
        elif step == steps and torn:
            media.store(offsets[number], copies[number][: size_bytes // 2])


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("steps", range(5))
def test_an_interrupted_upgrade_is_decided(media: MemoryMedia, steps: int, torn: bool) -> None:
    """Two copies of the later version make it the store's; before that it stays what it was."""
    block = block_of(media)
    upgrade(media, steps, torn=torn)
    if steps < 2:
        found, states = superblock.choose(media)
        assert found == block
        assert states[3].problem is not None or (steps == 0 and not torn)
        return
    with pytest.raises(UnsupportedFormatError, match="version 2") as caught:
        superblock.choose(media)
    assert ("upgrade was interrupted" in caught.value.message) == (
        steps < 3 or (steps == 3 and not torn)
    )


def test_one_of_each_is_the_earlier(media: MemoryMedia) -> None:
    """What was not agreed upon was not begun, so the earlier version still describes the store."""
    block = block_of(media)
    upgrade(media, 1, torn=False)
    for number in (1, 2):
        spoil(media, block.copy_offsets[number])
    assert superblock.choose(media)[0] == block


def test_a_feature_switched_on_in_place_is_decided_the_same_way(media: MemoryMedia) -> None:
    block = block_of(media)
    more = dataclasses.replace(block, compat=1)
    for number in (3, 2):
        media.store(block.copy_offsets[number], superblock.encode(more, number))
        wanted = block if number == 3 else more
        assert superblock.choose(media)[0] == wanted


def test_two_devices_need_a_newer_program(media: MemoryMedia) -> None:
    data = bytearray(media.read(0, 512))
    data[172:176] = (2).to_bytes(4, "little")
    data[504:508] = crc32c(bytes(data[:504])).to_bytes(4, "little")
    with pytest.raises(UnsupportedFormatError):
        superblock.decode(bytes(data), media_size_bytes=media.size_bytes)


def test_noise_with_a_true_checksum(rng: random.Random) -> None:
    for _ in range(3000):
        data = bytearray(layout.SUPERBLOCK_MAGIC + b"\1\0\0\0" + rng.randbytes(500))
        for start in range(24, 504, 4):
            if rng.random() < 0.7:
                data[start : start + 4] = bytes(4)
        data[504:508] = crc32c(bytes(data[:504])).to_bytes(4, "little")
        with pytest.raises(CxlfsError):
            superblock.decode(bytes(data), media_size_bytes=1 << 32)


@pytest.mark.parametrize(
    ("size", "segment"),
    [(40 * MIB, 2 * MIB), (GIB, 2 * MIB), (2 * GIB, 4 * MIB), (64 * GIB, 64 * MIB)],
)
def test_planned_geometry(size: int, segment: int) -> None:
    block = superblock.plan_geometry(size, label="x" * 64)
    assert block.segment_size_bytes == segment
    end = block.segment_offset(block.segment_count)
    assert end <= block.copy_offsets[2] < end + segment
    found = superblock.decode(superblock.encode(block, 2), media_size_bytes=size)
    assert found == block


def test_impossible_plans() -> None:
    for size in (0, 1, 39 * MIB):
        with pytest.raises(UsageError, match="small"):
            superblock.plan_geometry(size)
    for segment in (0, 1 << 20, 3 << 20, 128 << 20):
        with pytest.raises(UsageError, match="segment"):
            superblock.plan_geometry(8 * GIB, segment_size_bytes=segment)
    with pytest.raises(UsageError, match="label"):
        superblock.plan_geometry(GIB, label="ä" * 33)
