"""Markers that are archives of PyTorch: those that an exception has ended early are no end."""

from __future__ import annotations

import io
import os
import random
import zipfile

import pytest

from cxlfs.native.maps import FileMap
from cxlfs.store import Store
from cxlfs.store import unit_archives as archives
from cxlfs.store.unit_record import policy_rule
from cxlfs.store.unit_rules import Ending
from tests.checkpoint.conftest import Unpack, unpack
from tests.store.test_health import spoil
from tests.support.ended_early import ended_early, records
from tests.support.shop import Shop, close
from tests.support.stores import write_file
from tests.support.unit_scenes import (
    Writers,
    find,
    make,
    open_count,
    open_writing,
    save,
    shards,
    tree,
)

__all__ = ["unpack"]
LAST = b"custom_checkpoint_0.pkl"


@pytest.fixture
def store(shop: Shop) -> Store:
    store = shop.new(16 << 20)
    rules = (policy_rule((b"checkpoint_*",), (LAST,), None),)
    store.units.set_policy(store.namespace.get(1), rules)
    return store


@pytest.fixture
def archive(unpack: Unpack) -> bytes:
    return (unpack("torch") / "zip.pt").read_bytes()


def content_of(store: Store, data: bytes) -> FileMap:
    write_file(store, 1, b"file", data)
    return find(store, b"file").content


def test_each_way_to_end_one_early(store: Store, archive: bytes) -> None:
    names = records(archive)
    last = max(number for number, name in enumerate(names) if name.startswith("data/"))
    for count in range(len(names) + 1):
        found = archives.is_hollow(content_of(store, ended_early(archive, count)))
        assert found == (count <= last), names[:count]


@pytest.mark.parametrize("name", ["zip.pt", "module.pt", "legacy.pt", "model.safetensors"])
def test_whole_files_are_not_hollow(store: Store, unpack: Unpack, name: str) -> None:
    assert not archives.is_hollow(content_of(store, (unpack("torch") / name).read_bytes()))


def other_archive(**members: bytes) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return made.getvalue()


OTHERS = {
    "empty archive": other_archive(),
    "NumPy": other_archive(**{"weights.npy": b"x" * 100}),
    "exported program": other_archive(**{"e/version": b"3\n", "e/models/model.json": b"{}"}),
    "version alone, elsewhere": other_archive(**{"other": b"", "a/version": b"3\n"}),
    "magic alone": b"PK\x03\x04",
    "text": b"torch",
}


@pytest.mark.parametrize("data", OTHERS.values(), ids=OTHERS)
def test_what_pytorch_did_not_end_is_not_hollow(store: Store, data: bytes) -> None:
    assert not archives.is_hollow(content_of(store, data))


def test_large_ones_are_not_read(
    store: Store, archive: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_of(store, ended_early(archive, 1))
    assert archives.is_hollow(content)
    monkeypatch.setattr(archives, "PICKLE_BYTES_MAX", 10)
    assert not archives.is_hollow(content)
    monkeypatch.setattr(archives, "DIRECTORY_BYTES_MAX", 10)
    assert not archives.is_hollow(content)


def test_hostile_ones_raise_nothing(store: Store, archive: bytes, rng: random.Random) -> None:
    for _ in range(300):
        data = bytearray(ended_early(archive, rng.randrange(len(records(archive)) + 1)))
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        archives.is_hollow(content_of(store, bytes(data[: rng.randrange(1, len(data) + 1)])))


# --- units ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["written", "renamed"])
@pytest.mark.parametrize("count", [0, 1])
def test_a_hollow_marker_is_no_end(
    shop: Shop, store: Store, archive: bytes, count: int, how: str
) -> None:
    writers = Writers(store)
    directory = make(store, b"checkpoint_1")
    old = save(store, directory, shards(1), marker=None)
    old[LAST] = archive
    write_file(store, directory, LAST, archive)
    assert open_count(store) == 0
    save(store, directory, shards(2), marker=None)
    name = LAST if how == "written" else LAST + b".tmp"
    close(store, open_writing(store, directory, name, ended_early(archive, count)))
    if how == "renamed":
        store.rename(directory, name, directory, LAST)
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.BADLY
    store.units.maintain()
    assert tree(store, b"checkpoint_1") == old
    assert tree(shop.reopen(store), b"checkpoint_1") == old


def test_a_marker_that_is_written_again_is_an_end(store: Store, archive: bytes) -> None:
    directory = make(store, b"checkpoint_1")
    save(store, directory, shards(1), marker=None)
    write_file(store, directory, LAST, ended_early(archive, 0))
    assert open_count(store) == 1
    write_file(store, directory, LAST, archive)
    assert open_count(store) == 0


def test_a_marker_that_cannot_be_read_is_an_end(shop: Shop, store: Store, archive: bytes) -> None:
    """It says nothing of who wrote it."""
    shop.damaged = True
    directory = make(store, b"checkpoint_1")
    save(store, directory, shards(1), marker=None)
    attributes, handle = store.create(directory, LAST, 0o644, 0, 0, os.O_RDWR)
    store.write(handle, 0, ended_early(archive, 0))
    spoil(store, attributes.ino)
    close(store, handle)
    assert open_count(store) == 0
