"""Pins: what keeps them, who may make them, and what is left of one that was not finished."""

from __future__ import annotations

import random

import pytest

from cxlfs.errors import (
    ExistsError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    NotPermittedError,
    StaleError,
    TooManyPinsError,
)
from cxlfs.store import Store, pins
from cxlfs.store.namespace import FileKind
from cxlfs.store.pins import Made, PinState
from tests.support.shop import Shop, close, create, fill
from tests.support.stores import read_file, write_file

USER = 4000


def pin(store: Store, name: bytes, path: bytes, *, uid: int = 0, commit: int | None = None) -> Made:
    """Make a pin to its end."""
    at = store.volume.last_lsn if commit is None else commit
    *_, made = store.pins.make(uid, name, path, store.state_at(at))
    return made


def contents(store: Store, name: bytes, uid: int = 0) -> dict[bytes, bytes]:
    """What a pin holds, by path."""
    found = store.pins.find(uid, name)
    assert found is not None
    state, files = PinState(store.volume), {}
    pending = [(b"", found.directory.ino)]
    while pending:
        path, directory = pending.pop()
        for each, ino in state.names(directory).items():
            fact = state.fact(ino)
            assert fact is not None
            below = path + b"/" + each
            if fact.kind is FileKind.DIRECTORY:
                pending.append((below, ino))
            elif fact.content is None:
                files[below] = b"-> " + fact.source.target
            else:
                files[below] = bytes(fact.content.read(0, 1 << 20))
    return files


def sweep(store: Store) -> None:
    while store.pins.step():
        pass


def nothing_left(store: Store) -> bool:
    """What the place has beside pins."""
    place = store.namespace.find(1, b".cxlfs")
    assert place is not None
    left = store.namespace.find(place.ino, pins.UNFINISHED)
    return left is None or not left.entries


def test_a_pin_outlives_everything(shop: Shop, store: Store, rng: random.Random) -> None:
    """Overwrites, removal, a full store, the cleaner, rollovers, a crash and an unmount."""
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    below = store.make_directory(top, b"step-5", 0o700, 0, 0).ino
    data = {b"/run/step-5/a": rng.randbytes(60_000), b"/run/step-5/b": b"b"}
    for path, content in data.items():
        write_file(store, below, path.rpartition(b"/")[2], content)
    store.make_symlink(below, b"link", b"a", 0, 0)
    expected = data | {b"/run/step-5/link": b"-> a"}
    used = store.statfs().free_bytes
    made = pin(store, b"best", b"/run/step-5")
    assert (made.count, made.size_bytes, made.missing, made.left_out) == (4, 60_001, 0, 0)
    assert store.statfs().free_bytes >= used - store.superblock.segment_size_bytes
    write_file(store, below, b"a", b"overwritten")
    for name in (b"a", b"b", b"link"):
        store.unlink(below, name)
    store.remove_directory(top, b"step-5")
    fill(store)
    assert contents(store, b"best") == expected
    store.unlink(1, b"filler")
    for _ in range(3):
        fill(store)
        store.unlink(1, b"filler")
        store.volume.rollover()
        while store.maintain(0.0):
            pass
    for clean in (False, True):
        store = shop.reopen(store, clean=clean)
        assert contents(store, b"best") == expected
    store.pins.remove(0, b"best")
    sweep(store)
    assert store.pins.of_user(0) == []
    assert nothing_left(store)
    assert not [row for row in store.past if row.name == b"b" and row.parent != below]


def test_pinned_data_counts_as_used(store: Store) -> None:
    write_file(store, 1, b"a", bytes(400_000))
    pin(store, b"best", b"/a")
    before = store.statfs().free_bytes
    store.unlink(1, b"a")
    assert store.statfs().free_bytes - before < 200_000
    store.pins.remove(0, b"best")
    sweep(store)
    assert store.statfs().free_bytes - before > 300_000


