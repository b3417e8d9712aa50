"""Room that exists can be written: nothing idle, unpublished or left over keeps it, and statfs says
what a writer gets.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import MediaError, NoSpaceError
from cxlfs.media import Granularity
from cxlfs.store import Store, UnfinishedError
from cxlfs.store.space import LEASE_BYTES_LEAST
from cxlfs.store.version import Version
from tests.support.shop import Shop, close, create, open_for_overwrite, until_no_space
from tests.support.stores import clean_round, read_file, write_file

MIB = 1 << 20
STORE_BYTES = 128 * MIB
PIECE = 64 << 10


@pytest.fixture
def big(shop: Shop, granularity: Granularity) -> Store:
    """A store with the geometry that users get: segments of 2 MiB."""
    return shop.new_ordinary(STORE_BYTES, granularity)


def piece_of(number: int, length: int = PIECE) -> bytes:
    return number.to_bytes(8, "little") * (length // 8)


def write_until_full(store: Store, name: bytes, length: int = MIB) -> int:
    """Bytes that a new file takes, which is closed then, without what failed."""
    ino, handle = create(store, name)
    size = length * until_no_space(lambda n: store.write(handle, length * n, piece_of(n, length)))
    for smaller in (PIECE, 4096):
        size += smaller * until_no_space(
            lambda n: store.write(handle, size + smaller * n, piece_of(n, smaller))  # noqa: B023
        )
    store.set_attributes(ino, size=size, handle=handle)
    close(store, handle)
    return size


# --- overwriting in place ---------------------------------------------------------------------


@pytest.mark.sampled(2)
def test_overwriting_in_place_needs_no_fsync(shop: Shop, big: Store, rng: random.Random) -> None:
    """Three times the size of the store, in a file of a quarter of it."""
    size = STORE_BYTES // 4
    ino, handle = create(big, b"f")
    content = [0] * (size // PIECE)
    for number in range(len(content)):
        big.write(handle, number * PIECE, piece_of(0))
    big.flush(handle, writer_killed=False)
    for number in range(1, 3 * STORE_BYTES // PIECE):
        index = rng.randrange(len(content))
        big.write(handle, index * PIECE, piece_of(number))
        content[index] = number
    assert big.statistics().no_space_errors == 0
    close(big, handle)
    store = shop.reopen(big)
    assert read_file(store, ino) == b"".join(map(piece_of, content))


def test_an_atomic_overwrite_is_staged_not_published(shop: Shop, big: Store) -> None:
    """Making room while it is written leaves the old content what it is until the close."""
    old = piece_of(7, 4 * MIB)
    ino = write_file(big, 1, b"f", old)
    handle = open_for_overwrite(big, b"f", piece_of(8, 4 * MIB))
    half = STORE_BYTES // 2 // MIB
    _, other = create(big, b"other", bytes(half * MIB))
    big.flush(other, writer_killed=False)  # what is replaced is dead only after another commit
    for number in range(2 * half):
        big.write(other, number % half * MIB, piece_of(number, MIB))
    close(big, other)
    assert big.statistics().no_space_errors == 0
    version = big.namespace.get(ino).version
    assert isinstance(version, Version)
    assert version.staged, "there was room without it"
    store = shop.reopen(big)
    del handle
    assert read_file(store, ino) == old


def test_what_is_written_again_after_a_refusal_is_whole(shop: Shop, big: Store) -> None:
    """A writer that empties its own file after "no space" gets the room at once."""
    ino, handle = create(big, b"f")
    with pytest.raises(NoSpaceError):
        big.write(handle, 0, bytes(big.media.size_bytes))
    for _ in range(3):
        big.set_attributes(ino, size=0, handle=handle)
        big.write(handle, 0, piece_of(5, STORE_BYTES // 2))
    close(big, handle)
    store = shop.reopen(big)
    assert read_file(store, ino) == piece_of(5, STORE_BYTES // 2)
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"complete"


def test_a_refused_write_is_refused_at_once_the_next_time(
    shop: Shop, big: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as nothing has changed nobody looks for room again, however many files are open."""
    makes = 0
    make = big.cleaner.room.make

    def counted(needed_bytes: int) -> bool:
        nonlocal makes
        makes += 1
        return make(needed_bytes)

    monkeypatch.setattr(big.cleaner.room, "make", counted)
    write_file(big, 1, b"victim", piece_of(3, 8 * MIB))
    write_until_full(big, b"filler")
    _, handle = create(big, b"f")
    for _ in range(3):  # the first ones may still find something
        with pytest.raises(NoSpaceError):
            big.write(handle, 0, bytes(16 * MIB))
    before = makes
    for _ in range(100):
        with pytest.raises(NoSpaceError):
            big.write(handle, MIB, bytes(MIB))
    assert makes <= before + 2
    big.unlink(1, b"victim")
    big.write(handle, 0, bytes(4 * MIB))
    big.unlink(1, b"f")
    big.release(handle)
    shop.directory_times = False


