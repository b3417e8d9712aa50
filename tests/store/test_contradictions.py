"""A record that does not apply is not stored; one that is there costs nothing before it."""

from __future__ import annotations

import stat

import pytest

from cxlfs.errors import RecordRefusedError
from cxlfs.format.layout import NUMBER_LIMIT
from cxlfs.format.operations import (
    ContentOperation,
    InodeOperation,
    LinkOperation,
    Operation,
    PromoteOperation,
    SymlinkOperation,
    UnlinkOperation,
    XattrSetOperation,
)
from cxlfs.store import Store
from cxlfs.store.names import Names
from cxlfs.store.volume import Volume
from cxlfs.verify import run_passes
from tests.support.shop import Shop
from tests.support.stores import picture, read_file, write_file

FILE, DIRECTORY, BELOW = 2, 3, 4
NEW, NOWHERE = 10_000, 20_000


def inode(ino: int, mode: int) -> InodeOperation:
    return InodeOperation(ino, mode, 0, 0, 0, 0, 1, 1, 1, 1)


WRONG: dict[str, list[Operation]] = {
    "a name that is not there": [UnlinkOperation(1, b"nothing")],
    "a directory that is not there": [LinkOperation(NOWHERE, FILE, b"name")],
    "a name in a file": [LinkOperation(FILE, BELOW, b"name")],
    "an inode that is not there": [LinkOperation(1, NOWHERE, b"name")],
    "a directory with two names": [LinkOperation(1, DIRECTORY, b"second")],
    "a directory below itself": [
        UnlinkOperation(1, b"directory"),
        LinkOperation(BELOW, DIRECTORY, b"directory"),
    ],
    "a directory that loses its name": [UnlinkOperation(1, b"directory")],
    "another type": [inode(FILE, stat.S_IFDIR | 0o755)],
    "no type": [inode(NEW, 0o644), LinkOperation(1, NEW, b"new")],
    "a number at the limit": [
        inode(NUMBER_LIMIT, stat.S_IFREG | 0o644),
        LinkOperation(1, NUMBER_LIMIT, b"new"),
    ],
    "a link that leads nowhere": [inode(NEW, stat.S_IFLNK | 0o777), LinkOperation(1, NEW, b"new")],
    "an empty link": [
        inode(NEW, stat.S_IFLNK | 0o777),
        SymlinkOperation(NEW, b""),
        LinkOperation(1, NEW, b"new"),
    ],
    "the target of a file": [SymlinkOperation(FILE, b"target")],
    "an inode without a name": [inode(NEW, stat.S_IFREG | 0o644)],
    "content of a directory": [ContentOperation(DIRECTORY, False, 0, 0, b"")],
    "an attribute of nothing": [XattrSetOperation(NOWHERE, b"user.a", b"1")],
    "nothing to promote": [PromoteOperation(FILE)],
}
NO_CONTRADICTION = {"a number at the limit", "an empty link", "an inode without a name"}
"""A journal that says the first two is malformed; the third one goes at the end of its record."""


@pytest.fixture
def filled(store: Store) -> Store:
    assert write_file(store, 1, b"file", b"data") == FILE
    assert store.make_directory(1, b"directory", 0o755, 0, 0).ino == DIRECTORY
    assert store.make_directory(DIRECTORY, b"below", 0o755, 0, 0).ino == BELOW
    return store


@pytest.mark.parametrize("what", WRONG)
def test_it_is_not_stored(shop: Shop, filled: Store, what: str) -> None:
    before = filled.volume.last_lsn
    with pytest.raises(RecordRefusedError, match="contradicts the state"):
        filled.volume.commit(WRONG[what])
    assert filled.volume.last_lsn == before
    assert not filled.read_only
    assert [event.kind for event in shop.events] == ["record-refused"]
    write_file(filled, 1, b"another", b"data")


def without_admission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Volume, "_admit", lambda *_: None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", [what for what in WRONG if what not in NO_CONTRADICTION])
@pytest.mark.parametrize("others", [0, 100])
def test_one_that_is_there_costs_nothing_before_it(
    shop: Shop, filled: Store, what: str, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a program of before may have stored it; ``others``: so many records are applied at once,
    on both sides of it.
    """
    for number in range(others):
        filled.make_directory(1, b"%d" % number, 0o755, 0, 0)
    before = picture(filled)
    with monkeypatch.context() as patch:
        without_admission(patch)
        filled.volume.commit(WRONG[what])
        for number in range(others):
            filled.volume.commit([inode(FILE, stat.S_IFREG | number)])
    shop.damaged = True
    store = shop.reopen(filled)
    assert picture(store) == before
    assert read_file(store, FILE) == b"data"
    assert store.read_only
    assert "contradicts the state" in str(store.read_only_reason)
    findings = list(run_passes(store.media, structure_only=False))
    assert any("contradicts the state" in str(finding) for finding in findings)


def test_a_store_whose_memory_differs_from_its_media_writes_no_more(
    shop: Shop, filled: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Names, ops: list[Operation], *_: object) -> None:
        raise RuntimeError(f"{len(ops)} operations of {self}")

    with monkeypatch.context() as patch:
        patch.setattr(Names, "_apply", fails)
        with pytest.raises(RuntimeError):
            filled.make_directory(1, b"new", 0o755, 0, 0)
    assert filled.read_only
    assert "could not be applied" in str(filled.read_only_reason)
    store = shop.reopen(filled)
    assert store.lookup(1, b"new").ino
    assert not store.read_only
