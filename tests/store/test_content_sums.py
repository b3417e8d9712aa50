"""user.cxlfs.crc32c: the checksum of a whole file, combined from those of its chunks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest

from cxlfs.errors import CorruptionError, NoAttributeError
from cxlfs.format import layout
from cxlfs.native import crc32c
from cxlfs.store import Store, UnfinishedError, content_sums
from tests.support.shop import Shop, close, create
from tests.support.stores import CHUNK_BYTES, clean_round, new_store, read_file, write_file

NAME = b"user.cxlfs.crc32c"
POLYNOMIAL = 0x82F63B78


def sum_of(store: Store, ino: int) -> int:
    value = store.get_xattr(ino, NAME)
    assert len(value) == 8
    return int(value, 16)


def looked_at(store: Store, action: Callable[[], object]) -> int:
    """Chunks that were read and verified for it."""
    before = store.volume.engine.statistics().chunks_verified
    action()
    return store.volume.engine.statistics().chunks_verified - before


def zeros_after(crc: int, length: int) -> int:
    """By definition, a bit at a time in the power: squares of the matrix of one zero byte."""

    def times(matrix: list[int], vector: int) -> int:
        total = 0
        for bit in range(32):
            if vector >> bit & 1:
                total ^= matrix[bit]
        return total

    def byte(state: int) -> int:
        for _ in range(8):
            state = state >> 1 ^ (POLYNOMIAL if state & 1 else 0)
        return state

    matrix = [byte(1 << bit) for bit in range(32)]
    state = crc ^ 0xFFFFFFFF
    while length:
        if length & 1:
            state = times(matrix, state)
        matrix = [times(matrix, column) for column in matrix]
        length >>= 1
    return state ^ 0xFFFFFFFF


def test_the_check_value(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"123456789")
    assert store.get_xattr(ino, NAME) == b"e3069283"
    assert store.get_xattr(write_file(store, 1, b"empty", b""), NAME) == b"00000000"


def test_whole_chunks_are_not_read(store: Store, rng: random.Random) -> None:
    data = rng.randbytes(20 * CHUNK_BYTES)
    ino = write_file(store, 1, b"a", data)
    read = looked_at(store, lambda: sum_of(store, ino))
    assert sum_of(store, ino) == crc32c(data)
    assert read == 0


def test_of_each_extent_the_last_chunk_alone_is_read(store: Store, rng: random.Random) -> None:
    """What is published ends at a multiple of 64 bytes, padded with zeros: its chunk is longer than
    the file.
    """
    data = rng.randbytes(10 * CHUNK_BYTES + 100)
    ino = write_file(store, 1, b"a", data)
    read = looked_at(store, lambda: sum_of(store, ino))
    assert sum_of(store, ino) == crc32c(data)
    assert read == 1


def test_what_is_known_is_not_added_up_again(store: Store, rng: random.Random) -> None:
    data = rng.randbytes(1000)
    ino = write_file(store, 1, b"a", data)
    assert looked_at(store, lambda: sum_of(store, ino)) == 1
    assert looked_at(store, lambda: sum_of(store, ino)) == 0
    write_file(store, 1, b"a", data + b"more")
    assert sum_of(store, ino) == crc32c(data + b"more")


@pytest.mark.parametrize("size", [1, 4095, 1 << 20, (1 << 40) + 7, layout.FILE_SIZE_MAX])
def test_a_hole_is_zeros_however_long(store: Store, size: int) -> None:
    ino, handle = create(store, b"a")
    store.set_attributes(ino, size=size, handle=handle)
    close(store, handle)
    assert sum_of(store, ino) == zeros_after(0, size)
    if size <= 1 << 20:
        assert sum_of(store, ino) == crc32c(bytes(size))
    store.unlink(1, b"a")


def test_data_between_long_holes(store: Store) -> None:
    start, size = (1 << 41) + 1, layout.FILE_SIZE_MAX - 3
    ino, handle = create(store, b"a", b"begin")
    store.write(handle, start, b"middle")
    store.set_attributes(ino, size=size, handle=handle)
    close(store, handle)
    expected = zeros_after(crc32c(b"begin"), start - 5)
    expected = zeros_after(crc32c(b"middle", expected), size - start - 6)
    assert sum_of(store, ino) == expected
    store.unlink(1, b"a")


def test_there_is_none_while_a_file_is_written(store: Store) -> None:
    ino, handle = create(store, b"new", b"x")
    with pytest.raises(NoAttributeError):
        store.get_xattr(ino, NAME)
    store.fsync(handle)
    assert sum_of(store, ino) == crc32c(b"x")
    store.write(handle, 1, b"y")
    with pytest.raises(NoAttributeError):
        store.get_xattr(ino, NAME)
    close(store, handle)
    assert sum_of(store, ino) == crc32c(b"xy")
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoAttributeError):
        store.get_xattr(ino, NAME)
    close(store, handle, killed=True)
    assert sum_of(store, ino) == crc32c(b"xy")


def test_files_alone_have_one_and_nobody_sets_it(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"abc")
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    for other in (1, directory, store.make_symlink(1, b"l", b"a", 0, 0).ino):
        with pytest.raises(NoAttributeError):
            store.get_xattr(other, NAME)
    assert NAME not in store.list_xattrs(ino)
    store.set_xattr(ino, NAME, b"00000000")
    store.remove_xattr(ino, NAME)
    assert sum_of(store, ino) == crc32c(b"abc")


def test_it_stays_over_openings_and_moves(shop: Shop, store: Store, rng: random.Random) -> None:
    """The cleaner puts the chunks of a file together anew, some of them in the middle of others."""
    data = {b"%d" % number: rng.randbytes(rng.randrange(1, 30_000)) for number in range(60)}
    inos = {name: write_file(store, 1, name, content) for name, content in data.items()}
    for name in list(data)[::2]:
        store.unlink(1, name)
        del data[name]
    moved = 0
    while clean_round(store, 1.0) and moved < 3:
        moved += 1
    assert moved
    for clean in (False, True):
        for name, content in data.items():
            assert sum_of(store, inos[name]) == crc32c(content)
        store = shop.reopen(store, clean=clean)


# --- steps --------------------------------------------------------------------------------------


def asked_in_steps(store: Store, ino: int, between: Callable[[], object] = lambda: None) -> int:
    """How many steps it takes, with something else done between them; the sum is right then."""
    for steps in range(10_000):
        try:
            value = store.attributes.get_xattr(store.namespace.get(ino), NAME, in_steps=True)
        except UnfinishedError:
            between()
        else:
            assert int(value, 16) == crc32c(read_file(store, ino))
            return steps
    raise AssertionError("it never ends")


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content_sums, "_STEP_BYTES", 5000)


@pytest.mark.usefixtures("small_steps")
def test_a_large_file_is_added_up_in_steps(store: Store, rng: random.Random) -> None:
    data = bytearray(rng.randbytes(40 * CHUNK_BYTES))
    ino = write_file(store, 1, b"a", bytes(data))
    assert 5 <= asked_in_steps(store, ino) <= 40
    handle = store.open_file(ino, os.O_RDWR)
    for _ in range(100):
        at = rng.randrange(len(data) - 10)
        store.write(handle, at, b"0123456789")
        data[at : at + 10] = b"0123456789"
    close(store, handle)
    assert asked_in_steps(store, ino) >= 5
    assert sum_of(store, ino) == crc32c(data)


@pytest.mark.usefixtures("small_steps")
def test_a_content_that_is_replaced_between_steps_is_added_up_anew(
    store: Store, rng: random.Random
) -> None:
    old, new = rng.randbytes(40 * CHUNK_BYTES), rng.randbytes(30 * CHUNK_BYTES)
    ino = write_file(store, 1, b"a", old)
    left = [new, old[::-1], new[::-1]]

    def replace() -> None:
        if left:
            write_file(store, 1, b"a", left.pop())

    asked_in_steps(store, ino, replace)
    assert sum_of(store, ino) == crc32c(new)


@pytest.mark.usefixtures("small_steps")
def test_a_content_that_is_written_between_steps_has_none(store: Store, rng: random.Random) -> None:
    ino = write_file(store, 1, b"a", rng.randbytes(40 * CHUNK_BYTES))
    handles: list[int] = []

    def write() -> None:
        handles.append(store.open_file(ino, os.O_RDWR))
        store.write(handles[-1], 0, b"x")

    with pytest.raises(NoAttributeError):
        asked_in_steps(store, ino, write)
    close(store, handles[0])
    assert sum_of(store, ino) == crc32c(read_file(store, ino))


@pytest.mark.usefixtures("small_steps")
def test_more_files_at_once_than_are_remembered(
    store: Store, monkeypatch: pytest.MonkeyPatch, rng: random.Random
) -> None:
    """All of them come to an end, and nothing of them stays."""
    monkeypatch.setattr(content_sums, "_KNOWN_MAX", 2)
    data = {n: rng.randbytes(20 * CHUNK_BYTES) for n in range(6)}
    waiting = {write_file(store, 1, b"%d" % n, content): n for n, content in data.items()}
    rounds = 0
    while waiting:
        rounds += 1
        assert rounds < 100
        for ino in list(waiting):
            try:
                store.attributes.get_xattr(store.namespace.get(ino), NAME, in_steps=True)
            except UnfinishedError:
                continue
            assert sum_of(store, ino) == crc32c(data[waiting.pop(ino)])
    assert not store.attributes.sums._begun
    assert len(store.attributes.sums._known) == 2


# --- damage -------------------------------------------------------------------------------------


def test_a_damaged_chunk_that_is_combined_changes_nothing(shop: Shop, rng: random.Random) -> None:
    """The value is what the content has to be: a reader who compares finds the damage."""
    store = shop.new()
    shop.damaged = True
    data = rng.randbytes(8 * CHUNK_BYTES)
    ino = write_file(store, 1, b"a", data)
    flip(store, place_of(store, ino, 3 * CHUNK_BYTES))
    assert sum_of(store, ino) == crc32c(data)


@pytest.mark.parametrize("at", [2 * CHUNK_BYTES + 5, 3 * CHUNK_BYTES - 5], ids=["own", "other"])
def test_damage_in_a_chunk_that_is_read_is_an_error(
    shop: Shop, rng: random.Random, at: int
) -> None:
    """Also where it lies in the part of the chunk that the file has no more."""
    store = shop.new()
    shop.damaged = True
    data = rng.randbytes(8 * CHUNK_BYTES)
    ino = write_file(store, 1, b"a", data)
    place = place_of(store, ino, at)
    store.set_attributes(ino, size=2 * CHUNK_BYTES + 1000)
    flip(store, place)
    with pytest.raises(CorruptionError):
        sum_of(store, ino)
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"damaged"
    assert any(event.kind == "checksum-error" for event in shop.events)


def place_of(store: Store, ino: int, offset: int) -> int:
    """The media offset of a byte."""
    row = store.namespace.get(ino).content.export(offset, 1)[0]
    info, _ = store.volume.engine.describe(int(row["extent_id"]))
    return int(info["media_offset"][0]) + int(row["extent_offset"])


def flip(store: Store, place: int) -> None:
    store.media.unguarded_memory()[place] ^= 8


# --- random files -------------------------------------------------------------------------------

SIZE_MAX = 12 * CHUNK_BYTES
POSITIONS = st.one_of(
    st.integers(0, SIZE_MAX), st.integers(0, SIZE_MAX // CHUNK_BYTES).map(lambda n: n * CHUNK_BYTES)
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "append", "punch", "truncate", "copy", "publish", "clean"]),
        st.sampled_from(["a", "b"]),
        POSITIONS,
        POSITIONS,
        st.integers(1, 3 * CHUNK_BYTES),
    ),
    max_size=14,
)


class Pair:
    """Two files and what they should hold."""

    def __init__(self) -> None:
        self.store = new_store()
        self.inos: dict[str, int] = {}
        self.handles: dict[str, int] = {}
        self.data = {"a": bytearray(), "b": bytearray()}
        self.random = random.Random(1)
        for name in self.data:
            self.inos[name], self.handles[name] = create(self.store, name.encode())

    def put(self, name: str, at: int, piece: bytes) -> None:
        data = self.data[name]
        data.extend(bytes(max(0, at + len(piece) - len(data))))
        data[at : at + len(piece)] = piece

    def do(self, verb: str, name: str, at: int, other: int, length: int) -> None:
        store, handle, data = self.store, self.handles[name], self.data[name]
        if verb in {"write", "append"}:
            at = len(data) if verb == "append" else at
            piece = self.random.randbytes(length)
            store.write(handle, at, piece)
            self.put(name, at, piece)
        elif verb == "punch":
            store.allocate(handle, at, length, keep_size=True, punch=True)
            end = min(at + length, len(data))
            data[at:end] = bytes(max(0, end - at))
        elif verb == "truncate":
            store.set_attributes(self.inos[name], size=at, handle=handle)
            data.extend(bytes(max(0, at - len(data))))
            del data[at:]
        elif verb == "copy":
            target = "b" if name == "a" else "a"
            count = store.ranges.copy(handle, at, self.handles[target], other, length)
            if count:
                self.put(target, other, bytes(data[at : at + count]))
        elif verb == "publish":
            store.fsync(handle)
        else:
            clean_round(store, 1.0)

    def check(self) -> None:
        for name, ino in self.inos.items():
            self.store.fsync(self.handles[name])
            assert read_file(self.store, ino) == self.data[name]
            assert sum_of(self.store, ino) == crc32c(self.data[name])


@hypothesis.settings(max_examples=150)
@hypothesis.given(STEPS)
def test_it_is_the_sum_of_the_bytes(steps: list[tuple[str, str, int, int, int]]) -> None:
    pair = Pair()
    for step in steps:
        pair.do(*step)
    pair.check()
    for name in pair.data:
        close(pair.store, pair.handles[name])
    pair.store.abandon()
