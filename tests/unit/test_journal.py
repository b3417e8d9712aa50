"""Journal records: appended, torn, damaged, mirrored; what a reader accepts and what it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from cxlfs.errors import InvariantError
from cxlfs.format import (
    journal,
    journal_chain,
    journal_reader,
    layout,
    segments,
    superblock,
)
from cxlfs.media import Granularity, MemoryMedia
from cxlfs.native import crc32c
from tests.support.stores import format_small

HEADER = segments.SegmentHeader(
    role=layout.ROLE_JOURNAL, index=10, partner=20, epoch=50, nonce=12345, first_lsn=100
)
PAYLOADS = [b"", b"x" * 8, b"y" * 64, b"z" * 200, b"last one" * 10]


class Bench:
    """A media with one journal segment and its mirror."""

    def __init__(self, granularity: Granularity = Granularity.LINE) -> None:
        self.media = MemoryMedia(4 << 20, granularity)
        format_small(self.media)
        self.block = superblock.choose(self.media)[0]
        for header in (
            HEADER,
            dataclasses.replace(HEADER, index=20, partner=10, copy_number=1),
        ):
            segments.store(self.media, self.block, header)
        self.journal = journal.Journal(self.media, self.block, HEADER, last_lsn=99)
        self.ends: list[int] = []

    def fill(self, payloads: list[bytes], *, fence_each: bool = True) -> None:
        for payload in payloads:
            self.journal.append(payload, len(payload) // 8)
            self.ends.append(layout.SEGMENT_HEADER_BYTES + self.journal.used_bytes)
            if fence_each:
                self.journal.fence()

    def read(
        self, changes: dict[str, int] | None = None, *, compare: bool = False
    ) -> tuple[list[journal_reader.Record], journal_reader.SegmentScan]:
        header = dataclasses.replace(HEADER, **(changes or {}))
        reader = journal_reader.SegmentReader(
            self.media, self.block, header, expected_lsn=100, compare=compare
        )
        return list(reader), reader.scan

    def spoil(self, position: int, copies: tuple[int, ...] = (10, 20), value: int = 0xFF) -> None:
        for index in copies:
            offset = self.block.segment_offset(index) + position
            byte = self.media.read(offset, 1)[0] ^ value
            self.media.store(offset, bytes([byte]))


@pytest.fixture(autouse=True, params=[None, 256])
def window_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """Everything once more with windows that hold a record or two."""
    if request.param is not None:
        for name in ("_WINDOW_BYTES_FIRST", "_WINDOW_BYTES_MAX", "_RECORD_BYTES"):
            monkeypatch.setattr(journal_reader, name, request.param)
        monkeypatch.setattr(journal_reader, "_LOOK_AHEAD_BYTES", request.param)
    return cast("int | None", request.param)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.fill(PAYLOADS)
    yield made
    made.media.close()


def test_round_trip(bench: Bench) -> None:
    records, scan = bench.read()
    assert [record.payload for record in records] == PAYLOADS
    assert [record.lsn for record in records] == [100, 101, 102, 103, 104]
    assert [record.fenced_lsn for record in records] == [99, 100, 101, 102, 103]
    assert [record.length % 64 for record in records] == [0] * 5
    assert (scan.last_lsn, scan.end, scan.lost_lsn) == (104, bench.ends[-1], None)
    times = [record.time_ns for record in records]
    assert times == sorted(times)


def test_both_copies_are_equal(bench: Bench) -> None:
    primary, mirror = (
        bench.media.read(bench.block.segment_offset(i) + 4096, 2048) for i in (10, 20)
    )
    assert primary == mirror


def test_torn_at_every_byte_of_the_last_record(bench: Bench, window_bytes: int | None) -> None:
    """In small windows at each third one: the reader looks through the segment for each."""
    start, end = bench.ends[-2:]
    whole = bench.media.read(bench.block.segment_offset(10) + start, end - start)
    for cut in [*range(0, end - start, 1 if window_bytes is None else 3), end - start]:
        torn = whole[:cut] + bytes(end - start - cut)
        for index in (10, 20):
            bench.media.store(bench.block.segment_offset(index) + start, torn)
        records, scan = bench.read()
        complete = torn == whole
        assert len(records) == 4 + complete
        assert scan.lost_lsn is None
        assert scan.end == (end if complete else start)


def test_every_bit_of_a_record(bench: Bench) -> None:
    start, end = bench.ends[0], bench.ends[1]
    for position in range(start, end):
        for bit in range(8):
            bench.spoil(position, value=1 << bit)
            records, scan = bench.read()
            assert len(records) == 1
            assert scan.lost_lsn == 101
            bench.spoil(position, value=1 << bit)


@pytest.mark.parametrize("damaged", range(5))
@pytest.mark.parametrize("copy", [10, 20])
def test_one_copy_is_enough(bench: Bench, damaged: int, copy: int) -> None:
    start = ([layout.SEGMENT_HEADER_BYTES, *bench.ends])[damaged]
    bench.spoil(start + 20, (copy,))
    records, scan = bench.read(compare=True)
    assert [record.payload for record in records] == PAYLOADS
    assert scan.mirror_used == (copy == 10)
    assert [(bad.lsn, bad.copy_number) for bad in scan.bad_copies] == [
        (100 + damaged, 0 if copy == 10 else 1)
    ]
    assert scan.lost_lsn is None


def test_copies_that_contradict_each_other(bench: Bench) -> None:
    """The mirror has another valid record at the same place."""
    other = Bench()
    other.fill([b"", b"another!"])
    offset = bench.ends[0]
    data = other.media.read(other.block.segment_offset(10) + offset, 128)
    bench.media.store(bench.block.segment_offset(20) + offset, data)
    other.media.close()
    _, scan = bench.read(compare=True)
    assert [bad.lsn for bad in scan.bad_copies] == [101]


def test_alternating_copies(bench: Bench) -> None:
    for number, start in enumerate([layout.SEGMENT_HEADER_BYTES, *bench.ends[:-1]]):
        bench.spoil(start + 8, (10 if number % 2 else 20,))
    records, scan = bench.read()
    assert len(records) == 5
    assert scan.mirror_used == 2


def test_missing_record_that_was_durable(bench: Bench) -> None:
    bench.spoil(bench.ends[1] + 3)
    records, scan = bench.read()
    assert len(records) == 2
    assert scan.lost_lsn == 102


def test_missing_last_record_is_a_torn_end(bench: Bench) -> None:
    bench.spoil(bench.ends[3] + 3)
    records, scan = bench.read()
    assert len(records) == 4
    assert scan.lost_lsn is None


def test_queued_records_are_no_proof() -> None:
    """Page media: records wait for one msync; a hole among them is a torn end."""
    bench = Bench(Granularity.PAGE)
    assert not bench.journal.must_fence_each
    bench.fill([b"a" * 8])
    bench.fill([b"b" * 8, b"c" * 8, b"d" * 8], fence_each=False)
    bench.spoil(bench.ends[0] + 3)
    records, scan = bench.read()
    assert len(records) == 1
    assert scan.lost_lsn is None
    bench.media.close()
    bench = Bench(Granularity.PAGE)
    bench.fill([b"a" * 8, b"b" * 8, b"c" * 8], fence_each=False)
    bench.journal.fence()
    bench.fill([b"d" * 8], fence_each=False)
    bench.spoil(bench.ends[1] + 3)
    records, scan = bench.read()
    assert len(records) == 2
    assert scan.lost_lsn == 102
    bench.media.close()


@pytest.mark.parametrize("changes", [{"epoch": 51}, {"epoch": 49}, {"nonce": 12346}])
def test_wrong_epoch_or_nonce(bench: Bench, changes: dict[str, int]) -> None:
    records, scan = bench.read(changes)
    assert records == []
    assert scan.lost_lsn is None


def test_wrong_first_lsn(bench: Bench) -> None:
    reader = journal_reader.SegmentReader(bench.media, bench.block, HEADER, expected_lsn=101)
    assert list(reader) == []
    reader = journal_reader.SegmentReader(bench.media, bench.block, HEADER, expected_lsn=99)
    assert list(reader) == []
    assert reader.scan.lost_lsn == 99


def test_record_at_the_end_of_the_segment() -> None:
    bench = Bench()
    bench.fill([*([b"x" * 448] * 119), b"x" * (448 - journal.CONTINUATION_BYTES)])
    assert bench.journal.free_bytes == 0
    with pytest.raises(InvariantError):
        bench.journal.append(b"", 0)
    bench.journal.end(dataclasses.replace(HEADER, epoch=51, first_lsn=220))
    records, scan = bench.read()
    assert len(records) == 120
    assert [header.epoch for header in scan.continuations] == [51]
    assert scan.end + journal.CONTINUATION_BYTES == 65536
    bench.media.close()


def test_payload_that_looks_like_a_record(bench: Bench) -> None:
    """Bytes that a user chose, at a place where the next record could begin."""
    first = bench.block.segment_offset(10) + layout.SEGMENT_HEADER_BYTES
    header = bench.media.read(first, 64)
    bench.fill([header * 3, b"a" * 8, bench.media.read(first + 64, 64) * 9, b"b" * 8])
    records, scan = bench.read()
    assert [record.lsn for record in records] == list(range(100, 109))
    assert scan.lost_lsn is None


def test_many_records_behind_a_damaged_one(bench: Bench) -> None:
    payloads = [b"%08d" % number for number in range(300)]
    bench.fill(payloads)
    for start in bench.ends[4:300:50]:
        bench.spoil(start + 70, (10,))
    reader = journal_reader.SegmentReader(bench.media, bench.block, HEADER, expected_lsn=100)
    batches = list(reader.batches())
    records = [record for batch in batches for record in batch]
    assert [record.payload for record in records] == PAYLOADS + payloads
    assert reader.scan.mirror_used == 6
    for batch in batches:
        for record in batch:
            data = bench.media.read(record.media_offset, record.length)
            assert record.lsn == int.from_bytes(data[16:24], "little")
            assert record.copy_number == (record.media_offset > bench.block.segment_offset(20))


def test_forged_headers_are_not_summed_for_ever(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each claims the rest of the segment as its payload, and to prove that a record is missing."""
    seed = segments.record_seed(HEADER.nonce, HEADER.epoch, bench.block.uuid)
    size = bench.block.segment_size_bytes
    for position in range(bench.ends[-1] + 64, size, 64):
        row = np.zeros(1, dtype=layout.RECORD_DTYPE)
        row["magic"], row["type"] = layout.RECORD_MAGIC, layout.RECORD_TRANSACTION
        row["length"] = size - position
        row["lsn"], row["fenced_lsn"] = 1000 + position, 999
        row["epoch"] = HEADER.epoch
        row["crc"] = crc32c(row.tobytes()[:60], seed)
        bench.media.store(bench.block.segment_offset(10) + position, row.tobytes())
    summed = 0

    def counting(data: bytes, start: int = 0) -> int:
        nonlocal summed
        summed += len(data)
        return crc32c(data, start)

    monkeypatch.setattr(journal_reader, "crc32c", counting)
    records, scan = bench.read()
    assert len(records) == len(PAYLOADS)
    assert scan.lost_lsn == 105
    assert summed < 12 * size


