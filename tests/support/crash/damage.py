"""Units that are no power cut of a workload: damage to what is durable, and cuts of mkfs.

Damage is a few hundred places drawn by the seed, for planted bugs and as a short check; every bit
of everything is the business of tests/corruption.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

import numpy as np

from cxlfs.errors import CxlfsError, NotACxlfsError
from cxlfs.format import layout, roots, segments
from cxlfs.format.journal_chain import find_next
from cxlfs.format.journal_reader import Record, SegmentReader, read_header
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.crash import CrashCursor
from cxlfs.store import Store
from tests.support.crash.bench import Bench, base_image
from tests.support.crash.footprint import Durable
from tests.support.crash.masks import Chooser
from tests.support.crash.runner import Failure, Result, points
from tests.support.crash.tape import MEDIA_BYTES, State, difference, format_tiny, recovered_state
from tests.support.crash.world import WORLD

STAGE_LOOKED_AT = 90
STAGE_MKFS = 80
PLACES = 60
Change = tuple[int, bytes]
"""Media offset and new bytes."""


# --- damage ---------------------------------------------------------------------------------


def damage(bench: Bench, what: str, rng: random.Random) -> Result:
    """One kind of damage after another to what is durable of a store in use. What has a second copy
    must be as before; else the state is as before, or opening (or reading) says what is wrong.
    """
    log = bench.tape.media.events()
    cursor = CrashCursor(bench.tape.base, log, bench.tape.media.granularity)
    cursor.advance(len(log))
    image = cursor.image(cursor.in_flight().none())
    media = SimulatedMedia(len(image), bench.tape.media.granularity, image=image)
    if what == "chain":
        image = _continued(media)
        media.load(image)
    good = _outcome(media, image)
    assert isinstance(good, dict), good
    result = Result()
    has_copy = what in ("primary", "superblock")
    for changes in _KINDS[what](media, image, rng):
        result.points += 1
        memory = media.unguarded_memory()
        for offset, content in changes:
            memory[offset : offset + len(content)] = content
        result.images.add(hash(bytes(memory)) & (1 << 64) - 1)
        found = _outcome(media, image)
        if isinstance(found, str) and has_copy:
            problem = f"not read around: {found}"
        elif isinstance(found, dict) and found != good:
            problem = f"not noticed: {difference(found, good)}"
        else:
            continue
        places = [(offset, len(content)) for offset, content in changes]
        result.failures.append(Failure(0, "", f"{what} changed at {places}: {problem}"))
        break
    media.close()
    return result


def _outcome(media: SimulatedMedia, image: bytes) -> State | str:
    """The state, or what opening and reading complain of; ``image`` is loaded afterwards."""
    WORLD.enter(STAGE_LOOKED_AT)
    try:
        store = Store.open(media)
        try:
            if store.read_only or store.recovery.problems:
                return f"{store.read_only_reason} {store.recovery.problems}"
            return recovered_state(store)
        finally:
            store.abandon()
    except (CxlfsError, AssertionError, ValueError, LookupError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        media.load(image)


def _flip(image: bytes, offset: int, rng: random.Random) -> Change:
    return offset, bytes([image[offset] ^ 1 << rng.randrange(8)])


def _parts(media: SimulatedMedia) -> tuple[Store, roots.Root, list[Record]]:
    """A reader's view of the store; changes nothing."""
    copy = SimulatedMedia(media.size_bytes, media.granularity, image=media.image())
    store = Store.open(copy)
    block = store.superblock
    root = roots.candidates(roots.read_slots(media, block))[0]
    assert root.journal_segment is not None
    assert root.journal_mirror is not None
    header = read_header(
        media, block, root.journal_segment, root.journal_mirror, root.journal_epoch
    )
    assert header is not None
    records = list(SegmentReader(media, block, header, expected_lsn=root.journal_first_lsn))
    return store, root, records


