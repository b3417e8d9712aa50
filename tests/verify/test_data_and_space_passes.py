"""Passes 10 and 11: what counts as free, and every chunk of file data."""

from __future__ import annotations

import os

import pytest

from cxlfs.errors import CorruptionError
from cxlfs.format import layout
from cxlfs.media import MemoryMedia
from cxlfs.native import FaultKind, set_fault
from cxlfs.store import Store, StoreOptions
from cxlfs.store.space import State
from cxlfs.verify import Finding, run_passes
from tests.support.corrupt import Anatomy, Damage
from tests.support.stores import CHUNK_BYTES, new_store, read_file, write_file
from tests.support.verdict import findings_of


def verify(store: Store) -> list[Finding]:
    return list(run_passes(store.media, structure_only=False, store=store))


@pytest.fixture
def store() -> Store:
    store = new_store()
    directory = store.make_directory(1, b"d", 0o755, 0, 0).ino
    for number in range(3):
        write_file(store, directory, b"file-%d" % number, os.urandom(3 * CHUNK_BYTES + 100))
    return store


# --- 10: space ------------------------------------------------------------------------------


def _first(store: Store, state: State) -> int:
    return store.volume.space.states.index(state)


def test_data_in_a_segment_that_counts_as_free(store: Store) -> None:
    index = _first(store, State.DATA)
    store.volume.space.states[index] = State.FREE
    found = verify(store)
    assert {(f.id, f.structure) for f in found} == {("space-conflict", "segment")}
    assert found[0].media_offset == store.superblock.segment_offset(index)


def test_metadata_in_a_segment_that_counts_as_data(store: Store) -> None:
    index = store.volume.current.image_segments[0]
    store.volume.space.states[index] = State.DATA
    found = [f for f in verify(store) if f.pass_id == 10]
    place = store.superblock.segment_offset(index)
    assert ("space-conflict", place) in {(f.id, f.media_offset) for f in found}


@pytest.mark.parametrize("state", [State.DATA, State.IMAGE, State.JOURNAL])
def test_a_segment_that_nothing_uses(store: Store, state: State) -> None:
    index = store.volume.space.take(state)
    found = [f for f in verify(store) if f.pass_id == 10]
    assert [(f.id, f.severity) for f in found] == [("space-leaked", "warning")]
    assert found[0].media_offset == store.superblock.segment_offset(index)


def test_segments_that_died_and_wait_for_a_root_are_no_finding(store: Store) -> None:
    for number in range(40):
        write_file(store, 1, b"short-lived", os.urandom(30_000))
        store.unlink(1, b"short-lived")
        assert verify(store) == [], number


# --- 11: data -------------------------------------------------------------------------------


def _extents(store: Store, ino: int) -> list[tuple[int, int, int]]:
    """(file offset, media offset, length) of the content."""
    rows = store.namespace.get(ino).content.export(0, 1 << 40)
    result = []
    for row in rows:
        infos, _ = store.volume.engine.describe(int(row["extent_id"]))
        place = int(infos[0]["media_offset"]) + int(row["extent_offset"])
        result.append((int(row["file_offset"]), place, int(row["length"])))
    return result


def test_damaged_data_names_file_and_place(store: Store) -> None:
    ino = store.lookup(store.lookup(1, b"d").ino, b"file-1").ino
    file_offset, place, _ = _extents(store, ino)[0]
    with Damage(store.media) as damage:
        damage.flip((place + CHUNK_BYTES + 17) * 8)
        (finding,) = verify(store)
        assert finding.id == "data-checksum"
        assert finding.severity == "error"
        assert not finding.repairable
        assert finding.structure == "file data"
        assert finding.media_offset == place + CHUNK_BYTES
        assert (finding.ino, finding.path) == (ino, b"/d/file-1")
        assert finding.expected != finding.actual
        (use,) = finding.uses
        assert (use.file_offset, use.length) == (file_offset + CHUNK_BYTES, CHUNK_BYTES)
        assert use.version == "committed"
        with pytest.raises(CorruptionError):
            read_file(store, ino)
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"damaged"