def test_header_from_either_copy(bench: Bench) -> None:
    arguments = (bench.media, bench.block, 10, 20)
    for spoiled in ((), (10,), (20,)):
        bench.spoil(30, spoiled)
        found = journal_reader.read_header(*arguments, 50)
        assert found is not None
        assert (found.index, found.partner, found.copy_number) == (10, 20, 0)
        bench.spoil(30, spoiled)
    assert journal_reader.read_header(*arguments, 51) is None
    assert journal_reader.read_header(bench.media, bench.block, 20, 10, 50) is None
    assert journal_reader.read_header(bench.media, bench.block, 10, 21, 50) is None
    bench.spoil(30)
    assert journal_reader.read_header(*arguments, 50) is None


def test_successor() -> None:
    headers = [
        dataclasses.replace(HEADER, index=1, partner=2, epoch=60, first_lsn=105),
        dataclasses.replace(HEADER, index=4, partner=3, epoch=62, first_lsn=105, copy_number=1),
        dataclasses.replace(HEADER, index=5, partner=6, epoch=63, first_lsn=106),
        dataclasses.replace(HEADER, index=7, epoch=64, first_lsn=105, role=layout.ROLE_IMAGE),
    ]
    found = journal_reader.find_successor(headers, after_epoch=50, first_lsn=105)
    assert found is not None
    assert (found.index, found.partner, found.epoch) == (3, 4, 62)
    assert journal_reader.find_successor(headers, after_epoch=62, first_lsn=105) is None


