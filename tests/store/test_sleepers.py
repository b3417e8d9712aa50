"""Inodes that stay rows of the image they were loaded from until somebody asks for them."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from cxlfs.format.operations import XattrSetOperation
from cxlfs.store import Store, defragmenter, sleepers
from cxlfs.store.health import DAMAGED_XATTR
from cxlfs.store.namespace import FileKind
from cxlfs.store.paths import name_of
from cxlfs.verify.columns import columns_of_media, columns_of_store
from tests.support.shop import Shop, close
from tests.support.slices import Told, records_together, small_slices, step, told_by
from tests.support.stores import write_file

MIB = 1 << 20


def filled(shop: Shop, store: Store, count: int, *, clean: bool = True) -> tuple[Store, list[int]]:
    """Reopened with so many files of a few bytes, in two directories, and a pipe; their numbers."""
    inos = []
    for name in (b"a", b"b"):
        directory = store.make_directory(1, name, 0o755, 0, 0).ino
        inos += [
            write_file(store, directory, b"f%d" % number, bytes([number % 256]) * 100)
            for number in range(count // 2)
        ]
    store.make_node(1, b"pipe", 0o010644, 0, 1, 2)
    store.volume.rollover()
    return shop.reopen(store, clean=clean), inos


@pytest.mark.parametrize("clean", [False, True])
def test_opening_wakes_directories_alone(shop: Shop, store: Store, clean: bool) -> None:
    store, inos = filled(shop, store, 20, clean=clean)
    inodes = store.namespace.inodes
    assert len(inodes.awake()) == 3
    assert len(inodes) == 24
    assert set(inos) < set(inodes)
    assert store.statistics().files == 20
    directory = store.lookup(1, b"a").ino
    assert store.lookup(directory, b"f3").size == 100
    assert len(inodes.awake()) == 4
    inode = inodes.get(inos[3])
    assert inode is store.namespace.get(inos[3])
    assert inode is not None
    assert (inode.name, inode.parent, inode.links) == (b"f3", directory, 1)
    assert 99999 not in inodes
    assert inodes.get(99999) is None
    assert inodes.get(1 << 70) is None
    assert inos[5] in inodes


def test_what_others_look_for_is_awake(shop: Shop, store: Store) -> None:
    """Links, content kept aside, files in as many pieces as are gathered, and what is known to be
    damaged: not what has attributes of its user.
    """
    assert sleepers.REFERENCES_MAX < defragmenter._PIECES_MIN
    plain = write_file(store, 1, b"plain", b"x")
    link = store.make_symlink(1, b"link", b"plain", 0, 0).ino
    named = write_file(store, 1, b"named", b"x")
    store.set_xattr(named, b"user.x", b"y")
    damaged = write_file(store, 1, b"damaged", b"x")
    store.volume.commit([XattrSetOperation(damaged, DAMAGED_XATTR, b"")])
    store.namespace.set_xattr(store.namespace.get(damaged), DAMAGED_XATTR, b"")
    aside = write_file(store, 1, b"aside", b"x" * 5000)
    handle = store.open_file(aside, os.O_RDWR | os.O_TRUNC)
    store.write(handle, 0, b"other")
    store.flush(handle, writer_killed=True)
    store.release(handle)
    pieces = write_file(store, 1, b"pieces", b"")
    handle = store.open_file(pieces, os.O_WRONLY)
    for number in range(sleepers.REFERENCES_MAX + 1):
        store.write(handle, number * 8192, b"piece")
    close(store, handle)
    store.volume.rollover()
    store = shop.reopen(store)
    awake = {inode.ino for inode in store.namespace.inodes.awake()}
    assert awake == {1, link, damaged, aside, pieces}
    assert set(store.versions.asides) == {aside}
    assert set(store.health.damaged()) == {damaged}
    before = told_by(columns_of_store(store))
    store.volume.rollover()
    assert told_of_root(store) == before
    assert named not in {inode.ino for inode in store.namespace.inodes.awake()}
    store = shop.reopen(store)
    assert store.get_xattr(named, b"user.x") == b"y"
    assert plain in store.namespace.inodes


def test_a_rollover_wakes_nobody_and_says_the_same(shop: Shop, store: Store) -> None:
    store, _ = filled(shop, store, 40)
    before = told_by(columns_of_store(store))
    for _ in range(2):
        store.volume.rollover()
        assert len(store.namespace.inodes.awake()) == 3
        assert told_of_root(store) == before
        store = shop.reopen(store)


def told_of_root(store: Store) -> Told:
    """What the image says that the root names."""
    columns = columns_of_media(store.media, store.superblock, store.volume.root)
    assert columns is not None
    return told_by(columns)


def verbs_on(store: Store, rng: random.Random, ino: int) -> list[Callable[[], object]]:
    """Whatever wakes a file of ``filled`` up."""
    inode = store.namespace.inodes.get(ino)
    found = None if inode is None else name_of(store.namespace, inode)
    if found is None:
        return [lambda: None]
    parent, name = found

    def write() -> None:
        handle = store.open_file(ino, os.O_WRONLY | rng.choice([0, os.O_TRUNC]))
        store.write(handle, rng.choice([0, 50, 9000]), b"written")
        close(store, handle)

    return [
        lambda: None,
        write,
        write,
        lambda: store.set_xattr(ino, b"user.x", b"%d" % rng.randrange(100)),
        lambda: store.link(ino, 1, b"link-%d-%d" % (ino, rng.randrange(1 << 30))),
        lambda: store.unlink(parent, name),
        lambda: store.rename(parent, name, 1, b"moved-%d" % ino),
        lambda: store.rename(parent, name, parent, b"over"),
        lambda: write_file(store, 1, b"new-%d" % rng.randrange(1 << 30), b"new"),
    ]


@pytest.fixture
def together() -> Iterator[None]:
    """However few records there are, the files that they make go to sleep."""
    with records_together():
        yield


def crashed(shop: Shop, store: Store, count: int) -> tuple[Store, list[int]]:
    """As ``filled``, half of the files by the journal: in three directories, one after the other,
    so that they are no single run.
    """
    store, inos = filled(shop, store, count // 2)
    for name in (b"c", b"d", b"e"):
        directory = store.make_directory(1, name, 0o755, 0, 0).ino
        inos += [
            write_file(store, directory, b"f%d" % number, bytes([number]) * 100)
            for number in range(count // 6)
        ]
    return shop.reopen(store, clean=False), inos


@pytest.mark.usefixtures("together")
def test_files_of_the_journal_sleep_too(shop: Shop, store: Store) -> None:
    """But for those in many pieces."""
    store, inos = crashed(shop, store, 60)
    inodes = store.namespace.inodes
    assert len(inodes.awake()) == 6
    assert len(inodes) == 67
    assert set(inos) < set(inodes)
    before = {ino: store.get_attributes(ino) for ino in inos}
    assert all(attributes.size == 100 for attributes in before.values())
    assert store.lookup(store.lookup(1, b"d").ino, b"f3").ino == inos[43]
    inode = store.namespace.get(inos[43])
    assert (inode.name, inode.links, inode.commit_lsn > 0) == (b"f3", 1, True)
    changed = write_file(store, 1, b"changed", b"x")
    pieces = write_file(store, 1, b"pieces", b"")
    handle = store.open_file(pieces, os.O_WRONLY)
    for number in range(sleepers.REFERENCES_MAX + 1):
        store.write(handle, number * 8192, b"piece")
    close(store, handle)
    store.set_xattr(changed, b"user.x", b"y")
    plain = write_file(store, 1, b"plain", b"x")
    store = shop.reopen(store, clean=False)
    awake = {inode.ino for inode in store.namespace.inodes.awake()}
    assert pieces in awake
    assert not {changed, plain} & awake
    assert store.get_xattr(changed, b"user.x") == b"y"
    assert {ino: store.get_attributes(ino) for ino in inos} == before


@pytest.mark.usefixtures("together")
def test_what_the_journal_changes_sleeps_on(shop: Shop, store: Store) -> None:
    """Names, attributes and contents of files of an image; what is removed is never woken."""
    store, inos = filled(shop, store, 60)
    first, second = store.lookup(1, b"a").ino, store.lookup(1, b"b").ino
    for number in range(5):
        store.unlink(first, b"f%d" % number)
        store.rename(first, b"f%d" % (number + 5), second, b"moved%d" % number)
        store.set_xattr(inos[number + 10], b"user.x", b"%d" % number)
        store.set_attributes(inos[number + 15], mode=0o600)
        store.link(inos[number + 20], second, b"link%d" % number)
        write_file(store, first, b"f%d" % (number + 25), b"again")
        write_file(store, second, b"temporary", b"new")
        store.rename(second, b"temporary", second, b"f%d" % number)
    for number in range(4):
        store.remove_xattr(inos[number + 10], b"user.x")
    for number in range(20):
        made = store.make_directory(1, b"made%d" % number, 0o755, 0, 0).ino
        write_file(store, made, b"file", b"%d" % number)
    store.make_directory(made, b"gone", 0o755, 0, 0)
    store.remove_directory(made, b"gone")
    before = told_by(columns_of_store(store))
    attributes = {ino: store.get_attributes(ino) for ino in inos[5:30]}
    store = shop.reopen(store, clean=False)
    inodes = store.namespace.inodes
    assert {inode.kind for inode in inodes.awake()} == {FileKind.DIRECTORY}
    assert len(inodes.awake()) == 3 + 20
    assert told_by(columns_of_store(store)) == before
    assert {ino: store.get_attributes(ino) for ino in inos[5:30]} == attributes
    assert store.get_xattr(inos[14], b"user.x") == b"4"
    assert store.list_xattrs(inos[12]) == []
    assert not any(ino in inodes for ino in inos[:5])
    moved = store.namespace.get(inos[5])
    assert (moved.parent, moved.name) == (second, b"moved0")
    assert store.namespace.get(inos[20]).links == 2


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("fill", [filled, crashed])
@pytest.mark.parametrize("seed", range(12), ids="seed={}".format)
def test_an_image_of_sleepers_is_of_one_moment(
    shop: Shop,
    store: Store,
    seed: int,
    fill: Callable[[Shop, Store, int], tuple[Store, list[int]]],
) -> None:
    """Woken before they were taken down, after that, and never; changed or only looked at."""
    rng = random.Random(seed)
    store, inos = fill(shop, store, 42)
    with small_slices():
        expected = told_by(columns_of_store(store))
        store.volume.rollovers.begin()
        first = store.volume.rollovers.running
        generation = store.volume.root.generation
        while store.volume.rollovers.running is first:
            rng.choice(verbs_on(store, rng, rng.choice(inos)))()
            step(store)
        assert store.volume.root.generation == generation + 1
        assert told_of_root(store) == expected
    now = told_by(columns_of_store(store))
    store = shop.reopen(store)
    assert told_by(columns_of_store(store)) == now


def test_sleepers_are_moved_by_the_cleaner(shop: Shop, store: Store) -> None:
    """What a record says of them wakes them up."""
    store, inos = filled(shop, store, 20)
    store.unlink(store.lookup(1, b"a").ino, b"f0")
    while store.cleaner.compact(1.0):
        pass
    assert len(store.namespace.inodes.awake()) > 3
    store = shop.reopen(store)
    for number, ino in enumerate(inos[1:], 1):
        handle = store.open_file(ino, os.O_RDONLY)
        assert bytes(store.read(handle, 0, 100)) == bytes([number % 10]) * 100
        store.release(handle)


def test_opening_calls_nothing_for_each_file(shop: Shop) -> None:
    """Counted: what Python calls during an opening, with few and with many files."""
    calls = dict[int, int]()
    for count in (100, 4000):
        store = shop.new_ordinary(64 * MIB)
        store, _ = filled(shop, store, count)
        store.close()
        gc.collect()  # what is collected during the opening would be counted
        found = 0

        def note(_frame: FrameType, event: str, _argument: object) -> None:
            nonlocal found
            found += event in {"call", "c_call"}

        sys.setprofile(note)
        try:
            again = Store.open(store.media)
        finally:
            sys.setprofile(None)
        calls[count] = found
        again.close()
        shop.stores.remove(store)
        store.media.close()
    print(f"calls of an opening: {calls}")
    assert calls[4000] < calls[100] + 400