def test_an_earlier_commit_is_pinned(store: Store) -> None:
    write_file(store, 1, b"a", b"one")
    commit = store.volume.last_lsn
    write_file(store, 1, b"a", b"two")
    pin(store, b"before", b"/a", commit=commit)
    pin(store, b"after", b"/a")
    assert contents(store, b"before") == {b"/a": b"one"}
    assert contents(store, b"after") == {b"/a": b"two"}
    (before,) = [each for each in store.pins.of_user(0) if each.name == b"before"]
    assert (before.path, before.commit, before.count) == (b"/a", commit, 1)


def test_the_whole_mount_is_pinned_without_the_pins(store: Store) -> None:
    write_file(store, 1, b"a", b"one")
    pin(store, b"first", b"/")
    pin(store, b"second", b"")
    assert contents(store, b"second") == {b"/a": b"one"}


def test_users_meet_no_pin_of_another_one(store: Store) -> None:
    store.set_attributes(write_file(store, 1, b"mine", b"x"), uid=USER)
    store.set_attributes(write_file(store, 1, b"theirs", b"y"), uid=USER + 1)
    pin(store, b"best", b"/mine", uid=USER)
    pin(store, b"best", b"/theirs", uid=USER + 1)
    with pytest.raises(NotPermittedError):
        pin(store, b"other", b"/theirs", uid=USER)
    with pytest.raises(NotFoundError):
        store.pins.remove(USER + 2, b"best")
    assert contents(store, b"best", USER) == {b"/mine": b"x"}
    assert store.pins.users() == [USER, USER + 1]
    sweep(store)
    assert nothing_left(store)


def test_what_is_anothers_is_left_out(store: Store) -> None:
    top = store.make_directory(1, b"run", 0o777, USER, 0).ino
    store.set_attributes(write_file(store, top, b"mine", b"x"), uid=USER)
    write_file(store, top, b"roots", b"y")
    made = pin(store, b"best", b"/run", uid=USER)
    assert (made.count, made.left_out) == (2, 1)
    assert contents(store, b"best", USER) == {b"/run/mine": b"x"}
    assert pin(store, b"all", b"/run").left_out == 0


@pytest.mark.parametrize(
    "name",
    [
        *(b"", b".", b"..", b"a/b", b"-a", b"7", b"2026-01-01", b"a b", b"a\n", b"\xff"),
        *(b"now", b"a@0", b"a" * 65, b"\xc3\xa4", b"a\0", b"a\x1b[2J"),
    ],
)
def test_hostile_names_are_refused(store: Store, name: bytes) -> None:
    write_file(store, 1, b"a", b"x")
    with pytest.raises(InvalidArgumentError):
        pin(store, name, b"/a")


def test_one_name_is_one_pin(store: Store) -> None:
    write_file(store, 1, b"a", b"x")
    pin(store, b"best", b"/a")
    with pytest.raises(ExistsError):
        pin(store, b"best", b"/a")
    with pytest.raises(NotFoundError):
        pin(store, b"other", b"/b")


def test_limits_are_those_of_each_user(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins, "PINS_MAX", 2)
    monkeypatch.setattr(pins, "NAMES_MAX", 3)
    for uid in (USER, USER + 1):
        store.set_attributes(write_file(store, 1, b"%d" % uid, b"x"), uid=uid)
        pin(store, b"a", b"/%d" % uid, uid=uid)
        pin(store, b"b", b"/%d" % uid, uid=uid)
        with pytest.raises(TooManyPinsError):
            pin(store, b"c", b"/%d" % uid, uid=uid)
        store.pins.remove(uid, b"b")
        top = store.make_directory(1, b"d%d" % uid, 0o755, uid, 0).ino
        for name in (b"x", b"y"):
            store.set_attributes(write_file(store, top, name, b"x"), uid=uid)
        with pytest.raises(TooManyPinsError):
            pin(store, b"c", b"/d%d" % uid, uid=uid)
        assert [each.name for each in store.pins.of_user(uid)] == [b"a"]
    for name in (b"a", b"b", b"c"):
        pin(store, name, b"/")
    sweep(store)
    assert nothing_left(store)


