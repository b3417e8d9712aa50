"""What applying a journal costs, whatever it holds, and however many files there are besides.

Work is counted, never timed: calls of Python and of C functions.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from cxlfs.format.journal_reader import RecordBatch
from cxlfs.store import Store
from cxlfs.store.replay import Replayer
from tests.support.bench.crowd import put_files
from tests.support.shop import Shop
from tests.support.stores import write_file

MIB = 1 << 20
FEW, MORE = 1000, 20_000
SPARE = 40
CALLS_EACH = 80
"""For a record, at most."""


@contextlib.contextmanager
def replay_counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One number: calls while records of journals are applied."""
    calls = [0]

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        calls[0] += event in {"call", "c_call"}

    original = Replayer.apply

    def apply(self: Replayer, batch: RecordBatch) -> None:
        sys.setprofile(count)
        try:
            original(self, batch)
        finally:
            sys.setprofile(None)

    with monkeypatch.context() as patch:
        patch.setattr(Replayer, "apply", apply)
        yield calls


def replay_work(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, files: int, saves: int, changes: int
) -> int:
    """Calls while the journal of a store with so many files is applied, which holds so many new
    files, and ``changes`` times a name that is replaced, one that goes, an attribute.
    """
    store = shop.new_ordinary(256 * MIB)
    directory = store.make_directory(1, b"all", 0o755, 0, 0).ino
    inos = put_files(store, directory, b"%d", files)
    store.volume.rollover()
    rollovers = store.statistics().rollovers
    for number in range(saves):
        write_file(store, directory, b"new%d" % number, b"data")
    for number in range(changes):
        write_file(store, directory, b"temporary", b"data")
        store.rename(directory, b"temporary", directory, b"%d" % number)
        store.unlink(directory, b"%d" % (number + 100))
        store.set_xattr(inos[number + 200], b"user.x", b"value")
    assert store.statistics().rollovers == rollovers
    with replay_counted(monkeypatch) as calls:
        store = shop.reopen(store, clean=False)
    assert store.statistics().recovery.records == saves + 4 * changes
    return calls[0]


@pytest.mark.timeout(300)
def test_a_record_is_applied_at_the_same_cost_in_a_larger_store(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.directory_times = False
    few, many = (replay_work(shop, monkeypatch, files, 500, 50) for files in (FEW, MORE))
    print(f"calls while 700 records are applied, with {FEW} and {MORE} files: {few} {many}")
    assert many <= few + SPARE


def test_a_new_file_is_applied_at_the_same_cost_behind_many(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    none, few, many = (replay_work(shop, monkeypatch, FEW, saves, 0) for saves in (0, 500, 2500))
    print(f"calls while 0, 500 and 2500 new files are applied: {none} {few} {many}")
    assert many - none <= 5 * (few - none) + SPARE
    assert many - none <= CALLS_EACH * 2500


def change_file(store: Store, way: str, directory: int, ino: int, name: bytes) -> None:
    """In one way."""
    if way == "unlink":
        store.unlink(directory, name)
    elif way == "rename":
        store.rename(directory, name, directory, b"moved" + name)
    elif way == "save by rename":
        write_file(store, directory, b"temporary", b"data")
        store.rename(directory, b"temporary", directory, name)
    elif way == "overwrite":
        write_file(store, directory, name, b"data")
    elif way == "truncate":
        store.set_attributes(ino, size=len(name))
    elif way == "chmod":
        store.set_attributes(ino, mode=0o600)
    elif way == "link":
        store.link(ino, directory, b"link" + name)
    elif way == "extended attribute":
        store.set_xattr(ino, b"user.x", name)
    elif name.endswith(b"0"):
        made = store.make_directory(directory, b"in" + name, 0o755, 0, 0).ino
        store.rename(directory, name, made, name)


DIRECTORIES = ("renamed directories", "moved directories")
WAYS = (
    *("unlink", "rename", "save by rename", "overwrite", "truncate", "chmod", "link"),
    *("extended attribute", "new directories", *DIRECTORIES),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_a_change_is_applied_at_the_same_cost_behind_many(
    shop: Shop, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    found = []
    shop.directory_times = False
    for count in (300, 1500):
        store = shop.new_ordinary(256 * MIB)
        directory = store.make_directory(1, b"all", 0o755, 0, 0).ino
        inos = put_files(store, directory, b"%d", count)
        for number in range(0, count if way in DIRECTORIES else 0, 5):
            store.make_directory(1, b"%d" % number, 0o755, 0, 0)
        store.volume.rollover()
        store = shop.reopen(store, clean=True)
        rollovers = store.statistics().rollovers
        for number, ino in enumerate(inos):
            if way not in DIRECTORIES:
                change_file(store, way, directory, ino, b"%d" % number)
            elif number % 5 == 0:
                into = directory if way == "moved directories" else 1
                store.rename(1, b"%d" % number, into, b"moved%d" % number)
        assert store.statistics().rollovers == rollovers
        with replay_counted(monkeypatch) as calls:
            store = shop.reopen(store, clean=False)
        assert store.statistics().recovery.records >= count // 5
        found.append(calls[0])
    print(f"calls while 300 and 1500 changes are applied: {found}")
    assert found[1] <= 5 * found[0] + SPARE
    assert found[1] <= CALLS_EACH * 2 * 1500