# --- leases -----------------------------------------------------------------------------------


def open_idle(store: Store, count: int, size: int) -> list[int]:
    """Files that were written, fsynced, and stay open."""
    handles = []
    for number in range(count):
        _, handle = create(store, b"idle%d" % number)
        for start in range(0, size, PIECE):
            store.write(handle, start, piece_of(number))
            store.files.lease_ahead(store.files.get(handle).inode.ino)
        store.fsync(handle)
        handles.append(handle)
    return handles


def test_open_files_do_not_keep_what_they_do_not_use(big: Store) -> None:
    before = big.statfs().free_bytes
    handles = open_idle(big, 40, 512 << 10)
    promised = big.statfs()
    assert before - promised.free_bytes == 40 * (512 << 10)
    written = write_until_full(big, b"filler")
    assert 0.99 * promised.available_bytes <= written <= promised.free_bytes
    big.unlink(1, b"filler")
    for handle in handles:  # they go on as if nothing had been
        big.write(handle, 512 << 10, piece_of(1))
        close(big, handle)


def test_an_unlinked_open_file_gives_its_lease_back(shop: Shop, big: Store) -> None:
    shop.directory_times = False
    _, handle = create(big, b"f", piece_of(1))
    big.unlink(1, b"f")
    big.release(handle)
    assert not big.versions.leases.count


def test_interleaved_writers_take_little_more_than_their_data(big: Store) -> None:
    segment = big.superblock.segment_size_bytes
    free = big.volume.space.free_count
    count, size = 16, 2 * MIB
    handles = [create(big, b"f%d" % number)[1] for number in range(count)]
    for start in range(0, size, PIECE):
        for number, handle in enumerate(handles):
            big.write(handle, start, piece_of(number))
            big.files.lease_ahead(big.files.get(handle).inode.ino)
    for handle in handles:
        close(big, handle)
    assert (free - big.volume.space.free_count) * segment <= 1.5 * count * size
    promised = big.statfs()
    written = write_until_full(big, b"filler")
    assert 0.99 * promised.available_bytes <= written <= promised.free_bytes, (
        "what lies between them is used as well"
    )


