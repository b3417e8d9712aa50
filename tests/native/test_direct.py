"""What programs store by themselves becomes content: as it says, in its order, and nothing else."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from cxlfs.errors import CorruptionError, MediaError, OutOfMemoryError
from cxlfs.native import EventKind, FaultKind, Granularity, crc32c, fault_count, set_fault
from cxlfs.native.direct import (
    MAP_PAYLOAD_BYTES,
    ROW_BYTES,
    SLIP_ABSORBED_AT,
    SLIP_BYTES,
    SLIP_CLOSED,
    SLIP_COPYING_AT,
    SLIP_DESCRIPTOR_BYTES,
    SLIP_DESCRIPTORS,
    SLIP_DESCRIPTORS_AT,
    SLIP_STATE_AT,
    VERSION,
    Absorbed,
)
from tests.native.compiling import compile_program, needs_compiler
from tests.native.test_extent_writes import events_of, refs_of
from tests.support.direct import direct, state_of
from tests.support.direct_format import DESCRIPTOR, chunk_seed
from tests.support.extents import alive, import_maps, pattern

# --- content --------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", list(Granularity))
def test_what_was_appended_is_content(granularity: Granularity) -> None:
    with direct(granularity) as d:
        lease = d.lease()
        first, second = pattern(10_000, 1), pattern(5000, 2)
        assert d.program.write(lease, 0, first)
        assert d.program.write(lease, 10_000, second)
        assert d.live.size == 0
        assert d.absorb() == Absorbed(2, 15_000, None)
        assert d.live.read(0, 20_000) == first + second
        assert refs_of(d.live) == [(0, 15_000, lease.id, 0)]
        assert d.live.is_dirty
        assert d.engine.statistics().bytes_written == 15_000
        assert d.absorb() == Absorbed(0, 0, None)
        d.end()


def test_each_checksum_is_that_of_an_append() -> None:
    """An extent that a program filled and one that the engine wrote are told in the same way."""
    data = pattern(50_000, 3)
    with direct() as d:
        lease = d.lease()
        for start in range(0, 50_000, 1250):
            assert d.program.write(lease, start, data[start : start + 1250])
            if start % 3 == 0:
                assert d.absorb().error is None
        assert d.absorb().error is None
        info, crcs = d.engine.describe(lease.id)
        assert int(info["length"][0]) == 50_000
        assert crcs.tolist() == [
            _chunk_crc(lease.id, i, data[i * 4096 : (i + 1) * 4096]) for i in range(13)
        ]
        assert d.engine.verify(lease.id) == ([], 0, 50_000)
        d.end()


def _chunk_crc(extent_id: int, index: int, data: bytes) -> int:
    return crc32c(data, chunk_seed(extent_id, index))


def test_a_gap_in_the_extent() -> None:
    """Within a chunk, up to one, over several: its checksums come from the program, too."""
    with direct() as d:
        lease = d.lease()
        sent = []
        for gap, length in [(0, 100), (50, 100), (4096 - 250, 4096), (20_000, 7), (0, 9000)]:
            data = pattern(length, gap + length)
            assert d.program.write(lease, 10_000 * len(sent), data, gap)
            sent.append(data)
        assert d.absorb().count == 5
        for number, data in enumerate(sent):
            assert d.live.read(10_000 * number, len(data)) == data
        assert d.engine.verify(lease.id) == ([], 0, lease.end)
        d.end()


def test_a_bad_checksum_is_that_of_the_file() -> None:
    """Nobody looks at bytes while they are absorbed: whoever reads them does."""
    with direct() as d:
        lease = d.lease()
        assert d.program.write(lease, 0, pattern(9000, 1))
        d.place.flip(lease.media_offset + 5000, 3)
        assert d.absorb().error is None
        assert d.live.read(0, 4096) == pattern(9000, 1)[:4096]
        with pytest.raises(CorruptionError):
            d.live.read(4096, 1)
        d.end()


def test_page_granularity_remembers_what_to_sync() -> None:
    """A program does not sync: the next fence must, where it stored something."""
    for granularity in Granularity:
        with direct(granularity) as d:
            lease = d.lease()
            assert d.program.write(lease, 0, pattern(100, 1), gap=30)
            d.place.region.record(on=True)
            assert d.absorb().error is None
            found = [event for event in events_of(d.place) if event[0] == EventKind.WRITE_BACK]
            page = [(EventKind.WRITE_BACK, lease.media_offset, 130)]
            assert found == (page if granularity is Granularity.PAGE else [])
            d.place.region.record(on=False)
            if granularity is Granularity.PAGE:
                assert d.program.write(lease, 100, pattern(100, 2))
                set_fault(FaultKind.WRITE_BACK, 1)
                with pytest.raises(MediaError):
                    d.absorb()
                assert d.absorb() == Absorbed(1, 100, None)
            d.end()


def test_the_room_that_is_left_comes_back() -> None:
    with direct() as d:
        whole, part, unused = d.lease(), d.lease(), d.lease()
        assert d.program.write(whole, 0, pattern(whole.capacity_bytes, 1))
        assert d.program.write(part, 1 << 20, pattern(100, 1))
        assert d.absorb().count == 2
        end = whole.crc_offset + -(-whole.capacity_bytes // 4096) * 4
        assert d.end_lease(whole)[0] == -(-whole.crc_offset // 64) * 64
        assert end <= whole.media_offset + 65536
        assert d.end_lease(part) == (part.media_offset + 128, 65536 - 128)
        assert d.end_lease(unused) == (unused.media_offset, 65536)
        d.publish()
        d.live.truncate(0)
        d.publish()
        d.end()


def test_published_bytes_stay_apart() -> None:
    """Behind published bytes that end inside a unit nothing is appended; behind others it is."""
    with direct() as d:
        lease, other = d.lease(), d.lease()
        assert d.program.write(lease, 0, pattern(640, 1))
        assert d.program.write(other, 10_000, pattern(641, 1))
        assert d.absorb().count == 2
        d.publish()
        assert d.program.write(lease, 640, pattern(10, 1))
        assert d.program.write(other, 10_641, pattern(64, 1))
        found = d.absorb()
        assert (found.count, found.refused) == (1, True)
        assert found.error is not None
        assert "journal" in found.error
        d.end_lease(other)
        d.absorbed += 1
        d.end()


def test_deltas_take_what_is_open() -> None:
    with direct() as d:
        lease = d.lease()
        assert d.program.write(lease, 0, pattern(5000, 1))
        assert d.absorb().error is None
        delta = d.live.take_delta()
        assert delta.extents.tolist() == [(lease.id, lease.media_offset, 5000, 0, 0, 2)]
        delta.cancel(d.live)
        assert d.live.is_dirty
        assert d.program.write(lease, 5000, pattern(5000, 2))
        assert d.absorb().error is None
        d.end_lease(lease)
        d.publish()
        assert refs_of(d.committed) == [(0, 10_000, lease.id, 0)]
        counts, refs, infos, crcs = d.engine.export_maps([d.committed])
        other = d.place.another_engine()
        other.define(infos, crcs)
        first = np.array([0, counts[0]], dtype=np.uint64)
        sizes, owners = np.array([10_000], dtype=np.uint64), np.array([1], dtype=np.uint64)
        [again] = import_maps(other, owners, sizes, first, refs)
        assert again.read(0, 10_000) == pattern(5000, 1) + pattern(5000, 2)
        again.close()
        other.close()
        d.end()


def test_the_cleaner_keeps_away_from_open_room() -> None:
    with direct() as d:
        lease = d.lease()
        segment = (lease.media_offset - d.engine.first) // d.engine.segment_size
        assert d.program.write(lease, 0, pattern(5000, 1))
        assert d.absorb().error is None
        d.publish()
        assert alive(d.engine, segment).busy.tolist() == [True]
        d.close_slip()
        ranges = alive(d.engine, segment).ranges
        assert ranges["length"].tolist() == [5000]
        target = d.place.open_extent(70_000)
        moves = d.engine.copy_ranges(ranges, target)
        d.engine.publish(target)
        d.engine.move([d.live, d.committed], moves)
        d.engine.close_lease(target)
        assert d.live.read(0, 5000) == d.committed.read(0, 5000) == pattern(5000, 1)
        assert lease.id not in d.engine.list()["id"]
        d.new_slip()
        d.end()


def test_open_room_is_not_shared() -> None:
    with direct() as d:
        lease = d.lease()
        assert d.program.write(lease, 0, pattern(5000, 1))
        assert d.absorb().error is None
        assert d.live.twin(7) is None
        d.end_lease(lease)
        twin = d.live.twin(7)
        assert twin is not None
        assert twin.read(0, 5000) == pattern(5000, 1)
        twin.close()
        d.end()


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("references", [0, 1, 126, 400])
def test_each_allocation_may_fail(references: int) -> None:
    """What was taken counts, the one at which memory ended does not, and it goes on from there."""
    for nth in range(1, 1000):
        with direct() as d:
            filled = d.lease(1 << 17)
            for number in range(references):
                assert d.program.write(filled, number * 8192, b"x")
            assert d.absorb().count == references
            data = [pattern(3000, number) for number in range(8)]
            lease = d.lease(1 << 17)
            for number, piece in enumerate(data):
                assert d.program.write(lease, 4096 + number * 50_000, piece)
            before = state_of(d)
            set_fault(FaultKind.ALLOCATE, nth)
            try:
                found = d.absorb()
            except OutOfMemoryError:
                found = None
                assert state_of(d) == before
            count = fault_count(FaultKind.ALLOCATE)
            set_fault(FaultKind.ALLOCATE, 0)
            if found is not None and found.error is not None:
                assert 0 < found.count < 8
                assert not found.refused
                assert found.bytes == found.count * 3000
            assert d.absorb().error is None
            for number, piece in enumerate(data):
                assert d.live.read(4096 + number * 50_000, 3000) == piece
            d.live.truncate(0)
            d.end()
        if count < nth:
            assert nth > 1
            return
    pytest.fail("it never succeeded")


# --- numbers ------------------------------------------------------------------------------------

FIELDS = ("sequence", "lease_id", "file_offset", "extent_offset", "length_bytes", "tail_crc")
NUMBERS = {
    "CXL_SLIP_CLOSED": SLIP_CLOSED,
    "CXL_SLIP_BYTES": SLIP_BYTES,
    "CXL_SLIP_DESCRIPTORS": SLIP_DESCRIPTORS,
    "CXL_SLIP_DESCRIPTORS_AT": SLIP_DESCRIPTORS_AT,
    "offsetof(cxl_slip, state)": SLIP_STATE_AT,
    "offsetof(cxl_slip, copying)": SLIP_COPYING_AT,
    "offsetof(cxl_slip, absorbed)": SLIP_ABSORBED_AT,
    "CXL_DIRECT_VERSION": VERSION,
    "sizeof(cxl_direct_row)": ROW_BYTES,
    "CXL_DIRECT_MAP_PAYLOAD": MAP_PAYLOAD_BYTES,
    "sizeof(cxl_slip_descriptor)": DESCRIPTOR.size,
    **{f"offsetof(cxl_slip_descriptor, {name})": 8 * i for i, name in enumerate(FIELDS)},
    "offsetof(cxl_slip_descriptor, flags)": 44,
    "offsetof(cxl_slip_descriptor, reserved)": 48,
}


@needs_compiler
def test_numbers_are_those_of_the_header(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", "#include <stdio.h>", '#include "client/direct.h"']
    prints = [f'    printf("%llu\\n", (unsigned long long)({name}));' for name in NUMBERS]
    lines += ["int main(void)", "{", *prints, "    return 0;", "}", ""]
    (tmp_path / "numbers.c").write_text("\n".join(lines))
    compile_program([str(tmp_path / "numbers.c")], [], tmp_path / "numbers")
    command = [tmp_path / "numbers"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert dict(zip(NUMBERS, map(int, said), strict=True)) == NUMBERS
    assert SLIP_DESCRIPTORS_AT + SLIP_DESCRIPTORS * SLIP_DESCRIPTOR_BYTES <= SLIP_BYTES
