"""What a store remembers of damage, of the last verify and of refused writes."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import CorruptionError, NoAttributeError, NoSpaceError, NotPermittedError
from cxlfs.store import Store
from cxlfs.store.health import DAMAGED_XATTR, HEALTH_XATTR, VerifyOutcome
from cxlfs.verify import run_passes
from tests.support.stores import new_store, read_file, reopen, write_file

FILE = 20_000


def spoil(store: Store, ino: int, offset: int = 0) -> None:
    """Flip a bit of the committed content of a file, on the media."""
    row = store.namespace.get(ino).content.export(offset, 1)[0]
    infos, _ = store.volume.engine.describe(int(row["extent_id"]))
    place = int(infos[0]["media_offset"]) + int(row["extent_offset"]) + offset
    store.media.store(place, bytes([store.media.read(place, 1)[0] ^ 1]))


def state_of(store: Store, ino: int) -> bytes:
    return store.get_xattr(ino, b"user.cxlfs.state")


def damaged_store() -> tuple[Store, int]:
    """A file whose damage was seen by a reader; it is written down by the next maintenance."""
    store = new_store()
    ino = write_file(store, 1, b"model", os.urandom(FILE))
    write_file(store, 1, b"other", b"x" * FILE)
    spoil(store, ino)
    with pytest.raises(CorruptionError):
        read_file(store, ino)
    return store, ino


@pytest.mark.parametrize("clean", [True, False])
def test_damage_that_a_reader_saw_outlives_the_mount(clean: bool) -> None:
    store, ino = damaged_store()
    ctime = store.get_attributes(ino).ctime_ns
    store.maintain(1.0)
    for _ in range(2):
        store = reopen(store, clean=clean)
        assert state_of(store, ino) == b"damaged"
        statistics = store.statistics()
        assert statistics.state == "NEEDS-CHECK"
        assert statistics.reason == "the data of a file is damaged: /model"
        assert (statistics.damaged_files, statistics.damaged_paths) == (1, ("/model",))
        assert statistics.checksum_errors == 0
        assert store.get_attributes(ino).ctime_ns == ctime
        store.maintain(1.0)


def test_reading_writes_nothing() -> None:
    store, ino = damaged_store()
    before = store.volume.counters.commits
    with pytest.raises(CorruptionError):
        read_file(store, ino)
    assert store.volume.counters.commits == before
    store.maintain(1.0)
    store.maintain(2.0)
    assert store.volume.counters.commits == before + 1, "once for a file, however often it is read"


def test_a_store_closed_at_once_has_written_it_down() -> None:
    store, ino = damaged_store()
    store = reopen(store, clean=True)
    assert state_of(store, ino) == b"damaged"


@pytest.mark.parametrize("clean", [True, False])
def test_overwriting_ends_it_in_the_record_that_publishes(clean: bool) -> None:
    store, ino = damaged_store()
    store.maintain(1.0)
    before = store.volume.counters.commits
    write_file(store, 1, b"model", b"new" * 5000)
    assert store.volume.counters.commits == before + 1
    assert state_of(store, ino) == b"complete"
    store = reopen(store, clean=clean)
    assert state_of(store, ino) == b"complete"
    assert store.statistics().state in ("ONLINE", "NEEDS-CHECK")
    assert store.statistics().damaged_files == 0
    assert DAMAGED_XATTR not in (store.namespace.get(ino).xattrs or {})


def test_an_overwrite_that_is_taken_back_leaves_it_damaged() -> None:
    store, ino = damaged_store()
    store.maintain(1.0)
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, b"half")
    store.flush(handle, writer_killed=True)
    store.release(handle)
    assert state_of(store, ino) == b"damaged"
    store = reopen(store, clean=True)
    assert state_of(store, ino) == b"damaged"


def test_writing_a_part_of_it_does_not_end_it() -> None:
    store, ino = damaged_store()
    store.maintain(1.0)
    handle = store.open_file(ino, os.O_WRONLY)
    store.write(handle, 15_000, b"elsewhere")
    store.flush(handle, writer_killed=False)
    store.release(handle)
    assert state_of(store, ino) == b"damaged"


def test_removing_ends_it() -> None:
    store, _ = damaged_store()
    store.maintain(1.0)
    store.unlink(1, b"model")
    assert store.statistics().damaged_files == 0
    assert store.statistics().state == "ONLINE"
    assert reopen(store, clean=False).statistics().damaged_files == 0


def test_renaming_keeps_it() -> None:
    store, ino = damaged_store()
    store.rename(1, b"model", 1, b"moved")
    store.maintain(1.0)
    store = reopen(store, clean=False)
    assert store.statistics().damaged_paths == ("/moved",)
    assert state_of(store, ino) == b"damaged"


def test_many_damaged_files_take_bounded_steps_and_are_counted() -> None:
    store = new_store()
    inos = [write_file(store, 1, b"f%d" % number, b"x" * 100) for number in range(200)]
    for ino in inos:
        store.health.seen(store.namespace.get(ino))
    before = store.volume.counters.commits
    steps = 0
    while store.health.maintain(1.0, lambda: 0):
        steps += 1
    assert store.volume.counters.commits - before == 4
    assert steps == 3
    statistics = reopen(store, clean=False).statistics()
    assert statistics.damaged_files == 200
    assert statistics.reason is not None
    assert statistics.reason.startswith("the data of 200 files is damaged: /f")
    assert statistics.reason.endswith(", ...")


# --- hidden -------------------------------------------------------------------------------------


def test_users_neither_see_nor_set_it() -> None:
    store, ino = damaged_store()
    store.health.verified(outcome())
    for inode, name in ((ino, DAMAGED_XATTR), (1, HEALTH_XATTR)):
        assert name in (store.namespace.get(inode).xattrs or {})
        assert name not in store.list_xattrs(inode)
        with pytest.raises(NoAttributeError):
            store.get_xattr(inode, name)
        with pytest.raises(NotPermittedError):
            store.set_xattr(inode, name, b"")
        with pytest.raises(NotPermittedError):
            store.remove_xattr(inode, name)
    assert store.statistics().state == "NEEDS-CHECK"


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"[1]",
        b"[" * 4000,
        b"{" * 9000,
        b'{"verify":3,"refused":[]}',
        b'{"verify":{"ended_ns":-1,"errors":0,"warnings":0,"structure_findings":0}}',
        b'{"verify":{"ended_ns":true,"errors":0,"warnings":0,"structure_findings":0}}',
        b'{"refused":{"since_ns":1,"last_ns":1,"count":1e999,"needed_bytes":0}}',
        b'{"refused":{"since_ns":1,"last_ns":1,"count":99999999999999999999,"needed_bytes":0}}',
    ],
)
def test_what_makes_no_sense_counts_as_none(value: bytes) -> None:
    store = new_store()
    store.namespace.set_xattr(store.namespace.get(1), HEALTH_XATTR, value)
    store = reopen(store, clean=True)
    assert (store.statistics().last_verify, store.statistics().refused_writes) == (None, None)
    assert store.statistics().state == "ONLINE"


# --- verify -------------------------------------------------------------------------------------


def outcome(**changes: object) -> VerifyOutcome:
    values: dict[str, object] = {
        "ended_ns": 1_700_000_000_000_000_000,
        "structure_only": False,
        "complete": True,
        "errors": 0,
        "warnings": 0,
        "structure_findings": 0,
    }
    return VerifyOutcome(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("clean", [True, False])
def test_the_last_verify_outlives_the_mount(clean: bool) -> None:
    found = outcome(warnings=2, structure_findings=2, kinds=("root-copy-damaged",))
    store = new_store()
    store.health.verified(outcome())
    store.health.verified(found)
    store = reopen(store, clean=clean)
    statistics = store.statistics()
    assert statistics.last_verify == found
    assert statistics.state == "NEEDS-CHECK"
    assert statistics.reason == "the last verify found: root-copy-damaged"
    store.health.verified(outcome())
    assert store.statistics().state == "ONLINE"


def test_the_record_is_of_bounded_size() -> None:
    store = new_store()
    store.health.verified(outcome(kinds=tuple("x" * 1000 for _ in range(1000))))
    assert len((store.namespace.get(1).xattrs or {})[HEALTH_XATTR]) < 4096
    store = reopen(store, clean=True)
    found = store.statistics().last_verify
    assert found is not None
    assert found.kinds == ("x" * 64,) * 8


def test_a_verify_that_finds_nothing_ends_it() -> None:
    store, ino = damaged_store()
    store.maintain(1.0)
    spoil(store, ino)  # the same bit again: the media were mended
    known = store.health.sightings
    assert list(run_passes(store.media, structure_only=False, store=store)) == []
    store.health.found_good(known_at=known, except_inos=set())
    assert state_of(store, ino) == b"complete"
    store = reopen(store, clean=False)
    assert state_of(store, ino) == b"complete"


def test_damage_seen_meanwhile_is_not_ended() -> None:
    store, ino = damaged_store()
    store.maintain(1.0)
    known = store.health.sightings
    with pytest.raises(CorruptionError):
        read_file(store, ino)
    store.health.found_good(known_at=known, except_inos=set())
    assert state_of(store, ino) == b"damaged"


# --- refused writes -----------------------------------------------------------------------------


def fill(store: Store) -> int:
    """Files until there is no room; how many."""
    for number in range(1000):
        attributes, handle = store.create(1, b"fill%d" % number, 0o644, 0, 0, os.O_WRONLY)
        try:
            store.write(handle, 0, bytes(200_000))
        except NoSpaceError:
            with pytest.raises(NoSpaceError):
                store.flush(handle, writer_killed=False)
            store.release(handle)
            store.unlink(1, b"fill%d" % number)
            return number
        store.flush(handle, writer_killed=False)
        store.release(handle)
        del attributes
    raise AssertionError("the store is never full")


@pytest.mark.parametrize("clean", [True, False])
def test_refused_writes_are_remembered_until_there_is_room(clean: bool) -> None:
    store = new_store()
    count = fill(store)
    refused = store.statistics().refused_writes
    assert refused is not None
    assert (refused.count, refused.needed_bytes) == (1, 212_500)
    store.maintain(1.0)
    store = reopen(store, clean=clean)
    again = store.statistics().refused_writes
    assert again is not None
    assert (again.count, again.since_ns) == (1, refused.since_ns)
    for number in range(count // 2):
        store.unlink(1, b"fill%d" % number)
    assert store.statistics().refused_writes is None
    store.maintain(100.0)
    store = reopen(store, clean=clean)
    fresh = store.statistics()
    assert fresh.refused_writes is None
    assert store.health.refused is None, "it is written down that it is over"
