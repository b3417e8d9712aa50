"""Markers that an exception or a handler of signals has cut end no unit."""

from __future__ import annotations

import json
import pickle
import random

import pytest

from cxlfs.store import Store
from cxlfs.store.unit_cuts import is_beginning_of, is_cut
from cxlfs.store.unit_rules import Ending, UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import read_file, write_file
from tests.support.unit_scenes import (
    CHECKPOINT,
    MARKER,
    Writers,
    find,
    make,
    open_count,
    open_writing,
    save,
    saved,
    shards,
    tree,
)

STATE = {"global_step": 7, "log_history": [{"loss": 0.5, "epoch": 1}], "best": "a {strange} [name"}
METADATA = pickle.dumps({"state_dict_metadata": {"weight": [1, 2, 3]}}, protocol=2)


@pytest.fixture
def store(shop: Shop) -> Store:
    return shop.new(units=UnitsMode.AUTO)


def content_is_cut(store: Store, data: bytes) -> bool:
    return is_cut(store.namespace.get(write_file(store, 1, b"any", data)).content)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("value", [STATE, [STATE, STATE], {}, {"a": "}"}, {"{": '\\\\{"'}])
def test_every_cut_of_json_is_seen(store: Store, indent: int | None, value: object) -> None:
    text = json.dumps(value, indent=indent).encode()
    assert not content_is_cut(store, text)
    assert not content_is_cut(store, text + b"\n")
    for size in range(1, len(text)):
        assert content_is_cut(store, text[:size]), text[:size]


def test_a_cut_pickle(store: Store) -> None:
    assert not content_is_cut(store, METADATA)
    assert content_is_cut(store, METADATA[:-1])
    assert content_is_cut(store, METADATA[:20])


@pytest.mark.parametrize("data", [b"", b"done", b"7", b"\0\0", b"x{"])
def test_what_shows_nothing_is_not_cut(store: Store, data: bytes) -> None:
    assert not content_is_cut(store, data)


def test_any_bytes(store: Store) -> None:
    rng = random.Random(20261126)
    for _ in range(200):
        start = rng.choice([b"{", b"[", b"\x80", b""])
        content_is_cut(store, start + rng.randbytes(rng.randrange(100)))


@pytest.mark.parametrize(
    ("text", "name", "others", "expected"),
    [
        (b"global_", b"global_step20", (), True),
        (b"global_step2", b"global_step20", (b"global_step20",), True),
        (b"global_step2", b"global_step20", (b"global_step2",), False),
        (b"global_step20\n", b"global_step20", (), False),
        (b"best", b"global_step20", (), False),
        (b"10", b"iter_0000010", (), False),
        (b"1", b"iter_0000010", (b"iter_0000010",), True),
        (b"1", b"iter_0000010", (b"iter_0000001",), False),
        (b"release", b"iter_0000010", (), False),
        (b"2", b"iter_0000010", (), False),
    ],
)
def test_the_beginning_of_a_name(
    store: Store, text: bytes, name: bytes, others: tuple[bytes, ...], expected: bool
) -> None:
    content = store.namespace.get(write_file(store, 1, b"latest", text)).content
    assert is_beginning_of(content, name, others) == expected


@pytest.mark.parametrize("cut", [1, 20])
def test_a_cut_marker_in_a_new_set(store: Store, cut: int) -> None:
    """Ctrl-C, or a handler that ends with 143, while it is written."""
    writers = Writers(store)
    marker = json.dumps(STATE).encode()
    directory = make(store, CHECKPOINT)
    save(store, directory, shards(1), None)
    write_file(store, directory, MARKER, marker[:cut])
    assert open_count(store) == 1
    writers.endings["trainer"] = Ending.BADLY
    store.units.settle()
    assert tree(store, CHECKPOINT) is None


def test_a_cut_marker_over_an_old_set(store: Store) -> None:
    writers = Writers(store)
    directory, old = saved(store)
    save(store, directory, shards(2), None)
    write_file(store, directory, MARKER, b'{"weight_map": {"a": ')
    writers.endings["trainer"] = Ending.INTERRUPTED
    store.units.settle()
    assert tree(store, CHECKPOINT) == old


def test_a_cut_name_beside_the_set(store: Store) -> None:
    writers = Writers(store)
    write_file(store, 1, b"latest", b"global_step1")
    directory = make(store, b"global_step20")
    save(store, directory, shards(1), None)
    close(store, open_writing(store, 1, b"latest", b"global_st"))
    assert open_count(store) == 1
    assert read_file(store, find(store, b"latest").ino) == b"global_step1"
    writers.endings["trainer"] = Ending.INTERRUPTED
    store.units.settle()
    assert tree(store, b"global_step20") is None