def test_nobody_reaches_the_place_by_name(store: Store) -> None:
    write_file(store, 1, b"a", b"x")
    pin(store, b"best", b"/a")
    place = store.lookup(1, b".cxlfs").ino
    found = store.pins.find(0, b"best")
    assert found is not None
    for parent, name in ((1, b".cxlfs"), (place, b"0"), (found.directory.ino, b"a")):
        for verb in (
            lambda p=parent, n=name: store.unlink(p, n),
            lambda p=parent, n=name: store.remove_directory(p, n),
            lambda p=parent, n=name: store.rename(p, n, 1, b"new"),
            lambda p=parent, n=name: store.rename(1, b"a", p, n),
            lambda p=parent, n=name: store.rename(1, b"a", p, n, exchange=True),
            lambda p=parent, n=name: store.make_directory(p, n + b"x" * (p != 1), 0o755, 0, 0),
            lambda p=parent, n=name: store.link(store.lookup(1, b"a").ino, p, n + b"x" * (p != 1)),
        ):
            with pytest.raises((NotPermittedError, ExistsError)):
                verb()
    handle = store.open_directory(1)
    assert [entry.name for entry in store.read_directory(handle, 0)] == [b"a"]
    store.release_directory(handle)
    assert [entry.path for entry in store.list_checkpoints()] == [b"/a"]
    with pytest.raises(NotFoundError):
        list(store.list_checkpoints(b"/.cxlfs"))


def test_a_name_that_a_user_had_becomes_another_one(shop: Shop, store: Store) -> None:
    """As a store of an earlier program may have it."""
    store.names.check_place = lambda _parent, _name: None
    directory = store.make_directory(1, b".cxlfs", 0o755, USER, 0).ino
    write_file(store, directory, b"a", b"x")
    store = shop.reopen(store)
    assert store.lookup(1, b".cxlfs.user").ino == directory
    pin(store, b"best", b"/.cxlfs.user")
    store = shop.reopen(store)
    assert contents(store, b"best") == {b"/.cxlfs.user/a": b"x"}


def test_a_pin_that_is_not_finished_is_none(shop: Shop, store: Store) -> None:
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    for number in range(3 * pins._AT_ONCE):
        write_file(store, top, b"%d" % number, b"x" * 3000)
    making = store.pins.make(0, b"best", b"/run", store.state_at(store.volume.last_lsn))
    next(making)
    assert store.pins.of_user(0) == []
    sweep(store)
    assert not nothing_left(store)
    making.close()
    store = shop.reopen(store)
    assert store.pins.of_user(0) == []
    sweep(store)
    assert nothing_left(store)


def test_two_pins_of_one_name_at_once(store: Store) -> None:
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    for number in range(2 * pins._AT_ONCE):
        write_file(store, top, b"%d" % number, b"x")
    state = store.state_at(store.volume.last_lsn)
    first = store.pins.make(0, b"best", b"/run", state)
    second = store.pins.make(0, b"best", b"/run", state)
    next(first), next(second)
    list(first)
    with pytest.raises(ExistsError):
        list(second)
    sweep(store)
    assert nothing_left(store)
    assert len(contents(store, b"best")) == 2 * pins._AT_ONCE


def test_what_changes_meanwhile_is_pinned_as_it_was(store: Store) -> None:
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    names = [b"%02d" % number for number in range(2 * pins._AT_ONCE)]
    for name in names:
        write_file(store, top, name, b"old")
    making = store.pins.make(0, b"best", b"/run", store.state_at(store.volume.last_lsn))
    next(making)
    for name in names:
        write_file(store, top, name, b"new")
    store.unlink(top, names[-1])
    *_, made = making
    assert made.missing == 0
    assert contents(store, b"best") == {b"/run/" + name: b"old" for name in names}


