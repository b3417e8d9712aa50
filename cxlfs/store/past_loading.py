"""History from the media: which rows of the archive still have their data, at an opening.

Other modules store batches (``past_archive``) and take them apart (``format.history``).

Invariants
- A row comes back only if each data segment of it has the epoch that its batch names. No extent of
  a row lies where a live one or another one does.
- Extents that live files share keep what image and journal said of them.
- A damaged or impossible batch costs its own rows, never the opening. File data is not read.
- Nothing is written, and an opening that is repeated finds the same.
"""

from __future__ import annotations

import dataclasses
import logging
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from cxlfs.errors import CorruptionError, MediaError
from cxlfs.format import history, layout, segments
from cxlfs.native.extents import Counting
from cxlfs.native.maps import FileMap
from cxlfs.store.past_rows import ArchiveSegment, Row

if TYPE_CHECKING:
    from cxlfs.format.superblock import Superblock
    from cxlfs.media import Media
    from cxlfs.native.extents import Engine, Rows

    Integers: TypeAlias = npt.NDArray[np.int64]

log = logging.getLogger(__name__)

_TYPE_BITS = 0o170000
_CONTRADICTIONS_MAX = 64
"""Of batches that are left out."""
_MODE = (layout.HISTORY_ROW_DTYPE.names or ()).index("mode")