@pytest.mark.parametrize("verb", ["write", "ahead", "clean"])
def test_a_failed_fence_under_a_lease_stops_writing(
    shop: Shop, store: Store, rng: random.Random, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The header of a new segment is fenced before its use: nothing is sure after that failed."""
    shop.damaged = True
    ino, handle = create(store, b"f")
    for number in range(20):
        write_file(store, 1, b"f%d" % number, rng.randbytes(9000))
    for number in range(0, 20, 2):
        store.unlink(1, b"f%d" % number)
    inode = store.namespace.get(ino)
    assert isinstance(inode.version, Version)

    def ask() -> None:
        if verb == "write":
            store.write(handle, 0, bytes(MIB))
        elif verb == "clean":
            clean_round(store, 0.9)
        else:
            assert isinstance(inode.version, Version)
            store.versions.leases.give_spare(inode, inode.version)
            store.write(handle, inode.content.size, bytes(8192))

    def ask_until(done: Callable[[], bool]) -> None:
        while not done():
            ask()

    def fail() -> None:
        raise MediaError("planted", offset=0, length=1)

    monkeypatch.setattr(store.media, "fence", fail)
    with pytest.raises(MediaError, match="planted"):
        ask_until(lambda: store.read_only)
    assert store.read_only_reason is not None
    assert "planted" in store.read_only_reason


# --- statfs -----------------------------------------------------------------------------------


def nothing(_store: Store, _rng: random.Random) -> None:
    """A store as it was made."""


def deleted_here_and_there(store: Store, rng: random.Random) -> None:
    """Files of all sizes, of which every second is gone."""
    for number in range(120):
        write_file(store, 1, b"f%d" % number, bytes([number]) * rng.randrange(1, MIB))
    for number in range(0, 120, 2):
        store.unlink(1, b"f%d" % number)


def overwritten_open(store: Store, rng: random.Random) -> None:
    """A file that is overwritten in place, by pieces, and neither closed nor fsynced."""
    _, handle = create(store, b"f", bytes(16 * MIB))
    store.flush(handle, writer_killed=False)
    for number in range(1000):
        store.write(handle, rng.randrange(256) * PIECE, piece_of(number))


def small_files(store: Store, rng: random.Random) -> None:
    """Of which each takes the rest of a block along."""
    for number in range(2000):
        write_file(store, 1, b"f%d" % number, bytes([number & 255]) * rng.randrange(1, 4096))


def shared_ranges(store: Store, _rng: random.Random) -> None:
    """Copies that take no room."""
    _, source = create(store, b"source", piece_of(3, 8 * MIB))
    for number in range(6):
        _, target = create(store, b"f%d" % number)
        store.ranges.copy(source, number * MIB, target, 0, 2 * MIB)
        close(store, target)
    close(store, source)


def overwritten_by_killed_writers(store: Store, _rng: random.Random) -> None:
    """What they left is kept aside, and given up when room is needed."""
    for number in range(4):
        write_file(store, 1, b"f%d" % number, piece_of(1, 4 * MIB))
        close(store, open_for_overwrite(store, b"f%d" % number, piece_of(2, 4 * MIB)), killed=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "before",
    [
        nothing,
        deleted_here_and_there,
        overwritten_open,
        small_files,
        shared_ranges,
        overwritten_by_killed_writers,
    ],
)
@pytest.mark.parametrize("piece", [MIB, PIECE, 4096])
def test_statfs_tells_what_can_be_written(
    shop: Shop,
    rng: random.Random,
    before: Callable[[Store, random.Random], None],
    piece: int,
) -> None:
    store = shop.new_ordinary(STORE_BYTES)
    before(store, rng)
    promised = store.statfs()
    written = write_until_full(store, b"filler", piece)
    assert 0.97 * promised.available_bytes <= written <= promised.free_bytes
    assert store.statfs().free_bytes <= 0.05 * promised.free_bytes
    for handle in list(store.files._handles):
        close(store, handle)


def test_statfs_stays_true_while_many_write(big: Store) -> None:
    """Files beside each other, in turns, until nothing is left."""
    promised = big.statfs()
    handles = [create(big, b"f%d" % number)[1] for number in range(24)]
    sizes = [0] * len(handles)

    def step(number: int) -> None:
        index = number % len(handles)
        big.write(handles[index], sizes[index], piece_of(number))
        sizes[index] += PIECE

    until_no_space(step)
    assert promised.available_bytes <= sum(sizes) <= promised.free_bytes
    for handle, size in zip(handles, sizes, strict=True):
        big.set_attributes(big.files.get(handle).inode.ino, size=size, handle=handle)
        close(big, handle)


def test_a_store_that_tiny_files_have_filled_takes_what_statfs_says(big: Store) -> None:
    """Each takes a block of 4 KiB until it is moved: then they lie one behind the other."""
    for number in range(400):
        write_file(big, 1, b"f%d" % number, bytes([number & 255]) * 60)
    write_until_full(big, b"filler", 4096)
    assert big.statfs().free_bytes < LEASE_BYTES_LEAST
    for number in range(400):
        big.unlink(1, b"f%d" % number)
    for number in range(6):
        write_file(big, 1, b"g%d" % number, bytes([number]) * 60)


def test_dead_room_of_less_than_a_segment_can_be_written(big: Store) -> None:
    """A hole in each of some segments: moving one of them leaves as much behind it."""
    write_until_full(big, b"filler", 4096)
    handle = big.open_file(big.lookup(1, b"filler").ino, os.O_RDWR)
    for number in range(10):
        big.allocate(handle, number * 8 * MIB, 2 * PIECE, keep_size=True, punch=True)
    close(big, handle)
    promised = big.statfs()
    assert 10 * 2 * PIECE <= promised.free_bytes < 2 * MIB
    written = write_until_full(big, b"more", 4096)
    assert 0.97 * promised.available_bytes <= written <= promised.free_bytes
    assert big.volume.space.free_count >= big.volume.refresh_reserve()


# --- in steps ---------------------------------------------------------------------------------


def test_a_write_in_steps_lets_others_have_their_turn(shop: Shop, big: Store) -> None:
    """Between two steps of making room another file is saved, read and removed; no byte is lost."""
    small = 256 << 10
    names = [b"%d" % number for number in range(STORE_BYTES * 7 // 10 // small)]
    inos = {name: write_file(big, 1, name, piece_of(n, small)) for n, name in enumerate(names)}
    for name in names[::2]:
        big.unlink(1, name)
    ino, handle = create(big, b"large")
    data = b"".join(piece_of(number, MIB) for number in range(8))
    turns = 0
    for offset in range(0, 32 * MIB, len(data)):
        done = 0
        while True:
            try:
                assert big.write(handle, offset, data, done=done, in_steps=True) == len(data)
                break
            except UnfinishedError as unfinished:
                turns, done = turns + 1, unfinished.done
                beside = write_file(big, 1, b"beside", piece_of(turns))
                assert read_file(big, beside) == piece_of(turns)
    assert turns, "there was no room to be made"
    close(big, handle)
    store = shop.reopen(big)
    assert read_file(store, ino) == data * 4
    for name in names[1::2]:
        assert read_file(store, inos[name]) == piece_of(int(name), small)


def test_small_files_that_begin_side_by_side_lie_side_by_side(big: Store) -> None:
    """Each begins with a piece that is larger than it becomes; the next ones begin in what is left
    of those, which is shorter than a piece.
    """
    count = STORE_BYTES // 2 // 8192
    handles = []
    for _ in range(0, count, 3):
        names = [b"f%d" % each for each in range(3)]
        three = [create(big, name)[1] for name in names]
        for handle in three:
            big.write(handle, 0, b"x")
        for name in names:
            big.unlink(1, name)
        handles += three
    assert big.statistics().no_space_errors == 0
    used = big.statistics().segments_total - big.statistics().segments_free
    assert used * big.superblock.segment_size_bytes < 3 * STORE_BYTES // 4
    for handle in handles:
        close(big, handle)
    write_file(big, 1, b"kept", b"the times of the directory are committed with it")


def test_open_files_without_a_name_keep_what_they_hold_and_no_more(big: Store) -> None:
    """A block of 4 KiB for a byte in each, however large the piece was that it was given first."""
    count = STORE_BYTES // 2 // 8192
    handles = []
    for _ in range(count):
        ino, handle = create(big, b"f")
        big.write(handle, 0, b"x")
        big.unlink(1, b"f")
        assert big.get_attributes(ino).nlink == 0
        handles.append(handle)
    assert big.statistics().no_space_errors == 0
    big.write(handles[0], 1, b"more" * 5000)
    assert bytes(big.read(handles[0], 0, 9)) == b"xmoremore"
    for handle in handles:
        close(big, handle)
    write_file(big, 1, b"kept", b"the times of the directory are committed with it")


def write_in_steps(store: Store, handle: int, offset: int, data: bytes) -> int:
    """A write as a worker has it done: how often others had their turn before it was."""
    done, turns = 0, 0
    while True:
        try:
            store.write(handle, offset, data, done=done, in_steps=True)
        except UnfinishedError as unfinished:
            done = unfinished.done
            turns += 1
        else:
            return turns


def test_a_small_save_finds_room_beside_scattered_writes(shop: Shop, rng: random.Random) -> None:
    """Whoever takes of the last room makes some: a store full of one file that is overwritten at
    random places has room for a save of somebody else, who moves no dozens of segments for it.
    """
    store = shop.new_ordinary(256 << 20)
    piece = rng.randbytes(1 << 20)
    size = int(store.statfs().available_bytes * 0.93) >> 20 << 20
    ino, handle = create(store, b"large")
    for offset in range(0, size, len(piece)):
        store.write(handle, offset, piece)
    close(store, handle)
    handle = store.open_file(ino, os.O_WRONLY)
    turns: list[int] = []
    for number in range(12_000):
        block = rng.randrange(size // 4096)
        write_in_steps(store, handle, block * 4096, piece[:4096])
        if number % 256 == 255:
            store.fsync(handle)
        if number % 40 == 0:
            store.maintain(0.0)
        if number % 10 == 0:
            _, saved = store.create(1, b"new", 0o644, 0, 0, os.O_WRONLY)
            turns.append(write_in_steps(store, saved, 0, piece[:4096]))
            close(store, saved)
            store.rename(1, b"new", 1, b"saved")
    close(store, handle)
    print(f"cleaned {store.volume.counters.cleaned_segments}, most turns {max(turns)}")
    assert store.volume.counters.cleaned_segments > 20
    assert max(turns) <= 4
