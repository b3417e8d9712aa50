"""Passes 7 and 9: extents, and the references of files into them.

Never here: reading file data.

Invariants
- Every number is taken as hostile: sums are formed only where they cannot wrap.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cxlfs.format import layout
from cxlfs.format.superblock import Superblock
from cxlfs.store.space import State
from cxlfs.verify.columns import Columns, Rows
from cxlfs.verify.context import Amount, Context, Steps
from cxlfs.verify.findings import Finding, make

REFERENCES_AT_ONCE = 16384
_HALF = np.uint64(1 << 62)
"""Numbers below this can be added up without wrapping."""
Mask = npt.NDArray[np.bool_]


# --- 7: extents -----------------------------------------------------------------------------


def check_extents(context: Context) -> Steps:
    """Each extent lies in one data segment, behind its header, and shares no byte with another."""
    block, columns = context.superblock, context.columns()
    if block is None or columns is None:
        return
    rows = columns.extents
    impossible = _impossible_extents(block, columns)
    for index in np.flatnonzero(impossible).tolist():
        yield _extent_finding(context, columns, rows[index], _why_impossible(block, columns, index))
    metadata = _metadata_segments(context)
    good = rows[~impossible]
    segments = (good["media_offset"] - block.first_segment_offset) // block.segment_size_bytes
    for index in np.flatnonzero(np.isin(segments, metadata)).tolist():
        message = f"it lies in segment {int(segments[index])}, which holds metadata"
        yield _extent_finding(context, columns, good[index], message)
    order = np.argsort(good["media_offset"], kind="stable")
    starts = good["media_offset"][order]
    ends = starts + good["length"][order]
    for position in np.flatnonzero(starts[1:] < ends[:-1]).tolist():
        row, other = good[order[position + 1]], good[order[position]]
        message = (
            f"extents {int(other['id'])} and {int(row['id'])} share the media "
            f"from {int(row['media_offset'])} on"
        )
        yield _extent_finding(context, columns, row, message, kind="extent-overlap")
    yield Amount(len(rows), len(rows))


def _impossible_extents(block: Superblock, columns: Columns) -> Mask:
    rows = columns.extents
    size, header = block.segment_size_bytes, layout.SEGMENT_HEADER_BYTES
    end = block.first_segment_offset + block.segment_count * size
    offsets, lengths = rows["media_offset"], rows["length"]
    inside = (offsets - block.first_segment_offset) % size
    chunks = lengths // block.chunk_bytes + (lengths % block.chunk_bytes != 0)
    bad: Mask = (
        (rows["id"] == 0)
        | (rows["id"] >= columns.next_extent_id)
        | (lengths == 0)
        | (lengths > size - header)
        | (offsets < block.first_segment_offset)
        | (offsets >= end)
        | (inside < header)
        | (inside > size - np.minimum(lengths, size))
        | (chunks != rows["crc_count"])
        | (rows["first_chunk"] != 0)
        | (rows["crc_index"] > len(columns.crcs))
        | (rows["crc_count"] > len(columns.crcs) - np.minimum(rows["crc_index"], len(columns.crcs)))
    )
    _, first = np.unique(rows["id"], return_index=True)
    twice = np.ones(len(rows), dtype=np.bool_)
    twice[first] = False
    return bad | twice


def _why_impossible(block: Superblock, columns: Columns, index: int) -> str:
    row = columns.extents[index]
    extent_id, offset, length = (int(row[name]) for name in ("id", "media_offset", "length"))
    if not 0 < extent_id < columns.next_extent_id:
        return f"its number is not below {columns.next_extent_id}"
    if int(np.count_nonzero(columns.extents["id"] == row["id"])) > 1:
        return "its number appears twice"
    chunks = -(-length // block.chunk_bytes)
    if length and chunks != int(row["crc_count"]):
        return f"{chunks} chunks have {int(row['crc_count'])} checksums"
    return f"{length} bytes at media offset {offset} are not inside one segment's payload"


def _metadata_segments(context: Context) -> npt.NDArray[np.uint64]:
    store = context.store()
    if store is not None:
        states = store.volume.space.states
        found = [i for i, s in enumerate(states) if s in (State.JOURNAL, State.IMAGE)]
    else:
        found = [] if context.newest is None else list(context.newest.segments)
    return np.array(found, dtype=np.uint64)


def _extent_finding(
    context: Context,
    columns: Columns,
    row: np.void,
    message: str,
    *,
    kind: str = "extent-impossible",
) -> Finding:
    extent_id = int(row["id"])
    hits = np.flatnonzero(columns.references["extent_id"] == row["id"])
    owner = int(columns.reference_owners()[hits[0]]) if len(hits) else None
    if kind == "extent-impossible":
        message = f"extent {extent_id}: {message}"
    return make(
        kind,
        message,
        media_offset=int(row["media_offset"]),
        ino=owner,
        path=context.path_of(owner),
    )


# --- 9: references --------------------------------------------------------------------------


def check_references(context: Context) -> Steps:
    """Every piece of a file lies inside an extent, in order, and before the end of the file."""
    columns = context.columns()
    if columns is None:
        return
    yield from _check_counts(columns)
    known = np.sort(columns.extents, order="id")
    contents = _contents(columns)
    total = len(columns.references)
    for start in range(0, total, REFERENCES_AT_ONCE):
        for index, problem in _bad_references(columns.references, contents, known, start):
            content = int(contents.of_reference[index])
            ino = int(columns.inodes["ino"][content // 2]) if content >= 0 else None
            version = "kept aside" if content % 2 else "committed"
            place = int(columns.references["file_offset"][index])
            message = f"{version} content at file offset {place}: {problem}"
            yield make("reference-impossible", message, ino=ino, path=context.path_of(ino))
        yield Amount(min(start + REFERENCES_AT_ONCE, total), total)
    yield Amount(total, total)


def _check_counts(columns: Columns) -> Iterator[Finding]:
    claimed = sum(int(n) for name in ("ref_count", "aside_ref_count") for n in columns.inodes[name])
    if claimed != len(columns.references):
        message = f"the inodes claim {claimed} references, there are {len(columns.references)}"
        yield make("reference-impossible", message)


class _Contents(NamedTuple):
    """Content 2i is the committed one of the inode in row i, 2i + 1 the one kept aside."""

    of_reference: npt.NDArray[np.int64]
    """-1 for references that no inode claims."""
    sizes: npt.NDArray[np.uint64]


def _contents(columns: Columns) -> _Contents:
    sizes = np.stack([columns.inodes["size"], columns.inodes["aside_size"]], axis=1)
    found = np.full(len(columns.references), -1, dtype=np.int64)
    owners = np.repeat(np.arange(2 * len(columns.inodes)), columns.reference_counts())
    found[: len(owners)] = owners
    return _Contents(found, sizes.reshape(-1))


def _bad_references(
    references: Rows, contents: _Contents, known: Rows, start: int
) -> Iterator[tuple[int, str]]:
    """Index and problem of each in [start, start + REFERENCES_AT_ONCE)."""
    first = max(start - 1, 0)  # the one before, to compare with
    rows = references[first : start + REFERENCES_AT_ONCE]
    owners = contents.of_reference[first : start + REFERENCES_AT_ONCE]
    offsets, lengths = rows["file_offset"], rows["length"]
    sane = (offsets < _HALF) & (lengths < _HALF) & (rows["extent_offset"] < _HALF)
    ends = np.where(sane, offsets + lengths, np.uint64(0))
    extent_ends = np.where(sane, rows["extent_offset"] + lengths, np.uint64(0))
    if len(known):
        places = np.minimum(np.searchsorted(known["id"], rows["extent_id"]), len(known) - 1)
        found = known["id"][places] == rows["extent_id"]
        room = known["length"][places]
    else:
        found, room = np.zeros(len(rows), dtype=np.bool_), np.zeros(len(rows), dtype=np.uint64)
    over = np.zeros(len(rows), dtype=np.bool_)
    over[1:] = (offsets[1:] < ends[:-1]) & (owners[1:] == owners[:-1])
    beyond = (owners < 0) | (ends > contents.sizes[owners]) if len(contents.sizes) else ~found
    problems = (
        (~sane | (lengths == 0), "its numbers are impossible"),
        (~found, "its extent does not exist"),
        (found & (extent_ends > room), "it reaches beyond its extent"),
        (sane & beyond, "it reaches beyond the end of the file"),
        (sane & over, "it overlaps the piece before"),
    )
    told = np.zeros(len(rows), dtype=np.bool_)
    told[: start - first] = True
    for mask, problem in problems:
        for index in np.flatnonzero(mask & ~told).tolist():
            yield first + index, problem
        told |= mask
