"""The ends of what the format can hold: clamped, or refused alone and before anything is stored."""

from __future__ import annotations

import os
import time

import pytest

from cxlfs.errors import InvalidArgumentError, NoSpaceError
from cxlfs.format import layout
from cxlfs.store import Store
from tests.support.shop import Shop, close, create
from tests.support.stores import read_file, write_file

S = 1_000_000_000
YEAR_2300_NS = 10_413_792_000 * S


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("which", ["atime_ns", "mtime_ns", "ctime_ns"])
@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (YEAR_2300_NS, layout.TIME_NS_MAX),
        (layout.TIME_NS_MAX, layout.TIME_NS_MAX),
        (layout.TIME_NS_MAX + 1, layout.TIME_NS_MAX),
        (((1 << 63) - 1) * S, layout.TIME_NS_MAX),
        (-1, -1),
        (layout.TIME_NS_MIN, layout.TIME_NS_MIN),
        (-(1 << 63) * S, layout.TIME_NS_MIN),
    ],
)
def test_times_are_clamped(
    shop: Shop, store: Store, committed: bool, which: str, given: int, kept: int
) -> None:
    ino, handle = create(store, b"f", b"data")
    if committed:
        close(store, handle)
    assert getattr(store.set_attributes(ino, **{which: given}), which) == kept
    if not committed:
        close(store, handle)
    store = shop.reopen(store)
    assert store.read_only_reason is None
    assert getattr(store.get_attributes(ino), which) == kept
    assert read_file(store, ino) == b"data"


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("field", ["uid", "gid"])
def test_attributes_that_do_not_fit_are_refused(
    shop: Shop, store: Store, committed: bool, field: str
) -> None:
    """Alone: the store goes on, and the file is what it was."""
    ino, handle = create(store, b"f", b"data")
    if committed:
        close(store, handle)
    before, commits = store.get_attributes(ino), store.volume.counters.commits
    for value in (1 << 32, -1):
        with pytest.raises(InvalidArgumentError):
            store.set_attributes(ino, **{field: value})  # type: ignore[arg-type]
    assert store.get_attributes(ino) == before
    assert store.volume.counters.commits == commits
    assert not store.read_only
    store.set_attributes(ino, **{field: (1 << 32) - 1})  # type: ignore[arg-type]
    if not committed:
        close(store, handle)
    store = shop.reopen(store)
    assert getattr(store.get_attributes(ino), field) == (1 << 32) - 1


@pytest.mark.parametrize("owner", [(1 << 32, 0), (0, 1 << 32), (-1, 0)])
def test_new_inodes_that_do_not_fit_are_refused(store: Store, owner: tuple[int, int]) -> None:
    before = store.volume.counters.commits, set(store.namespace.inodes), store.statistics().files
    with pytest.raises(InvalidArgumentError):
        store.create(1, b"f", 0o644, *owner, os.O_RDWR)
    with pytest.raises(InvalidArgumentError):
        store.make_directory(1, b"d", 0o755, *owner)
    with pytest.raises(InvalidArgumentError):
        store.make_symlink(1, b"l", b"to", *owner)
    with pytest.raises(InvalidArgumentError):
        store.make_node(1, b"n", 0o020644, 1 << 32, 0, 0)
    assert store.namespace.get(1).entries == {}
    found = store.volume.counters.commits, set(store.namespace.inodes), store.statistics().files
    assert found == before
    assert not store.read_only
    store.make_node(1, b"n", 0o020644, (1 << 32) - 1, 0, 0)
    write_file(store, 1, b"f", b"data")


def test_times_follow_a_clock_that_is_set_back(
    shop: Shop, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead, then right again: what is made afterwards has the right time."""
    now = time.time_ns()
    clock = now + 3600 * S
    monkeypatch.setattr(time, "time_ns", lambda: clock)
    ino = write_file(store, 1, b"early", b"data")
    assert store.get_attributes(ino).mtime_ns >= clock
    clock = now
    directory = store.make_directory(1, b"d", 0o755, 0, 0)
    late = write_file(store, directory.ino, b"late", b"data")
    store.rename(1, b"early", directory.ino, b"early")
    times = [store.get_attributes(i) for i in (1, directory.ino, late, ino)]
    for found in times:
        assert now <= found.ctime_ns < now + S
    assert {now <= found.mtime_ns < now + S for found in times[:3]} == {True}
    assert times[3].mtime_ns >= now + 3600 * S, "the content is from then"
    assert now <= store.statistics().last_commit_time_ns < now + S
    entry = next(iter(store.list_checkpoints(b"/d/late")))
    assert now <= entry.commit_time_ns < now + S
    store = shop.reopen(store)
    assert now <= store.get_attributes(late).mtime_ns < now + S


def test_small_steps_back_keep_the_order(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a clock that is being adjusted makes them."""
    clock = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: clock)
    times = []
    for number in range(20):
        clock -= S // 100
        times.append(store.make_directory(1, b"%d" % number, 0o755, 0, 0).mtime_ns)
    assert times == sorted(set(times))


def test_names_of_attributes_fit_into_one_list(store: Store) -> None:
    """What listxattr(2) returns is 64 KiB at most: each name with its zero byte."""
    ino = write_file(store, 1, b"f", b"data")

    def listed() -> int:
        return sum(len(name) + 1 for name in store.list_xattrs(ino))

    number = 0
    while listed() + 256 <= layout.XATTR_LIST_BYTES_MAX:
        store.set_xattr(ino, b"user.%04d" % number + b"n" * 241, b"")
        number += 1
    with pytest.raises(NoSpaceError):
        store.set_xattr(ino, b"user." + b"m" * 250, b"")
    rest = layout.XATTR_LIST_BYTES_MAX - listed()
    last = b"user." + b"l" * (rest - 6)
    with pytest.raises(NoSpaceError):
        store.set_xattr(ino, last + b"l", b"")
    store.set_xattr(ino, last, b"value")
    assert listed() == layout.XATTR_LIST_BYTES_MAX
    store.set_xattr(ino, last, b"another value")
    store.remove_xattr(ino, last)
    store.set_xattr(ino, b"user.short", b"")
