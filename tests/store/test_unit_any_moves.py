"""Units that go back after any moves of files and directories: in, out, within and between them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import CxlfsError
from cxlfs.format.operations import Operation
from cxlfs.store import Store
from cxlfs.store.namespace import Inode
from cxlfs.store.options import StoreOptions
from cxlfs.store.unit_aside import ASIDE_NAME
from cxlfs.store.unit_rules import Ending, UnitsMode
from cxlfs.store.volume import Volume
from tests.support.shop import Shop
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    MARKER,
    Writers,
    begin,
    find,
    finish_work,
    kept_count,
    make,
    open_count,
    remove_tree,
)

TRAINER, OTHER = "trainer", "other"
UNITS = (b"checkpoint-1", b"checkpoint-2", b"checkpoint-3")
"""The last one is made in the test."""
FILES = [b"f%d" % number for number in range(4)]
DIRECTORIES = [b"d%d" % number for number in range(3)]
Picture = dict[bytes, bytes | None]
"""Path: content of a file, None for a directory."""


def picture(store: Store, top: bytes = b"") -> Picture:
    """All that users see."""
    found: Picture = {}
    pending = [(top, find(store, top))] if top in UNITS or not top else []
    while pending:
        path, directory = pending.pop()
        for name, ino in (directory.entries or {}).items():
            inode = store.namespace.get(ino)
            below = path + b"/" + name
            if path == b"" and name == ASIDE_NAME:
                continue
            found[below] = None if inode.live is None else read_file(store, ino)
            if inode.entries is not None:
                pending.append((below, inode))
    return found


def of_unit(seen: Picture, unit: bytes) -> Picture:
    return {path: data for path, data in seen.items() if (path + b"/").startswith(b"/" + unit)}


class Scene:
    """Two sets and an archive of the same names, then random changes of all."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.rng = random.Random(seed)
        self.writers = Writers(store)
        self.log: list[str] = []
        self.tokens = 0
        self.wanted: set[bytes] = set()
        """Contents that were stored outside of units, and that nobody has removed there."""
        for top in (b"archive", b"attic", *UNITS[:2]):
            directory = make(store, top)
            self._fill(directory)
            self._fill(make(store, b"d0", directory))
            self._fill(make(store, b"d1", store.lookup(directory, b"d0").ino))
            make(store, b"d2", directory)
            if top in UNITS:
                write_file(store, directory, MARKER, b"done " + top)
        assert open_count(store) == 0
        self.before = picture(store)

    def _fill(self, directory: int) -> None:
        for name in FILES[: self.rng.randrange(1, 4)]:
            self._write(directory, name)

    # --- changes ------------------------------------------------------------------------------

    def _is_outside(self, directory: int) -> bool:
        return self.store.units.unit_of(self.store.namespace.get(directory)) is None

    def _unwant(self, directory: int, name: bytes) -> None:
        """Somebody takes a name outside of units."""
        inode = self.store.namespace.find(directory, name)
        if inode is not None and self._is_outside(directory):
            for each in self.store.namespace.walk(inode.ino):
                if each.live is not None:
                    self.wanted.discard(read_file(self.store, each.ino))

    def _write(self, directory: int, name: bytes) -> None:
        found = self.store.namespace.find(directory, name)
        if found is not None and found.entries is not None:
            return
        self._unwant(directory, name)
        self.tokens += 1
        data = b"%d of %s" % (self.tokens, str(self.writers.present).encode())
        write_file(self.store, directory, name, data)
        if self._is_outside(directory) and self.writers.present != TRAINER:
            self.wanted.add(data)

    def step(self) -> None:
        rng = self.rng
        self.writers.present = rng.choice([TRAINER, TRAINER, OTHER])
        verb = rng.choice(["write_new"] * 3 + ["rename"] * 6 + ["exchange"] * 3 + VERBS)
        where, name = self._some(rng.random() < 0.4)
        to, new_name = self._directory(), rng.choice([*FILES, *DIRECTORIES])
        if self.writers.present == OTHER and not (
            self._is_outside(where) and verb.startswith("write")
        ):
            self.writers.present = TRAINER
        text = f"{verb} {self._path(where)}/{name!r} -> {self._path(to)}/{new_name!r}"
        try:
            getattr(self, "_" + verb)(where, name, to, new_name)
        except CxlfsError as error:
            text += f" ({type(error).__name__})"
        self.log.append(f"{self.writers.present}: {text}")

    def _rename(self, where: int, name: bytes, to: int, new_name: bytes) -> None:
        gone = set(self.wanted)
        self._unwant(to, new_name)
        try:
            self.store.rename(where, name, to, new_name)
        except CxlfsError:
            self.wanted = gone
            raise

    def _exchange(self, where: int, name: bytes, to: int, _: bytes) -> None:
        inode = self.store.namespace.get(to)
        names = [each for each in inode.entries or {} if each not in (*UNITS, MARKER, ASIDE_NAME)]
        if names and to != 1:
            self.store.rename(where, name, to, self.rng.choice(names), exchange=True)

    def _link(self, where: int, name: bytes, to: int, new_name: bytes) -> None:
        if self._path(where).split("/")[0] != self._path(to).split("/")[0]:
            return  # a file is found by its last name: what changes it begins no unit
        self.store.link(self.store.lookup(where, name).ino, to, new_name)

    def _unlink(self, where: int, name: bytes, _to: int, _name: bytes) -> None:
        found = self.store.namespace.find(where, name)
        if found is not None and found.entries is None:
            self._unwant(where, name)
            self.store.unlink(where, name)

    def _remove(self, where: int, name: bytes, _to: int, _name: bytes) -> None:
        """A directory and all in it."""
        found = self.store.namespace.find(where, name)
        if found is None or found.entries is None:
            return
        self._unwant(where, name)
        for child in list(found.entries):
            if self.store.namespace.get(found.entries[child]).entries is not None:
                self._remove(found.ino, child, 0, b"")
        remove_tree(self.store, where, name)

    def _make(self, _where: int, _name: bytes, to: int, new_name: bytes) -> None:
        top = find(self.store, b"").entries or {}
        if UNITS[2] not in top and self.rng.random() < 0.3:
            make(self.store, UNITS[2])
        else:
            make(self.store, new_name, to)

    def _rollover(self, *_: object) -> None:
        self.store.volume.rollover()

    def _write_new(self, where: int, _name: bytes, _to: int, new_name: bytes) -> None:
        self._write(where, new_name)

    def _write_over(self, where: int, name: bytes, _to: int, _name: bytes) -> None:
        self._write(where, name)

    # --- choosing -----------------------------------------------------------------------------

    def _all(self) -> list[Inode]:
        """Directories that may be changed in: not the root directory."""
        place = self.store.namespace.find(1, ASIDE_NAME)
        hidden = (
            {1} if place is None else {1, *(e.ino for e in self.store.namespace.walk(place.ino))}
        )
        found = self.store.namespace.walk(1)
        return [each for each in found if each.entries is not None and each.ino not in hidden]

    def _directory(self) -> int:
        return self.rng.choice(self._all()).ino

    def _some(self, prefers_directory: bool) -> tuple[int, bytes]:
        """A name of a file or directory, below the first level."""
        names = [
            (directory.ino, name, self.store.namespace.get(ino).entries is not None)
            for directory in self._all()
            for name, ino in (directory.entries or {}).items()
            if name != MARKER
        ]
        fitting = [each for each in names if each[2] == prefers_directory] or names
        return self.rng.choice(fitting)[:2] if fitting else (self._directory(), b"f0")

    def _path(self, ino: int) -> str:
        parts = []
        while ino != 1:
            inode = self.store.namespace.get(ino)
            parts.append(os.fsdecode(inode.name))
            ino = inode.parent
        return "/".join(reversed(parts))

    # --- the end ------------------------------------------------------------------------------

    def check(self, store: Store, seed: int) -> None:
        seen = picture(store)
        story = f"seed {seed}\n" + "\n".join(self.log)
        for unit in UNITS:
            assert of_unit(seen, unit) == of_unit(self.before, unit), story
        lost = self.wanted - {data for data in seen.values() if data is not None}
        assert not lost, f"{lost} {story}"


