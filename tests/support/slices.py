"""Rollovers in the smallest steps, between the verbs of tests, and images that can be compared."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from cxlfs.store import Store, export, rolling, rollover
from cxlfs.verify.columns import Columns


@contextlib.contextmanager
def small_slices(*, at_once_bytes: int = 0) -> Iterator[None]:
    """Slices of one or two things each; every image is worth slicing, whatever its size."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "INODES_PER_SLICE", 2)
        patch.setattr(export, "NAMES_PER_SLICE", 2)
        patch.setattr(export, "EXTENTS_PER_SLICE", 8)
        patch.setattr(export, "REFERENCES_AT_ONCE", 0)
        patch.setattr(export, "REFERENCES_PER_SLICE", 1)
        patch.setattr(rollover, "PIECE_BYTES", 1024)
        patch.setattr(rolling, "AT_ONCE_BYTES", at_once_bytes)
        yield


def step(store: Store) -> bool:
    """One step of a rollover, which begins when none is under way."""
    rollovers = store.volume.rollovers
    if store.volume.journal is None:
        return False  # it was closed
    if rollovers.running is None and not store.read_only:
        rollovers.begin()
        return True
    return rollovers.step()


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What an image says, whatever the order in which it says so."""

    counters: tuple[int, int]
    inodes: dict[int, tuple[object, ...]]
    names: dict[tuple[int, bytes], int]
    strings: dict[tuple[int, bytes], bytes]
    extents: dict[int, tuple[object, ...]]


def told_by(columns: Columns) -> Told:
    refs, counts = columns.references.tolist(), columns.reference_counts()
    ends = np.cumsum(counts).tolist()
    inodes = {}
    when_named = (columns.inodes.dtype.names or ()).index("named_lsn")  # replay may not know it
    for index, row in enumerate(columns.inodes.tolist()):
        first = ends[2 * index - 1] if index else 0
        said = (*row[:when_named], *row[when_named + 1 :])
        inodes[row[0]] = (said, tuple(refs[first : ends[2 * index + 1]]))
    names = {}
    for parent, ino, start, length, _ in columns.names.tolist():
        names[parent, columns.strings[start : start + length]] = ino
    strings = {}
    for row in (*columns.xattrs.tolist(), *columns.symlinks.tolist()):
        ino, start, length, size = row
        name = columns.strings[start : start + length]
        strings[ino, name] = columns.strings[start + length : start + length + size]
    extents = {}
    for number, offset, length, first, chunk, count in columns.extents.tolist():
        sums = tuple(columns.crcs[first : first + count].tolist())
        extents[number] = (offset, length, chunk, sums)
    counters = (columns.next_ino, columns.next_extent_id)
    assert len(inodes) == len(columns.inodes)
    assert len(names) == len(columns.names)
    assert list(columns.names["parent"]) == sorted(columns.names["parent"])
    return Told(counters, inodes, names, strings, extents)
