"""Mapped regions: ranges, errors, the fault switches, what each granularity does."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import (
    InvariantError,
    MediaError,
    MediaUnavailableError,
    NotPersistentError,
    OutOfMemoryError,
    ReadOnlyError,
)
from cxlfs.native import (
    FaultKind,
    Granularity,
    MappedRegion,
    crc32c,
    crc32c_each,
    fault_count,
    set_fault,
)

SIZE = 1 << 16
Call = Callable[[MappedRegion, int, int], object]

ACCESSES: dict[str, Call] = {
    "read": lambda region, offset, length: region.read(offset, length),
    "read_into": lambda region, offset, length: region.read_into(offset, bytearray(length)),
    "read_into_crc32c": lambda region, offset, length: region.read_into_crc32c(
        offset, bytearray(length)
    ),
    "crc32c": lambda region, offset, length: region.crc32c(offset, length),
    "store": lambda region, offset, length: region.store(offset, bytes(length)),
    "copy": lambda region, offset, length: region.copy(offset, bytes(length)),
    "copy_crc32c": lambda region, offset, length: region.copy_crc32c(offset, bytes(length)),
    "write_back": lambda region, offset, length: region.write_back(offset, length),
}
STORES = ("store", "copy", "copy_crc32c", "write_back")


def anonymous(granularity: Granularity = Granularity.LINE, size_bytes: int = SIZE) -> MappedRegion:
    return MappedRegion(MappedRegion.anonymous_handle(size_bytes, granularity=granularity))


@pytest.fixture
def region() -> Iterator[MappedRegion]:
    made = anonymous()
    yield made
    made.close()


def map_file(
    path: Path, size_bytes: int, *, read_only: bool = False, synchronous: bool = False
) -> MappedRegion:
    descriptor = os.open(path, os.O_RDONLY if read_only else os.O_RDWR)
    try:
        handle = MappedRegion.map_handle(
            descriptor,
            size_bytes,
            granularity=Granularity.PAGE,
            read_only=read_only,
            synchronous=synchronous,
        )
    finally:
        os.close(descriptor)
    return MappedRegion(handle, read_only=read_only)


# ------------------------------------------------------------------------------- ranges and data


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize(
    ("offset", "length"),
    [(SIZE, 1), (0, SIZE + 1), (SIZE - 1, 2), (-1, 1), (1 << 63, 1), ((1 << 64) - 1, 2)],
)
def test_range_outside_the_region_is_refused(
    region: MappedRegion, name: str, offset: int, length: int
) -> None:
    with pytest.raises(MediaError, match="outside the media") as caught:
        ACCESSES[name](region, offset, length)
    assert (caught.value.offset, caught.value.length) == (offset, length)


@pytest.mark.parametrize("name", ["read", "crc32c", "write_back"])
def test_hostile_length_allocates_nothing(region: MappedRegion, name: str) -> None:
    for length in (1 << 62, -1):
        with pytest.raises(MediaError, match="outside the media"):
            ACCESSES[name](region, 0, length)


@pytest.mark.parametrize("name", ACCESSES)
@pytest.mark.parametrize("offset", [0, SIZE])
def test_empty_range_is_allowed_up_to_the_end(region: MappedRegion, name: str, offset: int) -> None:
    ACCESSES[name](region, offset, 0)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, np.array])
def test_data_of_every_buffer_type(region: MappedRegion, kind: Callable[..., bytes]) -> None:
    plain = bytes(range(200))
    data = np.frombuffer(plain, dtype=np.uint8) if kind is np.array else kind(plain)
    assert crc32c(data) == crc32c(plain)
    region.store(3, data)
    assert region.read(3, 200) == plain
    assert region.crc32c(3, 200, 5) == crc32c(plain, 5)
    region.copy(1000, data)
    assert region.copy_crc32c(2000, data, 9) == crc32c(plain, 9)
    target = bytearray(1200)
    region.read_into(1000, target)
    assert target[:200] == target[1000:] == plain


def test_checksums_of_many_ranges() -> None:
    data = bytes(range(256)) * 4
    offsets = np.array([0, 5, 1024, 1000, 64], dtype=np.uint64)
    lengths = np.array([1024, 0, 0, 24, 700], dtype=np.uint64)
    expected = [
        crc32c(data[start : start + length], 9)
        for start, length in zip(offsets.tolist(), lengths.tolist(), strict=True)
    ]
    assert crc32c_each(data, offsets, lengths, 9).tolist() == expected
    assert crc32c_each(data, offsets[::2], lengths[::2], 9).tolist() == expected[::2]
    assert len(crc32c_each(b"", offsets[:0], lengths[:0])) == 0


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 1025), (1024, 1), (1025, 0), (64, (1 << 64) - 64), (1 << 63, 1 << 63)],
)
def test_range_outside_the_data_is_never_summed(offset: int, length: int) -> None:
    """Sums of hostile lengths may wrap around: nothing may be read before they are checked."""
    ranges = np.array([[0, 1], [offset, length]], dtype=np.uint64)
    with pytest.raises(InvariantError, match="ranges"):
        crc32c_each(bytes(1024), ranges[:, 0], ranges[:, 1])
    with pytest.raises(InvariantError, match="as many"):
        crc32c_each(bytes(1024), ranges[:, 0], ranges[:1, 1])


def test_word_is_stored_little_endian_at_multiples_of_8_only(region: MappedRegion) -> None:
    region.store_u64(8, 0x0102030405060708)
    assert region.read(8, 8) == bytes([8, 7, 6, 5, 4, 3, 2, 1])
    with pytest.raises(InvariantError):
        region.store_u64(12, 1)
    with pytest.raises(MediaError, match="outside"):
        region.store_u64(SIZE - 4, 1)


def test_bits_of_a_word_are_set_in_one_step(region: MappedRegion) -> None:
    region.store_u64(8, 0xF0)
    assert region.or_u64(8, 1 << 63 | 0x11) == 0xF0
    assert region.load_u64(8) == 1 << 63 | 0xF1
    assert region.or_u64(8, 0) == 1 << 63 | 0xF1
    assert region.read(0, 24) == struct.pack("<3Q", 0, 1 << 63 | 0xF1, 0)
    for call in (region.load_u64, lambda offset: region.or_u64(offset, 1)):
        with pytest.raises(InvariantError):
            call(12)
        for offset in (SIZE - 4, SIZE, -8):
            with pytest.raises(MediaError, match="outside"):
                call(offset)


def test_each_thread_sets_its_bits(region: MappedRegion) -> None:
    """None is lost, and each change of the word has one cause."""
    befores: list[int] = []

    def work(first: int) -> None:
        for bit in range(first, 64, 4):
            befores.append(region.or_u64(0, 1 << bit))  # noqa: PERF401 - threads share it

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert region.load_u64(0) == (1 << 64) - 1
    assert sorted(before.bit_count() for before in befores) == list(range(64))


def test_closed_region_raises_and_closes_again(region: MappedRegion) -> None:
    region.close()
    region.close()
    for call in ACCESSES.values():
        with pytest.raises(InvariantError, match="closed"):
            call(region, 0, 1)
    with pytest.raises(InvariantError, match="closed"):
        region.fence()


@pytest.mark.parametrize("size_bytes", [0, 1 << 63, (1 << 64) - 1])
def test_impossible_size_is_refused(size_bytes: int) -> None:
    with pytest.raises(MediaUnavailableError):
        anonymous(size_bytes=size_bytes)


def test_read_only_region_refuses_stores(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(b"z" * 8192)
    region = map_file(path, 8192, read_only=True)
    assert region.read(8190, 2) == b"zz"
    for name in STORES:
        with pytest.raises(ReadOnlyError):
            ACCESSES[name](region, 0, 8)
    with pytest.raises(ReadOnlyError):
        region.store_u64(0, 1)
    with pytest.raises(ReadOnlyError):
        region.or_u64(0, 1)
    assert region.load_u64(8184) == int.from_bytes(b"z" * 8, "little")
    region.close()


def test_file_without_dax_is_not_persistent_by_line(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(4096))
    with pytest.raises(NotPersistentError):
        map_file(path, 4096, synchronous=True)


# ------------------------------------------------------------------------------------ durability


def test_page_granularity_reaches_the_file(tmp_path: Path) -> None:
    path = tmp_path / "image"
    path.write_bytes(bytes(SIZE))
    region = map_file(path, SIZE)
    region.store(100, b"stored")
    region.write_back(100, 6)
    region.copy(5000, b"copied" * 100)
    region.fence()
    region.close()
    content = path.read_bytes()
    assert content[100:106] == b"stored"
    assert content[5000:5600] == b"copied" * 100


@pytest.mark.parametrize("backed", [False, True])
def test_failed_msync_is_never_retried_into_a_success(tmp_path: Path, *, backed: bool) -> None:
    """The kernel reports a lost page once: whoever asks again would be told that all is well."""
    path = tmp_path / "image"
    path.write_bytes(bytes(SIZE))
    region = map_file(path, SIZE) if backed else anonymous(Granularity.PAGE)
    region.store(0, b"1")
    region.persist(0, 1)
    set_fault(FaultKind.MSYNC, 1)
    region.store(0, b"2")
    region.write_back(0, 1)
    with pytest.raises(MediaError, match="made durable"):
        region.fence()
    set_fault(FaultKind.MSYNC, 0)
    with pytest.raises(MediaError):
        region.fence()
    region.store(8192, b"3")
    with pytest.raises(MediaError):
        region.persist(8192, 1)
    assert region.read(0, 1) == b"2"
    region.close()


def test_fence_without_dirty_pages_calls_no_msync() -> None:
    region = anonymous(Granularity.PAGE)
    set_fault(FaultKind.MSYNC, 1)
    region.fence()
    assert fault_count(FaultKind.MSYNC) == 0
    region.copy(4096, b"dirty")
    with pytest.raises(MediaError):
        region.fence()
    assert fault_count(FaultKind.MSYNC) == 1


# --------------------------------------------------------------------------------- fault switches


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (FaultKind.WRITE_BACK, "write_back"),
        (FaultKind.COPY, "copy"),
        (FaultKind.COPY, "copy_crc32c"),
    ],
)
def test_nth_call_fails_once(region: MappedRegion, kind: FaultKind, name: str) -> None:
    set_fault(kind, 3)
    outcomes = []
    for _ in range(5):
        try:
            ACCESSES[name](region, 0, 64)
            outcomes.append("done")
        except MediaError:
            outcomes.append("failed")
    assert outcomes == ["done", "done", "failed", "done", "done"]
    assert fault_count(kind) == 5
    set_fault(kind, 0)
    ACCESSES[name](region, 0, 64)
    assert fault_count(kind) == 0


def test_copy_that_fails_changes_nothing(region: MappedRegion) -> None:
    set_fault(FaultKind.COPY, 1)
    with pytest.raises(MediaError):
        region.copy(0, b"never")
    assert region.read(0, 5) == bytes(5)


@pytest.mark.parametrize("granularity", list(Granularity))
def test_fence_can_fail_once(granularity: Granularity) -> None:
    region = anonymous(granularity)
    region.copy(0, b"data")
    set_fault(FaultKind.FENCE, 1)
    with pytest.raises(MediaError, match="made durable"):
        region.fence()
    region.fence()


def test_mapping_can_fail() -> None:
    set_fault(FaultKind.MAP, 2)
    anonymous().close()
    with pytest.raises(OutOfMemoryError):
        anonymous()
    anonymous().close()


def test_unknown_switch_is_refused() -> None:
    with pytest.raises(InvariantError):
        set_fault(len(FaultKind), 1)  # type: ignore[arg-type]
    assert fault_count(len(FaultKind)) == 0  # type: ignore[arg-type]


def test_reading_and_summing_in_one_pass(region: MappedRegion) -> None:
    data = bytes(range(256)) * 33
    region.store(100, data)
    target = bytearray(len(data) - 7)
    assert region.read_into_crc32c(100, target, 5) == crc32c(data[:-7], 5)
    assert target == data[:-7]
