"""Parts of checkpoints that are the same bytes are kept once: frozen layers, the base weights
beside an adapter, copies. It happens in the background, after the save.

A file at rest is compared with the one that it most likely repeats: of the same user and size, the
newest of those that were committed before it, in its directory or under its name in a directory
beside. Between two steps of a training that changes everything nothing is the same, and a few
samples tell so.

Other modules copy and re-aim references (``mover``), and gather pieces (``defragmenter``).

Invariants
- Bytes are compared, not checksums. Both sides are verified in the same pass.
- Only what rests changes, and only what no other file shares. Not one byte of a file changes.
- What lies page by page as in its file, for programs that map it, does so afterwards.
- No more than RATE_BYTES_PER_SECOND are read.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cxlfs.errors import CorruptionError, MediaError, NoSpaceError
from cxlfs.native.extents import MOVE_DTYPE
from cxlfs.store.namespace import FileKind
from cxlfs.store.resting import Allowance, FilesAtRest, rests
from cxlfs.types import ROOT_INO
from cxlfs.units import KIB, MIB

if TYPE_CHECKING:
    import numpy.typing as npt

    from cxlfs.native.maps import FileMap
    from cxlfs.store.mover import Mover
    from cxlfs.store.namespace import Inode
    from cxlfs.store.volume import Volume

log = logging.getLogger(__name__)

RATE_BYTES_PER_SECOND = 64 * MIB
_WINDOW_BYTES = 4 * MIB
_BLOCK_BYTES = 64 * KIB
"""Bytes are the same by blocks of this size,"""
_BLOCKS_MIN = 4
"""and at least so many in a row: a reference costs 40 bytes of memory, and one more seek."""
_FILE_BYTES_MIN = MIB
_SAMPLES, _SAMPLE_BYTES = 8, 4 * KIB
"""Of a window; if none of them is the same, nothing in it is looked at. A chunk is verified for
each byte that is read with a check, so samples are read without one: they decide nothing."""
_REFS_MAX = 64
"""A window in more references is left to the defragmenter."""
_BESIDE_MAX = 256
"""Names that are looked at in a directory to find what a file repeats."""
_PAGE_BYTES = (4 * KIB, 2 * MIB)


class _Pair(NamedTuple):
    """A file, and the one whose bytes it may have. The numbers of their commits then."""

    inode: Inode
    like: Inode
    commits: tuple[int, int]


class Deduplicator:
    """One for each volume. ``is_on``: the store was opened with it."""

    def __init__(self, volume: Volume, mover: Mover, *, is_on: bool) -> None:
        self.volume = volume
        self.mover = mover
        self.is_on = is_on
        self.shared_bytes = 0
        """Kept once instead of twice, since the store was opened."""
        self._files: FilesAtRest[int] = FilesAtRest(volume.namespace)
        """Seen: the commit of each file as of which it was compared."""
        self._pair: _Pair | None = None
        self._offset = 0
        self._allowance = Allowance()

    def step(self, now: float) -> bool:
        """One short piece of work (``now``: monotonic seconds); True when there is more at once.
        Raises MediaError when the store stopped writing.
        """
        if not self.is_on or self.volume.read_only:
            return False
        if not self._allowance.grow(now, RATE_BYTES_PER_SECOND):
            return False
        pair = self._pair if self._pair is not None and _is_as_it_was(self._pair) else None
        if pair is None:
            self._pair = pair = self._next(now)
            self._offset = 0
        if pair is None:
            return self._files.is_passing
        try:
            self._compare(pair)
        except NoSpaceError:
            self._pair = None
        except (CorruptionError, MediaError) as error:
            self.volume.watch(error)
            if self.volume.read_only:
                raise
            log.info("inode %d is not compared: %s", pair.inode.ino, error.message)
            self._pair = None
        if self._offset >= pair.inode.content.size:
            self._pair = None
        return True

    # --- which ------------------------------------------------------------------------------

    def _next(self, now: float) -> _Pair | None:
        """The next file that was not compared, and what it repeats. One search in one step: each
        looks at some hundred names.
        """
        inode = self._files.next(now, self._is_new)
        if inode is None:
            return None
        self._files.seen[inode.ino] = inode.commit_lsn
        like = max(self._candidates(inode), key=lambda each: each.commit_lsn, default=None)
        return None if like is None else _Pair(inode, like, (inode.commit_lsn, like.commit_lsn))

    def _is_new(self, inode: Inode) -> bool:
        is_large = inode.content.size >= _FILE_BYTES_MIN
        return is_large and self._files.seen.get(inode.ino) != inode.commit_lsn

    def _candidates(self, inode: Inode) -> Iterator[Inode]:
        """What a file may repeat."""
        for ino in self._beside(inode):
            other = self.volume.namespace.inodes.get(ino)
            if (
                other is not None
                and other is not inode
                and other.kind is FileKind.FILE
                and rests(other)
                and other.uid == inode.uid
                and other.commit_lsn < inode.commit_lsn
                and other.content.size == inode.content.size
            ):
                yield other

    def _beside(self, inode: Inode) -> Iterator[int]:
        """Inodes in the same directory, and of the same name in directories beside it: the newest
        names of each.
        """
        namespace = self.volume.namespace
        above = namespace.inodes.get(inode.parent)
        if above is None or above.entries is None:
            return
        yield from _last_of(above.entries)
        top = namespace.inodes.get(above.parent)
        if above.ino == ROOT_INO or top is None or top.entries is None:
            return
        for ino in _last_of(top.entries):
            directory = namespace.inodes.get(ino)
            if directory is not None and directory.entries is not None:
                found = directory.entries.get(inode.name)
                if found is not None:
                    yield found

    # --- comparing --------------------------------------------------------------------------

    def _compare(self, pair: _Pair) -> None:
        """Go on by one window; what is the same in it is kept once afterwards."""
        start, length = self._offset, min(_WINDOW_BYTES, pair.inode.content.size - self._offset)
        self._offset += length
        content, other = pair.inode.content, pair.like.content
        self._allowance.bytes_left -= 2 * _SAMPLES * _SAMPLE_BYTES
        if not self._may_share(pair, start, length) or not _looks_alike(
            content, other, start, length
        ):
            return
        self._allowance.bytes_left -= 2 * length
        same = _equal_blocks(content.read(start, length), other.read(start, length))
        moves = [
            move
            for first, end in _runs(same)
            for move in self._moves(
                content,
                other,
                start + first * _BLOCK_BYTES,
                min(start + end * _BLOCK_BYTES, start + length),
            )
        ]
        if moves:
            table = np.array(moves, dtype=MOVE_DTYPE)
            self.mover.share(table, pair.inode)
            self.shared_bytes += int(table["length"].sum())

    def _may_share(self, pair: _Pair, start: int, length: int) -> bool:
        """No other file has a part of the window, nobody fills an extent of it or of the other."""
        engine = self.volume.engine
        for inode in (pair.inode, pair.like):
            mapped, refs = inode.content.mapped(start, length)
            if not mapped or refs > _REFS_MAX:
                return False
        found = engine.live_ranges_of(pair.inode.content, start, length)
        ranges = found.ranges
        alone = (ranges["owner_count"] == 1) & (ranges["owner"] == pair.inode.ino)
        others = engine.live_ranges_of(pair.like.content, start, length)
        return bool(len(ranges) and alone.all() and not found.busy.any() and not others.busy.any())

    def _moves(
        self, content: FileMap, other: FileMap, start: int, end: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Which parts of extents become which, for bytes of a range that are the same."""
        ours, theirs = (c.export(start, end - start).tolist() for c in (content, other))
        while ours and theirs:  # the last of each: (file offset, length, extent, offset in it)
            mine, its = ours[-1], theirs[-1]
            first, last = max(mine[0], its[0]), min(mine[0] + mine[1], its[0] + its[1])
            source, target = ((ref[2], ref[3] + first - ref[0]) for ref in (mine, its))
            if first < last and source != target and self._keeps_place(first, source, target):
                yield *source, last - first, *target
            (ours if mine[0] >= its[0] else theirs).pop()

    def _keeps_place(self, offset: int, source: tuple[int, int], target: tuple[int, int]) -> bool:
        """Bytes that lie as in their file, by pages of some size, do so at their new place."""
        here, there = (self._media_offset(*place) - offset for place in (source, target))
        return all(there % size == 0 or here % size for size in _PAGE_BYTES)

    def _media_offset(self, extent_id: int, offset: int) -> int:
        info, _ = self.volume.engine.describe(extent_id)
        return int(info["media_offset"][0]) + offset


