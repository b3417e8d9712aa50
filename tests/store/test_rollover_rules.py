"""What a rollover in steps may cost others, when its parts happen, and what its failures leave."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from cxlfs.errors import MediaError, NoSpaceError
from cxlfs.format import layout
from cxlfs.media import Granularity
from cxlfs.native import FaultKind, set_fault
from cxlfs.store import Store, export, rollover
from cxlfs.store.export import Export
from cxlfs.store.namespace import Inode
from cxlfs.store.space import State
from tests.support.shop import Shop, until_no_space
from tests.support.slices import small_slices
from tests.support.stores import picture, write_file


@pytest.fixture
def always_in_steps() -> Iterator[None]:
    with small_slices():
        yield


def finish(store: Store) -> int:
    """As the daemon does it; how many rounds that took."""
    rounds = 0
    while store.volume.rollovers.running is not None:
        store.maintain(0.0, apart=True)
        store.maintain_apart()
        rounds += 1
        assert rounds < 10_000
    return rounds


def data_segment_of(store: Store, name: bytes) -> set[int]:
    content = store.namespace.get(store.lookup(1, name).ino).content
    infos = store.volume.engine.list()
    ids = content.export(0, content.size)["extent_id"].tolist()
    offsets = infos[[number in ids for number in infos["id"].tolist()]]["media_offset"]
    block = store.superblock
    return {
        (offset - block.first_segment_offset) // block.segment_size_bytes
        for offset in offsets.tolist()
    }


# --- what it costs --------------------------------------------------------------------------


def test_a_slice_is_bounded_and_so_is_what_a_record_adds(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "INODES_PER_SLICE", 16)
    monkeypatch.setattr(export, "NAMES_PER_SLICE", 32)
    store = shop.new(16 << 20)
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    for number in range(400):
        store.make_node(directory, b"f%d" % number, 0o100644, 0, 0, 0)
    taken: list[int] = []
    take = Export._take

    def counted(self: Export, inodes: list[Inode]) -> None:
        taken.append(len(inodes))
        take(self, inodes)

    monkeypatch.setattr(Export, "_take", counted)
    store.volume.rollovers.begin()
    running = store.volume.rollovers.running
    assert running is not None
    for number in range(100):
        store.volume.rollovers.step()
        taken.clear()
        store.rename(directory, b"f%d" % number, 1, b"g%d" % number)
        store.unlink(directory, b"f%d" % (399 - number))
        assert all(count <= 4 for count in taken), "a record takes its own inodes down"
    finish(store)
    assert running.longest_slice <= 32
    assert len(store.namespace.get(1).entries or {}) == 101


@pytest.mark.usefixtures("always_in_steps")
def test_between_two_steps_others_commit(shop: Shop, store: Store) -> None:
    for number in range(40):
        write_file(store, 1, b"f%d" % number, b"x" * number)
    generation = store.volume.root.generation
    store.volume.rollovers.begin()
    rounds = 0
    while store.volume.rollovers.running is not None:
        store.maintain(0.0, apart=True)
        store.maintain_apart()
        write_file(store, 1, b"f%d" % (rounds % 40), b"y" * rounds)
        rounds += 1
    assert rounds > 20
    assert store.volume.root.generation == generation + 1
    shop.reopen(store)


def test_an_image_is_stored_apart_in_pieces(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not under the lock of the store, each durable by itself, none longer than a step stores."""
    monkeypatch.setattr(rollover, "PIECE_BYTES", 4096)
    for number in range(300):
        store.make_node(1, b"f%d" % number, 0o100644, 0, 0, 0)
    done: list[int | str] = []
    copy, fence = store.media.copy, store.media.fence
    monkeypatch.setattr(
        store.media, "copy", lambda at, data: (done.append(len(data)), copy(at, data))[1]
    )
    monkeypatch.setattr(store.media, "fence", lambda: (done.append("fence"), fence())[1])
    store.volume.rollovers.begin()
    pieces = []
    while store.volume.rollovers.running is not None:
        done.clear()
        store.volume.rollovers.step(apart=True)
        assert [what for what in done if what != "fence"] == []
        done.clear()
        if store.volume.rollovers.step_apart():
            pieces.append(tuple(done))
    assert len(pieces) > 5
    for length, *rest in pieces:
        assert isinstance(length, int)
        assert length <= 4096
        assert rest == ["fence"]
    shop.reopen(store)


# --- journals -------------------------------------------------------------------------------


