"""History on the media: what comes back at an opening, and what must not."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.format import history, layout, segments
from cxlfs.store import Store, past
from cxlfs.store.past_archive import ROWS_PER_BATCH, WAIT_S
from cxlfs.store.past_rows import Death, Row
from cxlfs.store.space import State
from tests.support.shop import Shop, close, open_for_overwrite
from tests.support.stores import clean_round, read_file, write_file


def data_of(row: Row) -> bytes:
    assert row.content is not None
    return bytes(row.content.read(0, row.content.size))


def archive_now(store: Store) -> None:
    """As a second without deaths would."""
    store.past.archive.step(0.0)
    store.past.archive.step(WAIT_S)
    while store.past.archive.step(WAIT_S):
        pass


def picture(store: Store) -> list[tuple[object, ...]]:
    """Everything that rows say."""
    fields = (
        "key", "died_ns", "death", "ino", "parent", "name", "kind", "mode", "uid", "gid", "rdev",
        "flags", "atime_ns", "mtime_ns", "birth_ns", "born_lsn", "born_ns", "target", "xattrs",
    )  # fmt: skip
    return [
        (*(getattr(row, name) for name in fields), data_of(row) if row.content else None)
        for row in store.past
    ]


def many_ways(store: Store, rng: random.Random) -> None:
    """One row of each kind, with contents of some lengths."""
    for number, size in enumerate((1, 4096, 70_000)):
        name = b"file%d" % number
        ino = write_file(store, 1, name, rng.randbytes(size))
        store.set_xattr(ino, b"user.note", b"n" * number)
        write_file(store, 1, name, rng.randbytes(size + 1))
    write_file(store, 1, b"empty", b"")
    ino = write_file(store, 1, b"holes", b"front")
    store.set_attributes(ino, size=40_000)
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 30_000, b"back")
    close(store, handle)
    store.make_symlink(1, b"link", b"target", 1, 2)
    store.make_node(1, b"fifo", 0o010640, 0, 1, 2)
    store.make_directory(1, b"dir", 0o750, 3, 4)
    inner = store.lookup(1, b"dir").ino
    write_file(store, inner, b"inner", rng.randbytes(9000))
    store.unlink(inner, b"inner")
    for name in (b"file0", b"holes", b"link", b"fifo", b"empty"):
        store.unlink(1, name)
    store.remove_directory(1, b"dir")
    store.rename(1, b"file1", 1, b"file2")


@pytest.mark.parametrize("clean", [True, False], ids=["closed", "killed"])
def test_history_is_there_after_an_opening(shop: Shop, store: Store, *, clean: bool) -> None:
    many_ways(store, random.Random(1))
    before = picture(store)
    if not clean:
        archive_now(store)
    for _ in range(2):
        store = shop.reopen(store, clean=clean)
        assert picture(store) == before
    assert {row[2] for row in before} == {
        Death.OVERWRITTEN,
        Death.REMOVED,
        Death.RENAMED_OVER,
        Death.CHANGED,
    }


def test_a_kill_costs_what_was_not_stored_yet(shop: Shop, store: Store) -> None:
    write_file(store, 1, b"a", b"one")
    write_file(store, 1, b"a", b"two")
    archive_now(store)
    write_file(store, 1, b"a", b"three")
    store = shop.reopen(store)
    assert [data_of(row) for row in store.past] == [b"one"]
    assert read_file(store, store.lookup(1, b"a").ino) == b"three"


def test_what_came_back_is_restored_and_undeleted(shop: Shop, store: Store) -> None:
    rng = random.Random(2)
    first, gone = rng.randbytes(70_000), rng.randbytes(5000)
    write_file(store, 1, b"a", first)
    write_file(store, 1, b"a", b"later")
    store.make_directory(1, b"dir", 0o755, 1, 1)
    write_file(store, store.lookup(1, b"dir").ino, b"in", gone)
    store.unlink(store.lookup(1, b"dir").ino, b"in")
    store.remove_directory(1, b"dir")
    store = shop.reopen(store, clean=True)
    of_a, _of_in, directory = store.past
    store.history.restore(of_a, 1, b"a")
    for _ in store.trees.undelete(directory):
        pass
    store = shop.reopen(store)
    assert read_file(store, store.lookup(1, b"a").ino) == first
    inner = store.lookup(store.lookup(1, b"dir").ino, b"in")
    assert read_file(store, inner.ino) == gone


def test_a_file_that_is_open_without_a_name_is_stored_when_it_ends(
    shop: Shop, store: Store
) -> None:
    write_file(store, 1, b"a", b"content")
    handle = store.open_file(store.lookup(1, b"a").ino, os.O_RDONLY)
    store.unlink(1, b"a")
    archive_now(store)
    store.release(handle)
    archive_now(store)
    store = shop.reopen(store)
    assert [data_of(row) for row in store.past] == [b"content"]


def test_rows_whose_segments_were_used_again_do_not_come_back(shop: Shop, store: Store) -> None:
    rng = random.Random(3)
    saved = dict[int, bytes]()
    for number in range(90):
        data = rng.randbytes(60_000 + number)
        saved[len(data)] = data
        write_file(store, 1, b"a", data)
        archive_now(store)
    known = picture(store)
    assert 0 < len(known) < 89  # some were given back
    store = shop.reopen(store)
    assert picture(store)[-1] == known[-1]
    for row in store.past:
        assert data_of(row) == saved[row.size]
    size = store.lookup(1, b"a").size
    assert read_file(store, store.lookup(1, b"a").ino) == saved[size]


def test_an_opening_without_history_uses_its_space(shop: Shop, store: Store) -> None:
    """And the next one with it shows nothing that was written over."""
    rng = random.Random(4)
    for number in range(8):
        write_file(store, 1, b"a", rng.randbytes(50_000 + number))
    store = shop.reopen(store, clean=True, history=False)
    assert not len(store.past)
    assert State.HISTORY not in store.volume.space.states
    for _ in range(80):
        write_file(store, 1, b"b", rng.randbytes(50_000))
    store = shop.reopen(store, clean=True)
    for row in store.past:
        data_of(row)


def test_cleaning_under_stored_rows(shop: Shop, store: Store) -> None:
    """Live data moves away, and what a row shares with it stays where the row says."""
    rng = random.Random(5)
    first = rng.randbytes(30_000)
    ino = write_file(store, 1, b"a", first)
    for number in range(20):
        write_file(store, 1, b"f%d" % number, rng.randbytes(20_000))
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 8192, b"changed")
    close(store, handle)
    for number in range(0, 20, 2):
        store.unlink(1, b"f%d" % number)
    archive_now(store)
    while clean_round(store, 0.9):
        pass
    store = shop.reopen(store)
    rows = [row for row in store.past if row.name == b"a"]
    assert [data_of(row) for row in rows] in ([], [first])
    assert read_file(store, ino) == first[:8192] + b"changed" + first[8199:]


def test_forgotten_rows_are_nowhere(shop: Shop, store: Store) -> None:
    for name in (b"token", b"other"):
        write_file(store, 1, name, b"secret of " + name)
        write_file(store, 1, name, b"new")
    store.set_xattr(store.lookup(1, b"token").ino, b"user.key", b"PASSWORD")
    store.unlink(1, b"token")
    archive_now(store)
    before = archive_bytes(store)
    assert b"token" in before
    assert b"PASSWORD" in before
    store.history.forget([row for row in store.past if row.name == b"token"])
    after = archive_bytes(store)
    assert b"token" not in after
    assert b"PASSWORD" not in after
    archive_now(store)
    store = shop.reopen(store)
    assert [(row.name, data_of(row)) for row in store.past] == [(b"other", b"secret of other")]


def test_forgotten_rows_are_in_no_earlier_batch(shop: Shop, store: Store) -> None:
    """A row that was restored is stored anew, and one that was given back is still in a batch."""
    for name in (b"token", b"given", b"other"):
        write_file(store, 1, name, b"secret of " + name)
        write_file(store, 1, name, b"new")
    fill_batches(store)
    [token] = [row for row in store.past if row.name == b"token"]
    store.history.restore(token, 1, b"token")
    fill_batches(store)
    for row in [row for row in store.past if row.name == b"given"]:
        store.past.forget(row)  # its space is needed
    store.history.forget([row for row in store.past if row.name == b"token"])
    for name in (b"token", b"given"):
        assert name not in archive_bytes(store)
    archive_now(store)
    store = shop.reopen(store)
    names = [row.name for row in store.past]
    assert b"other" in names
    assert not {b"token", b"given"} & set(names)


def fill_batches(store: Store) -> None:
    """Until the archive goes on in another segment."""
    archive_now(store)
    before = store.past.archive._segments[-1]
    for number in range(600):
        if store.past.archive._segments[-1] is not before:
            for row in [row for row in store.past if len(row.name) >= 40]:
                store.past.forget(row)
            return
        name = b"%d" % number * 40
        write_file(store, 1, name, b"")
        store.set_xattr(store.lookup(1, name).ino, b"user.x", b"x" * 3000)
        store.unlink(1, name)
        archive_now(store)
    raise AssertionError("the archive stays in one segment")


def archive_bytes(store: Store) -> bytes:
    """The payload of every segment that holds history, or did."""
    block = store.superblock
    return b"".join(
        store.media.read(
            block.segment_offset(header.index) + layout.SEGMENT_HEADER_BYTES,
            block.segment_payload_bytes,
        )
        for header in segments.read_all(store.media, block)
        if header.role == layout.ROLE_HISTORY
    )


def test_rows_wait_for_a_batch(store: Store) -> None:
    archive = store.past.archive
    write_file(store, 1, b"a", b"1")
    write_file(store, 1, b"a", b"2")
    assert not archive.step(10.0)
    assert not archive.step(10.0 + WAIT_S / 2)
    assert not archive.segment_count
    archive.step(10.0 + WAIT_S)
    assert archive.segment_count == 1
    for _ in range(ROWS_PER_BATCH):
        write_file(store, 1, b"a", b"")
        write_file(store, 1, b"a", b"x")
    archive.step(20.0)
    assert sum(row.archived is not None for row in store.past) == 1 + ROWS_PER_BATCH


def test_the_archive_is_compacted_and_bounded(shop: Shop, store: Store) -> None:
    rng = random.Random(6)
    for number in range(3000):
        write_file(store, 1, b"n%d" % (number % 50), b"%d" % number)
        if number % 10 == 0:
            archive_now(store)
        if number % 700 == 0:
            store.history.forget(rng.sample(list(store.past), len(store.past) // 2))
    space = store.volume.space
    assert space.states.count(State.HISTORY) == store.past.archive.segment_count
    assert store.past.archive.segment_count <= max(2, len(space.states) // 32)
    archive_now(store)
    archived = {row.key for row in store.past if row.archived is not None}
    assert archived
    store = shop.reopen(store)
    assert {row.key for row in store.past} >= archived


def test_a_full_store_takes_the_archive(shop: Shop) -> None:
    """It counts as free, and goes before a write fails."""
    store = shop.new()
    write_file(store, 1, b"a", b"1")
    write_file(store, 1, b"a", b"2")
    free = store.statfs().free_bytes
    archive_now(store)
    assert store.past.archive.segment_count == 1
    assert store.statfs().free_bytes == free
    rng, number = random.Random(7), 0

    while True:
        try:
            write_file(store, 1, b"f%d" % number, rng.randbytes(60_000))
        except NoSpaceError:
            break
        number += 1
    assert not store.past.archive.segment_count


# --- damaged and hostile archives ---------------------------------------------------------------


Damage = Callable[[history.Batch], history.Batch]


def forged(store: Store, change: Callable[[dict[str, object]], None]) -> None:
    """Write a batch that is right in form, and says what ``change`` makes of it."""
    [segment] = store.past.archive._segments
    scanned = history.scan(store.media, segment.start, segment.size_bytes, seed=segment.seed)
    _, batch = next(scanned)
    assert batch is not None
    fields = {name: getattr(batch, name) for name in history.Batch.__dataclass_fields__}
    fields = {k: v.copy() if hasattr(v, "copy") else v for k, v in fields.items()}
    change(fields)
    data = history.encode(history.Batch(**fields), offset=0, seed=segment.seed)
    store.media.store(segment.start, data)


def set_row(field: str, value: int) -> Callable[[dict[str, object]], None]:
    def change(fields: dict[str, object]) -> None:
        fields["rows"][field][0] = value  # type: ignore[index]

    return change


def set_extent(field: str, value: int) -> Callable[[dict[str, object]], None]:
    def change(fields: dict[str, object]) -> None:
        fields["extents"][field][0] = value  # type: ignore[index]

    return change


def set_reference(field: str, value: int) -> Callable[[dict[str, object]], None]:
    def change(fields: dict[str, object]) -> None:
        fields["references"][field][0] = value  # type: ignore[index]

    return change


LIES = {
    "a later record": lambda fields: fields.update(lsn=1 << 40),
    "a name with a slash": lambda fields: fields.update(strings=b"/" + fields["strings"][1:]),
    "strings cut short": lambda fields: fields.update(strings=fields["strings"][:-1]),
    "no inode": set_row("ino", 0),
    "an inode beyond all": set_row("ino", 1 << 63),
    "no such type": set_row("mode", 0o030644),
    "a directory with content": set_row("mode", 0o040755),
    "no such end": set_row("death", 9),
    "unknown flags": set_row("flags", 64),
    "a huge file": set_row("size", 1 << 60),
    "many references": set_row("ref_count", 1 << 40),
    "many attributes": set_row("attribute_count", 1 << 31),
    "a long name": set_row("name_bytes", 1 << 31),
    "a target of a file": set_row("target_bytes", 1),
    "an extent before all segments": set_extent("media_offset", 0),
    "an extent behind the end": set_extent("media_offset", 1 << 62),
    "an extent without a number": set_extent("id", 0),
    "an extent beyond the counter": set_extent("id", 1 << 50),
    "a long extent": set_extent("length", 1 << 40),
    "sums elsewhere": set_extent("crc_index", 1 << 40),
    "no first chunk": set_extent("first_chunk", 1),
    "many sums": set_extent("crc_count", 1 << 31),
    "a reference to nothing": set_reference("extent_id", 1 << 40),
    "a reference behind its extent": set_reference("extent_offset", 1 << 40),
    "a long reference": set_reference("length", 1 << 62),
    "a reference far away": set_reference("file_offset", 1 << 63),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_an_archive_that_lies(shop: Shop, store: Store, lie: str) -> None:
    live = write_file(store, 1, b"live", b"live" * 3000)
    write_file(store, 1, b"a", b"x" * 9000)
    write_file(store, 1, b"a", b"y")
    archive_now(store)
    forged(store, LIES[lie])
    store = shop.reopen(store)
    assert [row.name for row in store.past if row.size > 1] == []
    assert read_file(store, live) == b"live" * 3000
    write_file(store, 1, b"a", b"z")
    archive_now(store)


def test_an_extent_over_live_data(shop: Shop, store: Store) -> None:
    """A row of another owner would read it."""
    live = write_file(store, 1, b"live", b"secret" * 2000)
    place = store.volume.engine.list()["media_offset"][0]
    write_file(store, 1, b"a", b"x" * 9000)
    write_file(store, 1, b"a", b"y")
    archive_now(store)
    forged(store, set_extent("media_offset", int(place)))
    store = shop.reopen(store)
    assert not len(store.past)
    assert read_file(store, live) == b"secret" * 2000


def test_a_batch_that_contradicts_costs_its_own_rows(shop: Shop, store: Store) -> None:
    live = write_file(store, 1, b"live", b"secret" * 2000)
    place = store.volume.engine.list()["media_offset"][0]
    for number in range(6):
        write_file(store, 1, b"a", b"x" * (9000 + number))
        archive_now(store)
    known = [row.key for row in store.past]
    forged(store, set_extent("media_offset", int(place)))
    store = shop.reopen(store)
    assert [row.key for row in store.past] == known[1:]
    assert read_file(store, live) == b"secret" * 2000


def test_more_rows_than_are_kept(shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches have rows that were dropped since: the limits hold at an opening, too."""
    for number in range(40):
        write_file(store, 1, b"n%d" % number, b"1")
        write_file(store, 1, b"n%d" % number, b"2")
        if number % 10 == 9:
            archive_now(store)
    last = [row.key for row in store.past][-3:]
    monkeypatch.setattr(past.Limits, "of", lambda _bytes: past.Limits(rows=3))
    store = shop.reopen(store)
    assert [row.key for row in store.past] == last
    write_file(store, 1, b"n0", b"3")
    archive_now(store)
    assert len(store.past) == 3