def _primary(media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """One bit of the first copy of each record, many times."""
    store, _, records = _parts(media)
    store.abandon()
    for number in range(PLACES):
        record = records[number % len(records)]
        offset = record.media_offset + rng.randrange(record.length)
        yield [_flip(image, offset, rng)]


def _both(media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """A bit in each copy of a record that is not the last one."""
    store, root, records = _parts(media)
    block = store.superblock
    store.abandon()
    assert root.journal_segment is not None
    assert root.journal_mirror is not None
    apart = block.segment_offset(root.journal_mirror) - block.segment_offset(root.journal_segment)
    for number in range(PLACES):
        record = records[number % (len(records) - 1)]
        first = record.media_offset + rng.randrange(record.length)
        second = record.media_offset + apart + rng.randrange(record.length)
        yield [_flip(image, first, rng), _flip(image, second, rng)]


def _superblock(_media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """A bit of the first superblock copy."""
    for _ in range(PLACES):
        yield [_flip(image, rng.randrange(layout.SUPERBLOCK_DTYPE.itemsize - 4), rng)]


def _image(media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """A bit of the metadata image."""
    store, root, _ = _parts(media)
    start = store.superblock.segment_offset(root.image_segments[0]) + layout.SEGMENT_HEADER_BYTES
    store.abandon()
    for _ in range(PLACES * 4):
        yield [_flip(image, start + rng.randrange(root.image_bytes), rng)]


def _data(media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """A bit of file data."""
    store, _, _ = _parts(media)
    extents = store.volume.engine.list()
    places = list(zip(extents["media_offset"].tolist(), extents["length"].tolist(), strict=True))
    store.abandon()
    for _ in range(PLACES):
        offset, length = rng.choice(places)
        yield [_flip(image, offset + rng.randrange(length), rng)]


def _continued(media: SimulatedMedia) -> bytes:
    """The store, with records in a journal that no root names; dropped as by a kill."""
    store = Store.open(media)
    store.volume.continue_journal()
    for number in range(3):
        store.make_directory(1, b"continued-%d" % number, 0o755, 0, 0)
    store.abandon()
    return media.image()


def _chain(media: SimulatedMedia, image: bytes, rng: random.Random) -> Iterator[list[Change]]:
    """Both headers of that journal; then both continuations that lead there."""
    store, root, _ = _parts(media)
    block = store.superblock
    store.abandon()
    assert root.journal_segment is not None
    assert root.journal_mirror is not None
    first = read_header(media, block, root.journal_segment, root.journal_mirror, root.journal_epoch)
    assert first is not None
    reader = SegmentReader(media, block, first, expected_lsn=first.first_lsn)
    for _ in reader:
        pass
    successor = find_next(media, block, segments.read_all(media, block), reader.scan)
    assert successor is not None
    headers = [block.segment_offset(i) for i in (successor.index, successor.partner)]
    ends = [block.segment_offset(i) + reader.scan.end for i in (first.index, first.partner)]
    for _ in range(PLACES):
        for places, length in ((headers, layout.SEGMENT_DTYPE.itemsize), (ends, 192)):
            yield [_flip(image, place + rng.randrange(length), rng) for place in places]


def _stale(media: SimulatedMedia, _image: bytes, _rng: random.Random) -> Iterator[list[Change]]:
    """Both journal headers are those of an earlier use of their segments."""
    store, root, _ = _parts(media)
    block = store.superblock
    store.abandon()
    for age in range(1, root.journal_epoch):
        changes = []
        for index in (root.journal_segment, root.journal_mirror):
            assert index is not None
            header = segments.read(media, block, index)
            assert isinstance(header, segments.SegmentHeader)
            older = dataclasses.replace(header, epoch=header.epoch - age)
            changes.append((block.segment_offset(index), segments.encode(older, block.uuid)))
        yield changes


_KINDS: dict[str, Callable[[SimulatedMedia, bytes, random.Random], Iterator[list[Change]]]] = {
    "primary": _primary,
    "both": _both,
    "superblock": _superblock,
    "image": _image,
    "data": _data,
    "stale": _stale,
    "chain": _chain,
}
DAMAGES = tuple(_KINDS)


# --- mkfs -----------------------------------------------------------------------------------


def cut_mkfs(granularity: Granularity, rng: random.Random, *, over: bool) -> Result:
    """Over nothing, or over a store with the same geometry: the old store, none, or the new one;
    the new one once mkfs returned.
    """
    media = SimulatedMedia(MEDIA_BYTES, granularity)
    if over:
        media.load(base_image(granularity))
    media.restart()
    before = media.image()
    WORLD.enter(STAGE_MKFS)
    format_tiny(media, uuid=bytes(range(100, 116)))
    log, after = media.events(), media.image()
    cursor = CrashCursor(before, log, granularity)
    new = _outcome(media, before)
    old = _outcome(media, after) if over else None
    assert isinstance(new, dict), new
    result = Result()
    memory = np.frombuffer(media.unguarded_memory(), dtype="<u8")
    for event, _ in points(log):
        cursor.advance(event)
        cursor.drain_settled()
        in_flight = cursor.in_flight()
        durable = Durable(cursor.durable)
        chooser = Chooser(
            in_flight, rng, page=granularity is Granularity.PAGE, random_masks=8, pairs_max=50
        )
        result.points += 1
        for mask in (*chooser.corners(), *chooser.subsets(in_flight.all())):
            indexes, values = in_flight.patch(mask)
            result.images.add(durable.identity(durable.change(indexes, values)))
            memory[:] = cursor.durable
            memory[indexes] = values
            allowed = [new] if event == len(log) else [new, old, None]
            problem = _mkfs_problem(media, allowed)
            if problem is not None:
                result.failures.append(Failure(event, "", problem))
                break
    del memory
    media.close()
    return result


def _mkfs_problem(media: SimulatedMedia, allowed: list[object]) -> str | None:
    WORLD.enter(STAGE_LOOKED_AT)
    found: State | None
    try:
        store = Store.open(media)
        found = recovered_state(store)
        store.abandon()
    except NotACxlfsError:
        found = None
    except (CxlfsError, AssertionError) as error:
        return None if None in allowed else f"{type(error).__name__}: {error}"
    return None if found in allowed else "neither the old store, nor none, nor the new one"