VERBS = ["link", "unlink", "remove", "make", "make", "rollover", "write_over"]


def _crash(shop: Shop, scene: Scene) -> Store:
    return shop.reopen(scene.store, units=UnitsMode.AUTO)


def _kill(shop: Shop, scene: Scene) -> Store:
    """Of the writer: the units go back while the store is open."""
    del shop
    for writer in (TRAINER, OTHER):
        scene.writers.endings[writer] = Ending.KILLED
    scene.store.units.settle()
    assert open_count(scene.store) == 0
    return scene.store


def _failing_behind(count: int) -> Callable[..., object]:
    """As Volume.commit, for so many records."""
    commit, left = Volume.commit, [count]

    def failing(self: Volume, ops: list[Operation], **options: bool) -> object:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return commit(self, ops, **options)

    return failing


def _cut(shop: Shop, scene: Scene) -> Store:
    """A crash, and others behind some records of each way back."""
    store = scene.store
    store.media.fence()
    store.abandon()
    shop.stores.remove(store)
    options = StoreOptions(units=UnitsMode.AUTO)
    for budget in (1, scene.rng.randrange(8), scene.rng.randrange(20)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Volume, "commit", _failing_behind(budget))
            try:
                again = Store.open(store.media, options)
            except KeyboardInterrupt:
                continue
        again.abandon()
    return shop._watch(Store.open(store.media, options))


SEEDS = range(int(os.environ.get("FROM", "0")), int(os.environ.get("SEEDS", "90")))
ENDS: list[Callable[[Shop, Scene], Store]] = [_crash, _kill, _cut]


@pytest.mark.parametrize("seed", range(90))
def test_any_moves_go_back(shop: Shop, seed: int) -> None:
    """Each unit is what it was, and what was stored outside is somewhere."""
    scene = Scene(shop.new(8 << 20, units=UnitsMode.AUTO), seed)
    for name in UNITS[:2]:
        begin(scene.store, find(scene.store, name).ino)
    for _ in range(scene.rng.randrange(1, 16)):
        scene.step()
    store = ENDS[seed % len(ENDS)](shop, scene)
    scene.check(store, seed)
    finish_work(store)
    assert kept_count(store) == 0
