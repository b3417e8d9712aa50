"""What changes between two steps of the copy of what a unit held before is in it as it is then."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable

import pytest

from cxlfs.errors import NamespaceError
from cxlfs.store import Store, unit_copying, unit_large
from cxlfs.store.health import HIDDEN_PREFIX
from cxlfs.store.namespace import Inode
from cxlfs.store.unit_batches import Batch
from cxlfs.store.unit_rules import UnitsMode
from tests.support.shop import Shop, close
from tests.support.stores import clean_round, write_file
from tests.support.unit_scenes import (
    find,
    finish_work,
    make,
    remove_tree,
    set_aside,
)
from tests.support.unit_steps import (
    SHARD,
    Between,
    end_all,
    finish,
    in_steps,
    whole,
)


def described(store: Store, top: Inode) -> tuple[dict[bytes, object], dict[bytes, int]]:
    """All that is committed of a directory and below it, but for inode numbers and times of
    directories; and by which record each file was published.
    """
    found: dict[bytes, object] = {}
    links: dict[int, bytes] = {}
    commits: dict[bytes, int] = {}

    def look(path: bytes, inode: Inode) -> None:
        xattrs = {k: v for k, v in (inode.xattrs or {}).items() if not k.startswith(HIDDEN_PREFIX)}
        same = links.setdefault(inode.ino, path)
        own = (inode.mode, inode.uid, inode.gid, inode.rdev, inode.flags, inode.target)
        content = inode.committed_content if inode.live is not None else None
        if inode.entries is not None:
            found[path] = (own, xattrs)
        else:
            times = (inode.atime_ns, inode.committed_mtime_ns, inode.committed_ctime_ns)
            data = b"" if content is None else bytes(content.read(0, content.size))
            found[path] = (own, xattrs, same, times, data)
        if content is not None:
            commits[same] = inode.commit_lsn
        for name, ino in sorted((inode.entries or {}).items()):
            child = store.namespace.get(ino)
            if not child.uncommitted:
                look(path + b"/" + name, child)

    look(b"", top)
    return found, commits


def begin(store: Store, directory: int, between: Between, *, ordered: bool) -> int:
    """A unit begins with a change of one file, which is not made yet: its copy is what is there,
    with files in the same order. Returns how many steps came before the last one.
    """
    ino, step = store.lookup(directory, SHARD).ino, 0
    while store.versions.prepare_change(ino, emptied=True):
        step += 1
        between(step)
    (unit,) = store.units.open_units()
    assert unit.before is not None
    assert unit.inode.ino == directory
    copy, source = described(store, unit.before), described(store, unit.inode)
    assert copy[0] == source[0]
    if ordered:
        copied = [copy[1][path] for path in sorted(source[1], key=source[1].__getitem__)]
        assert copied == sorted(copied), "the order of the commits is another one"
    return step


# --- what changes between two steps -------------------------------------------------------------


def held_open(store: Store, directory: int) -> dict[str, int]:
    """Files whose writing began before the unit: overwritten, changed in place, new."""
    over = store.open_file(store.lookup(directory, b"file-1").ino, os.O_RDWR | os.O_TRUNC)
    store.write(over, 0, b"overwritten" * 300)
    place = store.open_file(store.lookup(directory, b"file-3").ino, os.O_RDWR)
    store.write(place, 100, b"in place")
    new = store.create(directory, b"new", 0o600, 3, 4, os.O_RDWR)[1]
    store.write(new, 0, b"new" * 500)
    return {"over": over, "place": place, "new": new}


def _rename_away(store: Store, directory: int, _handles: dict[str, int]) -> None:
    if store.namespace.find(directory, b"file-0") is not None:
        store.rename(directory, b"file-0", directory, b"other-name")


def _move_out(store: Store, directory: int, _handles: dict[str, int]) -> None:
    store.rename(directory, b"file-4", 1, b"outside")


def _replace(store: Store, directory: int, _handles: dict[str, int]) -> None:
    store.rename(directory, b"file-4", directory, b"file-0")


def _exchange(store: Store, directory: int, _handles: dict[str, int]) -> None:
    store.rename(directory, b"file-4", directory, b"file-0", exchange=True)


def _make_below(store: Store, directory: int, _handles: dict[str, int]) -> None:
    inner = make(store, b"inner", make(store, b"made", directory))
    write_file(store, inner, b"deepest", b"z" * 3000)


def _remove_below(store: Store, directory: int, _handles: dict[str, int]) -> None:
    if store.namespace.find(directory, b"below") is not None:
        remove_tree(store, directory, b"below")


def _rewrite_twice(store: Store, directory: int, _handles: dict[str, int]) -> None:
    for name in (b"file-2", b"file-4", b"file-2"):
        write_file(store, directory, name, b"again " + name)


def _attributes(store: Store, directory: int, _handles: dict[str, int]) -> None:
    ino = store.lookup(directory, b"file-2").ino
    store.set_attributes(ino, mode=0o640, uid=77, gid=78, atime_ns=5, mtime_ns=6)
    store.remove_xattr(ino, b"user.step")
    store.set_xattr(ino, b"user.other", b"x")
    store.set_attributes(directory, mode=0o711)
    store.set_xattr(directory, b"user.top", b"y")
    store.set_attributes(store.lookup(directory, b"best").ino, uid=9, gid=9)
    store.set_attributes(store.lookup(directory, b"empty").ino, mode=0o700)


CHANGES: dict[str, Callable[[Store, int, dict[str, int]], object]] = {
    "an overwrite is closed": lambda store, _, h: store.flush(h["over"], writer_killed=False),
    "a change in place is synced": lambda store, _, h: store.fsync(h["place"]),
    "a new file is closed": lambda store, _, h: store.flush(h["new"], writer_killed=False),
    "all is synced": lambda store, _d, _h: store.sync(),
    "an overwrite is killed": lambda store, _, h: close(store, h["over"], killed=True),
    "attributes": _attributes,
    "unlink": lambda store, d, _: store.unlink(d, b"file-0"),
    "unlink of one name": lambda store, d, _: store.unlink(d, b"same"),
    "link": lambda store, d, _: store.link(store.lookup(d, b"file-4").ino, d, b"linked"),
    "rename": _rename_away,
    "rename out": _move_out,
    "rename over": _replace,
    "exchange": _exchange,
    "rewritten": _rewrite_twice,
    "mkdir": _make_below,
    "rmdir": lambda store, d, _: store.remove_directory(d, b"empty"),
    "rmtree": _remove_below,
    "moved directory": lambda store, d, _: store.rename(d, b"below", d, b"moved"),
    "symlink": lambda store, d, _: store.make_symlink(d, b"more", b"target", 1, 1),
    "rollover": lambda store, _d, _h: store.volume.rollover(),
    "cleaning": lambda store, _d, _h: clean_round(store, 1.0),
}


OF_CONTENT = set(CHANGES) - {"mkdir", "rmdir", "rmtree", "moved directory", "symlink", "rename out"}
PIECES, PART = 90, 30


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (unit_large, unit_copying):
        monkeypatch.setattr(module, "REFS_AT_ONCE", PART)
    monkeypatch.setattr(Batch, "is_large", lambda _, ref_count: ref_count > PART)


MOVES = frozenset({"rename", "rename over", "exchange"})
"""What they move before it is copied comes behind the rest."""


def scatter(store: Store, directory: int, name: bytes) -> None:
    """Give a file the content of many references, and go on with it."""
    pieces = random.Random(1).randbytes(128 * PIECES)
    source = store.namespace.get(write_file(store, 1, b"pieces of " + name, pieces)).content
    handle = store.open_file(store.lookup(directory, name).ino, os.O_RDWR)
    store.write(handle, 0, b"x")
    content = store.files.content_of(handle)
    for number in range(PIECES):
        source.share(128 * number, 64, content, 64 * number)
    close(store, handle)
    assert content.ref_count >= PIECES


def change_at(
    shop: Shop, store: Store, at: int, change: str, scattered: tuple[bytes, ...] = ()
) -> bool:
    """That change behind the step ``at``; False: there were fewer."""
    directory = whole(store)
    for name in scattered:
        scatter(store, directory, name)
    handles = held_open(store, directory)
    done: list[int] = []

    def between(step: int) -> None:
        if step == at:
            CHANGES[change](store, directory, handles)
            done.append(step)

    begin(store, directory, between, ordered=change not in MOVES)
    old = described(store, store.namespace.get(directory))
    write_file(store, directory, SHARD, b"new")
    store = shop.reopen(store, units=UnitsMode.AUTO)
    assert described(store, find(store, b"dcp"))[0] == old[0]
    finish_work(store)
    return done == [at]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("short_steps")
@pytest.mark.parametrize("change", CHANGES)
def test_the_copy_is_what_is_there_when_the_unit_begins(shop: Shop, change: str) -> None:
    """Whatever happens between any two steps to files that themselves begin no unit."""
    at = 1
    while change_at(shop, in_steps(shop.new(units=UnitsMode.AUTO)), at, change):
        at += 1
    assert at >= 6


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("change", [*sorted(OF_CONTENT)])
def test_the_copy_of_files_of_many_references(shop: Shop, change: str) -> None:
    """Each goes in parts; between any two of them, too, anything may happen."""
    at, names = 1, (b"file-1", b"file-3", b"file-4")
    while change_at(shop, in_steps(shop.new(4 << 20, units=UnitsMode.AUTO)), at, change, names):
        at += 1
    assert at >= 2 * PIECES // PART


@pytest.mark.usefixtures("small_parts")
def test_a_crash_between_two_parts(shop: Shop) -> None:
    """Behind any step: what was there is there, and nothing is left of the copy."""
    steps = 0
    for number in itertools.count(1):
        store = in_steps(shop.new(4 << 20, units=UnitsMode.AUTO))
        directory = whole(store)
        for name in (b"file-1", b"file-3"):
            scatter(store, directory, name)
        old = described(store, store.namespace.get(directory))[0]
        ino = store.lookup(directory, SHARD).ino
        while steps < number and store.versions.prepare_change(ino, emptied=True):
            steps += 1
        store = shop.reopen(store, units=UnitsMode.AUTO)
        finish_work(store)
        assert described(store, find(store, b"dcp"))[0] == old
        if steps < number:
            break  # and that the unit had begun
        assert set_aside(store) == {}
        steps = 0
    assert number > PIECES // PART


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "seed", [*range(7), *(pytest.param(seed, marks=pytest.mark.campaign) for seed in range(7, 20))]
)
def test_the_copy_after_many_changes_at_random(shop: Shop, seed: int) -> None:
    rng = random.Random(seed)
    store = in_steps(shop.new(16 << 20, units=UnitsMode.AUTO))
    directory = whole(store)
    for number in range(600):
        write_file(store, directory, b"many-%03d" % number, b"%d" % number)
    finish(lambda: write_file(store, directory, b"__1_0.distcp", b"more"))
    finish(lambda: write_file(store, directory, b".metadata", b"more"))
    store.units.settle(closing=True)
    handles = held_open(store, directory)
    names = sorted(set(CHANGES) - {"an overwrite is killed"})

    def between(_step: int) -> None:
        for name in rng.sample(names, 3):
            try:
                CHANGES[name](store, directory, handles)
            except NamespaceError:
                continue  # it was done before

    assert begin(store, directory, between, ordered=False) >= 2
    for handle in handles.values():
        close(store, handle)
    end_all(store)
