"""The recorder: what is logged, in which order, and what is not."""

from __future__ import annotations

import struct
import threading

import pytest

from cxlfs.errors import MediaError
from cxlfs.native import EventKind, FaultKind, Granularity, MappedRegion, set_fault

SIZE = 1 << 16
Event = tuple[EventKind, int, int, bytes]


def region_of(granularity: Granularity) -> MappedRegion:
    region = MappedRegion(MappedRegion.anonymous_handle(SIZE, granularity=granularity))
    region.record(on=True)
    return region


def events(region: MappedRegion) -> list[Event]:
    """(kind, offset, length, payload) of each event; checks the padding."""
    log, position, found = region.recorded(), 0, []
    while position < len(log):
        kind, _, offset, length = struct.unpack_from("=IIQQ", log, position)
        position += 24
        payload = b""
        if kind in (EventKind.STORE, EventKind.COPY):
            payload = log[position : position + length]
            padding = log[position + length : position + -(-length // 8) * 8]
            assert padding == bytes(-length % 8)
            position += -(-length // 8) * 8
        found.append((EventKind(kind), offset, length, payload))
    return found


@pytest.mark.parametrize("granularity", list(Granularity))
def test_every_change_is_logged_in_order(granularity: Granularity) -> None:
    region = region_of(granularity)
    region.store(3, b"abc")
    region.store_u64(16, 7)
    region.or_u64(16, 1 << 63 | 9)
    region.load_u64(16)
    region.write_back(3, 21)
    region.record_mark(1 << 63)
    region.copy(100, b"x" * 77)
    region.copy_crc32c(300, b"y" * 5)
    region.fence()
    region.read(0, 100)
    assert events(region) == [
        (EventKind.STORE, 3, 3, b"abc"),
        (EventKind.STORE, 16, 8, struct.pack("<Q", 7)),
        (EventKind.STORE, 16, 8, struct.pack("<Q", 1 << 63 | 15)),
        (EventKind.WRITE_BACK, 3, 21, b""),
        (EventKind.MARK, 1 << 63, 0, b""),
        (EventKind.COPY, 100, 77, b"x" * 77),
        (EventKind.COPY, 300, 5, b"y" * 5),
        (EventKind.FENCE, 0, 0, b""),
    ]


def test_off_keeps_the_log_and_on_begins_a_new_one() -> None:
    region = region_of(Granularity.LINE)
    region.store(0, b"one")
    region.record(on=False)
    region.store(0, b"two")
    region.record_mark(5)
    assert [event[3] for event in events(region)] == [b"one"]
    region.record(on=True)
    assert events(region) == []
    region.store(0, b"three")
    assert [event[3] for event in events(region)] == [b"three"]


def test_what_failed_or_changed_nothing_is_not_logged() -> None:
    region = region_of(Granularity.PAGE)
    region.store(0, b"")
    region.write_back(0, 0)
    for kind in (FaultKind.COPY, FaultKind.WRITE_BACK, FaultKind.FENCE, FaultKind.MSYNC):
        set_fault(kind, 1)
    with pytest.raises(MediaError):
        region.copy(0, b"a")
    with pytest.raises(MediaError):
        region.write_back(0, 1)
    with pytest.raises(MediaError):
        region.fence()
    assert events(region) == []
    region.write_back(0, 1)
    with pytest.raises(MediaError):
        region.fence()
    assert events(region) == [(EventKind.WRITE_BACK, 0, 1, b"")]


def test_log_of_several_threads_replays_to_the_same_content() -> None:
    """Threads store into the same bytes: the log must have the order that the media saw."""
    region = region_of(Granularity.LINE)
    begin = threading.Barrier(4)

    def work(number: int) -> None:
        begin.wait()
        for turn in range(400):
            data = bytes([number * 50 + turn % 50]) * 96
            if turn % 2:
                region.store(turn % 7, data)
            else:
                region.copy(turn % 7, data * 4)
            region.persist(0, 512)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replayed = bytearray(SIZE)
    logged = events(region)
    for _, offset, length, payload in logged:
        if payload:
            replayed[offset : offset + length] = payload
    assert len(logged) == 4 * 400 * 3
    assert region.read(0, SIZE) == replayed


def test_thread_of_each_event_is_its_own() -> None:
    region = region_of(Granularity.LINE)
    other = threading.Thread(target=region.fence)
    other.start()
    other.join()
    region.fence()
    numbers = [struct.unpack_from("=I", region.recorded(), 24 * index + 4)[0] for index in (0, 1)]
    assert numbers[1] == threading.get_native_id()
    assert numbers[0] == other.native_id


def test_log_grows_over_its_first_room() -> None:
    region = region_of(Granularity.LINE)
    for turn in range(50):
        region.store(0, bytes([turn]) * 9999)
    assert [event[3][0] for event in events(region)] == list(range(50))
