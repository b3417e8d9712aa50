"""The n-th allocation, copy, write-back, fence or msync fails, for every n until none does: each
verb succeeds or raises, and what is left is a store whose state is the one that readers saw.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cxlfs.errors import MediaError, OutOfMemoryError, ReadOnlyError
from cxlfs.media import Granularity, Media, MemoryMedia, open_media
from cxlfs.native import FaultKind, fault_count, set_fault
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.shop import open_for_overwrite
from tests.support.stores import (
    Entry,
    clean_round,
    format_small,
    new_store,
    picture,
    read_file,
    write_file,
)

OTHER_KINDS = (FaultKind.MAP, FaultKind.SPLICE, FaultKind.DECAY)
STORE_KINDS = [kind for kind in FaultKind if kind not in OTHER_KINDS]
"""What an open store calls: the others belong to opening a source and to answering a request, or
damage what lies there."""
FAILURES = (OutOfMemoryError, MediaError, ReadOnlyError)
RUNS_MAX = 300


@pytest.fixture(autouse=True)
def _switches_off() -> Iterator[None]:
    yield
    for kind in FaultKind:
        set_fault(kind, 0)


def prepare(granularity: Granularity) -> Store:
    store = new_store(size_bytes=2 << 20, granularity=granularity)
    for name in (b"old", b"killed", b"cut", b"junk"):
        write_file(store, 1, name, name * 3000)
    for number in range(12):
        write_file(store, 1, b"j%d" % number, b"j" * 9000)
    for number in range(0, 12, 2):
        store.unlink(1, b"j%d" % number)
    return store


def attempt(failures: list[str], verb: Callable[[], object]) -> object:
    try:
        return verb()
    except FAILURES as error:
        failures.append(type(error).__name__)
        return None


def work(store: Store) -> list[str]:
    """Some of every verb that writes; what failed."""
    failures: list[str] = []

    def close(handle: int, *, killed: bool = False) -> None:
        attempt(failures, lambda: store.flush(handle, writer_killed=killed))
        attempt(failures, lambda: store.release(handle))

    made = attempt(failures, lambda: store.create(1, b"new", 0o644, 0, 0, os.O_RDWR)[1])
    if isinstance(made, int):
        attempt(failures, lambda: store.write(made, 0, b"n" * 30_000))
        attempt(failures, lambda: store.fsync(made))
        attempt(failures, lambda: store.write(made, 100, b"m" * 9000))
        attempt(failures, lambda: store.write(made, 40_000, b"m" * 9000))
        close(made)
    over = attempt(failures, lambda: open_for_overwrite(store, b"old", b"over" * 5000))
    if isinstance(over, int):
        attempt(failures, lambda: store.commits.commit_old(older_than=1e18))
        attempt(failures, lambda: store.write(over, 50, b"x" * 5000))
        close(over)
    killed = attempt(failures, lambda: open_for_overwrite(store, b"killed", b"half" * 5000))
    if isinstance(killed, int):
        close(killed, killed=True)
    ranges(store, failures)
    ino = store.lookup(1, b"cut").ino
    attempt(failures, lambda: store.set_attributes(ino, size=77))
    attempt(failures, lambda: store.set_xattr(ino, b"user.k", b"v"))
    attempt(failures, lambda: store.rename(1, b"cut", 1, b"renamed"))
    attempt(failures, lambda: store.make_directory(1, b"d", 0o755, 0, 0))
    attempt(failures, lambda: store.unlink(1, b"junk"))
    attempt(failures, lambda: clean_round(store, 0.97))
    attempt(failures, store.volume.rollover)
    return failures


def ranges(store: Store, failures: list[str]) -> None:
    """What is copied is there whole, or not at all."""
    source = attempt(failures, lambda: store.create(1, b"source", 0o644, 0, 0, os.O_RDWR)[1])
    made = attempt(failures, lambda: store.create(1, b"copy", 0o644, 0, 0, os.O_RDWR)[1])
    if isinstance(source, int) and isinstance(made, int):
        attempt(failures, lambda: store.write(source, 0, b"s" * 10_000))
        before = bytes(store.read(made, 0, 1 << 20))
        done = attempt(failures, lambda: store.ranges.copy(source, 0, made, 100, 1 << 40))
        copied = bytes(store.read(source, 0, 1 << 20)) if done is not None else b""
        assert bytes(store.read(made, 0, 1 << 20)) == (bytes(100) + copied if copied else before)
        attempt(failures, lambda: store.allocate(made, 500, 20_000))
        attempt(failures, lambda: store.allocate(made, 50, 999, keep_size=True, punch=True))
        attempt(failures, store.sync)
        attempt(failures, lambda: store.ranges.copy(source, 9, made, 9, 99))
        attempt(failures, lambda: store.allocate(made, 9000, 99_000, zero=True))
    for handle in (source, made):
        if isinstance(handle, int):
            attempt(failures, lambda h=handle: store.flush(h, writer_killed=False))
            attempt(failures, lambda h=handle: store.release(h))


def check(store: Store) -> None:
    """What readers saw is what the next opening shows, unless writing had stopped."""
    settled = not store.read_only and store.files.open_count == 0
    seen = _without_root(store)
    assert read_file(store, store.lookup(1, b"killed").ino) == b"killed" * 3000 or not settled
    store.abandon()
    copy = MemoryMedia(store.media.size_bytes, store.media.granularity)
    copy.unguarded_memory()[:] = store.media.unguarded_memory()
    if settled:
        assert list(run_passes(copy, structure_only=False)) == []
    again = Store.open(copy)
    assert again.read_only_reason is None
    if settled:
        assert _without_root(again) == seen
    assert read_file(again, again.lookup(1, b"killed").ino) == b"killed" * 3000
    assert read_file(again, again.lookup(1, b"old").ino)[:3] in (b"old", b"ove")
    write_file(again, 1, b"fine", b"fine")
    again.close()
    assert list(run_passes(copy, structure_only=False)) == []
    copy.close()


def _without_root(store: Store) -> dict[bytes, Entry]:
    found = picture(store)
    del found[b"/"]
    return found


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_nth_failure(kind: FaultKind, granularity: Granularity) -> None:
    failed = 0
    for nth in range(1, RUNS_MAX):
        store = prepare(granularity)
        set_fault(kind, nth)
        failures = work(store)
        set_fault(kind, 0)
        check(store)
        store.media.close()
        failed += bool(failures)
        if not failures and nth > 3:
            break
    else:
        pytest.fail("a fault that never ends")
    print(f"{failed} runs failed")
    assert failed > 3 or (kind is FaultKind.MSYNC and granularity is Granularity.LINE)


def crashed_image(granularity: Granularity) -> tuple[bytes, dict[bytes, Entry]]:
    """A store dropped with records in its journal, and what opening it shows."""
    store = prepare(granularity)
    work(store)
    store.abandon()
    media = store.media
    image = bytes(media.unguarded_memory())
    again = Store.open(media)
    seen = picture(again)
    again.abandon()
    media.close()
    return image, seen


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_nth_failure_while_opening(kind: FaultKind, granularity: Granularity) -> None:
    """Recovery fails or is refused; the next one shows what there was, whatever the first left.

    Without memory the notes of who refers to an extent are lost: then all of it is there as well.
    """
    image, expected = crashed_image(granularity)
    failed = 0
    for nth in range(1, RUNS_MAX):
        media = MemoryMedia(len(image), granularity)
        media.unguarded_memory()[:] = image
        set_fault(kind, nth)
        store = _open(media)
        reached = fault_count(kind) >= nth
        set_fault(kind, 0)
        hit = store is None or store.read_only
        lost_notes = kind is FaultKind.ALLOCATE and not hit
        assert hit or lost_notes or not reached, f"failure {nth} went unnoticed"
        if store is not None:
            assert hit or picture(store) == expected
            store.abandon()
        media = _copy_of(media)  # a mapping whose msync failed once never writes again
        again = Store.open(media)
        assert again.read_only_reason is None
        assert picture(again) == expected
        write_file(again, 1, b"fine", b"fine")
        again.close()
        assert list(run_passes(media, structure_only=False)) == []
        media.close()
        failed += hit
        if not reached:
            break
    else:
        pytest.fail("a fault that never ends")
    print(f"{failed} openings failed")
    assert failed or (kind is FaultKind.MSYNC and granularity is Granularity.LINE)


def _copy_of(media: MemoryMedia) -> MemoryMedia:
    copy = MemoryMedia(media.size_bytes, media.granularity)
    copy.unguarded_memory()[:] = media.unguarded_memory()
    media.close()
    return copy


def _open(media: MemoryMedia) -> Store | None:
    try:
        return Store.open(media)
    except FAILURES:
        return None


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE], ids=lambda g: g.name)
@pytest.mark.parametrize("kind", STORE_KINDS)
def test_nth_failure_of_mkfs(kind: FaultKind, granularity: Granularity) -> None:
    """Mkfs says so; tried again it makes a store."""
    for nth in range(1, RUNS_MAX):
        media = MemoryMedia(2 << 20, granularity)
        set_fault(kind, nth)
        failures: list[str] = []
        attempt(failures, lambda media=media: format_small(media))
        reached = fault_count(kind) >= nth
        set_fault(kind, 0)
        assert bool(failures) == reached
        media = _copy_of(media)
        if failures:
            format_small(media)
        Store.open(media).close()
        assert list(run_passes(media, structure_only=False)) == []
        media.close()
        if not reached:
            return
    pytest.fail("a fault that never ends")


def test_nth_failure_of_mapping(tmp_path: Path) -> None:
    """A source that cannot be mapped is left as it was, and is not held."""
    path = tmp_path / "store"
    with contextlib.closing(open_media(path, create_size_bytes=48 << 20)) as media:
        Store.format(media)
        store = Store.open(media)
        write_file(store, 1, b"file", b"content")
        store.close()
    before = path.read_bytes()
    for nth in range(1, RUNS_MAX):
        set_fault(FaultKind.MAP, nth)
        failures: list[str] = []
        opened = attempt(failures, lambda: open_media(path))
        reached = fault_count(FaultKind.MAP) >= nth
        set_fault(FaultKind.MAP, 0)
        assert bool(failures) == reached
        if isinstance(opened, Media):
            opened.close()
        assert path.read_bytes() == before
        if not reached:
            assert nth > 1
            return
    pytest.fail("a fault that never ends")
