"""Pass 10: what counts as free or in use, against what is in use.

Never here: changing the count. (Asking the engine which segments died only moves them to the state
that they are in anyway.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cxlfs.store import Store
from cxlfs.store.space import State
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import Finding, make

_METADATA = (State.JOURNAL, State.IMAGE)


def check_space(context: Context) -> Steps:
    """One slice: all numbers belong to one moment."""
    store = context.store()
    if store is None:
        return
    space = store.volume.space
    if not store.read_only:
        space.collect_dead()
    yield from _check_data_segments(store)
    yield from _check_metadata_segments(store)
    free = space.states.count(State.FREE) - space.held_free_count
    if free != space.free_count:
        yield make("space-conflict", f"{free} segments are free, {space.free_count} are listed")
    yield Amount(len(space.states), len(space.states))


def _check_data_segments(store: Store) -> Iterator[Finding]:
    volume = store.volume
    block, space, engine = volume.superblock, volume.space, volume.engine
    offsets = engine.list()["media_offset"]
    segments = (offsets - block.first_segment_offset) // block.segment_size_bytes
    extents = np.bincount(segments.astype(np.int64), minlength=block.segment_count)
    used = engine.usage()
    for index, state in enumerate(space.states):
        place = block.segment_offset(index)
        count, used_bytes = int(extents[index]), int(used[index])
        if (count or used_bytes) and state is not State.DATA:
            message = f"segment {index} holds {count} extents, but counts as {state.name.lower()}"
            yield make("space-conflict", message, media_offset=place)
        elif used_bytes > block.segment_payload_bytes:
            message = f"segment {index} is said to hold {used_bytes} bytes: more than it has"
            yield make("space-conflict", message, media_offset=place)
        elif state is State.DATA and not count and not used_bytes and not space.is_open(index):
            message = f"segment {index} counts as data, but holds none"
            yield make("space-leaked", message, media_offset=place)


def _check_metadata_segments(store: Store) -> Iterator[Finding]:
    volume = store.volume
    block, states = volume.superblock, volume.space.states
    named = set(volume.current.segments) | set(volume.fallback.segments)
    for index in sorted(named):
        if states[index] not in _METADATA:
            message = f"segment {index} holds metadata, but counts as {states[index].name.lower()}"
            yield make("space-conflict", message, media_offset=block.segment_offset(index))
    for index, state in enumerate(states):
        if state in _METADATA and index not in named:
            message = f"segment {index} counts as {state.name.lower()}, but nothing names it"
            yield make("space-leaked", message, media_offset=block.segment_offset(index))