def successor(**changes: int) -> segments.SegmentHeader:
    """The header of a journal behind that of the bench."""
    values = {"index": 30, "partner": 31, "epoch": 51, "first_lsn": 105, "nonce": 77} | changes
    return dataclasses.replace(HEADER, **values)


@pytest.mark.parametrize("compare", [False, True])
def test_continuation_in_either_copy(bench: Bench, compare: bool) -> None:
    header = successor()
    bench.journal.end(header)
    for copies in ((), (10,), (20,), (10, 20)):
        bench.spoil(bench.ends[-1] + 70, copies)
        records, scan = bench.read(compare=compare)
        assert len(records) == 5
        assert scan.continuations == ([] if len(copies) == 2 else [header])
        assert [bad.copy_number for bad in scan.bad_continuations] == (
            [(10, 20).index(copies[0])] if len(copies) == 1 else []
        )
        bench.spoil(bench.ends[-1] + 70, copies)


def test_every_bit_of_a_continuation(bench: Bench, window_bytes: int | None) -> None:
    """In small windows one bit of each byte: the reader looks through the segment for each bit."""
    bench.journal.end(successor())
    start = bench.ends[-1]
    for position in range(start, start + journal.CONTINUATION_BYTES):
        for bit in range(8) if window_bytes is None else [position % 8]:
            bench.spoil(position, value=1 << bit)
            records, scan = bench.read()
            assert len(records) == 5
            assert scan.continuations == []
            assert scan.lost_lsn is None
            bench.spoil(position, value=1 << bit)


