"""Simulated media: what a power cut may leave, for every way to forget a write-back or a fence."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cxlfs.errors import InvariantError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.crash import CrashCursor, EventLog, InFlight
from cxlfs.media.simulated import CrashTarget
from cxlfs.native import EventKind

SIZE = 1 << 14
LINE, BYTE, PAGE = Granularity.LINE, Granularity.BYTE, Granularity.PAGE
Write = Callable[[SimulatedMedia], None]


def word(value: int) -> bytes:
    return struct.pack("<Q", value)


def in_flight_at_end(media: SimulatedMedia) -> InFlight:
    cursor = media.cursor()
    cursor.advance(len(cursor.log))
    return cursor.in_flight()


def certain(media: SimulatedMedia) -> bytes:
    """The image in which nothing that is in flight became durable."""
    return media.crash_image(len(media.events()))


def on_other_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


# ------------------------------------------------------------------- what each protocol guarantees


def missing_everything(media: SimulatedMedia) -> None:
    media.store(64, word(7))


def missing_fence(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.write_back(64, 8)


def missing_write_back(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.fence()


def write_back_of_another_line(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.persist(4096, 8)


def write_back_before_store(media: SimulatedMedia) -> None:
    media.write_back(64, 8)
    media.store(64, word(7))
    media.fence()


def fence_of_another_thread(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.write_back(64, 8)
    on_other_thread(media.fence)


def copy_without_fence(media: SimulatedMedia) -> None:
    media.copy(64, word(7))


def copy_fenced_by_another_thread(media: SimulatedMedia) -> None:
    media.copy(64, word(7))
    on_other_thread(media.fence)


def complete(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.persist(64, 8)


def complete_copy(media: SimulatedMedia) -> None:
    media.copy(64, word(7))
    media.fence()


def write_back_of_the_same_line(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    media.persist(127, 1)


def write_back_and_fence_by_another_thread(media: SimulatedMedia) -> None:
    media.store(64, word(7))
    on_other_thread(lambda: media.persist(64, 8))


DURABLE_AT: dict[Write, set[Granularity]] = {
    missing_everything: set(),
    missing_fence: set(),
    missing_write_back: {BYTE},
    write_back_of_another_line: {BYTE},
    write_back_before_store: {BYTE, PAGE},  # msync takes the page as it is at the fence
    fence_of_another_thread: {PAGE},
    copy_without_fence: set(),
    copy_fenced_by_another_thread: {PAGE},
    complete: {LINE, BYTE, PAGE},
    complete_copy: {LINE, BYTE, PAGE},
    write_back_of_the_same_line: {LINE, BYTE, PAGE},
    write_back_and_fence_by_another_thread: {LINE, PAGE},
}


@pytest.mark.parametrize("granularity", [LINE, BYTE, PAGE])
@pytest.mark.parametrize("write", DURABLE_AT)
def test_store_is_certain_only_after_the_whole_protocol(
    granularity: Granularity, write: Write
) -> None:
    media = SimulatedMedia(SIZE, granularity)
    write(media)
    durable = granularity in DURABLE_AT[write]
    assert (certain(media)[64:72] == word(7)) == durable
    assert len(in_flight_at_end(media)) == (0 if durable else 1)
    early = media.crash_image(len(media.events()), InFlight.all)
    assert early == media.image()


def test_durability_comes_with_the_fence_and_not_before() -> None:
    media = SimulatedMedia(SIZE)
    complete(media)
    states = [media.crash_image(index)[64:72] for index in range(len(media.events()) + 1)]
    assert states == [word(0), word(0), word(0), word(7)]


def test_store_after_the_write_back_stays_in_flight() -> None:
    """The fence covers the line as it was written back, not as it is now."""
    media = SimulatedMedia(SIZE)
    media.store(0, word(1))
    media.write_back(0, 8)
    media.store(0, word(2))
    media.store(8, word(3))
    media.fence()
    assert certain(media)[:16] == word(1) + word(0)
    flight = in_flight_at_end(media)
    assert (flight.words.tolist(), flight.values.tolist()) == ([0, 1], [2, 3])


def test_word_that_is_certain_never_goes_back() -> None:
    """An unfenced older store of a word cannot show up after a newer one is durable."""
    media = SimulatedMedia(SIZE)
    media.store(0, word(1))
    media.copy(0, word(2))
    media.fence()
    assert certain(media)[:8] == word(2)
    assert len(in_flight_at_end(media)) == 0


def test_each_version_of_a_word_is_possible() -> None:
    media = SimulatedMedia(SIZE)
    for value in (1, 2, 3):
        media.store(0, word(value))
    flight = in_flight_at_end(media)
    outcomes = set()
    for bits in range(8):
        mask = np.array([bool(bits >> index & 1) for index in range(3)])
        cursor = media.cursor()
        cursor.advance(3)
        outcomes.add(cursor.image(mask)[:8])
    assert flight.values.tolist() == [1, 2, 3]
    assert outcomes == {word(value) for value in range(4)}


def test_words_of_one_store_are_independent() -> None:
    media = SimulatedMedia(SIZE)
    media.store(4, b"\xff" * 16)
    flight = in_flight_at_end(media)
    assert flight.words.tolist() == [0, 1, 2]
    image = media.crash_image(1, lambda _: np.array([False, True, False]))
    assert image[:24] == bytes(8) + b"\xff" * 8 + bytes(8)
    image = media.crash_image(1, lambda _: np.array([True, False, True]))
    assert image[:24] == bytes(4) + b"\xff" * 4 + bytes(8) + b"\xff" * 4 + bytes(4)


def test_stores_that_change_nothing_are_left_out() -> None:
    media = SimulatedMedia(SIZE)
    media.store(0, bytes(64))
    media.store(64, word(5))
    media.store(64, word(5))
    assert in_flight_at_end(media).words.tolist() == [8]


@pytest.mark.parametrize("granularity", [LINE, BYTE])
@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 200, 1000])
@pytest.mark.parametrize("offset", [0, 1, 63, 64, 130])
def test_copy_and_fence_leave_no_ragged_end(
    granularity: Granularity, offset: int, length: int
) -> None:
    media = SimulatedMedia(SIZE, granularity)
    media.copy(offset, b"\xee" * length)
    media.fence()
    assert certain(media) == media.image()
    assert media.image()[offset : offset + length] == b"\xee" * length


def test_page_media_tears_inside_a_page_and_syncs_whole_pages() -> None:
    media = SimulatedMedia(SIZE, PAGE)
    media.store(0, b"\x11" * 4096)
    media.store(4096, b"\x22" * 8)
    flight = in_flight_at_end(media)
    numbers, sectors = flight.groups(512)
    assert sectors == 9
    assert np.bincount(numbers).tolist() == [64] * 8 + [1]
    third = flight.choose_groups(512, np.arange(9) == 2)
    image = media.crash_image(2, lambda _: third)
    assert image.replace(b"\0", b"") == b"\x11" * 512
    assert image[1024:1536] == b"\x11" * 512
    media.persist(4095, 1)
    assert certain(media)[:4104] == b"\x11" * 4096 + bytes(8)


def test_prefix_of_the_program() -> None:
    media = SimulatedMedia(SIZE)
    for index in range(4):
        media.store(index * 64, word(index + 1))
    image = media.crash_image(4, lambda flight: flight.until(2))
    assert [image[index * 64] for index in range(4)] == [1, 2, 0, 0]


# ------------------------------------------------------------------------------------- the tooling


def test_log_is_taken_apart() -> None:
    media = SimulatedMedia(SIZE)
    media.mark(99)
    media.store(3, b"abc")
    media.copy(64, b"0123456789")
    media.write_back(3, 3)
    media.fence()
    log = media.events()
    assert log.kinds.tolist() == [
        EventKind.MARK,
        EventKind.STORE,
        EventKind.COPY,
        EventKind.WRITE_BACK,
        EventKind.FENCE,
    ]
    assert [bytes(log.payload(index)) for index in range(5)] == [
        b"",
        b"abc",
        b"0123456789",
        b"",
        b"",
    ]
    assert log.marks() == [(0, 99)]
    assert log.indexes(EventKind.FENCE).tolist() == [4]
    assert list(log.stored_words()) == [(0, 1), (8, 10)]
    assert set(log.threads.tolist()) == {threading.get_native_id()}
    assert len(EventLog(b"")) == 0
    with pytest.raises(InvariantError, match="ends inside"):
        EventLog(media.recorded() + struct.pack("=IIQQ", EventKind.STORE, 0, 0, 100))


def test_restart_makes_the_present_content_certain() -> None:
    media = SimulatedMedia(SIZE, image=b"base")
    assert certain(media)[:4] == b"base"
    media.store(0, b"more")
    media.restart()
    assert len(media.events()) == 0
    assert certain(media)[:4] == b"more"


def test_cursor_walks_forward_only() -> None:
    media = SimulatedMedia(SIZE)
    complete(media)
    cursor = media.cursor()
    cursor.advance(2)
    for target in (1, 4):
        with pytest.raises(InvariantError, match="cannot walk"):
            cursor.advance(target)


@pytest.mark.parametrize("granularity", [LINE, BYTE, PAGE])
def test_target_shows_the_images_and_forgets_what_recovery_stored(granularity: Granularity) -> None:
    media = SimulatedMedia(SIZE, granularity)
    for index in range(12):
        media.store(index * 40, word(index + 1) * 3)
        if index % 3 == 1:
            media.persist(index * 40, 24)
        if index % 4 == 2:
            media.copy(8000 + index, b"copy")
    log = media.events()
    target, cursor = CrashTarget(media.cursor()), media.cursor()
    random = np.random.default_rng(11)
    for index in range(len(log) + 1):
        flight = target.advance(index)
        cursor.advance(index)
        for mask in (flight.none(), flight.all(), random.random(len(flight)) < 0.5):
            expected = cursor.image(mask)
            with target.crashed(flight, mask) as crashed:
                assert crashed.image() == expected
                crashed.store(int(random.integers(SIZE - 99)), b"recovery" * 12)
                crashed.copy(int(random.integers(SIZE - 99)), b"RECOVERY" * 11)
                crashed.fence()
                recovery = CrashCursor(expected, crashed.events(), granularity)
                recovery.advance(len(recovery.log))
                assert recovery.image(recovery.in_flight().all()) == crashed.image()
        with target.crashed(flight, flight.none()) as crashed:
            assert crashed.image() == cursor.image(flight.none())
    target.close()


# ------------------------------------------------------------------ against a model, word for word

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "copy", "write_back", "fence"]),
        st.integers(0, 2),  # thread
        st.integers(0, 40).map(lambda step: step * 5),  # offset
        st.integers(1, 80),  # length
    ),
    max_size=24,
)


class Model:
    """The rules of the crash model, one word at a time, as slowly and plainly as possible."""

    def __init__(self, granularity: Granularity) -> None:
        self.granularity = granularity
        self.content = bytearray(SIZE)
        # Word: [version, event], the first being the certain one.
        self.versions: dict[int, list[tuple[bytes, int, int, str]]] = {}
        self.certain_event: dict[int, int] = {}
        self.write_backs: list[tuple[int, int, int, int]] = []

    def step(self, event: int, kind: str, thread: int, offset: int, length: int) -> None:
        unit = 4096 if self.granularity == PAGE else 64
        touched = (offset // unit * unit, -(-(offset + length) // unit) * unit)
        if kind in ("store", "copy"):
            self.content[offset : offset + length] = bytes([event + 1]) * length
            for start in range(offset // 8 * 8, offset + length, 8):
                value = bytes(self.content[start : start + 8])
                self.versions.setdefault(start, []).append((value, event, thread, kind))
        if kind == "write_back" or (kind == "copy" and self.granularity == PAGE):
            self.write_backs.append((*touched, event, thread))
        if kind == "fence":
            for start in self.versions:
                self.fence(start, thread)
            self.write_backs = [
                entry
                for entry in self.write_backs
                if entry[3] != thread and self.granularity != PAGE
            ]

    def fence(self, start: int, thread: int) -> None:
        for _, stored, by, kind in self.versions[start]:
            backed = any(
                low <= start < high
                and (self.granularity == PAGE or (stored < at and who == thread))
                for low, high, at, who in self.write_backs
            )
            own = by == thread and (self.granularity == BYTE or kind == "copy")
            if (backed and self.granularity != BYTE) or (own and self.granularity != PAGE):
                self.certain_event[start] = max(self.certain_event.get(start, -1), stored)

    def possible(self, start: int) -> set[bytes]:
        floor = self.certain_event.get(start, -1)
        later = {value for value, event, _, _ in self.versions.get(start, []) if event >= floor}
        return later if floor >= 0 else later | {bytes(8)}

    def surely(self, start: int) -> bytes:
        floor = self.certain_event.get(start, -1)
        values = [entry[0] for entry in self.versions.get(start, []) if entry[1] == floor]
        return values[0] if values else bytes(8)


def log_of(events: list[tuple[str, int, int, int]]) -> EventLog:
    """The log that such a program would leave."""
    parts = []
    for index, (kind, thread, offset, length) in enumerate(events):
        number = EventKind[kind.upper()]
        parts.append(struct.pack("=IIQQ", number, thread, offset, length))
        if kind in ("store", "copy"):
            parts.append(bytes([index + 1]) * length + bytes(-length % 8))
    return EventLog(b"".join(parts))


@pytest.mark.parametrize("granularity", [LINE, BYTE, PAGE])
@given(events=EVENTS)
@settings(max_examples=150)
def test_every_program_agrees_with_the_model(
    granularity: Granularity, events: list[tuple[str, int, int, int]]
) -> None:
    cursor, model = CrashCursor(bytes(SIZE), log_of(events), granularity), Model(granularity)
    for index, (kind, thread, offset, length) in enumerate(events):
        model.step(index, kind, thread, offset, length)
        cursor.advance(index + 1)
    flight = cursor.in_flight()
    possible: dict[int, set[bytes]] = {}
    for at, value in zip(flight.words.tolist(), flight.values.tolist(), strict=True):
        possible.setdefault(at * 8, set()).add(word(value))
    sure = cursor.image(flight.none())
    for start in range(0, 512, 8):
        assert sure[start : start + 8] == model.surely(start)
        assert possible.get(start, set()) | {model.surely(start)} == model.possible(start)
    assert cursor.image(flight.all()) == bytes(model.content)
