"""Verifying a mounted store: the passes run in slices, and the store works on in between."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from cxlfs.errors import CxlfsError, MediaError
from cxlfs.media import Granularity
from cxlfs.store import Store
from cxlfs.verify import (
    Finding,
    Progress,
    data_pass,
    image_pass,
    journal_pass,
    media_passes,
    namespace_pass,
    run_steps,
)
from tests.support.corrupt import Damage
from tests.support.stores import new_store, write_file


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small store takes many of them."""
    monkeypatch.setattr(data_pass, "SLICE_BYTES", 4096)
    monkeypatch.setattr(journal_pass, "RECORDS_AT_ONCE", 2)
    monkeypatch.setattr(media_passes, "HEADERS_AT_ONCE", 4)
    monkeypatch.setattr(image_pass, "PIECE_BYTES", 100)
    monkeypatch.setattr(namespace_pass, "ROWS_AT_ONCE", 3)


class Worker:
    """What users do between two slices: everything that moves things on the media."""

    def __init__(self, store: Store, rng: random.Random) -> None:
        self.store = store
        self.rng = rng
        self.handle = store.create(1, b"held-open", 0o644, 0, 0, os.O_RDWR)[1]
        self.size = 0

    def work(self) -> None:
        rng, store = self.rng, self.store
        name = b"file-%d" % rng.randrange(12)
        kind = rng.randrange(9)
        if kind <= 3:
            write_file(store, 1, name, rng.randbytes(rng.randrange(20_000)))
        elif kind == 4:
            if store.namespace.find(1, name):
                store.unlink(1, name)
        elif kind == 5:
            data = rng.randbytes(3_000)
            self.size += store.write(self.handle, self.size % 60_000, data)
        elif kind == 6:
            store.volume.rollover()
        elif kind == 7:
            store.maintain(float(rng.randrange(1 << 40)))
        elif store.namespace.find(1, name):
            store.rename(1, name, 1, b"file-%d" % rng.randrange(12))


def _steps(store: Store) -> Iterator[Finding | Progress]:
    return run_steps(store.media, structure_only=False, store=store)


@pytest.mark.parametrize("granularity", [Granularity.LINE, Granularity.PAGE])
def test_a_store_at_work_is_clean(rng: random.Random, granularity: Granularity) -> None:
    store = new_store(2 << 20, granularity)
    for number in range(12):
        write_file(store, 1, b"file-%d" % number, rng.randbytes(9_000))
    worker = Worker(store, rng)
    slices = 0
    for _ in range(12):
        for step in _steps(store):
            assert isinstance(step, Progress), step
            slices += 1
            for _ in range(rng.randrange(3)):
                worker.work()
    assert slices > 500, "the store was checked in many slices"
    assert store.volume.counters.rollovers > 20
    store.flush(worker.handle, writer_killed=False)
    store.release(worker.handle)
    store.close()
    assert list(run_steps(store.media, structure_only=False))[-1].pass_id == 11


def test_damage_is_found_while_the_store_works(rng: random.Random) -> None:
    store = new_store(2 << 20)
    ino = write_file(store, 1, b"victim", rng.randbytes(9_000))
    worker = Worker(store, rng)
    row = store.namespace.get(ino).content.export(0, 9_000)[0]
    infos, _ = store.volume.engine.describe(int(row["extent_id"]))
    Damage(store.media).flip(int(infos[0]["media_offset"]) * 8)
    found = []
    for step in _steps(store):
        if isinstance(step, Finding):
            found.append(step)
        worker.work()
    assert [(f.id, f.path) for f in found] == [("data-checksum", b"/victim")]
    assert store.get_xattr(ino, b"user.cxlfs.state") == b"damaged"


def test_the_last_record_is_checked_in_both_copies() -> None:
    """Of a mounted store it is known what is durable, so nothing can be a torn write."""
    store = new_store()
    write_file(store, 1, b"one", b"1")
    journal = store.volume.journal
    assert journal is not None
    place = store.superblock.segment_offset(journal.header.partner) + 4096
    with Damage(store.media) as damage:
        damage.flip((place + 70) * 8)
        found = [step for step in _steps(store) if isinstance(step, Finding)]
    assert [(f.id, f.media_offset) for f in found] == [("journal-copy-damaged", place)]


def test_records_lost_under_a_mounted_store() -> None:
    store = new_store()
    for number in range(3):
        write_file(store, 1, b"file-%d" % number, b"1")
    journal = store.volume.journal
    assert journal is not None
    with Damage(store.media) as damage:
        for index in (journal.header.index, journal.header.partner):
            damage.zero(store.superblock.segment_offset(index) + 4096, 64)
        found = [step for step in _steps(store) if isinstance(step, Finding)]
    assert [finding.id for finding in found] == ["journal-record-lost"]


def test_a_root_lost_under_a_mounted_store() -> None:
    """Here the second ring may not be behind."""
    store = new_store()
    slot = store.volume.root.generation % store.superblock.ring_slots
    place = store.superblock.ring_offsets[1] + slot * 4096
    with Damage(store.media) as damage:
        damage.zero(place, 2048)
        found = [step for step in _steps(store) if isinstance(step, Finding)]
    assert [(f.id, f.media_offset) for f in found] == [("root-copy-damaged", place)]


def test_a_store_that_stopped_writing_says_so() -> None:
    store = new_store()
    store.stop_writing("for a test")
    found = [step for step in _steps(store) if isinstance(step, Finding)]
    assert [finding.id for finding in found] == ["store-incomplete"]
    assert "for a test" in found[0].message


def test_unmounting_in_mid_run_is_a_clear_error() -> None:
    store = new_store()
    write_file(store, 1, b"file", b"x" * 30_000)
    steps = _steps(store)
    next(steps)
    store.close()
    with pytest.raises(MediaError, match="closed"):
        list(steps)


def test_closing_at_any_moment_raises_nothing_else() -> None:
    for stop_at in range(1, 60, 3):
        store = new_store(2 << 20)
        write_file(store, 1, b"file", b"x" * 30_000)
        steps = _steps(store)
        for _ in range(stop_at):
            next(steps, None)
        store.close()
        try:
            assert not [step for step in steps if isinstance(step, Finding)]
        except CxlfsError as error:
            assert "closed" in error.message  # noqa: PT017  both ends are right
