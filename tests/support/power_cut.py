"""Power cuts on recorded media: run a workload, cut at every fence, recover, judge.

The states a cut may leave are told by the workload's own marks: the state when the last durable
verb returned, and every state up to the end of the verb that was running.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator

import numpy as np

from cxlfs import layout
from cxlfs.errors import CxlfsError
from cxlfs.media import Granularity, SimulatedMedia
from cxlfs.media.crash import CrashCursor, InFlight, Mask
from cxlfs.media.simulated import CrashTarget
from cxlfs.native import EventKind
from cxlfs.store import Store
from cxlfs.verify import run_passes
from tests.support.stores import CHUNK_BYTES, SEGMENT_BYTES, Entry, picture, write_file

SEGMENTS = 22
MEDIA_BYTES = SEGMENTS * SEGMENT_BYTES + 4 * layout.UNIT_BYTES_TEST
SUBSET_GROUPS_MAX = 5
RANDOM_MASKS = 4
SINGLES_MAX = 6

State = dict[bytes, Entry]


class PowerCutError(AssertionError):
    """A cut left a state that was not promised; the message repeats it."""


def format_tiny(media: SimulatedMedia) -> None:
    """22 segments of 64 KiB, the least that leaves room to work in."""
    Store.format(
        media,
        segment_size_bytes=SEGMENT_BYTES,
        unit_bytes=layout.UNIT_BYTES_TEST,
        chunk_bytes=CHUNK_BYTES,
        uuid=bytes(range(16)),
    )


def state_of(image: bytes, granularity: Granularity) -> State:
    """What recovery makes of an image."""
    media = SimulatedMedia(len(image), granularity, image=image)
    try:
        store = Store.open(media)
        try:
            return picture(store)
        finally:
            store.abandon()
    finally:
        media.close()


class Tape:
    """A workload being recorded: each verb is marked, with whether it is durable on return."""

    def __init__(self, media: SimulatedMedia) -> None:
        self.media = media
        self.durable: list[bool] = []
        self.names: list[str] = []
        self.images: list[bytes] = []
        self._page = media.granularity is Granularity.PAGE

    def start(self) -> None:
        """From here on; what was recorded before counts as durable."""
        self.media.restart()
        self.images = [self.media.image()]
        self.durable.clear()
        self.names.clear()

    def verb(
        self, name: str, action: Callable[[], object], *, commits: bool = False, late: bool = False
    ) -> None:
        """Run one verb. ``commits``: a commit point on every media. ``late``: none on any."""
        action()
        self.durable.append(commits or not (late or self._page))
        self.names.append(name)
        self.media.mark(len(self.names))
        self.images.append(self.media.image())


@dataclasses.dataclass
class Counts:
    points: int = 0
    images: int = 0


def masks(in_flight: InFlight, rng: random.Random, *, page: bool) -> Iterator[Mask]:
    """Which words reached the media: all subsets of few lines, else a choice of them."""
    seen: set[bytes] = set()
    for mask in _all_masks(in_flight, rng, page=page):
        key = mask.tobytes()
        if key not in seen:
            seen.add(key)
            yield mask


def _all_masks(in_flight: InFlight, rng: random.Random, *, page: bool) -> Iterator[Mask]:
    yield in_flight.none()
    if not len(in_flight):
        return
    yield in_flight.all()
    unit = 512 if page else 64
    _numbers, count = in_flight.groups(unit)
    if count <= SUBSET_GROUPS_MAX:
        for bits in range(1, (1 << count) - 1):
            chosen = np.array([bits >> i & 1 for i in range(count)], dtype=np.bool_)
            yield in_flight.choose_groups(unit, chosen)
    else:
        for event in np.unique(in_flight.events).tolist()[-SINGLES_MAX:]:
            yield in_flight.until(event)
        for group in rng.sample(range(count), min(count, SINGLES_MAX)):
            chosen = np.ones(count, dtype=np.bool_)
            chosen[group] = False
            yield in_flight.choose_groups(unit, chosen)
    for _ in range(RANDOM_MASKS):
        words = np.array([rng.random() < 0.5 for _ in range(len(in_flight))], dtype=np.bool_)
        yield words
        chosen = np.array([rng.random() < 0.5 for _ in range(count)], dtype=np.bool_)
        yield in_flight.choose_groups(unit, chosen)


def allowed_states(tape: Tape, states: list[State], finished: int) -> list[State]:
    """After ``finished`` verbs returned: from the last durable one to the end of the next."""
    first = max((i + 1 for i in range(finished) if tape.durable[i]), default=0)
    return states[first : min(finished + 2, len(states))]


def judge(
    media: SimulatedMedia, allowed: list[State] | Callable[[Store], bool], *, work: bool = True
) -> str | None:
    """Recover, compare, recover again, then use the store; None when all is well."""
    try:
        store = Store.open(media)
        if store.read_only or store.recovery.lost or store.recovery.problems:
            return f"recovery complains: {store.read_only_reason} {store.recovery.problems}"
        found = picture(store)
        if callable(allowed):
            if not allowed(store):
                return f"unexpected state {describe(found)}"
        elif found not in allowed:
            return f"{describe(found)} is none of {[describe(s) for s in allowed]}"
        store.abandon()
        store = Store.open(media)
        if picture(store) != found:
            return f"a second opening gives {describe(picture(store))}, not {describe(found)}"
        if work:
            findings = list(run_passes(media, structure_only=False))
            if findings:
                return f"verify finds {findings}"
            _work(store)
        store.close()
    except CxlfsError as error:
        return f"{type(error).__name__}: {error.message}"
    return None


def _work(store: Store) -> None:
    """The store can be used: create, overwrite, rename, delete everything that was there."""
    before = store.statfs().free_bytes
    write_file(store, 1, b"after-the-cut", b"first")
    write_file(store, 1, b"after-the-cut", b"second" * 1000)
    store.rename(1, b"after-the-cut", 1, b"renamed")
    store.unlink(1, b"renamed")
    if store.statfs().free_bytes != before:
        raise PowerCutError("free space differs after create and delete")
    _delete_all(store, 1)


def _delete_all(store: Store, ino: int) -> None:
    for name, child in list((store.namespace.get(ino).entries or {}).items()):
        if store.namespace.get(child).is_directory:
            _delete_all(store, child)
            store.remove_directory(ino, name)
        else:
            store.unlink(ino, name)


def describe(state: State) -> dict[str, str]:
    """Short enough for a message."""
    return {
        os.fsdecode(path): f"{e.kind.name} {e.ino} {e.size} {e.state.decode()} n{e.nlink} "
        f"{hash(e.content) & 0xFFFF:04x} c{e.ctime_ns % 10**10}"
        for path, e in state.items()
    }


def cut_everywhere(tape: Tape, rng: random.Random, label: str, *, work_every: int = 4) -> Counts:
    """Cut the power at every fence and mark of a tape, and judge each image."""
    media = tape.media
    states = [state_of(image, media.granularity) for image in tape.images]
    cursor = media.cursor()
    counts = Counts()
    target = CrashTarget(cursor)
    try:
        finished = 0
        for event, kind in _points(cursor):
            in_flight = target.advance(event)
            if kind == EventKind.MARK:
                finished += 1
            counts.points += 1
            allowed = allowed_states(tape, states, finished)
            for mask in masks(in_flight, rng, page=media.granularity is Granularity.PAGE):
                with target.crashed(in_flight, mask) as crashed:
                    problem = judge(crashed, allowed, work=counts.images % work_every == 0)
                counts.images += 1
                if problem is not None:
                    verb = tape.names[min(finished, len(tape.names) - 1)]
                    raise PowerCutError(
                        f"{label}: cut at event {event} ({finished} verbs done, in {verb}), "
                        f"mask {mask.sum()} of {len(mask)} words: {problem}"
                    )
    finally:
        target.close()
    return counts


def _points(cursor: CrashCursor) -> Iterator[tuple[int, int]]:
    """Before every fence, and behind every mark and the end."""
    entries = cursor.log.entries
    for index, entry in enumerate(entries):
        if entry[0] == EventKind.FENCE:
            yield index, EventKind.FENCE
        elif entry[0] == EventKind.MARK:
            yield index + 1, EventKind.MARK
    yield len(entries), EventKind.FENCE