def test_continuations_that_cannot_be(bench: Bench) -> None:
    """Valid by their checksums, but of a segment that nothing can go on in."""
    for wrong in ({"epoch": 50}, {"first_lsn": 104}, {"index": 10_000}, {"role": 1}):
        store_continuation(bench, successor(**wrong))
        assert bench.read()[1].continuations == [], wrong
    store_continuation(bench, successor())
    assert bench.read()[1].continuations == [successor()]


def store_continuation(bench: Bench, header: segments.SegmentHeader) -> None:
    journal.store_continuation(
        *(bench.media, bench.block, HEADER, header), position=bench.ends[-1], fenced_lsn=104
    )


def test_continuations_that_differ(bench: Bench) -> None:
    """A crash while the second one took the place of the first: both count, the newer one first."""
    older, newer = successor(), successor(epoch=52, index=40, partner=41)
    store_continuation(bench, newer)
    place = bench.block.segment_offset(10) + bench.ends[-1]
    data = bench.media.read(place, journal.CONTINUATION_BYTES)
    store_continuation(bench, older)
    bench.media.store(place, data)
    scan = bench.read()[1]
    assert scan.continuations == [newer, older]
    assert [bad.copy_number for bad in scan.bad_continuations] == [1]


def test_next_of_the_chain(bench: Bench) -> None:
    """By headers, or else by the continuation, if the journal that it names was ever used."""
    header = successor()
    bench.journal.end(header)
    scan = bench.read()[1]

    def following() -> segments.SegmentHeader | None:
        headers = segments.read_all(bench.media, bench.block)
        return journal_chain.find_next(bench.media, bench.block, headers, scan)

    assert following() is None
    following_journal = journal.Journal(bench.media, bench.block, header, last_lsn=104)
    following_journal.append(b"", 0)
    assert following() == header
    segments.store(bench.media, bench.block, dataclasses.replace(header, epoch=52, nonce=78))
    newer = following()
    assert newer is not None
    assert newer.epoch == 52


def test_record_of_unknown_type(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later program has written it: it is no torn end."""
    with monkeypatch.context() as patch:
        patch.setattr(layout, "RECORD_TRANSACTION", 3)
        bench.journal.append(b"", 0)
    records, scan = bench.read()
    assert len(records) == 5
    assert scan.unknown_type == 3
    assert scan.lost_lsn is None
