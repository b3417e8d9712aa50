"""The order of a directory's names, against a model, and what many readers of it cost."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from cxlfs.store import Store
from cxlfs.store.listing import Listing
from tests.support.shop import Shop
from tests.support.stores import write_file


class Reader:
    """One that goes from cookie to cookie, some names at a time."""

    def __init__(self, listing: Listing, names: set[bytes]) -> None:
        self.cookie, self.end = 0, listing.end
        self.seen: list[bytes] = []
        self.always = set(names)
        """There since the beginning."""
        self.ever = set(names)

    def read(self, listing: Listing, count: int) -> bool:
        """True at the end."""
        for cookie, name in listing.after(self.cookie, self.end):
            assert cookie > self.cookie
            if count == 0:
                return False
            self.cookie = cookie
            self.seen.append(name)
            count -= 1
        return True

    def check(self) -> None:
        assert len(self.seen) == len(set(self.seen)), "a name came twice"
        assert self.always <= set(self.seen) <= self.ever


@pytest.mark.parametrize("first", [0, 1, 3000])
@pytest.mark.parametrize("shrinks", [False, True])
def test_every_reader_sees_each_name_once(rng: random.Random, first: int, shrinks: bool) -> None:
    names = {b"%d" % number for number in range(first)}
    listing = Listing(sorted(names))
    known = sorted(names)
    readers: list[Reader] = []
    for step in range(6000):
        if not names or rng.random() < (0.3 if shrinks else 0.5):
            name = b"%d" % rng.randrange(2 * first + 500)
            if name not in names:
                names.add(name)
                known.append(name)
                listing.add(name)
                for reader in readers:
                    reader.ever.add(name)
        else:
            name = known[rng.randrange(len(known))]
            if name in names:
                names.remove(name)
                listing.remove(name)
                for reader in readers:
                    reader.always.discard(name)
        if step % 50 == 0:
            readers.append(Reader(listing, names))
        for reader in list(readers):
            if rng.random() < 0.1 and reader.read(listing, rng.randrange(200)):
                reader.check()
                readers.remove(reader)
    assert sorted(name for _, name in listing.after(0, listing.end)) == sorted(names)
    cookies = [cookie for cookie, _ in listing.after(0, listing.end)]
    assert cookies == sorted(set(cookies))
    assert listing.places <= 2 * len(names) + 3000


def test_places_of_what_is_gone_are_forgotten() -> None:
    """However often names come and go while somebody reads."""
    listing = Listing([])
    for number in range(50_000):
        listing.add(b"%d" % number)
        if number >= 100:
            listing.remove(b"%d" % (number - 100))
    assert listing.places < 1000
    assert [name for _, name in listing.after(0, listing.end)] == [
        b"%d" % number for number in range(49_900, 50_000)
    ]


def test_a_directory_is_emptied_by_its_reader(rng: random.Random) -> None:
    """Rm -r: names go while they are listed."""
    names = [b"%d" % number for number in range(20_000)]
    rng.shuffle(names)
    listing = Listing(names)
    cookie, end, found = 0, listing.end, []
    while True:
        batch = []
        for place, name in listing.after(cookie, end):
            batch.append(name)
            cookie = place
            if len(batch) == 137:
                break
        if not batch:
            break
        for name in batch:
            listing.remove(name)
        found += batch
    assert found == names
    assert listing.places < 2000


def test_who_renames_what_is_found_comes_to_an_end(shop: Shop, store: Store) -> None:
    shop.directory_times = False
    for number in range(20):
        write_file(store, 1, b"%d" % number, b"x")
    handle = store.open_directory(1)
    cookie, count = 0, 0
    while True:
        entry = next(store.read_directory(handle, cookie), None)
        if entry is None:
            break
        count += 1
        store.rename(1, entry.name, 1, entry.name + b"x")
        cookie = entry.cookie_next
    assert count == 20
    store.release_directory(handle)


def test_a_replaced_name_keeps_its_place(store: Store) -> None:
    for name in (b"a", b"b", b"c"):
        write_file(store, 1, name, b"x")
    handle = store.open_directory(1)
    before = [(e.name, e.cookie_next) for e in store.read_directory(handle, 0)]
    write_file(store, 1, b"new", b"y")
    store.rename(1, b"new", 1, b"b")
    after = list(store.read_directory(handle, 0))
    assert [(e.name, e.cookie_next) for e in after] == before
    assert after[1].ino == store.lookup(1, b"b").ino
    store.release_directory(handle)


def test_handles_share_one_listing(store: Store) -> None:
    """200 of them on one directory take no more memory than one."""
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    for number in range(2000):
        store.make_node(directory, b"%d" % number, 0o010644, 0, 0, 0)
    first = store.open_directory(directory)
    next(store.read_directory(first, 0))
    tracemalloc.start()
    handles = []
    for number in range(200):
        handles.append(store.open_directory(directory))
        next(store.read_directory(handles[-1], 0))
        store.make_node(directory, b"new%d" % number, 0o010644, 0, 0, 0)
        next(store.read_directory(handles[-1], 0))
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 200 * 4000
    for handle in (first, *handles):
        store.release_directory(handle)