def test_hard_links_give_one_use_of_one_inode(closed: Anatomy, closed_damage: Damage) -> None:
    store = Store.open(closed.media, StoreOptions(read_only=True))
    linked = store.lookup(1, b"state-link")
    assert linked.nlink == 2
    _, place, _ = _extents(store, linked.ino)[0]
    store.close()
    closed_damage.flip(place * 8)
    data = [f for f in findings_of(closed.media) if f.pass_id == 11]
    assert [(f.id, f.ino) for f in data] == [("data-checksum", linked.ino)]
    assert data[0].path in (b"/state-link", b"/runs/state")


def test_damage_in_a_version_kept_aside() -> None:
    store = new_store()
    ino = write_file(store, 1, b"file", os.urandom(9000))
    handle = store.open_file(ino, os.O_WRONLY | os.O_TRUNC)
    store.write(handle, 0, os.urandom(6000))
    store.flush(handle, writer_killed=True)
    store.release(handle)
    aside = store.namespace.get(ino).aside
    assert aside is not None
    row = aside.export(0, aside.size)[0]
    infos, _ = store.volume.engine.describe(int(row["extent_id"]))
    with Damage(store.media) as damage:
        damage.flip(int(infos[0]["media_offset"]) * 8)
        (finding,) = verify(store)
    assert finding.uses[0].version == "kept aside"
    assert finding.path == b"/file"


def _roomy_store() -> Store:
    """Segments in which an extent has many chunks."""
    media = MemoryMedia(18 << 20)
    Store.format(
        media,
        segment_size_bytes=1 << 20,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
    )
    return Store.open(media)


def test_damage_that_no_file_refers_to() -> None:
    """Overwritten in part: the old bytes stay in the extent."""
    store = _roomy_store()
    ino = write_file(store, 1, b"whole", os.urandom(4 * CHUNK_BYTES))
    _, place, length = _extents(store, ino)[0]
    assert length > 2 * CHUNK_BYTES
    handle = store.open_file(ino, os.O_RDWR)
    store.write(handle, CHUNK_BYTES, os.urandom(CHUNK_BYTES))
    store.flush(handle, writer_killed=False)
    store.release(handle)
    with Damage(store.media) as damage:
        damage.flip((place + CHUNK_BYTES + 5) * 8)
        (finding,) = verify(store)
        assert read_file(store, ino)
    assert (finding.id, finding.severity) == ("data-unused-damaged", "warning")
    assert finding.uses == ()


def test_more_damage_than_the_engine_lists_at_once() -> None:
    """Every chunk of a large extent is named."""
    store = _roomy_store()
    ino = write_file(store, 1, b"large", os.urandom(100 * CHUNK_BYTES))
    places = _extents(store, ino)
    with Damage(store.media) as damage:
        for _, place, length in places:
            damage.write(place, bytes(length))
        found = verify(store)
    assert {finding.id for finding in found} == {"data-checksum"}
    covered = sorted((f.uses[0].file_offset, f.uses[0].length) for f in found)
    assert covered == [(n * CHUNK_BYTES, CHUNK_BYTES) for n in range(100)]
    assert all(f.expected != f.actual for f in found)


def test_checking_data_does_not_stop_at_the_first_damage(store: Store) -> None:
    directory = store.lookup(1, b"d").ino
    inos = [store.lookup(directory, b"file-%d" % number).ino for number in range(3)]
    with Damage(store.media) as damage:
        for ino in inos:
            damage.flip(_extents(store, ino)[0][1] * 8)
        found = verify(store)
    assert sorted(finding.ino or 0 for finding in found) == inos


def test_no_memory_is_an_error_not_a_finding(store: Store) -> None:
    from cxlfs.errors import OutOfMemoryError

    set_fault(FaultKind.ALLOCATE, 1)
    try:
        with pytest.raises(OutOfMemoryError):
            verify(store)
    finally:
        set_fault(FaultKind.ALLOCATE, 0)