def _last_of(entries: dict[bytes, int]) -> Iterator[int]:
    """The newest names of a directory."""
    return itertools.islice(reversed(entries.values()), _BESIDE_MAX)


def _is_as_it_was(pair: _Pair) -> bool:
    commits = pair.inode.commit_lsn, pair.like.commit_lsn
    return commits == pair.commits and rests(pair.inode) and rests(pair.like)


def _looks_alike(content: FileMap, other: FileMap, start: int, length: int) -> bool:
    """Some sample of a window is the same in both."""
    step = max(length // _SAMPLES, 1)
    places = range(start, start + length, step)
    return any(
        content.read(at, _SAMPLE_BYTES, verify=False) == other.read(at, _SAMPLE_BYTES, verify=False)
        for at in places
    )


def _equal_blocks(ours: memoryview, theirs: memoryview) -> npt.NDArray[np.bool_]:
    """For each block of a window: all its bytes are the same."""
    differs = np.frombuffer(ours, np.uint8) != np.frombuffer(theirs, np.uint8)
    return ~np.logical_or.reduceat(differs, np.arange(0, len(differs), _BLOCK_BYTES))


def _runs(same: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """First block, and the one behind the last, of what is the same long enough."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], same, [False])).astype(np.int8)))
    for first, end in edges.reshape(-1, 2).tolist():
        if end - first >= _BLOCKS_MIN:
            yield first, end
