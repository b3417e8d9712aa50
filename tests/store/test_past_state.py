"""States of earlier commits, against a model: exact while all is kept, and never wrong."""

from __future__ import annotations

import contextlib
import os
import random
from typing import TypeAlias

import pytest

from cxlfs.errors import CxlfsError, NotFoundError
from cxlfs.store import Store
from cxlfs.store.namespace import FileKind
from cxlfs.store.past_state import Moments, PastState
from cxlfs.types import ROOT_INO
from tests.support.shop import Shop
from tests.support.stores import write_file

Tree: TypeAlias = "dict[bytes, bytes | None]"
"""Content of each file by path, the target of a link; None: a directory."""


def tree_of(store: Store) -> Tree:
    """What is committed now."""
    found: Tree = {}
    pending = [(b"", store.namespace.get(ROOT_INO))]
    while pending:
        path, directory = pending.pop()
        for name, ino in (directory.entries or {}).items():
            inode = store.namespace.get(ino)
            if inode.uncommitted:
                continue
            below = path + b"/" + name
            content = inode.committed_content
            if inode.entries is not None:
                found[below] = None
                pending.append((below, inode))
            else:
                found[below] = inode.target if content is None else bytes(content.read(0, 1 << 20))
    return found


def tree_at(store: Store, commit: int) -> Tree:
    """What the state of a commit says."""
    state = PastState(store.volume, store.past, commit)
    found: Tree = {}
    pending = [(b"", int(ROOT_INO))]
    while pending:
        path, directory = pending.pop()
        names = state.names(directory)
        for name, ino in names.items():
            assert state.find(directory, name) == ino
            fact = state.fact(ino)
            if fact is None:
                continue
            below = path + b"/" + name
            if fact.kind is FileKind.DIRECTORY:
                found[below] = None
                pending.append((below, ino))
            elif fact.content is None:
                found[below] = fact.source.target
            else:
                copy = fact.copy()
                assert copy is not None
                found[below] = bytes(copy.read(0, 1 << 20))
                copy.close()
    return found