@dataclasses.dataclass(slots=True)
class LoadedHistory:
    """``rows`` in the order of death; ``segments``: those of the archive, the oldest first."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    segments: list[ArchiveSegment] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Batch:
    """A batch whose numbers were checked, and what of it still has its data."""

    batch: history.Batch
    texts: list[history.Texts]
    segment: ArchiveSegment
    firsts: Integers
    """Where the references of each row begin; and the end."""
    is_whole: npt.NDArray[np.bool_]
    """Of each row: its data is there."""


class Loader:
    """Reads the archive of one store. ``headers``: every good segment header."""

    def __init__(
        self,
        media: Media,
        block: Superblock,
        engine: Engine,
        headers: Iterable[segments.SegmentHeader],
        *,
        last_lsn: int,
        next_extent_id: int,
    ) -> None:
        self._media = media
        self._block = block
        self._engine = engine
        self._last_lsn = last_lsn
        self._next_extent_id = next_extent_id
        self._contradictions = 0
        self._archive: list[segments.SegmentHeader] = []
        self.epochs = np.zeros(block.segment_count, np.uint64)
        """Of each data segment; 0: it is none."""
        for header in headers:
            if header.role == layout.ROLE_DATA:
                self.epochs[header.index] = header.epoch
            elif header.role == layout.ROLE_HISTORY:
                self._archive.append(header)
        self._archive.sort(key=lambda header: header.epoch)

    def load(self, in_use: frozenset[int]) -> LoadedHistory:
        """All rows that can be had; ``in_use``: segments that hold something else, whatever their
        headers say. Raises OutOfMemoryError.
        """
        found, batches = LoadedHistory(), list[_Batch]()
        for header in self._archive:
            if header.index in in_use:
                continue
            segment = ArchiveSegment.of(self._block, header)
            found.segments.append(segment)
            batches += self._read(segment)
        rows = self._take_possible(batches)
        self._engine.drop_unreferenced()
        found.rows = [rows[key] for key in sorted(rows)]
        return found

    # --- batches ----------------------------------------------------------------------------

    def _read(self, segment: ArchiveSegment) -> list[_Batch]:
        found = []
        try:
            for end, batch in history.scan(
                self._media, segment.start, segment.size_bytes, seed=segment.seed
            ):
                segment.used_bytes = end
                checked = None if batch is None else self._checked(batch, segment)
                if checked is not None:
                    found.append(checked)
        except MediaError as error:
            log.warning("a part of history cannot be read: %s", error.message)
            segment.used_bytes = segment.size_bytes  # nothing is stored behind it
        return found

    def _checked(self, batch: history.Batch, segment: ArchiveSegment) -> _Batch | None:
        """None: it is impossible, or later than what the journal has."""
        if batch.lsn > self._last_lsn:
            return None
        try:
            texts = history.check(batch)
            firsts = np.zeros(len(batch.rows) + 1, np.int64)
            np.cumsum(batch.rows["ref_count"], out=firsts[1:])
            is_whole = self._whole_rows(batch, firsts)
        except CorruptionError as error:
            log.warning("a batch of history is left out: %s", error.message)
            return None
        return _Batch(batch, texts, segment, firsts, is_whole)

    def _whole_rows(self, batch: history.Batch, firsts: Integers) -> npt.NDArray[np.bool_]:
        """Rows all of whose extents lie in segments that were not taken into use since."""
        extents, refs = batch.extents, batch.references
        ids = extents["id"]
        if not ids.all() or (ids[1:] <= ids[:-1]).any() or (ids >= self._next_extent_id).any():
            raise CorruptionError("impossible extent numbers", structure="history")
        named = batch.segments[batch.segments["index"] < self._block.segment_count]
        good = named["index"][self.epochs[named["index"].astype(np.int64)] == named["epoch"]]
        size = self._block.segment_size_bytes
        offsets = extents["media_offset"]
        inside = offsets - self._block.first_segment_offset  # wraps for what lies before
        is_there = np.isin(inside // size, good) & (inside % size >= layout.SEGMENT_HEADER_BYTES)
        wanted = refs["extent_id"]
        places = np.searchsorted(ids, wanted)
        is_hole = wanted == 0
        known = is_hole | (places < len(ids))
        known[~is_hole & known] = ids[places[~is_hole & known]] == wanted[~is_hole & known]
        if not known.all():
            raise CorruptionError("a reference to no extent", structure="history")
        lost = ~is_hole
        lost[lost] = ~is_there[places[lost]]
        owners = np.repeat(np.arange(len(batch.rows)), np.diff(firsts))
        is_whole: npt.NDArray[np.bool_] = np.bincount(owners[lost], minlength=len(batch.rows)) == 0
        return is_whole

    # --- rows -------------------------------------------------------------------------------

    def _take_possible(self, batches: Sequence[_Batch]) -> dict[tuple[int, int], Row]:
        """The rows of all batches but those that contradict what is known, found by halves. An
        image with many of them loses its history, and the opening is not delayed.
        """
        if self._contradictions > _CONTRADICTIONS_MAX:
            return {}
        try:
            return self._take(batches)
        except CorruptionError as error:
            if len(batches) == 1:
                self._contradictions += 1
                log.warning("a batch of history is left out: %s", error.message)
                return {}
        half = len(batches) // 2
        return self._take_possible(batches[:half]) | self._take_possible(batches[half:])

    def _take(self, batches: Sequence[_Batch]) -> dict[tuple[int, int], Row]:
        """The rows of batches, by key: of one that several have, what the last one says.

        Raises CorruptionError: something contradicts what is known, and no row was taken.
        """
        parts = [(each, which) for each, which in _chosen(batches) if len(which)]
        if not parts:
            return {}
        contents = self._contents(parts)
        rows: dict[tuple[int, int], Row] = {}
        for batch, which in parts:
            texts = batch.texts
            values = batch.batch.rows[which].tolist()
            for index, told in zip(which.tolist(), values, strict=True):
                is_file = stat.S_ISREG(told[_MODE])
                row = Row.from_media(told, texts[index], next(contents) if is_file else None)
                rows[row.key] = row
                batch.segment.add(row)
        return rows

    def _contents(self, parts: list[tuple[_Batch, Integers]]) -> _Contents:
        """The contents of the files among the chosen rows, in their order, in the engine."""
        owners, sizes, counts, refs, used = [], [], [], [], []
        for batch, chosen in parts:
            rows = batch.batch.rows[chosen]
            is_file = rows["mode"] & np.uint32(_TYPE_BITS) == stat.S_IFREG
            rows = rows[is_file]
            owners.append(rows["ino"])
            sizes.append(rows["size"])
            counts.append(rows["ref_count"])
            which = chosen[is_file]
            starts, ends = batch.firsts[which], batch.firsts[which + 1]
            mask = np.zeros(len(batch.batch.references) + 1, np.int64)
            np.add.at(mask, starts, 1)
            np.add.at(mask, ends, -1)
            part = batch.batch.references[np.cumsum(mask)[:-1] > 0]
            refs.append(part)
            is_used = np.isin(batch.batch.extents["id"], part["extent_id"])
            used.append((batch.batch, np.flatnonzero(is_used)))
        self._define(used)
        firsts = np.zeros(sum(map(len, owners)) + 1, np.uint64)
        np.cumsum(np.concatenate(counts), out=firsts[1:])
        addresses = self._engine.import_contents(
            np.concatenate(owners), np.concatenate(sizes), firsts, np.concatenate(refs)
        )
        return _Contents(self._engine, np.concatenate(owners), addresses)

    def _define(self, used: list[tuple[history.Batch, Integers]]) -> None:
        """Extents that image and journal do not know, or know a shorter state of."""
        infos = np.concatenate([batch.extents[which] for batch, which in used])
        sums = np.concatenate([batch.checksums for batch, _ in used])
        starts = np.cumsum([0, *(len(batch.checksums) for batch, _ in used)])[:-1]
        infos["crc_index"] += np.repeat(starts.astype(np.uint64), [len(which) for _, which in used])
        order = np.lexsort((infos["length"], infos["id"]))
        infos = infos[order]
        is_longest = np.append(infos["id"][1:] != infos["id"][:-1], True)[: len(infos)]
        infos = infos[is_longest]
        known = self._engine.list()
        _require_apart(known, infos)
        by_id = known[np.argsort(known["id"], kind="stable")]
        places = np.searchsorted(by_id["id"], infos["id"])
        lengths = np.zeros(len(infos), np.uint64)
        is_known = places < len(by_id)
        is_known[is_known] = by_id["id"][places[is_known]] == infos["id"][is_known]
        lengths[is_known] = by_id["length"][places[is_known]]
        self._engine.define(infos[infos["length"] > lengths], sums)


def _chosen(batches: Sequence[_Batch]) -> Iterator[tuple[_Batch, Integers]]:
    """Of each batch the rows whose data is there, and that no later batch has."""
    counts = [len(batch.batch.rows) for batch in batches]
    if not batches:
        return
    rows = np.concatenate([batch.batch.rows[["ended_lsn", "operation"]] for batch in batches])
    order = np.lexsort((np.arange(len(rows)), rows["operation"], rows["ended_lsn"]))
    ordered = rows[order]
    is_last = np.ones(len(rows), np.bool_)
    is_last[order[:-1]] = ordered[1:] != ordered[:-1]
    is_last &= np.concatenate([batch.is_whole for batch in batches])
    parts = np.split(is_last, np.cumsum(counts)[:-1])
    yield from ((batch, np.flatnonzero(part)) for batch, part in zip(batches, parts, strict=True))


class _Contents:
    """Contents that count as past from now on, one after the other."""

    def __init__(
        self, engine: Engine, owners: npt.NDArray[np.uint64], addresses: npt.NDArray[np.uintp]
    ) -> None:
        self._engine = engine
        self._left = zip(owners.tolist(), addresses.tolist(), strict=True)

    def __next__(self) -> FileMap:
        owner, address = next(self._left)
        content = FileMap.at(self._engine, owner, address)
        content.count_as(Counting.PAST)
        return content


def _require_apart(known: Rows, infos: Rows) -> None:
    """Raises CorruptionError: two extents share bytes, or one lies in two places."""
    ids = np.concatenate((known["id"], infos["id"]))
    starts = np.concatenate((known["media_offset"], infos["media_offset"]))
    ends = starts + np.concatenate((known["length"], infos["length"]))
    order = np.lexsort((ends, starts))
    ids, starts, ends = ids[order], starts[order], ends[order]
    is_shared = starts[1:] < ends[:-1]
    if (ends < starts).any() or (ids[1:] != ids[:-1])[is_shared].any():
        raise CorruptionError("two extents overlap on the media", structure="history")
    order = np.argsort(ids, kind="stable")
    ids, starts = ids[order], starts[order]
    if (starts[1:] != starts[:-1])[ids[1:] == ids[:-1]].any():
        raise CorruptionError("an extent lies in two places", structure="history")
