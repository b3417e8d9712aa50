"""Files that are filled through shared mappings: when they are published, and lost pages."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.store import Store
from cxlfs.store.overwrite import Evidence
from cxlfs.store.overwrites import REST_SECONDS, TornMode
from cxlfs.store.unit_rules import Ending
from tests.support.shop import Shop, close, create, fill, open_for_overwrite, until_no_space
from tests.support.stores import read_file, write_file

STATE = b"user.cxlfs.state"
OLD = b"old" * 3000
PAGE = 4096
SIZE = 4 * PAGE
NEW = b"n" * SIZE
FULL = NoSpaceError("no room for 4.0 KiB")

Begin = Callable[[Store, int], int]


def close_mapped(store: Store, handle: int) -> None:
    """A descriptor is closed, and a mapping is left."""
    store.flush(handle, writer_killed=False, is_mapped=lambda: True)


def write_back(store: Store, handle: int, *pages: int) -> None:
    for page in pages:
        store.write(handle, page * PAGE, NEW[:PAGE])


def lose(store: Store, handle: int, page: int) -> None:
    """As a failed write-back: the write fails, and the kernel drops its page."""
    store.files.pages_lost(handle, page * PAGE, FULL)


def commit_periodically(store: Store) -> None:
    store.commits.commit_old(older_than=1e18)


def once(store: Store, ino: int) -> int:
    """As np.memmap(path, mode="w+"): one open, the last byte, a mapping, close."""
    handle = store.open_file(ino, os.O_RDWR | os.O_TRUNC)
    store.write(handle, SIZE - 1, b"\0")
    close_mapped(store, handle)
    return handle


def twice(store: Store, ino: int) -> int:
    """As open_memmap(path, mode="w+"): a header, close; then as above without O_TRUNC."""
    header = store.open_file(ino, os.O_RDWR | os.O_TRUNC)
    store.write(header, 0, b"torn")
    close(store, header)
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, SIZE - 1, b"\0")
    close_mapped(store, handle)
    return handle


def in_place(store: Store, ino: int) -> int:
    """As np.memmap(path, mode="r+")."""
    handle = store.open_file(ino, os.O_RDWR)
    close_mapped(store, handle)
    return handle


def judge(store: Store, ending: Ending) -> None:
    """Look at what is torn, as the daemon does, after the writers have ended like this."""
    overwrites = store.overwrites
    overwrites.ending_of = lambda _writer: ending
    now = overwrites.clock() + REST_SECONDS
    overwrites.clock = lambda: now
    while (question := overwrites.next_question()) is not None:
        torn = question.read("new", 0, 4) == b"torn"
        overwrites.judged(question, Evidence.STRONG if torn else Evidence.NONE, "it is cut")
    overwrites.settle()


@pytest.fixture
def ino(store: Store) -> int:
    store.overwrites.mode = TornMode.BACK
    store.overwrites.writer = lambda: "writer"
    store.overwrites.ending_of = lambda _writer: Ending.ALIVE
    return write_file(store, 1, b"a", OLD)


def content(store: Store) -> bytes:
    return read_file(store, store.lookup(1, b"a").ino)


def events(shop: Shop) -> list[str]:
    return [event.kind for event in shop.events]


@pytest.mark.parametrize("begin", [once, twice])
@pytest.mark.parametrize("periodically", [False, True])
def test_what_is_not_filled_yet_does_not_survive_a_crash(
    shop: Shop, store: Store, ino: int, begin: Begin, periodically: bool
) -> None:
    handle = begin(store, ino)
    write_back(store, handle, 0, 2)
    assert store.get_attributes(ino).size == SIZE, "the living see it"
    if periodically:
        commit_periodically(store)
    store = shop.reopen(store, torn=TornMode.BACK)
    judge(store, Ending.UNKNOWN)
    assert content(store) == OLD


@pytest.mark.parametrize("begin", [once, twice])
def test_what_is_filled_is_published_while_it_is_mapped(
    shop: Shop, store: Store, ino: int, begin: Begin
) -> None:
    handle = begin(store, ino)
    write_back(store, handle, 0, 1)
    commit_periodically(store)
    write_back(store, handle, 2, 3)
    commit_periodically(store)
    store = shop.reopen(store, torn=TornMode.BACK)
    judge(store, Ending.UNKNOWN)
    assert content(store) == NEW


@pytest.mark.parametrize("begin", [once, twice])
@pytest.mark.parametrize("how", ["close", "fsync", "rename", "release"])
def test_what_publishes_a_file_that_was_filled(
    shop: Shop, store: Store, ino: int, begin: Begin, how: str
) -> None:
    """With a hole: programs may leave some for good."""
    handle = begin(store, ino)
    pages = (0, 1, 2, 3) if how == "close" else (0, 1, 3)
    write_back(store, handle, *pages)
    if how == "close":
        close_mapped(store, handle)
    elif how == "fsync":
        store.fsync(handle)
    elif how == "rename":
        store.rename(1, b"a", 1, b"b")
        store.rename(1, b"b", 1, b"a")
    else:
        close_mapped(store, handle)
        store.release(handle)
    store = shop.reopen(store, torn=TornMode.BACK)
    judge(store, Ending.UNKNOWN)
    hole = bytes(PAGE)
    assert content(store) == (NEW if how == "close" else NEW[: 2 * PAGE] + hole + NEW[:PAGE])
    assert store.get_xattr(ino, STATE) == b"complete"


@pytest.mark.parametrize("begin", [once, twice])
@pytest.mark.parametrize("filled", [False, True])
def test_a_killed_program_leaves_the_version_before(
    shop: Shop, store: Store, ino: int, begin: Begin, filled: bool
) -> None:
    handle = begin(store, ino)
    write_back(store, handle, 0, *([1, 2, 3] if filled else []))
    store.flush(handle, writer_killed=True)
    commit_periodically(store)
    store.release(handle)
    judge(store, Ending.KILLED)
    assert content(store) == OLD
    store = shop.reopen(store)
    assert content(store) == OLD


def test_sparse_files_that_nobody_maps_are_published_at_close(shop: Shop, store: Store) -> None:
    _, handle = create(store, b"a", b"begin")
    store.set_attributes(store.lookup(1, b"a").ino, size=SIZE, handle=handle)
    store.flush(handle, writer_killed=False, is_mapped=lambda: False)
    store = shop.reopen(store)
    assert content(store) == b"begin" + bytes(SIZE - 5)


@pytest.mark.parametrize("ending", ["killed", "well", "alive"])
def test_a_file_that_grows_in_place_is_published_periodically(
    shop: Shop, store: Store, ino: int, ending: str
) -> None:
    """Databases that map their files may keep them open for ever."""
    handle = store.open_file(ino, os.O_RDWR)
    store.set_attributes(ino, size=SIZE, handle=handle)
    close_mapped(store, handle)
    store.write(handle, 0, b"new")
    commit_periodically(store)
    store.write(handle, 0, b"New")
    if ending == "alive":
        commit_periodically(store)
    else:
        if ending == "killed":
            store.flush(handle, writer_killed=True)
        store.release(handle)
    store = shop.reopen(store)
    assert content(store) == (b"New" + OLD[3:]).ljust(SIZE, b"\0")
    assert store.get_xattr(ino, STATE) == (b"complete" if ending == "well" else b"incomplete")


def test_a_file_that_has_holes_already_is_published_at_close(
    shop: Shop, store: Store, ino: int
) -> None:
    store.set_attributes(ino, size=SIZE)
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, 0, b"new")
    close_mapped(store, handle)
    store = shop.reopen(store)
    assert content(store) == (b"new" + OLD[3:]).ljust(SIZE, b"\0")
    assert store.get_xattr(ino, STATE) == b"complete"


@pytest.mark.parametrize("periodically", [False, True])
def test_a_lost_page_of_a_file_that_grows(shop: Shop, store: Store, periodically: bool) -> None:
    """As open_memmap of a new name: its header is committed first, the rest is to come."""
    write_file(store, 1, b"a", OLD)
    close(store, create(store, b"new", b"header")[1])
    new = store.lookup(1, b"new").ino
    handle = store.open_file(new, os.O_RDWR)
    store.write(handle, SIZE - 1, b"\0")
    close_mapped(store, handle)
    if periodically:
        commit_periodically(store)
    write_back(store, handle, 0, 2, 3)
    lose(store, handle, 1)
    store.release(handle)
    with pytest.raises(NoSpaceError):
        store.rename(1, b"new", 1, b"a")
    assert content(store) == OLD
    expected = b"header".ljust(SIZE, b"\0") if periodically else b"header"
    for _ in range(2):
        assert read_file(store, new) == expected
        assert store.get_xattr(new, STATE) == (b"incomplete" if periodically else b"complete")
        store = shop.reopen(store)


@pytest.mark.parametrize("begin", [once, twice, in_place])
def test_a_lost_page_brings_the_version_before_back(
    shop: Shop, store: Store, ino: int, begin: Begin
) -> None:
    before = store.get_attributes(ino)
    handle = begin(store, ino)
    write_back(store, handle, 0)
    lose(store, handle, 1)
    write_back(store, handle, 1, 2, 3)  # which may be made of what the store has of the page
    assert store.get_xattr(ino, STATE) == b"incomplete"
    assert [entry.state for entry in store.list_checkpoints()] == ["incomplete"]
    commit_periodically(store)
    for _ in range(2):
        with pytest.raises(NoSpaceError):
            store.fsync(handle)
        with pytest.raises(NoSpaceError):
            close_mapped(store, handle)
    with pytest.raises(NoSpaceError):
        store.rename(1, b"a", 1, b"b")
    store.release(handle)
    judge(store, Ending.WELL)
    assert store.overwrites.wait_for(ino, opens=True) is False
    assert content(store) == OLD
    assert store.get_attributes(ino).mtime_ns == before.mtime_ns
    assert store.get_xattr(ino, STATE) == b"complete"
    assert "reverted" in events(shop)
    close(store, open_for_overwrite(store, b"a", NEW))
    assert content(store) == NEW, "the next save succeeds"


@pytest.mark.parametrize("begin", [once, in_place])
@pytest.mark.parametrize("clean", [False, True])
def test_a_lost_page_and_the_end_of_the_daemon(
    shop: Shop, store: Store, ino: int, begin: Begin, clean: bool
) -> None:
    handle = begin(store, ino)
    write_back(store, handle, 0)
    lose(store, handle, 1)
    store = shop.reopen(store, clean=clean)
    assert content(store) == OLD
    assert store.get_xattr(ino, STATE) == b"complete"


def test_a_lost_page_of_which_not_even_the_change_began(store: Store, ino: int) -> None:
    handle = in_place(store, ino)
    lose(store, handle, 0)
    with pytest.raises(NoSpaceError):
        store.fsync(handle)
    with pytest.raises(NoSpaceError):
        close_mapped(store, handle)
    store.release(handle)
    assert content(store) == OLD
    close(store, store.open_file(ino, os.O_RDWR))


@pytest.mark.parametrize("size", [0, PAGE])
def test_a_content_that_is_cut_before_the_lost_page_is_whole(
    shop: Shop, store: Store, ino: int, size: int
) -> None:
    handle = once(store, ino)
    write_back(store, handle, 0)
    lose(store, handle, 1)
    lose(store, handle, 2)
    store.set_attributes(ino, size=size, handle=handle)
    assert store.get_xattr(ino, STATE) == b"complete"
    close(store, handle)
    store = shop.reopen(store)
    assert content(store) == NEW[:size]


def new_file(store: Store, name: bytes) -> tuple[int, int]:
    """Mapped and filled, but for pages 2 and 3, which are lost."""
    ino, handle = create(store, name)
    store.set_attributes(ino, size=SIZE, handle=handle)
    close_mapped(store, handle)
    write_back(store, handle, 0, 1)
    lose(store, handle, 3)
    lose(store, handle, 2)
    return ino, handle


@pytest.mark.parametrize("periodically", [False, True])
@pytest.mark.parametrize("end", ["release", "close of the store"])
def test_a_new_file_ends_before_a_lost_page_and_is_incomplete(
    shop: Shop, store: Store, periodically: bool, end: str
) -> None:
    write_file(store, 1, b"other", OLD)
    ino, handle = create(store, b"a")
    store.set_attributes(ino, size=SIZE, handle=handle)
    close_mapped(store, handle)
    write_back(store, handle, 0, 1)
    if periodically:
        commit_periodically(store)
    write_back(store, handle, 3)
    lose(store, handle, 2)
    expected = NEW[: 2 * PAGE]
    if end == "release":
        with pytest.raises(NoSpaceError):
            close_mapped(store, handle)
        store.release(handle)
        assert content(store) == expected
        assert "cut" in events(shop), "the kernel is told"
        with pytest.raises(NoSpaceError):
            store.rename(1, b"a", 1, b"other")
    store = shop.reopen(store, clean=end != "release")
    assert content(store) == expected
    assert store.get_xattr(ino, STATE) == b"incomplete"


def test_a_new_file_with_a_lost_page_replaces_no_other(shop: Shop, store: Store, ino: int) -> None:
    new, handle = new_file(store, b"a.tmp")
    store.release(handle)
    with pytest.raises(NoSpaceError):
        store.rename(1, b"a.tmp", 1, b"a")
    with pytest.raises(NoSpaceError):
        store.rename(1, b"a.tmp", 1, b"a", exchange=True)
    assert content(store) == OLD
    store.rename(1, b"a.tmp", 1, b"aside")
    assert store.link(new, 1, b"linked").ino == new
    assert store.get_xattr(new, STATE) == b"incomplete"
    store = shop.reopen(store)
    assert store.get_xattr(ino, STATE) == b"complete"
    assert store.get_xattr(new, STATE) == b"incomplete"


def test_a_new_file_with_a_lost_page_is_filled_again(store: Store, ino: int) -> None:
    new, handle = new_file(store, b"a.tmp")
    store.release(handle)
    handle = store.open_file(new, os.O_RDWR)
    store.set_attributes(new, size=SIZE, handle=handle)
    close_mapped(store, handle)
    write_back(store, handle, 0, 1, 2, 3)
    close(store, handle)
    assert store.get_xattr(new, STATE) == b"complete"
    store.rename(1, b"a.tmp", 1, b"a")
    assert content(store) == NEW
    assert store.lookup(1, b"a").ino == new != ino


def test_a_full_store_keeps_the_version_before_a_file_that_is_being_filled(
    shop: Shop, store: Store, ino: int
) -> None:
    """It is what comes back, so its space is not given to the new content."""
    handle = twice(store, ino)
    fill(store)
    size = 1 << 30
    store.set_attributes(ino, size=size, handle=handle)
    written = until_no_space(lambda page: store.write(handle, page * PAGE, NEW[:PAGE]))
    lose(store, handle, written)
    store.release(handle)
    judge(store, Ending.BADLY)
    assert content(store) == OLD
    assert "given-up" not in events(shop)
    store = shop.reopen(store)
    assert content(store) == OLD


def test_making_room_publishes_no_part_of_a_whole_file(store: Store, ino: int) -> None:
    """Which is extended and filled through a mapping: what comes back is the old content."""
    handle = store.open_file(ino, os.O_RDWR)
    fill(store)
    store.set_attributes(ino, size=1 << 30, handle=handle)

    def write_page(page: int) -> None:
        store.files.pages_come(handle)
        store.write(handle, page * PAGE, NEW[:PAGE])

    lose(store, handle, until_no_space(write_page))
    with pytest.raises(NoSpaceError):
        store.fsync(handle)
    store.release(handle)
    assert content(store) == OLD


def test_removed_while_a_page_is_lost(store: Store, ino: int) -> None:
    handle = once(store, ino)
    lose(store, handle, 0)
    store.unlink(1, b"a")
    store.release(handle)
    again = write_file(store, 1, b"a", b"again")
    assert again != ino
