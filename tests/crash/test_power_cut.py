"""One-operation workloads, the power cut at every fence: the old state or the new one."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cxlfs import layout
from cxlfs.errors import CxlfsError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.crash import EventLog
from cxlfs.native import EventKind
from cxlfs.store import Store
from tests.support.power_cut import (
    MEDIA_BYTES,
    Counts,
    State,
    Tape,
    cut_everywhere,
    format_tiny,
    judge,
    masks,
    state_of,
)
from tests.support.stores import CHUNK_BYTES, SEGMENT_BYTES, picture, read_file, write_file
from tests.support.workloads import (
    BIG,
    WORKLOADS,
    Workload,
    attributes,
    create_close,
    ino_of,
    overwrite,
    prepare,
    record,
    rollover,
)

MEDIA = [Granularity.LINE, Granularity.PAGE]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.__name__)
@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_power_cut(workload: Workload, granularity: Granularity, rng: random.Random) -> None:
    tape = record(workload, granularity)
    counts = cut_everywhere(tape, rng, workload.__name__)
    tape.media.close()
    print(f"{counts.points} points, {counts.images} images")
    assert counts.images > counts.points


@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
@pytest.mark.parametrize("name", ["create_close", "overwrite", "periodic_commit", "cleaning"])
def test_power_cut_in_recovery(name: str, granularity: Granularity, rng: random.Random) -> None:
    """Cut once in the workload, then at every fence of the recovery: the state stays."""
    workload = next(w for w in WORKLOADS if w.__name__ == name)
    tape = record(workload, granularity)
    cursor = tape.media.cursor()
    total = Counts()
    events = range(len(cursor.log))
    for event in sorted(rng.sample(events, min(len(events), 6))):
        cursor.advance(event)
        in_flight = cursor.in_flight()
        every = list(masks(in_flight, rng, page=granularity is Granularity.PAGE))
        image = cursor.image(rng.choice(every))
        counts = _cut_recovery(image, granularity, rng, f"{name} at {event}")
        total.points += counts.points
        total.images += counts.images
    tape.media.close()
    print(f"{total.points} points, {total.images} images")
    assert total.images > total.points > 0


def _cut_recovery(image: bytes, granularity: Granularity, rng: random.Random, label: str) -> Counts:
    media = SimulatedMedia(len(image), granularity, image=image)
    tape = Tape(media)
    tape.start()
    store = Store.open(media)
    try:
        tape.verb("recovery", lambda: None, commits=True)
        assert state_of(tape.images[0], granularity) == state_of(tape.images[1], granularity)
        return cut_everywhere(tape, rng, f"recovery after {label}", work_every=8)
    finally:
        store.abandon()
        media.close()


@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_killed_daemon_then_power_cut(granularity: Granularity, rng: random.Random) -> None:
    """Stores that were never fenced survive the kill of the daemon: what its successor showed must
    survive a power cut after that, though nothing the first one left behind was durable.
    """
    total = Counts()
    for workload in (create_close, overwrite, attributes, rollover):
        tape = record(workload, granularity)
        cursor = tape.media.cursor()
        for event in sorted(rng.sample(range(len(cursor.log)), min(len(cursor.log), 5))):
            total.images += _kill_then_cut(tape, event, rng, workload.__name__)
        tape.media.close()
    print(f"{total.images} images")
    assert total.images > 100


def _kill_then_cut(tape: Tape, event: int, rng: random.Random, label: str) -> int:
    """The log of the killed daemon up to ``event`` goes on with that of its successor."""
    granularity = tape.media.granularity
    cursor = tape.media.cursor()
    cursor.advance(event)
    seen = cursor.image(cursor.in_flight().all())
    media = SimulatedMedia(len(seen), granularity)
    media.load(tape.images[0])
    media.restart()
    _repeat(media, cursor.log, event)
    assert media.image() == seen
    store = Store.open(media)
    opened = len(media.events())
    shown = picture(store)
    write_file(store, 1, b"successor", b"durable")
    after = picture(store)
    store.abandon()
    images = 0
    successor = media.cursor()
    fences = successor.log.indexes(EventKind.FENCE)
    for place in [*fences[fences >= opened].tolist(), len(successor.log)]:
        successor.advance(place)
        in_flight = successor.in_flight()
        allowed = [shown, after] if place < len(successor.log) else [after]
        for mask in masks(in_flight, rng, page=granularity is Granularity.PAGE):
            cut = SimulatedMedia(len(seen), granularity, image=successor.image(mask))
            problem = judge(cut, allowed, work=False)
            cut.close()
            assert problem is None, f"{label}, killed at {event}, cut at {place}: {problem}"
            images += 1
    media.close()
    return images


def _repeat(media: SimulatedMedia, log: EventLog, end: int) -> None:
    """Do to ``media`` what a log says."""
    for index in range(end):
        kind, _thread, offset, length = log.entries[index]
        if kind == EventKind.STORE:
            media.store(offset, bytes(log.payload(index)))
        elif kind == EventKind.COPY:
            media.copy(offset, bytes(log.payload(index)))
        elif kind == EventKind.WRITE_BACK:
            media.write_back(offset, length)
        elif kind == EventKind.FENCE:
            media.fence()


@pytest.mark.parametrize("old_store", [False, True])
@pytest.mark.parametrize("granularity", MEDIA, ids=lambda g: g.name)
def test_power_cut_in_mkfs(granularity: Granularity, rng: random.Random, old_store: bool) -> None:
    """Afterwards: the old store, no store, or the new empty one; never a mixture."""
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    if old_store:
        format_tiny(media)
        store = Store.open(media)
        prepare(store)
        store.close()
    media.restart()
    old = state_of(media.image(), granularity) if old_store else None
    Store.format(
        media,
        segment_size_bytes=SEGMENT_BYTES,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
        uuid=bytes(range(100, 116)),
    )
    new = state_of(media.image(), granularity)
    cursor = media.cursor()
    outcomes: Counter[str] = Counter()
    for event in [*cursor.log.indexes(EventKind.FENCE).tolist(), len(cursor.log)]:
        cursor.advance(event)
        in_flight = cursor.in_flight()
        for mask in masks(in_flight, rng, page=granularity is Granularity.PAGE):
            cut = SimulatedMedia(MEDIA_BYTES, granularity, image=cursor.image(mask))
            outcomes[_mkfs_outcome(cut, old, new)] += 1
            cut.close()
    print(dict(outcomes))
    assert outcomes["new"] > 0
    assert outcomes["none"] > 0
    assert (outcomes["old"] > 0) == old_store
    assert cursor.image(cursor.in_flight().none()) == media.image()


def _mkfs_outcome(media: SimulatedMedia, old: State | None, new: State) -> str:
    try:
        store = Store.open(media)
    except CxlfsError:
        return "none"
    found = picture(store)
    store.abandon()
    assert found in (old, new), "neither the old store nor the new one"
    return "old" if found == old else "new"


def test_state_is_what_the_workload_means() -> None:
    """The judge compares states that recovery itself tells: they must be the right ones."""
    tape = record(overwrite, Granularity.LINE)
    store = Store.open(tape.media)
    assert read_file(store, ino_of(store, b"old")) == BIG
    assert store.get_xattr(ino_of(store, b"old"), b"user.a") == b"1"
    store.abandon()
    tape.media.close()
    before = SimulatedMedia(MEDIA_BYTES, Granularity.LINE, image=tape.images[0])
    store = Store.open(before)
    assert read_file(store, ino_of(store, b"old")) == b"old content " * 500
    store.abandon()
    before.close()
