"""Overwriting is crash-atomic without rename: a killed writer brings the old version back."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from cxlfs.errors import NoSpaceError
from cxlfs.store import Store
from tests.support.shop import Shop, close, create, fill, open_for_overwrite
from tests.support.stores import read_file, write_file

STATE = b"user.cxlfs.state"


def content(store: Store, name: bytes) -> bytes:
    return read_file(store, store.lookup(1, name).ino)


@pytest.fixture
def old(store: Store) -> int:
    return write_file(store, 1, b"a", b"old" * 3000)


def test_live_content_is_new_at_once(store: Store, old: int) -> None:
    handle = open_for_overwrite(store, b"a", b"new")
    assert read_file(store, old) == b"new"
    assert store.get_attributes(old).size == 3
    close(store, handle)


@pytest.mark.usefixtures("old")
def test_a_list_tells_what_is_being_written(store: Store) -> None:
    """By whoever has it open for writing, though what is there is committed and complete."""
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    inside = write_file(store, directory, b"b", b"data")

    def told() -> list[tuple[str, bool]]:
        return [(entry.state, entry.being_written) for entry in store.list_checkpoints()]

    reader = store.open_file(inside, os.O_RDONLY)
    assert told() == [("complete", False), ("complete", False)]
    handle = store.open_file(inside, os.O_WRONLY)
    assert told() == [("complete", False), ("complete", True)]
    overwriting = open_for_overwrite(store, b"a", b"new")
    assert told() == [("complete", True), ("complete", True)]
    for opened in (reader, handle, overwriting):
        close(store, opened)
    assert told() == [("complete", False), ("complete", False)]


def test_daemon_kill_brings_the_old_back(shop: Shop, store: Store, old: int) -> None:
    before = store.get_attributes(old)
    open_for_overwrite(store, b"a", b"new")
    store = shop.reopen(store)
    assert content(store, b"a") == b"old" * 3000
    assert store.get_attributes(old) == before
    assert store.get_xattr(old, STATE) == b"complete"


def test_killed_writer_brings_the_old_back(shop: Shop, store: Store, old: int) -> None:
    before = store.get_attributes(old)
    close(store, open_for_overwrite(store, b"a", b"new" * 5000), killed=True)
    assert store.get_attributes(old).mtime_ns == before.mtime_ns
    for _ in range(2):
        assert content(store, b"a") == b"old" * 3000
        assert store.get_xattr(old, STATE) == b"complete"
        aside = [e for e in store.list_checkpoints() if e.kept_aside]
        assert [(e.path, e.size_bytes, e.state) for e in aside] == [(b"/a", 15000, "incomplete")]
        store = shop.reopen(store)
    assert [e.kind for e in shop.events].count("reverted") == 1


def test_killed_before_the_first_write(store: Store, old: int) -> None:
    handle = store.open_file(old, os.O_WRONLY | os.O_TRUNC)
    assert store.get_attributes(old).size == 0
    close(store, handle, killed=True)
    assert content(store, b"a") == b"old" * 3000
    assert not [e for e in store.list_checkpoints() if e.kept_aside]


def test_ftruncate_to_nothing_begins_an_overwrite(shop: Shop, store: Store, old: int) -> None:
    handle = store.open_file(old, os.O_RDWR)
    store.set_attributes(old, size=0, handle=handle)
    store.write(handle, 0, b"new")
    store.set_attributes(old, size=2, handle=handle)
    store = shop.reopen(store)
    assert content(store, b"a") == b"old" * 3000


def test_killed_after_ftruncate(store: Store, old: int) -> None:
    handle = store.open_file(old, os.O_RDWR)
    store.set_attributes(old, size=0, handle=handle)
    store.write(handle, 0, b"new")
    close(store, handle, killed=True)
    assert content(store, b"a") == b"old" * 3000


def test_the_next_overwrite_forgets_what_was_kept_aside(store: Store, old: int) -> None:
    close(store, open_for_overwrite(store, b"a", b"half"), killed=True)
    close(store, open_for_overwrite(store, b"a", b"whole"))
    assert [(e.size_bytes, e.kept_aside) for e in store.list_checkpoints()] == [(5, False)]
    assert read_file(store, old) == b"whole"


def test_kept_aside_survives_an_append(store: Store, old: int) -> None:
    close(store, open_for_overwrite(store, b"a", b"half"), killed=True)
    store.set_attributes(old, mode=0o600)
    store.rename(1, b"a", 1, b"b")
    assert [e.kept_aside for e in store.list_checkpoints()] == [False, True]
    store.unlink(1, b"b")
    assert list(store.list_checkpoints()) == []
    assert not store.versions.asides


@pytest.mark.usefixtures("old")
def test_what_is_kept_aside_counts_as_free(store: Store) -> None:
    before = store.statfs().free_bytes
    close(store, open_for_overwrite(store, b"a", b"x" * 100_000), killed=True)
    assert store.statfs().free_bytes == before
    assert store.statistics().incomplete_bytes == 100_000


def test_kept_aside_is_dropped_at_need(store: Store) -> None:
    free = store.statfs().free_bytes
    part = int(free * 0.4)
    write_file(store, 1, b"a", b"1" * part)
    close(store, open_for_overwrite(store, b"a", b"2" * part), killed=True)
    write_file(store, 1, b"b", b"3" * part)
    assert not [e for e in store.list_checkpoints() if e.kept_aside]
    assert content(store, b"a") == b"1" * part


def test_saving_again_after_a_kill_needs_no_third_room(store: Store) -> None:
    part = int(store.statfs().free_bytes * 0.4)
    write_file(store, 1, b"a", b"1" * part)
    for attempt in b"2", b"3":
        close(store, open_for_overwrite(store, b"a", attempt * part), killed=True)
    close(store, open_for_overwrite(store, b"a", b"4" * part))
    assert content(store, b"a") == b"4" * part


def test_no_room_for_both_versions_keeps_the_old(shop: Shop, store: Store) -> None:
    part = int(store.statfs().free_bytes * 0.6)
    ino = write_file(store, 1, b"a", b"1" * part)
    before = store.statfs().free_bytes
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoSpaceError) as caught:
        store.write(handle, 0, b"2" * part)
    assert caught.value.needed_bytes > caught.value.available_bytes
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    with pytest.raises(NoSpaceError):
        store.fsync(handle)
    store.release(handle)
    assert content(store, b"a") == b"1" * part
    assert store.statfs().free_bytes == before
    assert {"no-space", "reverted"} <= {e.kind for e in shop.events}
    assert [e.path for e in shop.events if e.kind == "no-space"] == ["/a"]
    write_file(store, 1, b"b", b"3" * (before // 2))
    assert content(store, b"a") == b"1" * part


def test_allow_incomplete_overwrite_gives_up_the_old(shop: Shop) -> None:
    store = shop.new(allow_incomplete_overwrite=True)
    ino = write_file(store, 1, b"a", b"old")
    close(store, open_for_overwrite(store, b"a", b"half"), killed=True)
    assert read_file(store, ino) == b"half"


def test_a_repaired_range_publishes(shop: Shop, store: Store) -> None:
    ino = write_file(store, 1, b"a", b"old")
    _, spare = create(store, b"spare", b"s" * 200_000)
    close(store, spare)
    fill(store)
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoSpaceError):
        store.write(handle, 0, b"n" * 150_000)
    store.unlink(1, b"spare")
    assert store.write(handle, 0, b"n" * 100_000) == 100_000
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    assert store.write(handle, 100_000, b"n" * 50_000) == 50_000
    close(store, handle)
    store = shop.reopen(store)
    assert content(store, b"a") == b"n" * 150_000


def test_cutting_a_failed_range_off_publishes(store: Store) -> None:
    ino = write_file(store, 1, b"a", b"old")
    fill(store)
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoSpaceError):
        store.write(handle, 100, b"n" * 150_000)
    store.set_attributes(ino, size=50, handle=handle)
    close(store, handle)
    assert content(store, b"a") == bytes(50)


@pytest.mark.parametrize("overwrite", [False, True])
def test_periodic_commit_does_not_forget_a_failed_write(store: Store, overwrite: bool) -> None:
    if overwrite:
        write_file(store, 1, b"x", b"old")
    _, spare = create(store, b"spare", b"s" * 100_000)
    close(store, spare)
    fill(store)
    if overwrite:
        handle = store.open_file(store.lookup(1, b"x").ino, os.O_WRONLY | os.O_TRUNC)
    else:
        _, handle = create(store, b"x")
    with pytest.raises(NoSpaceError):
        store.write(handle, 10, b"b" * 100_000)
    store.unlink(1, b"spare")
    store.commits.commit_old(older_than=1e18)
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    ino = store.lookup(1, b"x").ino
    assert store.get_xattr(ino, STATE) == (b"complete" if overwrite else b"incomplete")
    assert not overwrite or content(store, b"x") == b"old"


def test_failed_new_file_is_incomplete(store: Store) -> None:
    fill(store)
    store.unlink(1, b"filler")
    ino, handle = create(store, b"x", b"begin")
    with pytest.raises(NoSpaceError):
        store.write(handle, 5, bytes(store.media.size_bytes))
    with pytest.raises(NoSpaceError):
        store.flush(handle, writer_killed=False)
    store.release(handle)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    assert read_file(store, ino)[:5] == b"begin"


@pytest.mark.parametrize("verb", ["rename", "link", "exchange"])
def test_a_failed_write_is_not_published_by_names(store: Store, verb: str) -> None:
    ino = write_file(store, 1, b"a", b"old")
    write_file(store, 1, b"b", b"other")
    fill(store)
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    with pytest.raises(NoSpaceError):
        store.write(handle, 0, b"n" * 150_000)
    verbs: dict[str, Callable[[], object]] = {
        "rename": lambda: store.rename(1, b"a", 1, b"b"),
        "link": lambda: store.link(ino, 1, b"c"),
        "exchange": lambda: store.rename(1, b"b", 1, b"a", exchange=True),
    }
    with pytest.raises(NoSpaceError):
        verbs[verb]()
    store.release(handle)
    assert content(store, b"a") == b"old"
    assert content(store, b"b") == b"other"


def test_flush_before_the_first_write_makes_it_ordinary(shop: Shop, store: Store, old: int) -> None:
    """Closed by one process while another has it: nobody can tell whether that one will write."""
    handle = store.open_file(old, os.O_WRONLY | os.O_TRUNC)
    store.flush(handle, writer_killed=False)
    store.write(handle, 0, b"logged\n")
    close(store, handle, killed=True)
    assert content(store, b"a") == b"logged\n"
    store = shop.reopen(store)
    assert content(store, b"a") == b"logged\n"


def test_second_writer_that_did_not_truncate(store: Store, old: int) -> None:
    first = open_for_overwrite(store, b"a", b"first")
    second = store.open_file(old, os.O_WRONLY)
    store.write(second, 5, b"second")
    close(store, second, killed=True)
    close(store, first, killed=True)
    assert read_file(store, old) == b"firstsecond"


def test_truncating_while_an_ordinary_writer_writes(store: Store, old: int) -> None:
    ordinary = store.open_file(old, os.O_WRONLY)
    store.write(ordinary, 0, b"ordinary")
    truncating = open_for_overwrite(store, b"a", b"t")
    close(store, truncating, killed=True)
    close(store, ordinary)
    assert read_file(store, old) == b"t"


@pytest.mark.parametrize("last", ["earlier", "killed"])
@pytest.mark.parametrize("committed_by", ["close", "fsync"])
def test_a_killed_overwrite_of_what_another_handle_has_committed(
    shop: Shop, store: Store, committed_by: str, last: str
) -> None:
    """The kernel sends RELEASE when it finds the time: a save may be begun, and killed, before that
    of the one before it is served. Nor does it matter whether somebody has it open still.
    """
    ino, earlier = create(store, b"a", b"old" * 3000)
    if committed_by == "close":
        store.flush(earlier, writer_killed=False)
    else:
        store.fsync(earlier)
    killed = open_for_overwrite(store, b"a", b"half of it" * 300)
    store.flush(killed, writer_killed=True)
    for handle in (killed, earlier) if last == "earlier" else (earlier, killed):
        if handle == earlier and committed_by == "fsync":
            store.flush(earlier, writer_killed=False)
        store.release(handle)
    assert read_file(store, ino) == b"old" * 3000
    assert read_file(shop.reopen(store), ino) == b"old" * 3000


def test_killed_writer_that_another_handle_goes_on_with(store: Store, old: int) -> None:
    first = open_for_overwrite(store, b"a", b"first")
    second = store.open_file(old, os.O_WRONLY | os.O_TRUNC)
    store.write(second, 0, b"second")
    close(store, first, killed=True)
    assert read_file(store, old) == b"second"
    close(store, second)
    assert read_file(store, old) == b"second"


@pytest.mark.parametrize("order", ["flush first", "release first"])
@pytest.mark.parametrize("truncates", [True, False])
def test_who_wrote_nothing_does_not_publish_what_a_killed_writer_left(
    shop: Shop, store: Store, old: int, truncates: bool, order: str
) -> None:
    """Neither by closing, nor by fsync, nor by being the last."""
    flags = os.O_RDWR | (os.O_TRUNC if truncates else 0)
    idle = store.open_file(old, flags)
    writer = open_for_overwrite(store, b"a", b"half of it" * 300)
    store.flush(writer, writer_killed=True)
    if order == "release first":
        store.release(writer)
    store.fsync(idle)
    store.flush(idle, writer_killed=False)
    if order == "flush first":
        store.release(writer)
    store.release(idle)
    assert read_file(store, old) == b"old" * 3000
    assert read_file(shop.reopen(store), old) == b"old" * 3000


def test_who_truncated_after_the_kill_publishes_nothing_but_that(
    shop: Shop, store: Store, old: int
) -> None:
    writer = open_for_overwrite(store, b"a", b"half of it")
    store.flush(writer, writer_killed=True)
    other = store.open_file(old, os.O_WRONLY | os.O_TRUNC)
    close(store, other)
    store.release(writer)
    assert read_file(store, old) == b""
    assert read_file(shop.reopen(store), old) == b""


def test_a_killed_creator_leaves_an_incomplete_file_to_who_only_opened_it(
    store: Store, shop: Shop
) -> None:
    ino, writer = create(store, b"n", b"half of it")
    idle = store.open_file(ino, os.O_RDWR)
    close(store, writer, killed=True)
    close(store, idle)
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"incomplete"
    again = shop.reopen(store)
    assert again.get_xattr(ino, b"user.cxlfs.state") == b"incomplete"
    assert read_file(again, ino) == b"half of it"


def test_a_reader_does_not_keep_a_killed_overwrite(store: Store, old: int) -> None:
    reader = store.open_file(old, os.O_RDONLY)
    close(store, open_for_overwrite(store, b"a", b"new"), killed=True)
    assert bytes(store.read(reader, 0, 6)) == b"oldold"
    store.release(reader)


def test_killed_then_written_again_by_the_same_handle(store: Store, old: int) -> None:
    """A child that was killed flushed its copy; the parent goes on."""
    handle = open_for_overwrite(store, b"a", b"one")
    store.flush(handle, writer_killed=True)
    store.write(handle, 3, b"two")
    close(store, handle)
    assert read_file(store, old) == b"onetwo"


def test_published_then_killed(store: Store, old: int) -> None:
    """Nothing that was committed is withdrawn: a good FLUSH, more writes, then a kill."""
    handle = open_for_overwrite(store, b"a", b"one")
    store.flush(handle, writer_killed=False)
    store.write(handle, 3, b"two")
    close(store, handle, killed=True)
    assert read_file(store, old) == b"one"


def test_truncating_a_file_never_committed(shop: Shop, store: Store) -> None:
    ino, first = create(store, b"new", b"some text")
    second = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    assert store.get_attributes(ino).size == 0
    store.write(second, 0, b"other")
    close(store, second, killed=True)
    close(store, first, killed=True)
    assert store.get_xattr(ino, STATE) == b"incomplete"
    store = shop.reopen(store)
    assert content(store, b"new") == b"other"


def test_overwrite_of_an_incomplete_file_completes_it(shop: Shop, store: Store) -> None:
    ino, handle = create(store, b"x", b"half")
    close(store, handle, killed=True)
    close(store, open_for_overwrite(store, b"x", b"whole"))
    store = shop.reopen(store)
    assert store.get_xattr(ino, STATE) == b"complete"
    assert content(store, b"x") == b"whole"


def test_killed_overwrite_of_an_incomplete_file(store: Store) -> None:
    ino, handle = create(store, b"x", b"half")
    close(store, handle, killed=True)
    close(store, open_for_overwrite(store, b"x", b"other half"), killed=True)
    assert read_file(store, ino) == b"half"
    assert store.get_xattr(ino, STATE) == b"incomplete"


def test_attributes_set_during_an_overwrite_stay(shop: Shop, store: Store, old: int) -> None:
    handle = open_for_overwrite(store, b"a", b"new")
    store.set_attributes(old, mode=0o600, uid=5)
    store.set_xattr(old, b"user.k", b"v")
    store.set_attributes(old, mtime_ns=1234)
    store = shop.reopen(store)
    attributes = store.get_attributes(old)
    assert (attributes.mode & 0o7777, attributes.uid) == (0o600, 5)
    assert store.get_xattr(old, b"user.k") == b"v"
    assert content(store, b"a") == b"old" * 3000
    del handle


@pytest.mark.usefixtures("old")
def test_staged_overwrite_reverts(shop: Shop, store: Store) -> None:
    handle = open_for_overwrite(store, b"a", b"one" * 5000)
    store.commits.commit_old(older_than=1e18)
    store.write(handle, 15000, b"two")
    store.commits.commit_old(older_than=1e18)
    store.write(handle, 15003, b"three")
    store = shop.reopen(store)
    assert content(store, b"a") == b"old" * 3000
    aside = [e.size_bytes for e in store.list_checkpoints() if e.kept_aside]
    assert aside == [15003]


def test_staged_overwrite_truncated_again(shop: Shop, store: Store, old: int) -> None:
    handle = open_for_overwrite(store, b"a", b"one" * 5000)
    store.commits.commit_old(older_than=1e18)
    store.set_attributes(old, size=0, handle=handle)
    store.write(handle, 5, b"two")
    store.commits.commit_old(older_than=1e18)
    close(store, handle)
    store = shop.reopen(store)
    assert content(store, b"a") == bytes(5) + b"two"


@pytest.mark.usefixtures("old")
def test_staged_overwrite_publishes(shop: Shop, store: Store) -> None:
    handle = open_for_overwrite(store, b"a", b"one" * 5000)
    store.commits.commit_old(older_than=1e18)
    store.write(handle, 100, b"two" * 2000)
    close(store, handle)
    expected = bytearray(b"one" * 5000)
    expected[100:6100] = b"two" * 2000
    assert content(store, b"a") == expected
    store = shop.reopen(store)
    assert content(store, b"a") == expected
    assert not [e for e in store.list_checkpoints() if e.kept_aside]


def test_thousand_overwrites_each_fifth_killed(shop: Shop, store: Store, old: int) -> None:
    last = b"old" * 3000
    free = store.statfs().free_bytes
    for number in range(1000):
        data = number.to_bytes(4, "little") * 2250
        killed = number % 5 == 4
        close(store, open_for_overwrite(store, b"a", data), killed=killed)
        last = last if killed else data
        assert read_file(store, old) == last
        if number % 250 == 249:
            store = shop.reopen(store, clean=number % 500 == 499)
            assert read_file(store, old) == last
    assert store.statfs().free_bytes == free