def test_a_full_store_has_no_half_of_a_pin(store: Store) -> None:
    """Taking one away works there."""
    write_file(store, 1, b"a", b"x" * 3000)
    pin(store, b"kept", b"/a")
    fill(store)
    store.names._reclaim = lambda _bytes: False
    store.volume.metadata_room = lambda: False  # type: ignore[method-assign]
    with pytest.raises(NoSpaceError):
        pin(store, b"best", b"/a")
    sweep(store)
    assert nothing_left(store)
    assert [each.name for each in store.pins.of_user(0)] == [b"kept"]
    store.pins.remove(0, b"kept")
    sweep(store)
    assert store.pins.of_user(0) == []


def test_an_open_file_is_pinned_as_it_was_committed(store: Store) -> None:
    write_file(store, 1, b"a", b"committed")
    _, handle = create(store, b"b", b"never closed")
    again = store.open_file(store.lookup(1, b"a").ino, 2)
    store.write(again, 0, b"CHANGED")
    pin(store, b"best", b"/")
    assert contents(store, b"best") == {b"/a": b"committed"}
    for each in (handle, again):
        store.flush(each, writer_killed=False)
        store.release(each)
    assert contents(store, b"best") == {b"/a": b"committed"}


def test_what_history_lost_is_counted(store: Store) -> None:
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    write_file(store, top, b"a", b"one")
    write_file(store, top, b"b", b"one")
    commit = store.volume.last_lsn
    write_file(store, top, b"a", b"two")
    for row in list(store.past):
        store.past.forget(row)
    made = pin(store, b"best", b"/run", commit=commit)
    assert made.missing == 1
    assert contents(store, b"best") == {b"/run/b": b"one"}
    with pytest.raises((NotFoundError, StaleError)):
        pin(store, b"other", b"/run/a", commit=commit)


def test_pins_that_hold_a_path_are_found(store: Store) -> None:
    top = store.make_directory(1, b"run", 0o755, 0, 0).ino
    ino = write_file(store, top, b"secret", b"x")
    write_file(store, 1, b"else", b"y")
    pin(store, b"one", b"/run")
    pin(store, b"two", b"/else")
    pin(store, b"three", b"/run/secret")
    births = {store.get_attributes(ino).birth_ns}
    named = lambda found: [each.name for each in found]  # noqa: E731
    assert named(store.pins.holding([b"/run/secret"], set())) == [b"one", b"three"]
    assert named(store.pins.holding([], births)) == [b"one", b"three"]
    assert named(store.pins.holding([b"/run"], set())) == [b"one", b"three"]
    assert named(store.pins.holding([b"/else"], set())) == [b"two"]


def test_a_file_that_goes_on_is_pinned_as_it_was_committed(store: Store) -> None:
    """Its last extent is open: by its own lease, and by that of what is being written."""
    _, handle = create(store, b"a", b"x" * 5000)
    store.fsync(handle)
    pin(store, b"first", b"/a")
    store.write(handle, 5000, b"y" * 5000)
    pin(store, b"second", b"/a")
    store.fsync(handle)
    store.write(handle, 10_000, b"z" * 5000)
    pin(store, b"third", b"/a")
    close(store, handle)
    for name, size in ((b"first", 5000), (b"second", 5000), (b"third", 10_000)):
        assert contents(store, name) == {b"/a": (b"x" * 5000 + b"y" * 5000)[:size]}
    found = store.lookup(1, b"a").ino
    assert read_file(store, found) == b"x" * 5000 + b"y" * 5000 + b"z" * 5000


def test_history_is_restored_while_the_file_goes_on(store: Store) -> None:
    """The row shares its last extent with what is being written."""
    _, handle = create(store, b"a", b"x" * 5000)
    store.fsync(handle)
    store.write(handle, 100, b"changed")
    store.fsync(handle)
    store.write(handle, 5000, b"y" * 5000)
    row = list(store.past)[-1]
    store.history.restore(row, 1, b"b")
    assert read_file(store, store.lookup(1, b"b").ino) == b"x" * 5000
    close(store, handle)
