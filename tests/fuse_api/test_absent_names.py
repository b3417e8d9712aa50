"""A name that a rename took away is asked for without a call, as long as it means nothing."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import pytest

from cxlfs.fuse import kernel
from cxlfs.fuse.direct import Direct
from cxlfs.fuse.kernel import RENAME_EXCHANGE, Opcode
from cxlfs.native.transport import ABSENT_NAMES_MAX
from cxlfs.store import Store
from cxlfs.store.unit_record import policy_rule
from tests.fuse_api.test_data_plane import ROOT, made_plane
from tests.fuse_api.test_first_writes import Caller
from tests.support.unit_scenes import MARKER, save, shards

ABSENT = kernel.entry_reply(None)


@pytest.fixture
def caller() -> Iterator[Caller]:
    with made_plane() as plane:
        plane.start(Direct(plane.operations, plane.workers.transport))
        yield Caller(plane)


def rename(caller: Caller, old: bytes, new: bytes, *, flags: int = 0, parent: int = ROOT) -> None:
    body = kernel.NUMBER_AND_FLAGS.pack(parent, flags, 0) + old + b"\0" + new + b"\0"
    caller.ask(Opcode.RENAME2, parent, body)


def save_by_rename(caller: Caller, old: bytes = b"new", new: bytes = b"final") -> int:
    inode = caller.saved(old, b"content")
    rename(caller, old, new)
    return inode


def look(caller: Caller, name: bytes = b"new", parent: int = ROOT) -> tuple[int, bool]:
    """The inode, and whether a call was needed."""
    before = caller.upcalls
    answer = caller.ask(Opcode.LOOKUP, parent, name + b"\0")
    (inode,) = struct.unpack_from("=Q", answer)
    assert inode or answer == ABSENT
    return int(inode), caller.upcalls > before


def test_what_a_rename_took_away_is_absent_without_a_call(caller: Caller) -> None:
    assert look(caller) == (0, True)
    inode = save_by_rename(caller)
    for _ in range(3):
        assert look(caller) == (0, False)
    assert look(caller, b"final") == (inode, True)
    assert look(caller, b"ne") == (0, True)
    assert look(caller, b"newer") == (0, True)
    assert save_by_rename(caller) == look(caller, b"final")[0] != inode
    assert look(caller) == (0, False)


def by_exchange(caller: Caller, store: Store) -> int:
    inode = caller.saved(b"other", b"x")
    store.make_directory(ROOT, b"new", 0o755, 0, 0)
    rename(caller, b"other", b"new", flags=RENAME_EXCHANGE)
    return inode


def by_rename(caller: Caller, _store: Store) -> int:
    return save_by_rename(caller, b"other", b"new")


WAYS: dict[str, Callable[[Caller, Store], int]] = {
    "create": lambda caller, _: caller.create(b"new")[0],
    "directory": lambda _, store: store.make_directory(ROOT, b"new", 0o755, 0, 0).ino,
    "node": lambda _, store: store.make_node(ROOT, b"new", 0o10644, 0, 0, 0).ino,
    "symlink": lambda _, store: store.make_symlink(ROOT, b"new", b"target", 0, 0).ino,
    "link": lambda _, store: store.link(store.lookup(ROOT, b"final").ino, ROOT, b"new").ino,
    "rename": by_rename,
    "exchange": by_exchange,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_name_that_is_made_again_is_found(caller: Caller, way: str) -> None:
    save_by_rename(caller)
    assert look(caller) == (0, False)
    inode = WAYS[way](caller, caller.plane.store)
    assert look(caller) == (inode, True)


def test_names_that_change_places_are_there(caller: Caller) -> None:
    first, second = caller.saved(b"first", b"1"), caller.saved(b"second", b"2")
    rename(caller, b"first", b"second", flags=RENAME_EXCHANGE)
    assert look(caller, b"first") == (second, True)
    assert look(caller, b"second") == (first, True)


def test_the_same_name_elsewhere_is_another_one(caller: Caller) -> None:
    inner = caller.plane.store.make_directory(ROOT, b"inner", 0o755, 0, 0).ino
    save_by_rename(caller)
    assert look(caller, parent=inner) == (0, True)
    there = caller.plane.store.make_directory(inner, b"new", 0o755, 0, 0).ino
    assert look(caller, parent=inner) == (there, True)
    assert look(caller) == (0, False)


def test_those_that_were_renamed_last_are_known(caller: Caller) -> None:
    names = [b"new-%d" % number for number in range(2 * ABSENT_NAMES_MAX)]
    for name in names:
        save_by_rename(caller, name, b"final")
    assert [look(caller, name) for name in names] == [
        (0, number < ABSENT_NAMES_MAX) for number in range(len(names))
    ]
    again = caller.saved(names[0], b"x")
    assert look(caller, names[0]) == (again, True)
    assert look(caller, names[-1]) == (0, False)


def test_while_a_unit_is_open_each_name_is_asked_for(caller: Caller) -> None:
    store = caller.plane.store
    store.units.user = lambda: None
    rules = (policy_rule((b"checkpoint-*",), (MARKER,), None),)
    store.units.set_policy(store.namespace.get(ROOT), rules)
    save_by_rename(caller)
    assert look(caller) == (0, False)
    unit = store.make_directory(ROOT, b"checkpoint-1", 0o755, 0, 0).ino
    assert store.units.has_open
    assert look(caller) == (0, True)
    save_by_rename(caller)
    assert look(caller) == (0, True)
    save(store, unit, shards(1))
    store.units.settle()
    assert not store.units.has_open
    assert look(caller) == (0, True)
    save_by_rename(caller)
    assert look(caller) == (0, False)


def test_while_a_directory_that_went_back_is_told_of_each_name_is_asked_for(
    caller: Caller,
) -> None:
    requests = caller.plane.operations
    requests.returned.gone({ROOT + 1_000_000})
    save_by_rename(caller)
    assert look(caller) == (0, True)


def test_while_a_visitor_is_there_each_name_is_asked_for(caller: Caller) -> None:
    requests = caller.plane.operations
    store = requests.store
    caller.saved(b"new", b"x")
    requests.visitor = 1
    with requests.lock:
        requests.caller = 0
        requests.move(ROOT, b"new", ROOT, b"final", 0)
    requests.visitor = None
    assert look(caller) == (0, True)
    assert store.lookup(ROOT, b"final").size == 1