class Life:
    """Random verbs on a few names; the tree after each commit."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        self.trees: dict[int, Tree] = {}
        self.open: list[int] = []

    def directories(self) -> list[int]:
        return [i.ino for i in self.store.namespace.walk(ROOT_INO) if i.entries is not None]

    def place(self) -> tuple[int, bytes]:
        return self.rng.choice(self.directories()), self.rng.choice((b"a", b"b", b"c", b"d"))

    def bytes(self) -> bytes:
        return self.rng.randbytes(self.rng.choice((1, 100, 5000, 70_000)))

    def step(self) -> None:
        verbs = (
            *(self.save, self.save, self.save, self.rename, self.rename, self.exchange),
            *(self.remove, self.remove, self.make, self.link, self.change, self.symlink),
            *(self.create_and_rename, self.release, self.overwrite_open, self.chmod),
        )
        with contextlib.suppress(CxlfsError):
            self.rng.choice(verbs)()
        self.note()

    def note(self) -> None:
        self.trees[self.store.volume.last_lsn] = tree_of(self.store)

    def save(self) -> None:
        parent, name = self.place()
        write_file(self.store, parent, name, self.bytes())

    def create_and_rename(self) -> None:
        """A name that no record knows is another one when it is committed."""
        parent, name = self.place()
        _, handle = self.store.create(parent, b"tmp", 0o644, 0, 0, os.O_WRONLY | os.O_EXCL)
        self.store.write(handle, 0, self.bytes())
        self.store.rename(parent, b"tmp", parent, name)
        self.open.append(handle)

    def overwrite_open(self) -> None:
        """A file that is being written, and may be published later."""
        ino = self.store.lookup(*self.place()).ino
        handle = self.store.open_file(ino, os.O_WRONLY | self.rng.choice((0, os.O_TRUNC)))
        self.open.append(handle)
        self.store.write(handle, 0, self.bytes())

    def release(self) -> None:
        if self.open:
            handle = self.open.pop(self.rng.randrange(len(self.open)))
            self.store.flush(handle, writer_killed=self.rng.random() < 0.3)
            self.note()
            self.store.release(handle)

    def change(self) -> None:
        """In place, or by appending."""
        attributes = self.store.lookup(*self.place())
        handle = self.store.open_file(attributes.ino, os.O_RDWR)
        offset = self.rng.choice((0, attributes.size // 2, attributes.size))
        self.store.write(handle, offset, self.bytes())
        self.store.flush(handle, writer_killed=False)
        self.note()
        self.store.release(handle)

    def rename(self) -> None:
        self.store.rename(*self.place(), *self.place())

    def exchange(self) -> None:
        self.store.rename(*self.place(), *self.place(), exchange=True)

    def remove(self) -> None:
        parent, name = self.place()
        if self.store.namespace.get(self.store.lookup(parent, name).ino).entries is not None:
            self.store.remove_directory(parent, name)
        else:
            self.store.unlink(parent, name)

    def make(self) -> None:
        self.store.make_directory(*self.place(), 0o755, 0, 0)

    def symlink(self) -> None:
        self.store.make_symlink(*self.place(), b"to %d" % self.rng.randrange(100), 0, 0)

    def link(self) -> None:
        self.store.link(self.store.lookup(*self.place()).ino, *self.place())

    def chmod(self) -> None:
        self.store.set_attributes(self.store.lookup(*self.place()).ino, mode=0o600)


def wrong(found: Tree, model: Tree) -> Tree:
    """What a state says and was not so."""
    return {path: content for path, content in found.items() if model.get(path, 0) != content}


def differing(found: Tree, model: Tree) -> list[bytes]:
    """Paths that mean something else. A difference of the contents would take minutes to show."""
    return [
        path for path in found.keys() | model.keys() if found.get(path, 0) != model.get(path, 0)
    ]


@pytest.mark.parametrize("number", range(6))
def test_each_state_is_as_it_was(store: Store, rng: random.Random, number: int) -> None:
    """Absent is what leaves no row: what was appended to, and empty contents; some links."""
    life = Life(store, random.Random(rng.random() + number))
    for _ in range(150):
        life.step()
    missing = shown = 0
    for commit, model in life.trees.items():
        found = tree_at(store, commit)
        assert not wrong(found, model), commit
        shown += len(found)
        missing += len(model) - len(found)
    assert shown > 3 * missing
    while life.open:
        life.release()


def test_a_plain_life_is_shown_whole(store: Store, rng: random.Random) -> None:
    """Saves over names, by rename, removals, directories that move: nothing is absent."""
    life = Life(store, rng)
    verbs = (life.save, life.save, life.save, life.rename, life.exchange, life.remove, life.make)
    for _ in range(200):
        with contextlib.suppress(CxlfsError):
            rng.choice(verbs)()
        life.note()
    for commit, model in life.trees.items():
        assert not differing(tree_at(store, commit), model), commit


@pytest.mark.parametrize("clean", [True, False])
def test_after_an_opening_nothing_is_wrong(
    shop: Shop, store: Store, rng: random.Random, *, clean: bool
) -> None:
    life = Life(store, rng)
    for _ in range(120):
        life.step()
    while life.open:
        life.release()
        life.note()
    store.past.archive.step(0.0)
    store.past.archive.step(10.0)
    life.note()
    store = shop.reopen(store, clean=clean)
    before = store.namespace.opened_lsn
    life.store = store
    for _ in range(40):
        life.step()
    while life.open:
        life.release()
        life.note()
    for commit, model in life.trees.items():
        assert not wrong(tree_at(store, commit), model), (commit, before)


def test_an_opening_knows_when_names_were_given(
    shop: Shop, store: Store, rng: random.Random
) -> None:
    """But for the old names of what was renamed: here are none."""
    life = Life(store, rng)
    verbs = (life.save, life.save, life.remove, life.make, life.symlink)
    for _ in range(60):
        with contextlib.suppress(CxlfsError):
            rng.choice(verbs)()
        life.note()
    for _ in range(2):
        store = shop.reopen(store, clean=True)
        for commit, model in life.trees.items():
            assert not differing(tree_at(store, commit), model), commit


def test_what_was_given_up_is_absent(store: Store, rng: random.Random) -> None:
    life = Life(store, rng)
    for _ in range(150):
        life.step()
    for row in rng.sample(list(store.past), len(store.past) // 2):
        store.past.forget(row)
    for commit, model in life.trees.items():
        assert not wrong(tree_at(store, commit), model), commit
    while life.open:
        life.release()


def test_a_time_means_the_commit_before_it(store: Store) -> None:
    moments = Moments(store.volume, store.past)
    times = {}
    for number in range(5):
        write_file(store, ROOT_INO, b"a", b"%d" % number)
        times[store.volume.last_lsn] = store.volume.last_commit_ns
    for commit, time_ns in times.items():
        assert moments.commit(commit) == commit
        assert moments.commit(time_ns + 1) >= commit
    with pytest.raises(NotFoundError):
        moments.commit(store.volume.last_lsn + 1)
    with pytest.raises(NotFoundError):
        moments.commit(0)
    with pytest.raises(NotFoundError):
        moments.commit(store.volume.now() + 10**12)


def test_a_copy_that_a_reader_has_is_moved_and_kept(store: Store, rng: random.Random) -> None:
    """By the cleaner, and through rollovers; no image has what only readers refer to."""
    contents = {b"f%d" % number: rng.randbytes(9000) for number in range(60)}
    for name, data in contents.items():
        write_file(store, ROOT_INO, name, data)
    state = PastState(store.volume, store.past, store.volume.last_lsn)
    lent = {}
    for name in list(contents)[::4]:
        fact = state.fact(store.lookup(ROOT_INO, name).ino)
        copy = fact.copy() if fact is not None else None
        assert fact is not None
        assert copy is not None
        store.past.lend(fact.ino, copy)
        lent[name] = fact.ino, copy
    for number in range(60):
        if number % 3:
            store.unlink(ROOT_INO, b"f%d" % number)
    store.past.forget_all()
    while store.cleaner.compact(0.99):
        pass
    store.volume.rollover()
    store.volume.rollover()
    assert store.volume.counters.moved_bytes > 0
    for name, (ino, copy) in lent.items():
        assert bytes(copy.read(0, 9000)) == contents[name]
        store.past.give_back(ino, copy)
    assert not store.past._lent


@pytest.mark.parametrize("count", [3, 300], ids=["one-by-one", "many-at-once"])
def test_a_crash_forgets_no_time_of_a_name(shop: Shop, store: Store, count: int) -> None:
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    for number in range(count):
        write_file(store, directory, b"%d" % number, b"data")
    between = store.volume.last_lsn
    write_file(store, directory, b"later", b"data")
    store.rename(directory, b"0", directory, b"renamed")
    store = shop.reopen(store, clean=False)
    for _ in range(2):
        state = store.state_at(between)
        assert state.follow([b"d"]) == directory
        assert set(state.names(directory)) == {b"%d" % number for number in range(1, count)}
        store = shop.reopen(store, clean=True)