@pytest.mark.usefixtures("always_in_steps")
def test_whoever_fills_the_journal_does_not_make_the_image(shop: Shop, store: Store) -> None:
    """A new journal is all that it takes; the image comes in steps, behind others' requests."""
    for number in range(40):
        write_file(store, 1, b"f%d" % number, b"x" * number)
    generation = store.volume.root.generation
    longest, number = 0, 0
    while store.volume.rollovers.running is None:
        before = store.volume.counters.image_bytes_written
        store.set_xattr(1, b"user.k", b"%d" % number * 100)
        longest = max(longest, store.volume.counters.image_bytes_written - before)
        number += 1
        assert number < 4000
    assert longest == 0
    assert store.volume.root.generation == generation
    assert finish(store) > 20
    assert store.volume.root.generation == generation + 1
    shop.reopen(store)


@pytest.mark.usefixtures("always_in_steps")
def test_a_full_journal_is_continued_while_an_image_is_made(shop: Shop, store: Store) -> None:
    """Nobody makes the image: in the end the one who needs room does."""
    generation = store.volume.root.generation
    store.volume.rollovers.begin()
    most = 0
    for number in range(4000):
        store.set_xattr(1, b"user.k", b"%d" % number * 100)
        most = max(most, len(store.volume.current.journal_segments))
        if store.volume.root.generation > generation:
            break
    limit = max(rollover.JOURNALS_MIN, 1 + rollover.JOURNAL_BYTES_MAX // (60 << 10))
    assert 4 < most <= 2 * (limit + 2)
    before = picture(store)
    store = shop.reopen(store)
    assert picture(store) == before


@pytest.mark.usefixtures("always_in_steps")
def test_an_opening_does_not_wait_for_an_image(shop: Shop, store: Store) -> None:
    for number in range(5):
        write_file(store, 1, b"f%d" % number, b"x")
    before = picture(store)
    generation = store.volume.root.generation
    for _ in range(4):
        store = shop.reopen(store)
        assert store.volume.root.generation == generation
        assert store.volume.rollovers.due
        assert picture(store) == before
    store.maintain(0.0)
    finish(store)
    assert store.volume.root.generation == generation + 1
    assert len(store.volume.current.journal_segments) == 2
    write_file(store, 1, b"last", b"x")
    before = picture(store)
    assert picture(shop.reopen(store)) == before


@pytest.mark.usefixtures("always_in_steps")
def test_openings_that_crash_again_and_again_end_with_an_image(shop: Shop, store: Store) -> None:
    generation = store.volume.root.generation
    for number in range(40):
        store.set_attributes(1, mtime_ns=number)
        store = shop.reopen(store)
        assert len(store.volume.current.journal_segments) <= 2 * 18
    assert store.volume.root.generation > generation


@pytest.mark.usefixtures("always_in_steps")
@pytest.mark.parametrize("copies", [1, 2])
def test_the_last_record_before_a_later_journal_is_missed(
    shop: Shop, store: Store, copies: int
) -> None:
    """Both copies of it are damaged: a record in the next journal says that it was durable."""
    shop.damaged = True
    write_file(store, 1, b"a", b"first")
    journal = store.volume.journal
    assert journal is not None
    place = journal._position
    store.set_attributes(1, mode=0o711)
    store.fsync_directory(1)
    pair = store.volume.current.journal_segments[-2:]
    store.volume.rollovers.begin()
    write_file(store, 1, b"b", b"second")
    before = picture(store)
    for index in pair[:copies]:
        store.media.store(store.superblock.segment_offset(index) + place, bytes(64))
    store = shop.reopen(store)
    if copies == 1:
        assert picture(store) == before
        assert not store.read_only
    else:
        assert store.read_only
        assert "damaged in both copies" in (store.read_only_reason or "")


# --- space ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("always_in_steps", "shop")
def test_what_dies_behind_the_image_stays_until_the_next_one(store: Store) -> None:
    rng = random.Random(7)
    store.past.is_on = False
    write_file(store, 1, b"large", rng.randbytes(300_000))
    write_file(store, 1, b"after", rng.randbytes(100_000))
    whole = data_segment_of(store, b"large") - data_segment_of(store, b"after")
    assert len(whole) > 2
    store.volume.rollovers.begin()
    store.unlink(1, b"large")
    store.volume.space.collect_dead()
    finish(store)
    states = store.volume.space.states
    assert {states[index] for index in whole} == {State.DEAD}
    store.volume.rollover()
    assert {states[index] for index in whole} == {State.FREE}


def test_dead_segments_are_free_without_an_image(shop: Shop, granularity: Granularity) -> None:
    store = shop.new(granularity=granularity, history=False)
    write_file(store, 1, b"large", b"x" * 300_000)
    write_file(store, 1, b"after", b"x" * 100_000)
    whole = data_segment_of(store, b"large") - data_segment_of(store, b"after")
    images = store.volume.counters.image_bytes_written
    store.unlink(1, b"large")
    store.volume.free_dead()
    assert {store.volume.space.states[index] for index in whole} == {State.FREE}
    assert store.volume.counters.image_bytes_written == images
    journal = store.volume.journal
    assert journal is not None
    assert journal.fenced_lsn == store.volume.last_lsn
    write_file(store, 1, b"again", b"y" * 300_000)
    before = picture(store)
    assert picture(shop.reopen(store)) == before


def make_names(store: Store) -> int:
    """Until there is no room; how many."""
    return until_no_space(lambda number: store.make_symlink(1, b"s%d" % number, b"t" * 200, 0, 0))


def test_a_segment_is_not_worth_a_large_image(shop: Shop, granularity: Granularity) -> None:
    """A nearly full store that rolls over for each one writes images, and nothing else."""
    store = shop.new(4 << 20, granularity=granularity, history=False)
    write_file(store, 1, b"small", b"x" * 100_000)
    write_file(store, 1, b"large", b"x" * 1_000_000)
    write_file(store, 1, b"after", b"x" * 100_000)
    for number in range(300):
        store.make_node(1, b"f%d" % number, 0o100644, 0, 0, 0)
    store.volume.rollover()
    counters, free = store.volume.counters, store.volume.space.free_count
    images = counters.image_bytes_written
    store.unlink(1, b"small")
    assert store.volume.release_dead()
    assert store.volume.space.free_count > free
    assert counters.image_bytes_written == images
    store.unlink(1, b"large")
    assert store.volume.release_dead()
    assert counters.image_bytes_written > images, "it frees much more than it takes"


def test_growth_is_refused_before_an_image_is_too_large(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shop.new(8 << 20)
    monkeypatch.setattr(layout, "IMAGE_SEGMENTS_MAX", 4)
    assert make_names(store) > 300
    assert store.volume.space.free_count > 40, "it is not that room was short"
    with pytest.raises(NoSpaceError):
        write_file(store, 1, b"file", b"x" * 100_000)
    store.volume.rollover()
    assert 2 < len(store.volume.root.image_segments) <= 4
    store.unlink(1, b"s0")


def test_names_go_however_large_the_image_is(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image can be written any more: the journal goes on, over openings too."""
    store = shop.new(8 << 20)
    for number in range(300):
        store.make_symlink(1, b"s%d" % number, b"t" * 200, 0, 0)
    generation = store.volume.root.generation

    def too_large(_self: rollover.Rollover, *_args: object, **_options: object) -> None:
        raise NoSpaceError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(rollover.Rollover, "__init__", too_large)
        for number in range(300):
            for mode in range(8):
                store.set_attributes(1, mode=0o700 + mode)
            store.unlink(1, b"s%d" % number)
            if number % 100 == 50:
                before = picture(store)
                store = shop.reopen(store)
                assert not store.read_only
                assert picture(store) == before
        assert store.volume.root.generation == generation
        assert len(store.volume.current.journal_segments) > 6
    store.volume.rollover()
    assert store.namespace.get(1).entries == {}


# --- failures -------------------------------------------------------------------------------


@pytest.mark.usefixtures("always_in_steps")
@pytest.mark.parametrize("kind", [FaultKind.COPY, FaultKind.FENCE])
def test_a_failure_apart_is_told_by_the_next_step(shop: Shop, kind: FaultKind) -> None:
    shop.damaged = True
    store = shop.new(granularity=Granularity.LINE)
    write_file(store, 1, b"a", b"x")
    store.volume.rollovers.begin()
    while not store.maintain_apart():
        store.maintain(0.0, apart=True)
    set_fault(kind, 1)
    try:
        assert store.maintain_apart()
    finally:
        set_fault(kind, 0)
    with pytest.raises(MediaError):
        store.maintain(0.0, apart=True)
    assert store.read_only
    assert not store.maintain(0.0)
    assert store.volume.rollovers.running is None


def _close(store: Store) -> None:
    store.close()


def _abandon(store: Store) -> None:
    store.abandon()


def _roll_over(store: Store) -> None:
    store.volume.rollover()
    store.abandon()


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("always_in_steps")
@pytest.mark.parametrize("end", [_close, _abandon, _roll_over])
@pytest.mark.parametrize("steps", range(0, 60, 4))
def test_it_may_end_anywhere(
    shop: Shop, store: Store, end: Callable[[Store], None], steps: int
) -> None:
    for number in range(20):
        write_file(store, 1, b"f%d" % number, b"x" * 500)
    store.volume.rollovers.begin()
    for _ in range(steps):
        store.maintain(0.0)
    write_file(store, 1, b"f1", b"other")
    before = picture(store)
    end(store)
    shop.stores.remove(store)
    again = Store.open(store.media)
    shop.stores.append(again)
    assert picture(again) == before
    used = set(again.volume.current.segments) | set(again.volume.fallback.segments)
    states = again.volume.space.states
    assert {i for i, s in enumerate(states) if s in (State.IMAGE, State.JOURNAL)} == used