def test_a_damaged_batch_costs_its_own_rows(shop: Shop, store: Store) -> None:
    for number in range(3):
        write_file(store, 1, b"a", b"%d" % number)
        archive_now(store)
    store_rows = [row.key for row in store.past]
    [segment] = store.past.archive._segments
    ends = [
        end
        for end, _ in history.scan(
            store.media, segment.start, segment.size_bytes, seed=segment.seed
        )
    ]
    assert len(ends) == len(store_rows) == 2
    store.media.store(segment.start + history.HEADER_BYTES, b"damaged!")
    store = shop.reopen(store)
    assert [row.key for row in store.past] == store_rows[1:]
    store.media.store(segment.start + ends[0], b"damaged!")
    store = shop.reopen(store)
    assert not len(store.past)


class Meddling:
    """Random deaths, restores, forgets, cleanings and openings of one store."""

    def __init__(self, shop: Shop, seed: int) -> None:
        self.shop = shop
        self.rng = random.Random(seed)
        self.store = shop.new(8 << 20)
        self.contents: dict[tuple[bytes, int], bytes] = {}
        self.steps: list[Callable[[bytes], None]] = [
            self.save, self.save, self.save, self.save, self.kill, self.unlink, self.rename,
            self.archive, self.restore, self.reopen, self.forget, self.clean,
        ]  # fmt: skip

    def run(self, count: int) -> None:
        for _ in range(count):
            self.rng.choice(self.steps)(b"n%d" % self.rng.randrange(12))
            for row in self.store.past:
                if row.content is not None:
                    known = self.contents.setdefault((row.name, row.died_lsn), data_of(row))
                    assert data_of(row) == known

    def is_there(self, name: bytes) -> bool:
        return self.store.namespace.find(1, name) is not None

    def rows(self) -> list[Row]:
        return list(self.store.past)

    def save(self, name: bytes) -> None:
        data = self.rng.randbytes(self.rng.choice((0, 10, 5000, 60_000)))
        write_file(self.store, 1, name, data)

    def kill(self, name: bytes) -> None:
        if self.is_there(name):
            handle = open_for_overwrite(self.store, name, self.rng.randbytes(100))
            close(self.store, handle, killed=self.rng.random() < 0.5)

    def unlink(self, name: bytes) -> None:
        if self.is_there(name):
            self.store.unlink(1, name)

    def rename(self, name: bytes) -> None:
        if self.is_there(name):
            self.store.rename(1, name, 1, b"n0")

    def archive(self, _name: bytes) -> None:
        archive_now(self.store)

    def restore(self, name: bytes) -> None:
        files = [row for row in self.rows() if row.content is not None]
        if files:
            row = self.rng.choice(files)
            self.store.history.restore(row, 1, name)
            assert read_file(self.store, self.store.lookup(1, name).ino) == data_of(row)

    def reopen(self, _name: bytes) -> None:
        archive_now(self.store)
        archived = {row.key for row in self.rows() if row.archived}
        self.store = self.shop.reopen(self.store, clean=self.rng.random() < 0.5)
        assert archived <= {row.key for row in self.rows()}

    def forget(self, _name: bytes) -> None:
        gone = self.rng.sample(self.rows(), len(self.rows()) // 4)
        self.store.history.forget(gone)
        assert not {row.key for row in gone} & {row.key for row in self.rows()}

    def clean(self, _name: bytes) -> None:
        clean_round(self.store, 0.8)


def test_random_deaths_and_openings(shop: Shop) -> None:
    """What is stored comes back as it was, as long as its space was not used."""
    for seed in range(8):
        meddling = Meddling(shop, seed)
        meddling.run(300)
        meddling.store.close()
        shop.stores.remove(meddling.store)


def test_the_names_of_ends_are_those_of_rows() -> None:
    assert set(layout.DEATHS) == set(map(int, Death))
